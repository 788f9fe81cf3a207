//! Spans: one row each, with their events and links.
//!
//! *Owns*: the columns of spans. A core.
//! *Does not own*: what they are made of (`columns`).

use std::sync::Arc;

use arrow::array::{ArrayBuilder, ArrayRef, Int64Builder, StringBuilder, TimestampMicrosecondBuilder};
use sluice_shared::error::Error;
use sluice_shared::protobuf::{Reader, WireType};

use super::columns::{
    Attributes, Lists, Misfit, Named, Origin, OriginColumns, append_id, append_text, append_time,
    append_word, for_each, structure, times,
};
use super::value::utf8;

/// Fields of a span that are read by the columns they go to.
const ATTRIBUTES: u32 = 9;
const EVENTS: u32 = 11;
const LINKS: u32 = 13;
/// Words of enums, by number.
const KINDS: [&str; 6] = [
    "SPAN_KIND_UNSPECIFIED",
    "SPAN_KIND_INTERNAL",
    "SPAN_KIND_SERVER",
    "SPAN_KIND_CLIENT",
    "SPAN_KIND_PRODUCER",
    "SPAN_KIND_CONSUMER",
];
const STATUS_CODES: [&str; 3] = ["STATUS_CODE_UNSET", "STATUS_CODE_OK", "STATUS_CODE_ERROR"];

/// The columns of spans.
pub(super) struct Spans {
    time: TimestampMicrosecondBuilder,
    start_time_unix_nano: Int64Builder,
    end_time_unix_nano: Int64Builder,
    trace_id: StringBuilder,
    span_id: StringBuilder,
    parent_span_id: StringBuilder,
    trace_state: StringBuilder,
    name: StringBuilder,
    kind: StringBuilder,
    flags: Int64Builder,
    status_code: StringBuilder,
    status_message: StringBuilder,
    attributes: Attributes,
    dropped_attributes_count: Int64Builder,
    events: Events,
    dropped_events_count: Int64Builder,
    links: Links,
    dropped_links_count: Int64Builder,
    origin: OriginColumns,
}

#[derive(Default)]
struct Span<'a> {
    trace_id: &'a [u8],
    span_id: &'a [u8],
    parent_span_id: &'a [u8],
    trace_state: &'a str,
    name: &'a str,
    kind: u64,
    flags: u32,
    start: u64,
    end: u64,
    status_code: u64,
    status_message: &'a str,
    dropped_attributes: u64,
    dropped_events: u64,
    dropped_links: u64,
}

impl<'a> Span<'a> {
    fn read(mut message: Reader<'a>) -> Result<Self, Error> {
        let mut span = Self::default();
        while !message.is_done() {
            let tag = message.tag()?;
            match (tag.number, tag.wire) {
                (1, WireType::Delimited) => span.trace_id = message.delimited()?,
                (2, WireType::Delimited) => span.span_id = message.delimited()?,
                (3, WireType::Delimited) => span.trace_state = utf8(message.delimited()?)?,
                (4, WireType::Delimited) => span.parent_span_id = message.delimited()?,
                (5, WireType::Delimited) => span.name = utf8(message.delimited()?)?,
                (6, WireType::Varint) => span.kind = message.varint()?,
                (7, WireType::Fixed64) => span.start = u64::from_le_bytes(message.fixed64()?),
                (8, WireType::Fixed64) => span.end = u64::from_le_bytes(message.fixed64()?),
                (10, WireType::Varint) => span.dropped_attributes = message.varint()?,
                (12, WireType::Varint) => span.dropped_events = message.varint()?,
                (14, WireType::Varint) => span.dropped_links = message.varint()?,
                (15, WireType::Delimited) => span.read_status(message.nested()?)?,
                (16, WireType::Fixed32) => span.flags = u32::from_le_bytes(message.fixed32()?),
                _ => message.skip(tag)?,
            }
        }
        Ok(span)
    }

    fn read_status(&mut self, mut status: Reader<'a>) -> Result<(), Error> {
        while !status.is_done() {
            let tag = status.tag()?;
            match (tag.number, tag.wire) {
                (2, WireType::Delimited) => self.status_message = utf8(status.delimited()?)?,
                (3, WireType::Varint) => self.status_code = status.varint()?,
                _ => status.skip(tag)?,
            }
        }
        Ok(())
    }
}

