//! Frames in a row of bytes: each behind its length, a big-endian `u32`. For transports that keep no boundaries.
//!
//! *Owns*: the prefix, cutting bytes into frames, the limit of a frame.
//! *Does not own*: what is in a frame (`frame`).
//! Keeps P7: a frame over the limit is refused by its prefix, and memory grows only with what has come.

use bytes::{Buf, Bytes, BytesMut};

use crate::error::Error;

/// Bytes of the length before each frame.
pub const PREFIX_BYTES: usize = 4;

/// The prefix of a frame.
///
/// # Panics
/// Where the frame has 4 GiB or more: no limit allows that.
pub fn prefix(frame: &[u8]) -> [u8; PREFIX_BYTES] {
    u32::try_from(frame.len()).expect("frames are far below 4 GiB").to_be_bytes()
}

/// Cuts bytes into frames.
#[derive(Debug)]
pub struct FrameReader {
    frame_bytes_max: usize,
    buffer: BytesMut,
}

impl FrameReader {
    /// Takes frames of up to so many bytes, prefix not counted.
    pub fn new(frame_bytes_max: usize) -> Self {
        Self { frame_bytes_max, buffer: BytesMut::new() }
    }

    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame; None until more bytes have come.
    ///
    /// # Errors
    /// `Invalid` for a frame over the limit. What follows it cannot be read: so it is for every later call.
    pub fn next_frame(&mut self) -> Result<Option<Bytes>, Error> {
        let Some(prefix) = self.buffer.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let length = u32::from_be_bytes(*prefix) as usize;
        if length > self.frame_bytes_max {
            let limit = self.frame_bytes_max;
            let message = format!("frame of {length} bytes: the limit is {limit}; send smaller frames");
            return Err(Error::invalid("record_too_large", message));
        }
        if self.buffer.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_BYTES);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    /// Whether all that has come was whole frames, and they were taken.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_frame_over_the_limit_is_refused_by_its_prefix() {
        let mut reader = FrameReader::new(16);
        reader.push(&[0, 0, 0, 16]);
        assert_eq!(reader.next_frame().expect("within the limit"), None);
        for length in [17_u32, u32::MAX] {
            let mut reader = FrameReader::new(16);
            reader.push(&length.to_be_bytes());
            for _ in 0..2 {
                let error = reader.next_frame().expect_err("over the limit");
                assert_eq!(error.code, "record_too_large");
                assert!(error.message.contains(&length.to_string()), "{error}");
            }
        }
    }

    proptest! {
        #[test]
        fn frames_come_out_however_the_bytes_are_cut(
            frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..20),
            cut in 1..30_usize,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|frame| [&prefix(frame)[..], frame].concat()).collect();
            let mut reader = FrameReader::new(40);
            let mut read = Vec::new();
            for piece in bytes.chunks(cut) {
                reader.push(piece);
                while let Some(frame) = reader.next_frame().expect("within the limit") {
                    read.push(frame.to_vec());
                }
            }
            prop_assert_eq!(read, frames);
            prop_assert!(reader.is_empty());
        }
    }
}
