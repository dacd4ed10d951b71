//! The page at `/`: what a browser is sent, what it may do, and what it is not shown without the key.

use std::time::Duration;

use serde_json::Value;

use super::service::{Service, chat, until};

const KEYS: &str = "[scheduler]\nblock_tokens = 16\n[service]\nadmin_key = \"sesame\"\n";
const OPERATOR: (&str, &str) = ("authorization", "Bearer sesame");
/// Bytes of the whole page at most.
const PAGE_BYTES: usize = 200_000;

/// A call as the page itself makes it, from the address that this service is reached at.
fn of_the_page(service: &Service) -> [(&'static str, String); 2] {
    [("origin", format!("http://{}", service.clients)), ("sec-fetch-site", "same-origin".into())]
}

#[test]
fn a_browser_is_sent_a_small_page_that_loads_nothing_from_elsewhere() {
    let service = Service::configured(KEYS, &["--engine", "zero", "--nodes", "1b"]);
    let files = [
        ("/", "text/html; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/page.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ];
    let mut bytes = 0;
    for (path, kind) in files {
        let file = service.get(path).ok();
        bytes += file.text.len();
        assert_eq!(file.header("content-type"), Some(kind), "{path}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"), "{path}");
        let policy = file.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'self';") && !policy.contains("unsafe"), "{path}: {policy}");
        let tag = file.header("etag").unwrap();
        let again = super::http::call(service.clients, &format!("GET {path}"), &[("if-none-match", tag)], "");
        let again = again.unwrap();
        assert_eq!((again.status, again.text.as_str(), again.header("etag")), (304, "", Some(tag)), "{path}");
        for elsewhere in ["http://", "https://"] {
            let links = file.text.matches(elsewhere).count();
            let names = file.text.matches("http://www.w3.org/2000/svg").count();
            assert!(elsewhere == "https://" && links == 0 || links == names, "{path} has {elsewhere}");
        }
    }
    assert!(bytes <= PAGE_BYTES, "{bytes} bytes");
    let page = service.get("/").text;
    assert!(!page.contains("<script>") && !page.contains("style=") && !page.contains(" onclick"), "{page}");
    for path in ["/page/", "/page/page.html", "/index.html"] {
        assert_eq!(service.get(path).status, 404, "{path}");
    }
    assert_eq!(service.post("/", &[], "").status, 404);
}

#[test]
fn without_the_key_the_page_has_nothing_of_the_cluster() {
    let service = Service::configured(KEYS, &["--engine", "zero", "--nodes", "1b"]);
    for key in ["", "Bearer wrong", "sesame"] {
        let key = ("authorization", key);
        for call in ["GET /admin/page", "GET /admin/policy", "POST /admin/policy/check"] {
            let refused = super::http::call(service.clients, call, &[key], "").unwrap();
            assert_eq!(refused.status, 401, "{call}: {refused:?}");
            assert!(!refused.text.contains("b0") && !refused.text.contains("ttft"), "{refused:?}");
        }
    }
    assert!(!service.get("/").text.contains("b0"));
    let shown = super::http::call(service.clients, "GET /admin/page", &[OPERATOR], "").unwrap().ok();
    assert!(shown.text.contains("\"b0\"") && !shown.text.contains("sesame"), "{shown:?}");
}

#[test]
fn without_any_key_the_own_page_operates_a_service_and_no_other_site_does() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1b"]);
    let own = of_the_page(&service);
    let own = own.each_ref().map(|(name, value)| (*name, value.as_str()));
    service.post("/admin/policy/check", &own, "[scheduler]\nmax_retries = 1").ok();
    for (path, headers) in [
        ("/admin/policy/check", [own[0], ("sec-fetch-site", "cross-site")].as_slice()),
        ("/admin/policy/check", &[("origin", "http://evil.example"), own[1]]),
        ("/admin/policy", &[("origin", "http://127.0.0.1:1"), ("sec-fetch-site", "same-site")]),
        ("/admin/policy/rollback", &[("origin", "null")]),
    ] {
        let refused = service.post(path, headers, "");
        assert_eq!(refused.status, 403, "{headers:?}: {refused:?}");
    }
}

#[test]
fn viewers_share_a_status_of_a_second_at_most() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1b"]);
    let uptime = || service.get("/admin/page").ok().json()["uptime_us"].as_u64().unwrap();
    let first = uptime();
    let looks: Vec<u64> = (0..20).map(|_| uptime()).collect();
    // Twenty looks take far less than twenty seconds.
    let fresh = looks.iter().filter(|look| **look != first).collect::<std::collections::BTreeSet<_>>().len();
    assert!(fresh < 10, "{looks:?}");
    until(Duration::from_secs(20), "a later look is fresh", || {
        (uptime() == first).then(|| first.to_string())
    });
    service.ask("/v1/chat/completions", &chat("hello", 1)).ok();
    until(Duration::from_secs(20), "it is counted", || {
        let status = service.get("/admin/page").ok().json();
        let last = status["slo"][0]["last_15m"][14].clone();
        (last != serde_json::json!([1, 1]) && status["slo"][0]["last_15m"][13] != last)
            .then(|| status.to_string())
    });
}

#[test]
fn a_policy_is_checked_without_a_change_and_what_is_in_force_can_be_sent_back() {
    let service = Service::configured(KEYS, &["--engine", "zero", "--nodes", "1b"]);
    let call = |what: &str, body: &str| super::http::call(service.clients, what, &[OPERATOR], body).unwrap();
    let in_force = || call("GET /admin/policy", "").ok().text;
    let before = in_force();
    let changes = |what: &str, text: &str| -> Value { call(what, text).ok().json()["changed"].clone() };
    assert_eq!(changes("POST /admin/policy/check", &before), serde_json::json!([]));
    let edited = before.replace("max_retries = 2", "max_retries = 3");
    assert_ne!(edited, before, "{before}");
    let expected = serde_json::json!(["scheduler.max_retries: 2 -> 3"]);
    assert_eq!(changes("POST /admin/policy/check", &edited), expected);
    assert_eq!(in_force(), before, "a check changes nothing");
    for (wrong, named) in [
        ("[scheduler]\nmax_retries = 99", "max_retries = 99"),
        ("[scheduler]\nblock_tokens = 64", "scheduler.block_tokens"),
        ("[scheduler]\nmax_retris = 1", "max_retris"),
    ] {
        let refused = call("POST /admin/policy/check", wrong);
        assert_eq!(refused.status, 400);
        assert!(refused.text.contains(named), "{refused:?}");
    }
    assert_eq!(changes("POST /admin/policy", &edited), expected);
    assert_eq!(in_force(), edited);
    changes("POST /admin/policy/rollback", "");
    assert_eq!(in_force(), before);
}

#[test]
fn a_decision_is_explained_whatever_its_client_called_it() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1b"]);
    let id = ("x-request-id", "<b>/100%/a?b#c");
    let json = ("content-type", "application/json");
    service.post("/v1/chat/completions", &[json, id], &chat("hello", 1).to_string()).ok();
    let told = service.get("/admin/explain/%3Cb%3E%2F100%25%2Fa%3Fb%23c").ok().json();
    assert_eq!(told["request_id"], id.1);
}
