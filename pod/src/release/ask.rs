//! What each pod of the pool has that is in no table: asking all of them, to and from its form on the link.
//!
//! *Owns*: whom to ask, how long an answer may take.
//! *Does not own*: what follows from the answers (`release`).

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use sluice_shared::error::Error;
use sluice_shared::ids::{LogId, OffsetRange, PodId, SessionId, TableId, TableName};
use sluice_shared::lifecycle::Phase;
use sluice_shared::proto;

use super::Releaser;
use crate::table::StrandedRange;
use crate::table::held::{HeldRange, Holding};

/// How long a pod may take to commit what it can, and to say what it holds.
const SETTLED_TIMEOUT: Duration = Duration::from_secs(15);
/// How long it may take to say what it knows at once.
const SHOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it may take to read what its log has of a table.
const STRANDED_TIMEOUT: Duration = Duration::from_secs(120);

/// What a pod has.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) pod: PodId,
    pub(super) log: LogId,
    pub(super) holdings: Vec<Holding>,
    /// Logs that it is taking over.
    pub(super) adopting: BTreeSet<LogId>,
    /// Logs that it has tried to take over, and are damaged.
    pub(super) damaged: BTreeSet<LogId>,
}

impl Releaser {
    /// What this pod has.
    pub(super) async fn own_answer(&self, table: Option<&TableName>, settled: bool) -> Answer {
        Answer {
            pod: self.log.pod.clone(),
            log: self.log.log,
            holdings: self.tables.holdings(table, settled).await,
            adopting: self.adoptions.ongoing(),
            damaged: self.adoptions.damaged().into_keys().collect(),
        }
    }

    /// Asks all pods that may have something: of each its answer, or who does not answer and why.
    pub(super) async fn ask_all(
        &self,
        table: Option<&TableName>,
        settled: bool,
    ) -> (Vec<Answer>, Vec<(PodId, String)>) {
        let request = proto::HoldingsRequest {
            table: table.map(|table| table.as_str().to_owned()).unwrap_or_default(),
            settled,
        };
        let patience = if settled { SETTLED_TIMEOUT } else { SHOWN_TIMEOUT };
        let own = async {
            let answer = tokio::time::timeout(patience, self.own_answer(table, settled)).await;
            (self.log.pod.clone(), answer.map_err(|_| late(patience)))
        };
        let others = self.others().into_iter().map(|pod| {
            let request = request.clone();
            async move {
                let asked = async {
                    let mut client = self.pool.client(&pod).ok_or("it is not known here")?;
                    let answer =
                        client.holdings(request).await.map_err(|status| status.message().to_owned())?;
                    read(answer.into_inner()).map_err(|error| error.message)
                };
                let answer = tokio::time::timeout(patience, asked).await;
                (pod, answer.unwrap_or_else(|_| Err(late(patience))))
            }
        });
        let (own, others) = futures_util::future::join(own, join_all(others)).await;
        let (mut answers, mut silent) = (Vec::new(), Vec::new());
        for (pod, answer) in std::iter::once(own).chain(others) {
            match answer {
                Ok(answer) => answers.push(answer),
                Err(why) => silent.push((pod, why)),
            }
        }
        (answers, silent)
    }

    /// The other pods that are there. One that has drained says by a note whether it has anything.
    fn others(&self) -> Vec<PodId> {
        let view = self.pool.view();
        let others = view.pods().iter().filter(|pod| pod.id != self.log.pod && pod.phase != Phase::Drained);
        others.map(|pod| pod.id.clone()).collect()
    }

