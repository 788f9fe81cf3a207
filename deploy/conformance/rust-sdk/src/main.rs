//! A producer that does what it reads, by Databricks's Rust client: a line of standard input is a command, and each is
//! answered by one line, `ok …` or `error …`. `zerobus_rust_sdk.py` gives the commands, and kills gateways in between;
//! `zerobus_rust_rate.py` asks how fast it is.
//!
//! *Owns*: the commands.
//! *Does not own*: what has to come of them.

use std::collections::HashMap;
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use arrow_array::{Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use databricks_zerobus_ingest_sdk::{
    EncodedRecord, HeadersProvider, JsonString, MessageId, MultiplexedArrowStream, MultiplexedStream,
    OffsetId, PersistentStream, ProtoBytes, StreamBuilder, ZerobusArrowStream, ZerobusResult, ZerobusSdk,
    ZerobusStream,
};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto};
use tokio::io::{AsyncBufReadExt, BufReader};

struct Headers(String);

#[async_trait::async_trait]
impl HeadersProvider for Headers {
    async fn get_headers(&self) -> ZerobusResult<HashMap<&'static str, String>> {
        let table = ("x-databricks-zerobus-table-name", self.0.clone());
        Ok(HashMap::from([("authorization", "Bearer any".to_owned()), table]))
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Json,
    Protobuf,
    Arrow,
}

impl Kind {
    fn parse(word: &str) -> Result<Self> {
        Ok(match word {
            "json" => Self::Json,
            "protobuf" => Self::Protobuf,
            "arrow" => Self::Arrow,
            other => bail!("no such kind: {other}"),
        })
    }

    fn record(self, number: i64) -> EncodedRecord {
        match self {
            Self::Json => JsonString(format!("{{\"id\":{number}}}")).into(),
            _ => ProtoBytes(message(number)).into(),
        }
    }
}

/// `message Reading { optional int64 id = 1; }`, encoded.
fn message(number: i64) -> Vec<u8> {
    let (mut bytes, mut rest) = (vec![0x08], number as u64);
    while rest >= 0x80 {
        bytes.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    bytes.push(rest as u8);
    bytes
}

fn descriptor() -> DescriptorProto {
    let field = FieldDescriptorProto {
        name: Some("id".to_owned()),
        number: Some(1),
        label: Some(Label::Optional.into()),
        r#type: Some(Type::Int64.into()),
        ..FieldDescriptorProto::default()
    };
    DescriptorProto { name: Some("Reading".to_owned()), field: vec![field], ..DescriptorProto::default() }
}

fn schema() -> Arc<Schema> {
    Arc::new(Schema::new(vec![Field::new("id", DataType::Int64, true)]))
}

fn rows(numbers: Range<i64>) -> Result<RecordBatch> {
    Ok(RecordBatch::try_new(schema(), vec![Arc::new(Int64Array::from_iter_values(numbers))])?)
}

enum Stream {
    Plain(ZerobusStream),
    Multiplexed(MultiplexedStream),
    Arrow(ZerobusArrowStream),
    MultiplexedArrow(MultiplexedArrowStream),
    Persistent(PersistentStream),
}

/// Where a request is in its stream.
#[derive(Clone, Copy)]
enum Place {
    Offset(OffsetId),
    Message(MessageId),
}

impl Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Offset(offset) => write!(f, "{offset}"),
            Self::Message(id) => write!(f, "{}/{}", id.stream_index(), id.sub_offset()),
        }
    }
}

struct Producer {
    sdk: ZerobusSdk,
    table: String,
    kind: Kind,
    stream: Option<Stream>,
    last: Option<Place>,
}

