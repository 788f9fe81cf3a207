//! The keeper of segments: makes one ahead of its use, takes those away whose entries are all released, and says beside them
//! what a start has to find.
//!
//! *Owns*: the thread that does so, the limit in bytes, what happens on a full disk. No group waits for it, unless for a segment.
//! *Does not own*: which entries are released (`writer.rs`), files (`disk.rs`).
//! Keeps P7: the log's files never take more than `bytes_max` together.

use std::sync::Arc;

use sluice_shared::fault::{self, Point};

use super::WalError;
use super::bounds::Bounds;
use super::disk::is_full;
use super::writer::{Ending, Shared, State};

/// Spare files kept for later segments; writing zeros costs as much as writing entries.
pub(super) const SPARES_MAX: usize = 8;

/// What the keeper does next.
pub(super) enum Chore {
    /// Take the oldest segment away.
    Retire(u64),
    /// Make a segment ahead.
    Make,
    /// Say how far the log is durable.
    Mark,
    /// The writers have ended.
    End,
}

/// Runs until the writers have ended.
pub(super) fn run(shared: &Arc<Shared>) {
    loop {
        match next_chore(shared) {
            Chore::End => break,
            chore => do_chore(shared, chore),
        }
    }
    end(shared);
}

/// Lets others have the directory, once the writers have ended. What was written until then is missed where it is gone.
pub(super) fn end(shared: &Shared) {
    let state = shared.lock();
    let is_due = state.ending == Ending::Closing && state.durable > state.marked;
    drop(state);
    if is_due && let Err(error) = mark(shared, |_| ()) {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(
            error,
            "how far the log is durable could not be said: its last groups are not missed where they are lost"
        );
    }
    shared.disk.unlock();
    shared.ended.send_replace(true);
}

pub(super) fn do_chore(shared: &Shared, chore: Chore) {
    let done = match chore {
        Chore::Retire(segment) => retire(shared, segment),
        Chore::Make => make(shared),
        Chore::Mark => mark(shared, |_| ()),
        Chore::End => Ok(()),
    };
    if let Err(error) = done {
        shared.fail(&error);
    }
}

fn next_chore(shared: &Shared) -> Chore {
    let mut state = shared.lock();
    loop {
        if let Some(chore) = chore(&state) {
            return chore;
        }
        state = shared.wait_for_chore(state);
    }
}

/// Trimming comes first, since it makes the room that a new segment takes.
pub(super) fn chore(state: &State) -> Option<Chore> {
    let failed = state.ending == Ending::Failed;
    let trimmable = state.trimmable().filter(|_| !failed);
    let wanted = state.next.is_none() && (!state.no_room || state.retry_room);
    match trimmable {
        Some(segment) => Some(Chore::Retire(segment)),
        None if state.writers == 0 => Some(Chore::End),
        None if failed => None,
        None if wanted => Some(Chore::Make),
        None => (state.mark_due && state.durable > state.marked).then_some(Chore::Mark),
    }
}

/// Says durably which segments have to be there, and how far the log is durable by now.
fn mark(shared: &Shared, change: impl FnOnce(&mut Bounds)) -> Result<(), WalError> {
    let durable = shared.lock().durable;
    shared.disk.change_bounds(|bounds| {
        change(bounds);
        bounds.reach(shared.epoch, durable);
    })?;
    let mut state = shared.lock();
    state.marked = durable;
    state.mark_due = false;
    Ok(())
}

fn pass(shared: &Shared, point: Point, segment: u64) -> Result<(), WalError> {
    let path = shared.disk.segment_path(segment);
    fault::hit(point).map_err(|source| WalError::Io { action: "retire", path, source })
}

/// The file stays as a spare one where it is of use.
fn retire(shared: &Shared, segment: u64) -> Result<(), WalError> {
    pass(shared, Point::TrimBefore, segment)?;
    let mut state = shared.lock();
    let spare = state.take_spare_number();
    let bytes = state.live.get(&segment).map_or(0, |live| live.bytes);
    let keep = bytes == shared.segment_bytes && state.spares.len() < SPARES_MAX;
    let oldest = state.oldest_after(segment);
    drop(state);
    // Before: a segment that has to be there and is not is damage.
    mark(shared, |bounds| bounds.release(oldest))?;
    shared.disk.retire(segment, spare)?;
    if !keep {
        shared.disk.remove_spare(spare)?;
    }
    pass(shared, Point::TrimAfter, segment)?;
    let mut state = shared.lock();
    // Only now, with the file durably gone, may `trimmed` say so: what is trimmed never comes back.
    state.live.remove(&segment);
    if keep {
        state.spares.push(spare);
    }
    state.retry_room = true;
    Ok(())
}

/// Makes the next segment out of a spare file, new where there is none and room for one.
fn make(shared: &Shared) -> Result<(), WalError> {
    let (spare, segment) = {
        let mut state = shared.lock();
        state.retry_room = false;
        (state.spares.pop(), state.next_segment)
    };
    let spare = match spare {
        Some(spare) => Some(spare),
        None => create(shared)?,
    };
    let Some(spare) = spare else {
        let mut state = shared.lock();
        state.no_room = true;
        shared.show_gate(&state);
        return Ok(());
    };
    let file = shared.disk.adopt_spare(spare, &shared.header(segment, None))?;
    // Before it is used: a segment without this mark holds nothing.
    mark(shared, |bounds| bounds.make(shared.epoch, segment))?;
    shared.segment_made(file);
    Ok(())
}

/// None where there is no room, by the limit or on the disk.
fn create(shared: &Shared) -> Result<Option<u64>, WalError> {
    let mut state = shared.lock();
    if state.file_bytes(shared.segment_bytes) + shared.segment_bytes > shared.bytes_max {
        return Ok(None);
    }
    let spare = state.take_spare_number();
    let told = state.no_room;
    drop(state);
    match shared.disk.create_spare(spare, shared.segment_bytes) {
        Ok(()) => Ok(Some(spare)),
        Err(WalError::Io { path, source, .. }) if is_full(&source) => {
            if !told {
                let error = &source as &dyn std::error::Error;
                tracing::warn!(path = %path.display(), error, "no room for the next log segment: trying again each second");
            }
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl State {
    /// The oldest segment that is there once this one is gone.
    fn oldest_after(&self, segment: u64) -> Option<u64> {
        let live = self.live.range(segment + 1..).map(|(number, _)| *number).next();
        live.or_else(|| self.next.as_ref().map(|next| next.number))
    }

    fn take_spare_number(&mut self) -> u64 {
        self.spare_number += 1;
        self.spare_number - 1
    }
}