    /// Names the records of the table's stranded entries at all pods; in earnest, they are given up. Those of the table
    /// `kept` stay. Answers of each pod what it has, or why that is not known.
    pub(super) async fn drop_stranded(
        &self,
        table: &TableName,
        kept: Option<&TableId>,
        in_earnest: bool,
    ) -> Vec<(PodId, Result<Vec<StrandedRange>, String>)> {
        let request = proto::DropStrandedRequest {
            table: table.as_str().to_owned(),
            kept_id: kept.map(|kept| kept.0.as_ref().to_owned()).unwrap_or_default(),
            dry_run: !in_earnest,
        };
        let own = self.tables.drop_stranded(table, kept, in_earnest).await;
        let mut answers = vec![(self.log.pod.clone(), own.map_err(|error| error.message))];
        for pod in self.others() {
            let asked = async {
                let mut client = self.pool.client(&pod).ok_or("it is not known here")?;
                let answer = client.drop_stranded(request.clone()).await;
                let ranges = answer.map_err(|status| status.message().to_owned())?.into_inner().ranges;
                let ranges = ranges.into_iter().map(read_stranded).collect::<Result<_, _>>();
                ranges.map_err(|error: Error| error.message)
            };
            let answer = tokio::time::timeout(STRANDED_TIMEOUT, asked).await;
            answers.push((pod, answer.unwrap_or_else(|_| Err(late(STRANDED_TIMEOUT)))));
        }
        answers
    }
}

fn late(patience: Duration) -> String {
    format!("no answer within {} s", patience.as_secs())
}

pub(super) fn to_wire(answer: Answer) -> proto::HoldingsResponse {
    proto::HoldingsResponse {
        pod: answer.pod.as_str().to_owned(),
        log: answer.log.0.to_string(),
        holdings: answer.holdings.into_iter().map(holding).collect(),
        adopting: answer.adopting.iter().map(|log| log.0.to_string()).collect(),
        damaged: answer.damaged.iter().map(|log| log.0.to_string()).collect(),
    }
}

fn holding(holding: Holding) -> proto::Holding {
    let held = holding.held.into_iter().map(|held| proto::HeldRange {
        stream: held.stream.as_str().to_owned(),
        session: held.session.0,
        start: held.offsets.start,
        end: held.offsets.end,
        runs: held.runs,
        since_us: held.since_us,
    });
    proto::Holding {
        table: holding.table.as_str().to_owned(),
        table_id: holding.id.0.as_ref().to_owned(),
        held: held.collect(),
        stranded: holding.stranded,
        gone: holding.gone,
        lag_ms: holding.lag_ms,
    }
}

fn read(answer: proto::HoldingsResponse) -> Result<Answer, Error> {
    Ok(Answer {
        pod: answer.pod.parse()?,
        log: read_log(&answer.log)?,
        holdings: answer.holdings.into_iter().map(read_holding).collect::<Result<_, _>>()?,
        adopting: answer.adopting.iter().map(|log| read_log(log)).collect::<Result<_, _>>()?,
        damaged: answer.damaged.iter().map(|log| read_log(log)).collect::<Result<_, _>>()?,
    })
}

fn read_holding(holding: proto::Holding) -> Result<Holding, Error> {
    let held = holding.held.into_iter().map(|held| {
        Ok(HeldRange {
            stream: held.stream.parse()?,
            session: SessionId(held.session),
            offsets: OffsetRange { start: held.start, end: held.end },
            runs: held.runs,
            since_us: held.since_us,
        })
    });
    Ok(Holding {
        table: holding.table.parse()?,
        id: TableId(holding.table_id.into()),
        held: held.collect::<Result<_, Error>>()?,
        stranded: holding.stranded,
        gone: holding.gone,
        lag_ms: holding.lag_ms,
    })
}

pub(super) fn stranded_to_wire(range: StrandedRange) -> proto::StrandedRange {
    proto::StrandedRange {
        table_id: range.table.0.as_ref().to_owned(),
        stream: range.stream.as_str().to_owned(),
        session: range.session.0,
        start: range.offsets.start,
        end: range.offsets.end,
    }
}

fn read_stranded(range: proto::StrandedRange) -> Result<StrandedRange, Error> {
    Ok(StrandedRange {
        table: TableId(range.table_id.into()),
        stream: range.stream.parse()?,
        session: SessionId(range.session),
        offsets: OffsetRange { start: range.start, end: range.end },
    })
}

/// A log's id as it was written.
///
/// # Errors
/// Invalid where it is none.
pub(super) fn read_log(id: &str) -> Result<LogId, Error> {
    let parsed = id.parse().map(LogId);
    parsed.map_err(|_| {
        let message = format!(
            "{id:?} is no log id: expected a UUID, such as ee2a5431-2365-48d0-9e6f-10cf737c8250; which logs a table waits for \
             stands in waits_for_logs of GET /v1/tables/TABLE"
        );
        Error::invalid("invalid_log", message)
    })
}
