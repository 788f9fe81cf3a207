//! Wakes tasks at the moment that they asked for. The runtime's own timers round up to the next millisecond, and that would
//! stand in each latency.
//!
//! *Owns*: one thread that sleeps until the next moment.
//! *Does not own*: what is due when (`source`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::oneshot;

/// Cheap to clone. Its thread ends with the last of them.
#[derive(Debug, Clone)]
pub(crate) struct Timer {
    asked: Arc<Asked>,
    _ends: Arc<Ends>,
}

#[derive(Debug, Default)]
struct Asked {
    moments: Mutex<BinaryHeap<Reverse<Moment>>>,
    changed: Condvar,
    is_over: AtomicBool,
}

#[derive(Debug)]
struct Moment {
    at: Instant,
    wake: oneshot::Sender<()>,
}

impl PartialEq for Moment {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Moment {}

impl PartialOrd for Moment {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Moment {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

#[derive(Debug)]
struct Ends(Arc<Asked>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
        self.0.changed.notify_all();
    }
}

impl Timer {
    /// Starts the thread.
    pub(crate) fn start() -> Self {
        let asked = Arc::new(Asked::default());
        let sleeper = Arc::clone(&asked);
        std::thread::spawn(move || sleeper.run());
        Self { _ends: Arc::new(Ends(Arc::clone(&asked))), asked }
    }

    /// Waits until then.
    pub(crate) async fn sleep_until(&self, at: Instant) {
        if at <= Instant::now() {
            return;
        }
        let (wake, woken) = oneshot::channel();
        {
            let mut moments = self.asked.moments.lock().unwrap_or_else(PoisonError::into_inner);
            let is_next = moments.peek().is_none_or(|Reverse(next)| at < next.at);
            moments.push(Reverse(Moment { at, wake }));
            if is_next {
                self.asked.changed.notify_one();
            }
        }
        // The thread lives as long as this timer.
        let _ = woken.await;
    }
}

impl Asked {
    fn run(&self) {
        let mut moments = self.moments.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_over.load(Ordering::Relaxed) {
            let now = Instant::now();
            while moments.peek().is_some_and(|Reverse(next)| next.at <= now) {
                let Some(Reverse(moment)) = moments.pop() else { break };
                // Whoever asked may have gone.
                let _ = moment.wake.send(());
            }
            moments = match moments.peek() {
                Some(Reverse(next)) => {
                    let wait = next.at.saturating_duration_since(now);
                    self.changed.wait_timeout(moments, wait).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(moments).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn moments_come_in_their_order_and_not_before() {
        let (timer, began) = (Timer::start(), Instant::now());
        let sleep = |ms| {
            let timer = timer.clone();
            async move {
                let at = began + Duration::from_millis(ms);
                timer.sleep_until(at).await;
                assert!(Instant::now() >= at);
                Instant::now()
            }
        };
        let (late, soon, past) = tokio::join!(sleep(30), sleep(10), sleep(0));
        assert!(past <= soon && soon <= late);
    }
}
