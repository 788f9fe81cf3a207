//! Metrics: one row a data point, of whatever kind.
//!
//! *Owns*: the columns of metrics, which fields each kind of point has. A core.
//! *Does not own*: what columns are made of (`columns`).

use std::sync::Arc;

use arrow::array::{
    ArrayBuilder, ArrayRef, BooleanBuilder, Float64Builder, Int64Builder, StringBuilder,
    TimestampMicrosecondBuilder,
};
use sluice_shared::error::Error;
use sluice_shared::protobuf::{Reader, Tag, WireType};

use super::columns::{
    Attributes, Doubles, Ints, Lists, Misfit, Named, Origin, OriginColumns, VARINT_COUNTS, append_id,
    append_text, append_time, append_word, for_each, structure, times,
};
use super::value::utf8;

/// Field of a metric's metadata.
const METADATA: u32 = 12;
/// Field of the points of each kind of metric.
const POINTS: u32 = 1;
/// Words of an enum, by number.
const TEMPORALITIES: [&str; 3] = [
    "AGGREGATION_TEMPORALITY_UNSPECIFIED",
    "AGGREGATION_TEMPORALITY_DELTA",
    "AGGREGATION_TEMPORALITY_CUMULATIVE",
];

/// What a metric's points are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gauge,
    Sum,
    Histogram,
    ExponentialHistogram,
    Summary,
}

/// Fields of a point that are read by the columns they go to.
struct Fields {
    attributes: u32,
    exemplars: Option<u32>,
    bucket_counts: Option<u32>,
    explicit_bounds: Option<u32>,
    quantiles: Option<u32>,
}

impl Kind {
    /// By the field of the metric that holds it.
    fn of_field(number: u32) -> Option<Self> {
        match number {
            5 => Some(Self::Gauge),
            7 => Some(Self::Sum),
            9 => Some(Self::Histogram),
            10 => Some(Self::ExponentialHistogram),
            11 => Some(Self::Summary),
            _ => None,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Sum => "sum",
            Self::Histogram => "histogram",
            Self::ExponentialHistogram => "exponential_histogram",
            Self::Summary => "summary",
        }
    }

    fn fields(self) -> Fields {
        let none = Fields {
            attributes: 7,
            exemplars: None,
            bucket_counts: None,
            explicit_bounds: None,
            quantiles: None,
        };
        match self {
            Self::Gauge | Self::Sum => Fields { exemplars: Some(5), ..none },
            Self::Histogram => Fields {
                attributes: 9,
                exemplars: Some(8),
                bucket_counts: Some(6),
                explicit_bounds: Some(7),
                ..none
            },
            Self::ExponentialHistogram => Fields { attributes: 1, exemplars: Some(11), ..none },
            Self::Summary => Fields { quantiles: Some(6), ..none },
        }
    }
}

/// What a row says of its metric.
pub(super) struct Metric<'a> {
    message: Reader<'a>,
    name: &'a str,
    description: &'a str,
    unit: &'a str,
    /// The kind, and the message that has the points. None where the metric has no data, or of a kind that is not known.
    data: Option<(Kind, Reader<'a>)>,
    temporality: Option<u64>,
    is_monotonic: Option<bool>,
}

impl<'a> Metric<'a> {
    pub(super) fn read(message: Reader<'a>) -> Result<Self, Error> {
        let mut metric = Self {
            message: message.clone(),
            name: "",
            description: "",
            unit: "",
            data: None,
            temporality: None,
            is_monotonic: None,
        };
        let mut message = message;
        while !message.is_done() {
            let tag = message.tag()?;
            match (tag.number, tag.wire) {
                (1, WireType::Delimited) => metric.name = utf8(message.delimited()?)?,
                (2, WireType::Delimited) => metric.description = utf8(message.delimited()?)?,
                (3, WireType::Delimited) => metric.unit = utf8(message.delimited()?)?,
                (number, WireType::Delimited) if let Some(kind) = Kind::of_field(number) => {
                    metric.data = Some((kind, message.nested()?));
                }
                _ => message.skip(tag)?,
            }
        }
        metric.read_data()?;
        Ok(metric)
    }

