//! The admin API as the autoscaler asks it.

use axum::http::StatusCode;
use sluice_autoscaler::admin::{Admin, AdminError};
use sluice_autoscaler::policy::PodPhase;
use std::time::Duration;

use crate::fake::{Fake, FakePod};

/// Nothing listens there: the port was had and given back.
async fn nobody() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    format!("http://{}", listener.local_addr().expect("an address"))
}

#[tokio::test]
async fn any_gateway_that_answers_will_do() {
    let (good, ending) = (Fake::start().await, Fake::start().await);
    good.set("pod-1", FakePod { phase: "lost", load: 0.4, refused: 3 });
    ending.pool.lock().expect("lock").broken = Some(StatusCode::SERVICE_UNAVAILABLE);
    let mut admin = Admin::new(&[nobody().await, ending.url(), good.url()], None).expect("addresses");
    let pool = admin.pool().await.expect("one answers");
    let pod = pool.pod("pod-1").expect("there");
    assert_eq!((pod.phase, pod.load, pod.refused, pod.lag_ms), (PodPhase::Lost, 0.4, 3, 900));
    assert_eq!(pool.samples()[0].report_age, Some(Duration::from_millis(300)));
}

#[tokio::test]
async fn what_a_gateway_refuses_is_told_in_its_words() {
    let fake = Fake::start().await;
    fake.set("pod-1", FakePod::active(0.1));
    let mut admin = Admin::new(&[fake.url()], None).expect("an address");
    for (id, status, code) in [("pod-1", 409, "last_pod"), ("pod-7", 404, "pod_not_found")] {
        let error = admin.drain(id, Duration::from_secs(60)).await.expect_err("refused");
        assert!(error.to_string().contains(code) && error.to_string().contains(&fake.url()), "{error}");
        assert!(matches!(error, AdminError::Refused { status: said, .. } if said == status), "{error}");
    }
    assert_eq!(fake.asked(), ["drain pod-1?deadline=60s", "drain pod-7?deadline=60s"]);
}

#[tokio::test]
async fn addresses_that_are_none_are_refused_and_nobody_there_is_named() {
    for url in ["127.0.0.1:7073", "ftp://127.0.0.1", "http://", "http://a b"] {
        let refused = Admin::new(&[url.to_owned()], None).map(drop).expect_err(url).to_string();
        assert!(refused.contains(url), "{refused}");
    }
    let url = nobody().await;
    let error =
        Admin::new(std::slice::from_ref(&url), None).expect("an address").pool().await.expect_err("nobody");
    assert!(error.to_string().contains(&url), "{error}");
}

#[tokio::test]
async fn another_server_s_answer_is_not_taken_for_a_pool() {
    let fake = Fake::start().await;
    fake.pool.lock().expect("lock").broken = Some(StatusCode::OK);
    let error = Admin::new(&[fake.url()], None).expect("an address").pool().await.expect_err("no pool");
    assert!(matches!(error, AdminError::Unread { .. }), "{error}");
}

#[tokio::test]
async fn the_admin_secret_is_said_and_a_wrong_one_told() {
    let fake = Fake::start().await;
    fake.pool.lock().expect("lock").secret = Some("s3cret");
    for (secret, is_taken) in [(Some("s3cret"), true), (Some("other"), false), (None, false)] {
        let mut admin = Admin::new(&[fake.url()], secret.map(str::to_owned)).expect("an address");
        let answered = admin.pool().await.map_err(|error| error.to_string());
        assert_eq!(answered.is_ok(), is_taken, "{answered:?}");
        assert!(
            is_taken
                || answered.is_err_and(|error| error.contains("admin_secret") && !error.contains("other"))
        );
    }
}
