//! `Content-Encoding`: bytes as they came to bytes as they were meant, a bounded piece at a time.
//!
//! *Owns*: the codings, the bounds of what one step makes, the end of a compressed body. A core.
//! *Does not own*: when more is wanted (`body`).
//! Keeps P7: however much a body says in few bytes, a step makes one piece of it.

use bytes::{Buf, Bytes};
use flate2::{Decompress, FlushDecompress, Status};
use sluice_shared::error::Error;
use zstd::stream::raw::{DParameter, Decoder, Operation};

/// Bytes that one step makes at most.
const PIECE_BYTES: usize = 64 << 10;
/// 8 MiB: what RFC 9659 lets a sender of `Content-Encoding: zstd` ask of a receiver.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;
/// 32 KiB, the largest window that gzip has.
const GZIP_WINDOW_BITS: u8 = 15;
/// The names, for advice and for `Accept-Encoding`.
pub(in crate::edge) const KNOWN: &str = "gzip, zstd";

/// How a body is compressed, and how far it is read.
pub(in crate::edge) enum Coding {
    /// Not at all.
    Identity,
    /// Gzip, of one member or more.
    Gzip {
        member: Box<Decompress>,
        /// Nothing of a member has come that has not ended.
        whole: bool,
    },
    /// Zstandard, of one frame or more.
    Zstd {
        frames: Decoder<'static>,
        /// Nothing of a frame has come that has not ended.
        whole: bool,
        /// The last step filled its piece: the decoder may hold more, although it needs no input.
        more: bool,
    },
}

impl Coding {
    /// The coding that a header names; None where it is not known.
    pub(in crate::edge) fn named(name: &str) -> Option<Result<Self, Error>> {
        match name.trim().to_ascii_lowercase().as_str() {
            "" | "identity" => Some(Ok(Self::Identity)),
            "gzip" | "x-gzip" => Some(Ok(Self::Gzip { member: Box::new(new_member()), whole: true })),
            "zstd" => Some(new_frames().map(|frames| Self::Zstd { frames, whole: true, more: false })),
            _ => None,
        }
    }

    /// Takes from `input` what makes one piece. An empty piece: more input is needed.
    ///
    /// # Errors
    /// `Invalid`: the body is not so compressed.
    pub(in crate::edge) fn step(&mut self, input: &mut Bytes) -> Result<Bytes, Error> {
        match self {
            Self::Identity => Ok(std::mem::take(input)),
            Self::Gzip { member, whole } => gzip_step(member, whole, input),
            Self::Zstd { frames, whole, more } => zstd_step(frames, whole, more, input),
        }
    }

    /// Whether the body may end here.
    pub(in crate::edge) fn is_whole(&self) -> bool {
        match self {
            Self::Identity => true,
            Self::Gzip { whole, .. } | Self::Zstd { whole, .. } => *whole,
        }
    }
}

fn new_member() -> Decompress {
    Decompress::new_gzip(GZIP_WINDOW_BITS)
}

fn new_frames() -> Result<Decoder<'static>, Error> {
    let made = Decoder::new().and_then(|mut decoder| {
        decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX))?;
        Ok(decoder)
    });
    made.map_err(|error| Error::internal(format!("cannot set up a zstd decoder: {error}")))
}

fn gzip_step(member: &mut Decompress, whole: &mut bool, input: &mut Bytes) -> Result<Bytes, Error> {
    let mut piece = Vec::with_capacity(PIECE_BYTES);
    loop {
        let before = (member.total_in(), piece.len());
        let status = member.decompress_vec(input, &mut piece, FlushDecompress::None);
        let status = status.map_err(|error| garbled("gzip", &error))?;
        let taken = usize::try_from(member.total_in() - before.0).unwrap_or(usize::MAX);
        *whole &= taken == 0;
        input.advance(taken.min(input.len()));
        if status == Status::StreamEnd {
            (*member, *whole) = (new_member(), true);
            if input.is_empty() {
                return Ok(piece.into());
            }
        } else if piece.len() == piece.capacity() || (taken == 0 && piece.len() == before.1) {
            return Ok(piece.into());
        }
    }
}

