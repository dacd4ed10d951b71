//! Headers of calls, and their admission.

use std::sync::Arc;
use std::time::Duration;

use baton_router::{ApiError, ApiKey, Body, Extra, Mount, ReplyFuture, RouterConfig};
use baton_types::{ChainHasher, Secret};
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body_util::Full;
use tokio::io::AsyncReadExt;

use crate::scripted::{open, open_with_text, text_script};

const PATH: &str = "/v1/completions";
const BODY: &str = r#"{"prompt":"a prompt of more than sixteen tokens"}"#;

#[tokio::test]
async fn only_keys_let_in_and_they_name_the_tenant() {
    let keys = vec![
        ApiKey { key: "k1".into(), tenant: Some("acme".into()), classes: Vec::new() },
        ApiKey { key: "k2".into(), tenant: None, classes: Vec::new() },
    ];
    let door =
        open(RouterConfig { api_keys: keys.into(), ..RouterConfig::default() }, |_| text_script("x")).await;
    let response = door.post_with(PATH, BODY, &[]).await;
    assert_eq!((response.status, response.error().1.as_deref()), (401, Some("missing_api_key")));
    let response = door.post_with(PATH, BODY, &[("authorization", "Bearer k3")]).await;
    assert_eq!((response.status, response.error().1.as_deref()), (401, Some("invalid_api_key")));
    assert_eq!(door.get("/v1/models").await.status, 401);
    assert_eq!(door.get("/health").await.status, 200);
    for (key, tenant) in [("Bearer k1", "acme"), ("Bearer k2", "guest")] {
        let response = door.post_with(PATH, BODY, &[("authorization", key), ("x-tenant-id", "guest")]).await;
        assert_eq!(response.status, 200);
        assert_eq!(door.backend.submissions.lock().last().unwrap().tenant.as_deref(), Some(tenant));
    }
}

