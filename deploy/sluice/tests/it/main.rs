//! The real program, end to end: its commands (`cli`), and bad input in raw WebSocket and HTTP.
//!
//! Each case of bad input is refused by its name, and leaves nothing behind: what was acked before it is in the table
//! exactly once, and so is what a good producer sends to the same table after it.
//!
//! *Owns*: what producers see of a whole Sluice when they, or their networks, misbehave.
//! *Does not own*: crashes of Sluice itself (`loadtest`), each part's own errors (its crate's tests).

#![allow(clippy::panic, reason = "a helper that panics fails its test")]

mod cli;
mod check;
mod server;
mod wire;
mod ledger;
mod post;
mod names;
mod specs;
mod infer;
mod records;
mod rivals;
mod bounds;
mod frames;
mod partitions;
mod arrow;
mod vanish;
mod full;
mod quic;
mod tokens;
mod tls;
mod process;
mod signals;
mod pool;
mod adopt;
mod release;
mod undrained;
