//! The admin API against scripted pods, as a person asks it: rightly, wrongly, and slowly.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use sluice_gateway::{Gateway, GatewayConfig, SecretHash};
use sluice_shared::error::Error;
use sluice_shared::lifecycle::Phase;
use sluice_shared::membership::{Membership, PodState};
use sluice_shared::pool::{LoadReport, TableLoad};
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::proto::{self, PodStatus};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{FakePod, Producer, get, raw, soon, split};

/// A gateway, the pool that it is told of, and its admin API.
struct Pool {
    gateway: Gateway,
    membership: Membership,
    admin: SocketAddr,
}

impl Pool {
    async fn of(pods: &[&FakePod]) -> Self {
        Self::with(pods, |_| {}).await
    }

    async fn with(pods: &[&FakePod], change: impl FnOnce(&mut GatewayConfig)) -> Self {
        Self::in_membership(Membership::fixed(pods.iter().map(|pod| pod.address()).collect()), change).await
    }

    async fn in_membership(membership: Membership, change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let mut config = GatewayConfig { listen: "127.0.0.1:0".to_owned(), ..GatewayConfig::default() };
        change(&mut config);
        let gateway = Gateway::start(config, membership.clone()).await.expect("starts");
        let admin = gateway.admin_address().expect("has an admin API");
        Self { gateway, membership, admin }
    }

    /// As if the pod had said so.
    fn says(&self, pod: &FakePod, phase: Phase, load: LoadReport) {
        let (id, address) = pod.address();
        self.membership.announce_pod(&id, PodState { address, phase, zone: None, tables: None, load });
    }

    async fn ask(&self, method: &str, path: &str) -> (u16, Value) {
        let (status, body) = get(self.admin, method, path).await;
        (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("{method} {path}: JSON: {body:?}")))
    }

    async fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask("GET", path).await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// The request is refused with this status and code, by a message that holds all these words.
    async fn refuses(&self, (method, path): (&str, &str), expected: (u16, &str), words: &[&str]) {
        let (status, body) = self.ask(method, path).await;
        check_refusal(&format!("{method} {path}"), (status, &body), expected, words);
    }
}

fn check_refusal(case: &str, (status, body): (u16, &Value), expected: (u16, &str), words: &[&str]) {
    let error = &body["error"];
    assert_eq!((status, error["code"].as_str()), (expected.0, Some(expected.1)), "{case}: {body}");
    assert!(error["kind"].is_string(), "{case}: {body}");
    let message = error["message"].as_str().expect("a message");
    for word in words {
        assert!(message.contains(word), "{case}: no {word:?} in {message}");
    }
}

fn names(list: &Value, key: &str) -> Vec<String> {
    let list = list.as_array().expect("a list");
    list.iter().map(|one| one[key].as_str().expect("a name").to_owned()).collect()
}

fn two() -> [FakePod; 2] {
    [FakePod::start("pod-1"), FakePod::start("pod-2")]
}

#[tokio::test]
async fn the_pool_and_each_pod_are_shown() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    let busy = LoadReport { sequence: 1, cpu: 0.25, log: 0.5, streams: 3, ..LoadReport::default() };
    pool.says(&two, Phase::Draining, busy);
    let shown = pool.get("/v1/pods").await;
    assert_eq!(shown["gateways"], 1);
    assert_eq!(names(&shown["pods"], "id"), ["pod-1", "pod-2"]);
    assert_eq!(names(&shown["pods"], "phase"), ["active", "draining"]);
    assert_eq!((&shown["pods"][1]["load"], &shown["pods"][1]["streams"]), (&json!(0.5), &json!(3)));
    // Asked by name, it is the pod itself that says how far it is.
    let status = PodStatus { phase: "draining".to_owned(), streams: 2, tables: 1, ..PodStatus::default() };
    let former_logs = vec!["_sluice/wal/one".to_owned()];
    two.tell(|memory| {
        memory.status = Some(PodStatus { log_entries: 7, deadline_ms: 900, former_logs, ..status })
    });
    let shown = pool.get("/v1/pods/pod-2").await;
    assert_eq!(
        shown["left"],
        json!({"streams":2,"bytes":0,"tables":1,"log_entries":7,"deadline_ms":900,"log":"","former_logs":["_sluice/wal/one"]})
    );
    assert_eq!(shown["streams"], 2);
    assert_eq!(pool.get("/v1/pods/pod-1").await.get("left"), None);
}

