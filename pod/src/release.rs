//! Release: an operator gives up records that no log has any more, each by its name.
//!
//! Runs whose predecessors were in a lost log wait for ever, and so do named streams that may have been in it. Nobody can
//! know that a log is lost: an operator says so. From then on a note beside the tables stands for it (`drained`), and the
//! offsets that all pods together wait for are passed over (`table/give_up`). They are given up only where nobody can bring
//! them: every pod that is there has committed what it can, and said what it holds; every other log that the table has
//! heard of is known to hold nothing, or was released too.
//!
//! *Owns*: what a wish means, when it is refused, what is given up, the report.
//! *Does not own*: which offsets are missing (`table/held`), how they are passed over (`table/give_up`), notes (`drained`).
//! Keeps P2: what is given up is named, before and after; nothing else is lost by it.

mod ask;
mod check;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::{Value, json};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::ids::{LogId, PodId, StreamId, TableId, TableName};
use sluice_shared::lifecycle::now_us;
use sluice_shared::proto;
use tokio::time::Instant;

use crate::adopt::Adoptions;
use crate::drained::Release;
use crate::pool::Pool;
use crate::stream::record::{self, LogEntry};
use crate::table::held::{self, Gap, HeldRange, Holding};
use crate::table::watermark::RunKey;
use crate::table::{StrandedRange, Tables};
use crate::wal::LogStore;
use ask::{Answer, read_log};

/// Named streams whose records are looked at for one report.
const RECORDS_MAX: usize = 20_000;
/// Gaps of a table that are shown to people who did not ask for a release.
const SHOWN_MAX: usize = 100;
/// Between two gaps of one stream: until what stands between them is committed.
const BETWEEN_MAX: Duration = Duration::from_secs(15);
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Resolves when this pod has heard of whoever was there when it was called.
pub type Hearing = Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

/// Gives up lost records, on behalf of an operator.
#[derive(Clone)]
pub struct Releaser {
    /// This pod's tables.
    pub tables: Tables,
    /// The other pods.
    pub pool: Pool,
    /// This pod's log.
    pub log: LogEntry,
    /// Logs in the tables' store.
    pub logs: LogStore,
    /// Which of them this pod takes over.
    pub adoptions: Adoptions,
    /// Who is back may not be known yet.
    pub hears: Hearing,
    /// How long it may take until a pod has taken over what is before the damage of a log whose pod is gone.
    pub taken_over_within: Duration,
}

/// What an operator says is lost.
enum Lost {
    Log(LogId),
    Pod(PodId),
    /// Nothing more than is known: of one table, or one of its streams.
    Nothing(TableName, Option<StreamId>),
}

/// Logs, and whose they are as far as known.
type Named = BTreeMap<LogId, Option<PodId>>;

/// Offsets of a stream that are given up, or are not, as people are told.
#[derive(Debug, Clone, Serialize)]
struct Line {
    table: TableName,
    stream: StreamId,
    session: u64,
    start: u64,
    /// One more than the last; None where nobody knows.
    end: Option<u64>,
    count: Option<u64>,
    /// Where they were.
    #[serde(rename = "where")]
    place: String,
    /// Why they are not given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    dry_run: bool,
    logs: Vec<Value>,
    given_up: Vec<Line>,
    /// What is missing as well, and why it is not given up.
    left: Vec<Line>,
    /// Named streams that may have more in the lost logs than anybody knows.
    ends: Vec<Line>,
    /// Not all named streams were looked at for that.
    ends_cut: bool,
}

/// A gap, and what is known of it.
struct Missing {
    table: TableName,
    id: TableId,
    gap: Gap,
    place: String,
    why: Option<String>,
}

impl Missing {
    fn line(&self, why: Option<String>) -> Line {
        let key = &self.gap.key;
        Line {
            table: self.table.clone(),
            stream: key.stream.clone(),
            session: key.session.0,
            start: key.start,
            end: Some(key.end),
            count: Some(key.end - key.start),
            place: self.place.clone(),
            why: why.or_else(|| self.why.clone()),
        }
    }

    fn part(&self, start: u64, end: u64, why: Option<String>) -> Line {
        Line { start, end: Some(end), count: Some(end - start), ..self.line(why) }
    }
}

