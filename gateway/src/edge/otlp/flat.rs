//! A request as rows: the walk over resources, scopes and records, and the frames that the rows go into.
//!
//! *Owns*: the order of rows, where they are cut into frames, which records do not fit. A core.
//! *Does not own*: the columns of a signal (`logs`, `spans`, `metrics`), the way to a pod (`streams`).
//! Keeps P7: a resource stands in each row of its records, so that a small request can be many rows; they are bounded.

use std::sync::Arc;

use arrow::array::{Array, BooleanArray, RecordBatch};
use arrow::compute::filter_record_batch;
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use bytes::Bytes;
use sluice_shared::error::Error;
use sluice_shared::protobuf::Reader;

use super::Signal;
use super::columns::{Misfit, Named, Origin, for_each};
use super::logs::Logs;
use super::metrics::{Metric, Metrics};
use super::spans::Spans;

/// Rows are sealed into a frame when they came from about so many bytes.
const FRAME_BYTES: usize = 512 << 10;
/// What a row costs beside its text.
const ROW_BYTES: usize = 256;
/// Bytes that the frames of one request may have. A collector's batch of 8,192 records with 2 KB each is a quarter.
const FRAMES_BYTES_MAX: usize = 64 << 20;

/// Rows of one frame.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) rows: u32,
    /// A whole Arrow IPC stream.
    pub(super) payload: Bytes,
}

/// A record that is not in the table, by its place in the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) place: u64,
    pub(super) why: String,
}

/// A request as rows.
#[derive(Debug, Default)]
pub(super) struct Flat {
    pub(super) frames: Vec<Frame>,
    /// Records that have no row, by rising place.
    pub(super) refused: Vec<Refused>,
}

impl Flat {
    /// Bytes of all frames.
    pub(super) fn bytes(&self) -> usize {
        self.frames.iter().map(|frame| frame.payload.len()).sum()
    }

    /// The place in the request of the record that became a row.
    pub(super) fn place_of(&self, row: u64) -> u64 {
        let mut place = row;
        for refused in &self.refused {
            if refused.place > place {
                break;
            }
            place += 1;
        }
        place
    }
}

/// The columns that a signal's table has.
pub(super) fn schema(signal: Signal) -> SchemaRef {
    Columns::new(signal).finish().0
}

/// An Arrow IPC stream of the schema alone.
///
/// # Errors
/// `Internal`: Arrow cannot write it.
pub(super) fn schema_message(signal: Signal) -> Result<Bytes, Error> {
    let writer = StreamWriter::try_new(Vec::new(), &schema(signal));
    writer.and_then(StreamWriter::into_inner).map(Bytes::from).map_err(unwritable)
}

/// A request in protobuf as rows. No frame has more than `frame_bytes_max` bytes.
///
/// # Errors
/// `Invalid`: it is malformed, or too large when flattened.
pub(super) fn flatten(signal: Signal, request: &[u8], frame_bytes_max: usize) -> Result<Flat, Error> {
    let mut rows = Rows {
        columns: Columns::new(signal),
        kept: Vec::new(),
        bytes: 0,
        places: 0,
        frame_bytes_max,
        flat: Flat::default(),
        frames_bytes: 0,
    };
    // Request, resource and scope have the same fields in all signals: 1 is a head, 2 are the things below it.
    for_each(&Reader::new(request), 1, |resource| {
        let mut origin = Origin::of_resource(&resource)?;
        for_each(&resource, 2, |scope| {
            origin.enter_scope(&scope)?;
            for_each(&scope, 2, |record| rows.take(record, &origin))
        })
    })?;
    rows.seal()?;
    Ok(rows.flat)
}

enum Columns {
    Logs(Box<Logs>),
    Spans(Box<Spans>),
    Metrics(Box<Metrics>),
}

impl Columns {
    fn new(signal: Signal) -> Self {
        match signal {
            Signal::Logs => Self::Logs(Box::new(Logs::new())),
            Signal::Traces => Self::Spans(Box::new(Spans::new())),
            Signal::Metrics => Self::Metrics(Box::new(Metrics::new())),
        }
    }

    fn finish(&mut self) -> (SchemaRef, Vec<arrow::array::ArrayRef>) {
        let named = match self {
            Self::Logs(columns) => columns.finish(),
            Self::Spans(columns) => columns.finish(),
            Self::Metrics(columns) => columns.finish(),
        };
        let field = |(name, column): &Named| Field::new(*name, column.data_type().clone(), true);
        let schema = Schema::new(named.iter().map(field).collect::<Vec<_>>());
        (Arc::new(schema), named.into_iter().map(|(_, column)| column).collect())
    }
}