#[tokio::test]
async fn a_drain_is_passed_on_with_its_deadline_and_pace_as_often_as_it_is_wished() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    for (query, deadline_ms, streams_per_s) in [
        ("", 0, 0.0),
        ("?deadline=1500ms&pace=2.5", 1500, 2.5),
        ("?deadline=2m", 120_000, 0.0),
        ("?deadline=7&force=false", 7000, 0.0),
        ("?deadline=0.5h&force=true", 1_800_000, 0.0),
    ] {
        let (status, body) = pool.ask("POST", &format!("/v1/pods/pod-2/drain{query}")).await;
        assert_eq!(
            (status, &body["id"], &body["phase"]),
            (202, &json!("pod-2"), &json!("draining")),
            "{body}"
        );
        assert_eq!(body["left"]["deadline_ms"], deadline_ms, "{body}");
        let asked = two.see(|memory| memory.drains.last().cloned());
        let force = query.contains("force=true");
        assert_eq!(asked, Some(proto::DrainRequest { deadline_ms, streams_per_s, force }), "{query}");
    }
    assert_eq!((one.see(|memory| memory.drains.len()), two.see(|memory| memory.drains.len())), (0, 5));
}

#[tokio::test]
async fn pods_that_were_named_by_hand_are_asked_and_their_load_is_not_made_up() {
    let [one, _] = two();
    let gone = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let gone = gone.expect("a port").to_string().parse().expect("an address");
    let pods = vec![one.address(), ("pod-2".parse().expect("valid"), gone)];
    let pool = Pool::in_membership(Membership::fixed(pods), |_| {}).await;
    let shown = pool.get("/v1/pods").await;
    let seen: Vec<_> =
        shown["pods"].as_array().expect("a list").iter().map(|pod| (&pod["phase"], &pod["load"])).collect();
    assert_eq!(seen, [(&json!("active"), &Value::Null), (&json!("lost"), &Value::Null)]);
    assert_eq!(pool.get("/v1/pods/pod-2").await["phase"], "lost");
    pool.says(&one, Phase::Draining, LoadReport { cpu: 0.5, ..LoadReport::default() });
    assert_eq!(pool.get("/v1/pods").await["pods"][0]["load"], 0.5, "it has said so itself");
}

#[tokio::test]
async fn the_last_active_pod_drains_only_by_force() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    for phase in [Phase::Draining, Phase::Joining, Phase::Drained] {
        pool.says(&two, phase, LoadReport::default());
        let drain = ("POST", "/v1/pods/pod-1/drain");
        pool.refuses(drain, (409, "last_pod"), &["pod-1", "force=true", "start another"]).await;
    }
    assert!(one.see(|memory| memory.drains.is_empty()), "nothing of that reached it");
    // What the pool has not heard yet the pod itself knows.
    pool.says(&two, Phase::Active, LoadReport::default());
    assert_eq!(pool.ask("POST", "/v1/pods/pod-2/drain").await.0, 202);
    pool.refuses(("POST", "/v1/pods/pod-1/drain"), (409, "last_pod"), &["pod-1"]).await;
    let (status, body) = pool.ask("POST", "/v1/pods/pod-1/drain?force=true").await;
    assert_eq!((status, &body["phase"]), (202, &json!("draining")), "{body}");
    assert!(one.see(|memory| memory.drains.last().is_some_and(|asked| asked.force)), "the pod is told so");
    // One that is no active pod is nobody's last.
    pool.says(&two, Phase::Draining, LoadReport::default());
    assert_eq!(pool.ask("POST", "/v1/pods/pod-2/drain").await.0, 202);
}

