//! The pod: holds the order of streams, makes records durable, writes table files.
//!
//! *Owns*: admission, the offset gate, decoding, the write-ahead log, Parquet files, Delta commits.
//! *Does not own*: producers' protocols and placement (`gateway`), words that both sides share (`shared`).

pub mod config;
pub mod threads;
pub mod duty;
pub mod load;
pub mod pool;
mod conflict;
pub mod machine;
pub mod app;
pub mod service;
pub mod admission;
pub mod stream;
pub mod lane;
pub mod decode;
pub mod wal;
pub mod drained;
pub mod owners;
pub mod release;
pub mod adopt;
pub mod table;
pub mod shed;
