//! The rows that records become, whatever they are encoded in.
//!
//! *Owns*: a table's columns, the walk over a payload's records, the bounds of records, rows and what is held.
//! *Does not own*: reading a record (`json`, `protobuf`), values (`column`).
//! Keeps P8: a record is appended whole, or refused by name and cut away again.

use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::datatypes::SchemaRef;
use sluice_shared::error::Error;

use super::Decoded;
use super::column::Columns;
use super::fault::Fault;
use crate::table::batch::{Reason, ReasonCode};

/// The rows must be taken out before they have this many bytes: Arrow's offsets have 31 bits.
pub const BYTES_MAX: usize = 1 << 30;
/// How many records may come between two looks at the bytes held: counting them walks all columns.
const RECORDS_UNCOUNTED: usize = 64;
/// Before and after a record of this size the bytes held are counted.
const RECORD_COUNTED_BYTES: usize = 64 << 10;

/// Rows of one table.
pub struct Rows {
    schema: SchemaRef,
    record_bytes_max: usize,
    row_bytes_max: usize,
    columns: Columns,
}

/// A payload on its way into rows.
pub(super) struct Payload<'a> {
    pub(super) bytes: &'a [u8],
    /// No further record once the rows held and what was refused have so many bytes.
    pub(super) bytes_max: usize,
    /// Gets the place of each refused record, counted from 0.
    pub(super) refuse: &'a mut dyn FnMut(usize, Reason),
}

impl Rows {
    /// No rows. Records of more than `record_bytes_max` bytes are refused.
    ///
    /// # Errors
    /// `Invalid` (`unsupported_type`) where the schema has a type that no table takes.
    pub fn new(schema: SchemaRef, record_bytes_max: usize) -> Result<Self, Error> {
        let columns = Columns::new(schema.fields())?;
        Ok(Self { schema, record_bytes_max, row_bytes_max: BYTES_MAX, columns })
    }

    /// Refuses records that become rows of more than `bytes`.
    #[must_use]
    pub fn with_rows_up_to(self, bytes: usize) -> Self {
        Self { row_bytes_max: bytes, ..self }
    }

    /// Largest row.
    pub(super) fn row_bytes_max(&self) -> usize {
        self.row_bytes_max
    }

    /// Rows held.
    pub fn count(&self) -> usize {
        self.columns.rows()
    }

    /// Bytes that the rows held have as arrays. Walks all columns.
    pub fn bytes(&self) -> usize {
        self.columns.bytes()
    }

    /// Takes the rows out, in the order of their records.
    pub fn finish(&mut self) -> RecordBatch {
        let options = RecordBatchOptions::new().with_row_count(Some(self.columns.rows()));
        RecordBatch::try_new_with_options(self.schema.clone(), self.columns.finish(), &options)
            .expect("the columns are those of the schema")
    }

    /// Appends records, which are slices of the payload. `read` appends one to the columns and answers about how many
    /// bytes its row has; what it leaves there when it fails is cut away.
    pub(super) fn append<'a>(
        &mut self,
        payload: Payload<'_>,
        records: impl Iterator<Item = &'a [u8]>,
        mut read: impl FnMut(&mut Columns, &[u8]) -> Result<usize, Fault>,
    ) -> Decoded {
        let Payload { bytes, bytes_max, refuse } = payload;
        let mut decoded = Decoded::default();
        let (mut refused_bytes, mut uncounted) = (0, 0);
        for (place, record) in records.enumerate() {
            if uncounted >= RECORDS_UNCOUNTED || record.len() >= RECORD_COUNTED_BYTES {
                uncounted = 0;
                if place > 0 && self.bytes() + refused_bytes >= bytes_max {
                    return decoded;
                }
            }
            uncounted += 1;
            match self.append_record(record, &mut read) {
                Ok(row_bytes) => {
                    decoded.accepted += 1;
                    if row_bytes >= RECORD_COUNTED_BYTES {
                        uncounted = RECORDS_UNCOUNTED;
                    }
                }
                Err(fault) => {
                    decoded.refused += 1;
                    let reason = fault.into_reason();
                    refused_bytes += reason.memory_bytes();
                    refuse(place, reason);
                }
            }
            decoded.payload_bytes = record.as_ptr().addr() - bytes.as_ptr().addr() + record.len();
        }
        Decoded { payload_bytes: bytes.len(), ..decoded }
    }

    fn append_record(
        &mut self,
        record: &[u8],
        read: &mut impl FnMut(&mut Columns, &[u8]) -> Result<usize, Fault>,
    ) -> Result<usize, Fault> {
        if record.len() > self.record_bytes_max {
            let message =
                format!("the record has {} bytes, at most {} are taken", record.len(), self.record_bytes_max);
            return Err(Fault::new(ReasonCode::RecordTooLarge, message));
        }
        let rows = self.columns.rows();
        let bytes_before = (record.len() >= RECORD_COUNTED_BYTES).then(|| self.bytes());
        let mut appended = read(&mut self.columns, record);
        if let (Ok(_), Some(before)) = (&appended, bytes_before)
            && self.bytes() - before > self.row_bytes_max
        {
            appended = Err(row_too_large(self.bytes() - before, self.row_bytes_max));
        }
        if appended.is_err() {
            self.columns.truncate(rows);
        }
        appended
    }
}

/// A record that has become too large a row.
pub(super) fn row_too_large(bytes: usize, bytes_max: usize) -> Fault {
    let message = format!("the record becomes a row of {bytes} bytes, at most {bytes_max} are taken");
    Fault::new(ReasonCode::RecordTooLarge, message)
}