#[tokio::test]
async fn what_has_drained_stays_so_and_joins_no_more() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    pool.says(&two, Phase::Drained, LoadReport::default());
    // Its process may have ended, and cannot be asked.
    two.kill();
    let (status, body) = pool.ask("POST", "/v1/pods/pod-2/drain").await;
    assert_eq!((status, &body["phase"]), (202, &json!("drained")), "{body}");
    assert_eq!(pool.get("/v1/pods/pod-2").await["phase"], "drained");
    pool.refuses(("POST", "/v1/pods/pod-2/join"), (409, "pod_ended"), &["pod-2", "start it again"]).await;
}

#[tokio::test]
async fn what_has_not_drained_to_the_end_says_what_is_left_and_is_never_called_drained() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    pool.says(&two, Phase::Undrained, LoadReport::default());
    let status = PodStatus { phase: "undrained".to_owned(), log_entries: 7, ..PodStatus::default() };
    two.tell(|memory| {
        memory.status = Some(PodStatus { log_place: "/data/wal".to_owned(), bytes: 9, ..status })
    });
    let shown = pool.get("/v1/pods/pod-2").await;
    assert_eq!(shown["phase"], "undrained", "{shown}");
    let left = &shown["left"];
    assert_eq!((&left["log_entries"], &left["bytes"]), (&json!(7), &json!(9)), "{shown}");
    assert_eq!(left["log"], "/data/wal", "{shown}");
    two.kill();
    let (status, body) = pool.ask("POST", "/v1/pods/pod-2/drain").await;
    assert_eq!((status, &body["phase"]), (202, &json!("undrained")), "{body}");
    pool.refuses(("POST", "/v1/pods/pod-2/join"), (409, "pod_ended"), &["pod-2", "start it again"]).await;
}

#[tokio::test]
async fn a_join_takes_a_drain_back_unless_it_comes_too_late() {
    let pod = FakePod::start("pod-1");
    let pool = Pool::of(&[&pod]).await;
    assert_eq!(pool.ask("POST", "/v1/pods/pod-1/drain?force=true").await.0, 202);
    let (status, body) = pool.ask("POST", "/v1/pods/pod-1/join").await;
    assert_eq!((status, &body["phase"], body.get("left")), (202, &json!("active"), None), "{body}");
    assert_eq!(pod.see(|memory| memory.joins), 1);
    // This gateway has not heard of its end yet.
    pod.tell(|memory| memory.join_failure = Some(Error::invalid("pod_ended", "pod pod-1 has drained")));
    pool.refuses(("POST", "/v1/pods/pod-1/join"), (409, "pod_ended"), &["has drained"]).await;
}

#[tokio::test]
async fn a_release_is_passed_on_to_a_pod_that_answers() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    one.kill();
    let (status, body) = pool.ask("POST", "/v1/release?pod=pod-9&dry_run=true").await;
    assert_eq!((status, &body["dry_run"]), (200, &json!(true)), "{body}");
    let asked = two.see(|memory| memory.releases.clone());
    assert_eq!((asked.len(), asked[0].pod.as_str(), asked[0].dry_run), (1, "pod-9", true));
    let (status, body) = pool.ask("POST", "/v1/release?table=t&stream=a%230").await;
    assert_eq!((status, &body["dry_run"]), (200, &json!(false)), "{body}");
    assert_eq!(two.see(|memory| memory.releases[1].stream.clone()), "a#0");
    for (query, code, words) in [
        ("", "invalid_release", "`log`, `pod` and `table`"),
        ("log=a&pod=b", "invalid_release", "one of"),
        ("dry_run=perhaps&log=a", "invalid_query", "dry_run"),
        ("lgo=a", "invalid_query", "`lgo`"),
    ] {
        pool.refuses(("POST", &format!("/v1/release?{query}")), (400, code), &[words]).await;
    }
    for (failure, status) in [
        (Error::invalid("log_in_use", "pod pod-1 is there"), 409),
        (Error::invalid("log_is_empty", "it was drained"), 409),
        (Error::invalid("invalid_log", "no log id"), 400),
        (Error::not_found("log_not_found", "never heard of"), 404),
        (Error::unavailable("pod_unreachable", "pod pod-1 does not say"), 503),
    ] {
        two.tell(|memory| memory.release_failure = Some(failure.clone()));
        pool.refuses(("POST", "/v1/release?log=l"), (status, &failure.code), &[&failure.message]).await;
    }
}

