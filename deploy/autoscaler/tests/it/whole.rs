//! The whole autoscaler: load goes up, children come; what it shows on its pages; what KEDA is told.

use std::path::Path;

use sluice_autoscaler::driver::process::ProcessPods;
use sluice_autoscaler::driver::{Advisor, Driver};
use sluice_autoscaler::keda::METRIC;
use sluice_autoscaler::keda::proto::external_scaler_client::ExternalScalerClient;
use sluice_autoscaler::keda::proto::{GetMetricsRequest, ScaledObjectRef};
use sluice_autoscaler::{Autoscaler, AutoscalerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fake::{DEADLINE, Fake, FakePod};
use crate::process::template;

fn config(fake: &Fake) -> AutoscalerConfig {
    AutoscalerConfig {
        listen: "127.0.0.1:0".to_owned(),
        keda_listen: "127.0.0.1:0".to_owned(),
        gateways: vec![fake.url()],
        interval_ms: 500,
        max: 4,
        ..AutoscalerConfig::default()
    }
}

async fn start(fake: &Fake, driver: impl Driver + 'static) -> Autoscaler {
    let config = config(fake);
    config.validate().expect("valid");
    Autoscaler::start(&config, driver).await.expect("started")
}

async fn get(autoscaler: &Autoscaler, path: &str) -> (u16, String) {
    let mut tcp = TcpStream::connect(autoscaler.address().expect("it listens")).await.expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    tcp.write_all(request.as_bytes()).await.expect("written");
    let mut text = String::new();
    tcp.read_to_string(&mut text).await.expect("read");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    (head.split(' ').nth(1).expect("a status").parse().expect("a number"), body.to_owned())
}

/// Waits for a decision that is so.
async fn until(autoscaler: &Autoscaler, is_so: impl Fn(u32, u32, bool) -> bool) {
    let mut known = autoscaler.known();
    let waited = known.wait_for(|known| {
        let of = |decision: sluice_autoscaler::policy::Decision| (decision.pods, decision.terms.active);
        known.decision.map(of).is_some_and(|(pods, active)| is_so(pods, active, known.seen.is_some()))
    });
    tokio::time::timeout(DEADLINE, waited).await.expect("in time").expect("it runs");
}

fn are_ended(dir: &Path, pods: usize) -> bool {
    (1..=pods).all(|n| dir.join(format!("pod-{n}")).join("ends").exists())
}

#[tokio::test]
async fn children_come_with_load_and_drain_when_the_autoscaler_ends() {
    let dir = tempfile::tempdir().expect("a directory");
    let fake = Fake::start().await;
    fake.pool.lock().expect("lock").children = Some((dir.path().to_owned(), 0.3));
    let autoscaler = start(&fake, ProcessPods::new(template(dir.path())).expect("a driver")).await;
    until(&autoscaler, |pods, active, _| (pods, active) == (1, 1)).await;
    fake.pool.lock().expect("lock").children = Some((dir.path().to_owned(), 1.9));
    until(&autoscaler, |pods, active, _| pods >= 2 && active >= 2).await;
    let (status, decision) = get(&autoscaler, "/v1/decision").await;
    assert_eq!(status, 200);
    assert!(decision.contains("\"terms\":\"2 of 2 active, mean"), "{decision}");
    let (_, metrics) = get(&autoscaler, "/metrics").await;
    for series in [
        "sluice_autoscaler_decisions_total{direction=\"out\",reason=\"full\"} 1",
        "sluice_autoscaler_actions_total{action=\"start\"} 2",
        "sluice_autoscaler_desired_pods 2",
        "sluice_autoscaler_pods 2",
    ] {
        assert!(metrics.contains(series), "{series} is not in\n{metrics}");
    }
    autoscaler.drain().await;
    assert!(are_ended(dir.path(), 2));
}

#[tokio::test]
async fn an_end_during_a_look_leaves_nothing_behind() {
    let dir = tempfile::tempdir().expect("a directory");
    let fake = Fake::start().await;
    let autoscaler = start(&fake, ProcessPods::new(template(dir.path())).expect("a driver")).await;
    until(&autoscaler, |_, _, _| true).await;
    autoscaler.drain().await;
    let ours = dir.path().display().to_string();
    let processes = std::fs::read_dir("/proc").expect("read").flatten();
    let commands = processes.filter_map(|entry| std::fs::read_to_string(entry.path().join("cmdline")).ok());
    assert_eq!(commands.filter(|command| command.contains(&ours)).count(), 0);
}

#[tokio::test]
async fn a_pool_that_is_not_seen_is_no_reason_to_restart() {
    let fake = Fake::start().await;
    fake.pool.lock().expect("lock").broken = Some(axum::http::StatusCode::INTERNAL_SERVER_ERROR);
    let autoscaler = start(&fake, Advisor).await;
    until(&autoscaler, |_, _, is_seen| !is_seen).await;
    assert_eq!(get(&autoscaler, "/healthz").await, (200, "ok\n".to_owned()));
    let (_, metrics) = get(&autoscaler, "/metrics").await;
    assert!(!metrics.contains("sluice_autoscaler_errors_total{of=\"gateways\"} 0"), "{metrics}");
    autoscaler.drain().await;
}

#[tokio::test]
async fn keda_is_told_the_number_of_pods() {
    let fake = Fake::start().await;
    (1..=2).for_each(|n| fake.set(&format!("pod-{n}"), FakePod::active(1.0)));
    let autoscaler = start(&fake, Advisor).await;
    let keda = format!("http://{}", autoscaler.keda_address().expect("it listens"));
    let mut client = ExternalScalerClient::connect(keda).await.expect("connected");
    let object = ScaledObjectRef { name: "sluice".to_owned(), ..ScaledObjectRef::default() };
    assert!(client.is_active(object.clone()).await.expect("answered").into_inner().result);
    let specs = client.get_metric_spec(object.clone()).await.expect("answered").into_inner().metric_specs;
    assert_eq!(
        (specs[0].metric_name.as_str(), specs[0].target_size_float, specs[0].target_size),
        (METRIC, 1.0, 1)
    );
    let mut active = client.stream_is_active(object.clone()).await.expect("answered").into_inner();
    assert!(active.message().await.expect("told at once").expect("an answer").result);
    until(&autoscaler, |pods, _, _| pods == 4).await;
    let ask = |name: &str| GetMetricsRequest {
        metric_name: name.to_owned(),
        scaled_object_ref: Some(object.clone()),
    };
    let values = client.get_metrics(ask(METRIC)).await.expect("answered").into_inner().metric_values;
    assert_eq!(
        (values[0].metric_name.as_str(), values[0].metric_value_float, values[0].metric_value),
        (METRIC, 4.0, 4)
    );
    let error = client.get_metrics(ask("lag")).await.expect_err("no such metric");
    assert!(error.code() == tonic::Code::InvalidArgument && error.message().contains(METRIC), "{error}");
    // The stream stays open until the autoscaler ends, and then ends well.
    let (end, ()) = tokio::join!(tokio::time::timeout(DEADLINE, active.message()), autoscaler.drain());
    assert_eq!(end.expect("in time").expect("a good end"), None);
}

#[tokio::test]
async fn keda_is_told_nothing_while_the_pool_is_not_seen() {
    let fake = Fake::start().await;
    fake.pool.lock().expect("lock").broken = Some(axum::http::StatusCode::INTERNAL_SERVER_ERROR);
    let autoscaler = start(&fake, Advisor).await;
    until(&autoscaler, |_, _, _| true).await;
    let keda = format!("http://{}", autoscaler.keda_address().expect("it listens"));
    let mut client = ExternalScalerClient::connect(keda).await.expect("connected");
    let ask = GetMetricsRequest { metric_name: METRIC.to_owned(), scaled_object_ref: None };
    let error = client.get_metrics(ask).await.expect_err("not known");
    assert_eq!(error.code(), tonic::Code::Unavailable, "{error}");
    autoscaler.drain().await;
}

#[tokio::test]
async fn a_port_that_is_taken_is_named() {
    let fake = Fake::start().await;
    let config = AutoscalerConfig { listen: fake.address.to_string(), ..config(&fake) };
    let error = Autoscaler::start(&config, Advisor).await.map(|_| ()).expect_err("taken").to_string();
    assert!(error.contains("autoscaler.listen") && error.contains(&fake.address.to_string()), "{error}");
}
