//! Batches: records of one table sealed together, the unit of durability.
//!
//! A batch is its rows (Arrow) and its runs: which offsets of which stream those rows are. The same bytes go to
//! the log and, from memory or from there, to Parquet: records are decoded once in their life.
//!
//! *Owns*: the batch, its bytes in the log.
//! *Does not own*: when a batch is sealed (`lane`), what a table makes of it (`table/home`).

use arrow::array::{Array, ArrayRef, RecordBatch};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use arrow::ipc::writer::{IpcWriteOptions, StreamWriter};
use bytes::Bytes;
use prost::Message;
use sluice_shared::ids::{OffsetRange, SchemaId, SessionId, StreamId, TableId, TableName};
use sluice_shared::proto;
use sluice_shared::requests::{Boundary, RequestSpan};

use crate::decode::ipc;

/// A record that does not fit its table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its offset in the stream.
    pub offset: u64,
    /// Why.
    pub reason: Reason,
    /// The record as it was sent, where its table keeps such ones.
    pub raw: Option<Box<[u8]>>,
}

/// All codes in one place, so that none can be refused with and then not be read back from the log.
macro_rules! reason_codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// The kinds of reasons why records do not fit.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum ReasonCode {
            $($(#[$doc])* $name,)*
        }

        impl ReasonCode {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// As it stands on the wire and in the log.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

reason_codes! {
    /// Not a JSON object.
    NotJson = "not_json",
    /// Not a protobuf message.
    NotProtobuf = "not_protobuf",
    /// Not a datum of its stream's Avro schema.
    NotAvro = "not_avro",
    /// A value of a type that its column does not take.
    WrongType = "wrong_type",
    /// No value where there must be one.
    MissingValue = "missing_value",
    /// A field that the table does not have.
    UnknownField = "unknown_field",
    /// A field or key that stands there twice.
    DuplicateField = "duplicate_field",
    /// A value that its column cannot hold.
    OutOfRange = "out_of_range",
    /// More bytes than a record may have.
    RecordTooLarge = "record_too_large",
    /// Records from which no table can be made.
    CannotInfer = "cannot_infer",
    /// An operator has given it up: the log that had it was lost.
    Released = "released",
    /// What another version's log holds besides.
    Refused = "refused",
}

/// Why a record does not fit its table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    /// Stable, machine-readable, `snake_case`: one of `ReasonCode`'s.
    pub code: &'static str,
    /// The column to blame, dotted for nested ones.
    pub column: Option<String>,
    /// For people; at most a few hundred characters.
    pub message: String,
}

/// Consecutive offsets of one stream in a batch. Its rows are `offsets` less the refused ones, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The stream.
    pub stream: StreamId,
    /// Whose records these are: runs are equal by offset only within one session.
    pub session: SessionId,
    /// Which offsets.
    pub offsets: OffsetRange,
    /// Those of them without a row, by rising offset.
    pub refused: Vec<Refusal>,
    /// Of a stream that counts them: the requests that these are of. The last one may end beyond.
    pub requests: Option<Box<RequestSpan>>,
}

impl Refusal {
    /// What is told of it: not the record. Once it is durable and told, nobody asks for its words any more, but where its
    /// table keeps the record.
    pub fn tell(&mut self) -> Self {
        let reason = match &self.raw {
            Some(_) => self.reason.clone(),
            None => {
                let wordless = Reason::wordless(self.reason.code);
                std::mem::replace(&mut self.reason, wordless)
            }
        };
        Self { offset: self.offset, reason, raw: self.raw.as_ref().map(|_| Box::default()) }
    }

    /// Bytes that it holds in memory.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.reason.text_bytes() + self.raw.as_ref().map_or(0, |raw| raw.len())
    }
}

impl Reason {
    fn wordless(code: &'static str) -> Self {
        Self { code, column: None, message: String::new() }
    }

    /// Bytes that it holds in memory.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.text_bytes()
    }

    fn text_bytes(&self) -> usize {
        self.message.len() + self.column.as_ref().map_or(0, String::len)
    }
}

/// Bytes that rows hold in memory, or take in the log. Columns that share one buffer each count their own part of it.
pub fn chunk_bytes(chunk: &RecordBatch) -> usize {
    /// A column's own, whatever its rows.
    const COLUMN_BYTES: usize = 192;
    let bytes = |column: &ArrayRef| column.to_data().get_slice_memory_size().unwrap_or(0) + COLUMN_BYTES;
    chunk.columns().iter().map(bytes).sum()
}

