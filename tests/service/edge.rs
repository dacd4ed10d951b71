//! The ports of the service: who is let in, what is counted there, and who may still read when it ends.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use super::http::OpenAnswer;
use super::service::{Service, chat, completion, signal, until};

const CHAT: &str = "/v1/chat/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

#[test]
fn a_web_page_does_not_operate_a_service_without_keys() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1b"]);
    let page = ("origin", "http://evil.example");
    for header in [page, ("origin", "null"), ("sec-fetch-site", "cross-site")] {
        let refused = service.post("/admin/nodes/b0/drain", &[header], "");
        assert_eq!(
            (refused.status, refused.json()["error"]["type"].as_str()),
            (403, Some("permission_error"))
        );
    }
    service.ask(CHAT, &chat("still served", 1)).ok();
    // Any page may ask for tokens where everybody may.
    service.post(CHAT, &[JSON, page], &chat("hello", 1).to_string()).ok();
    service.post("/admin/nodes/b0/drain", &[], "").ok();
}

#[test]
fn what_is_refused_at_the_door_is_counted() {
    let keys = "[scheduler]\nblock_tokens = 16\n[service]\nadmin_key = \"o\"\n\
        [[service.api_keys]]\nkey = \"k\"\ntenant = \"t\"\n\
        [[service.api_keys]]\nkey = \"l\"\ntenant = \"u\"\nclasses = [\"default\"]\n";
    let service = Service::configured(keys, &["--engine", "zero", "--nodes", "1b"]);
    let key = ("authorization", "Bearer k");
    let body = chat("Hello", 1).to_string();
    until(Duration::from_secs(20), "it is ready", || {
        let ready = service.get("/ready");
        (ready.status != 200).then_some(ready.text)
    });
    for _ in 0..3 {
        assert_eq!(service.post(CHAT, &[JSON], &body).status, 401);
    }
    assert_eq!(service.post(CHAT, &[JSON, key], "{").status, 400);
    let refused = service.post(CHAT, &[JSON, key, ("x-baton-class", "gold")], &body);
    assert_eq!((refused.status, refused.error_code().as_str()), (400, "unknown_class"));
    let limited = ("authorization", "Bearer l");
    let refused = service.post(CHAT, &[JSON, limited, ("x-baton-class", "gold")], &body);
    assert_eq!((refused.status, refused.error_code().as_str()), (403, "class_not_allowed"));
    assert!(refused.text.contains("it may use: default"), "{refused:?}");
    service.post(CHAT, &[JSON, limited], &body).ok();
    // Its class stays for as long as a key names it.
    let operator = ("authorization", "Bearer o");
    let dropped = service.post("/admin/policy", &[operator], "[[scheduler.classes]]\nname = \"gold\"");
    assert_eq!(dropped.status, 400);
    assert!(dropped.text.contains("service.api_keys[1].classes"), "{dropped:?}");
    assert_eq!(service.post("/admin/policy", &[key], "").status, 401);
    assert_eq!(service.get("/nothing").status, 404);
    let page = service.get("/metrics").ok().text;
    for series in [
        "baton_http_errors_total{status=\"401\",reason=\"missing_api_key\"} 3",
        "baton_http_errors_total{status=\"400\",reason=\"invalid_json\"} 1",
        "baton_http_errors_total{status=\"400\",reason=\"unknown_class\"} 1",
        "baton_http_errors_total{status=\"401\",reason=\"operators_only\"} 1",
        "baton_http_errors_total{status=\"403\",reason=\"class_not_allowed\"} 1",
        "baton_http_errors_total{status=\"404\",reason=\"unknown_path\"} 1",
        "baton_requests_refused_total{reason=\"unknown_class\"} 1",
    ] {
        assert!(page.contains(&format!("\n{series}\n")), "no {series} in {page}");
    }
}

/// The conductor has the whole answer when the signal comes; most of it is still to be read.
#[test]
fn a_client_that_reads_slowly_has_what_is_left_of_the_drain() {
    let mut service = Service::up(&["--engine", "zero", "--nodes", "1b"]);
    let tokens = 4_000;
    let mut body = completion("Hello", tokens);
    (body["stream"], body["logprobs"]) = (json!(true), json!(20));
    let mut open: OpenAnswer = service.open("/v1/completions", &body);
    open.event().unwrap().expect("the stream begins");
    until(Duration::from_secs(60), "the conductor is done", || {
        let status = service.status();
        (status["live_requests"] != 0).then(|| status.to_string())
    });
    signal(service.pid(), Signal::TERM);
    // Longer than processes that do not wait for it live.
    std::thread::sleep(Duration::from_secs(3));
    let (mut events, mut last) = (1, String::new());
    while let Some(data) = open.event().unwrap_or_else(|e| panic!("after {events} events: {e}")) {
        (events, last) = (events + 1, data);
    }
    assert_eq!(last, "[DONE]", "after {events} events");
    assert!(events > tokens as usize / 2, "{events}");
    assert_eq!(service.wait(Duration::from_secs(20)), Some(0));
}
