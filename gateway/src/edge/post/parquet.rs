//! A Parquet body: what says how to read it comes last, so that it goes into a file first, which has no name and is gone
//! with its handle.
//!
//! *Owns*: that file, rows as frames.
//! *Does not own*: which rows fit (the pod judges them).
//! Keeps P7: of a body only some rows are in memory, and it may not be longer than the configuration says.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use bytes::Bytes;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use sluice_shared::error::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinHandle, spawn_blocking};

use super::split::Ready;
use crate::session::Records;

/// Rows are read so many at a time, or fewer where they are large. A dictionary makes a large value of a few bits, in each
/// row anew, and nothing tells beforehand.
const ROWS: usize = 64;
/// Values that the rows read at a time may have in one column, as the file says of them on average: lists are runs of bits.
const VALUES: u64 = 1 << 20;
/// Bytes that the rows read at a time should have, as the file says of them on average.
const ROWS_BYTES: u64 = 1 << 20;

/// A body on its way into a file, and out again.
pub(super) struct Parquet {
    step: Step,
    bytes: u64,
    bytes_max: u64,
    places: Arc<Semaphore>,
    place: Option<OwnedSemaphorePermit>,
}

/// What is done at present. What is done elsewhere is waited for by whoever comes next.
enum Step {
    File(File),
    Writing(JoinHandle<std::io::Result<File>>),
    Rows(Box<Rows>),
    Reading(JoinHandle<More>),
    /// After the last row, or an error.
    Ended,
}

/// The next frames, and the rows after them. None at the end.
type More = Result<Option<(Box<Rows>, Vec<Records>)>, Error>;

/// The rows that are not read yet.
struct Rows {
    batches: ParquetRecordBatchReader,
    frame_bytes_max: usize,
}

impl Parquet {
    /// A body of at most `bytes_max` bytes, to be kept in `directory`.
    ///
    /// # Errors
    /// `Unavailable` where no file can be made there.
    pub(super) fn new(directory: &Path, bytes_max: u64, places: Arc<Semaphore>) -> Result<Self, Error> {
        let file = tempfile::tempfile_in(directory).map_err(|error| {
            let directory = directory.display();
            let message = format!(
                "cannot make a file for a Parquet body in {directory} (gateway.scratch_dir): {error}"
            );
            Error::unavailable("scratch", message)
        })?;
        Ok(Self { step: Step::File(file), bytes: 0, bytes_max, places, place: None })
    }

    /// Takes the next piece of the body. It is taken also where the future is dropped.
    ///
    /// # Errors
    /// `Invalid`: the body is too long. `Unavailable`: it cannot be stored.
    pub(super) async fn push(&mut self, piece: Bytes) -> Result<(), Error> {
        self.written().await?;
        self.bytes += piece.len() as u64;
        if self.bytes > self.bytes_max {
            let message = format!(
                "Parquet body of more than {} bytes (gateway.parquet_bytes_max): send several files",
                self.bytes_max
            );
            return Err(Error::invalid("body_too_large", message));
        }
        if let Step::File(mut file) = std::mem::replace(&mut self.step, Step::Ended) {
            self.step = Step::Writing(spawn_blocking(move || file.write_all(&piece).map(|()| file)));
        }
        self.written().await
    }

    /// Waits for what is being written. Safe to drop and call again.
    async fn written(&mut self) -> Result<(), Error> {
        if let Step::Writing(writing) = &mut self.step {
            let written = writing.await;
            self.step = Step::Ended;
            let written = written.map_err(std::io::Error::other).and_then(|written| written);
            self.step = Step::File(written.map_err(|error| {
                let message = format!("cannot store a Parquet body (gateway.scratch_dir): {error}");
                Error::unavailable("scratch", message)
            })?);
        }
        Ok(())
    }

