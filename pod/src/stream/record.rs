//! Records of named streams: who holds a stream, and which logs may hold its runs.
//!
//! A record is a short log of objects, `_sluice/streams/<uuid of the name>/<n>.json`, beside the table's data: the
//! highest n counts. A change is one put-if-absent of n + 1, which every object store and every file system can
//! do; a nonce tells whether a put whose reply was lost was ours.
//!
//! *Owns*: the record, and changing it by compare-and-swap.
//! *Does not own*: fencing the logs that it names (`service`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use serde::{Deserialize, Serialize};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::Encoding;
use sluice_shared::ids::{LogId, OffsetRange, PodId, SessionId, StreamId, StreamName};
use uuid::Uuid;

/// Older versions of a record that are kept behind the newest, for a reader that has just listed them.
const OLD_VERSIONS_KEPT: u64 = 4;
/// Claims of older sessions that are remembered: an open that comes late must not fence who came after it.
const CLAIMS_KEPT: usize = 8;
/// Tries against rivals before an open is given up as `Unavailable`.
const TRIES_MAX: u32 = 20;
/// The session of a stream's first producer.
pub const FIRST_SESSION: SessionId = SessionId(1);

/// Who holds a named stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamRecord {
    /// The stream's name, to tell it from another whose name has the same hash.
    pub name: StreamName,
    /// How often a stream of this name was begun anew.
    pub incarnation: u64,
    /// The newest session.
    pub session: SessionId,
    /// Who holds that session: made anew by the gateway for each producer's hold on the stream, the same in all its opens.
    #[serde(default, skip_serializing_if = "Uuid::is_nil")]
    pub claim: Uuid,
    /// Those of the sessions before, the newest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    past_claims: Vec<Uuid>,
    /// The logs that may hold runs of the stream that the table does not have yet.
    pub logs: Vec<LogEntry>,
    /// How the records of a stream that counts its requests are encoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// Who began it, where that was asked: no other may go on with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Offsets that an operator has given up, apart and by rising offset: whoever sends them again is told so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub released: Vec<(u64, u64)>,
    /// The stream has ended for good.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub retired: bool,
    nonce: Uuid,
}

/// A log, and the pod that writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// The log.
    pub log: LogId,
    /// Its pod.
    pub pod: PodId,
}

impl StreamRecord {
    /// The stream's id.
    pub fn stream(&self) -> StreamId {
        StreamId::named(&self.name, self.incarnation)
    }
}

/// One named stream's record in its table's storage.
pub struct Records {
    store: Arc<dyn ObjectStore>,
    folder: Path,
    name: StreamName,
}

