//! Giving up records that no log has any more: a stream's mark passes over them, as it does over refused ones.
//!
//! They go into the table as a run does whose records were all refused: first each is named in `<table>__rejected`, as
//! `released`, then the home commits the run, which has no rows. So the prefix rule judges it, a version of the table says
//! that it is so, and what comes of these records after all is a replay of what is there. No log is needed: one that is
//! full of what waits would have no room.
//!
//! *Owns*: the steps of that.
//! *Does not own*: whether the records may still come (`release`), the rule (`watermark`), the commit (`home`).
//! Keeps P2: each version has each stream up to some offset, less what was refused or given up by name.

use futures_util::future::join_all;
use sluice_shared::error::Error;
use sluice_shared::ids::{OffsetRange, StreamId, TableId, TableName};

use super::home::{CommitRequest, HomeError, Outcome};
use super::rejected::{self, Rejects};
use super::route::{Known, Routed};
use super::watermark::{RunKey, Verdict, WatermarkMap, judge};
use super::{Tables, home_error, storage};
use crate::stream::record::Records;

/// Offsets that one version gives up: each is a row of the rejected table, which is made in memory.
const AT_ONCE_MAX: u64 = 50_000;
/// Streams whose records are changed at one time.
const NOTES_AT_ONCE: usize = 16;
/// Answers in a row by which it has to be tried again.
const TRIES_MAX: u32 = 20;

impl Tables {
    /// The table as it stands in the store, and how far its streams are: also where it was made anew behind this pod.
    ///
    /// # Errors
    /// As `open`.
    pub async fn newest(&self, name: &TableName) -> Result<(TableId, std::sync::Arc<WatermarkMap>), Error> {
        let table = self.look(name).await?;
        let view = match table.home.reload().await {
            Err(HomeError::Stopped(error)) => {
                table.stop(&error);
                self.look(name).await?.home.reload().await.map_err(home_error)?
            }
            read => read.map_err(home_error)?,
        };
        Ok((view.version.shape.id.clone(), view.map))
    }

    /// Gives up the records of gaps, which are each of another stream. Answers of each up to where that was done: to its
    /// end, or not so far and why: the stream has moved meanwhile, or storage fails. `why` stands beside each record.
    pub async fn give_up(
        &self,
        name: &TableName,
        id: &TableId,
        gaps: &[RunKey],
        why: &str,
    ) -> Vec<(u64, Option<Error>)> {
        let mut reached: Vec<_> = gaps.iter().map(|gap| (gap.start, None)).collect();
        for batch in batches(gaps) {
            let mut parts: Vec<_> = batch.into_iter().filter(|(gap, _)| reached[*gap].1.is_none()).collect();
            let outcome = self.give_up_parts(name, id, &mut parts, &mut reached, why).await;
            if outcome.is_ok() {
                self.note_given_up(name, &parts).await;
            }
            for (gap, part) in parts {
                match &outcome {
                    Ok(()) => reached[gap].0 = part.end,
                    Err(error) => reached[gap].1 = Some(error.clone()),
                }
            }
            if outcome.is_err() {
                break;
            }
        }
        // What was not tried any more failed by what came before.
        let failed = reached.iter().find_map(|(_, error)| error.clone());
        for ((end, error), gap) in reached.iter_mut().zip(gaps) {
            if *end < gap.end && error.is_none() {
                *error = failed.clone();
            }
        }
        reached
    }

    /// So that a producer who sends them again is told, as of any record that is refused.
    async fn note_given_up(&self, table: &TableName, parts: &[(usize, RunKey)]) {
        let mut notes = Vec::new();
        for (_, part) in parts {
            notes.extend(part.stream.name().map(|name| {
                let records = Records::new(self.place(table), name);
                note(records, part.stream.clone(), OffsetRange { start: part.start, end: part.end })
            }));
        }
        while !notes.is_empty() {
            let rest = notes.split_off(NOTES_AT_ONCE.min(notes.len()));
            join_all(std::mem::replace(&mut notes, rest)).await;
        }
    }

