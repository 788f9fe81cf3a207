//! An Arrow IPC stream as frames that are each a whole one: schema, dictionaries, some of the batches.
//!
//! *Owns*: where a message begins and ends, which messages a frame needs. A core.
//! *Does not own*: what is in a batch, and whether it is sound (the pod decodes it).

use std::collections::BTreeMap;

use arrow::ipc::{MessageHeader, root_as_message};
use bytes::{Bytes, BytesMut};
use sluice_shared::error::Error;

use super::Ready;

/// Before the length of a message, and of the stream's end.
const CONTINUATION: [u8; 4] = [0xff; 4];
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
/// Frames are not made larger than this, unless one batch is.
const FRAME_BYTES: usize = 1 << 20;

/// Cuts messages and gathers them to frames.
#[derive(Debug, Default)]
pub(crate) struct Arrow {
    /// What has come of the message that has begun.
    rest: BytesMut,
    /// Bytes that must be there before another look at `rest` says more.
    wanted: usize,
    /// Bytes of the body before `rest`.
    before: u64,
    schema: Option<Bytes>,
    /// By id: the last one, and what was added to it since.
    dictionaries: BTreeMap<i64, Vec<Bytes>>,
    batches: Vec<Bytes>,
    batch_bytes: usize,
    rows: u32,
    ended: bool,
}

/// What a message is, once its header has come.
enum Kind {
    Schema,
    Dictionary { id: i64, is_delta: bool },
    Batch { rows: i64 },
}

/// What is known of the message at the start of `rest`.
enum Look {
    /// More bytes have to come: so many in all.
    Wants(usize),
    /// The stream's end.
    End {
        bytes: usize,
    },
    Message {
        kind: Kind,
        bytes: usize,
    },
}

impl Arrow {
    pub(super) fn push(&mut self, piece: &[u8], ready: &mut Ready) -> Result<(), Error> {
        self.rest.extend_from_slice(piece);
        let taken = self.take_messages(ready);
        self.flush(ready);
        taken
    }

    fn take_messages(&mut self, ready: &mut Ready) -> Result<(), Error> {
        while self.rest.len() >= self.wanted.max(1) {
            if self.ended {
                return Err(self.invalid("the body goes on after the stream's end"));
            }
            match self.look(ready)? {
                Look::Wants(bytes) => self.wanted = bytes,
                Look::End { bytes } => {
                    self.ended = true;
                    self.cut(bytes);
                }
                Look::Message { kind, bytes } => {
                    let message = self.cut(bytes);
                    self.take(kind, message, ready)?;
                }
            }
        }
        Ok(())
    }

    fn cut(&mut self, bytes: usize) -> Bytes {
        self.before += bytes as u64;
        self.wanted = 0;
        self.rest.split_to(bytes).freeze()
    }

    fn look(&self, ready: &Ready) -> Result<Look, Error> {
        let word = |at: usize| self.rest.get(at..at + 4).and_then(|word| <[u8; 4]>::try_from(word).ok());
        let Some(first) = word(0) else { return Ok(Look::Wants(4)) };
        if self.before == 0 && self.schema.is_none() && first == *b"ARRO" {
            return Err(
                self.invalid("an Arrow IPC file: send an Arrow IPC stream (`sluice send` takes both)")
            );
        }
        // Writers before Arrow 0.15 left it out.
        let length_at = if first == CONTINUATION { 4 } else { 0 };
        let Some(length) = word(length_at) else { return Ok(Look::Wants(length_at + 4)) };
        let header_at = length_at + 4;
        let length = usize::try_from(i32::from_le_bytes(length));
        let length = length.map_err(|_| self.invalid("a header of negative length"))?;
        if length == 0 {
            return Ok(Look::End { bytes: header_at });
        }
        self.check_message(length, ready)?;
        let body_at = header_at + length;
        let Some(header) = self.rest.get(header_at..body_at) else { return Ok(Look::Wants(body_at)) };
        let message =
            root_as_message(header).map_err(|error| self.invalid(&format!("a garbled header: {error}")))?;
        let body_bytes = usize::try_from(message.bodyLength());
        let body_bytes = body_bytes.map_err(|_| self.invalid("a body of negative length"))?;
        self.check_message(body_bytes, ready)?;
        let bytes = body_at + body_bytes;
        if self.rest.len() < bytes {
            return Ok(Look::Wants(bytes));
        }
        let kind = match message.header_type() {
            MessageHeader::Schema => Some(Kind::Schema),
            MessageHeader::RecordBatch => {
                message.header_as_record_batch().map(|batch| Kind::Batch { rows: batch.length() })
            }
            MessageHeader::DictionaryBatch => message
                .header_as_dictionary_batch()
                .map(|dictionary| Kind::Dictionary { id: dictionary.id(), is_delta: dictionary.isDelta() }),
            _ => None,
        };
        let kind = kind.ok_or_else(|| self.invalid("a message that is no schema, dictionary or batch"))?;
        Ok(Look::Message { kind, bytes })
    }

