//! Pods as the replicas of a StatefulSet, which always takes away the one with the highest ordinal, untold whether for good.
//!
//! So the highest one is drained first, through the admin API, and only when it holds nothing is the number of replicas
//! lowered. A pod that drains unasked is being restarted, by a new version or a node's end, and comes back; one that stays
//! drained was asked by an operator, or by this autoscaler before it restarted, and is taken away too.
//!
//! *Owns*: the scale subresource. *Does not own*: leases: one replica of the autoscaler runs (`strategy: Recreate`); two
//! would not lose records, since only what has drained is taken away, but could pull in two directions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use http::Method;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use tokio::time::Instant;

use super::{Action, Driver, DriverError};
use crate::admin::{Admin, Pool};
use crate::http::{Answer, Ask, Server};
use crate::policy::PodPhase;

/// A merge patch names what changes and nothing else.
const MERGE_PATCH: &str = "application/merge-patch+json";

/// Which StatefulSet, and how its API is reached.
#[derive(Debug, Clone)]
pub struct Target {
    /// `https://HOST[:PORT]`.
    pub api: String,
    /// Where the token, the authority's certificate and the namespace are.
    pub account_dir: PathBuf,
    /// Namespace; none is the service account's own.
    pub namespace: Option<String>,
    /// Name of the StatefulSet; its pods are `NAME-0`, `NAME-1`, …, which are the pods' ids too.
    pub stateful_set: String,
    /// How long a pod has for a drain.
    pub drain_deadline: Duration,
    /// A pod that is being restarted is seen drained for less.
    pub drained_for_good: Duration,
}

/// The StatefulSet.
pub struct StatefulSet {
    target: Target,
    server: Server,
    path: String,
    scale: Option<Scale>,
    /// Ordinals that were asked to drain.
    asked: BTreeSet<u32>,
    /// Since when ordinals are seen drained.
    drained_since: BTreeMap<u32, Instant>,
}

#[derive(Debug, Clone, Deserialize)]
struct Scale {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Clone, Deserialize)]
struct Metadata {
    #[serde(rename = "resourceVersion")]
    resource_version: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Spec {
    // Left out where it is 0.
    #[serde(default)]
    replicas: u32,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    message: String,
}

impl StatefulSet {
    /// Reads the authority's certificate and the namespace; asks nobody yet.
    ///
    /// # Errors
    /// The service account's files are not there, or the API's address is none.
    pub fn new(target: Target) -> Result<Self, DriverError> {
        let authority = target.account_dir.join("ca.crt");
        let unread = |why: String| {
            DriverError::Setup(format!(
                "cannot read the API's authority {}: {why}; does the pod have a service account (automountServiceAccountToken)?",
                authority.display()
            ))
        };
        let mut roots = RootCertStore::empty();
        let certificates =
            CertificateDer::pem_file_iter(&authority).map_err(|error| unread(error.to_string()))?;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| unread(error.to_string()))?;
            roots.add(certificate).map_err(|error| unread(error.to_string()))?;
        }
        let namespace = match &target.namespace {
            Some(namespace) => namespace.clone(),
            None => read(&target.account_dir.join("namespace"))?,
        };
        let server = Server::new(&target.api, roots)?;
        let path = format!("/apis/apps/v1/namespaces/{namespace}/statefulsets/{}/scale", target.stateful_set);
        Ok(Self { target, server, path, scale: None, asked: BTreeSet::new(), drained_since: BTreeMap::new() })
    }

    fn id(&self, ordinal: u32) -> String {
        format!("{}-{ordinal}", self.target.stateful_set)
    }

    async fn ask(&self, verb: &'static str, body: String) -> Result<Scale, DriverError> {
        let method = if verb == "PATCH" { Method::PATCH } else { Method::GET };
        // Read each time: the kubelet replaces it before it ends.
        let token = read(&self.target.account_dir.join("token"))?;
        let ask =
            Ask { content_type: MERGE_PATCH, body, bearer: Some(token), ..Ask::new(method, &self.path) };
        let answer = self.server.ask(ask).await?;
        if !answer.is_good() {
            return Err(self.refused(verb, &answer));
        }
        serde_json::from_slice(&answer.body).map_err(|source| DriverError::Unread {
            verb,
            path: self.path.clone(),
            source,
        })
    }

    fn refused(&self, verb: &'static str, answer: &Answer) -> DriverError {
        let said: Status = serde_json::from_slice(&answer.body).unwrap_or_default();
        let advice = match answer.status {
            401 => "the service account's token is not taken: was the account deleted?",
            403 => {
                "the service account may not: grant it get and patch on statefulsets/scale of apps in this namespace"
            }
            404 => "there is no such StatefulSet: see autoscaler.stateful_set and autoscaler.namespace",
            409 => "somebody else changed it at the same time: read again and tried again at the next look",
            422 => "it takes no such number",
            429 => "the API is overloaded: tried again at the next look",
            _ => "tried again at the next look",
        };
        DriverError::Refused {
            verb,
            path: self.path.clone(),
            status: answer.status,
            message: said.message,
            advice,
        }
    }

    async fn read_scale(&mut self) -> Result<u32, DriverError> {
        let scale = self.ask("GET", String::new()).await?;
        let replicas = scale.spec.replicas;
        self.scale = Some(scale);
        Ok(replicas)
    }

    async fn set(&mut self, replicas: u32) -> Result<Action, DriverError> {
        let Some(before) = self.scale.take() else {
            return Err(DriverError::Setup("the number of replicas is not known yet".to_owned()));
        };
        // With the version that was read, so that a change that somebody makes meanwhile is not undone.
        let version = &before.metadata.resource_version;
        let body = serde_json::json!({ "metadata": { "resourceVersion": version }, "spec": { "replicas": replicas } });
        self.scale = Some(self.ask("PATCH", body.to_string()).await?);
        Ok(Action::Scaled { from: before.spec.replicas, to: replicas })
    }

    /// Notes who is drained, and since when.
    fn look(&mut self, replicas: u32, pool: &Pool) {
        for ordinal in 0..replicas {
            if pool.phase(&self.id(ordinal)) == Some(PodPhase::Drained) {
                self.drained_since.entry(ordinal).or_insert_with(Instant::now);
            } else {
                self.drained_since.remove(&ordinal);
            }
        }
    }

    fn has_drained(&self, ordinal: u32) -> bool {
        let since = self.drained_since.get(&ordinal);
        since.is_some_and(|since| {
            self.asked.contains(&ordinal) || since.elapsed() >= self.target.drained_for_good
        })
    }

    /// How many stay: the highest ordinals that were asked to go are on their way out.
    fn staying(&self, replicas: u32) -> u32 {
        let is_leaving = |ordinal: &u32| self.asked.contains(ordinal) || self.has_drained(*ordinal);
        let leaving = (0..replicas).rev().take_while(is_leaving).count();
        replicas - u32::try_from(leaving).unwrap_or(replicas)
    }

    /// How many are left once the highest ordinals that hold nothing any more are taken away.
    fn without_drained(&self, replicas: u32) -> u32 {
        let drained = (0..replicas).rev().take_while(|ordinal| self.has_drained(*ordinal)).count();
        replicas - u32::try_from(drained).unwrap_or(replicas)
    }

    /// Asked again while it is seen active: the wish may be lost with the process that had it.
    async fn drain(&mut self, ordinal: u32, admin: &mut Admin) -> Result<Action, DriverError> {
        let id = self.id(ordinal);
        admin.drain(&id, self.target.drain_deadline).await?;
        self.asked.insert(ordinal);
        Ok(Action::Draining(id))
    }
}