    /// The whole body is there: makes some more rows ready. False where there are none. Safe to drop and call again.
    ///
    /// # Errors
    /// `Invalid`: not a Parquet file, or damaged.
    pub(super) async fn unpack(&mut self, ready: &mut Ready) -> Result<bool, Error> {
        self.written().await?;
        if self.place.is_none() {
            self.place = Arc::clone(&self.places).acquire_owned().await.ok();
        }
        match std::mem::replace(&mut self.step, Step::Ended) {
            Step::File(file) => {
                let frame_bytes_max = ready.record_bytes_max();
                self.step = Step::Reading(spawn_blocking(move || Rows::open(file, frame_bytes_max)?.read()));
            }
            Step::Rows(rows) => self.step = Step::Reading(spawn_blocking(|| rows.read())),
            step => self.step = step,
        }
        let Step::Reading(reading) = &mut self.step else { return Ok(false) };
        let read = reading.await;
        self.step = Step::Ended;
        // The reader has assertions that a damaged file can reach.
        match read.map_err(|_| invalid("it is damaged"))?? {
            None => Ok(false),
            Some((rows, frames)) => {
                self.step = Step::Rows(rows);
                frames.into_iter().for_each(|frame| ready.push(frame.count, frame.payload));
                Ok(true)
            }
        }
    }
}

impl Rows {
    fn open(file: File, frame_bytes_max: usize) -> Result<Box<Self>, Error> {
        let garbled = |error: parquet::errors::ParquetError| invalid(&error.to_string());
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(garbled)?;
        let groups = builder.metadata().row_groups();
        let rows: u64 = groups.iter().map(|group| u64::try_from(group.num_rows()).unwrap_or(0)).sum();
        let bytes: u64 = groups.iter().map(|group| u64::try_from(group.total_byte_size()).unwrap_or(0)).sum();
        let columns =
            groups.iter().flat_map(|group| group.columns().iter().map(move |column| (group, column)));
        let per_row = columns.map(|(group, column)| column.num_values() / group.num_rows().max(1));
        let values = u64::try_from(per_row.max().unwrap_or(1)).unwrap_or(1).max(1);
        if values > VALUES {
            return Err(invalid(&format!("{values} values in a row: at most {VALUES} are read")));
        }
        let at_a_time = (ROWS_BYTES / (bytes / rows.max(1)).max(1)).min(VALUES / values);
        let at_a_time = usize::try_from(at_a_time).unwrap_or(ROWS).clamp(1, ROWS);
        let batches = builder.with_batch_size(at_a_time).build().map_err(garbled)?;
        Ok(Box::new(Self { batches, frame_bytes_max }))
    }

    fn read(mut self: Box<Self>) -> More {
        let Some(batch) = self.batches.next() else { return Ok(None) };
        let mut frames = Vec::new();
        let mut parts = vec![batch.map_err(|error| invalid(&error.to_string()))?];
        while let Some(part) = parts.pop() {
            let payload = encoded(&part).map_err(|error| invalid(&error.to_string()))?;
            let rows = part.num_rows();
            if payload.len() <= self.frame_bytes_max {
                let count = u32::try_from(rows).expect("few rows are read at a time");
                frames.push(Records { first_offset: None, count, payload });
            } else if rows > 1 {
                let half = rows / 2;
                parts.extend([part.slice(half, rows - half), part.slice(0, half)]);
            } else {
                let (bytes, max) = (payload.len(), self.frame_bytes_max);
                let message = format!("a row of {bytes} bytes: the limit is {max} (gateway.frame_bytes_max)");
                return Err(Error::invalid("record_too_large", message));
            }
        }
        Ok(Some((self, frames)))
    }
}

/// Rows as an Arrow IPC stream of their own.
fn encoded(rows: &RecordBatch) -> Result<Bytes, ArrowError> {
    let mut bytes = Vec::new();
    let mut writer = StreamWriter::try_new(&mut bytes, &rows.schema())?;
    writer.write(rows)?;
    writer.finish()?;
    drop(writer);
    Ok(bytes.into())
}

fn invalid(why: &str) -> Error {
    Error::invalid("invalid_parquet", format!("the body is no Parquet file: {why}"))
}
