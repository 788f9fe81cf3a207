//! A program without fault points: every pass is constant, and the optimiser leaves nothing of it.
//!
//! *Owns*: nothing.
//! *Does not own*: what there would be (`fault::on`).

use std::io;

use super::{Action, Bug, Point};
use crate::ids::WalPosition;

/// The faults of one part of a program: there are none.
#[derive(Debug, Clone, Default)]
pub struct Faults;

impl Faults {
    /// A pass at a point.
    ///
    /// # Errors
    /// Never.
    #[inline(always)]
    pub const fn hit(&self, _: Point, _: WalPosition) -> io::Result<()> {
        Ok(())
    }
}

/// A pass at a point.
///
/// # Errors
/// Never.
#[inline(always)]
pub const fn hit(_: Point) -> io::Result<()> {
    Ok(())
}

/// A pass at a point whose caller does itself what is to happen: nothing.
#[inline(always)]
pub const fn take(_: Point) -> Option<Action> {
    None
}

/// Whether a bug is there: it is not.
#[inline(always)]
pub const fn has(_: Bug) -> bool {
    false
}

/// By how many milliseconds the wall clock is wrong.
#[inline(always)]
pub const fn clock_ms() -> i64 {
    0
}

// Known when it is compiled, and so gone when it has been.
const _: () = {
    let passed = hit(Point::WalWriteBefore);
    assert!(matches!(passed, Ok(())) && take(Point::Frame).is_none());
    std::mem::forget(passed);
    assert!(!has(Bug::AckBeforeFlush) && clock_ms() == 0 && !super::COMPILED_IN);
};
