//! What gateways' admin API says of the pool, and what it is asked to do to it.
//!
//! *Owns*: the shape of `/v1/pods`, going on to the next gateway when one does not answer.
//! *Does not own*: drains; the pod does them.

use std::time::Duration;

use http::Method;
use rustls::RootCertStore;
use serde::{Deserialize, Deserializer};

use crate::http::{Answer, Ask, HttpError, Server};
use crate::policy::{PodPhase, PodSample};

/// Why the pool is not known, or a pod was not asked.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// No gateway answered.
    #[error("no gateway's admin API answered; the last one: {0}")]
    Unreached(#[from] HttpError),
    /// It refused.
    #[error("{url} answered {asked} with {status} {code}: {message}")]
    Refused {
        /// Which gateway.
        url: String,
        /// What was asked: method and path.
        asked: String,
        /// The status.
        status: u16,
        /// The error's stable name; empty where there is none.
        code: String,
        /// What the gateway says.
        message: String,
    },
    /// Not the answer of an admin API.
    #[error("{url} does not answer GET /v1/pods like an admin API: {source}")]
    Unread {
        /// Which gateway.
        url: String,
        /// What is wrong.
        source: serde_json::Error,
    },
}

/// One pod, as a gateway sees it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Pod {
    /// Its name.
    pub id: String,
    /// Where it is in its life.
    pub phase: PodPhase,
    /// The largest of its budget fractions.
    #[serde(default, deserialize_with = "or_default")]
    pub load: f64,
    /// Since its last report; none where it has made none.
    #[serde(default)]
    pub report_age_ms: Option<u64>,
    /// Streams that it has.
    #[serde(default)]
    pub streams: u32,
    /// Age of its oldest record that is durable and in no table.
    #[serde(default, deserialize_with = "or_default")]
    pub lag_ms: u64,
    /// Opens that it has refused.
    #[serde(default, deserialize_with = "or_default")]
    pub refused: u64,
}

/// Pods that were named by hand report nothing: null stands where their reports would.
fn or_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(value: D) -> Result<T, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}

/// The pool, as one gateway sees it.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Pool {
    /// Its pods.
    pub pods: Vec<Pod>,
}

impl Pool {
    /// The pod of that name.
    pub fn pod(&self, id: &str) -> Option<&Pod> {
        self.pods.iter().find(|pod| pod.id == id)
    }

    /// Its phase, if it is seen.
    pub fn phase(&self, id: &str) -> Option<PodPhase> {
        self.pod(id).map(|pod| pod.phase)
    }

    /// As the policy takes it.
    pub fn samples(&self) -> Vec<PodSample> {
        let sample = |pod: &Pod| PodSample {
            id: pod.id.clone(),
            phase: pod.phase,
            load: pod.load,
            report_age: pod.report_age_ms.map(Duration::from_millis),
            streams: pod.streams,
            refused: pod.refused,
            lag: Duration::from_millis(pod.lag_ms),
        };
        self.pods.iter().map(sample).collect()
    }
}

#[derive(Deserialize)]
struct Failure {
    error: FailureBody,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FailureBody {
    code: String,
    message: String,
}

/// The admin APIs of some gateways; any of them will do.
pub struct Admin {
    servers: Vec<Server>,
    secret: Option<String>,
    /// The one that answered last is asked first: another one may see the pool a moment earlier or later.
    good: usize,
}

impl Admin {
    /// `urls` are `http://HOST:PORT`, at least one; `secret` is the admin APIs', where they have one.
    ///
    /// # Errors
    /// One is no address, or there is none.
    pub fn new(urls: &[String], secret: Option<String>) -> Result<Self, HttpError> {
        let servers: Result<Vec<Server>, HttpError> =
            urls.iter().map(|url| Server::new(url, RootCertStore::empty())).collect();
        let servers = servers?;
        if servers.is_empty() {
            Err(HttpError::Address(String::new()))
        } else {
            Ok(Self { servers, secret, good: 0 })
        }
    }

    /// The pool as the first gateway that answers sees it.
    ///
    /// # Errors
    /// None answers, or not like an admin API.
    pub async fn pool(&mut self) -> Result<Pool, AdminError> {
        let (url, answer) = self.ask(Method::GET, "/v1/pods").await?;
        serde_json::from_slice(&answer.body).map_err(|source| AdminError::Unread { url, source })
    }

    /// Asks a pod to drain. Asking again changes nothing.
    ///
    /// # Errors
    /// Nobody answers, or it is refused: the pod is not known, or it is the last one.
    pub async fn drain(&mut self, id: &str, deadline: Duration) -> Result<(), AdminError> {
        let path = format!("/v1/pods/{id}/drain?deadline={}s", deadline.as_secs());
        self.ask(Method::POST, &path).await.map(drop)
    }

    /// Asks a pod to end a drain that has not ended yet.
    ///
    /// # Errors
    /// Nobody answers, or it is refused: it has drained already.
    pub async fn join(&mut self, id: &str) -> Result<(), AdminError> {
        self.ask(Method::POST, &format!("/v1/pods/{id}/join")).await.map(drop)
    }

    async fn ask(&mut self, method: Method, path: &str) -> Result<(String, Answer), AdminError> {
        let mut failure = None;
        for n in 0..self.servers.len() {
            let index = (self.good + n) % self.servers.len();
            let server = &self.servers[index];
            let ask = Ask { bearer: self.secret.clone(), ..Ask::new(method.clone(), path) };
            match server.ask(ask).await {
                // A gateway that is ending answers so: the next one may know better.
                Ok(answer) if answer.status >= 500 => {
                    failure = Some(refused(server.url(), &method, path, &answer))
                }
                Ok(answer) => {
                    self.good = index;
                    let url = server.url().to_owned();
                    let is_good = answer.is_good();
                    return if is_good {
                        Ok((url, answer))
                    } else {
                        Err(refused(&url, &method, path, &answer))
                    };
                }
                Err(error) => failure = Some(error.into()),
            }
        }
        Err(failure.unwrap_or_else(|| HttpError::Address(String::new()).into()))
    }
}

fn refused(url: &str, method: &Method, path: &str, answer: &Answer) -> AdminError {
    let said = serde_json::from_slice(&answer.body).map(|failure: Failure| failure.error).unwrap_or_default();
    AdminError::Refused {
        url: url.to_owned(),
        asked: format!("{method} {path}"),
        status: answer.status,
        code: said.code,
        message: said.message,
    }
}