    fn take(&mut self, kind: Kind, message: Bytes, ready: &mut Ready) -> Result<(), Error> {
        match (kind, &self.schema) {
            (Kind::Schema, None) => self.schema = Some(message),
            (Kind::Schema, Some(_)) => return Err(self.invalid("a second schema")),
            (_, None) => return Err(self.invalid("the first message is no schema")),
            (Kind::Dictionary { id, is_delta }, Some(_)) => {
                self.flush(ready);
                let dictionary = self.dictionaries.entry(id).or_default();
                if !is_delta {
                    dictionary.clear();
                }
                dictionary.push(message);
            }
            (Kind::Batch { rows }, Some(_)) => {
                let rows = u32::try_from(rows).map_err(|_| self.invalid("an impossible number of rows"))?;
                return self.take_batch(rows, message, ready);
            }
        }
        self.check_message(self.head_bytes(), ready)
    }

    fn take_batch(&mut self, rows: u32, message: Bytes, ready: &mut Ready) -> Result<(), Error> {
        if rows == 0 {
            return Ok(());
        }
        let frame_bytes = FRAME_BYTES.min(ready.record_bytes_max);
        let is_full = self.head_bytes() + self.batch_bytes + message.len() + END.len() > frame_bytes;
        if is_full || self.rows.checked_add(rows).is_none() {
            self.flush(ready);
        }
        self.check_message(self.head_bytes() + message.len() + END.len(), ready)?;
        self.rows += rows;
        self.batch_bytes += message.len();
        self.batches.push(message);
        Ok(())
    }

    /// Of what each frame begins with.
    fn head_bytes(&self) -> usize {
        let dictionaries: usize = self.dictionaries.values().flatten().map(Bytes::len).sum();
        self.schema.as_ref().map_or(0, Bytes::len) + dictionaries
    }

    fn flush(&mut self, ready: &mut Ready) {
        let batches = std::mem::take(&mut self.batches);
        let rows = std::mem::take(&mut self.rows);
        let bytes = self.head_bytes() + std::mem::take(&mut self.batch_bytes) + END.len();
        if batches.is_empty() {
            return;
        }
        let mut frame = BytesMut::with_capacity(bytes);
        for message in self.schema.iter().chain(self.dictionaries.values().flatten()).chain(&batches) {
            frame.extend_from_slice(message);
        }
        frame.extend_from_slice(&END);
        ready.push(rows, frame.freeze());
    }

    pub(super) fn finish(&mut self) -> Result<(), Error> {
        if !self.rest.is_empty() {
            return Err(self.invalid("the end of the last message is missing"));
        }
        Ok(())
    }

    fn invalid(&self, what: &str) -> Error {
        Error::invalid("invalid_arrow", format!("Arrow IPC stream, at byte {}: {what}", self.before))
    }