impl Run {
    /// How many rows of the batch are this run's.
    pub fn rows(&self) -> usize {
        usize::try_from(self.offsets.count()).expect("a run fits in memory") - self.refused.len()
    }

    /// Where to cut it, at `cut` at most: between two requests, where it has more than one.
    fn whole_before(&self, cut: u64) -> u64 {
        let requests = self.requests.as_ref().filter(|_| cut < self.offsets.end);
        let whole = requests.map(|requests| requests.last_before(cut).offset);
        // Those that are known may begin behind the cut.
        whole.filter(|whole| (self.offsets.start + 1..=cut).contains(whole)).unwrap_or(cut)
    }

    /// The last place in it at which a request ends, or before it.
    pub fn boundary(&self) -> Option<Boundary> {
        self.requests.as_ref().map(|requests| requests.end())
    }
}

/// Records of one table, of many streams, sealed together.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// The table's name when the batch was sealed.
    pub table: TableName,
    /// The table itself: a table made anew under the old name is another.
    pub table_id: TableId,
    /// The schema that the records were decoded to.
    pub schema_id: SchemaId,
    /// When the batch was sealed, µs since 1970-01-01 UTC.
    pub ingested_at_us: i64,
    /// Whose rows: the chunks' rows are those of run 0, then of run 1, and so on.
    pub runs: Vec<Run>,
    /// The producers' columns as the table has them, without the system columns. All chunks have one schema.
    pub chunks: Vec<RecordBatch>,
    /// The chunks' schema; there may be no chunk.
    pub schema: SchemaRef,
}

/// Why bytes are no batch.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The header is cut short or garbled.
    #[error("batch header: {0}")]
    Header(String),
    /// The rows are.
    #[error("batch rows")]
    Rows(#[from] ArrowError),
}

#[derive(Clone, PartialEq, Message)]
struct Header {
    #[prost(string, tag = "1")]
    table: String,
    #[prost(string, tag = "2")]
    table_id: String,
    #[prost(uint64, tag = "3")]
    schema_id: u64,
    #[prost(int64, tag = "4")]
    ingested_at_us: i64,
    #[prost(message, repeated, tag = "5")]
    runs: Vec<RunHeader>,
}

#[derive(Clone, PartialEq, Message)]
struct RunHeader {
    #[prost(string, tag = "1")]
    stream: String,
    #[prost(uint64, tag = "2")]
    session: u64,
    #[prost(uint64, tag = "3")]
    first_offset: u64,
    #[prost(uint64, tag = "4")]
    count: u64,
    #[prost(message, repeated, tag = "5")]
    refused: Vec<RefusalHeader>,
    #[prost(message, optional, tag = "6")]
    requests: Option<proto::RequestSpan>,
}

#[derive(Clone, PartialEq, Message)]
struct RefusalHeader {
    #[prost(uint64, tag = "1")]
    offset: u64,
    #[prost(string, tag = "2")]
    code: String,
    #[prost(string, optional, tag = "3")]
    column: Option<String>,
    #[prost(string, tag = "4")]
    message: String,
    #[prost(bytes = "bytes", optional, tag = "5")]
    raw: Option<Bytes>,
}