impl Lost {
    fn read(request: &proto::ReleaseRequest) -> Result<Self, Error> {
        let proto::ReleaseRequest { log, pod, table, stream, .. } = request;
        match (log.is_empty(), pod.is_empty(), table.is_empty()) {
            (false, true, true) if stream.is_empty() => Ok(Self::Log(read_log(log)?)),
            (true, false, true) if stream.is_empty() => Ok(Self::Pod(pod.parse()?)),
            (true, true, false) => {
                let stream = Some(stream).filter(|stream| !stream.is_empty());
                Ok(Self::Nothing(table.parse()?, stream.map(|stream| stream.parse()).transpose()?))
            }
            _ => {
                let message = "say what to release: a log, a pod, or a table and perhaps one of its streams";
                Err(Error::invalid("invalid_release", message))
            }
        }
    }

    fn table(&self) -> Option<&TableName> {
        match self {
            Self::Nothing(table, _) => Some(table),
            Self::Log(_) | Self::Pod(_) => None,
        }
    }

    fn takes(&self, gap: &Gap) -> bool {
        !matches!(self, Self::Nothing(_, Some(stream)) if gap.key.stream != *stream)
    }
}

impl Releaser {
    /// Gives up what the request names, or says what that would be. Answers a report in JSON.
    ///
    /// # Errors
    /// Invalid where that is not lost; NotFound where it is not known; Unavailable where a pod or the storage does not
    /// answer. No record has been given up then, though a log may be noted as released.
    pub async fn release(&self, request: proto::ReleaseRequest) -> Result<Bytes, Error> {
        let (lost, in_earnest, whole) = (Lost::read(&request)?, !request.dry_run, request.whole);
        self.tables.check_storage().await?;
        let owners = self.owners().await?;
        let mut named = self.named(&lost, &owners).await?;
        if !whole {
            self.until_read(&named).await?;
        }
        let mut missing = self.plan(&lost, &mut named, &owners, whole).await?;
        self.check_known(&lost).await?;
        let before = self.released(&named).await?;
        if in_earnest && named.keys().any(|log| !before.contains_key(log)) {
            // One that has just come back is asked too: nothing is written before.
            (self.hears)().await;
            self.plan(&lost, &mut named, &owners, whole).await?;
        }
        if in_earnest && !named.is_empty() {
            for log in named.keys() {
                let release = Release { by: self.log.pod.clone(), at_us: now_us() };
                self.tables.drained_logs().release(*log, release).await?;
                tracing::warn!(log = %log.0, "log released by an operator: what it holds is given up");
            }
            // A pod that came back in between was seen now, or finds the note.
            missing = self.plan(&lost, &mut named, &owners, whole).await?;
        }
        // Of a log that was released before they were named then: by now they have gone on elsewhere.
        let fresh = named.iter().filter(|(log, _)| !before.contains_key(*log));
        let fresh = fresh.map(|(log, pod)| (*log, pod.clone())).collect();
        let (ends, ends_cut) = self.ends(&fresh, &missing).await?;
        let (gone, stays) = match &lost {
            // An entry has many streams, and goes as a whole.
            Lost::Nothing(table, None) => self.stranded(table, in_earnest).await?,
            _ => (Vec::new(), Vec::new()),
        };
        let (lost_for_good, may_come): (Vec<_>, Vec<_>) =
            missing.iter().partition(|missing| missing.why.is_none());
        let mut left: Vec<Line> = may_come.into_iter().map(|missing| missing.line(None)).collect();
        let mut given_up: Vec<Line> = Vec::new();
        match in_earnest {
            true => self.give_up(lost_for_good, &mut given_up, &mut left).await,
            false => given_up.extend(lost_for_good.into_iter().map(|missing| missing.line(None))),
        }
        given_up.extend(gone);
        left.extend(stays);
        let shown = |(log, pod): (&LogId, &Option<PodId>)| {
            let released_before = before.get(log).map(Release::at);
            json!({ "log": log, "pod": pod, "released_before": released_before })
        };
        let logs = named.iter().map(shown).collect();
        let report = Report { dry_run: !in_earnest, logs, given_up, left, ends, ends_cut };
        let report = serde_json::to_vec(&report).map_err(|error| Error::internal(error.to_string()))?;
        Ok(report.into())
    }

    /// What this pod has that is in no table, for another pod.
    ///
    /// # Errors
    /// Invalid for a name that is none.
    pub async fn holdings(&self, request: proto::HoldingsRequest) -> Result<proto::HoldingsResponse, Error> {
        let table = Some(request.table).filter(|table| !table.is_empty());
        let table = table.map(|table| table.parse()).transpose()?;
        Ok(ask::to_wire(self.own_answer(table.as_ref(), request.settled).await))
    }