impl Spans {
    pub(super) fn new() -> Self {
        Self {
            time: times(),
            start_time_unix_nano: Int64Builder::new(),
            end_time_unix_nano: Int64Builder::new(),
            trace_id: StringBuilder::new(),
            span_id: StringBuilder::new(),
            parent_span_id: StringBuilder::new(),
            trace_state: StringBuilder::new(),
            name: StringBuilder::new(),
            kind: StringBuilder::new(),
            flags: Int64Builder::new(),
            status_code: StringBuilder::new(),
            status_message: StringBuilder::new(),
            attributes: Attributes::new(),
            dropped_attributes_count: Int64Builder::new(),
            events: Events::new(),
            dropped_events_count: Int64Builder::new(),
            links: Links::new(),
            dropped_links_count: Int64Builder::new(),
            origin: OriginColumns::new(),
        }
    }

    /// Appends a span's row.
    pub(super) fn append(
        &mut self,
        message: Reader<'_>,
        origin: &Origin,
        misfit: &mut Misfit,
    ) -> Result<(), Error> {
        let span = Span::read(message.clone())?;
        append_time(&mut self.time, span.start);
        self.start_time_unix_nano.append_option(misfit.nanos("start_time_unix_nano", span.start));
        self.end_time_unix_nano.append_option(misfit.nanos("end_time_unix_nano", span.end));
        append_id(&mut self.trace_id, span.trace_id);
        append_id(&mut self.span_id, span.span_id);
        append_id(&mut self.parent_span_id, span.parent_span_id);
        append_text(&mut self.trace_state, span.trace_state);
        append_text(&mut self.name, span.name);
        append_word(&mut self.kind, &KINDS, span.kind);
        self.flags.append_value(i64::from(span.flags));
        append_word(&mut self.status_code, &STATUS_CODES, span.status_code);
        append_text(&mut self.status_message, span.status_message);
        self.attributes.append(&message, ATTRIBUTES)?;
        let mut count = |column, value| misfit.signed(column, value);
        self.dropped_attributes_count
            .append_option(count("dropped_attributes_count", span.dropped_attributes));
        self.dropped_events_count.append_option(count("dropped_events_count", span.dropped_events));
        self.dropped_links_count.append_option(count("dropped_links_count", span.dropped_links));
        self.events.append(&message, misfit)?;
        self.links.append(&message, misfit)?;
        self.origin.append(origin, misfit);
        Ok(())
    }

    pub(super) fn finish(&mut self) -> Vec<Named> {
        let (service_name, last) = self.origin.finish("span_schema_url");
        let status = structure(vec![
            ("code", Arc::new(self.status_code.finish())),
            ("message", Arc::new(self.status_message.finish())),
        ]);
        let first: Vec<Named> = vec![
            ("time", Arc::new(self.time.finish())),
            service_name,
            ("start_time_unix_nano", Arc::new(self.start_time_unix_nano.finish())),
            ("end_time_unix_nano", Arc::new(self.end_time_unix_nano.finish())),
            ("trace_id", Arc::new(self.trace_id.finish())),
            ("span_id", Arc::new(self.span_id.finish())),
            ("parent_span_id", Arc::new(self.parent_span_id.finish())),
            ("trace_state", Arc::new(self.trace_state.finish())),
            ("name", Arc::new(self.name.finish())),
            ("kind", Arc::new(self.kind.finish())),
            ("flags", Arc::new(self.flags.finish())),
            ("status", status),
            ("attributes", self.attributes.finish()),
            ("dropped_attributes_count", Arc::new(self.dropped_attributes_count.finish())),
            ("events", self.events.finish()),
            ("dropped_events_count", Arc::new(self.dropped_events_count.finish())),
            ("links", self.links.finish()),
            ("dropped_links_count", Arc::new(self.dropped_links_count.finish())),
        ];
        first.into_iter().chain(last).collect()
    }
}

struct Events {
    lists: Lists,
    time_unix_nano: Int64Builder,
    name: StringBuilder,
    attributes: Attributes,
    dropped_attributes_count: Int64Builder,
}

impl Events {
    const ATTRIBUTES: u32 = 3;

    fn new() -> Self {
        Self {
            lists: Lists::default(),
            time_unix_nano: Int64Builder::new(),
            name: StringBuilder::new(),
            attributes: Attributes::new(),
            dropped_attributes_count: Int64Builder::new(),
        }
    }