impl Batch {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.chunks.iter().map(RecordBatch::num_rows).sum()
    }

    /// Bytes that the rows hold in memory. Columns that share one buffer each count their own part of it.
    pub fn memory_bytes(&self) -> usize {
        let requests = self.runs.iter().filter_map(|run| Some(run.requests.as_ref()?.memory_bytes()));
        let runs = self.runs.len() * size_of::<Run>() + requests.sum::<usize>();
        let refused = self.runs.iter().flat_map(|run| &run.refused).map(Refusal::memory_bytes);
        self.chunks.iter().map(chunk_bytes).chain(refused).sum::<usize>() + runs
    }

    /// Two batches of about half the records each, in order; itself where it has one record only. The run at the cut is
    /// in both.
    pub fn split(self) -> Result<(Self, Self), Box<Self>> {
        let records: u64 = self.runs.iter().map(|run| run.offsets.count()).sum();
        if records < 2 {
            return Err(Box::new(self));
        }
        let mut left = records / 2;
        let (mut first, mut rest) = (Vec::new(), Vec::new());
        for mut run in self.runs {
            let cut = run.whole_before(run.offsets.start + left.min(run.offsets.count()));
            // What comes behind a cut comes behind it whole.
            left = if cut < run.offsets.end { 0 } else { left - run.offsets.count() };
            let mut refused = run.refused;
            run.refused = refused.split_off(refused.partition_point(|refusal| refusal.offset < cut));
            let mut requests = run.requests.take();
            run.requests = requests.as_mut().map(|requests| Box::new(requests.split_off(cut)));
            // Where those that are known begin behind the cut, nothing is known before it.
            let requests = requests.filter(|requests| requests.end().offset <= cut);
            let offsets = OffsetRange { start: run.offsets.start, end: cut };
            if !offsets.is_empty() {
                first.push(Run { stream: run.stream.clone(), offsets, refused, requests, ..run });
            }
            run.offsets.start = cut;
            rest.extend((!run.offsets.is_empty()).then_some(run));
        }
        let mut rows: usize = first.iter().map(Run::rows).sum();
        let (mut chunks, mut chunks_rest) = (Vec::new(), Vec::new());
        for chunk in self.chunks {
            let taken = rows.min(chunk.num_rows());
            rows -= taken;
            chunks.extend((taken > 0).then(|| chunk.slice(0, taken)));
            let more = chunk.num_rows() - taken;
            chunks_rest.extend((more > 0).then(|| chunk.slice(taken, more)));
        }
        let first = Self {
            table: self.table.clone(),
            table_id: self.table_id.clone(),
            schema: self.schema.clone(),
            runs: first,
            chunks,
            ..self
        };
        Ok((first, Self { runs: rest, chunks: chunks_rest, ..self }))
    }

    /// The batch's bytes, in parts that belong one after the other: header length and header, then the rows as
    /// one Arrow IPC stream.
    ///
    /// # Errors
    /// Where a column cannot be written as Arrow IPC.
    pub fn encode(&self) -> Result<Vec<Bytes>, ArrowError> {
        let header = self.header().encode_to_vec();
        let mut head = Vec::with_capacity(4 + header.len());
        head.extend_from_slice(&u32::try_from(header.len()).expect("a header is small").to_le_bytes());
        head.extend_from_slice(&header);
        let mut rows = Vec::with_capacity(self.memory_bytes() + 1024);
        let options = IpcWriteOptions::default();
        let mut writer = StreamWriter::try_new_with_options(&mut rows, &self.schema, options)?;
        for chunk in &self.chunks {
            writer.write(chunk)?;
        }
        writer.finish()?;
        drop(writer);
        Ok(vec![head.into(), rows.into()])
    }

    /// Reads a batch back without copying its rows.
    ///
    /// # Errors
    /// Where the bytes are none that `encode` makes.
    pub fn decode(bytes: Bytes) -> Result<Self, BatchError> {
        let cut_short = || BatchError::Header("cut short".to_owned());
        let length = bytes.get(..4).ok_or_else(cut_short)?.try_into().expect("four bytes");
        let rows_at = 4 + u32::from_le_bytes(length) as usize;
        let header = bytes.get(4..rows_at).ok_or_else(cut_short)?;
        let header = Header::decode(header).map_err(|error| BatchError::Header(error.to_string()))?;
        let (schema, chunks) = ipc::read_written(&bytes.slice(rows_at..))?;
        let batch = Self {
            table: header.table.parse().map_err(|error| BatchError::Header(format!("{error}")))?,
            table_id: TableId(header.table_id.into()),
            schema_id: SchemaId(header.schema_id),
            ingested_at_us: header.ingested_at_us,
            runs: header.runs.into_iter().map(Run::try_from).collect::<Result<_, _>>()?,
            chunks,
            schema,
        };
        let rows = batch.runs.iter().map(Run::rows).try_fold(0_usize, usize::checked_add);
        if rows != Some(batch.rows()) {
            let chunks = batch.rows();
            return Err(BatchError::Header(format!("{rows:?} rows in its runs, {chunks} in its chunks")));
        }
        Ok(batch)
    }

    fn header(&self) -> Header {
        let runs = self.runs.iter().map(|run| RunHeader {
            stream: run.stream.as_str().to_owned(),
            session: run.session.0,
            first_offset: run.offsets.start,
            count: run.offsets.count(),
            refused: run.refused.iter().map(refusal_header).collect(),
            requests: run.requests.as_ref().map(|requests| proto::RequestSpan::from((**requests).clone())),
        });
        Header {
            table: self.table.as_str().to_owned(),
            table_id: self.table_id.0.as_ref().to_owned(),
            schema_id: self.schema_id.0,
            ingested_at_us: self.ingested_at_us,
            runs: runs.collect(),
        }
    }
}