    /// Gives up entries of this pod's log whose table is gone, for another pod.
    ///
    /// # Errors
    /// As `Tables::drop_stranded`.
    pub async fn drop_own_stranded(
        &self,
        request: proto::DropStrandedRequest,
    ) -> Result<proto::DropStrandedResponse, Error> {
        let kept = Some(request.kept_id).filter(|id| !id.is_empty()).map(|id| TableId(id.into()));
        let table: TableName = request.table.parse()?;
        let ranges = self.tables.drop_stranded(&table, kept.as_ref(), !request.dry_run).await?;
        Ok(proto::DropStrandedResponse { ranges: ranges.into_iter().map(ask::stranded_to_wire).collect() })
    }

    /// Adds to a table's description what waits at all pods, and for which logs.
    ///
    /// # Errors
    /// Where storage fails.
    pub async fn describe_waiting(&self, name: &TableName, description: &mut Value) -> Result<(), Error> {
        let (answers, silent) = self.ask_all(Some(name), false).await;
        let holdings = || answers.iter().flat_map(|answer| &answer.holdings).filter(|of| of.table == *name);
        let sum = |of: fn(&Holding) -> u64| holdings().map(of).sum::<u64>();
        let runs = |holding: &Holding| holding.held.iter().map(|held| held.runs).sum::<u64>();
        description["held_runs"] = sum(runs).into();
        description["stranded_entries"] = sum(|holding| holding.stranded + holding.gone).into();
        description["lag_ms"] = holdings().map(|holding| holding.lag_ms).max().unwrap_or(0).into();
        let silent: Vec<_> = silent.into_iter().map(|(pod, _)| pod).collect();
        description["pods_silent"] = json!(silent);
        description["held"] = json!([]);
        if holdings().all(|holding| holding.held.is_empty()) {
            return Ok(());
        }
        let (id, map) = self.tables.newest(name).await?;
        let held: Vec<HeldRange> =
            holdings().filter(|of| of.id == id).flat_map(|of| of.held.iter().cloned()).collect();
        let gaps = held::gaps(&map, &held);
        let shown = gaps.iter().take(SHOWN_MAX).map(|gap| {
            let waits = |answer: &&Answer| {
                let mut held = answer.holdings.iter().filter(|of| of.id == id).flat_map(|of| &of.held);
                held.any(|held| held.stream == gap.key.stream && held.offsets.start == gap.key.end)
            };
            json!({
                "stream": gap.key.stream,
                "session": gap.key.session,
                "missing": [gap.key.start, gap.key.end],
                "runs": gap.runs,
                "records": gap.records,
                "since_ms": u64::try_from(now_us().saturating_sub(gap.since_us) / 1000).unwrap_or(0),
                "pods": answers.iter().filter(waits).map(|answer| &answer.pod).collect::<Vec<_>>(),
            })
        });
        description["held"] = shown.collect();
        description["held_left_out"] = gaps.len().saturating_sub(SHOWN_MAX).into();
        let owners = self.owners().await?;
        let absent = self.absent(&map.logs, &answers, &mut HashMap::new()).await?;
        description["waits_for_logs"] =
            absent.iter().map(|log| json!({ "log": log, "pod": owners.get(log) })).collect();
        Ok(())
    }

    /// Which pods logs are of: those on disks by their notes, those in the tables' store by their headers.
    async fn owners(&self) -> Result<BTreeMap<LogId, PodId>, Error> {
        let mut owners = self.tables.owners().all().await?;
        let failed = |error: crate::wal::WalError| {
            Error::unavailable("storage", format!("cannot see which logs there are: {error}"))
        };
        for log in self.logs.list().await.map_err(failed)? {
            // One whose header is damaged is of nobody that is known.
            if let Ok(Some(header)) = self.logs.header(log).await {
                owners.insert(log, header.owner);
            }
        }
        Ok(owners)
    }

