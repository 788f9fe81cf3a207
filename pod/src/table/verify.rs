//! Checks a table from the outside: of each stream, which records a version has, which are absent, which are twice.
//!
//! Without the producers' notes it cannot tell a record that was refused from one that was lost: it says which offsets
//! are absent, and explains those that stand in `<table>__rejected`. Everything else that must not be is a fault.
//!
//! *Owns*: what is counted, and what of it is a fault.
//! *Does not own*: reading (`delta::live`), printing, what producers were told (the rig's auditor has their notes).
//! Checks P2.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use arrow::error::ArrowError;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use sluice_shared::error::Error;
use sluice_shared::ids::{OffsetRange, StreamId, TableName, TableVersion};
use sluice_shared::table::properties::{ON_INVALID, QUARANTINE};

use super::delta::live::{LiveFile, Reading};
use super::delta::{Delta, DeltaError};
use super::home::map_path;
use super::watermark::{MapError, WatermarkMap};
use super::{Storage, TablesPlace, rejected};

/// By which a row says whose it is; rejected records have them too.
const COLUMNS: [&str; 2] = ["_stream", "_offset"];

/// Why a table could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// Its log or its files cannot be read.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// Rows do not say whose they are.
    #[error("version {0} has no columns _stream and _offset: there is nothing to check its rows by")]
    NoSystemColumns(TableVersion),
    /// A file's columns are not what they are called.
    #[error("{file}: {why}")]
    File {
        /// Which one.
        file: String,
        /// What is wrong.
        why: String,
    },
    /// The version names a map that is not there.
    #[error("version {version} names the watermark map {path}: {why}")]
    Map {
        /// Which version.
        version: TableVersion,
        /// Where the map should be.
        path: Path,
        /// What is wrong.
        why: String,
    },
}

/// What a version has of one stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamCount {
    /// Rows, those that are there twice twice.
    pub rows: u64,
    /// Offsets that are there, rising and apart.
    pub there: Vec<OffsetRange>,
    /// Offsets that more than one row has; the first of them.
    pub doubled: Option<(u64, u64)>,
    /// One more than the last offset that the version's map says is in the table.
    pub watermark: Option<u64>,
    /// Absent offsets before the watermark (without one, before the last that is there) that stand in `__rejected`.
    pub rejected: u64,
    /// The other absent ones: refused, or lost.
    pub absent: Vec<OffsetRange>,
}

impl StreamCount {
    /// First offset that is there.
    pub fn first(&self) -> Option<u64> {
        self.there.first().map(|range| range.start)
    }

    /// Last offset that is there.
    pub fn last(&self) -> Option<u64> {
        self.there.last().map(|range| range.end - 1)
    }

    /// How many are absent without a reason.
    pub fn absent_count(&self) -> u64 {
        self.absent.iter().map(OffsetRange::count).sum()
    }
}

/// What must not be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Rows with the same offset.
    #[error("stream {stream}: {count} offsets are there more than once, the first is {first}")]
    Doubled {
        /// Whose.
        stream: String,
        /// How many.
        count: u64,
        /// The first of them.
        first: u64,
    },
    /// Rows that the map does not know: they could come again.
    #[error(
        "stream {stream}: offset {last} is there, but the watermark map has it only up to before {watermark}"
    )]
    BeyondWatermark {
        /// Whose.
        stream: String,
        /// Its last offset.
        last: u64,
        /// What the map says.
        watermark: u64,
    },
    /// A named stream with rows and without a mark.
    #[error("stream {stream}: has rows, and is not in the watermark map")]
    Unknown {
        /// Which one.
        stream: String,
    },
    /// The table keeps what is refused, and this is neither here nor there.
    #[error(
        "stream {stream}: {count} offsets are neither here nor in the rejected records, the first is {first}"
    )]
    Missing {
        /// Whose.
        stream: String,
        /// How many.
        count: u64,
        /// The first of them.
        first: u64,
    },
    /// The version before had more.
    #[error("stream {stream}: {count} offsets of the version before are gone, the first is {first}")]
    Vanished {
        /// Whose.
        stream: String,
        /// How many.
        count: u64,
        /// The first of them.
        first: u64,
    },
}

