//! Where delta_kernel's futures run while a thread waits for them.
//!
//! *Owns*: the choice between the runtime's threads and the caller's own.
//! *Does not own*: what the kernel asks of its store (`delta`).

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use delta_kernel::KernelResult;
use delta_kernel_default_engine::executor::TaskExecutor;
use delta_kernel_default_engine::executor::tokio::TokioMultiThreadExecutor;
use futures_util::future::BoxFuture;
use sluice_shared::lifecycle::is_on_one_thread;
use tokio::runtime::Handle;

/// A future that is still not ready after so many looks waits for something that only another task can bring.
const LOOKS_MAX: u32 = 1_000_000;

/// Runs the kernel's futures.
pub(super) enum Executor {
    /// On the runtime, while a thread of its blocking pool waits.
    Threads(TokioMultiThreadExecutor),
    /// Where they are waited for: for a store that answers at once.
    InPlace,
}

impl Executor {
    /// What suits the runtime that this is called in.
    pub(super) fn here() -> Self {
        if is_on_one_thread() {
            return Self::InPlace;
        }
        Self::Threads(TokioMultiThreadExecutor::new(Handle::current()))
    }
}

fn run_to_end<F: Future>(future: F) -> F::Output {
    let (mut future, mut context) = (pin!(future), Context::from_waker(Waker::noop()));
    for _ in 0..LOOKS_MAX {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
    unreachable!("a store on one thread answers the kernel at once: it was told to (`Stores::kernels`)")
}

impl TaskExecutor for Executor {
    type Guard<'a> = Option<tokio::runtime::EnterGuard<'a>>;

    fn block_on<T>(&self, task: T) -> T::Output
    where
        T: Future + Send + 'static,
        T::Output: Send + 'static,
    {
        match self {
            Self::Threads(threads) => threads.block_on(task),
            Self::InPlace => run_to_end(task),
        }
    }

    fn spawn<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        match self {
            Self::Threads(threads) => threads.spawn(task),
            Self::InPlace => run_to_end(task),
        }
    }

    fn spawn_blocking<T, R>(&self, task: T) -> BoxFuture<'_, KernelResult<R>>
    where
        T: FnOnce() -> R + Send + 'static,
        R: Send + 'static,
    {
        match self {
            Self::Threads(threads) => threads.spawn_blocking(task),
            Self::InPlace => Box::pin(std::future::ready(Ok(task()))),
        }
    }

    fn enter(&self) -> Self::Guard<'_> {
        match self {
            Self::Threads(threads) => Some(threads.enter()),
            Self::InPlace => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_thread_waits_in_place() {
        let executor = Executor::here();
        assert!(matches!(executor, Executor::InPlace));
        let steps = async {
            tokio::task::yield_now().await;
            7
        };
        assert_eq!(executor.block_on(steps), 7);
    }
}
