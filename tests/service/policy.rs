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

/// A file of `baton tune` says how many nodes to start, and is a service's policy all the same. What was set at the service
/// and not in the file is named when the file takes its place.
#[test]
fn sections_of_the_simulator_bar_no_change_and_what_is_undone_is_named() {
    let service = start();
    service.post("/admin/policy", &[], &config(9_000_000)).ok();
    let simulated = "[[cluster.pools]]\nrole = \"prefill\"\ncount = 1\n\n[clients]\nretries = 1\n";
    let tuned = format!("{}\n{simulated}", config(30_000_000)).replace("= 16\n", "= 16\nmax_retries = 7\n");
    let checked = service.post("/admin/policy/check", &[], &tuned).ok().json();
    assert!(!checked.to_string().contains("pools"), "{checked}");
    std::fs::write(service.path("baton.toml"), &tuned).unwrap();
    in_force(&service, 30_000_000);
    until(Duration::from_secs(10), "what is undone is named", || {
        let lines = service.errors();
        let named = lines.lines().find(|line| line.contains("replaced what was set otherwise"));
        let right = named.is_some_and(|line| line.contains("ttft_us") && !line.contains("max_retries"));
        (!right).then_some(lines)
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

fn classes(with_batch: bool, retries: u32) -> String {
    let batch = "[[scheduler.classes]]\nname = \"batch\"\nttft_us = 30000000\n";
    format!(
        "[scheduler]\nblock_tokens = 16\nmax_retries = {retries}\n\n[[scheduler.classes]]\nname = \"interactive\"\n\
         ttft_us = 2000000\n{}",
        if with_batch { batch } else { "" }
    )
}

/// Truncated, written in two steps with a pause, emptied: the settings in force stay, and the service reports the
/// error.
#[test]
fn a_half_written_file_is_never_in_force() {
    let service =
        Service::configured(&classes(true, 2), &["--engine", "zero", "--nodes", "1p1d", "--log", "info"]);
    let batch = || {
        let headers = [("content-type", "application/json"), ("x-baton-class", "batch")];
        service.post(CHAT, &headers, &chat("still served", 2).to_string()).status
    };
    assert_eq!(batch(), 200);
    let write = |text: &str| std::fs::write(service.path("baton.toml"), text).unwrap();
    let said = |word: &str, times: usize| {
        until(Duration::from_secs(20), "the refusal is said", || {
            let lines = service.errors();
            let refused = lines.lines().filter(|line| line.contains("NOT applied") && line.contains(word));
            (refused.count() < times).then_some(lines)
        });
        assert_eq!(batch(), 200, "after: {word}");
    };
    // The beginning of the file in force, as a full disk leaves it.
    let whole = classes(true, 2);
    write(&whole[..whole.rfind("[[scheduler.classes]]").unwrap()]);
    said("ends early", 1);
    write("");
    said("ends early", 2);
    // The beginning of another one.
    write(&classes(false, 3));
    said("service class batch", 1);
    // In two steps: what stands still for less than a while is not read.
    let next = classes(true, 5);
    let (begin, rest) = next.split_at(next.rfind("[[scheduler.classes]]").unwrap());
    write(begin);
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_millis(1_000) {
        assert_eq!(batch(), 200, "half of the file is written");
    }
    write(&format!("{begin}{rest}"));
    until(Duration::from_secs(20), "the whole file is in force", || {
        let config: Value = service.get("/admin/config").ok().json();
        (config["scheduler"]["max_retries"] != 5).then(|| service.errors())
    });
    assert_eq!(batch(), 200);
    // An operator may mean it. A class goes only when no request of it is live, and an answer ends a moment after its
    // client has it.
    service.quiet(Duration::from_secs(10));
    write(&classes(false, 3));
    signal(service.pid(), Signal::HUP);
    // A request of the class would keep it.
    until(Duration::from_secs(20), "the confirmed file is in force", || {
        let config: Value = service.get("/admin/config").ok().json();
        (config["scheduler"]["max_retries"] != 3).then(|| service.errors())
    });
    assert_eq!(batch(), 400);
}

/// `baton policy` with the address of a service: exit code, standard output, standard error.
fn policy(service: &Service, words: &[&str]) -> (Option<i32>, String, String) {
    let url = format!("http://{}", service.clients);
    super::service::run(service.folder(), &[&["policy"], words, &["--url", &url]].concat())
}

#[track_caller]
fn policy_ok(service: &Service, words: &[&str]) -> String {
    let (code, said, why) = policy(service, words);
    assert_eq!(code, Some(0), "{words:?}: {said}{why}");
    said
}

#[test]
fn one_setting_is_changed_compared_and_taken_back_from_the_command_line() {
    let service =
        Service::configured(&classes(true, 2), &["--engine", "zero", "--nodes", "1p1d", "--log", "info"]);
    let shown = policy_ok(&service, &["show"]);
    assert!(shown.starts_with("# revision 1\n") && shown.contains("\nttft = \"2s\"\n"), "{shown}");
    assert!(shown.contains("\nname = \"batch\"\n"), "{shown}");
    let same = policy_ok(&service, &["diff"]);
    assert!(same.contains("nothing differs from revision 1"), "{same}");
    let tried = policy_ok(&service, &["set", "class.interactive.ttft=1.5s", "--dry-run"]);
    assert!(tried.contains("class.interactive.ttft: \"2s\" -> \"1.5s\""), "{tried}");
    assert_eq!(ttft_us(&service), 2_000_000, "{tried}");
    let set = policy_ok(&service, &["set", "class.interactive.ttft=1.5s", "max_retries=4"]);
    assert!(set.contains("max_retries: 2 -> 4") && set.contains("revision 2 is in force"), "{set}");
    assert_eq!(ttft_us(&service), 1_500_000);
    let again = policy_ok(&service, &["set", "max_retries=4"]);
    assert!(again.contains("nothing changes: revision 2"), "{again}");
    let differs = policy_ok(&service, &["diff"]);
    assert!(differs.contains("class.interactive.ttft: \"1.5s\" -> \"2s\""), "{differs}");
    // What it shows is a file that says the same.
    std::fs::write(service.path("shown.toml"), policy_ok(&service, &["show"])).unwrap();
    let same = policy_ok(&service, &["diff", "shown.toml"]);
    assert!(same.contains("nothing differs from revision 2"), "{same}");
    std::fs::write(service.path("other.toml"), "[scheduler]\nblock_tokens = 32\n").unwrap();
    let differs = policy_ok(&service, &["diff", "other.toml"]);
    assert!(differs.contains("block_tokens: 16 -> 32 (takes a restart)"), "{differs}");
    for (revision, ttft, there) in
        [(3, "\"1.5s\" -> \"2s\"", 2_000_000), (4, "\"2s\" -> \"1.5s\"", 1_500_000)]
    {
        let back = policy_ok(&service, &["rollback"]);
        assert!(back.contains(ttft) && back.contains(&format!("revision {revision} is in force")), "{back}");
        assert_eq!(ttft_us(&service), there);
    }
    for (words, told) in [
        (&["set", "class.interactive.ttf=1s"][..], "did you mean class.interactive.ttft?"),
        (&["set", "class.gold.ttft=1s"], "there are: interactive, batch"),
        (&["set", "class.batch.ttft=soon"], "give a time with its unit"),
        (&["set", "block_tokens=32"], "restart"),
        (&["set", "class.batch.ttft=1s", "max_retries=17"], "max_retries = 17 is outside"),
        (&["diff", "none.toml"], "none.toml"),
    ] {
        let (code, said, why) = policy(&service, words);
        assert!(code == Some(1) && said.is_empty() && why.contains(told), "{words:?}: {said}{why}");
    }
    assert!(policy_ok(&service, &["show"]).starts_with("# revision 4\n"), "wrong changes are none");
    service.ask(CHAT, &chat("served under it", 2)).ok();
}

#[test]
fn a_change_made_from_an_older_policy_is_refused() {
    let service = start();
    let read = service.get("/admin/policy").ok();
    let tag = read.header("etag").expect("a tag").to_owned();
    let change =
        |ttft_us: u64, tag: &str| service.post("/admin/policy", &[("if-match", tag)], &config(ttft_us));
    let changed = change(9_000_000, &tag).ok().json();
    assert_eq!(changed["revision"], 2, "{changed}");
    for path in ["/admin/policy", "/admin/policy/rollback"] {
        let refused = service.post(path, &[("if-match", &tag)], &config(8_000_000));
        assert_eq!(refused.status, 412, "{path}: {refused:?}");
        assert!(refused.text.contains("revision 2 is in force"), "{refused:?}");
        refused.error_code();
    }
    assert_eq!(ttft_us(&service), 9_000_000);
    // As it was before, and yet another revision.
    service.post("/admin/policy/rollback", &[], "").ok();
    assert_eq!(change(8_000_000, &tag).status, 412);
    assert_eq!(change(8_000_000, "*").status, 200);
}

#[test]
fn operators_without_the_key_or_the_address_learn_what_to_give() {
    let service =
        Service::configured("[service]\nadmin_key = \"sesame\"\n", &["--engine", "zero", "--nodes", "1b"]);
    for words in [&["show"][..], &["set", "max_retries=1"], &["diff"], &["rollback"]] {
        for more in [&[][..], &["--key", "wrong"]] {
            let (code, _, why) = policy(&service, &[words, more].concat());
            assert!(code == Some(1) && why.contains("policy:") && why.contains("BATON_ADMIN_KEY"), "{why}");
        }
    }
    policy_ok(&service, &["set", "max_retries=1", "--key", "sesame"]);
    let gone = super::service::run(service.folder(), &["policy", "show", "--url", "http://127.0.0.1:1"]);
    assert!(
        gone.0 == Some(1) && gone.2.contains("policy: http://127.0.0.1:1") && gone.2.contains("--url"),
        "{gone:?}"
    );
}

/// The service names a setting that only a restart can change, and applies nothing else of that file.
#[test]
fn a_change_that_takes_a_restart_is_said() {
    let service = start();
    let moved = format!("{}\n[service]\nlisten = \"127.0.0.1:9\"\n", config(20_000_000));
    std::fs::write(service.path("baton.toml"), moved).unwrap();
    until(Duration::from_secs(20), "the setting is named", || {
        (!service.errors().contains("restart to change service.listen")).then(|| service.errors())
    });
    assert_eq!(ttft_us(&service), 30_000_000);
}

/// A file or a body that is larger than any policy is refused unread, and costs no node.
#[test]
fn a_policy_of_megabytes_costs_no_node() {
    let service = start();
    let huge = "x = 1\n".repeat(1_000_000);
    std::fs::write(service.path("baton.toml"), &huge).unwrap();
    let refused = service.post("/admin/policy", &[], &huge);
    assert_eq!(refused.status, 413, "{refused:?}");
    assert!(refused.text.contains("bytes"), "{}", refused.text);
    until(Duration::from_secs(20), "the file is refused", || {
        let lines = service.errors();
        let there = lines.lines().any(|line| line.contains("NOT applied") && line.contains("bytes"));
        (!there).then_some(lines)
    });
    let nodes = service.status()["nodes"].clone();
    let lives: Vec<_> = nodes.as_array().unwrap().iter().map(|node| node["epoch"].as_u64()).collect();
    assert_eq!(lives, [Some(1), Some(1)]);
    service.ask(CHAT, &chat("still served", 2)).ok();
}

/// A class that live requests are of keeps its place until they are done. A file that moves it is tried again until then.
#[test]
fn a_file_that_live_requests_refuse_is_applied_when_they_are_done() {
    let of = |names: &[&str]| {
        let classes = names.iter().map(|name| format!("\n[[scheduler.classes]]\nname = \"{name}\"\n"));
        format!("[scheduler]\nblock_tokens = 16\n{}", classes.collect::<String>())
    };
    let service =
        Service::configured(&of(&["x", "y"]), &["--engine", "timed", "--nodes", "1p1d", "--log", "info"]);
    let mut asked = chat("tell me all of it", 3_000);
    asked["stream"] = true.into();
    let mut open = service.open(CHAT, &asked);
    open.event().unwrap();
    std::fs::write(service.path("baton.toml"), of(&["z", "x", "y"])).unwrap();
    let refused = || service.errors().lines().filter(|line| line.contains("keep the order")).count();
    until(Duration::from_secs(10), "it is refused", || (refused() == 0).then(|| service.errors()));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(refused(), 1, "it is said once: {}", service.errors());
    drop(open);
    until(Duration::from_secs(10), "the file is in force", || {
        let config: Value = service.get("/admin/config").ok().json();
        (config["scheduler"]["classes"][0]["name"] != "z").then(|| service.errors())
    });
}