/// What one version holds.
#[derive(Debug, Clone)]
pub struct Report {
    /// Which one.
    pub version: TableVersion,
    /// Of all streams, by name.
    pub streams: BTreeMap<String, StreamCount>,
    /// Rows of other writers, which belong to no stream.
    pub foreign_rows: u64,
    /// What is wrong.
    pub faults: Vec<Fault>,
}

/// What one file has.
#[derive(Debug, Default)]
struct FileRuns {
    /// As its rows come, rising or not.
    runs: Vec<(Arc<str>, OffsetRange)>,
    /// Rows of other writers.
    foreign: u64,
}

/// Checks versions of one table. A file is read once, however many versions have it.
pub struct Verifier {
    delta: Delta,
    store: Arc<dyn ObjectStore>,
    directory: Path,
    rejected_directory: Path,
    files: HashMap<(String, u64), Arc<FileRuns>>,
    before: Option<BTreeMap<String, StreamCount>>,
}

impl Verifier {
    /// Of the table `name` in this place. Must be called in a multi-threaded runtime.
    ///
    /// # Errors
    /// Where there is no such place.
    pub fn new(place: &TablesPlace, name: &TableName) -> Result<Self, Error> {
        let Storage { stores, root, .. } = Storage::there(place)?;
        let parts = |name: &str| name.split('.').fold(root.clone(), Path::join);
        let store = stores.tables;
        Ok(Self {
            delta: Delta::new(Arc::clone(&store)),
            store,
            directory: parts(name.as_str()),
            rejected_directory: parts(&format!("{name}{}", rejected::SUFFIX)),
            files: HashMap::new(),
            before: None,
        })
    }

    /// The newest version's number.
    ///
    /// # Errors
    /// Where there is no table, or its log cannot be read.
    pub async fn newest(&self) -> Result<TableVersion, VerifyError> {
        Ok(self.delta.read(&self.directory, None).await?.number())
    }

    /// The oldest version of which the log still has the commit. 0 where it has none.
    ///
    /// # Errors
    /// Where its log cannot be listed.
    pub async fn oldest(&self) -> Result<TableVersion, VerifyError> {
        Ok(self.delta.oldest(&self.directory).await?.unwrap_or(0))
    }

    /// Checks one version. Of versions that are checked one after the other none may lack what the one before had.
    ///
    /// # Errors
    /// Where the version, its map or its files cannot be read.
    pub async fn version(&mut self, version: TableVersion) -> Result<Report, VerifyError> {
        let reading = self.delta.read(&self.directory, Some(version)).await?;
        let files = reading.files(&COLUMNS).await?;
        let files = files.ok_or(VerifyError::NoSystemColumns(version))?;
        let mut runs = Vec::with_capacity(files.len());
        let mut kept = HashMap::with_capacity(files.len());
        for file in &files {
            let key = file.key()?;
            let read = match self.files.remove(&key) {
                Some(read) => read,
                None => Arc::new(read_runs(file, &key.0).await?),
            };
            runs.push(Arc::clone(&read));
            kept.insert(key, read);
        }
        self.files = kept;
        let mut streams = count(runs.iter().map(AsRef::as_ref));
        let foreign_rows = runs.iter().map(|file| file.foreign).sum();
        let map = self.map(&reading).await?;
        mark(&mut streams, map.as_ref());
        let rejected = self.rejected(&streams).await?;
        streams.values_mut().for_each(StreamCount::find_absent);
        explain(&mut streams, &rejected);
        let keeps_refused = reading.property(ON_INVALID) == Some(QUARANTINE);
        let mut faults = faults(&streams, map.is_some(), keeps_refused);
        faults.extend(vanished(self.before.as_ref(), &streams));
        self.before = Some(streams.clone());
        Ok(Report { version, streams, foreign_rows, faults })
    }

