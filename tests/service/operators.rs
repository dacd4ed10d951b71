//! Actions of operators on nodes while clients are served: drain, resume, change of role, explanation of a placement.

use std::time::Duration;

use serde_json::{Value, json};

use super::service::{Service, chat, until};

const CHAT: &str = "/v1/chat/completions";

fn node(service: &Service, name: &str) -> Value {
    let status = service.status();
    let nodes = status["nodes"].as_array().unwrap();
    nodes.iter().find(|node| node["name"] == name).unwrap_or_else(|| panic!("no {name}: {status}")).clone()
}

fn attached(service: &Service, count: usize) {
    until(Duration::from_secs(20), "every node is attached", || {
        let status = service.status();
        (status["nodes"].as_array().unwrap().len() != count).then(|| status.to_string())
    });
}

#[test]
fn a_drained_node_ends_its_work_and_takes_no_more() {
    let service = Service::up(&["--engine", "timed", "--nodes", "1p2d"]);
    attached(&service, 3);
    let post = |path: &str| service.post(path, &[], "");
    let mut body = chat("Hello", 40);
    body["stream"] = json!(true);
    // Both decode instances have a stream before the drain.
    let mut streams: Vec<_> = (0..4).map(|_| service.open(CHAT, &body)).collect();
    streams.iter_mut().for_each(|open| drop(open.event().unwrap().expect("the stream begins")));
    assert_eq!(post("/admin/nodes/d0/drain").ok().json()["changed"], json!(["d0: draining"]));
    assert_ne!(node(&service, "d0")["state"], "serving");
    for _ in 0..4 {
        service.ask(CHAT, &chat("while it drains", 2)).ok();
    }
    for open in &mut streams {
        let mut last = String::new();
        while let Some(data) = open.event().unwrap() {
            last = data;
        }
        assert_eq!(last, "[DONE]");
    }
    until(Duration::from_secs(5), "it is drained", || {
        let node = node(&service, "d0");
        (node["state"] != "drained").then(|| node.to_string())
    });
    let handed = node(&service, "d1")["tiers"].clone();
    for at in 0..3 {
        service.ask(CHAT, &chat(&format!("{at} goes to the other one, and is longer than a block"), 20)).ok();
    }
    until(Duration::from_secs(5), "the other one worked", || {
        (node(&service, "d1")["tiers"] == handed).then(|| handed.to_string())
    });
    assert_eq!(node(&service, "d0")["state"], "drained");
    // Without any decode instance nothing can be served, and the answer says so.
    post("/admin/nodes/d1/drain").ok();
    let refused = service.ask(CHAT, &chat("nowhere to go", 1));
    assert_eq!(refused.status, 503, "{refused:?}");
    refused.error_code();
    assert_eq!(service.get("/ready").status, 503);
    post("/admin/nodes/d0/resume").ok();
    until(Duration::from_secs(10), "it is ready again", || {
        let ready = service.get("/ready");
        (ready.status != 200).then_some(ready.text)
    });
    service.ask(CHAT, &chat("back again", 2)).ok();
}

#[test]
fn a_node_plays_another_part_when_told() {
    let service = Service::up(&["--engine", "zero", "--nodes", "2p1d"]);
    attached(&service, 3);
    let post = |path: &str| service.post(path, &[], "");
    let expected = service.ask(CHAT, &chat("the same answer", 8)).ok().json()["choices"].clone();
    assert_eq!(post("/admin/nodes/p1/role/decode").ok().json()["changed"], json!(["p1: decode"]));
    assert_eq!(node(&service, "p1")["role"], "decode");
    post("/admin/nodes/d0/drain").ok();
    // Only the node in its new part can have decoded this.
    let answer = service.ask(CHAT, &chat("the same answer", 8)).ok().json()["choices"].clone();
    assert_eq!(answer, expected);
    post("/admin/nodes/p1/role/both").ok();
    post("/admin/nodes/p0/drain").ok();
    let answer = service.ask(CHAT, &chat("the same answer", 8)).ok().json()["choices"].clone();
    assert_eq!(answer, expected, "one node in both parts");
    service.quiet(Duration::from_secs(5));
    for (path, word) in [
        ("/admin/nodes/p9/drain", "p0"),
        ("/admin/nodes/p9/role/decode", "p0"),
        ("/admin/nodes/p0/role/chef", "prefill"),
    ] {
        let refused = post(path);
        assert_eq!(refused.status, 400, "{path}: {refused:?}");
        refused.error_code();
        assert!(refused.text.contains(word), "{path}: {}", refused.text);
    }
    let unknown = post("/admin/nowhere");
    assert_eq!((unknown.status, unknown.error_code().as_str()), (404, "unknown_path"));
}

#[test]
fn why_a_request_went_where_it_went_can_be_asked() {
    let service = Service::up(&["--engine", "zero", "--nodes", "2p1d"]);
    attached(&service, 3);
    let headers = [("content-type", "application/json"), ("x-request-id", "why-me")];
    let reply = service.post(CHAT, &headers, &chat("Hello", 2).to_string()).ok();
    assert_eq!(reply.header("x-request-id"), Some("why-me"));
    let told = service.get("/admin/explain/why-me").ok().json();
    let candidates = told["decisions"][0]["candidates"].as_array().unwrap().clone();
    // A decode instance may prefill for its own decode, so the conductor weighs it, too.
    assert_eq!(candidates.len(), 3, "{told}");
    assert_eq!(candidates.iter().filter(|c| c["chosen"] == true).count(), 1, "{told}");
    assert_eq!(service.get("/admin/explain/nobody").status, 404);
    // Nodes know a request by its number, and log that.
    let number = &told["decisions"][0]["number"];
    let by_number = service.get(&format!("/admin/explain/{number}")).ok().json();
    assert_eq!((&by_number["request_id"], &by_number["decisions"]), (&"why-me".into(), &told["decisions"]));
}