impl Producer {
    fn builder(&self) -> StreamBuilder<'_> {
        let builder = self.sdk.stream_builder().table(&self.table);
        // A gateway that is down is looked for again until it is there.
        let builder = builder.recovery_backoff_ms(50).recovery_retries(1000);
        let builder = builder.headers_provider(Arc::new(Headers(self.table.clone())));
        match self.kind {
            Kind::Json => builder.json(),
            Kind::Protobuf => builder.compiled_proto(descriptor()),
            Kind::Arrow => builder.arrow(schema()),
        }
    }

    async fn persistent(&self, resume: Option<&str>) -> Result<PersistentStream> {
        let builder = self.sdk.persistent_stream_builder().table(&self.table);
        let builder = builder.recovery_backoff_ms(50).recovery_retries(1000);
        let builder = builder.headers_provider(Arc::new(Headers(self.table.clone())));
        let builder = match self.kind {
            Kind::Json => builder.json(),
            Kind::Protobuf => builder.compiled_proto(descriptor()),
            Kind::Arrow => bail!("persistent streams take no Arrow"),
        };
        Ok(match resume {
            None => builder.build().await?,
            Some(id) => builder.resume(id).await?,
        })
    }

    async fn run(&mut self, command: &str) -> Result<String> {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            ["open", kind] => {
                self.kind = Kind::parse(kind)?;
                self.stream = Some(match self.kind {
                    Kind::Arrow => Stream::Arrow(self.builder().build_arrow().await?),
                    _ => Stream::Plain(self.builder().build().await?),
                });
            }
            ["multiplex", kind, streams] => {
                self.kind = Kind::parse(kind)?;
                let builder = self.builder().multiplexed(streams.parse()?);
                self.stream = Some(match self.kind {
                    Kind::Arrow => Stream::MultiplexedArrow(builder.build_arrow().await?),
                    _ => Stream::Multiplexed(builder.build().await?),
                });
            }
            ["create", kind] => {
                self.kind = Kind::parse(kind)?;
                return self.opened(self.persistent(None).await?);
            }
            ["resume", id, kind] => {
                self.kind = Kind::parse(kind)?;
                return self.opened(self.persistent(Some(id)).await?);
            }
            ["send", from, to] => {
                for number in from.parse()?..to.parse()? {
                    self.last = Some(self.send(number..number + 1, false).await?);
                }
                return self.place();
            }
            ["batch", from, to] => {
                self.last = Some(self.send(from.parse()?..to.parse()?, true).await?);
                return self.place();
            }
            ["rate", records, bytes] => return self.rate(records.parse()?, bytes.parse()?).await,
            ["wait"] => self.wait().await?,
            ["flush"] => self.flush().await?,
            ["close"] => self.close().await?,
            _ => bail!("no such command: {command}"),
        }
        Ok(String::new())
    }

    /// Of a persistent stream: its id, and what was committed when it was opened.
    fn opened(&mut self, stream: PersistentStream) -> Result<String> {
        let id = stream.stream_id().context("a persistent stream without an id")?.to_owned();
        let watermark = stream.resume_watermark().map_or("none".to_owned(), |offset| offset.to_string());
        self.stream = Some(Stream::Persistent(stream));
        Ok(format!("{id} {watermark}"))
    }

    fn place(&self) -> Result<String> {
        self.last.map(|place| place.to_string()).context("nothing was sent")
    }

    async fn send(&self, numbers: Range<i64>, batch: bool) -> Result<Place> {
        let first = self.kind.record(numbers.start);
        let records = || numbers.clone().map(|number| self.kind.record(number)).collect::<Vec<_>>();
        let nothing = || anyhow!("an empty batch");
        Ok(match self.stream.as_ref().context("no stream")? {
            Stream::Plain(stream) if batch => {
                Place::Offset(stream.ingest_records_offset(records()).await?.ok_or_else(nothing)?)
            }
            Stream::Plain(stream) => Place::Offset(stream.ingest_record_offset(first).await?),
            Stream::Persistent(stream) if batch => {
                Place::Offset(stream.ingest_records_offset(records()).await?.ok_or_else(nothing)?)
            }
            Stream::Persistent(stream) => Place::Offset(stream.ingest_record_offset(first).await?),
            Stream::Multiplexed(stream) if batch => {
                Place::Message(stream.ingest_records(records()).await?.ok_or_else(nothing)?)
            }
            Stream::Multiplexed(stream) => Place::Message(stream.ingest_record(first).await?),
            Stream::Arrow(stream) => Place::Offset(stream.ingest_batch(rows(numbers)?).await?),
            Stream::MultiplexedArrow(stream) => Place::Message(stream.ingest_batch(rows(numbers)?).await?),
        })
    }

    async fn wait(&self) -> Result<()> {
        let last = self.last.context("nothing was sent")?;
        match (self.stream.as_ref().context("no stream")?, last) {
            (Stream::Plain(stream), Place::Offset(offset)) => stream.wait_for_offset(offset).await?,
            (Stream::Arrow(stream), Place::Offset(offset)) => stream.wait_for_offset(offset).await?,
            (Stream::Persistent(stream), Place::Offset(offset)) => stream.wait_for_offset(offset).await?,
            (Stream::Multiplexed(stream), Place::Message(id)) => stream.wait_for_message_id(id).await?,
            (Stream::MultiplexedArrow(stream), Place::Message(id)) => stream.wait_for_message_id(id).await?,
            _ => bail!("the last request was on another stream"),
        }
        Ok(())
    }

    /// Sends records of JSON one by one, as fast as they are taken, until the last is acked: how long that took, in seconds.
    async fn rate(&mut self, records: u64, bytes: usize) -> Result<String> {
        let mut stream = self.builder().json().build().await?;
        let record = |number: u64| {
            let empty = format!("{{\"id\":{number},\"text\":\"\"}}").len();
            JsonString(format!("{{\"id\":{number},\"text\":\"{}\"}}", "x".repeat(bytes.saturating_sub(empty))))
        };
        // The table and the stream are there before the clock starts.
        let first = stream.ingest_record_offset(record(0)).await?;
        stream.wait_for_offset(first).await?;
        let began = Instant::now();
        for number in 0..records {
            stream.ingest_record_offset(record(number)).await?;
        }
        stream.flush().await?;
        let took = began.elapsed().as_secs_f64();
        stream.close().await?;
        Ok(took.to_string())
    }

    async fn flush(&self) -> Result<()> {
        match self.stream.as_ref().context("no stream")? {
            Stream::Plain(stream) => stream.flush().await?,
            Stream::Arrow(stream) => stream.flush().await?,
            Stream::Persistent(stream) => stream.flush().await?,
            Stream::Multiplexed(stream) => stream.flush().await?,
            Stream::MultiplexedArrow(stream) => stream.flush().await?,
        }
        Ok(())
    }

    async fn close(&mut self) -> Result<()> {
        match self.stream.take().context("no stream")? {
            Stream::Plain(mut stream) => stream.close().await?,
            Stream::Arrow(mut stream) => stream.close().await?,
            Stream::Persistent(mut stream) => stream.close().await?,
            Stream::Multiplexed(mut stream) => stream.close().await?,
            Stream::MultiplexedArrow(mut stream) => stream.close().await?,
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (endpoint, table) = arguments.next().zip(arguments.next()).context("usage: ENDPOINT TABLE")?;
    let sdk = ZerobusSdk::builder().endpoint(&endpoint).unity_catalog_url(&endpoint).build()?;
    let mut producer = Producer { sdk, table, kind: Kind::Json, stream: None, last: None };
    let mut commands = BufReader::new(tokio::io::stdin()).lines();
    while let Some(command) = commands.next_line().await? {
        match producer.run(&command).await {
            Ok(answer) => println!("ok {answer}"),
            Err(error) => println!("error {}", format!("{error:#}").replace('\n', " ")),
        }
    }
    Ok(())
}