    async fn map(&self, reading: &Reading) -> Result<Option<WatermarkMap>, VerifyError> {
        let Some(number) = reading.map() else { return Ok(None) };
        let path = map_path(&self.directory, &reading.table_id().0, number);
        let fault = |why: String| VerifyError::Map { version: reading.number(), path: path.clone(), why };
        let read = async { self.store.get(&path).await?.bytes().await };
        let bytes = read.await.map_err(|error: object_store::Error| fault(error.to_string()))?;
        let map = WatermarkMap::decode(&bytes).map_err(|error: MapError| fault(error.to_string()))?;
        if map.number != number || map.table != reading.table_id() {
            return Err(fault(format!("it is map {} of table id {}", map.number, map.table.0)));
        }
        Ok(Some(map))
    }

    /// Offsets that stand in the table of rejected records, of streams that have something absent.
    async fn rejected(
        &self,
        streams: &BTreeMap<String, StreamCount>,
    ) -> Result<BTreeMap<String, StreamCount>, VerifyError> {
        let is_whole =
            |count: &StreamCount| count.there.len() <= 1 && count.last().map(|last| last + 1) == count.end();
        if streams.values().all(|count| is_whole(count) && count.first() == Some(0)) {
            return Ok(BTreeMap::new());
        }
        let files = match self.delta.read(&self.rejected_directory, None).await {
            Ok(reading) => reading.files(&COLUMNS).await?.unwrap_or_default(),
            Err(DeltaError::NotFound(_)) => return Ok(BTreeMap::new()),
            Err(error) => return Err(error.into()),
        };
        let mut runs = Vec::with_capacity(files.len());
        for file in &files {
            runs.push(read_runs(file, &file.key()?.0).await?);
        }
        Ok(count(runs.iter()))
    }
}

async fn read_runs(file: &LiveFile, path: &str) -> Result<FileRuns, VerifyError> {
    let mut runs = FileRuns::default();
    for batch in file.rows().await? {
        let read = append_runs(&batch, &mut runs);
        read.map_err(|why| VerifyError::File { file: path.to_owned(), why })?;
    }
    Ok(runs)
}

fn append_runs(batch: &RecordBatch, to: &mut FileRuns) -> Result<(), String> {
    let column = |name: &str, kind: &DataType| -> Result<ArrayRef, String> {
        let column = batch.column_by_name(name).ok_or_else(|| format!("no column {name}"))?;
        cast(column, kind).map_err(|error: ArrowError| format!("column {name}: {error}"))
    };
    let (streams, offsets) = (column(COLUMNS[0], &DataType::Utf8)?, column(COLUMNS[1], &DataType::Int64)?);
    for (stream, offset) in streams.as_string::<i32>().iter().zip(offsets.as_primitive::<Int64Type>()) {
        let (stream, offset) = match (stream, offset.map(u64::try_from)) {
            (Some(stream), Some(Ok(offset))) => (stream, offset),
            (None, None) => {
                to.foreign += 1;
                continue;
            }
            (stream, _) => return Err(format!("a row of stream {stream:?} has the offset {offset:?}")),
        };
        match to.runs.last_mut() {
            Some((last, range)) if **last == *stream && range.end == offset => range.end += 1,
            _ => to.runs.push((stream.into(), OffsetRange { start: offset, end: offset + 1 })),
        }
    }
    Ok(())
}

/// What these files have of each stream.
fn count<'f>(files: impl Iterator<Item = &'f FileRuns>) -> BTreeMap<String, StreamCount> {
    let mut ranges: BTreeMap<&str, Vec<OffsetRange>> = BTreeMap::new();
    for (stream, range) in files.flat_map(|file| &file.runs) {
        ranges.entry(stream).or_default().push(*range);
    }
    let counted = ranges.into_iter().map(|(stream, mut ranges)| {
        ranges.sort_by_key(|range| range.start);
        (stream.to_owned(), StreamCount::of(&ranges))
    });
    counted.collect()
}

impl StreamCount {
    /// Of ranges that are sorted by their beginning.
    fn of(ranges: &[OffsetRange]) -> Self {
        let mut count = Self::default();
        for range in ranges {
            count.rows += range.count();
            match count.there.last_mut() {
                Some(last) if range.start <= last.end => {
                    let twice = last.end.min(range.end) - range.start;
                    last.end = last.end.max(range.end);
                    if twice > 0 {
                        let (doubled, first) = count.doubled.unwrap_or((0, range.start));
                        count.doubled = Some((doubled + twice, first));
                    }
                }
                _ => count.there.push(*range),
            }
        }
        count
    }

