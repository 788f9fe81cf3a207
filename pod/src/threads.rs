//! How a pod's threads share the cores: the log's go first, those that encode files let all others go first; and how much of one
//! kind of work that blocks is done at a time.
//!
//! *Owns*: what is asked of the scheduler, on the calling thread. All of it may be refused: then things are slower.
//! *Does not own*: which threads there are.

use std::cell::Cell;
use std::sync::LazyLock;

use sluice_shared::lifecycle::blocking;
use tokio::sync::Semaphore;
use tokio::task::JoinError;

/// Work that holds a thread of the runtime's pool, so much of it at one time. That pool is bounded (512): where work of the one
/// kind could fill it, and waits for work of another kind that needs a thread too, all would wait for ever.
pub struct Crew(Semaphore);

impl Crew {
    /// Of so many.
    pub const fn of(places: usize) -> Self {
        Self(Semaphore::const_new(places))
    }

    /// Waits for a place, and begins the work: what is answered waits for its end. Where that is dropped the work goes on, and
    /// keeps its place.
    pub async fn begin<T: Send + 'static>(
        &'static self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, JoinError>> + Send {
        // It is never closed.
        let place = self.0.acquire().await.ok();
        blocking(move || {
            let done = work();
            drop(place);
            done
        })
    }
}

/// The shortest slice that the kernel knows, and the longest.
const SHORT_SLICE_NS: u64 = 100_000;
const LONG_SLICE_NS: u64 = 100_000_000;
/// How much nicer than the rest of the pod: of a core that both want it gets about a tenth.
const NICER_BY: i32 = 10;
const NICEST: i32 = 19;

/// An ordinary thread waits up to a scheduler tick (4 ms) for a busy core each time a flush returns. The reset on
/// fork keeps threads that this one may start from being real-time too. Whether it was granted.
#[allow(unsafe_code, reason = "there is no safe wrapper for sched_setscheduler among our dependencies")]
pub fn ask_for_real_time() -> bool {
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: 0 is the calling thread, and the parameters live through the call, which only reads them.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

/// Cores that this process may use, when it first asked: an answer reads files of the kernel's. One where that is not known.
pub fn cores() -> usize {
    static CORES: LazyLock<usize> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
    *CORES
}

/// For threads that hand on what is waited for: one that wakes takes the core at once from an ordinary thread, whatever that does
/// (short slices, Linux 6.12), in place of waiting for a slice of some milliseconds to end. It gets no more of the core.
pub fn hand_on() {
    ask(|attributes| {
        attributes.sched_policy = libc::SCHED_OTHER.unsigned_abs();
        attributes.sched_runtime = SHORT_SLICE_NS;
    });
}

/// For long computations: a thread that wakes takes the core from this one at once (batch policy, and the long slice of
/// Linux 6.12), in place of waiting for its slice to end; and where there is not enough for all, records are acked first and
/// committed later, until the pod's memory for what is not committed is used up. Asks once a thread.
pub fn give_way() {
    thread_local! { static ASKED: Cell<bool> = const { Cell::new(false) } }
    if ASKED.replace(true) {
        return;
    }
    ask(|attributes| {
        attributes.sched_policy = libc::SCHED_BATCH.unsigned_abs();
        attributes.sched_nice = (attributes.sched_nice + NICER_BY).min(NICEST);
        attributes.sched_runtime = LONG_SLICE_NS;
    });
}

/// Asks for what `set` makes of the thread's niceness. A kernel that does not know slices ignores them.
#[allow(unsafe_code, reason = "there is no safe wrapper for sched_setattr among our dependencies")]
fn ask(set: impl FnOnce(&mut libc::sched_attr)) {
    // SAFETY: zeros are valid in all fields.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    attributes.size = u32::try_from(size_of::<libc::sched_attr>()).unwrap_or(0);
    // SAFETY: takes and gives plain numbers; 0 is the calling thread.
    attributes.sched_nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    set(&mut attributes);
    // SAFETY: 0 is the calling thread, and the attributes live through the call, which only reads them.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::runtime::{Builder, Handle};
    use tokio::task::{JoinSet, spawn_blocking};
    use tokio::time::timeout;

    use super::*;

    /// Each holds one of four threads while it waits for another one of them.
    #[test]
    fn work_that_waits_for_the_pool_leaves_it_room() {
        static CREW: Crew = Crew::of(3);
        let runtime =
            Builder::new_multi_thread().worker_threads(2).max_blocking_threads(4).enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let mut works = JoinSet::new();
            for number in 0..100 {
                let here = Handle::current();
                let work = move || here.block_on(spawn_blocking(move || number)).expect("it counts");
                works.spawn(async move { CREW.begin(work).await.await.expect("it waits") });
            }
            let done =
                timeout(Duration::from_secs(60), works.join_all()).await.expect("all have come to their end");
            assert_eq!(done.iter().sum::<i32>(), 4950);
        });
    }
}
