//! The way of a commit: to the table's home, which may be another pod, and back with what is known of the table then.
//!
//! Whatever goes wrong on the way, this pod commits by itself: no table stops since its home is dead, hangs or is behind.
//! A commit that landed although its answer was lost is found in the table's own map, where the runs are duplicates.
//!
//! *Owns*: asking the home, how long it is waited for, what this pod knows of the table (`Known`).
//! *Does not own*: who is home (`pool`), the commit (`home`), what is asked for (`task`).

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use arrow::error::ArrowError;
use prost::Message;
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::ids::{LogId, PodId, StreamId, TableId, TableName, TableVersion};
use sluice_shared::proto::pod_client::PodClient;
use sluice_shared::proto::{self, MESSAGE_BYTES_MAX};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::delta::Shape;
use super::home::{Answer, CommitRequest, HomeError, HomeHandle, Outcome, View};
use super::watermark::{Mark, WatermarkMap};
use super::wire;
use crate::pool::{Home, Pool};

/// A home that has not answered for so long is asked whether it lives: a round may take its time, a dead pod not.
const PROBE_AFTER: Duration = Duration::from_millis(500);
/// It has to answer that within this time.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// A home that lives and does not come to an end is waited for so long: its storage may hang, and ours not.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How much longer than it was asked to wait a home may take to tell watermarks.
const WATCH_GRACE: Duration = Duration::from_secs(1);
/// What a message has besides the fields.
const ENVELOPE_BYTES: usize = 1 << 10;

/// What a pod knows of a table, from its own home or from another.
#[derive(Debug, Clone)]
pub(super) struct Known {
    /// The table's metadata, as far as known.
    pub(super) shape: Arc<Shape>,
    /// The newest version of which anything is known.
    pub(super) version: TableVersion,
    /// How far streams are in it. Of those that were not asked for it can be behind.
    pub(super) map: Arc<WatermarkMap>,
}

/// What has become known of a table.
#[derive(Debug)]
pub(super) enum News {
    /// Everything.
    View(View),
    /// How far some streams are.
    Marks(Marks),
}

/// What another home has told.
#[derive(Debug)]
pub(super) struct Marks {
    pub(super) version: TableVersion,
    /// How far streams are in it.
    pub(super) marks: Vec<(StreamId, Option<Mark>)>,
    /// The logs that are registered with the table, where that was told.
    logs: Option<BTreeSet<LogId>>,
}

/// What has become of a request.
#[derive(Debug)]
pub(super) struct Routed {
    pub(super) outcome: Outcome,
    pub(super) news: News,
    /// When the home means to commit again.
    pub(super) next: Option<Instant>,
}

impl From<&View> for Known {
    fn from(view: &View) -> Self {
        let (shape, map) = (Arc::clone(&view.version.shape), Arc::clone(&view.map));
        Self { shape, version: view.version.number(), map }
    }
}

impl Known {
    /// Takes news that are no older. Answers whether they were.
    pub(super) fn learn(&mut self, news: &News) -> bool {
        match news {
            News::View(view) if view.version.number() >= self.version => *self = Self::from(view),
            News::Marks(Marks { version, marks, logs }) if *version >= self.version => {
                self.version = *version;
                let map = Arc::make_mut(&mut self.map);
                map.logs = logs.clone().unwrap_or_else(|| std::mem::take(&mut map.logs));
                marks.iter().for_each(|(stream, mark)| map.learn(stream.clone(), mark.clone()));
            }
            _ => return false,
        }
        true
    }
}

/// Why a home gave no answer that is of use.
#[derive(Debug, thiserror::Error)]
enum Unanswered {
    #[error("{0}")]
    Refused(Error),
    #[error("it does not answer")]
    Silent,
    #[error("it has read only up to version {0}")]
    Behind(TableVersion),
    #[error("a request of {0} bytes is too large for the link")]
    TooLarge(usize),
    #[error("files: {0}")]
    Encode(#[from] ArrowError),
}

impl Unanswered {
    /// Whether the pod itself is to blame, and not this table or request.
    fn is_lost(&self) -> bool {
        match self {
            Self::Silent => true,
            Self::Refused(error) => error.kind == ErrorKind::Unavailable && error.code == "transport",
            _ => false,
        }
    }
}

impl From<Status> for Unanswered {
    fn from(status: Status) -> Self {
        Self::Refused(status.into())
    }
}

impl From<Error> for Unanswered {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// The way to one table's home.
pub(super) struct Route {
    pub(super) pool: Pool,
    pub(super) table: TableName,
    /// This pod's own.
    pub(super) home: HomeHandle,
}

impl Route {
    /// Whether another pod is asked.
    pub(super) fn is_remote(&self) -> bool {
        matches!(self.pool.home(&self.table), Home::Peer(..))
    }