    /// One more than the last offset that should be there.
    fn end(&self) -> Option<u64> {
        self.watermark.max(self.last().map(|last| last + 1))
    }

    fn find_absent(&mut self) {
        let end = self.end().unwrap_or(0);
        let all = [OffsetRange { start: 0, end }];
        self.absent = without(&all, &self.there);
    }
}

/// What of `ranges` is not in `other`; both rising and apart.
fn without(ranges: &[OffsetRange], other: &[OffsetRange]) -> Vec<OffsetRange> {
    let (mut left, mut at) = (Vec::new(), 0);
    for range in ranges {
        let mut start = range.start;
        while other.get(at).is_some_and(|other| other.end <= start) {
            at += 1;
        }
        let mut next = at;
        while let Some(covers) = other.get(next).filter(|covers| covers.start < range.end) {
            if covers.start > start {
                left.push(OffsetRange { start, end: covers.start });
            }
            start = start.max(covers.end);
            next += 1;
        }
        if start < range.end {
            left.push(OffsetRange { start, end: range.end });
        }
    }
    left
}

fn mark(streams: &mut BTreeMap<String, StreamCount>, map: Option<&WatermarkMap>) {
    for (stream, mark) in map.into_iter().flat_map(WatermarkMap::streams) {
        streams.entry(stream.as_str().to_owned()).or_default().watermark = Some(mark.next);
    }
}

/// Absent offsets that are in the table of rejected records are there by name.
fn explain(streams: &mut BTreeMap<String, StreamCount>, rejected: &BTreeMap<String, StreamCount>) {
    for (stream, count) in streams {
        let Some(rejected) = rejected.get(stream) else { continue };
        let before = count.absent_count();
        count.absent = without(&count.absent, &rejected.there);
        count.rejected = before - count.absent_count();
    }
}

fn faults(streams: &BTreeMap<String, StreamCount>, has_map: bool, keeps_refused: bool) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (name, count) in streams {
        let stream = || name.clone();
        if let Some((count, first)) = count.doubled {
            faults.push(Fault::Doubled { stream: stream(), count, first });
        }
        match (count.last(), count.watermark) {
            (Some(last), Some(watermark)) if last >= watermark => {
                faults.push(Fault::BeyondWatermark { stream: stream(), last, watermark });
            }
            // One that has ended, and has no name, leaves the map some time.
            (Some(_), None) if has_map && !is_ephemeral(name) => {
                faults.push(Fault::Unknown { stream: stream() })
            }
            _ => {}
        }
        if let Some(first) = count.absent.first().filter(|_| keeps_refused) {
            let (first, count) = (first.start, count.absent_count());
            faults.push(Fault::Missing { stream: stream(), count, first });
        }
    }
    faults
}

fn is_ephemeral(stream: &str) -> bool {
    stream.parse::<StreamId>().is_ok_and(|stream| stream.is_ephemeral())
}