    fn read_data(&mut self) -> Result<(), Error> {
        let Some((kind, mut data)) = self.data.clone() else { return Ok(()) };
        if matches!(kind, Kind::Sum | Kind::Histogram | Kind::ExponentialHistogram) {
            self.temporality = Some(0);
        }
        self.is_monotonic = (kind == Kind::Sum).then_some(false);
        while !data.is_done() {
            let tag = data.tag()?;
            match (tag.number, tag.wire) {
                (2, WireType::Varint) if self.temporality.is_some() => {
                    self.temporality = Some(data.varint()?)
                }
                (3, WireType::Varint) if kind == Kind::Sum => self.is_monotonic = Some(data.varint()? != 0),
                _ => data.skip(tag)?,
            }
        }
        Ok(())
    }

    /// Whether there is data that nobody here can read.
    pub(super) fn unknown(&self) -> Option<String> {
        self.data.is_none().then(|| {
            let name: String = self.name.chars().take(100).collect();
            format!("metric {name:?} has no data, or of a kind that is not known here")
        })
    }

    /// Bytes that it adds to each row, about.
    pub(super) fn bytes(&self) -> usize {
        let points = self.data.as_ref().map_or(0, |(_, data)| data.left());
        self.message.left().saturating_sub(points)
    }

    pub(super) fn for_each_point(
        &self,
        each: impl FnMut(Reader<'a>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some((_, data)) = &self.data else { return Ok(()) };
        for_each(data, POINTS, each)
    }
}

/// The numbers of a point. What its kind does not have is absent; what it has and was not sent is zero.
#[derive(Default)]
struct Point<'a> {
    start: u64,
    time: u64,
    flags: u64,
    value: Option<f64>,
    value_int: Option<i64>,
    count: Option<u64>,
    sum: Option<f64>,
    min: Option<f64>,
    max: Option<f64>,
    scale: Option<i64>,
    zero_count: Option<u64>,
    zero_threshold: Option<f64>,
    positive: Option<Reader<'a>>,
    negative: Option<Reader<'a>>,
}

impl<'a> Point<'a> {
    fn read(kind: Kind, mut message: Reader<'a>) -> Result<Self, Error> {
        let mut point = Self::default();
        if !matches!(kind, Kind::Gauge | Kind::Sum) {
            point.count = Some(0);
        }
        point.sum = (kind == Kind::Summary).then_some(0.0);
        if kind == Kind::ExponentialHistogram {
            (point.scale, point.zero_count, point.zero_threshold) = (Some(0), Some(0), Some(0.0));
        }
        while !message.is_done() {
            let tag = message.tag()?;
            let taken = match (tag.number, tag.wire) {
                (2, WireType::Fixed64) => {
                    point.start = u64::from_le_bytes(message.fixed64()?);
                    true
                }
                (3, WireType::Fixed64) => {
                    point.time = u64::from_le_bytes(message.fixed64()?);
                    true
                }
                _ => match kind {
                    Kind::Gauge | Kind::Sum => point.take_number(tag, &mut message)?,
                    Kind::Histogram => point.take_histogram(tag, &mut message)?,
                    Kind::ExponentialHistogram => point.take_exponential(tag, &mut message)?,
                    Kind::Summary => point.take_summary(tag, &mut message)?,
                },
            };
            if !taken {
                message.skip(tag)?;
            }
        }
        Ok(point)
    }