fn zstd_step(
    frames: &mut Decoder<'static>,
    whole: &mut bool,
    more: &mut bool,
    input: &mut Bytes,
) -> Result<Bytes, Error> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut made = 0;
    while (!input.is_empty() || *more) && made < piece.len() {
        let status = frames.run_on_buffers(input, &mut piece[made..]);
        let status = status.map_err(|error| garbled("zstd", &error))?;
        input.advance(status.bytes_read);
        made += status.bytes_written;
        // Nothing of the next frame has been looked at where a frame has ended.
        if status.bytes_read > 0 || status.bytes_written > 0 || *more {
            *whole = status.remaining == 0;
        }
        *more = made == piece.len() && !*whole;
    }
    piece.truncate(made);
    Ok(piece.into())
}

fn garbled(coding: &str, error: &dyn std::fmt::Display) -> Error {
    Error::invalid("invalid_encoding", format!("the body is not the {coding} that its header says: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).expect("written");
        encoder.finish().expect("written")
    }

    fn zstd(text: &[u8]) -> Vec<u8> {
        zstd::encode_all(text, 1).expect("encoded")
    }

    fn coding(name: &str) -> Coding {
        Coding::named(name).expect("known").expect("set up")
    }

    /// The text, and whether the body may end there.
    fn decode(name: &str, body: &[u8], chunk: usize) -> Result<(Vec<u8>, bool), Error> {
        let (mut coding, mut text) = (coding(name), Vec::new());
        for chunk in body.chunks(chunk) {
            let mut input = Bytes::copy_from_slice(chunk);
            loop {
                let piece = coding.step(&mut input)?;
                if piece.is_empty() {
                    break;
                }
                assert!(piece.len() <= PIECE_BYTES.max(chunk.len()));
                text.extend_from_slice(&piece);
            }
            assert!(input.is_empty());
        }
        Ok((text, coding.is_whole()))
    }

    #[test]
    fn a_little_that_says_much_is_told_piece_by_piece() {
        let much = vec![b'x'; 20 << 20];
        for (name, body) in [("gzip", gzip(&much)), ("zstd", zstd(&much))] {
            assert!(body.len() < 200 << 10, "{name}: {}", body.len());
            let (mut coding, mut input) = (coding(name), Bytes::from(body.clone()));
            let first = coding.step(&mut input).expect("sound");
            assert!(!first.is_empty() && first.len() <= PIECE_BYTES, "{name}: {}", first.len());
            assert_eq!(decode(name, &body, usize::MAX).expect("sound"), (much.clone(), true), "{name}");
        }
    }

    #[test]
    fn what_is_cut_off_is_not_whole_and_what_is_none_is_refused() {
        let text = b"some text, and more of it".repeat(100);
        for (name, body) in [("gzip", gzip(&text)), ("zstd", zstd(&text))] {
            for end in 1..body.len() {
                let cut = decode(name, &body[..end], 7).expect("sound so far");
                assert!(!cut.1, "{name} cut after {end} bytes of {}", body.len());
            }
            assert_eq!(
                decode(name, b"plain text, and no header", 5).expect_err(name).code,
                "invalid_encoding"
            );
            assert!(coding(name).is_whole(), "an empty body");
        }
        assert!(Coding::named("br").is_none());
        assert!(matches!(coding("Identity"), Coding::Identity));
    }

    #[test]
    fn a_zstd_window_is_bounded() {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("an encoder");
        encoder.window_log(27).expect("a parameter");
        encoder.write_all(&vec![b'x'; 1 << 20]).expect("written");
        let body = encoder.finish().expect("written");
        assert_eq!(decode("zstd", &body, 1000).expect_err("too large").code, "invalid_encoding");
    }

    proptest! {
        #[test]
        fn chunks_and_members_do_not_show(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5000), 1..4),
            repeat in 1_usize..60,
            chunk in 1_usize..3000,
        ) {
            let parts: Vec<Vec<u8>> = parts.into_iter().map(|part| part.repeat(repeat)).collect();
            let gzipped = parts.iter().flat_map(|part| gzip(part)).collect::<Vec<_>>();
            let zstded = parts.iter().flat_map(|part| zstd(part)).collect::<Vec<_>>();
            let expected = (parts.concat(), true);
            prop_assert_eq!(&decode("gzip", &gzipped, chunk).expect("sound"), &expected);
            prop_assert_eq!(&decode("zstd", &zstded, chunk).expect("sound"), &expected);
        }
    }
}