    /// # Errors
    /// `Invalid`: a frame with so many bytes could not be sent.
    fn check_message(&self, bytes: usize, ready: &Ready) -> Result<(), Error> {
        let max = ready.record_bytes_max;
        if bytes <= max {
            return Ok(());
        }
        let message = format!(
            "Arrow IPC stream, at byte {}: a message that needs {bytes} bytes with the schema and dictionaries before \
             it, of {max} (gateway.frame_bytes_max): write smaller batches",
            self.before
        );
        Err(Error::invalid("frame_too_large", message))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::sync::Arc;

    use arrow::array::{ArrayRef, DictionaryArray, Int64Array, RecordBatch};
    use arrow::compute::concat_batches;
    use arrow::datatypes::Int32Type;
    use arrow::ipc::reader::StreamReader;
    use arrow::ipc::writer::StreamWriter;
    use proptest::prelude::*;

    use super::super::Splitter;
    use super::super::tests::{cut, frames};

    fn batch(ids: std::ops::Range<i64>) -> RecordBatch {
        let words: DictionaryArray<Int32Type> =
            ids.clone().map(|id| Some(if id % 2 > 0 { "odd" } else { "even" })).collect();
        let columns: [(&str, ArrayRef); 2] =
            [("id", Arc::new(Int64Array::from_iter_values(ids))), ("w", Arc::new(words))];
        RecordBatch::try_from_iter(columns).expect("fits")
    }

    fn stream(batches: &[RecordBatch]) -> Vec<u8> {
        let mut writer = StreamWriter::try_new(Vec::new(), &batches[0].schema()).expect("a schema");
        batches.iter().for_each(|batch| writer.write(batch).expect("fits"));
        writer.into_inner().expect("written")
    }

    /// All rows of the frames, each of which can be read alone.
    fn read(frames: &[crate::session::Records]) -> Vec<RecordBatch> {
        let mut all = Vec::new();
        for frame in frames {
            let reader = StreamReader::try_new(Cursor::new(frame.payload.clone()), None).expect("a stream");
            let batches: Vec<RecordBatch> = reader.map(|batch| batch.expect("a batch")).collect();
            let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
            assert_eq!(rows, frame.count as usize);
            all.extend(batches);
        }
        all
    }

    #[test]
    fn each_frame_is_a_stream_of_its_own() {
        let batches = [batch(0..1000), batch(1000..1000), batch(1000..3000), batch(3000..3001)];
        let body = stream(&batches);
        for frame_bytes in [1 << 20, 50_000] {
            let (got, ended) = frames(Splitter::arrow(), &[&body], frame_bytes);
            ended.expect("sound");
            assert!(got.iter().all(|frame| frame.payload.len() <= frame_bytes));
            let whole = concat_batches(&batches[0].schema(), &batches).expect("one schema");
            assert_eq!(concat_batches(&whole.schema(), &read(&got)).expect("one schema"), whole);
        }
        let (got, ended) = frames(Splitter::arrow(), &[&body], 20_000);
        assert_eq!(got.iter().map(|frame| frame.count).sum::<u32>(), 1000);
        assert_eq!(ended.expect_err("too large").code, "frame_too_large");
    }

    #[test]
    fn what_is_cut_off_or_none_is_refused() {
        let body = stream(&[batch(0..10), batch(10..20)]);
        // Without its end a stream is whole: writers may leave it out.
        let (got, ended) = frames(Splitter::arrow(), &[&body[..body.len() - 8]], 1 << 20);
        ended.expect("whole");
        assert_eq!(got.iter().map(|frame| frame.count).sum::<u32>(), 20);
        for (body, rows) in [
            (&body[..body.len() - 9], 10),
            (b"hello, this is text".as_slice(), 0),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff", 0),
        ] {
            let (got, ended) = frames(Splitter::arrow(), &[body], 1 << 20);
            assert!(["invalid_arrow", "frame_too_large"].contains(&ended.expect_err("none").code.as_str()));
            assert_eq!(got.iter().map(|frame| frame.count).sum::<u32>(), rows);
        }
        let (_, ended) = frames(Splitter::arrow(), &[&[&body[..], b"more"].concat()], 1 << 20);
        assert_eq!(ended.expect_err("more").code, "invalid_arrow");
        frames(Splitter::arrow(), &[], 1 << 20).1.expect("an empty body");
    }

    proptest! {
        #[test]
        fn pieces_do_not_show(
            sizes in prop::collection::vec(0_i64..50, 1..5),
            places in prop::collection::vec(any::<usize>(), 0..20),
        ) {
            let batches: Vec<RecordBatch> = sizes.iter().map(|size| batch(0..*size)).collect();
            let body = stream(&batches);
            let (got, ended) = frames(Splitter::arrow(), &cut(&body, &places), 1 << 20);
            ended.expect("sound");
            let schema = batches[0].schema();
            let whole = concat_batches(&schema, &batches).expect("one schema");
            prop_assert_eq!(concat_batches(&schema, &read(&got)).expect("one schema"), whole);
        }

        #[test]
        fn garbage_is_refused_or_waited_for(body in prop::collection::vec(any::<u8>(), 0..300)) {
            let (got, _) = frames(Splitter::arrow(), &[&body], 1 << 20);
            prop_assert_eq!(got.len(), 0);
        }
    }
}
