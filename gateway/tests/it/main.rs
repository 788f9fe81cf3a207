//! The gateway through its public API: real sockets on one side, a scripted pod on the other.
//!
//! *Owns*: the behaviour that producers see.
//! *Does not own*: what a real pod does with records.

#![allow(clippy::panic, reason = "a helper that panics fails its test")]

mod harness;
mod admin;
mod auth;
mod http;
mod plain;
mod framed;
mod pods;
mod post;
mod slow;
mod parquet;
mod persistent;
mod zerobus;
mod otlp;
mod quic;
mod tls;
mod client_certs;
mod limits;
mod trickle;
mod websocket;
mod requests;
mod h2;
mod quic_abuse;