    /// Commits, wherever the home is.
    ///
    /// # Errors
    /// `HomeError` where this pod had to do it, and failed.
    pub(super) async fn commit(&self, request: CommitRequest) -> Result<Routed, HomeError> {
        if let Home::Peer(client, pod) = self.pool.home(&self.table) {
            match self.ask(client, &request).await {
                Ok(routed) if routed.outcome == Outcome::Reshaped => {
                    self.pool.answered(&pod);
                    let view = self.home.reload().await?;
                    if view.version.shape.fingerprint != request.shape {
                        return Ok(Routed { outcome: Outcome::Changed, news: News::View(view), ..routed });
                    }
                    // It puts the same metadata into other words: another release.
                }
                Ok(routed) => {
                    self.pool.answered(&pod);
                    return Ok(routed);
                }
                Err(why) => self.unanswered(&pod, &why),
            }
        }
        self.commit_here(request).await
    }

    /// Commits in this pod, whoever the home is.
    ///
    /// # Errors
    /// `HomeError`.
    pub(super) async fn commit_here(&self, request: CommitRequest) -> Result<Routed, HomeError> {
        let Answer { outcome, view, next } = self.home.commit(request).await?;
        let next = next.map(|next| Instant::now() + next);
        Ok(Routed { outcome, news: News::View(view), next })
    }

    fn unanswered(&self, pod: &PodId, why: &Unanswered) {
        let is_known = !why.is_lost() || self.pool.set_aside(pod);
        let table = &self.table;
        if is_known {
            tracing::debug!(%table, home = %pod, error = %why, "committing in place of the home");
        } else {
            tracing::warn!(%table, home = %pod, error = %why, "the table's home is lost: committing in its place");
        }
    }

    async fn ask(
        &self,
        mut client: PodClient<Channel>,
        request: &CommitRequest,
    ) -> Result<Routed, Unanswered> {
        let sent = wire::commit_request(&self.table, request)?;
        let bytes = sent.encoded_len() + ENVELOPE_BYTES;
        if bytes > MESSAGE_BYTES_MAX {
            return Err(Unanswered::TooLarge(bytes));
        }
        let probe = client.clone();
        let answer = while_alive(client.commit(sent), probe).await?;
        if answer.version < request.version {
            return Err(Unanswered::Behind(answer.version));
        }
        let streams: BTreeSet<&StreamId> = request.runs.iter().map(|(run, _)| &run.stream).collect();
        let outcome = wire::read_outcome(answer.outcome())?;
        let marks = answer.marks.into_iter().map(wire::read_mark);
        let mut marks: HashMap<StreamId, Mark> = marks.collect::<Result<_, _>>()?;
        let marks = streams.into_iter().map(|stream| (stream.clone(), marks.remove(stream))).collect();
        let next =
            (answer.next_ms > 0).then(|| Instant::now() + Duration::from_millis(u64::from(answer.next_ms)));
        let logs = answer.logs.iter().map(|log| wire::read_log(log)).collect::<Result<_, _>>()?;
        let news = Marks { version: answer.version, marks, logs: Some(logs) };
        Ok(Routed { outcome, news: News::Marks(news), next })
    }

    /// Asks another home how far streams are, and waits there until one has come further. None where there is none.
    pub(super) async fn watch(
        &self,
        known: TableVersion,
        table_id: &TableId,
        streams: Vec<(StreamId, u64)>,
        wait: Duration,
    ) -> Option<News> {
        let Home::Peer(mut client, pod) = self.pool.home(&self.table) else { return None };
        let streams = streams
            .into_iter()
            .map(|(stream, next)| proto::Reached { stream: stream.as_str().to_owned(), next });
        let request = proto::WatermarksRequest {
            table: self.table.as_str().to_owned(),
            table_id: table_id.0.as_ref().to_owned(),
            version: known,
            streams: streams.collect(),
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
        };
        let answer = tokio::time::timeout(wait + WATCH_GRACE, client.watermarks(request)).await;
        let answer = answer.map_err(|_| Unanswered::Silent).and_then(|answer| Ok(answer?.into_inner()));
        let marks = answer.and_then(|answer| {
            if answer.version < known {
                return Err(Unanswered::Behind(answer.version));
            }
            let marks = answer.marks.into_iter().map(wire::read_mark);
            let marks = marks.map(|mark| mark.map(|(stream, mark)| (stream, Some(mark))));
            let marks = marks.collect::<Result<_, _>>()?;
            Ok(News::Marks(Marks { version: answer.version, marks, logs: None }))
        });
        match marks {
            Ok(news) => {
                self.pool.answered(&pod);
                Some(news)
            }
            Err(why) => {
                self.unanswered(&pod, &why);
                None
            }
        }
    }
}

/// A call's answer, as long as its pod shows signs of life.
async fn while_alive<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
    mut probe: PodClient<Channel>,
) -> Result<T, Unanswered> {
    let mut call = pin!(call);
    let give_up = Instant::now() + ANSWER_MAX;
    loop {
        let sign = async {
            tokio::time::sleep(PROBE_AFTER).await;
            let sign = probe.watermarks(proto::WatermarksRequest::default());
            tokio::time::timeout(PROBE_TIMEOUT, sign).await
        };
        let sign = tokio::select! {
            biased; // the answer is what counts
            answer = &mut call => return Ok(answer?.into_inner()),
            sign = sign => sign,
        };
        if !matches!(sign, Ok(Ok(_))) || Instant::now() > give_up {
            return Err(Unanswered::Silent);
        }
    }
}