    fn take_number(&mut self, tag: Tag, message: &mut Reader<'a>) -> Result<bool, Error> {
        match (tag.number, tag.wire) {
            (4, WireType::Fixed64) => {
                (self.value, self.value_int) = (Some(f64::from_le_bytes(message.fixed64()?)), None);
            }
            (6, WireType::Fixed64) => {
                let value = i64::from_le_bytes(message.fixed64()?);
                (self.value, self.value_int) = (Some(value as f64), Some(value));
            }
            (8, WireType::Varint) => self.flags = message.varint()?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn take_histogram(&mut self, tag: Tag, message: &mut Reader<'a>) -> Result<bool, Error> {
        match (tag.number, tag.wire) {
            (4, WireType::Fixed64) => self.count = Some(u64::from_le_bytes(message.fixed64()?)),
            (5, WireType::Fixed64) => self.sum = Some(f64::from_le_bytes(message.fixed64()?)),
            (10, WireType::Varint) => self.flags = message.varint()?,
            (11, WireType::Fixed64) => self.min = Some(f64::from_le_bytes(message.fixed64()?)),
            (12, WireType::Fixed64) => self.max = Some(f64::from_le_bytes(message.fixed64()?)),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn take_exponential(&mut self, tag: Tag, message: &mut Reader<'a>) -> Result<bool, Error> {
        match (tag.number, tag.wire) {
            (4, WireType::Fixed64) => self.count = Some(u64::from_le_bytes(message.fixed64()?)),
            (5, WireType::Fixed64) => self.sum = Some(f64::from_le_bytes(message.fixed64()?)),
            (6, WireType::Varint) => self.scale = Some(zigzag(message.varint()?)),
            (7, WireType::Fixed64) => self.zero_count = Some(u64::from_le_bytes(message.fixed64()?)),
            (8, WireType::Delimited) => self.positive = Some(message.nested()?),
            (9, WireType::Delimited) => self.negative = Some(message.nested()?),
            (10, WireType::Varint) => self.flags = message.varint()?,
            (12, WireType::Fixed64) => self.min = Some(f64::from_le_bytes(message.fixed64()?)),
            (13, WireType::Fixed64) => self.max = Some(f64::from_le_bytes(message.fixed64()?)),
            (14, WireType::Fixed64) => self.zero_threshold = Some(f64::from_le_bytes(message.fixed64()?)),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn take_summary(&mut self, tag: Tag, message: &mut Reader<'a>) -> Result<bool, Error> {
        match (tag.number, tag.wire) {
            (4, WireType::Fixed64) => self.count = Some(u64::from_le_bytes(message.fixed64()?)),
            (5, WireType::Fixed64) => self.sum = Some(f64::from_le_bytes(message.fixed64()?)),
            (8, WireType::Varint) => self.flags = message.varint()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// A signed number whose sign was sent in its last bit.
fn zigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

/// The columns of metrics.
pub(super) struct Metrics {
    time: TimestampMicrosecondBuilder,
    time_unix_nano: Int64Builder,
    start_time_unix_nano: Int64Builder,
    name: StringBuilder,
    description: StringBuilder,
    unit: StringBuilder,
    metric_type: StringBuilder,
    aggregation_temporality: StringBuilder,
    is_monotonic: BooleanBuilder,
    value: Float64Builder,
    value_int: Int64Builder,
    count: Int64Builder,
    sum: Float64Builder,
    min: Float64Builder,
    max: Float64Builder,
    bucket_counts: Ints,
    explicit_bounds: Doubles,
    scale: Int64Builder,
    zero_count: Int64Builder,
    zero_threshold: Float64Builder,
    positive: Buckets,
    negative: Buckets,
    quantiles: Quantiles,
    exemplars: Exemplars,
    flags: Int64Builder,
    attributes: Attributes,
    metadata: Attributes,
    origin: OriginColumns,
}

impl Metrics {
    pub(super) fn new() -> Self {
        Self {
            time: times(),
            time_unix_nano: Int64Builder::new(),
            start_time_unix_nano: Int64Builder::new(),
            name: StringBuilder::new(),
            description: StringBuilder::new(),
            unit: StringBuilder::new(),
            metric_type: StringBuilder::new(),
            aggregation_temporality: StringBuilder::new(),
            is_monotonic: BooleanBuilder::new(),
            value: Float64Builder::new(),
            value_int: Int64Builder::new(),
            count: Int64Builder::new(),
            sum: Float64Builder::new(),
            min: Float64Builder::new(),
            max: Float64Builder::new(),
            bucket_counts: Ints::default(),
            explicit_bounds: Doubles::default(),
            scale: Int64Builder::new(),
            zero_count: Int64Builder::new(),
            zero_threshold: Float64Builder::new(),
            positive: Buckets::default(),
            negative: Buckets::default(),
            quantiles: Quantiles::default(),
            exemplars: Exemplars::new(),
            flags: Int64Builder::new(),
            attributes: Attributes::new(),
            metadata: Attributes::new(),
            origin: OriginColumns::new(),
        }
    }

    /// Appends a point's row.
    pub(super) fn append(
        &mut self,
        metric: &Metric<'_>,
        message: Reader<'_>,
        origin: &Origin,
        misfit: &mut Misfit,
    ) -> Result<(), Error> {
        let Some((kind, _)) = &metric.data else { return Ok(()) };
        let (point, fields) = (Point::read(*kind, message.clone())?, kind.fields());
        append_time(&mut self.time, point.time);
        self.time_unix_nano.append_option(misfit.nanos("time_unix_nano", point.time));
        self.start_time_unix_nano.append_option(misfit.nanos("start_time_unix_nano", point.start));
        self.append_metric(metric, *kind)?;
        self.append_numbers(&point, misfit);
        let list = |number: Option<u32>| number.map(|number| (&message, number));
        self.bucket_counts.append(list(fields.bucket_counts), "bucket_counts", misfit)?;
        self.explicit_bounds.append(list(fields.explicit_bounds))?;
        let is_exponential = *kind == Kind::ExponentialHistogram;
        self.positive.append(is_exponential, point.positive.as_ref(), "positive.bucket_counts", misfit)?;
        self.negative.append(is_exponential, point.negative.as_ref(), "negative.bucket_counts", misfit)?;
        self.quantiles.append(list(fields.quantiles))?;
        self.exemplars.append(list(fields.exemplars), misfit)?;
        self.flags.append_option(misfit.signed("flags", point.flags));
        self.attributes.append(&message, fields.attributes)?;
        self.origin.append(origin, misfit);
        Ok(())
    }

    fn append_metric(&mut self, metric: &Metric<'_>, kind: Kind) -> Result<(), Error> {
        append_text(&mut self.name, metric.name);
        append_text(&mut self.description, metric.description);
        append_text(&mut self.unit, metric.unit);
        self.metric_type.append_value(kind.word());
        match metric.temporality {
            Some(temporality) => append_word(&mut self.aggregation_temporality, &TEMPORALITIES, temporality),
            None => self.aggregation_temporality.append_null(),
        }
        self.is_monotonic.append_option(metric.is_monotonic);
        self.metadata.append(&metric.message, METADATA)
    }

    fn append_numbers(&mut self, point: &Point<'_>, misfit: &mut Misfit) {
        self.value.append_option(point.value);
        self.value_int.append_option(point.value_int);
        self.count.append_option(point.count.and_then(|count| misfit.signed("count", count)));
        self.sum.append_option(point.sum);
        self.min.append_option(point.min);
        self.max.append_option(point.max);
        self.scale.append_option(point.scale);
        self.zero_count.append_option(point.zero_count.and_then(|count| misfit.signed("zero_count", count)));
        self.zero_threshold.append_option(point.zero_threshold);
    }

    pub(super) fn finish(&mut self) -> Vec<Named> {
        let (service_name, last) = self.origin.finish("metric_schema_url");
        let first: Vec<Named> = vec![
            ("time", Arc::new(self.time.finish())),
            service_name,
            ("time_unix_nano", Arc::new(self.time_unix_nano.finish())),
            ("start_time_unix_nano", Arc::new(self.start_time_unix_nano.finish())),
            ("name", Arc::new(self.name.finish())),
            ("description", Arc::new(self.description.finish())),
            ("unit", Arc::new(self.unit.finish())),
            ("metric_type", Arc::new(self.metric_type.finish())),
            ("aggregation_temporality", Arc::new(self.aggregation_temporality.finish())),
            ("is_monotonic", Arc::new(self.is_monotonic.finish())),
            ("value", Arc::new(self.value.finish())),
            ("value_int", Arc::new(self.value_int.finish())),
            ("count", Arc::new(self.count.finish())),
            ("sum", Arc::new(self.sum.finish())),
            ("min", Arc::new(self.min.finish())),
            ("max", Arc::new(self.max.finish())),
            ("bucket_counts", self.bucket_counts.finish()),
            ("explicit_bounds", self.explicit_bounds.finish()),
            ("scale", Arc::new(self.scale.finish())),
            ("zero_count", Arc::new(self.zero_count.finish())),
            ("zero_threshold", Arc::new(self.zero_threshold.finish())),
            ("positive", self.positive.finish()),
            ("negative", self.negative.finish()),
            ("quantile_values", self.quantiles.finish()),
            ("exemplars", self.exemplars.finish()),
            ("flags", Arc::new(self.flags.finish())),
            ("attributes", self.attributes.finish()),
            ("metadata", self.metadata.finish()),
        ];
        first.into_iter().chain(last).collect()
    }
}

/// Exponential buckets; offset and counts are null where the point has none.
#[derive(Default)]
struct Buckets {
    offset: Int64Builder,
    counts: Ints,
}

impl Buckets {
    fn append(
        &mut self,
        is_exponential: bool,
        buckets: Option<&Reader<'_>>,
        column: &str,
        misfit: &mut Misfit,
    ) -> Result<(), Error> {
        let buckets = buckets.filter(|_| is_exponential);
        let mut offset = buckets.map(|_| 0);
        let mut rest = buckets.cloned().unwrap_or(Reader::new(&[]));
        while !rest.is_done() {
            let tag = rest.tag()?;
            match (tag.number, tag.wire) {
                (1, WireType::Varint) => offset = Some(zigzag(rest.varint()?)),
                _ => rest.skip(tag)?,
            }
        }
        self.offset.append_option(offset);
        self.counts.append(buckets.map(|buckets| (buckets, VARINT_COUNTS)), column, misfit)
    }

    fn finish(&mut self) -> ArrayRef {
        structure(vec![("offset", Arc::new(self.offset.finish())), ("bucket_counts", self.counts.finish())])
    }
}

#[derive(Default)]
struct Quantiles {
    lists: Lists,
    quantile: Float64Builder,
    value: Float64Builder,
}

impl Quantiles {
    fn append(&mut self, point: Option<(&Reader<'_>, u32)>) -> Result<(), Error> {
        if let Some((point, number)) = point {
            for_each(point, number, |one| self.append_one(one))?;
        }
        self.lists.close(self.value.len(), point.is_some());
        Ok(())
    }

    fn append_one(&mut self, mut one: Reader<'_>) -> Result<(), Error> {
        let (mut quantile, mut value) = (0.0, 0.0);
        while !one.is_done() {
            let tag = one.tag()?;
            match (tag.number, tag.wire) {
                (1, WireType::Fixed64) => quantile = f64::from_le_bytes(one.fixed64()?),
                (2, WireType::Fixed64) => value = f64::from_le_bytes(one.fixed64()?),
                _ => one.skip(tag)?,
            }
        }
        self.quantile.append_value(quantile);
        self.value.append_value(value);
        Ok(())
    }

    fn finish(&mut self) -> ArrayRef {
        let values = structure(vec![
            ("quantile", Arc::new(self.quantile.finish())),
            ("value", Arc::new(self.value.finish())),
        ]);
        self.lists.finish(values)
    }
}

struct Exemplars {
    lists: Lists,
    time_unix_nano: Int64Builder,
    value: Float64Builder,
    value_int: Int64Builder,
    trace_id: StringBuilder,
    span_id: StringBuilder,
    filtered_attributes: Attributes,
}

impl Exemplars {
    const ATTRIBUTES: u32 = 7;

    fn new() -> Self {
        Self {
            lists: Lists::default(),
            time_unix_nano: Int64Builder::new(),
            value: Float64Builder::new(),
            value_int: Int64Builder::new(),
            trace_id: StringBuilder::new(),
            span_id: StringBuilder::new(),
            filtered_attributes: Attributes::new(),
        }
    }

    fn append(&mut self, point: Option<(&Reader<'_>, u32)>, misfit: &mut Misfit) -> Result<(), Error> {
        if let Some((point, number)) = point {
            for_each(point, number, |one| self.append_one(one, misfit))?;
        }
        self.lists.close(self.value.len(), point.is_some());
        Ok(())
    }

    fn append_one(&mut self, mut one: Reader<'_>, misfit: &mut Misfit) -> Result<(), Error> {
        self.filtered_attributes.append(&one, Self::ATTRIBUTES)?;
        let (mut time, mut value, mut value_int) = (0, None, None);
        let (mut trace_id, mut span_id): (&[u8], &[u8]) = (&[], &[]);
        while !one.is_done() {
            let tag = one.tag()?;
            match (tag.number, tag.wire) {
                (2, WireType::Fixed64) => time = u64::from_le_bytes(one.fixed64()?),
                (3, WireType::Fixed64) => {
                    (value, value_int) = (Some(f64::from_le_bytes(one.fixed64()?)), None)
                }
                (4, WireType::Delimited) => span_id = one.delimited()?,
                (5, WireType::Delimited) => trace_id = one.delimited()?,
                (6, WireType::Fixed64) => {
                    let int = i64::from_le_bytes(one.fixed64()?);
                    (value, value_int) = (Some(int as f64), Some(int));
                }
                _ => one.skip(tag)?,
            }
        }
        self.time_unix_nano.append_option(misfit.nanos("exemplars.time_unix_nano", time));
        self.value.append_option(value);
        self.value_int.append_option(value_int);
        append_id(&mut self.trace_id, trace_id);
        append_id(&mut self.span_id, span_id);
        Ok(())
    }

    fn finish(&mut self) -> ArrayRef {
        let exemplars = structure(vec![
            ("time_unix_nano", Arc::new(self.time_unix_nano.finish())),
            ("value", Arc::new(self.value.finish())),
            ("value_int", Arc::new(self.value_int.finish())),
            ("trace_id", Arc::new(self.trace_id.finish())),
            ("span_id", Arc::new(self.span_id.finish())),
            ("filtered_attributes", self.filtered_attributes.finish()),
        ]);
        self.lists.finish(exemplars)
    }
}
