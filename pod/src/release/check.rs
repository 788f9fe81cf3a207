//! What is no release: a log that the pool takes over by itself, or will up to its damage; a table or a stream that there
//! is not.
//!
//! *Owns*: when that is so, and what is said of it.
//! *Does not own*: logs that pods write or take over right now (`release`), taking over (`adopt`).

use std::time::Duration;

use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::ids::{LogId, PodId, StreamId, TableName};
use tokio::time::Instant;

use super::ask::Answer;
use super::{Lost, Named, Releaser, told};
use crate::app::chain;
use crate::wal::{SealedLog, WalError};

/// Code of the error that a log will be taken over by itself.
const LOG_IS_WHOLE: &str = "log_is_whole";
/// Code of the error that what is before a log's damage is in no table yet.
const LOG_NOT_READ: &str = "log_not_read";
/// Between two looks whether it is. Each reads the log up to its damage.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Streams that are proposed to somebody who names one that there is not.
const PROPOSED_MAX: usize = 5;

impl Releaser {
    /// Of a damaged log in the store, what is before the damage is no loss: waits until a pod has taken that over. Which pod has
    /// done so it forgets when it is started again.
    pub(super) async fn until_read(&self, named: &Named) -> Result<(), Error> {
        let late = Instant::now() + self.taken_over_within;
        for (log, pod) in named {
            loop {
                let (answers, _) = self.ask_all(None, false).await;
                let is_written = answers.iter().any(|answer| answer.log == *log);
                let is_read = answers.iter().any(|answer| answer.damaged.contains(log));
                let is_ongoing = answers.iter().any(|answer| answer.adopting.contains(log));
                if is_written || (is_read && !is_ongoing) {
                    break;
                }
                if self.tables.drained_logs().released(*log).await?.is_some() {
                    break;
                }
                let Some(damage) = self.damage(*log).await? else { break };
                if Instant::now() >= late {
                    return Err(Error::unavailable(LOG_NOT_READ, not_read(*log, pod.as_ref(), &damage)));
                }
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
        }
        Ok(())
    }

    /// What is damaged or missing of a log in the store. None of one that is on a disk, or that a newer version has written.
    async fn damage(&self, log: LogId) -> Result<Option<WalError>, Error> {
        match SealedLog::damage(&self.logs, log).await {
            Ok(damage) => Ok(damage),
            Err(WalError::NewerFormat { .. }) => Ok(None),
            Err(error) => {
                let message = format!("cannot see whether log {} is damaged: {}", log.0, chain(&error));
                Err(Error::unavailable("storage", message))
            }
        }
    }

    /// That none of the named logs will be taken over by itself; takes out those of a pod that will. A log which a pod has
    /// found damaged will not, nor one that was released before.
    pub(super) async fn check_whole(
        &self,
        lost: &Lost,
        named: &mut Named,
        answers: &[Answer],
    ) -> Result<(), Error> {
        let logs: Vec<LogId> = named.keys().copied().collect();
        for log in logs {
            if answers.iter().any(|answer| answer.damaged.contains(&log))
                || self.tables.drained_logs().released(log).await?.is_some()
            {
                continue;
            }
            let Some(why) = self.why_adopted(log).await? else { continue };
            if matches!(lost, Lost::Pod(_)) && named.len() > 1 {
                named.remove(&log);
                continue;
            }
            return Err(Error::invalid(LOG_IS_WHOLE, why));
        }
        Ok(())
    }

    /// Why the pool will have what is in the log without anybody's help, if so.
    async fn why_adopted(&self, log: LogId) -> Result<Option<String>, Error> {
        match self.logs.header(log).await {
            Ok(Some(header)) => Ok(Some(format!(
                "{} need not be given up: it is in the tables' store, no pod has found damage in it, and the pool takes it over \
                 by itself once its pod has been gone for pod.adopt_after_ms (without gossip that pod does, when it is started \
                 again); all of it is committed then. Wait for that; to give up what it has all the same, say --whole \
                 (whole=true)",
                told(log, Some(&header.owner))
            ))),
            // On a disk, or done with; or nobody can tell what it is.
            Ok(None) | Err(WalError::CorruptObject { .. }) => Ok(None),
            Err(error @ WalError::NewerFormat { .. }) => Ok(Some(format!(
                "log {} need not be given up: a newer Sluice has written it ({error}); start the pods with that version, and \
                 they take it over; to give up what it has all the same, say --whole (whole=true)",
                log.0
            ))),
            Err(error) => {
                Err(Error::unavailable("storage", format!("cannot see what log {} is: {error}", log.0)))
            }
        }
    }

    /// That there is the named table, or that a log has something of one of its name that was dropped; and the stream.
    pub(super) async fn check_known(&self, lost: &Lost) -> Result<(), Error> {
        let Lost::Nothing(table, stream) = lost else { return Ok(()) };
        let (answers, _) = self.ask_all(Some(table), false).await;
        let holdings = || answers.iter().flat_map(|answer| &answer.holdings).filter(|of| of.table == *table);
        let map = match self.tables.newest(table).await {
            Ok((_, map)) => Some(map),
            Err(error) if error.kind == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        if map.is_none() && holdings().all(|of| of.held.is_empty() && of.stranded + of.gone == 0) {
            let message = format!(
                "there is no table {table}, and no pod's log has records of one of this name: `sluice tables` lists those \
                 that there are"
            );
            return Err(Error::not_found("table_not_found", message));
        }
        let Some(stream) = stream else { return Ok(()) };
        let held: Vec<&StreamId> = holdings().flat_map(|of| &of.held).map(|held| &held.stream).collect();
        let has = map.as_ref().is_some_and(|map| map.mark(stream).is_some());
        if has || held.contains(&stream) {
            return Ok(());
        }
        Err(no_stream(table, stream, &held))
    }
}

fn not_read(log: LogId, pod: Option<&PodId>, damage: &WalError) -> String {
    format!(
        "{} is damaged ({damage}), and no pod has taken over yet what is before that, which is not lost: one does so by itself \
         once its pod has been gone for pod.adopt_after_ms, and then names the damage in an error each 10 s (without gossip \
         that pod does, when it is started again). Wait for that error and ask again; to give up all that it has: --whole \
         (whole=true)",
        told(log, pod)
    )
}

fn no_stream(table: &TableName, stream: &StreamId, held: &[&StreamId]) -> Error {
    let mut waiting: Vec<&str> = held.iter().map(|stream| stream.as_str()).collect();
    waiting.sort_unstable();
    waiting.dedup();
    let waiting = match waiting.len() {
        0 => "nothing of this table waits".to_owned(),
        1..=PROPOSED_MAX => format!("what waits is of {}", waiting.join(", ")),
        more => format!("{more} streams wait: `sluice tables {table}` names them"),
    };
    let message = format!("table {table} has no stream {stream}, and no pod's log has any of it; {waiting}");
    Error::not_found("stream_not_found", message)
}
