//! A policy that changes while the service serves: whole or not at all.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::service::{Service, chat, signal, until};

const CHAT: &str = "/v1/chat/completions";

fn config(ttft_us: u64) -> String {
    format!(
        "[scheduler]\nblock_tokens = 16\n\n[[scheduler.classes]]\nname = \"default\"\nttft_us = {ttft_us}\n"
    )
}

fn ttft_us(service: &Service) -> u64 {
    let config: Value = service.get("/admin/config").ok().json();
    config["scheduler"]["classes"][0]["ttft_us"].as_u64().unwrap()
}

/// Waits until the objective in force is `wanted`.
#[track_caller]
fn in_force(service: &Service, wanted: u64) {
    until(Duration::from_secs(10), "the policy is in force", || {
        let now = ttft_us(service);
        (now != wanted).then(|| format!("ttft_us is {now}, not {wanted}: {}", service.errors()))
    });
}

fn start() -> Service {
    Service::configured(&config(30_000_000), &["--engine", "zero", "--nodes", "1p1d", "--log", "info"])
}

#[test]
fn a_changed_file_is_followed_and_a_bad_one_changes_nothing() {
    let service = start();
    assert_eq!(ttft_us(&service), 30_000_000);
    let write = |text: &str| std::fs::write(service.path("baton.toml"), text).unwrap();
    write(&config(20_000_000));
    in_force(&service, 20_000_000);
    // Editors write another file and put it in the place of the old one.
    std::fs::write(service.path("new.toml"), config(21_000_000)).unwrap();
    std::fs::rename(service.path("new.toml"), service.path("baton.toml")).unwrap();
    in_force(&service, 21_000_000);
    for (bad, word) in [
        ("[scheduler]\npolicy = \"moncake\"\n", "moncake"),
        ("[[scheduler.classes]]\nname = \"default\"\nttft_us = 1\n", "ttft_us"),
        ("[service]\nheartbeat_us = 250000\n", "service.heartbeat_us"),
        ("not TOML at all", "baton.toml"),
    ] {
        let said =
            || service.errors().lines().filter(|l| l.contains("NOT applied") && l.contains(word)).count();
        write(bad);
        until(Duration::from_secs(10), "the bad file is named", || (said() == 0).then(|| service.errors()));
        assert_eq!(ttft_us(&service), 21_000_000, "after {bad}");
        service.ask(CHAT, &chat("still served", 2)).ok();
    }
    // SIGHUP reads the file even if it looks the same.
    write(&config(22_000_000));
    signal(service.pid(), Signal::HUP);
    in_force(&service, 22_000_000);
    signal(service.pid(), Signal::HUP);
    until(Duration::from_secs(10), "the same file is read again", || {
        (!service.errors().contains("nothing changed")).then(|| service.errors())
    });
}

#[test]
fn operators_change_the_policy_and_take_it_back() {
    let service = start();
    let post = |path: &str, body: &str| service.post(path, &[], body);
    let changed = post("/admin/policy", &config(9_000_000)).ok().json();
    assert!(changed["changed"][0].as_str().unwrap().contains("30000000 -> 9000000"), "{changed}");
    assert_eq!(ttft_us(&service), 9_000_000);
    for (bad, words) in [
        ("[[scheduler.classes]]\nttft_us = 1\n", "outside"),
        ("[scheduler]\nblock_tokens = 32\n", "block_tokens"),
        ("[service]\nheartbeat_us = 250000\n", "restart"),
        ("][", "TOML"),
    ] {
        let refused = post("/admin/policy", bad);
        assert_eq!(refused.status, 400, "{bad}: {refused:?}");
        refused.error_code();
        assert!(refused.text.contains(words), "{bad}: '{words}' is not said: {}", refused.text);
        assert_eq!(ttft_us(&service), 9_000_000, "after {bad}");
    }
    // An empty body reads the file, which still says what it said at the start.
    post("/admin/policy", "").ok();
    assert_eq!(ttft_us(&service), 30_000_000);
    post("/admin/policy/rollback", "").ok();
    assert_eq!(ttft_us(&service), 9_000_000);
    service.ask(CHAT, &chat("served under it", 2)).ok();
}

#[test]
fn without_a_change_there_is_nothing_to_take_back() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1b"]);
    for path in ["/admin/policy/rollback", "/admin/policy"] {
        let refused = service.post(path, &[], "");
        assert_eq!(refused.status, 400, "{path}: {refused:?}");
        refused.error_code();
    }
}
