//! What is sent: the same records whatever the protocol, encoded beforehand and cut as the protocol wants them.
//!
//! *Owns*: a run's messages.
//! *Does not own*: the records (`workload`), sending them.

use std::sync::Arc;

use anyhow::{Context, anyhow, bail, ensure};
use arrow::ipc::root_as_message;
use bytes::Bytes;
use prost::encoding::decode_varint;
use rand::SeedableRng;
use rand::rngs::StdRng;
use sluice_shared::frame::{Encoding, lines};
use tokio_tungstenite::tungstenite::Utf8Bytes;

use crate::bench::{Feed, SEED};
use crate::edges::{Edge, Transport};
use crate::workload::{self, Shape};

/// Records that are encoded together, where they go out one by one.
const FRAME_ROWS: usize = 1000;
/// Before the length of each message of an Arrow IPC stream.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// What a producer sends at once.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Message {
    /// Its records; as many in each message of a load.
    pub(crate) rows: u32,
    /// Their payload, without what the protocol puts around it.
    pub(crate) bytes: usize,
    pub(crate) body: Body,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Body {
    /// The records in one piece.
    Payload(Bytes),
    /// The same as text.
    Text(Utf8Bytes),
    /// One by one.
    Records(Arc<[Bytes]>),
    /// An Arrow message.
    Batch { header: Bytes, body: Bytes },
}

/// The messages of a run, which are sent over and over.
#[derive(Debug, Clone)]
pub(crate) struct Load {
    pub(crate) encoding: Encoding,
    /// What is said once before the records: of Arrow the schema's message (over Flight its header alone), of protobuf the
    /// descriptor.
    pub(crate) schema: Bytes,
    pub(crate) rows: u32,
    pub(crate) messages: Arc<[Message]>,
}

impl Load {
    /// About `bytes` of records of this shape.
    pub(crate) fn new(edge: &Edge, shape: Shape, bytes: usize) -> anyhow::Result<Self> {
        let frame_rows = frame_rows(edge);
        let feed = Feed::of(shape, edge.encoding, frame_rows, bytes)?;
        let mut schema = match edge.encoding {
            Encoding::Protobuf => workload::descriptor(&shape.schema())?.into(),
            _ => Bytes::new(),
        };
        let mut messages = Vec::new();
        for frame in feed.frames.iter() {
            match (edge.transport, edge.encoding) {
                (Transport::WebSocketTexts | Transport::Zerobus, _) => {
                    let records = records(&frame.payload, edge.encoding)?;
                    ensure!(records.len() == frame_rows, "a frame of {} records", records.len());
                    messages.extend(records.chunks(edge.rows).map(|records| whole(edge.transport, records)));
                }
                (Transport::Http | Transport::Flight, Encoding::Arrow) => {
                    let (first, batch) = ipc_messages(&frame.payload)?;
                    let is_flight = edge.transport == Transport::Flight;
                    schema = if is_flight { first.header } else { first.raw };
                    let body = match is_flight {
                        true => Body::Batch { header: batch.header, body: batch.body },
                        false => Body::Payload(batch.raw.clone()),
                    };
                    messages.push(Ok(Message { rows: frame.rows, bytes: batch.raw.len(), body }));
                }
                _ => {
                    let (bytes, body) = (frame.payload.len(), Body::Payload(frame.payload.clone()));
                    messages.push(Ok(Message { rows: frame.rows, bytes, body }));
                }
            }
        }
        let messages: Vec<Message> = messages.into_iter().collect::<anyhow::Result<_>>()?;
        let rows = messages.first().context("no records at all")?.rows;
        ensure!(messages.iter().all(|message| message.rows == rows), "messages of different sizes");
        Ok(Self { encoding: edge.encoding, schema, rows, messages: messages.into() })
    }