    /// The logs that the operator gives up.
    async fn named(&self, lost: &Lost, owners: &BTreeMap<LogId, PodId>) -> Result<Named, Error> {
        let drained = self.tables.drained_logs();
        match lost {
            Lost::Nothing(..) => Ok(Named::new()),
            Lost::Log(log) => {
                let released = drained.released(*log).await?.is_some();
                if !released && drained.holds_nothing(*log).await? {
                    let message = format!("log {} holds nothing: it was drained, or taken over", log.0);
                    return Err(Error::invalid("log_is_empty", message));
                }
                if !released && !owners.contains_key(log) && !self.is_registered(*log).await? {
                    let known = owners.iter().map(|(log, pod)| format!("{} of {pod}", log.0));
                    let known = known.collect::<Vec<_>>().join(", ");
                    let message =
                        format!("no table and no pod has ever heard of log {}; known are: {known}", log.0);
                    return Err(Error::not_found("log_not_found", message));
                }
                Ok([(*log, owners.get(log).cloned())].into())
            }
            Lost::Pod(pod) => {
                let mut named = Named::new();
                for (log, owner) in owners.iter().filter(|(_, owner)| *owner == pod) {
                    let released = drained.released(*log).await?.is_some();
                    if released || !drained.holds_nothing(*log).await? {
                        named.insert(*log, Some(owner.clone()));
                    }
                }
                if named.is_empty() {
                    let message = format!(
                        "no log of pod {pod} is known that may hold anything: name a log that a table waits for, see \
                         waits_for_logs of GET /v1/tables/TABLE"
                    );
                    return Err(Error::not_found("log_not_found", message));
                }
                Ok(named)
            }
        }
    }

    /// Which of the logs have been released already.
    async fn released(&self, named: &Named) -> Result<BTreeMap<LogId, Release>, Error> {
        let mut released = BTreeMap::new();
        for log in named.keys() {
            released.extend(self.tables.drained_logs().released(*log).await?.map(|release| (*log, release)));
        }
        Ok(released)
    }