struct Rows {
    columns: Columns,
    /// Of each row in the columns whether it is kept.
    kept: Vec<bool>,
    /// Of what the rows in the columns came from.
    bytes: usize,
    /// Records so far.
    places: u64,
    frame_bytes_max: usize,
    flat: Flat,
    frames_bytes: usize,
}

impl Rows {
    /// Takes a record, or a metric with its points.
    fn take(&mut self, record: Reader<'_>, origin: &Origin) -> Result<(), Error> {
        if !matches!(self.columns, Columns::Metrics(_)) {
            return self.append(record, origin, None);
        }
        let metric = Metric::read(record)?;
        if let Some(why) = metric.unknown() {
            self.refuse(why);
            return Ok(());
        }
        metric.for_each_point(|point| self.append(point, origin, Some(&metric)))
    }

    fn append(
        &mut self,
        record: Reader<'_>,
        origin: &Origin,
        metric: Option<&Metric<'_>>,
    ) -> Result<(), Error> {
        self.bytes += record.left() + origin.bytes() + metric.map_or(0, Metric::bytes) + ROW_BYTES;
        let mut misfit = Misfit::default();
        match (&mut self.columns, metric) {
            (Columns::Logs(logs), _) => logs.append(record, origin, &mut misfit)?,
            (Columns::Spans(spans), _) => spans.append(record, origin, &mut misfit)?,
            (Columns::Metrics(metrics), Some(metric)) => {
                metrics.append(metric, record, origin, &mut misfit)?;
            }
            (Columns::Metrics(_), None) => return Err(Error::internal("a data point without its metric")),
        }
        self.kept.push(misfit.0.is_none());
        match misfit.0 {
            Some(why) => self.refuse(why),
            None => self.places += 1,
        }
        if self.bytes >= FRAME_BYTES.min(self.frame_bytes_max) { self.seal() } else { Ok(()) }
    }

    fn refuse(&mut self, why: String) {
        self.flat.refused.push(Refused { place: self.places, why });
        self.places += 1;
    }

    /// Makes frames of the rows in the columns.
    fn seal(&mut self) -> Result<(), Error> {
        self.bytes = 0;
        let kept = BooleanArray::from(std::mem::take(&mut self.kept));
        if kept.is_empty() {
            return Ok(());
        }
        let (schema, columns) = self.columns.finish();
        let mut batch = RecordBatch::try_new(schema, columns).map_err(unwritable)?;
        if kept.true_count() < batch.num_rows() {
            batch = filter_record_batch(&batch, &kept).map_err(unwritable)?;
        }
        self.frame(&batch)
    }

    fn frame(&mut self, batch: &RecordBatch) -> Result<(), Error> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let payload = write(batch).map_err(unwritable)?;
        if payload.len() > self.frame_bytes_max {
            return self.halve(batch, payload.len());
        }
        self.frames_bytes += payload.len();
        if self.frames_bytes > FRAMES_BYTES_MAX {
            let message = format!(
                "the request has more than {FRAMES_BYTES_MAX} bytes when each record carries its resource and scope: \
                 send fewer records in one request"
            );
            return Err(Error::invalid("request_too_large", message));
        }
        let rows = u32::try_from(batch.num_rows()).map_err(|_| Error::internal("a frame of 2^32 rows"))?;
        self.flat.frames.push(Frame { rows, payload });
        Ok(())
    }

    fn halve(&mut self, batch: &RecordBatch, bytes: usize) -> Result<(), Error> {
        let rows = batch.num_rows();
        if rows == 1 {
            let max = self.frame_bytes_max;
            let message = format!("a record of {bytes} bytes, of {max} (gateway.frame_bytes_max): cut it");
            return Err(Error::invalid("record_too_large", message));
        }
        self.frame(&batch.slice(0, rows / 2))?;
        self.frame(&batch.slice(rows / 2, rows - rows / 2))
    }
}

fn write(batch: &RecordBatch) -> Result<Bytes, ArrowError> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema())?;
    writer.write(batch)?;
    writer.into_inner().map(Bytes::from)
}

fn unwritable(error: ArrowError) -> Error {
    Error::internal(format!("cannot write the rows of an OTLP request: {error}"))
}