#[tokio::test]
async fn what_cannot_be_asked_is_refused_by_name() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    let drain = |query: &str| format!("/v1/pods/pod-1/drain?{query}");
    for (query, code, words) in [
        ("deadline=soon", "invalid_deadline", "\"soon\""),
        ("deadline=", "invalid_deadline", "60s"),
        ("deadline=-1s", "invalid_deadline", "\"-1s\""),
        ("deadline=0", "invalid_deadline", "\"0\""),
        ("deadline=NaN", "invalid_deadline", "\"NaN\""),
        ("deadline=infs", "invalid_deadline", "\"infs\""),
        ("pace=0", "invalid_pace", "pace is 0"),
        ("pace=-3", "invalid_pace", "pace is -3"),
        ("pace=nan", "invalid_pace", "pace is NaN"),
        ("pace=fast", "invalid_query", "pace"),
        ("force=perhaps", "invalid_query", "force"),
        ("deadlin=60s", "invalid_query", "`deadlin`"),
        ("pace=1&pace=2", "invalid_query", "pace"),
    ] {
        pool.refuses(("POST", &drain(query)), (400, code), &[words]).await;
    }
    for (path, status, code, words) in [
        ("/v1/streams?tabel=x", 400, "invalid_query", "`tabel`"),
        ("/v1/streams?table=a..b", 400, "invalid_table_name", "a..b"),
        ("/v1/explain", 400, "invalid_query", "`table`"),
        ("/v1/explain?table=t&rate=-1", 400, "invalid_query", "rate"),
        ("/v1/explain?table=t&stream=~none", 404, "stream_not_found", "~none"),
        ("/v1/nowhere", 404, "not_found", "/v1/nowhere"),
        ("/", 404, "not_found", "/openapi.json"),
    ] {
        pool.refuses(("GET", path), (status, code), &[words]).await;
    }
    assert!(one.see(|memory| memory.drains.is_empty()));
}

#[tokio::test]
async fn a_pod_that_is_not_known_is_told_with_those_that_are() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    let ends = [("GET", ""), ("POST", "/drain"), ("POST", "/join")];
    let odd =
        ["pod-3", "POD-1", "pod%2d3", "%F0%9F%90%99", "a%2Fb", "%0a%1b", ".", "pod-1%00", &"p".repeat(9000)];
    for (method, end) in ends {
        for pod in odd {
            let path = format!("/v1/pods/{pod}{end}");
            let (status, body) = pool.ask(method, &path).await;
            check_refusal(&path, (status, &body), (404, "pod_not_found"), &["it knows pod-1, pod-2"]);
            assert!(body.to_string().len() < 4000, "{} bytes of answer", body.to_string().len());
        }
        let path = format!("/v1/pods/%ff{end}");
        pool.refuses((method, &path), (400, "invalid_path"), &["UTF-8"]).await;
    }
    assert_eq!(pool.get("/v1/pods/pod%2D1").await["id"], "pod-1", "it is its name all the same");
    let pool = Pool::of(&[]).await;
    pool.refuses(("GET", "/v1/pods/pod-1"), (404, "pod_not_found"), &["it knows none"]).await;
    assert_eq!(pool.get("/v1/pods").await, json!({"gateways": 1, "pods": []}));
}

#[tokio::test]
async fn another_method_is_named() {
    let pod = FakePod::start("pod-1");
    let pool = Pool::of(&[&pod]).await;
    for (method, path) in [
        ("DELETE", "/v1/pods/pod-1"),
        ("GET", "/v1/pods/pod-1/drain"),
        ("PUT", "/v1/pods/pod-1/join"),
        ("POST", "/v1/streams"),
        ("PATCH", "/healthz"),
    ] {
        pool.refuses((method, path), (405, "method_not_allowed"), &[method, path]).await;
    }
    assert!(pod.see(|memory| memory.drains.is_empty()));
}

