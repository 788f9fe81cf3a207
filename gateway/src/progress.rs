//! Something that has to move on while it is waited for: a frame that has begun, a socket that takes bytes.
//!
//! *Owns*: the deadline, and what counts as moving on.
//! *Does not own*: what is waited for.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// Bytes that a frame which has begun has to bring within each read timeout, unless it ends: some 550 bytes a second with
/// the default. One byte now and then is no progress.
pub(crate) const FRAME_STEP_BYTES: u64 = 16 << 10;

/// A deadline that is looked at so long after it has passed says nothing.
const LATE: Duration = Duration::from_secs(1);

/// A deadline that moves on with what is waited for. It is looked at when it passes and not before, so that waiting costs
/// one timer however often it begins anew; what stands still is overdue after one to two timeouts.
pub(crate) struct Progress {
    timeout: Duration,
    /// By how much the count has to rise.
    step: u64,
    /// The deadline, and the count when it was set.
    waiting: Option<(Pin<Box<Sleep>>, u64)>,
}

impl Progress {
    /// Within each `timeout` the count has to rise by `step`.
    pub(crate) fn new(timeout: Duration, step: u64) -> Self {
        Self { timeout, step, waiting: None }
    }

    /// Ready when it is overdue: `count` has not risen enough. `excused`: somebody else is to blame for that.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, count: u64, excused: bool) -> Poll<()> {
        let timeout = self.timeout;
        let (deadline, before) = self.waiting.get_or_insert_with(|| (Box::pin(sleep(timeout)), count));
        loop {
            ready!(deadline.as_mut().poll(cx));
            // Long past it: nobody waited, or the whole process stood still.
            let unwatched = Instant::now() > deadline.deadline() + LATE;
            if count.saturating_sub(*before) < self.step && !excused && !unwatched {
                return Poll::Ready(());
            }
            *before = count;
            deadline.as_mut().reset(Instant::now() + timeout);
        }
    }

    /// It is not waited for.
    pub(crate) fn rest(&mut self) {
        self.waiting = None;
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::timeout;

    use super::*;

    /// Of a clock that stands still but for who waits.
    const TIMEOUT: Duration = Duration::from_secs(20);

    /// Resolves when it is overdue.
    async fn overdue(progress: &mut Progress, excused: bool, mut count: impl FnMut() -> u64) {
        poll_fn(|cx| progress.poll(cx, count(), excused)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_moves_too_little_is_overdue_and_not_before_its_time() {
        let mut progress = Progress::new(TIMEOUT, 100);
        let began = Instant::now();
        let mut count = 0;
        let slowly = || {
            count += 99;
            count
        };
        overdue(&mut progress, false, slowly).await;
        assert!(began.elapsed() >= TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn what_moves_on_or_is_excused_is_never_overdue() {
        let mut progress = Progress::new(TIMEOUT, 100);
        let mut count = 0;
        let enough = || {
            count += 100;
            count
        };
        assert!(timeout(5 * TIMEOUT, overdue(&mut progress, false, enough)).await.is_err());
        let mut progress = Progress::new(TIMEOUT, 100);
        assert!(timeout(5 * TIMEOUT, overdue(&mut progress, true, || 0)).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nobody_waits_does_not_count() {
        let mut progress = Progress::new(TIMEOUT, 1);
        assert!(timeout(TIMEOUT / 2, overdue(&mut progress, false, || 0)).await.is_err());
        progress.rest();
        let began = Instant::now();
        overdue(&mut progress, false, || 0).await;
        assert!(began.elapsed() >= TIMEOUT);
    }
}
