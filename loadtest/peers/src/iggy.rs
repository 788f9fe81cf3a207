//! Apache Iggy among the contenders, on a server that somebody else has started: a connection, a stream and a partition for
//! each producer.
//!
//! When a topic's messages are flushed is told when it is made; `enforce_fsync` alone is not enough, for a partition writes,
//! and flushes, only when it has so many messages or bytes that are not saved: by default an ack comes before that.
//!
//! *Owns*: those settings, and what is sent.
//! *Does not own*: the server; windows and clocks (`sluice_loadtest::peers`).

use std::fmt;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use iggy::prelude::{
    Client, ClientWrapper, Identifier, IggyClient, IggyMessage, MessageClient, Partitioning,
    QuicClientConfig, QuicClientReconnectionConfig, StreamClient, TcpClient, TcpClientConfig,
    TcpClientReconnectionConfig, TopicClient, TopicCreateOptions, UserClient,
};
use iggy::quic::quic_client::QuicClient;
use sluice_loadtest::peers::calls::{Acked, Peer, PeerStream};
use sluice_loadtest::peers::measure::measure_peer;
use sluice_loadtest::peers::{Contender, Durability, Ground, Run, Running};

const TOPIC: &str = "records";
/// A server that does not answer is one that is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// By which protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    Tcp,
    Quic,
}

impl Over {
    /// Which flag names a server.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Self::Tcp => "--iggy HOST:PORT",
            Self::Quic => "--iggy-quic HOST:PORT",
        }
    }
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Quic => "QUIC",
        })
    }
}

/// A server and who may use it.
#[derive(Debug, Clone)]
pub(crate) struct Login {
    pub(crate) address: String,
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) pid: Option<u32>,
}

impl Login {
    /// Connects and logs in. A connection that is lost stays lost: a run with a gap has no figure.
    pub(crate) async fn connect(&self, over: Over) -> anyhow::Result<IggyClient> {
        let connecting = async {
            let client = IggyClient::new(self.wrapper(over)?);
            client.connect().await?;
            client.login_user(&self.user, &self.password).await?;
            anyhow::Ok(client)
        };
        tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.context("no answer")?
    }

    fn wrapper(&self, over: Over) -> anyhow::Result<ClientWrapper> {
        Ok(match over {
            Over::Tcp => {
                let reconnection = TcpClientReconnectionConfig { enabled: false, ..Default::default() };
                let config = TcpClientConfig {
                    server_address: self.address.clone(),
                    nodelay: true,
                    reconnection,
                    ..TcpClientConfig::default()
                };
                ClientWrapper::Tcp(TcpClient::create(Arc::new(config))?)
            }
            Over::Quic => {
                let reconnection = QuicClientReconnectionConfig { enabled: false, ..Default::default() };
                let config = QuicClientConfig {
                    server_address: self.address.clone(),
                    reconnection,
                    ..QuicClientConfig::default()
                };
                ClientWrapper::Quic(QuicClient::create(Arc::new(config))?)
            }
        })
    }
}

/// Iggy by one protocol, with one setting.
pub(crate) struct Iggy {
    login: Login,
    over: Over,
    name: &'static str,
    flushed: bool,
    /// Runs so far: the server keeps what was there, and nothing may be called as before.
    runs: AtomicUsize,
}

impl Iggy {
    /// Each setting that is compared.
    pub(crate) fn all(login: &Login, over: Over) -> Vec<Self> {
        let settings: &[(&'static str, bool)] = match over {
            Over::Tcp => &[("iggy-tcp-flushed", true), ("iggy-tcp-default", false)],
            Over::Quic => &[("iggy-quic-flushed", true)],
        };
        let of = |(name, flushed): &(&'static str, bool)| Self {
            login: login.clone(),
            over,
            name,
            flushed: *flushed,
            runs: AtomicUsize::new(0),
        };
        settings.iter().map(of).collect()
    }

    async fn run_once(&self, Ground { work, run, .. }: Ground<'_>) -> anyhow::Result<Run> {
        let number = self.runs.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("sluice-{}-{}-{number}", process::id(), self.name);
        let opener = Opener {
            login: self.login.clone(),
            over: self.over,
            flushed: self.flushed,
            prefix: prefix.clone(),
        };
        let pids: Vec<u32> = self.login.pid.into_iter().collect();
        let measured = measure_peer(opener, (&self.login.address, &pids), work, run).await;
        // Whatever became of the run: the server is not ours to fill.
        let control = self.login.connect(self.over).await?;
        let mut kept = 0;
        for producer in 0..work.producers {
            let stream = Identifier::named(&stream_name(&prefix, producer))?;
            if let Ok(Some(topic)) = control.get_topic(&stream, &Identifier::named(TOPIC)?).await {
                kept += topic.messages_count;
                control.delete_stream(&stream).await?;
            }
        }
        let measured = measured?;
        ensure!(kept == measured.records, "{} records were acked, the topics have {kept}", measured.records);
        Ok(measured)
    }
}

impl Contender for Iggy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn durability(&self) -> Durability {
        let how = match self.flushed {
            true => "topics with enforce_fsync and messages_required_to_save 1; a request under way each",
            false => "default: topics without enforce_fsync, acks from memory; a request under way each",
        };
        Durability { flushed: self.flushed, how: how.to_owned() }
    }

    fn run<'a>(&'a self, ground: Ground<'a>) -> Running<'a> {
        Box::pin(self.run_once(ground))
    }
}

fn stream_name(prefix: &str, producer: usize) -> String {
    format!("{prefix}-{producer}")
}

fn options(flushed: bool) -> TopicCreateOptions {
    TopicCreateOptions {
        partitions_count: Some(1),
        enforce_fsync: Some(flushed),
        messages_required_to_save: flushed.then_some(1),
        ..TopicCreateOptions::default()
    }
}

struct Opener {
    login: Login,
    over: Over,
    flushed: bool,
    prefix: String,
}

struct Sender {
    client: Arc<IggyClient>,
    to: Arc<To>,
}

struct To {
    stream: Identifier,
    topic: Identifier,
    partition: Partitioning,
}

impl Peer for Opener {
    type Stream = Sender;

    async fn open(&self, _address: &str, number: usize) -> anyhow::Result<Sender> {
        let client = self.login.connect(self.over).await?;
        let name = stream_name(&self.prefix, number);
        client.create_stream(&name).await?;
        let (stream, topic) = (Identifier::named(&name)?, Identifier::named(TOPIC)?);
        client.create_topic(&stream, TOPIC, &options(self.flushed)).await?;
        let to = To { stream, topic, partition: Partitioning::partition_id(0) };
        Ok(Sender { client: Arc::new(client), to: Arc::new(to) })
    }
}

impl PeerStream for Sender {
    /// The client has one request of a connection under way: others wait for it.
    async fn send(&mut self, records: &[Bytes]) -> anyhow::Result<Acked> {
        let messages = records.iter().map(|record| IggyMessage::builder().payload(record.clone()).build());
        let mut messages = messages.collect::<Result<Vec<_>, _>>()?;
        let (client, to) = (Arc::clone(&self.client), Arc::clone(&self.to));
        Ok(Box::pin(async move {
            client.send_messages(&to.stream, &to.topic, &to.partition, &mut messages).await?;
            Ok(())
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_before_each_ack_takes_two_settings() {
        let flushed = options(true);
        assert_eq!((flushed.enforce_fsync, flushed.messages_required_to_save), (Some(true), Some(1)));
        let not = options(false);
        assert_eq!((not.enforce_fsync, not.messages_required_to_save), (Some(false), None));
    }
}
