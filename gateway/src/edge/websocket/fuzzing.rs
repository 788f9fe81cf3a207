//! For fuzzers: bytes of a WebSocket followed without a connection. In builds with assertions alone, where nothing else calls
//! it.
//!
//! *Owns*: that.
//! *Does not own*: what must hold (`loadtest`).

use super::frames::Frames;

/// Follows bytes that come in these pieces: how far it got, whether a frame or a message has begun, whether a message has
/// too many fragments.
pub fn follow_frames(pieces: &[&[u8]]) -> (u64, bool, bool) {
    let mut frames = Frames::default();
    let is_flooded = pieces.iter().any(|piece| frames.feed(piece));
    (frames.moved, frames.has_begun(), is_flooded)
}
