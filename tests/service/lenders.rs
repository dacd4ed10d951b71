//! Nodes without an engine: what the others are about to lose goes there and comes back from there, and without
//! them every answer is the same.

use std::fs::File;
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::service::{Service, baton, completion, signal, until};

const PATH: &str = "/v1/completions";
const LONG: Duration = Duration::from_secs(60);
/// Prompts of 25 blocks each: two fit in a node.
const PROMPTS: usize = 8;
const SMALL: [&str; 6] = ["--blocks", "64", "--dram-blocks", "0", "--ssd-blocks", "0"];

/// A lending node's process, which ends with this.
pub(super) struct Lender(Child);

impl Drop for Lender {
    fn drop(&mut self) {
        // It may have been killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn lender(service: &Service, name: &str, room: &[&str]) -> Lender {
    let mut command = baton(service.folder());
    let err = File::create(service.path(&format!("{name}.err"))).unwrap();
    command.args(["node", "--name", name, "--role", "store", "--conductor", &service.control]).args(room);
    let child = command.stderr(err).spawn().unwrap();
    until(LONG, "the lender attaches", || {
        let status = service.status();
        node(&status, name).is_none().then(|| status.to_string())
    });
    Lender(child)
}

fn node<'a>(status: &'a Value, name: &str) -> Option<&'a Value> {
    status["nodes"].as_array()?.iter().find(|node| node["name"] == name)
}

fn prompt(at: usize) -> String {
    let letter = char::from(b'a' + u8::try_from(at).unwrap());
    format!("{letter}, says the runner of lane {at}, {}", "keep the baton warm; ".repeat(18))
}

fn answer(service: &Service, at: usize) -> String {
    let reply = service.ask(PATH, &completion(&prompt(at), 6)).ok().json();
    reply["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn answers(service: &Service) -> Vec<String> {
    (0..PROMPTS).map(|at| answer(service, at)).collect()
}

/// A counter of `/metrics`.
fn counted(service: &Service, what: &str) -> u64 {
    let page = service.get("/metrics").ok().text;
    let line = page.lines().find_map(|line| line.strip_prefix(what).map(str::trim).map(str::to_owned));
    line.map_or(0, |value| value.parse().unwrap())
}

const LENT: &str = "baton_fetches_total{source=\"store\"}";
const SAVED: &str = "baton_copies_total{target=\"store\"}";

#[test]
fn what_falls_out_of_small_caches_comes_back_from_a_store_node() {
    let service = Service::up(&[&["--nodes", "1p1d"][..], &SMALL].concat());
    let mut lender = lender(&service, "s0", &["--dram-blocks", "512", "--ssd-blocks", "0"]);
    let first = answers(&service);
    until(LONG, "chains are saved", || (counted(&service, SAVED) < 2).then(|| service.status().to_string()));
    until(LONG, "answers come back from the lender", || {
        assert_eq!(answers(&service), first, "whatever was fetched, it was the same KV");
        (counted(&service, LENT) == 0).then(|| service.status().to_string())
    });
    let status = service.status();
    let s0 = node(&status, "s0").unwrap();
    assert_eq!((s0["role"].as_str(), s0["running"].as_u64()), (Some("store"), Some(0)), "{s0}");
    assert!(status["counters"]["lent_fetches"].as_u64() > Some(0), "{status}");
    let told = s0["tiers"].as_array().unwrap();
    assert!(told.iter().all(|tier| tier[0] != "hbm"), "{s0}");
    assert!(told.iter().any(|tier| tier[0] == "dram" && tier[1].as_u64() > Some(0)), "{s0}");
    let refused = service.post("/admin/nodes/s0/role/prefill", &[], "");
    assert!(refused.status >= 400 && refused.text.contains("no engine"), "{refused:?}");
    // Drained, it lends still; it takes nothing more.
    service.post("/admin/nodes/s0/drain", &[], "").ok();
    let saved = counted(&service, SAVED);
    assert_eq!(answers(&service), first);
    assert_eq!(counted(&service, SAVED), saved, "nothing is saved on who is leaving");
    service.post("/admin/nodes/s0/resume", &[], "").ok();
    // It dies in the middle: every answer is whole, and the same.
    let service = Arc::new(service);
    let asking = {
        let service = Arc::clone(&service);
        std::thread::spawn(move || [answers(&service), answers(&service)])
    };
    std::thread::sleep(Duration::from_millis(100));
    signal(lender.0.id(), Signal::KILL);
    lender.0.wait().unwrap();
    assert_eq!(asking.join().unwrap(), [first.clone(), first.clone()]);
    until(LONG, "it is missed", || {
        let status = service.status();
        node(&status, "s0").is_some().then(|| status.to_string())
    });
    assert_eq!(answers(&service), first);
    service.quiet(LONG);
    let counters = service.status()["counters"].clone();
    assert_eq!(counters["failed"], 0, "{counters}");
}

/// The whole of it from one command.
#[test]
fn up_starts_store_nodes_beside_the_others() {
    let service = Service::up(&["--nodes", "1p1d2s", "--processes"]);
    until(LONG, "all attach", || {
        let status = service.status();
        let attached = ["p0", "d0", "s0", "s1"].iter().all(|name| node(&status, name).is_some());
        (!attached).then(|| status.to_string())
    });
    assert_eq!(node(&service.status(), "s1").unwrap()["role"], "store");
    assert_eq!(answer(&service, 0), answer(&service, 0));
}

/// Memory for three prompts, flash for all: what was lent comes from flash, and is the same.
#[test]
fn a_store_node_lends_flash_behind_little_memory() {
    let service = Service::up(&[&["--nodes", "1p1d"][..], &SMALL].concat());
    let _lender = lender(&service, "s0", &["--dram-blocks", "80", "--ssd-blocks", "512", "--data", "flash"]);
    let first = answers(&service);
    until(LONG, "blocks rest on the lender's flash", || {
        assert_eq!(answers(&service), first);
        let status = service.status();
        let tiers = node(&status, "s0").unwrap()["tiers"].clone();
        let ssd = tiers.as_array().unwrap().iter().find(|tier| tier[0] == "ssd").cloned();
        let used = ssd.map_or(0, |tier| tier[1].as_u64().unwrap());
        (used < 100 || counted(&service, LENT) < 2).then(|| status.to_string())
    });
    service.quiet(LONG);
}
