//! When to try again after a failure: exponential backoff with full jitter, and an end to it.
//!
//! Full jitter (a uniform wait between zero and the exponential bound) spreads the producers of a lost gateway
//! best: M. Brooker, "Exponential Backoff And Jitter", 2015.
//!
//! *Owns*: the policy and its state. A core: time and randomness come from the caller.
//! *Does not own*: which failures are worth it (`error`), what counts as progress (`task`).

use std::time::Duration;

/// How a stream goes on after failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Bound of the first wait; doubles with each failure without progress.
    pub wait_min: Duration,
    /// Largest bound of a wait.
    pub wait_max: Duration,
    /// A stream that has made no progress for so long since a failure ends with an error.
    pub give_up_after: Duration,
    /// The same for the first opening, where a person is likely to wait.
    pub give_up_opening_after: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            wait_min: Duration::from_millis(50),
            wait_max: Duration::from_secs(5),
            give_up_after: Duration::from_secs(300),
            give_up_opening_after: Duration::from_secs(10),
        }
    }
}

/// Failures since the last progress.
#[derive(Debug)]
pub(crate) struct Backoff {
    policy: RetryPolicy,
    opened: bool,
    failures: u32,
    stalled_since: Option<Duration>,
}

/// What to do after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Try again after this.
    Wait(Duration),
    /// Nothing has moved for this long: enough.
    GiveUp(Duration),
}

/// A time without progress since a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stall {
    pub(crate) lasts: Duration,
    pub(crate) gives_up_in: Duration,
}

impl Backoff {
    pub(crate) fn new(policy: RetryPolicy) -> Self {
        Self { policy, opened: false, failures: 0, stalled_since: None }
    }

    /// How long nothing has moved at `now`, and how long that may go on. None while nothing has failed.
    pub(crate) fn stall(&self, now: Duration) -> Option<Stall> {
        let lasts = now.saturating_sub(self.stalled_since?);
        Some(Stall { lasts, gives_up_in: self.patience().saturating_sub(lasts) })
    }

    fn patience(&self) -> Duration {
        if self.opened { self.policy.give_up_after } else { self.policy.give_up_opening_after }
    }

    /// The stream has been opened: from now on the longer patience holds.
    pub(crate) fn opened(&mut self) {
        if !self.opened {
            self.opened = true;
            self.progress();
        }
    }

    /// Something moved: what failed before is forgotten.
    pub(crate) fn progress(&mut self) {
        self.failures = 0;
        self.stalled_since = None;
    }

    /// A failure at `now` (any clock that does not go back). `uniform` is a random number in `0.0..1.0`;
    /// `at_least` is what the gateway asked for.
    pub(crate) fn failed(&mut self, now: Duration, uniform: f64, at_least: Duration) -> Next {
        let stalled = now.saturating_sub(*self.stalled_since.get_or_insert(now));
        let patience = self.patience();
        if stalled >= patience {
            return Next::GiveUp(stalled);
        }
        let bound = self.policy.wait_min.saturating_mul(1 << self.failures.min(16)).min(self.policy.wait_max);
        self.failures = self.failures.saturating_add(1);
        let wait = at_least.saturating_add(bound.mul_f64(uniform.clamp(0.0, 1.0)));
        Next::Wait(wait.min(patience.saturating_sub(stalled)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn waits_double_up_to_their_bound() {
        let mut backoff = Backoff::new(RetryPolicy::default());
        backoff.opened();
        let waits: Vec<Next> = (0..9).map(|_| backoff.failed(ms(0), 1.0, ms(0))).collect();
        let expected = [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000].map(|n| Next::Wait(ms(n)));
        assert_eq!(waits, expected);
    }

    #[test]
    fn progress_starts_over() {
        let mut backoff = Backoff::new(RetryPolicy::default());
        backoff.opened();
        for _ in 0..5 {
            backoff.failed(ms(0), 1.0, ms(0));
        }
        backoff.progress();
        assert_eq!(backoff.failed(ms(299_999), 1.0, ms(0)), Next::Wait(ms(50)));
        assert_eq!(backoff.failed(ms(599_999), 1.0, ms(0)), Next::GiveUp(ms(300_000)));
    }

    #[test]
    fn a_stall_lasts_from_the_first_failure_to_the_next_progress() {
        let mut backoff = Backoff::new(RetryPolicy::default());
        backoff.opened();
        assert_eq!(backoff.stall(ms(1000)), None);
        backoff.failed(ms(1000), 1.0, ms(0));
        backoff.failed(ms(3000), 1.0, ms(0));
        assert_eq!(backoff.stall(ms(4000)), Some(Stall { lasts: ms(3000), gives_up_in: ms(297_000) }));
        backoff.progress();
        assert_eq!(backoff.stall(ms(5000)), None);
    }

    #[test]
    fn opening_is_given_up_sooner() {
        let mut backoff = Backoff::new(RetryPolicy::default());
        assert_eq!(backoff.failed(ms(0), 0.0, ms(0)), Next::Wait(ms(0)));
        assert_eq!(backoff.failed(ms(10_000), 0.0, ms(0)), Next::GiveUp(ms(10_000)));
    }

    #[test]
    fn the_gateway_may_ask_for_a_longer_wait() {
        let mut backoff = Backoff::new(RetryPolicy::default());
        backoff.opened();
        assert_eq!(backoff.failed(ms(0), 0.0, ms(1500)), Next::Wait(ms(1500)));
    }

    proptest! {
        #[test]
        fn it_ends_within_its_patience(uniform in proptest::collection::vec(0.0..1.0f64, 1..2000)) {
            let policy = RetryPolicy::default();
            let mut backoff = Backoff::new(policy);
            backoff.opened();
            let mut now = ms(7);
            for uniform in uniform {
                match backoff.failed(now, uniform, ms(0)) {
                    Next::Wait(wait) => {
                        prop_assert!(wait <= policy.wait_max);
                        now += wait;
                        prop_assert!(now <= ms(7) + policy.give_up_after);
                    }
                    Next::GiveUp(stalled) => {
                        prop_assert!(stalled >= policy.give_up_after);
                        break;
                    }
                }
            }
        }
    }
}
