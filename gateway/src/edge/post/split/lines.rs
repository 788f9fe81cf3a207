//! One JSON record a line.
//!
//! *Owns*: the line that has begun. A core.
//! *Does not own*: frames (`split`).

use bytes::{Bytes, BytesMut};
use sluice_shared::error::Error;

use super::Ready;

/// Cuts lines; those that come whole are not copied.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// The line that has begun.
    rest: BytesMut,
}

impl Lines {
    pub(super) fn push(&mut self, mut piece: Bytes, ready: &mut Ready) -> Result<(), Error> {
        if !self.rest.is_empty() {
            let end = memchr::memchr(b'\n', &piece);
            let line = piece.split_to(end.map_or(piece.len(), |end| end + 1));
            ready.check_record(self.rest.len() + line.len() - usize::from(end.is_some()))?;
            self.rest.extend_from_slice(&line);
            if end.is_none() {
                return Ok(());
            }
            ready.push_lines(self.rest.split().freeze());
        }
        while let Some(end) = lines_end(&piece, ready.frame_bytes()) {
            if end > ready.frame_bytes() {
                ready.check_record(end - 1)?;
            }
            ready.push_lines(piece.split_to(end));
        }
        ready.check_record(piece.len())?;
        self.rest.extend_from_slice(&piece);
        Ok(())
    }

    pub(super) fn finish(&mut self, ready: &mut Ready) -> Result<(), Error> {
        ready.push_lines(self.rest.split().freeze());
        Ok(())
    }
}

/// Where the last line ends that does so within `bytes_max`; else where the first one does.
fn lines_end(text: &[u8], bytes_max: usize) -> Option<usize> {
    let (near, far) = text.split_at(bytes_max.min(text.len()));
    let end = memchr::memrchr(b'\n', near);
    end.or_else(|| memchr::memchr(b'\n', far).map(|at| near.len() + at)).map(|at| at + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Splitter;
    use super::super::tests::{check_cuts, records};

    fn check(body: &str, expected: &[&str]) {
        let expected = (expected.iter().map(|line| (*line).to_owned()).collect(), None);
        assert_eq!(records(Splitter::lines(), &[body.as_bytes()]), expected);
    }

    #[test]
    fn lines_that_are_not_blank_are_records() {
        check("", &[]);
        check(" \n\r\n", &[]);
        check("{}\n\n{\"a\":1}\r\nnot json", &["{}", "{\"a\":1}\r", "not json"]);
    }

    proptest! {
        #[test]
        fn pieces_do_not_show(body in "[a{}\" \r\n]{0,60}", places in prop::collection::vec(any::<usize>(), 0..9)) {
            check_cuts(Splitter::lines, body.as_bytes(), &places);
        }
    }
}