    /// Of each message, its records' hashes: the records are made once more.
    pub(crate) fn hashes(&self, edge: &Edge, shape: Shape) -> anyhow::Result<Arc<[Vec<u64>]>> {
        let (mut random, mut hashes) = (StdRng::seed_from_u64(SEED), Vec::new());
        let (rows, all) = (self.rows as usize, self.messages.len() * self.rows as usize);
        while hashes.len() < all {
            let batch = shape.batch(hashes.len() as u64, frame_rows(edge), &mut random);
            hashes.extend(workload::row_hashes(&batch)?);
        }
        Ok(hashes.chunks(rows).map(<[u64]>::to_vec).collect())
    }
}

/// Records that are encoded together.
fn frame_rows(edge: &Edge) -> usize {
    match edge.transport {
        Transport::WebSocketTexts | Transport::Zerobus => FRAME_ROWS.next_multiple_of(edge.rows),
        _ => edge.rows,
    }
}

fn whole(transport: Transport, records: &[Bytes]) -> anyhow::Result<Message> {
    let bytes = records.iter().map(Bytes::len).sum();
    let body = match (transport, records) {
        (Transport::WebSocketTexts, [one]) => Body::Text(Utf8Bytes::try_from(one.clone())?),
        (Transport::WebSocketTexts, _) => bail!("a text message is one record here"),
        _ => Body::Records(records.into()),
    };
    Ok(Message { rows: u32::try_from(records.len())?, bytes, body })
}

/// The records of a payload, each without its line end or length.
fn records(payload: &Bytes, encoding: Encoding) -> anyhow::Result<Vec<Bytes>> {
    match encoding {
        Encoding::Json => Ok(lines(payload).map(|line| payload.slice_ref(line)).collect()),
        Encoding::Protobuf => {
            let (mut rest, mut records) = (payload.clone(), Vec::new());
            while !rest.is_empty() {
                let length = usize::try_from(decode_varint(&mut rest)?)?;
                ensure!(length <= rest.len(), "a message that ends beyond its payload");
                records.push(rest.split_to(length));
            }
            Ok(records)
        }
        Encoding::Arrow | Encoding::Avro => bail!("records of {encoding} do not stand alone"),
    }
}

struct IpcMessage {
    /// As it stands in the stream.
    raw: Bytes,
    header: Bytes,
    body: Bytes,
}

/// The schema and the one batch of an Arrow IPC stream.
fn ipc_messages(stream: &Bytes) -> anyhow::Result<(IpcMessage, IpcMessage)> {
    let (schema, rest) = ipc_message(stream.clone())?;
    let (batch, rest) = ipc_message(rest)?;
    ensure!(rest.len() <= 2 * CONTINUATION.len(), "an IPC stream of more than a schema and a batch");
    Ok((schema, batch))
}

fn ipc_message(mut stream: Bytes) -> anyhow::Result<(IpcMessage, Bytes)> {
    let begin = stream.clone();
    let head = cut(&mut stream, 8).filter(|head| head[..4] == CONTINUATION).context("no message")?;
    let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
    let header = cut(&mut stream, length).context("a header that is cut off")?;
    let message = root_as_message(&header).map_err(|error| anyhow!("no header: {error}"))?;
    let body_bytes = usize::try_from(message.bodyLength())?;
    let body = cut(&mut stream, body_bytes).context("a body that is cut off")?;
    let raw = begin.slice(..begin.len() - stream.len());
    Ok((IpcMessage { raw, header, body }, stream))
}

/// The first bytes, where there are so many.
fn cut(stream: &mut Bytes, bytes: usize) -> Option<Bytes> {
    (bytes <= stream.len()).then(|| stream.split_to(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edges::EDGES;

    #[test]
    fn every_edge_gets_the_same_records() {
        for edge in &EDGES {
            let load = Load::new(edge, Shape::ServiceEvent, 300_000).expect(edge.name);
            let rows: usize = load.messages.iter().map(|message| message.rows as usize).sum();
            assert!(rows > 0 && rows.is_multiple_of(FRAME_ROWS), "{}: {rows} records", edge.name);
            assert_eq!(load.rows as usize, edge.rows, "{}", edge.name);
            let has_schema = edge.encoding != Encoding::Json
                && !matches!(edge.transport, Transport::WebSocketFrames | Transport::Quic);
            assert_eq!(!load.schema.is_empty(), has_schema, "{}", edge.name);
        }
    }
}
