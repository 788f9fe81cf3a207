//! The log's work done by tasks, on a disk whose pace is made up: for simulations, which have neither threads nor a clock.
//!
//! The steps are those of the threads (`writer.rs`, `keeper.rs`); what lies between them is time in which a crash can
//! come: before a group is written, while a part of it stands on the disk, and after it is flushed and nobody knows.
//!
//! *Owns*: the order of steps, where time passes.
//! *Does not own*: what a step does (`writer.rs`, `keeper.rs`, `disk.rs`).

use std::sync::Arc;
use std::time::Duration;

use sluice_shared::lifecycle::TaskScope;

use super::WalError;
use super::disk::WRITERS;
use super::keeper::{self, Chore};
use super::segment::BLOCK;
use super::writer::{Formed, Scratch, Shared, Taken};

/// How a group gets to the disk.
#[derive(Debug, Clone, Copy, Default)]
pub struct Passage {
    /// Until it begins to be written.
    pub begins_after: Duration,
    /// Blocks of it that stand on the disk meanwhile.
    pub torn_blocks: usize,
    /// From then until all of it is flushed.
    pub flushed_after: Duration,
    /// From then until the log hears of it.
    pub told_after: Duration,
    /// The flush fails.
    pub fails: bool,
    /// The log hears of it before it is written: no disk does so, but a rig that looks for loss has to find it.
    pub lies: bool,
}

/// A disk: tells how a group of so many bytes passes.
pub type Pace = Arc<dyn Fn(usize) -> Passage + Send + Sync>;

/// Starts the writers and the keeper as tasks.
pub(super) fn start(shared: &Arc<Shared>, pace: &Pace, scope: &TaskScope) {
    for writer in 0..WRITERS {
        scope.spawn("log writer", write(Arc::clone(shared), writer, Arc::clone(pace)));
    }
    scope.spawn("log keeper", keep(Arc::clone(shared)));
}

async fn write(shared: Arc<Shared>, writer: usize, pace: Pace) {
    let mut scratch = Scratch::new();
    loop {
        match shared.try_form(&mut scratch) {
            Formed::Group((taken, bytes)) => {
                let passage = pace(bytes);
                if let Err(error) = put(&shared, writer, &taken, scratch.buffer.bytes(bytes), passage).await {
                    shared.fail(&error);
                }
            }
            Formed::Nothing => shared.work.rung().await,
            Formed::End => break,
        }
    }
    shared.writer_ended();
}

async fn put(
    shared: &Arc<Shared>,
    writer: usize,
    taken: &Taken,
    blocks: &[u8],
    passage: Passage,
) -> Result<(), WalError> {
    let group = taken.place.chain.group;
    if passage.lies {
        shared.complete(group);
    }
    tokio::time::sleep(passage.begins_after).await;
    let torn = (passage.torn_blocks * BLOCK).min(blocks.len());
    taken.file.write(writer, &blocks[..torn], taken.offset())?;
    tokio::time::sleep(passage.flushed_after).await;
    if passage.fails {
        return Err(taken.file.flush_failed());
    }
    taken.file.write(writer, blocks, taken.offset())?;
    tokio::time::sleep(passage.told_after).await;
    if !passage.lies {
        shared.complete(group);
    }
    Ok(())
}

/// The directory is free for the next life once this one's tasks are dropped, whoever still holds the log then.
struct Lock(Arc<Shared>);

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.disk.unlock();
    }
}

async fn keep(shared: Arc<Shared>) {
    let _lock = Lock(Arc::clone(&shared));
    loop {
        let chore = keeper::chore(&shared.lock());
        match chore {
            Some(Chore::End) => break,
            Some(chore) => keeper::do_chore(&shared, chore),
            None => wait_for_chore(&shared).await,
        }
    }
    keeper::end(&shared);
}

async fn wait_for_chore(shared: &Shared) {
    let most = shared.lock().chore_wait();
    if tokio::time::timeout(most, shared.chores.rung()).await.is_err() {
        shared.lock().chores_due();
    }
}