impl Records {
    /// The record of `name` in the table at `root`.
    pub fn new((store, root): (Arc<dyn ObjectStore>, Path), name: StreamName) -> Self {
        let hash = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_str().as_bytes()).simple().to_string();
        let folder = root.join("_sluice").join("streams").join(hash);
        Self { store, folder, name }
    }

    /// Begins a new session: raises the session number and adds `log`. An open of the newest session that comes once more,
    /// since its answer was lost or late, is that session. Answers the new record, in which all logs still stand that the
    /// older sessions may have written to.
    ///
    /// # Errors
    /// What `terms` say of the stream; `Fenced` for an open that a newer session has overtaken; `Unavailable` where the
    /// storage fails or rivals are always faster.
    pub async fn begin_session(&self, log: &LogEntry, terms: &SessionTerms) -> Result<StreamRecord, Error> {
        self.change(|old| {
            terms.check(&self.name, old.as_ref())?;
            let mut new = old.unwrap_or_else(|| self.first());
            if new.past_claims.contains(&terms.claim) {
                return Err(super::fenced(&new.stream(), new.session));
            }
            if terms.claim.is_nil() || terms.claim != new.claim {
                new.session.0 += 1;
                let past = std::mem::replace(&mut new.claim, terms.claim);
                new.past_claims.extend(Some(past).filter(|past| !past.is_nil()));
                let excess = new.past_claims.len().saturating_sub(CLAIMS_KEPT);
                new.past_claims.drain(..excess);
            } else if new.logs.contains(log) {
                return Ok(None);
            }
            new.encoding = new.encoding.or(terms.encoding);
            new.client = new.client.or_else(|| terms.client.clone());
            add(&mut new.logs, log);
            Ok(Some(new))
        })
        .await
    }

    /// Ends the stream for good: raises the session number, so that it can be fenced. Answers the record, which is left
    /// as it is where the stream has ended already.
    ///
    /// # Errors
    /// `NotFound` where there is no such stream; `Forbidden` where it is another client's; `Unavailable` where the
    /// storage fails.
    pub async fn retire(&self, client: Option<&str>) -> Result<StreamRecord, Error> {
        self.change(|old| {
            let mut record = old.ok_or_else(|| not_found(&self.name))?;
            check_client(&record, client)?;
            let was_retired = std::mem::replace(&mut record.retired, true);
            record.session.0 += 1;
            Ok((!was_retired).then_some(record))
        })
        .await
    }

    /// Goes on in `session`, which is `terms.claim`'s: adds `log`, so that a newer session will ask it too. A session that
    /// opened before its table was made is the first, and has no record yet: whoever comes first with records gets it.
    ///
    /// # Errors
    /// `Fenced` where the session is another claim's, or there is a newer one; `NotFound` where the stream is not known;
    /// `Forbidden` where it is another client's; `Unavailable` where the storage fails.
    pub async fn join_session(
        &self,
        session: SessionId,
        log: &LogEntry,
        terms: &SessionTerms,
    ) -> Result<StreamRecord, Error> {
        self.change(|old| {
            let first = || StreamRecord {
                session: FIRST_SESSION,
                claim: terms.claim,
                client: terms.client.clone(),
                ..self.first()
            };
            let Some(mut record) = old.or_else(|| (session == FIRST_SESSION).then(first)) else {
                return Err(not_found(&self.name));
            };
            check_client(&record, terms.client.as_deref())?;
            if record.retired {
                return Err(retired(&self.name));
            }
            // Who has no claim comes from before there were any.
            let is_ours = terms.claim.is_nil() || record.claim.is_nil() || terms.claim == record.claim;
            if record.session != session || !is_ours {
                return Err(super::fenced(&record.stream(), session));
            }
            let added = add(&mut record.logs, log);
            Ok(added.then_some(record))
        })
        .await
    }

    /// Drops all logs but `log` where the record is still `known`: the others have nothing that is not in the
    /// table. Does nothing where the record has changed.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn keep_only(&self, known: &StreamRecord, log: &LogEntry) -> Result<(), Error> {
        self.change(|old| {
            let unchanged = old.filter(|old| old.nonce == known.nonce);
            Ok(unchanged.map(|old| StreamRecord { logs: vec![log.clone()], ..old }))
        })
        .await
        .map(|_| ())
    }

    /// Notes that offsets of the stream have been given up. Does nothing where there is no record of it.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn release(&self, stream: &StreamId, offsets: OffsetRange) -> Result<(), Error> {
        let changed = self.change(|old| {
            let record = old.ok_or_else(|| not_found(&self.name))?;
            let released = with_range(&record.released, offsets);
            let is_new = record.stream() == *stream && released != record.released;
            Ok(is_new.then_some(StreamRecord { released, ..record }))
        });
        match changed.await {
            Err(error) if error.kind != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn first(&self) -> StreamRecord {
        let name = self.name.clone();
        StreamRecord {
            name,
            incarnation: 0,
            session: SessionId(0),
            claim: Uuid::nil(),
            past_claims: Vec::new(),
            logs: Vec::new(),
            encoding: None,
            client: None,
            released: Vec::new(),
            retired: false,
            nonce: Uuid::nil(),
        }
    }

    /// Compare-and-swap. `change` answers None to leave the record as it is.
    async fn change(
        &self,
        change: impl Fn(Option<StreamRecord>) -> Result<Option<StreamRecord>, Error> + Send + Sync,
    ) -> Result<StreamRecord, Error> {
        for _ in 0..TRIES_MAX {
            let newest = self.newest().await?;
            let (number, old) = match newest {
                Some((number, record)) => (number + 1, Some(record)),
                None => (0, None),
            };
            let Some(mut record) = change(old.clone())? else {
                return old
                    .ok_or_else(|| Error::internal("a stream record was left as it is, but there is none"));
            };
            record.nonce = Uuid::new_v4();
            if self.put(number, &record).await? {
                self.delete_old(number).await;
                return Ok(record);
            }
        }
        let message =
            format!("stream {}: other producers open it at the same time, again and again", self.name);
        Err(Error::unavailable("stream_contended", message))
    }

    async fn newest(&self) -> Result<Option<(u64, StreamRecord)>, Error> {
        for _ in 0..TRIES_MAX {
            let objects = self.store.list(Some(&self.folder)).try_collect::<Vec<_>>().await;
            let objects = objects.map_err(|error| self.failed("list", &error))?;
            let numbers = objects.iter().filter_map(|object| number(&object.location));
            let Some(newest) = numbers.max() else { return Ok(None) };
            // A version that was listed may be gone by now: then there are newer ones.
            if let Some(record) = self.get(newest).await? {
                return Ok(Some((newest, record)));
            }
        }
        Err(Error::unavailable(
            "stream_contended",
            format!("stream {}: its record changes too fast", self.name),
        ))
    }

    async fn get(&self, number: u64) -> Result<Option<StreamRecord>, Error> {
        let bytes = match self.store.get(&self.path(number)).await {
            Ok(object) => object.bytes().await,
            Err(error) => Err(error),
        };
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed("read", &error)),
        };
        let record: StreamRecord =
            serde_json::from_slice(&bytes).map_err(|error| self.failed("understand", &error))?;
        if record.name != self.name {
            let message =
                format!("streams {} and {} have one hash: rename one of them", self.name, record.name);
            return Err(Error::invalid("stream_name_collision", message));
        }
        Ok(Some(record))
    }

    async fn put(&self, number: u64, record: &StreamRecord) -> Result<bool, Error> {
        let bytes = serde_json::to_vec(record).expect("a record is plain JSON");
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.store.put_opts(&self.path(number), bytes.into(), options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => {
                let winner = self.get(number).await?;
                Ok(winner.is_some_and(|winner| winner.nonce == record.nonce))
            }
            Err(error) => Err(self.failed("write", &error)),
        }
    }

    async fn delete_old(&self, newest: u64) {
        let Some(old) = newest.checked_sub(OLD_VERSIONS_KEPT) else { return };
        // What is left behind is read by nobody: the next change tries its own oldest.
        if let Err(error) = self.store.delete(&self.path(old)).await {
            tracing::debug!(stream = %self.name, %error, "an old stream record stays");
        }
    }

    fn path(&self, number: u64) -> Path {
        self.folder.clone().join(format!("{number:020}.json"))
    }

    fn failed(&self, what: &str, error: &dyn std::fmt::Display) -> Error {
        let message = format!("stream {}: cannot {what} its record in {}: {error}", self.name, self.folder);
        Error::unavailable("stream_record", message)
    }
}

