//! Arrow IPC to rows: each frame is one IPC stream; its batches come out in the table's schema.
//!
//! *Owns*: the order of things (guard, schema, count, decode, convert, refuse), the mapping of columns.
//! *Does not own*: the guard itself (`ipc`), conversion of values (`conform`).
//! Keeps P8: rows that do not fit are named and left out; a frame that cannot be read is refused as a whole.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::buffer::Buffer;
use arrow::compute::filter;
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::try_fb_to_schema;
use arrow::ipc::reader::{FileDecoder, StreamDecoder};
use arrow::ipc::{Block, MessageHeader, MetadataVersion};
use arrow::json::LineDelimitedWriter;
use bytes::Bytes;
use sluice_shared::error::Error;
use sluice_shared::frame::UnknownFields;
use sluice_shared::table::{TableSpec, types};

use super::conform::{Conversion, Misfit, conforms, null_bytes, settle};
use super::fault::{Fault, advice_for_unknown, missing_column};
use super::ipc::{Budget, FramedMessage, check_message, invalid, message};
use crate::table::batch::Reason;

/// Rows of a frame that was decoded, at rising places, each as a JSON object. What has no form in JSON is empty.
pub fn rows_as_json(payload: &Bytes, places: &[usize]) -> Vec<Vec<u8>> {
    let rows = catch_unwind(|| picked_as_json(payload, places)).ok().and_then(Result::ok);
    let mut rows = rows.unwrap_or_default();
    rows.resize(places.len(), Vec::new());
    rows
}

fn picked_as_json(payload: &Bytes, places: &[usize]) -> Result<Vec<Vec<u8>>, ArrowError> {
    let (mut buffer, mut decoder) = (Buffer::from(payload.clone()), StreamDecoder::new());
    let (mut first, mut places, mut rows) = (0, places.iter().copied().peekable(), Vec::new());
    while let Some(batch) = decoder.decode(&mut buffer)? {
        while let Some(place) = places.next_if(|place| *place < first + batch.num_rows()) {
            let mut text = Vec::new();
            let mut writer = LineDelimitedWriter::new(&mut text);
            writer.write(&batch.slice(place - first, 1))?;
            writer.finish()?;
            drop(writer);
            rows.push(text.trim_ascii_end().to_vec());
        }
        first += batch.num_rows();
    }
    Ok(rows)
}

/// One stream's decoder: remembers the sender's schema, since frame after frame has the same.
pub struct ArrowDecoder {
    table: SchemaRef,
    decoded_bytes_max: usize,
    sender: Option<Sender>,
}

/// A sender's schema, once it is known to fit.
struct Sender {
    /// The schema message, as it was sent.
    message: Bytes,
    schema: SchemaRef,
    version: MetadataVersion,
    /// Of each table column, its place among the sender's.
    places: Vec<Option<usize>>,
    /// A column that the table does not have.
    unknown: Option<String>,
}

impl ArrowDecoder {
    /// A decoder to a table's schema. No frame may have more than `decoded_bytes_max` bytes when decoded.
    pub fn new(table_schema: SchemaRef, decoded_bytes_max: usize) -> Self {
        Self { table: table_schema, decoded_bytes_max, sender: None }
    }