    /// One version that gives up parts of gaps. Takes those out of `parts` whose streams have moved.
    async fn give_up_parts(
        &self,
        name: &TableName,
        id: &TableId,
        parts: &mut Vec<(usize, RunKey)>,
        reached: &mut [(u64, Option<Error>)],
        why: &str,
    ) -> Result<(), Error> {
        let table = self.look(name).await?;
        let mut is_offered = false;
        for _ in 0..TRIES_MAX {
            let view = table.home.reload().await.map_err(home_error)?;
            if view.version.shape.id != *id {
                let message =
                    format!("table {name} was made anew meanwhile: what waited for the old one is stranded");
                return Err(Error::not_found("table_replaced", message));
            }
            let mut open = Vec::new();
            parts.retain(|(gap, part)| {
                match judge(view.map.mark(&part.stream), part) {
                    Verdict::Commit => open.push(part.clone()),
                    // The answer to our own commit was lost.
                    Verdict::Duplicate if is_offered => {}
                    _ => {
                        reached[*gap].1 = Some(has_moved(name, part, view.map.next(&part.stream)));
                        return false;
                    }
                }
                true
            });
            if open.is_empty() {
                return Ok(());
            }
            let mut rejects = Rejects::default();
            for part in &open {
                let offsets = OffsetRange { start: part.start, end: part.end };
                rejects.release(&part.stream, part.session, offsets, why);
            }
            let config = &table.home_config;
            let directory = config.directory.as_ref().to_owned() + rejected::SUFFIX;
            let appended = rejected::append(&config.delta, &config.store, &directory.into(), &rejects).await;
            appended.map_err(|error| storage(&format!("name what is given up of table {name}"), &error))?;
            let known = Known::from(&view);
            let runs = open.into_iter().map(|part| (part, Verdict::Commit)).collect();
            let request = CommitRequest { urgent: true, runs, ..table.request(&known) };
            is_offered = true;
            let Routed { outcome, news, .. } = table.route.commit(request).await.map_err(home_error)?;
            table.learn(&news);
            if outcome == Outcome::Committed {
                return Ok(());
            }
        }
        let message = format!("table {name}: others commit all the time: try again");
        Err(Error::unavailable("table_contended", message))
    }
}

async fn note(records: Records, stream: StreamId, given_up: OffsetRange) {
    if let Err(error) = records.release(&stream, given_up).await {
        let (first, last) = (given_up.start, given_up.end.saturating_sub(1));
        tracing::warn!(%stream, first, last, %error, "a producer that sends again what was given up is not told so");
    }
}

/// Gaps cut into what one version gives up, with their numbers; of each gap at most one part in a batch.
fn batches(gaps: &[RunKey]) -> Vec<Vec<(usize, RunKey)>> {
    let (mut batches, mut room) = (vec![Vec::new()], AT_ONCE_MAX);
    for (number, gap) in gaps.iter().enumerate() {
        let mut start = gap.start;
        while start < gap.end {
            if room == 0 {
                batches.push(Vec::new());
                room = AT_ONCE_MAX;
            }
            let end = gap.end.min(start.saturating_add(room));
            room -= end - start;
            if let Some(batch) = batches.last_mut() {
                batch.push((number, RunKey { start, end, ..gap.clone() }));
            }
            start = end;
        }
    }
    batches
}

fn has_moved(name: &TableName, part: &RunKey, next: u64) -> Error {
    let (stream, start) = (&part.stream, part.start);
    let message = format!(
        "table {name}, stream {stream}: it was to be given up from offset {start} on, but the table has it up to {next} by \
         now, or of a newer session: something still writes its records; see what is missing now"
    );
    Error::invalid("stream_has_moved", message)
}

#[cfg(test)]
mod tests {
    use sluice_shared::ids::SessionId;

    use super::*;

    #[test]
    fn gaps_are_cut_into_what_one_version_takes() {
        let gap = |name: &str, start, end| RunKey {
            stream: StreamId::named(&name.parse().expect("valid"), 1),
            session: SessionId(1),
            start,
            end,
            boundary: None,
        };
        let most = AT_ONCE_MAX;
        let gaps = [gap("a", 5, 10), gap("b", 0, 2 * most), gap("c", 7, 8)];
        let cut: Vec<Vec<(usize, u64, u64)>> = batches(&gaps)
            .into_iter()
            .map(|batch| batch.into_iter().map(|(number, part)| (number, part.start, part.end)).collect())
            .collect();
        assert_eq!(
            cut,
            [
                vec![(0, 5, 10), (1, 0, most - 5)],
                vec![(1, most - 5, 2 * most - 5)],
                vec![(1, 2 * most - 5, 2 * most), (2, 7, 8)]
            ]
        );
    }
}