/// Ranges with one more; those that touch become one.
fn with_range(ranges: &[(u64, u64)], more: OffsetRange) -> Vec<(u64, u64)> {
    let mut all = ranges.to_vec();
    all.push((more.start, more.end));
    all.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (start, end) in all {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = end.max(last.1),
            _ => merged.push((start, end)),
        }
    }
    merged
}

/// The records of a table's streams that name one of these logs, and how many streams were looked at: at most so many.
///
/// # Errors
/// `Unavailable` where the storage fails.
pub async fn naming(
    (store, root): (Arc<dyn ObjectStore>, Path),
    logs: &BTreeSet<LogId>,
    most: usize,
) -> Result<(Vec<StreamRecord>, usize), Error> {
    let folder = root.join("_sluice").join("streams");
    let failed = |error: object_store::Error| {
        Error::unavailable(
            "stream_record",
            format!("cannot look through the stream records in /{folder}: {error}"),
        )
    };
    let mut newest: BTreeMap<String, Path> = BTreeMap::new();
    let mut listed = store.list(Some(&folder));
    while let Some(object) = listed.try_next().await.map_err(failed)? {
        let path = object.location;
        let Some(stream) = path.prefix_match(&folder).and_then(|mut parts| parts.next()) else { continue };
        let stream = stream.as_ref().to_owned();
        let is_new = !newest.contains_key(&stream);
        if is_new && newest.len() == most {
            continue;
        }
        // Numbers have leading zeros: names rise as they do.
        let there = newest.entry(stream).or_insert_with(|| path.clone());
        if *there < path {
            *there = path;
        }
    }
    let mut records = Vec::new();
    for path in newest.values() {
        let read = async { store.get(path).await?.bytes().await };
        let bytes = match read.await {
            Ok(bytes) => bytes,
            // A newer version has just taken its place: somebody uses the stream.
            Err(object_store::Error::NotFound { .. }) => continue,
            Err(error) => return Err(failed(error)),
        };
        let record = serde_json::from_slice::<StreamRecord>(&bytes).ok();
        records.extend(record.filter(|record| record.logs.iter().any(|entry| logs.contains(&entry.log))));
    }
    Ok((records, newest.len()))
}