    fn append(&mut self, span: &Reader<'_>, misfit: &mut Misfit) -> Result<(), Error> {
        for_each(span, EVENTS, |event| self.append_one(event, misfit))?;
        self.lists.close(self.name.len(), true);
        Ok(())
    }

    fn append_one(&mut self, mut event: Reader<'_>, misfit: &mut Misfit) -> Result<(), Error> {
        self.attributes.append(&event, Self::ATTRIBUTES)?;
        let (mut time, mut name, mut dropped) = (0, "", 0);
        while !event.is_done() {
            let tag = event.tag()?;
            match (tag.number, tag.wire) {
                (1, WireType::Fixed64) => time = u64::from_le_bytes(event.fixed64()?),
                (2, WireType::Delimited) => name = utf8(event.delimited()?)?,
                (4, WireType::Varint) => dropped = event.varint()?,
                _ => event.skip(tag)?,
            }
        }
        self.time_unix_nano.append_option(misfit.nanos("events.time_unix_nano", time));
        append_text(&mut self.name, name);
        let dropped = misfit.signed("events.dropped_attributes_count", dropped);
        self.dropped_attributes_count.append_option(dropped);
        Ok(())
    }

    fn finish(&mut self) -> ArrayRef {
        let events = structure(vec![
            ("time_unix_nano", Arc::new(self.time_unix_nano.finish())),
            ("name", Arc::new(self.name.finish())),
            ("attributes", self.attributes.finish()),
            ("dropped_attributes_count", Arc::new(self.dropped_attributes_count.finish())),
        ]);
        self.lists.finish(events)
    }
}

struct Links {
    lists: Lists,
    trace_id: StringBuilder,
    span_id: StringBuilder,
    trace_state: StringBuilder,
    attributes: Attributes,
    dropped_attributes_count: Int64Builder,
    flags: Int64Builder,
}

impl Links {
    const ATTRIBUTES: u32 = 4;

    fn new() -> Self {
        Self {
            lists: Lists::default(),
            trace_id: StringBuilder::new(),
            span_id: StringBuilder::new(),
            trace_state: StringBuilder::new(),
            attributes: Attributes::new(),
            dropped_attributes_count: Int64Builder::new(),
            flags: Int64Builder::new(),
        }
    }

    fn append(&mut self, span: &Reader<'_>, misfit: &mut Misfit) -> Result<(), Error> {
        for_each(span, LINKS, |link| self.append_one(link, misfit))?;
        self.lists.close(self.flags.len(), true);
        Ok(())
    }

    fn append_one(&mut self, mut link: Reader<'_>, misfit: &mut Misfit) -> Result<(), Error> {
        self.attributes.append(&link, Self::ATTRIBUTES)?;
        let (mut trace_id, mut span_id, mut trace_state): (&[u8], &[u8], &str) = (&[], &[], "");
        let (mut dropped, mut flags) = (0, 0);
        while !link.is_done() {
            let tag = link.tag()?;
            match (tag.number, tag.wire) {
                (1, WireType::Delimited) => trace_id = link.delimited()?,
                (2, WireType::Delimited) => span_id = link.delimited()?,
                (3, WireType::Delimited) => trace_state = utf8(link.delimited()?)?,
                (5, WireType::Varint) => dropped = link.varint()?,
                (6, WireType::Fixed32) => flags = u32::from_le_bytes(link.fixed32()?),
                _ => link.skip(tag)?,
            }
        }
        append_id(&mut self.trace_id, trace_id);
        append_id(&mut self.span_id, span_id);
        append_text(&mut self.trace_state, trace_state);
        let dropped = misfit.signed("links.dropped_attributes_count", dropped);
        self.dropped_attributes_count.append_option(dropped);
        self.flags.append_value(i64::from(flags));
        Ok(())
    }

    fn finish(&mut self) -> ArrayRef {
        let links = structure(vec![
            ("trace_id", Arc::new(self.trace_id.finish())),
            ("span_id", Arc::new(self.span_id.finish())),
            ("trace_state", Arc::new(self.trace_state.finish())),
            ("attributes", self.attributes.finish()),
            ("dropped_attributes_count", Arc::new(self.dropped_attributes_count.finish())),
            ("flags", Arc::new(self.flags.finish())),
        ]);
        self.lists.finish(links)
    }
}