#[tokio::test]
async fn a_pod_that_is_dead_cannot_be_told_anything_but_is_shown() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    two.kill();
    for end in ["drain", "join"] {
        let path = format!("/v1/pods/pod-2/{end}");
        pool.refuses(("POST", &path), (503, "pod_unreachable"), &["pod pod-2 cannot be reached"]).await;
    }
    assert_eq!(pool.get("/v1/pods/pod-2").await["id"], "pod-2");
}

#[tokio::test]
async fn a_secret_is_asked_for_where_there_is_one() {
    let pod = FakePod::start("pod-1");
    let secret =
        |config: &mut GatewayConfig| config.admin_secret_sha256 = Some(SecretHash::of("open sesame"));
    let pool = Pool::with(&[&pod], secret).await;
    let described = described(&pool).await;
    for (authorization, is_right) in [
        ("", false),
        ("authorization: Bearer wrong\r\n", false),
        ("authorization: Bearer \r\n", false),
        ("authorization: Basic open sesame\r\n", false),
        ("authorization: open sesame\r\n", false),
        ("authorization: Bearer open sesame\r\n", true),
        ("authorization: bearer open sesame\r\n", true),
    ] {
        for (method, path, operation) in &described {
            // What the description says needs none.
            let is_open = operation["security"] == json!([]);
            let path = path.replace("{pod}", "pod-9");
            let head =
                format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{authorization}\r\n");
            let answer = raw(pool.admin, head.as_bytes()).await;
            let (status, body) = split(&answer);
            assert_eq!(status != 401, is_right || is_open, "{method} {path}, {authorization:?}: {answer}");
            if status == 401 {
                let body = serde_json::from_str(&body).expect("JSON");
                check_refusal(&path, (401, &body), (401, "admin_secret"), &["gateway.admin_secret_sha256"]);
                assert!(answer.to_ascii_lowercase().contains("www-authenticate: bearer"), "{answer}");
            }
        }
    }
}

#[tokio::test]
async fn a_configuration_that_lets_everybody_drain_is_refused() {
    let of = |admin: &str, secret: Option<SecretHash>| GatewayConfig {
        listen: "127.0.0.1:0".to_owned(),
        admin_listen: Some(admin.to_owned()),
        admin_secret_sha256: secret,
        ..GatewayConfig::default()
    };
    let none: SecretHash = serde_json::from_value(json!("not 64 hex digits")).expect("any text is read");
    for (config, words) in [
        (of("0.0.0.0:0", None), "gateway.admin_secret_sha256"),
        (of("[::]:0", None), "gateway.admin_listen is \"[::]:0\""),
        (of("sluice.example:7073", None), "listen on 127.0.0.1"),
        (of("127.0.0.1:0", Some(none)), "gateway.admin_secret_sha256: it has to be 64 hex digits"),
        (of("nowhere", None), "gateway.admin_listen"),
    ] {
        let refused = Gateway::start(config, Membership::fixed(Vec::new())).await.err().expect("refused");
        assert!(refused.message.contains(words), "{refused}");
    }
    let config = of("0.0.0.0:0", Some(SecretHash::of("x")));
    assert!(Gateway::start(config, Membership::fixed(Vec::new())).await.is_ok());
    let config = of("off", None);
    let gateway = Gateway::start(config, Membership::fixed(Vec::new())).await.expect("starts");
    assert_eq!(gateway.admin_address(), None);
}

/// Method, path and description of all that the API says it has.
async fn described(pool: &Pool) -> Vec<(String, String, Value)> {
    let described = pool.get("/openapi.json").await;
    let paths = described["paths"].as_object().expect("paths");
    let each = paths.iter().flat_map(|(path, methods)| {
        let methods = methods.as_object().expect("methods").iter();
        methods.map(|(method, operation)| (method.to_uppercase(), path.clone(), operation.clone()))
    });
    each.collect()
}