#[tokio::test]
async fn headers_reach_the_backend() {
    let door = open_with_text("x").await;
    let headers = [
        ("x-request-id", "mine-1"),
        ("x-baton-class", "batch"),
        ("x-tenant-id", "t1"),
        ("x-session-id", "s1"),
        ("x-request-timeout-ms", "2500"),
        ("x-slo-ttft-ms", "1500"),
        ("x-slo-tbt-ms", "40"),
        ("x-baton-explain", "1"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ];
    let response = door.post_with(PATH, BODY, &headers).await;
    assert_eq!(response.header("x-request-id"), Some("mine-1"));
    assert_eq!(response.header("traceparent"), None, "nothing is echoed");
    assert_eq!(response.header("x-baton-decision"), Some("prefill=p1 decode=d2"));
    let submission = door.backend.submissions.lock()[0].clone();
    assert_eq!((&*submission.request_id, submission.class.as_deref()), ("mine-1", Some("batch")));
    assert_eq!((submission.tenant.as_deref(), submission.timeout_us), (Some("t1"), Some(2_500_000)));
    assert!(submission.session.is_some());
    let objectives = submission.objectives;
    assert_eq!((objectives.ttft_us, objectives.tbt_us), (Some(1_500_000), Some(40_000)));
    assert_eq!(submission.class_param, Some("x-baton-class"));
    let parent = submission.trace.unwrap();
    assert_eq!((parent.span_id, parent.sampled), (0xb7ad_6b71_6920_3331, true));

    let response = door.post_with(PATH, BODY, &[("traceparent", "00-not-one")]).await;
    let made = response.header("x-request-id").unwrap().to_owned();
    assert!(made.starts_with("req-") && response.header("x-baton-decision").is_none());
    let submission = door.backend.submissions.lock()[1].clone();
    assert_eq!((&*submission.request_id, submission.session), (made.as_str(), None));
    assert_eq!(submission.trace, None, "a broken traceparent is as none");
    assert!(door.get("/nothing").await.header("x-request-id").is_some(), "errors have one, too");
}

#[tokio::test]
async fn an_unusable_objective_is_refused_with_its_header_before_anything_is_submitted() {
    let door = open_with_text("x").await;
    for header in ["x-slo-ttft-ms", "x-slo-tbt-ms"] {
        let response = door.post_with(PATH, BODY, &[(header, "2s")]).await;
        let error = &response.json()["error"];
        assert_eq!((response.status, error["param"].as_str()), (400, Some(header)), "{error}");
        assert!(error["message"].as_str().unwrap().contains("whole number of milliseconds"), "{error}");
    }
    assert!(door.backend.submissions.lock().is_empty());
}

#[tokio::test]
async fn tenants_and_salts_share_no_blocks() {
    let config = RouterConfig { hash_seed: Secret::new(77), ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    let salted = BODY.replace('{', "{\"cache_salt\":\"s\",");
    for (body, headers) in [
        (BODY, &[][..]),
        (BODY, &[][..]),
        (BODY, &[("x-tenant-id", "a")][..]),
        (BODY, &[("x-tenant-id", "b")][..]),
        (&salted, &[][..]),
    ] {
        door.post_with(PATH, body.to_owned(), headers).await;
    }
    let submissions = door.backend.submissions.lock();
    assert_eq!(submissions[0].chain, submissions[1].chain);
    for (a, one) in submissions.iter().enumerate().skip(1) {
        assert!(
            submissions[a + 1..].iter().all(|other| other.chain[0] != one.chain[0] && other.root != one.root)
        );
        let mut hasher = ChainHasher::resume(77, one.root);
        let keys: Vec<_> =
            one.tokens.to_vec().chunks_exact(16).map(|block| hasher.push_tokens(block)).collect();
        assert_eq!(*one.chain, keys, "the chain is the hasher's own");
    }
}

struct Pages;

impl Extra for Pages {
    fn mount(&self, parts: &Parts) -> Mount {
        match parts.uri.path() {
            "/metrics" => Mount::Body(1_000),
            "/closed" => Mount::Refused(Box::new(ApiError::new(401, "not you").reply())),
            "/bare" => Mount::Bodyless,
            _ => Mount::Unknown,
        }
    }

    fn call<'a>(&'a self, parts: &'a Parts, body: Bytes) -> ReplyFuture<'a> {
        Box::pin(async move { Some(Response::new(Body::full(format!("{} {}", parts.method, body.len())))) })
    }
}

#[tokio::test]
async fn other_paths_can_be_mounted() {
    let config = RouterConfig { extra: Some(Arc::new(Pages)), ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    let response = door.post_with("/metrics", "abc", &[]).await;
    assert_eq!(
        (response.status, &response.body[..], response.header("x-request-id").is_some()),
        (200, &b"POST 3"[..], true)
    );
    assert_eq!(door.get("/other").await.error().1.as_deref(), Some("unknown_path"));
    assert_eq!(door.post_with("/metrics", "x".repeat(1_001), &[]).await.status, 413);
    let reply = door.router.call(Request::get("/metrics").body(Full::<Bytes>::default()).unwrap()).await;
    assert_eq!(reply.status(), 200);
    assert_eq!(door.router.stats().requests, 4);
}

#[tokio::test]
async fn a_body_is_not_read_before_it_is_known_who_sends_it_and_where() {
    let keys = vec![ApiKey { key: Secret::from("k"), tenant: None, classes: Vec::new() }];
    let config =
        RouterConfig { api_keys: keys.into(), extra: Some(Arc::new(Pages)), ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    for (path, status) in [
        ("/nothing", "404"),
        ("/closed", "401"),
        ("/bare", "200"),
        ("/v1/completions", "401"),
        ("/v1/embeddings", "401"),
        ("/v1/models", "405"),
    ] {
        // As much is announced as a body may have, and nothing of it is sent.
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n");
        let mut connection = door.raw(head.as_bytes()).await;
        let mut start = [0; 12];
        let response = tokio::time::timeout(Duration::from_secs(20), connection.read_exact(&mut start)).await;
        assert!(response.is_ok_and(|read| read.is_ok()), "{path}: waits for the body");
        assert_eq!(start, *format!("HTTP/1.1 {status}").as_bytes(), "{path}");
    }
    assert_eq!(door.router.stats().body_bytes, 0);
}

#[tokio::test]
async fn a_class_that_its_key_may_not_use_is_refused_before_the_body_and_counted() {
    let keys = vec![ApiKey { key: Secret::from("k"), tenant: None, classes: vec!["batch".into()] }];
    let door =
        open(RouterConfig { api_keys: keys.into(), ..RouterConfig::default() }, |_| text_script("x")).await;
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\nx-baton-class: gold\r\n\
         content-type: application/json\r\ncontent-length: 30000000\r\n\r\n"
    );
    let mut connection = door.raw(head.as_bytes()).await;
    let mut start = [0; 12];
    let response = tokio::time::timeout(Duration::from_secs(20), connection.read_exact(&mut start)).await;
    assert!(response.is_ok_and(|read| read.is_ok()), "waits for the body");
    assert_eq!(start, *b"HTTP/1.1 403");
    let key = ("authorization", "Bearer k");
    let tier = door.post_with(PATH, r#"{"prompt":"a","service_tier":"gold"}"#, &[key]).await;
    assert_eq!((tier.status, tier.error().1.as_deref()), (403, Some("class_not_allowed")));
    assert_eq!(door.post_with(PATH, BODY, &[key]).await.status, 200);
    let submissions = door.backend.submissions.lock();
    assert_eq!(submissions.len(), 1);
    assert_eq!(submissions[0].class.as_deref(), Some("batch"), "the key's own where none is named");
    let errors = door.router.errors();
    assert_eq!((&*errors[0].reason, errors[0].status, errors[0].count), ("class_not_allowed", 403, 2));
}

#[tokio::test]
async fn errors_are_counted_by_status_and_reason() {
    let keys = vec![ApiKey { key: Secret::from("k"), tenant: None, classes: Vec::new() }];
    let door =
        open(RouterConfig { api_keys: keys.into(), ..RouterConfig::default() }, |_| text_script("x")).await;
    let key = [("authorization", "Bearer k")];
    for _ in 0..3 {
        assert_eq!(door.post_with(PATH, BODY, &[]).await.status, 401);
    }
    assert_eq!(door.post_with(PATH, "{", &key).await.status, 400);
    assert_eq!(door.post_with(PATH, r#"{"prompt":"a","n":0}"#, &key).await.status, 400);
    assert_eq!(door.post_with(PATH, BODY, &key).await.status, 200);
    let errors: Vec<_> =
        door.router.errors().iter().map(|e| (e.status, e.reason.to_string(), e.count)).collect();
    let kind = |status, reason: &str, count| (status, reason.to_owned(), count);
    assert_eq!(
        errors,
        [kind(400, "invalid", 1), kind(400, "invalid_json", 1), kind(401, "missing_api_key", 3)]
    );
}