    async fn is_registered(&self, log: LogId) -> Result<bool, Error> {
        for table in self.tables.list().await? {
            if self.tables.newest(&table).await.is_ok_and(|(_, map)| map.logs.contains(&log)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What is missing of all tables that it concerns. Of a pod's logs the one that it writes is not lost.
    async fn plan(
        &self,
        lost: &Lost,
        named: &mut Named,
        owners: &BTreeMap<LogId, PodId>,
        whole: bool,
    ) -> Result<Vec<Missing>, Error> {
        let (answers, silent) = self.ask_all(lost.table(), true).await;
        check_lost(lost, named, &answers, &silent)?;
        if !whole {
            self.check_whole(lost, named, &answers).await?;
        }
        let mut tables: BTreeMap<TableName, Vec<&Holding>> = BTreeMap::new();
        for holding in answers.iter().flat_map(|answer| &answer.holdings) {
            tables.entry(holding.table.clone()).or_default().push(holding);
        }
        tables.retain(|_, holdings| holdings.iter().any(|holding| !holding.held.is_empty()));
        let (mut missing, mut empty) = (Vec::new(), HashMap::new());
        for (table, holdings) in tables {
            let (id, map) = match self.tables.newest(&table).await {
                Ok(newest) => newest,
                // What was for it is stranded, or about to be.
                Err(error) if error.kind == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            if !named.is_empty() && !named.keys().any(|log| map.logs.contains(log)) {
                continue;
            }
            let of_it = || holdings.iter().filter(|holding| holding.id == id);
            let held: Vec<HeldRange> = of_it().flat_map(|holding| holding.held.iter().cloned()).collect();
            let mut absent = self.absent(&map.logs, &answers, &mut empty).await?;
            absent.retain(|log| !named.contains_key(log));
            let why = why_not(&absent, of_it().any(|holding| holding.stranded > 0), owners);
            let place = self.place(&map.logs, named, owners).await?;
            let gaps = held::gaps(&map, &held).into_iter().filter(|gap| lost.takes(gap));
            missing.extend(gaps.map(|gap| Missing {
                table: table.clone(),
                id: id.clone(),
                gap,
                place: place.clone(),
                why: why.clone(),
            }));
        }
        Ok(missing)
    }

    /// Where a table's missing records were, for people.
    async fn place(
        &self,
        logs: &BTreeSet<LogId>,
        named: &Named,
        owners: &BTreeMap<LogId, PodId>,
    ) -> Result<String, Error> {
        let mut places = Vec::new();
        for log in logs {
            if named.contains_key(log) || self.tables.drained_logs().released(*log).await?.is_some() {
                places.push(told(*log, owners.get(log)));
            }
        }
        Ok(if places.is_empty() { "no log".to_owned() } else { places.join(", ") })
    }

    /// Logs of the table that are not here, and are not known to hold nothing.
    async fn absent(
        &self,
        logs: &BTreeSet<LogId>,
        answers: &[Answer],
        empty: &mut HashMap<LogId, bool>,
    ) -> Result<BTreeSet<LogId>, Error> {
        let mut absent = BTreeSet::new();
        for log in logs.iter().filter(|log| answers.iter().all(|answer| answer.log != **log)) {
            let holds_nothing = match empty.get(log) {
                Some(known) => *known,
                None => self.tables.drained_logs().holds_nothing(*log).await?,
            };
            empty.insert(*log, holds_nothing);
            if !holds_nothing {
                absent.insert(*log);
            }
        }
        Ok(absent)
    }

    /// Gives up gaps, those of a table together: of each stream the first one, then, where there is one, the second.
    async fn give_up(&self, missing: Vec<&Missing>, given_up: &mut Vec<Line>, left: &mut Vec<Line>) {
        let mut rounds: BTreeMap<(usize, &TableName), Vec<&Missing>> = BTreeMap::new();
        let mut before: HashMap<(&TableName, &StreamId), usize> = HashMap::new();
        for missing in missing {
            let nth = before.entry((&missing.table, &missing.gap.key.stream)).or_default();
            rounds.entry((*nth, &missing.table)).or_default().push(missing);
            *nth += 1;
        }
        for ((nth, table), round) in rounds {
            let late = Instant::now() + BETWEEN_MAX;
            let mut due = Vec::new();
            for missing in round {
                match if nth == 0 { Ok(()) } else { self.until_reached(missing, late).await } {
                    Ok(()) => due.push(missing),
                    Err(error) => left.push(missing.line(Some(error.message))),
                }
            }
            let Some(Missing { id, place, .. }) = due.first() else { continue };
            let keys: Vec<RunKey> = due.iter().map(|missing| missing.gap.key.clone()).collect();
            let reached = self.tables.give_up(table, id, &keys, place).await;
            for (missing, (reached, error)) in due.into_iter().zip(reached) {
                let key = &missing.gap.key;
                if reached > key.start {
                    let (session, first, last) = (key.session.0, key.start, reached - 1);
                    tracing::warn!(%table, stream = %key.stream, session, first, last, place = missing.place,
                        "records given up by an operator");
                    given_up.push(missing.part(key.start, reached, None));
                }
                if let Some(error) = error {
                    left.push(missing.part(reached, key.end, Some(error.message)));
                }
            }
        }
    }

    /// Waits until the stream has come to the gap: what is before it is at hand at some pod.
    async fn until_reached(&self, missing: &Missing, late: Instant) -> Result<(), Error> {
        let key = &missing.gap.key;
        loop {
            let (_, map) = self.tables.newest(&missing.table).await?;
            if map.next(&key.stream) >= key.start {
                return Ok(());
            }
            if Instant::now() >= late {
                let message =
                    format!("what is before offset {} is not committed yet: release again", key.start);
                return Err(Error::unavailable("not_reached", message));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Entries whose table is gone, at all pods: what is given up of them, and what is not.
    ///
    /// # Errors
    /// Unavailable where a pod does not say what it has: nothing was given up.
    async fn stranded(&self, table: &TableName, in_earnest: bool) -> Result<(Vec<Line>, Vec<Line>), Error> {
        let kept = match self.tables.newest(table).await {
            Ok((id, _)) => Some(id),
            Err(error) if error.kind == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let mut there = BTreeMap::new();
        for (pod, answer) in self.drop_stranded(table, kept.as_ref(), false).await {
            let ranges = answer.map_err(|why| {
                let message = format!("pod {pod} does not say what its log has of table {table} ({why})");
                Error::unavailable("pod_unreachable", message)
            })?;
            there.insert(pod, ranges);
        }
        let line = |pod: &PodId, range: StrandedRange, why: Option<String>| Line {
            table: table.clone(),
            stream: range.stream,
            session: range.session.0,
            start: range.offsets.start,
            end: Some(range.offsets.end),
            count: Some(range.offsets.count()),
            place: format!("a log at {pod}, for table id {}, which is gone", range.table.0),
            why,
        };
        let lines = |pod: &PodId, ranges: Vec<StrandedRange>, why: Option<&String>| {
            ranges.into_iter().map(|range| line(pod, range, why.cloned())).collect::<Vec<_>>()
        };
        if !in_earnest {
            let all = there.into_iter().flat_map(|(pod, ranges)| lines(&pod, ranges, None));
            return Ok((all.collect(), Vec::new()));
        }
        let (mut given_up, mut left) = (Vec::new(), Vec::new());
        for (pod, answer) in self.drop_stranded(table, kept.as_ref(), true).await {
            match answer {
                Ok(ranges) => given_up.extend(lines(&pod, ranges, None)),
                // It may have done so: its own log lines say that.
                Err(why) => left.extend(lines(&pod, there.remove(&pod).unwrap_or_default(), Some(&why))),
            }
        }
        Ok((given_up, left))
    }

    /// Named streams that were in the lost logs, with nothing behind: how far they were acked, their producers know alone.
    async fn ends(&self, named: &Named, missing: &[Missing]) -> Result<(Vec<Line>, bool), Error> {
        let (mut ends, mut left) = (Vec::new(), RECORDS_MAX);
        if named.is_empty() {
            return Ok((ends, false));
        }
        let logs: BTreeSet<LogId> = named.keys().copied().collect();
        for table in self.tables.list().await? {
            let (records, looked) = record::naming(self.tables.place(&table), &logs, left).await?;
            left = left.saturating_sub(looked);
            if records.is_empty() {
                continue;
            }
            let Ok((_, map)) = self.tables.newest(&table).await else { continue };
            for record in records {
                let stream = record.stream();
                let has_more = |missing: &Missing| missing.table == table && missing.gap.key.stream == stream;
                if missing.iter().any(has_more) {
                    continue;
                }
                let of = record.logs.iter().filter(|entry| logs.contains(&entry.log));
                let place = of.map(|entry| told(entry.log, Some(&entry.pod))).collect::<Vec<_>>().join(", ");
                let (start, session) = (map.next(&stream), record.session.0);
                let table = table.clone();
                ends.push(Line { table, stream, session, start, end: None, count: None, place, why: None });
            }
        }
        Ok((ends, left == 0))
    }
}

/// That the named logs are lost, as far as the pods that are there can say; takes out those of a pod that are not.
fn check_lost(
    lost: &Lost,
    named: &mut Named,
    answers: &[Answer],
    silent: &[(PodId, String)],
) -> Result<(), Error> {
    for answer in answers {
        if named.contains_key(&answer.log) {
            if matches!(lost, Lost::Pod(_)) && named.len() > 1 {
                named.remove(&answer.log);
                continue;
            }
            let (log, pod) = (answer.log.0, &answer.pod);
            let message = format!(
                "log {log} is not lost: pod {pod} is there, and writes it; where that is to go, drain the pod"
            );
            return Err(Error::invalid("log_in_use", message));
        }
        if let Some(log) = named.keys().find(|log| answer.adopting.contains(log)) {
            let (log, pod) = (log.0, &answer.pod);
            let message = format!(
                "log {log} is not lost: pod {pod} is taking it over; what it waits for is in other logs"
            );
            return Err(Error::invalid("log_in_use", message));
        }
    }
    // The lost pod itself may still be listed.
    let is_other = |(pod, _): &&(PodId, String)| !named.values().flatten().any(|owner| owner == pod);
    match silent.iter().find(is_other) {
        None => Ok(()),
        Some((pod, why)) => {
            let message = format!(
                "pod {pod} may have what is missing, and does not say what it has ({why}): start it again, or wait until the \
                 pool has lost it; nothing was given up"
            );
            Err(Error::unavailable("pod_unreachable", message))
        }
    }
}

/// Why what a table misses may still come, if so.
fn why_not(absent: &BTreeSet<LogId>, is_stranded: bool, owners: &BTreeMap<LogId, PodId>) -> Option<String> {
    if !absent.is_empty() {
        let logs = absent.iter().map(|log| told(*log, owners.get(log))).collect::<Vec<_>>().join(", ");
        return Some(format!("may be in {logs} too: bring that back, or release it as well"));
    }
    is_stranded.then(|| "may be in entries that a pod has stopped writing: start that pod again".to_owned())
}

/// A log as people are told of it.
fn told(log: LogId, pod: Option<&PodId>) -> String {
    match pod {
        Some(pod) => format!("log {} of {pod}", log.0),
        None => format!("log {}", log.0),
    }
}