#[tokio::test]
async fn all_that_is_described_is_served_there_and_nowhere_else() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    let described = described(&pool).await;
    assert!(described.len() >= 9, "{described:?}");
    for (method, path, operation) in &described {
        let there = path.replace("{pod}", "pod-2");
        let (status, body) = get(pool.admin, method, &there).await;
        let needs_more = ["/v1/explain", "/v1/release"].contains(&path.as_str());
        assert_eq!(
            status,
            if needs_more {
                400
            } else if method == "POST" {
                202
            } else {
                200
            },
            "{path}: {body}"
        );
        assert!(operation["responses"][status.to_string()].is_object(), "{path}: {status} is not described");
        // Parameters are refused with all that there are.
        let asked = operation["parameters"].as_array().cloned().unwrap_or_default();
        let asked = asked.iter().filter(|one| one["in"] == "query");
        let asked: BTreeSet<&str> = asked.filter_map(|one| one["name"].as_str()).collect();
        if !asked.is_empty() {
            let (status, body) = get(pool.admin, method, &format!("{there}?nonsense=1")).await;
            let known = body.split("expected").nth(1).expect("what was expected");
            let known: BTreeSet<&str> = known.split('`').skip(1).step_by(2).collect();
            assert_eq!((status, known), (400, asked), "{path}: {body}");
        }
        // Producers do not reach it.
        if !["/healthz", "/metrics", "/v1/tables"].contains(&path.as_str()) {
            assert_eq!(get(pool.gateway.address(), method, &there).await.0, 404, "{method} {path}");
        }
    }
    for path in ["/readyz", "/v1/tables/flights", "/v1/tables/flights/stream", "/v1/tables/flights/records"] {
        for method in ["GET", "PUT", "POST"] {
            assert_eq!(get(pool.admin, method, path).await.0, 404, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn what_is_shown_is_what_is_described() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    let tables = vec![TableLoad { table: "flights".parse().expect("a name"), bytes_per_s: 5e6, streams: 1 }];
    pool.says(&two, Phase::Active, LoadReport { sequence: 1, tables, ..LoadReport::default() });
    let _producer = Producer::plain(&pool.gateway).await;
    let schemas = pool.get("/openapi.json").await["components"]["schemas"].take();
    let drained = pool.ask("POST", "/v1/pods/pod-2/drain").await.1;
    // As the view of the pool comes to know of the table, a moment after it was told.
    let listed = async {
        loop {
            let mut tables = pool.get("/v1/tables").await;
            if tables["tables"][0].is_object() {
                return tables["tables"][0].take();
            }
        }
    };
    let mut explained = pool.get("/v1/explain?table=flights").await;
    for (schema, shown) in [
        ("Candidate", explained["candidates"][0].clone()),
        ("Explanation", explained.take()),
        ("Pod", drained),
        ("Stream", pool.get("/v1/streams").await["streams"][0].take()),
        ("Table", soon("the table", listed).await),
    ] {
        let keys =
            |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(keys(&shown), keys(&schemas[schema]["properties"]), "{schema}");
        for required in schemas[schema]["required"].as_array().into_iter().flatten() {
            assert!(shown.get(required.as_str().expect("a name")).is_some(), "{schema}: {required}");
        }
    }
}

#[tokio::test]
async fn a_stream_is_shown_where_it_is_before_and_after_it_moves() {
    let pods = two();
    let pool = Pool::of(&[&pods[0], &pods[1]]).await;
    assert_eq!(pool.get("/v1/streams").await, json!({"streams": [], "total": 0}));
    let mut producer = Producer::framed(&pool.gateway).await;
    producer.records(0, 2, "{\"a\":1}\n{\"b\":2}").await;
    producer.until_durable(1).await;
    let shown = pool.get("/v1/streams?table=flights").await;
    let stream = &shown["streams"][0];
    assert_eq!(
        (&shown["total"], &stream["table"], &stream["moves"]),
        (&json!(1), &json!("main.default.flights"), &json!(0))
    );
    assert_eq!((&stream["next_offset"], &stream["durable_next"]), (&json!(2), &json!(2)));
    let at = pods.iter().position(|pod| pod.see(|memory| !memory.opens.is_empty())).expect("one has it");
    let (first, second) = (&pods[at], &pods[1 - at]);
    assert_eq!(stream["pod"], first.id.as_str());
    first.answer(Ok(Answer::Handoff(proto::Handoff { reason: "its pod drains".to_owned() }))).await;
    first.until("the leave", |memory| memory.leaves == [0]).await;
    producer.records(2, 1, "{}").await;
    producer.until_durable(2).await;
    let moved = pool.get(&format!("/v1/streams?pod={}", second.id)).await;
    assert_eq!(
        (&moved["streams"][0]["stream"], &moved["streams"][0]["moves"]),
        (&stream["stream"], &json!(1))
    );
    assert_eq!(moved["streams"][0]["next_offset"], 3);
    for none in [format!("pod={}", first.id), "table=other".to_owned(), "pod=pod-9".to_owned()] {
        assert_eq!(pool.get(&format!("/v1/streams?{none}")).await["total"], 0, "{none}");
    }
    drop(producer);
    let gone = async { while pool.get("/v1/streams").await["total"] != 0 {} };
    soon("the end of the stream", gone).await;
}

#[tokio::test]
async fn tables_are_listed_with_the_pods_that_they_stand_on_the_busiest_first() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    assert_eq!(pool.get("/v1/tables").await, json!({"tables": []}));
    let load = |sequence, tables: &[(&str, f64)]| {
        let table = |&(table, bytes_per_s): &(&str, f64)| TableLoad {
            table: format!("main.default.{table}").parse().expect("a name"),
            bytes_per_s,
            streams: 2,
        };
        LoadReport { sequence, tables: tables.iter().map(table).collect(), ..LoadReport::default() }
    };
    pool.says(&one, Phase::Active, load(1, &[("quiet", 1e3), ("busy", 2e6)]));
    pool.says(&two, Phase::Active, load(1, &[("busy", 1e6)]));
    let both = async {
        loop {
            let shown = pool.get("/v1/tables").await["tables"].take();
            if shown[0]["streams"] == 4 {
                return shown;
            }
        }
    };
    let shown = soon("both reports", both).await;
    assert_eq!(names(&shown, "table"), ["main.default.busy", "main.default.quiet"]);
    assert_eq!((&shown[0]["bytes_per_s"], &shown[0]["pods"]), (&json!(3e6), &json!(["pod-1", "pod-2"])));
    assert_eq!(shown[1]["pods"], json!(["pod-1"]));
    assert!(shown[0]["home"].as_str().is_some_and(|home| home.starts_with("pod-")), "{shown}");
}

#[tokio::test]
async fn a_stream_goes_where_it_was_said_to_go() {
    let pods = [FakePod::start("pod-1"), FakePod::start("pod-2"), FakePod::start("pod-3")];
    let pool = Pool::of(&[&pods[0], &pods[1], &pods[2]]).await;
    let (mut producers, mut used) = (Vec::new(), BTreeSet::new());
    for table in (0..12).map(|n| format!("t{n}")) {
        let said = pool.get(&format!("/v1/explain?table={table}")).await;
        // A small table stands on its home alone: no draw decides.
        assert_eq!(
            (&said["spread"], &said["home"], &said["refusal"]),
            (&json!(1), &said["pod"], &Value::Null),
            "{said}"
        );
        assert_eq!(said["candidates"].as_array().map(Vec::len), Some(3), "{said}");
        producers.push(Producer::connect(&pool.gateway, &format!("{table}/stream"), None).await);
        producers.last_mut().expect("one").json().await;
        let shown = pool.get(&format!("/v1/streams?table={table}")).await;
        assert_eq!(shown["streams"][0]["pod"], said["pod"], "{said}");
        let stream = shown["streams"][0]["stream"].as_str().expect("an id");
        let again = pool.get(&format!("/v1/explain?table={table}&stream={stream}&rate=1000")).await;
        assert_eq!((&again["rule"], &again["pod"]), (&json!("sticky"), &said["pod"]), "{again}");
        used.insert(said["pod"].to_string());
    }
    assert!(used.len() > 1, "all tables have one home, and this test tells nothing: {used:?}");
    let pool = Pool::of(&[]).await;
    let said = pool.get("/v1/explain?table=t").await;
    assert_eq!((&said["pod"], &said["rule"]), (&Value::Null, &Value::Null));
    assert!(said["refusal"].as_str().is_some_and(|why| why.contains("no pod is active")), "{said}");
}

#[tokio::test]
async fn a_page_that_an_operator_looks_at_drains_nothing() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    for origin in ["https://evil.example", "null", "http://127.0.0.1:7073"] {
        for end in ["drain", "join"] {
            let path = format!("/v1/pods/pod-2/{end}");
            let head =
                format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\norigin: {origin}\r\n\r\n");
            let (status, body) = split(&raw(pool.admin, head.as_bytes()).await);
            let body = serde_json::from_str(&body).expect("JSON");
            check_refusal(&path, (status, &body), (403, "origin_not_allowed"), &[origin]);
        }
    }
    assert_eq!((two.see(|memory| memory.drains.len()), two.see(|memory| memory.joins)), (0, 0));
}