    /// Decodes one frame: a whole Arrow IPC stream of `count` rows. The batches have the table's schema, and no row that
    /// was refused; columns of equal type share one copy of the payload. `refuse` gets a row's place in the payload,
    /// counted from 0, by rising place.
    ///
    /// # Errors
    /// `Invalid`, the frame as a whole: `invalid_arrow`, `decoded_too_large`, `schema_mismatch`, `missing_column`,
    /// `unsupported_type`, `unknown_field`, `count_mismatch`. Nothing has been refused by row then.
    pub fn decode(
        &mut self,
        payload: &Bytes,
        count: usize,
        unknown: UnknownFields,
        refuse: &mut dyn FnMut(usize, Reason),
    ) -> Result<Vec<RecordBatch>, Error> {
        let schema_message = self.checked_schema(payload, unknown)?;
        let sender = self.sender.as_ref().expect("just checked");
        let mut budget = Budget::new(self.decoded_bytes_max);
        let messages = checked_messages(payload, schema_message.end(), count, &mut budget)?;
        let mut decoder = FileDecoder::new(sender.schema.clone(), sender.version);
        // A copy, as long as it has to be and aligned as Arrow wants it: what the payload came in is up to twice as long, and
        // where it begins anywhere all columns but texts would be copied one by one.
        let buffer = Buffer::from(&payload[..]);
        let (mut first, mut batches, mut refused) = (0, Vec::new(), BTreeMap::new());
        for framed in messages {
            // The arrow crate has assertions that damaged lengths can reach; a panic would end the pod, and with it
            // all its other streams. After one the decoder is dropped.
            let decoded = catch_unwind(AssertUnwindSafe(|| decode_message(&mut decoder, &framed, &buffer)));
            let decoded = decoded.unwrap_or_else(|_| Err(garbled(&framed)))?;
            let Some(batch) = decoded else { continue };
            let rows = batch.num_rows();
            if rows > 0 {
                let converted = self.convert(&batch, &mut budget)?;
                refused.extend(converted.misfits.into_iter().map(|(row, misfit)| (first + row, misfit)));
                batches.extend((converted.batch.num_rows() > 0).then_some(converted.batch));
            }
            first += rows;
        }
        for (place, misfit) in refused {
            let fault = Fault::new(misfit.code, misfit.message.clone()).within(&misfit.column);
            refuse(place, fault.into_reason());
        }
        Ok(batches)
    }

    /// Whether an Arrow IPC stream, of which only the schema message is read, fits the table.
    ///
    /// # Errors
    /// `Invalid`: `invalid_arrow`, `schema_mismatch`, `missing_column`, `unsupported_type`, `unknown_field`.
    pub fn check_schema(&mut self, payload: &Bytes, unknown: UnknownFields) -> Result<(), Error> {
        self.checked_schema(payload, unknown).map(drop)
    }

    fn checked_schema<'a>(
        &mut self,
        payload: &'a Bytes,
        unknown: UnknownFields,
    ) -> Result<FramedMessage<'a>, Error> {
        let schema_message = next_message(payload, 0)?;
        self.remember(payload, &schema_message)?;
        let sender = self.sender.as_ref().expect("just remembered");
        match (&sender.unknown, unknown) {
            (Some(column), UnknownFields::Refuse) => Err(unknown_column(column, &self.table)),
            _ => Ok(schema_message),
        }
    }

    fn remember(&mut self, payload: &Bytes, framed: &FramedMessage<'_>) -> Result<(), Error> {
        let bytes = payload.slice(framed.start..framed.end());
        if self.sender.as_ref().is_some_and(|sender| sender.message == bytes) {
            return Ok(());
        }
        self.sender = None;
        let schema = schema_of(framed)?;
        // Types that no table takes are not decoded either, wanted or not.
        TableSpec::normalise(&schema)?;
        let places = places(&schema, &self.table)?;
        let is_unknown = |name: &&String| self.table.field_with_name(name).is_err();
        let unknown = schema.fields().iter().map(|field| field.name()).find(is_unknown).cloned();
        let version = framed.message.version();
        // A copy, so that the whole payload is not kept for the sake of its head.
        let message = Bytes::copy_from_slice(&bytes);
        self.sender = Some(Sender { message, schema, version, places, unknown });
        Ok(())
    }

    fn convert(&self, batch: &RecordBatch, budget: &mut Budget) -> Result<Converted, Error> {
        let sender = self.sender.as_ref().expect("remembered before any batch");
        let rows = batch.num_rows();
        let mut misfits: BTreeMap<usize, Rc<Misfit>> = BTreeMap::new();
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(sender.places.len());
        for (field, place) in self.table.fields().iter().zip(&sender.places) {
            let Some(place) = place else {
                budget.spend(rows.saturating_mul(null_bytes(field.data_type())))?;
                columns.push(new_null_array(field.data_type(), rows));
                continue;
            };
            let (column, bad) = Conversion { budget: &mut *budget }.column(batch.column(*place), field)?;
            for (row, misfit) in bad {
                misfits.entry(row).or_insert(misfit);
            }
            columns.push(column);
        }
        if !misfits.is_empty() {
            let kept: BooleanArray = (0..rows).map(|row| Some(!misfits.contains_key(&row))).collect();
            columns = columns
                .iter()
                .map(|column| filter(column, &kept))
                .collect::<Result<_, _>>()
                .map_err(invalid)?;
        }
        let settled =
            columns.iter().zip(self.table.fields()).map(|(column, field)| settle(column, field.data_type()));
        let columns = settled.collect::<Result<_, _>>().map_err(invalid)?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows - misfits.len()));
        let batch =
            RecordBatch::try_new_with_options(self.table.clone(), columns, &options).map_err(invalid)?;
        Ok(Converted { batch, misfits })
    }
}