/// What the version before had, and this one has not.
fn vanished(
    before: Option<&BTreeMap<String, StreamCount>>,
    streams: &BTreeMap<String, StreamCount>,
) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (stream, before) in before.into_iter().flatten() {
        let now = streams.get(stream).map_or(&[][..], |count| &count.there);
        let gone = without(&before.there, now);
        if let Some(first) = gone.first() {
            let count = gone.iter().map(OffsetRange::count).sum();
            faults.push(Fault::Vanished { stream: stream.clone(), count, first: first.start });
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn ranges(offsets: &BTreeSet<u64>) -> Vec<OffsetRange> {
        let mut ranges: Vec<OffsetRange> = Vec::new();
        for offset in offsets {
            match ranges.last_mut() {
                Some(last) if last.end == *offset => last.end += 1,
                _ => ranges.push(OffsetRange { start: *offset, end: offset + 1 }),
            }
        }
        ranges
    }

    fn offsets(ranges: &[OffsetRange]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.start..range.end).collect()
    }

    /// One stream, as two files have it.
    fn counted(one: &BTreeSet<u64>, two: &BTreeSet<u64>) -> StreamCount {
        let runs = |offsets| ranges(offsets).into_iter().map(|range| (Arc::from("s#0"), range)).collect();
        let files = [one, two].map(|offsets| FileRuns { runs: runs(offsets), foreign: 0 });
        let counted = count(files.iter()).remove("s#0");
        counted.unwrap_or_default()
    }

    proptest! {
        #[test]
        fn what_is_there_absent_and_double_is_counted_as_sets_have_it(
            one in prop::collection::btree_set(0..60_u64, 0..40),
            two in prop::collection::btree_set(0..60_u64, 0..40),
            rejected in prop::collection::btree_set(0..60_u64, 0..20),
            watermark in prop::option::of(0..70_u64),
        ) {
            let mut count = counted(&one, &two);
            let (all, both): (BTreeSet<u64>, BTreeSet<u64>) =
                (one.union(&two).copied().collect(), one.intersection(&two).copied().collect());
            prop_assert_eq!(offsets(&count.there), all.clone());
            prop_assert_eq!(count.rows as usize, one.len() + two.len());
            prop_assert_eq!(count.doubled, both.first().map(|first| (both.len() as u64, *first)));
            count.watermark = watermark;
            count.find_absent();
            let end = watermark.unwrap_or(0).max(all.last().map_or(0, |last| last + 1));
            let absent: BTreeSet<u64> = (0..end).filter(|offset| !all.contains(offset)).collect();
            prop_assert_eq!(offsets(&count.absent), absent.clone());
            let mut streams = BTreeMap::from([("s#0".to_owned(), count)]);
            let kept = BTreeMap::from([("s#0".to_owned(), counted(&rejected, &BTreeSet::new()))]);
            explain(&mut streams, &kept);
            let unexplained: BTreeSet<u64> = absent.difference(&rejected).copied().collect();
            prop_assert_eq!(offsets(&streams["s#0"].absent), unexplained.clone());
            prop_assert_eq!(streams["s#0"].rejected as usize, absent.len() - unexplained.len());
            // Seen from a version that had one file alone, nothing is gone; the other way round, what only it had.
            let before = BTreeMap::from([("s#0".to_owned(), counted(&one, &two))]);
            let after = BTreeMap::from([("s#0".to_owned(), counted(&one, &BTreeSet::new()))]);
            prop_assert_eq!(vanished(Some(&after), &before), vec![]);
            let gone: Vec<u64> = two.difference(&one).copied().collect();
            let expected = gone.first().map(|first| Fault::Vanished {
                stream: "s#0".to_owned(),
                count: gone.len() as u64,
                first: *first,
            });
            prop_assert_eq!(vanished(Some(&before), &after), Vec::from_iter(expected));
        }
    }

    #[test]
    fn each_fault_is_named() {
        let stream = |rows: &[u64], watermark| {
            let mut count = counted(&rows.iter().copied().collect(), &BTreeSet::new());
            count.watermark = watermark;
            count.find_absent();
            count
        };
        let found = |name: &str, count: StreamCount, keeps_refused| {
            faults(&BTreeMap::from([(name.to_owned(), count)]), true, keeps_refused)
        };
        let (named, ephemeral) = ("s#0", StreamId::ephemeral());
        assert_eq!(found(named, stream(&[0, 1], Some(2)), true), []);
        assert_eq!(found(named, stream(&[0, 1], Some(3)), false), [], "refused at its end");
        assert_eq!(
            found(named, stream(&[0, 2], Some(4)), true),
            [Fault::Missing { stream: named.into(), count: 2, first: 1 }]
        );
        assert_eq!(
            found(named, stream(&[0, 1], Some(1)), false),
            [Fault::BeyondWatermark { stream: named.into(), last: 1, watermark: 1 }]
        );
        assert_eq!(found(named, stream(&[0], None), false), [Fault::Unknown { stream: named.into() }]);
        assert_eq!(found(ephemeral.as_str(), stream(&[0], None), false), []);
        let twice = counted(&BTreeSet::from([0, 1]), &BTreeSet::from([1]));
        let twice = StreamCount { watermark: Some(2), ..twice };
        assert_eq!(found(named, twice, false), [Fault::Doubled { stream: named.into(), count: 1, first: 1 }]);
    }
}
