//! Decoding: what producers send becomes rows of their table, or is refused by name.
//!
//! *Owns*: how each encoding is read (`json`, `arrow`, `protobuf`, `avro`), a schema from records (`infer`), and the words
//! in which a record is refused.
//! *Does not own*: frames and offsets (`stream`), when rows are sealed (`lane`), tables' schemas.
//! Keeps P8: a record that does not fit is named by its place, its column and a reason, and leaves no trace in
//! the rows around it. All of this is pure: the same bytes and schema give the same verdict.

pub mod json;
pub mod arrow;
pub mod protobuf;
pub mod avro;
pub mod described;
pub mod infer;
pub mod rows;
mod budget;
mod column;
mod conform;
mod plain;
pub(crate) mod ipc;
mod tape;
mod text;
mod fault;

/// How many records went in, and how many were refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Decoded {
    /// Records that are rows now.
    pub accepted: usize,
    /// Records that were refused.
    pub refused: usize,
    /// Bytes of the payload up to the end of the last of them; all of it where none is left.
    pub payload_bytes: usize,
}
