//! The frames of RFC 6455 as bytes: what the library does not tell of a message that is not whole yet.
//!
//! *Owns*: where frames and messages begin and end, how many fragments one message may have.
//! *Does not own*: everything else about frames: the library reads and refuses them.
//! Keeps P7: a message that has begun ends, and comes in a bounded number of fragments.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::progress::FRAME_STEP_BYTES;
use crate::socket::Socket;

/// Fragments of one message: those of 64 bytes of the largest one pass.
pub(super) const FRAGMENTS_MAX: u32 = 1 << 18;
/// Two bytes, a length of up to 8, and a mask of 4.
const HEADER_BYTES_MAX: usize = 14;
const FIN: u8 = 0x80;
/// Opcodes from here on are of control frames, which may come between the fragments of a message.
const CONTROL: u8 = 0x08;
const OPCODE: u8 = 0x0f;
const MASKED: u8 = 0x80;

/// Follows the bytes of one connection.
#[derive(Debug, Default)]
pub(super) struct Frames {
    header: [u8; HEADER_BYTES_MAX],
    header_len: usize,
    /// Of the payload that has begun.
    left: u64,
    /// Fragments of the message that has begun.
    fragments: u32,
    /// The present frame is the last one of its message.
    is_last: bool,
    is_control: bool,
    /// Rises with every byte, and by a whole step with every message.
    pub(super) moved: u64,
}

impl Frames {
    /// Takes the next bytes; whether the message has too many fragments.
    pub(super) fn feed(&mut self, mut bytes: &[u8]) -> bool {
        self.moved += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.left > 0 {
                let skipped = self.left.min(bytes.len() as u64);
                self.left -= skipped;
                bytes = &bytes[skipped as usize..];
            } else {
                let wanted = header_bytes(&self.header[..self.header_len]);
                let taken = bytes.len().min(wanted - self.header_len);
                self.header[self.header_len..self.header_len + taken].copy_from_slice(&bytes[..taken]);
                self.header_len += taken;
                bytes = &bytes[taken..];
                if self.header_len < header_bytes(&self.header[..self.header_len]) {
                    continue;
                }
                self.begin();
            }
            if self.left == 0 && !self.end() {
                return true;
            }
        }
        false
    }

    fn begin(&mut self) {
        let [first, second, long @ ..] = self.header;
        self.is_control = first & OPCODE >= CONTROL;
        self.is_last = first & FIN != 0;
        self.left = match second & !MASKED {
            126 => u64::from(u16::from_be_bytes([long[0], long[1]])),
            127 => u64::from_be_bytes(*long.first_chunk().expect("12 bytes have 8")),
            short => u64::from(short),
        };
        self.header_len = 0;
    }

    /// A frame is whole; whether its message may go on.
    fn end(&mut self) -> bool {
        if self.is_control {
            return true;
        }
        if self.is_last {
            self.fragments = 0;
            self.moved += FRAME_STEP_BYTES;
            return true;
        }
        self.fragments += 1;
        self.fragments < FRAGMENTS_MAX
    }

    /// Whether a frame or a message has begun and not ended.
    pub(super) fn has_begun(&self) -> bool {
        self.left > 0 || self.header_len > 0 || self.fragments > 0
    }
}

/// How long the header is that begins like this, as far as it says so.
fn header_bytes(begun: &[u8]) -> usize {
    let Some(second) = begun.get(1) else { return 2 };
    let length = match second & !MASKED {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    2 + length + if second & MASKED != 0 { 4 } else { 0 }
}

/// A connection after its upgrade.
pub(super) struct Watched {
    pub(super) socket: Socket,
    pub(super) frames: Frames,
    /// Of the present message there are too many fragments. Nothing more is read.
    pub(super) is_flooded: bool,
}

impl Watched {
    /// `buffered`: what was read along with the upgrade.
    pub(super) fn new(socket: Socket, buffered: &[u8]) -> Self {
        let mut frames = Frames::default();
        let is_flooded = frames.feed(buffered);
        // The edge has a deadline of its own, and a name for it.
        Self { socket: socket.without_write_deadline(), frames, is_flooded }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        if !self.is_flooded {
            ready!(Pin::new(&mut self.socket).poll_read(cx, buffer))?;
            self.is_flooded = self.frames.feed(&buffer.filled()[before..]);
        }
        if self.is_flooded {
            buffer.set_filled(before);
            return Poll::Ready(Err(std::io::Error::other("too many fragments")));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A masked frame.
    fn frame(opcode: u8, is_last: bool, length: usize) -> Vec<u8> {
        let mut bytes = vec![opcode | if is_last { FIN } else { 0 }];
        match length {
            0..126 => bytes.push(MASKED | length as u8),
            126..=0xffff => {
                bytes.push(MASKED | 126);
                bytes.extend_from_slice(&(length as u16).to_be_bytes());
            }
            _ => {
                bytes.push(MASKED | 127);
                bytes.extend_from_slice(&(length as u64).to_be_bytes());
            }
        }
        bytes.extend_from_slice(&[7; 4]);
        bytes.resize(bytes.len() + length, 0x81);
        bytes
    }

    #[test]
    fn a_message_of_too_many_fragments_is_seen_however_small_they_are() {
        for length in [0, 1] {
            let mut frames = Frames::default();
            assert!(!frames.feed(&frame(1, false, length)));
            let next = frame(0, false, length);
            let passed = (1..2 * FRAGMENTS_MAX).take_while(|_| !frames.feed(&next)).count();
            assert_eq!(passed as u32, FRAGMENTS_MAX - 2);
        }
    }

    #[test]
    fn pings_between_fragments_are_not_counted_and_end_nothing() {
        let mut frames = Frames::default();
        frames.feed(&frame(1, false, 5));
        let moved = frames.moved;
        frames.feed(&frame(9, true, 5));
        assert!(frames.has_begun());
        assert!(frames.moved - moved < FRAME_STEP_BYTES, "a ping is no progress of the message");
        assert_eq!(frames.fragments, 1);
        frames.feed(&frame(0, true, 5));
        assert!(!frames.has_begun());
    }

    proptest! {
        #[test]
        fn frames_are_seen_however_the_bytes_are_cut(
            messages in prop::collection::vec(
                prop_oneof![Just(0), 0..126_usize, 126..300_usize, 65_530..65_540_usize], 1..6),
            cut in prop_oneof![1..20_usize, 1000..70_000_usize],
        ) {
            let bytes: Vec<u8> = messages.iter().flat_map(|length| frame(2, true, *length)).collect();
            let mut frames = Frames::default();
            for piece in bytes.chunks(cut) {
                prop_assert!(!frames.feed(piece));
            }
            prop_assert!(!frames.has_begun());
            prop_assert_eq!(frames.moved, bytes.len() as u64 + messages.len() as u64 * FRAME_STEP_BYTES);
            prop_assert!(!frames.feed(&bytes[..1]));
            prop_assert!(frames.has_begun());
        }
    }
}