impl Driver for StatefulSet {
    async fn replicas(&mut self, pool: &Pool) -> Result<u32, DriverError> {
        let replicas = self.read_scale().await?;
        self.look(replicas, pool);
        // Somebody else may have taken them away.
        self.asked.retain(|ordinal| *ordinal < replicas);
        Ok(self.staying(replicas))
    }

    async fn step(&mut self, pods: u32, pool: &Pool, admin: &mut Admin) -> Result<Vec<Action>, DriverError> {
        let replicas = match &self.scale {
            Some(scale) => scale.spec.replicas,
            None => self.read_scale().await?,
        };
        // First of all: what has drained takes nothing any more, and comes back only as a new process.
        let left = self.without_drained(replicas);
        if left < replicas {
            let scaled = self.set(left).await?;
            self.asked.retain(|ordinal| *ordinal < left);
            self.drained_since.clear();
            return Ok(vec![scaled]);
        }
        let staying = self.staying(replicas);
        let mut actions = Vec::new();
        for ordinal in staying..replicas.min(pods) {
            admin.join(&self.id(ordinal)).await?;
            self.asked.remove(&ordinal);
            actions.push(Action::Rejoined(self.id(ordinal)));
        }
        if pods > replicas {
            actions.push(self.set(pods).await?);
        }
        let is_active = |ordinal: &u32| pool.phase(&self.id(*ordinal)) == Some(PodPhase::Active);
        let forgotten: Vec<u32> = self.asked.iter().copied().filter(is_active).collect();
        for ordinal in forgotten {
            self.drain(ordinal, admin).await?;
        }
        // One at a time: the next one only when this one is away.
        if pods < staying && staying == replicas {
            actions.push(self.drain(replicas - 1, admin).await?);
        }
        Ok(actions)
    }

    /// The pods are Kubernetes's: they stay.
    async fn end(&mut self) {}
}

fn read(path: &std::path::Path) -> Result<String, DriverError> {
    let text = std::fs::read_to_string(path).map_err(|source| DriverError::File {
        what: "read the service account's",
        path: path.display().to_string(),
        source,
    })?;
    Ok(text.trim().to_owned())
}
