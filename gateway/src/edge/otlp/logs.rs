//! Log records: one row each.
//!
//! *Owns*: the columns of logs. A core.
//! *Does not own*: what they are made of (`columns`).

use std::sync::Arc;

use arrow::array::{Int64Builder, StringBuilder, TimestampMicrosecondBuilder};
use sluice_shared::error::Error;
use sluice_shared::protobuf::{Reader, WireType};

use super::columns::{
    Attributes, Misfit, Named, Origin, OriginColumns, append_id, append_text, append_time, times,
};
use super::value::{text, utf8};

/// Field of a record's attributes.
const ATTRIBUTES: u32 = 6;

/// The columns of logs.
pub(super) struct Logs {
    time: TimestampMicrosecondBuilder,
    time_unix_nano: Int64Builder,
    observed_time_unix_nano: Int64Builder,
    severity_number: Int64Builder,
    severity_text: StringBuilder,
    event_name: StringBuilder,
    body: StringBuilder,
    trace_id: StringBuilder,
    span_id: StringBuilder,
    flags: Int64Builder,
    attributes: Attributes,
    dropped_attributes_count: Int64Builder,
    origin: OriginColumns,
}

#[derive(Default)]
struct Record<'a> {
    time: u64,
    observed: u64,
    severity_number: u64,
    severity_text: &'a str,
    event_name: &'a str,
    body: Option<Reader<'a>>,
    trace_id: &'a [u8],
    span_id: &'a [u8],
    flags: u32,
    dropped: u64,
}

impl<'a> Record<'a> {
    fn read(mut message: Reader<'a>) -> Result<Self, Error> {
        let mut record = Self::default();
        while !message.is_done() {
            let tag = message.tag()?;
            match (tag.number, tag.wire) {
                (1, WireType::Fixed64) => record.time = u64::from_le_bytes(message.fixed64()?),
                (2, WireType::Varint) => record.severity_number = message.varint()?,
                (3, WireType::Delimited) => record.severity_text = utf8(message.delimited()?)?,
                (5, WireType::Delimited) => record.body = Some(message.nested()?),
                (7, WireType::Varint) => record.dropped = message.varint()?,
                (8, WireType::Fixed32) => record.flags = u32::from_le_bytes(message.fixed32()?),
                (9, WireType::Delimited) => record.trace_id = message.delimited()?,
                (10, WireType::Delimited) => record.span_id = message.delimited()?,
                (11, WireType::Fixed64) => record.observed = u64::from_le_bytes(message.fixed64()?),
                (12, WireType::Delimited) => record.event_name = utf8(message.delimited()?)?,
                _ => message.skip(tag)?,
            }
        }
        Ok(record)
    }
}

impl Logs {
    pub(super) fn new() -> Self {
        Self {
            time: times(),
            time_unix_nano: Int64Builder::new(),
            observed_time_unix_nano: Int64Builder::new(),
            severity_number: Int64Builder::new(),
            severity_text: StringBuilder::new(),
            event_name: StringBuilder::new(),
            body: StringBuilder::new(),
            trace_id: StringBuilder::new(),
            span_id: StringBuilder::new(),
            flags: Int64Builder::new(),
            attributes: Attributes::new(),
            dropped_attributes_count: Int64Builder::new(),
            origin: OriginColumns::new(),
        }
    }

    /// Appends a record's row.
    pub(super) fn append(
        &mut self,
        message: Reader<'_>,
        origin: &Origin,
        misfit: &mut Misfit,
    ) -> Result<(), Error> {
        let record = Record::read(message.clone())?;
        // A source that knows no time of its own leaves it out: then the collector's counts, as OpenTelemetry has it.
        let time = if record.time > 0 { record.time } else { record.observed };
        append_time(&mut self.time, time);
        self.time_unix_nano.append_option(misfit.nanos("time_unix_nano", record.time));
        self.observed_time_unix_nano.append_option(misfit.nanos("observed_time_unix_nano", record.observed));
        let severity = record.severity_number.cast_signed();
        self.severity_number.append_option((severity != 0).then_some(severity));
        append_text(&mut self.severity_text, record.severity_text);
        append_text(&mut self.event_name, record.event_name);
        self.body.append_option(record.body.map(text).transpose()?.flatten());
        append_id(&mut self.trace_id, record.trace_id);
        append_id(&mut self.span_id, record.span_id);
        self.flags.append_value(i64::from(record.flags));
        self.attributes.append(&message, ATTRIBUTES)?;
        let dropped = misfit.signed("dropped_attributes_count", record.dropped);
        self.dropped_attributes_count.append_option(dropped);
        self.origin.append(origin, misfit);
        Ok(())
    }

    pub(super) fn finish(&mut self) -> Vec<Named> {
        let (service_name, last) = self.origin.finish("log_schema_url");
        let first: Vec<Named> = vec![
            ("time", Arc::new(self.time.finish())),
            service_name,
            ("time_unix_nano", Arc::new(self.time_unix_nano.finish())),
            ("observed_time_unix_nano", Arc::new(self.observed_time_unix_nano.finish())),
            ("severity_number", Arc::new(self.severity_number.finish())),
            ("severity_text", Arc::new(self.severity_text.finish())),
            ("event_name", Arc::new(self.event_name.finish())),
            ("body", Arc::new(self.body.finish())),
            ("trace_id", Arc::new(self.trace_id.finish())),
            ("span_id", Arc::new(self.span_id.finish())),
            ("flags", Arc::new(self.flags.finish())),
            ("attributes", self.attributes.finish()),
            ("dropped_attributes_count", Arc::new(self.dropped_attributes_count.finish())),
        ];
        first.into_iter().chain(last).collect()
    }
}