#[tokio::test]
async fn a_body_that_nobody_asked_for_is_not_read() {
    let [one, two] = two();
    let pool = Pool::of(&[&one, &two]).await;
    for head in ["content-length: 1099511627776\r\n\r\n", "transfer-encoding: chunked\r\n\r\n40000000\r\n"] {
        let mut socket = TcpStream::connect(pool.admin).await.expect("connects");
        let head = format!("POST /v1/pods/pod-2/drain HTTP/1.1\r\nhost: x\r\n{head}");
        socket.write_all(head.as_bytes()).await.expect("sends");
        let mut answer = Vec::new();
        soon("the answer and the end", socket.read_to_end(&mut answer)).await.expect("reads");
        assert_eq!(split(&String::from_utf8_lossy(&answer)).0, 202);
        // Nobody takes what goes on coming.
        let sending = async {
            let chunk = vec![b'x'; 1 << 20];
            while socket.write_all(&chunk).await.is_ok() {}
        };
        soon("an end of what is taken", sending).await;
    }
}

#[tokio::test]
async fn a_client_that_says_nothing_is_let_go_and_holds_up_nobody() {
    let pod = FakePod::start("pod-1");
    let pool = Pool::with(&[&pod], |config| config.handshake_timeout_ms = 300).await;
    let mut silent = Vec::new();
    // More than are served at one time.
    for _ in 0..100 {
        silent.push(TcpStream::connect(pool.admin).await.expect("connects"));
    }
    let mut slow = TcpStream::connect(pool.admin).await.expect("connects");
    slow.write_all(b"GET /v1/pods HTTP/1.1\r\nhost: x\r\nx-slow:").await.expect("sends");
    assert_eq!(names(&pool.get("/v1/pods").await["pods"], "id"), ["pod-1"]);
    silent.push(slow);
    // So is one that has asked, and then says nothing more.
    let mut idle = TcpStream::connect(pool.admin).await.expect("connects");
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("sends");
    silent.push(idle);
    for mut socket in silent {
        let mut rest = Vec::new();
        // A reset is an end too.
        let _ = soon("the end of a silent connection", socket.read_to_end(&mut rest)).await;
    }
    let long = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(1 << 20));
    let mut socket = TcpStream::connect(pool.admin).await.expect("connects");
    let asked = async {
        // It is refused before it has come whole.
        let _ = socket.write_all(long.as_bytes()).await;
        let _ = socket.read_to_end(&mut Vec::new()).await;
    };
    soon("the end of an endless head", asked).await;
}

#[tokio::test]
async fn a_gateway_that_ends_waits_for_no_client_of_its_admin_api() {
    let pod = FakePod::start("pod-1");
    let pool = Pool::of(&[&pod]).await;
    let mut idle = TcpStream::connect(pool.admin).await.expect("connects");
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("sends");
    let mut first = [0; 12];
    soon("an answer", idle.read_exact(&mut first)).await.expect("reads");
    assert_eq!(&first, b"HTTP/1.1 200");
    soon("the drain", pool.gateway.drain(Duration::from_secs(60))).await;
    soon("the end", idle.read_to_end(&mut Vec::new())).await.expect("reads");
}