struct Converted {
    batch: RecordBatch,
    misfits: BTreeMap<usize, Rc<Misfit>>,
}

/// The schema of an Arrow IPC stream that has at least a schema message.
///
/// # Errors
/// `Invalid` (`invalid_arrow`).
pub fn decode_schema(ipc: &[u8]) -> Result<SchemaRef, Error> {
    schema_of(&next_message(ipc, 0)?)
}

fn next_message(payload: &[u8], at: usize) -> Result<FramedMessage<'_>, Error> {
    message(payload, at)?.ok_or_else(|| invalid("there is no message"))
}

fn schema_of(framed: &FramedMessage<'_>) -> Result<SchemaRef, Error> {
    let schema = framed.message.header_as_schema();
    let schema = schema.ok_or_else(|| {
        invalid(format!("it begins with {:?} in place of a schema", framed.message.header_type()))
    })?;
    try_fb_to_schema(schema).map(Arc::new).map_err(|error| invalid(format!("schema: {error}")))
}

/// All messages after the schema, once the sum of what they say is sound.
fn checked_messages<'a>(
    payload: &'a [u8],
    mut at: usize,
    count: usize,
    budget: &mut Budget,
) -> Result<Vec<FramedMessage<'a>>, Error> {
    let (mut messages, mut rows) = (Vec::new(), 0_usize);
    while let Some(framed) = message(payload, at)? {
        at = framed.end();
        let length = check_message(&framed, budget)?;
        if framed.message.header_type() == MessageHeader::RecordBatch {
            rows = rows.saturating_add(length);
        }
        messages.push(framed);
    }
    if rows != count {
        let why =
            format!("the frame says {count} records, its Arrow batches have {rows} rows: they must agree");
        return Err(Error::invalid("count_mismatch", why));
    }
    Ok(messages)
}

/// A record batch; `None` for a dictionary, which the decoder keeps.
fn decode_message(
    decoder: &mut FileDecoder,
    framed: &FramedMessage<'_>,
    payload: &Buffer,
) -> Result<Option<RecordBatch>, Error> {
    let head_bytes = i32::try_from(framed.head_bytes).map_err(invalid)?;
    let block = Block::new(0, head_bytes, framed.message.bodyLength());
    let bytes = payload.slice_with_length(framed.start, framed.end() - framed.start);
    let at_byte = |error| invalid(format!("the message at byte {}: {error}", framed.start));
    if framed.message.header_type() == MessageHeader::DictionaryBatch {
        decoder.read_dictionary(&block, &bytes).map_err(at_byte)?;
        return Ok(None);
    }
    decoder.read_record_batch(&block, &bytes).map_err(at_byte)
}

fn garbled(framed: &FramedMessage<'_>) -> Error {
    invalid(format!("the message at byte {} is garbled: its lengths contradict its types", framed.start))
}

fn places(sender: &Schema, table: &Schema) -> Result<Vec<Option<usize>>, Error> {
    let mut seen = std::collections::HashMap::new();
    for (place, field) in sender.fields().iter().enumerate() {
        if seen.insert(field.name(), place).is_some() {
            return Err(mismatch(field.name(), "the frame has it twice"));
        }
    }
    let place = |field: &arrow::datatypes::FieldRef| match seen.get(field.name()) {
        Some(place) => {
            let from = sender.field(*place).data_type();
            if conforms(from, field.data_type()) {
                return Ok(Some(*place));
            }
            let (from, to) = (types::text(from), types::text(field.data_type()));
            Err(mismatch(
                field.name(),
                &format!("the frame has it as {from}, the table as {to}: cast it to {to} before sending"),
            ))
        }
        None if field.is_nullable() => Ok(None),
        None => {
            let to = types::text(field.data_type());
            Err(missing_column(
                field.name(),
                &format!("it may not be null, and the frame does not have it: send it as {to}"),
            ))
        }
    };
    table.fields().iter().map(place).collect()
}

