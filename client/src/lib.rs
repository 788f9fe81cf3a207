//! The Rust client of Sluice: the producer's half of the promise.
//!
//! A [`Stream`] numbers records (0, 1, 2, …), keeps them until the gateway says that they are durable, and sends
//! them again after a lost connection. A *named* stream is resumed exactly where it was, by whichever process asks
//! for it next: each record is in the table once, in order. An *ephemeral* stream (no name) ends with its
//! connection: after a lost one its unacknowledged records go out again on a new stream, so they may be there twice.
//!
//! ```no_run
//! use serde_json::json;
//! use sluice_client::Client;
//!
//! # async fn run() -> Result<(), sluice_client::Error> {
//! let client = Client::connect("ws://127.0.0.1:7070").await?;
//! let mut stream = client.stream("flights").name("loader-1").open().await?;
//! for flight in 0..1000 {
//!     stream.send_json(&json!({ "flight": flight, "origin": "JFK" })).await?;
//! }
//! stream.durable().await?; // on stable storage, within milliseconds
//! let summary = stream.finish().await?; // readable in the table, within about a second
//! println!("{} records, {} rejected, table version {:?}", summary.records, summary.rejected, summary.version);
//! # Ok(())
//! # }
//! ```
//!
//! *Owns*: the window of unacknowledged frames, resending, reconnecting, encoding of what is sent.
//! *Does not own*: the frames' bytes (`sluice_shared::frame`), anything a gateway decides.
//! Keeps P6's half of the producer and P7: what is not acknowledged is bounded in bytes, and senders wait.

mod config;
mod credential;
mod error;
mod stream;
mod outbox;
mod task;
mod window;
mod retry;
mod encode;
mod transport;

pub use config::{Client, StreamBuilder};
pub use error::Error;
pub use retry::RetryPolicy;
pub use sluice_shared::frame::{Encoding, Rejected, UnknownFields};
pub use sluice_shared::ids::{OffsetRange, TableVersion};
pub use stream::{Committed, Progress, Reconnecting, Stream, Summary};
pub use transport::trust::refusal as tls_refusal;