/// What a new session expects of its stream.
#[derive(Debug, Clone, Default)]
pub struct SessionTerms {
    /// It is there already.
    pub old: bool,
    /// Its records are encoded so, from its first session on.
    pub encoding: Option<Encoding>,
    /// Who opens it, where that was asked.
    pub client: Option<String>,
    /// Tells this hold on the stream from all others.
    pub claim: Uuid,
}

impl SessionTerms {
    fn check(&self, name: &StreamName, old: Option<&StreamRecord>) -> Result<(), Error> {
        let Some(old) = old else {
            return if self.old { Err(not_found(name)) } else { Ok(()) };
        };
        check_client(old, self.client.as_deref())?;
        if old.retired {
            return Err(retired(name));
        }
        match (old.encoding, self.encoding) {
            (Some(had), Some(has)) if had != has => {
                let message = format!("stream {name}: its records are {had}, not {has}");
                Err(Error::invalid("record_type", message))
            }
            _ => Ok(()),
        }
    }
}

/// Who was never asked is let in, as into a stream whose first producer was not.
fn check_client(record: &StreamRecord, client: Option<&str>) -> Result<(), Error> {
    match (record.client.as_deref(), client) {
        (Some(owner), Some(client)) if owner != client => {
            let message = format!("stream {}: another client began it: take another name", record.name);
            Err(Error::forbidden("not_its_client", message))
        }
        _ => Ok(()),
    }
}

fn not_found(name: &StreamName) -> Error {
    let message = format!("stream {name}: no record of it beside its table");
    Error::not_found("stream_not_found", message)
}

fn retired(name: &StreamName) -> Error {
    let message = format!("stream {name} was retired: begin a new one");
    Error::not_found("stream_retired", message)
}

fn number(path: &Path) -> Option<u64> {
    path.filename()?.strip_suffix(".json")?.parse().ok()
}