fn mismatch(column: &str, why: &str) -> Error {
    Error::invalid("schema_mismatch", format!("column {column:?}: {why}")).at_column(column)
}

fn unknown_column(column: &str, table: &Schema) -> Error {
    let advice = advice_for_unknown(column, table.fields());
    Error::invalid("unknown_field", format!("the table has no column {column:?}: {advice}")).at_column(column)
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        Array, AsArray, DictionaryArray, FixedSizeBinaryArray, Int32Array, Int64Array, LargeStringArray,
        ListArray, MapArray, StringArray, StringViewArray, StructArray, TimestampNanosecondArray,
        UInt64Array,
    };
    use arrow::datatypes::{DataType, Field, Int8Type, Int64Type, UInt8Type};
    use arrow::ipc::CompressionType;
    use arrow::ipc::writer::{IpcWriteOptions, StreamWriter};
    use proptest::prelude::*;

    use super::*;

    const BYTES_MAX: usize = 1 << 20;

    fn table(columns: &[(&str, &str, bool)]) -> SchemaRef {
        let field = |(name, text, nullable): &(&str, &str, bool)| {
            Field::new(*name, types::parse(text).expect("a type"), *nullable)
        };
        Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()))
    }

    fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)))
            .expect("columns of one length")
    }

    fn ipc(batches: &[RecordBatch], compression: Option<CompressionType>) -> Bytes {
        let options = IpcWriteOptions::default().try_with_compression(compression).expect("a known codec");
        let mut writer =
            StreamWriter::try_new_with_options(Vec::new(), &batches[0].schema(), options).expect("a schema");
        batches.iter().for_each(|batch| writer.write(batch).expect("fits"));
        writer.into_inner().expect("written").into()
    }

    type Outcome = Result<(Vec<RecordBatch>, Vec<(usize, Reason)>), Error>;

    fn decode(table: &SchemaRef, payload: &Bytes, count: usize, unknown: UnknownFields) -> Outcome {
        let mut refused = Vec::new();
        let batches = ArrowDecoder::new(table.clone(), BYTES_MAX)
            .decode(payload, count, unknown, &mut { |place, reason| refused.push((place, reason)) })?;
        assert!(batches.iter().all(|batch| batch.schema() == *table));
        Ok((batches, refused))
    }

    /// Rows as they are shown, and place and code of those refused; or the code of the frame's error.
    type Expected<'a> = Result<(&'a str, &'a [(usize, &'a str)]), &'a str>;

    /// A column `c` into a table column `c`: its rows, and code and place of those refused, or the frame's error.
    fn check(array: ArrayRef, to: &str, nullable: bool, expected: Expected<'_>) {
        let rows = array.len();
        let from = array.data_type().clone();
        let outcome = decode(
            &table(&[("c", to, nullable)]),
            &ipc(&[batch(vec![("c", array)])], None),
            rows,
            UnknownFields::Refuse,
        );
        let got = outcome.map(|(batches, refused)| {
            let options = arrow::util::display::FormatOptions::default().with_null("null");
            let shown = batches.iter().flat_map(|batch| {
                let column = batch.column(0);
                let formatter =
                    arrow::util::display::ArrayFormatter::try_new(column, &options).expect("shown");
                (0..column.len()).map(|row| formatter.value(row).to_string()).collect::<Vec<_>>()
            });
            let refused: Vec<_> = refused.into_iter().map(|(place, reason)| (place, reason.code)).collect();
            (shown.collect::<Vec<_>>().join(" "), refused)
        });
        let got = got.map_err(|error| error.code);
        let expected = expected.map(|(shown, refused)| (shown.to_owned(), refused.to_vec()));
        assert_eq!(got, expected.map_err(str::to_owned), "{from} into {to}");
    }

    #[test]
    fn columns_of_other_types_go_in_without_loss() {
        let ints = || Arc::new(Int32Array::from(vec![Some(1), None, Some(300)])) as ArrayRef;
        check(ints(), "int32", true, Ok(("1 null 300", &[])));
        check(ints(), "int64", true, Ok(("1 null 300", &[])));
        check(ints(), "int8", true, Ok(("1 null", &[(2, "out_of_range")])));
        check(ints(), "int64", false, Ok(("1 300", &[(1, "missing_value")])));
        check(ints(), "string", true, Err("schema_mismatch"));
        check(ints(), "float64", true, Err("schema_mismatch"));
        check(
            Arc::new(UInt64Array::from(vec![u64::MAX])),
            "decimal(20,0)",
            true,
            Ok(("18446744073709551615", &[])),
        );
        check(Arc::new(LargeStringArray::from(vec!["a", "b"])), "string", true, Ok(("a b", &[])));
        let long = "longer than twelve bytes";
        check(Arc::new(StringViewArray::from(vec![Some(long), None])), "string", true, {
            Ok(("longer than twelve bytes null", &[]))
        });
        let words: DictionaryArray<Int8Type> =
            vec![Some("x"), None, Some("y"), Some("x")].into_iter().collect();
        check(Arc::new(words.clone()), "string", true, Ok(("x null y x", &[])));
        check(Arc::new(words), "string", false, Ok(("x y x", &[(1, "missing_value")])));
        let fixed =
            FixedSizeBinaryArray::try_from_iter([[1_u8, 2], [3, 4]].into_iter()).expect("of one size");
        check(Arc::new(fixed), "binary", true, Ok(("0102 0304", &[])));
    }

    #[test]
    fn times_are_not_cut() {
        let times = TimestampNanosecondArray::from(vec![1_000, 1_001, 2_000]);
        check(Arc::new(times.clone()), "timestamp_ntz", true, {
            Ok(("1970-01-01T00:00:00.000001 1970-01-01T00:00:00.000002", &[(1, "out_of_range")]))
        });
        check(Arc::new(times.clone()), "timestamp", true, Err("schema_mismatch"));
        check(Arc::new(times.with_timezone("+02:00")), "timestamp", true, {
            Ok(("1970-01-01T00:00:00.000001Z 1970-01-01T00:00:00.000002Z", &[(1, "out_of_range")]))
        });
        let days = arrow::array::Date64Array::from(vec![86_400_000, 1]);
        check(Arc::new(days), "date", true, Ok(("1970-01-02", &[(1, "out_of_range")])));
        let time = arrow::array::Time64MicrosecondArray::from(vec![1]);
        check(Arc::new(time), "int64", true, Err("unsupported_type"));
    }

    #[test]
    fn nested_misfits_refuse_their_row() {
        let lists = |rows: Vec<Option<Vec<Option<i64>>>>| {
            Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows)) as ArrayRef
        };
        let rows =
            vec![Some(vec![Some(1), None]), None, Some(vec![]), Some(vec![Some(300)]), Some(vec![Some(2)])];
        check(lists(rows.clone()), "list<int64>", true, Ok(("[1, null] null [] [300] [2]", &[])));
        check(lists(rows), "list<int8 not null>", true, {
            Ok(("null [] [2]", &[(0, "missing_value"), (3, "out_of_range")]))
        });
        let a: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, None]));
        let nulls = [true, false, true];
        let fields = vec![Field::new("a", DataType::Int64, true)];
        let structs =
            || Arc::new(StructArray::new(fields.clone().into(), vec![a.clone()], Some(nulls_of(&nulls))));
        check(structs(), "struct<a: int64 not null>", true, Ok(("{a: 1} null", &[(2, "missing_value")])));
        check(
            structs(),
            "struct<a: int64, b: string>",
            true,
            Ok(("{a: 1, b: null} null {a: null, b: null}", &[])),
        );
        check(structs(), "struct<b: string>", true, Err("schema_mismatch"));
    }

    #[test]
    fn maps_go_in_and_refuse_their_row() {
        let map = |keys: ArrayRef, values: ArrayRef, lengths: &[usize], valid: &[bool]| {
            let key = Field::new("key", keys.data_type().clone(), false);
            let fields = vec![key, Field::new("value", values.data_type().clone(), true)];
            let entries = StructArray::new(fields.clone().into(), vec![keys, values], None);
            let entry = Field::new("entries", DataType::Struct(fields.into()), false);
            let offsets = arrow::buffer::OffsetBuffer::from_lengths(lengths.iter().copied());
            let map = MapArray::new(Arc::new(entry), offsets, entries, Some(nulls_of(valid)), false);
            Arc::new(map) as ArrayRef
        };
        let keys = || Arc::new(StringArray::from(vec!["a", "b", "c"])) as ArrayRef;
        let values = || Arc::new(Int64Array::from(vec![Some(1), None, Some(300)])) as ArrayRef;
        let rows = || map(keys(), values(), &[1, 0, 0, 2], &[true, true, false, true]);
        check(rows(), "map<string,int64>", true, Ok(("{a: 1} {} null {b: null, c: 300}", &[])));
        check(rows(), "map<string,int8>", true, Ok(("{a: 1} {} null", &[(3, "out_of_range")])));
        check(rows(), "map<string,int64 not null>", true, Ok(("{a: 1} {} null", &[(3, "missing_value")])));
        let words: DictionaryArray<Int8Type> = vec!["a", "b", "a"].into_iter().collect();
        let rows = map(Arc::new(words), values(), &[1, 1, 1], &[true; 3]);
        check(rows, "map<string,int64>", true, Ok(("{a: 1} {b: null} {a: 300}", &[])));
    }

    fn nulls_of(valid: &[bool]) -> arrow::buffer::NullBuffer {
        arrow::buffer::NullBuffer::from(valid)
    }

    fn sample() -> (SchemaRef, RecordBatch) {
        let n: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
        let s: ArrayRef =
            Arc::new((0..100).map(|n| (n % 3 > 0).then(|| n.to_string())).collect::<StringArray>());
        let d: DictionaryArray<UInt8Type> =
            (0..100).map(|n| Some(if n % 2 > 0 { "odd" } else { "even" })).collect();
        let columns =
            [("n", "int64", false), ("s", "string", true), ("d", "string", true), ("x", "bool", true)];
        (table(&columns), batch(vec![("d", Arc::new(d)), ("s", s), ("n", n)]))
    }

    #[test]
    fn columns_are_found_by_name_and_missing_ones_are_null() {
        let (table, batch) = sample();
        for compression in [None, Some(CompressionType::LZ4_FRAME), Some(CompressionType::ZSTD)] {
            let payload = ipc(&[batch.slice(0, 40), batch.slice(40, 60)], compression);
            let (batches, refused) = decode(&table, &payload, 100, UnknownFields::Refuse).expect("fits");
            assert_eq!(refused, []);
            assert_eq!(batches.iter().map(RecordBatch::num_rows).collect::<Vec<_>>(), [40, 60]);
            assert_eq!(batches[1].column(0).as_primitive::<Int64Type>().value(0), 40);
            assert_eq!(batches[1].column(2).as_string::<i32>().value(1), "odd");
            assert_eq!(batches[1].column(3).null_count(), 60);
        }
    }

    #[test]
    fn frames_that_do_not_fit_are_refused_whole() {
        let (table_schema, sample) = sample();
        let payload = ipc(std::slice::from_ref(&sample), None);
        let code = |outcome: Outcome| outcome.expect_err("refused").code;
        let refuse = UnknownFields::Refuse;
        assert_eq!(code(decode(&table_schema, &payload, 99, refuse)), "count_mismatch");
        assert_eq!(code(decode(&table(&[("n", "int64", true)]), &payload, 100, refuse)), "unknown_field");
        assert!(decode(&table(&[("n", "int64", true)]), &payload, 100, UnknownFields::Ignore).is_ok());
        let missing = table(&[("n", "int64", true), ("must", "int64", false)]);
        let error = decode(&missing, &payload, 100, UnknownFields::Ignore).expect_err("missing");
        assert_eq!((error.code.as_str(), error.column.as_deref()), ("missing_column", Some("must")));
        for garbage in [&b""[..], b"x", b"ARROW1\0\0", b"{\"n\":1}\n{\"n\":2}", &[0; 64], &[0xff; 64]] {
            assert_eq!(
                code(decode(&table_schema, &Bytes::copy_from_slice(garbage), 1, refuse)),
                "invalid_arrow"
            );
        }
        let error = decode(&table_schema, &payload.slice(..payload.len() / 2), 100, refuse).expect_err("cut");
        assert!(error.code == "invalid_arrow" && error.message.contains("truncated"), "{error}");
    }

    /// A stream with one compressed column of zeros, and where the length prefix of its values stands.
    fn compressed(rows: usize) -> (Bytes, usize) {
        let zeros: ArrayRef = Arc::new(Int64Array::from(vec![0; rows]));
        let payload = ipc(&[batch(vec![("c", zeros)])], Some(CompressionType::LZ4_FRAME));
        let length = (rows * 8).to_le_bytes();
        let at = payload.windows(8).position(|window| window == length).expect("a prefix");
        (payload, at)
    }

    #[test]
    fn a_length_bomb_is_an_error_and_not_the_end() {
        let table = table(&[("c", "int64", true)]);
        let (payload, at) = compressed(10_000);
        assert!(decode(&table, &payload, 10_000, UnknownFields::Refuse).is_ok());
        for (prefix, code) in [
            (1_i64 << 40, "decoded_too_large"),
            (i64::MAX, "decoded_too_large"),
            (-5, "invalid_arrow"),
            (1, "invalid_arrow"),
        ] {
            let mut forged = payload.to_vec();
            forged[at..at + 8].copy_from_slice(&prefix.to_le_bytes());
            let outcome = decode(&table, &forged.into(), 10_000, UnknownFields::Refuse);
            assert_eq!(outcome.expect_err("refused").code, code, "{prefix}");
        }
        let (honest, _) = compressed(1_000_000);
        let outcome = decode(&table, &honest, 1_000_000, UnknownFields::Refuse);
        assert_eq!(outcome.expect_err("refused").code, "decoded_too_large");
    }

    #[test]
    fn what_repeats_or_leaves_out_values_is_bounded_too() {
        let long = "x".repeat(1 << 15);
        let words: DictionaryArray<Int8Type> = (0..1000).map(|_| Some(long.as_str())).collect();
        check(Arc::new(words), "string", true, Err("decoded_too_large"));
        let none = RecordBatch::try_new_with_options(
            Arc::new(Schema::empty()),
            vec![],
            &RecordBatchOptions::new().with_row_count(Some(1 << 24)),
        );
        let payload = ipc(&[none.expect("rows without columns")], None);
        let outcome = decode(&table(&[("c", "int64", true)]), &payload, 1 << 24, UnknownFields::Refuse);
        assert_eq!(outcome.expect_err("refused").code, "decoded_too_large");
    }

    #[test]
    fn a_schema_message_is_enough_for_a_schema() {
        let (_, batch) = sample();
        let payload = ipc(&[batch.slice(0, 0)], None);
        assert_eq!(decode_schema(&payload).expect("a schema").fields().len(), 3);
        assert_eq!(decode_schema(b"").expect_err("nothing").code, "invalid_arrow");
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(payload: Vec<u8>, count in 0..3_usize) {
            let (table, _) = sample();
            let _ = decode(&table, &payload.into(), count, UnknownFields::Ignore);
        }

        #[test]
        fn damaged_streams_are_decoded_or_refused(
            cut in any::<prop::sample::Index>(),
            flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u32), 1..4),
            codec in 0..3_usize,
        ) {
            let (table, batch) = sample();
            let codec = [None, Some(CompressionType::LZ4_FRAME), Some(CompressionType::ZSTD)][codec];
            let whole = ipc(&[batch], codec);
            let cut = whole.slice(..cut.index(whole.len()));
            let _ = decode(&table, &cut, 100, UnknownFields::Refuse);
            let mut flipped = whole.to_vec();
            for (place, bit) in flips {
                let place = place.index(flipped.len());
                flipped[place] ^= 1 << bit;
            }
            let _ = decode(&table, &flipped.into(), 100, UnknownFields::Refuse);
        }
    }
}