impl TryFrom<RunHeader> for Run {
    type Error = BatchError;

    fn try_from(header: RunHeader) -> Result<Self, BatchError> {
        let invalid = |what: &str| BatchError::Header(format!("run of {:?}: {what}", header.stream));
        let offsets = OffsetRange::from_count(header.first_offset, header.count);
        let offsets = offsets.ok_or_else(|| invalid("offsets overflow"))?;
        let refused: Vec<Refusal> = header.refused.iter().map(refusal).collect();
        let rising = refused.windows(2).all(|pair| pair[0].offset < pair[1].offset);
        if !rising || refused.iter().any(|refusal| !offsets.contains(refusal.offset)) {
            return Err(invalid("refused offsets outside of the run, or not rising"));
        }
        let stream = header.stream.parse().map_err(|error| invalid(&format!("{error}")))?;
        let requests = header.requests.map(RequestSpan::try_from).transpose();
        let requests = requests.map_err(|error| invalid(&error.message))?;
        if requests.as_ref().is_some_and(|requests| requests.end().offset > offsets.end) {
            return Err(invalid("requests that end beyond it"));
        }
        let session = SessionId(header.session);
        Ok(Self { stream, session, offsets, refused, requests: requests.map(Box::new) })
    }
}

fn refusal_header(refusal: &Refusal) -> RefusalHeader {
    RefusalHeader {
        offset: refusal.offset,
        code: refusal.reason.code.to_owned(),
        column: refusal.reason.column.clone(),
        message: refusal.reason.message.clone(),
        raw: refusal.raw.as_deref().map(Bytes::copy_from_slice),
    }
}

