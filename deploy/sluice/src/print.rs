//! Lines for people, on standard output and standard error.
//!
//! *Owns*: writing when nobody reads any more: `sluice tables | head` ends quietly, and a load goes on to its end.
//! *Does not own*: log lines (`sluice_shared::telemetry`), the progress of `send` on a terminal.

use std::fmt::Display;
use std::io::{self, Write};

use anyhow::{Context, Result};

/// Writes a line of a command's answer. A reader that has gone away wants no more: that is no failure.
///
/// # Errors
/// Standard output cannot be written for another reason: the answer is lost.
pub(crate) fn answer(line: impl Display) -> Result<()> {
    ended(writeln!(io::stdout().lock(), "{line}")).context("cannot write to standard output")
}

/// Writes a line that goes beside the answer. There is no place left to complain where this fails.
pub(crate) fn note(line: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

fn ended(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_and_a_reader_that_left_is_not() {
        assert!(ended(Err(io::ErrorKind::BrokenPipe.into())).is_ok());
        assert!(ended(Err(io::ErrorKind::StorageFull.into())).is_err());
    }
}
