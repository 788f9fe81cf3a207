//! What other pods ask of a table's home: a commit, and how far streams are.
//!
//! *Owns*: the two calls, from the wire and back to it.
//! *Does not own*: the commit (`home`), whether this pod is the home: whoever is asked answers, since two homes do no
//! harm and the pods need not have the same view of the pool.

use std::sync::Arc;
use std::time::Duration;

use sluice_shared::error::Error;
use sluice_shared::ids::{StreamId, TableName};
use sluice_shared::proto;
use tokio::time::Instant;

use super::home::{Answer, HomeError, View};
use super::open::OpenTable;
use super::{Tables, home_error, wire};

/// How long a question may wait at most.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// While somebody waits, the table is read anew at least so often: others may commit past this home.
const READ_ANEW: Duration = Duration::from_secs(1);

impl Tables {
    /// Commits what another pod has written.
    ///
    /// # Errors
    /// Invalid where the request is garbled; as `open`, and as a commit of this pod's own.
    pub async fn commit_for(&self, request: proto::CommitRequest) -> Result<proto::CommitResponse, Error> {
        let name: TableName = request.table.parse()?;
        let request = wire::read_commit_request(request)?;
        let streams: Vec<StreamId> = {
            let mut streams: Vec<_> = request.runs.iter().map(|(run, _)| run.stream.clone()).collect();
            streams.sort();
            streams.dedup();
            streams
        };
        let table = self.look(&name).await?;
        let answered = table.home.commit(request).await;
        let Answer { outcome, view, next } = answered.map_err(|error| told(&table, error))?;
        let mark = |stream: &StreamId| view.map.mark(stream).map(|mark| wire::mark(stream, mark));
        Ok(proto::CommitResponse {
            outcome: wire::outcome(outcome).into(),
            version: view.version.number(),
            map: view.map.number,
            marks: streams.iter().filter_map(mark).collect(),
            logs: view.map.logs.iter().map(|log| log.0.to_string()).collect(),
            next_ms: next.map_or(0, |next| u32::try_from(next.as_millis()).unwrap_or(0).max(1)),
        })
    }

    /// Tells how far streams are that are further than the asker knows: as soon as there are any, or after a while.
    ///
    /// # Errors
    /// As `open`; NotFound where the table is another than the asker's.
    pub async fn watermarks_for(
        &self,
        request: proto::WatermarksRequest,
    ) -> Result<proto::WatermarksResponse, Error> {
        if request.table.is_empty() {
            return Ok(proto::WatermarksResponse::default());
        }
        let name: TableName = request.table.parse()?;
        let streams = request.streams.into_iter();
        let streams = streams.map(|reached| Ok((reached.stream.parse()?, reached.next)));
        let streams: Vec<(StreamId, u64)> = streams.collect::<Result<_, Error>>()?;
        let table = self.look(&name).await?;
        let until = Instant::now() + Duration::from_millis(u64::from(request.wait_ms)).min(WAIT_MAX);
        let mut views = table.home.views();
        loop {
            let view = Arc::clone(&views.borrow_and_update());
            if *view.version.shape.id.0 != *request.table_id {
                let (here, asked) = (&view.version.shape.id.0, &request.table_id);
                let message = format!("table {name}: its id is {here}, not {asked}");
                return Err(Error::not_found("table_replaced", message));
            }
            let marks = further(&view, &streams);
            let is_known = view.version.number() >= request.version;
            if is_known && (!marks.is_empty() || Instant::now() >= until) {
                return Ok(proto::WatermarksResponse { version: view.version.number(), marks });
            }
            let age = if is_known { READ_ANEW } else { Duration::ZERO };
            let next_look = if is_known { until.min(Instant::now() + READ_ANEW) } else { Instant::now() };
            tokio::select! {
                biased; // stopping first; a commit makes reading needless
                () = self.shared.scope.cancelled() => {
                    return Err(Error::unavailable("draining", format!("table {name}: its home goes away")));
                }
                Ok(()) = views.changed() => {}
                () = tokio::time::sleep_until(next_look) => {
                    let read = table.home.reload_older(age).await.map_err(|error| told(&table, error))?;
                    if read.version.number() < request.version {
                        let (read, known) = (read.version.number(), request.version);
                        let message = format!("table {name}: read up to version {read}, asked for {known}");
                        return Err(Error::unavailable("behind", message));
                    }
                }
            }
        }
    }
}

/// What stops the table for others stops it here too: whoever opens it next reads it anew.
fn told(table: &OpenTable, error: HomeError) -> Error {
    if let HomeError::Stopped(error) = &error {
        table.stop(error);
    }
    home_error(error)
}

fn further(view: &View, streams: &[(StreamId, u64)]) -> Vec<proto::Mark> {
    let marks = streams.iter().filter_map(|(stream, known)| {
        let mark = view.map.mark(stream).filter(|mark| mark.next > *known)?;
        Some(wire::mark(stream, mark))
    });
    marks.collect()
}