fn add(logs: &mut Vec<LogEntry>, log: &LogEntry) -> bool {
    let missing = !logs.contains(log);
    if missing {
        logs.push(log.clone());
    }
    missing
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use sluice_shared::error::ErrorKind;

    use super::*;

    fn records(store: &Arc<InMemory>) -> Records {
        let store: Arc<dyn ObjectStore> = Arc::clone(store) as _;
        Records::new((store, Path::from("t")), "loader".parse().expect("valid"))
    }

    fn log(pod: &str) -> LogEntry {
        LogEntry { log: LogId(Uuid::new_v4()), pod: pod.parse().expect("valid") }
    }

    fn terms(claim: u128) -> SessionTerms {
        SessionTerms { claim: Uuid::from_u128(claim), ..SessionTerms::default() }
    }

    #[tokio::test]
    async fn what_is_given_up_is_kept_through_all_sessions_and_of_its_own_stream_alone() {
        let records = records(&Arc::new(InMemory::new()));
        let range = |start, end| OffsetRange { start, end };
        let id = StreamId::named(&records.name, 0);
        records.release(&id, range(0, 5)).await.expect("there is no such stream");
        let begun = records.begin_session(&log("a"), &terms(1)).await.expect("begun");
        assert_eq!((begun.stream(), &begun.released), (id.clone(), &Vec::new()));
        for (start, end) in [(10, 20), (30, 40), (20, 25), (12, 13)] {
            records.release(&id, range(start, end)).await.expect("noted");
        }
        records.release(&StreamId::named(&records.name, 1), range(50, 60)).await.expect("another one");
        let next = records.begin_session(&log("b"), &terms(2)).await.expect("begun");
        assert_eq!(next.released, [(10, 25), (30, 40)]);
        let joined = records.join_session(next.session, &log("c"), &terms(2)).await.expect("joined");
        assert_eq!(joined.released, next.released);
    }

    #[tokio::test]
    async fn an_open_that_comes_once_more_is_the_same_session_and_a_late_one_fences_nobody() {
        let records = records(&Arc::new(InMemory::new()));
        let (a, b) = (log("a"), log("b"));
        let first = records.begin_session(&a, &terms(1)).await.expect("begun");
        let again = records.begin_session(&b, &terms(1)).await.expect("the same");
        assert_eq!((again.session, &again.logs), (first.session, &vec![a.clone(), b.clone()]));
        assert_eq!(records.begin_session(&b, &terms(1)).await.expect("the same"), again, "nothing to change");
        let second = records.begin_session(&b, &terms(2)).await.expect("begun");
        for claim in [1, 2, 3] {
            let late = records.begin_session(&a, &terms(claim)).await;
            match claim {
                1 => assert_eq!(late.expect_err("overtaken").kind, ErrorKind::Fenced),
                2 => assert_eq!(late.expect("the same").session, second.session),
                _ => assert_eq!(late.expect("newer").session, SessionId(second.session.0 + 1)),
            }
        }
    }

    #[tokio::test]
    async fn the_first_session_is_whose_records_came_first() {
        let records = records(&Arc::new(InMemory::new()));
        let (a, b) = (log("a"), log("b"));
        records.join_session(FIRST_SESSION, &a, &terms(1)).await.expect("nobody was there");
        for log in [&a, &b] {
            let rival = records.join_session(FIRST_SESSION, log, &terms(2)).await.expect_err("a rival");
            assert_eq!(rival.kind, ErrorKind::Fenced);
        }
        let moved = records.join_session(FIRST_SESSION, &b, &terms(1)).await.expect("its own");
        assert_eq!(moved.logs, [a, b.clone()]);
        let other = SessionTerms { client: Some("other".to_owned()), ..terms(1) };
        assert_eq!(
            records.join_session(FIRST_SESSION, &b, &other).await.expect("not asked before").claim,
            moved.claim
        );
        let error = records.join_session(SessionId(2), &b, &terms(1)).await.expect_err("no such session");
        assert_eq!(error.kind, ErrorKind::Fenced);
    }

    #[tokio::test]
    async fn a_new_session_fences_the_older_wherever_it_is() {
        let records = records(&Arc::new(InMemory::new()));
        let (a, b) = (log("a"), log("b"));
        let first = records.begin_session(&a, &terms(1)).await.expect("begun");
        assert_eq!(first.session, SessionId(1));
        let moved = records.join_session(first.session, &b, &terms(1)).await.expect("joined");
        assert_eq!(moved.logs, [a.clone(), b.clone()]);
        let second = records.begin_session(&b, &terms(2)).await.expect("begun");
        assert_eq!((second.session, second.logs), (SessionId(2), vec![a, b.clone()]));
        let error = records.join_session(first.session, &b, &terms(1)).await.expect_err("older");
        assert_eq!(error.kind, ErrorKind::Fenced);
    }

    #[tokio::test]
    async fn streams_that_name_a_log_are_found_by_their_newest_record() {
        let store = Arc::new(InMemory::new());
        let (a, b) = (log("a"), log("b"));
        let named = |name: &str| {
            Records::new((Arc::clone(&store) as _, Path::from("t")), name.parse().expect("valid"))
        };
        for name in ["one", "two"] {
            named(name).begin_session(&a, &terms(1)).await.expect("begun");
        }
        let moved = named("two").begin_session(&b, &terms(2)).await.expect("begun");
        named("two").keep_only(&moved, &b).await.expect("changed");
        let found = async |log: &LogEntry, most| {
            let (records, looked) =
                naming((Arc::clone(&store) as _, Path::from("t")), &[log.log].into(), most)
                    .await
                    .expect("read");
            (records.iter().map(|record| record.name.to_string()).collect::<Vec<_>>(), looked)
        };
        assert_eq!(found(&a, 10).await, (vec!["one".to_owned()], 2));
        assert_eq!(found(&b, 10).await, (vec!["two".to_owned()], 2));
        assert_eq!(found(&a, 1).await.1, 1, "no more than asked for");
    }

    #[tokio::test]
    async fn rivals_get_different_sessions() {
        let store = Arc::new(InMemory::new());
        let opens = (0..8).map(|_| async {
            let records = records(&store);
            records.begin_session(&log("a"), &SessionTerms::default()).await.expect("begun").session.0
        });
        let mut sessions = futures_util::future::join_all(opens).await;
        sessions.sort_unstable();
        assert_eq!(sessions, (1..=8).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn logs_are_dropped_only_from_the_record_that_was_seen() {
        let records = records(&Arc::new(InMemory::new()));
        let (a, b) = (log("a"), log("b"));
        let seen = records.begin_session(&a, &terms(1)).await.expect("begun");
        let seen = records.join_session(seen.session, &b, &terms(1)).await.expect("joined");
        let newer = records.begin_session(&b, &terms(2)).await.expect("begun");
        records.keep_only(&seen, &b).await.expect("no change");
        records.keep_only(&newer, &b).await.expect("changed");
        let record = records.join_session(newer.session, &b, &terms(2)).await.expect("joined");
        assert_eq!(record.logs, [b]);
    }
}