fn refusal(header: &RefusalHeader) -> Refusal {
    let code = ReasonCode::ALL.iter().find(|code| code.as_str() == header.code);
    let code = code.unwrap_or(&ReasonCode::Refused).as_str();
    let reason = Reason { code, column: header.column.clone(), message: header.message.clone() };
    Refusal { offset: header.offset, reason, raw: header.raw.as_deref().map(Box::from) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, StringArray};
    use arrow::compute::concat_batches;
    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;

    fn sample(chunk_rows: &[usize]) -> Batch {
        let fields = vec![Field::new("n", DataType::Int64, false), Field::new("text", DataType::Utf8, true)];
        let schema = Arc::new(Schema::new(fields));
        let chunk = |rows: &usize| {
            let numbers = Int64Array::from_iter_values(0..*rows as i64);
            let texts: StringArray = (0..*rows).map(|n| (n % 3 > 0).then(|| n.to_string())).collect();
            RecordBatch::try_new(schema.clone(), vec![Arc::new(numbers), Arc::new(texts)]).expect("fits")
        };
        let rows: usize = chunk_rows.iter().sum();
        let reason = Reason { code: "wrong_type", column: Some("n".into()), message: "not a number".into() };
        let refused = vec![Refusal { offset: 10, reason, raw: Some(b"raw".as_slice().into()) }];
        let offsets = OffsetRange::from_count(10, rows as u64 + 1).expect("fits");
        let stream = StreamId::ephemeral();
        let start = Boundary { offset: 9, requests: 4 };
        let counts = [2, rows as u32].into_iter().filter(|count| *count > 0).collect();
        let requests = RequestSpan::new(start, counts).expect("fits");
        Batch {
            table: "t".parse().expect("valid"),
            table_id: TableId("some-id".into()),
            schema_id: SchemaId(3),
            ingested_at_us: 1_700_000_000_000_000,
            runs: vec![Run {
                stream,
                session: SessionId(1),
                offsets,
                refused,
                requests: Some(Box::new(requests)),
            }],
            chunks: chunk_rows.iter().map(chunk).collect(),
            schema,
        }
    }

    fn joined(batch: &Batch) -> Bytes {
        batch.encode().expect("encodes").concat().into()
    }

    #[test]
    fn a_batch_is_split_down_to_single_records_without_losing_any() {
        let mut whole = sample(&[3, 0, 4]);
        let more = whole.runs[0].clone();
        let refused = more.refused.iter().map(|refusal| Refusal { offset: 22, ..refusal.clone() }).collect();
        let offsets = OffsetRange { start: 20, end: 25 };
        whole.runs.push(Run { stream: StreamId::ephemeral(), offsets, refused, requests: None, ..more });
        whole.chunks.extend(sample(&[4]).chunks);
        let (mut parts, mut singles) = (vec![whole.clone()], Vec::new());
        while let Some(part) = parts.pop() {
            assert_eq!(part.rows(), part.runs.iter().map(Run::rows).sum::<usize>());
            match part.split() {
                Ok((first, rest)) => parts.extend([rest, first]),
                Err(single) => singles.push(*single),
            }
        }
        let records = whole
            .runs
            .iter()
            .flat_map(|run| (run.offsets.start..run.offsets.end).map(|offset| (run.stream.clone(), offset)));
        let split = singles.iter().map(|one| (one.runs[0].stream.clone(), one.runs[0].offsets.start));
        assert!(split.eq(records));
        let boundaries = singles.iter().filter_map(|one| one.runs[0].boundary()).collect::<Vec<_>>();
        assert_eq!(boundaries.first(), Some(&Boundary { offset: 11, requests: 5 }));
        assert_eq!(boundaries.last(), Some(&Boundary { offset: 18, requests: 6 }));
        let refused =
            |batch: &Batch| batch.runs.iter().flat_map(|run| run.refused.clone()).collect::<Vec<_>>();
        assert_eq!(singles.iter().flat_map(refused).collect::<Vec<_>>(), refused(&whole));
        let chunks = |batch: &Batch| batch.chunks.clone();
        let rows = concat_batches(&whole.schema, &singles.iter().flat_map(chunks).collect::<Vec<_>>());
        assert_eq!(
            rows.expect("one schema"),
            concat_batches(&whole.schema, &whole.chunks).expect("one schema")
        );
    }

    #[test]
    fn requests_that_begin_behind_a_cut_take_no_rows_along() {
        let mut whole = sample(&[10]);
        let stream = whole.runs[0].stream.clone();
        let known = RequestSpan::new(Boundary { offset: 8, requests: 3 }, vec![]).expect("fits");
        let runs = [OffsetRange { start: 0, end: 6 }, OffsetRange { start: 4, end: 8 }].map(|offsets| Run {
            stream: stream.clone(),
            session: SessionId(1),
            requests: Some(Box::new(RequestSpan {
                start: Boundary { offset: offsets.end, requests: 3 },
                ..known.clone()
            })),
            offsets,
            refused: Vec::new(),
        });
        whole.runs = runs.to_vec();
        let (mut parts, mut singles) = (vec![whole.clone()], Vec::new());
        while let Some(part) = parts.pop() {
            // A half is read back from the log as it was written.
            assert_eq!(Batch::decode(joined(&part)).expect("own bytes").runs, part.runs);
            match part.split() {
                Ok((first, rest)) => parts.extend([rest, first]),
                Err(single) => singles.push(*single),
            }
        }
        let offsets: Vec<_> = singles.iter().map(|single| single.runs[0].offsets.start).collect();
        assert_eq!(offsets, [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]);
        let rows: Vec<_> = singles.iter().flat_map(|single| single.chunks.clone()).collect();
        let rows = concat_batches(&whole.schema, &rows).expect("one schema");
        assert_eq!(rows, concat_batches(&whole.schema, &whole.chunks).expect("one schema"));
        let ends = singles.iter().filter_map(|single| single.runs[0].boundary());
        assert_eq!(ends.map(|end| end.offset).collect::<Vec<_>>(), [6, 8]);
    }

    #[test]
    fn a_batch_comes_back_from_its_bytes() {
        for chunk_rows in [&[][..], &[5], &[3, 0, 4]] {
            let batch = sample(chunk_rows);
            assert_eq!(Batch::decode(joined(&batch)).expect("own bytes"), batch);
        }
    }

    #[test]
    fn every_refusal_comes_back_from_the_log() {
        let mut batch = sample(&[ReasonCode::ALL.len()]);
        let run = &mut batch.runs[0];
        run.offsets.end += ReasonCode::ALL.len() as u64 - 1;
        let refused = ReasonCode::ALL.iter().zip(run.offsets.start..).map(|(code, offset)| {
            let reason = Reason { code: code.as_str(), column: None, message: String::new() };
            Refusal { offset, reason, raw: None }
        });
        run.refused = refused.collect();
        assert!(run.refused.iter().any(|refusal| refusal.reason.code == "duplicate_field"));
        assert_eq!(Batch::decode(joined(&batch)).expect("own bytes"), batch);
    }

    #[test]
    fn bytes_cut_short_are_no_batch() {
        let whole = joined(&sample(&[5]));
        for end in [0, 3, 10, whole.len() / 2] {
            assert!(Batch::decode(whole.slice(..end)).is_err(), "{end} bytes");
        }
    }
}
