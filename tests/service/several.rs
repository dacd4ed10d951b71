//! Several conductors over an etcd: one leads and has the nodes; when it is gone, another does.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use super::http;
use super::service::{baton, chat, completion, run, signal, until};

const LONG: Duration = Duration::from_secs(60);

/// A process that ends with this.
pub(super) struct RunningProcess(pub(super) Child);

impl Drop for RunningProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub(super) fn start(mut command: Command, place: &Path, name: &str) -> RunningProcess {
    let out = |end: &str| File::create(place.join(format!("{name}.{end}"))).unwrap();
    command.stdout(out("out")).stderr(out("err")).stdin(Stdio::null());
    let child = command.spawn();
    RunningProcess(
        child.unwrap_or_else(|e| panic!("{name}: {e}; scripts/ready.sh etcd installs what is missing")),
    )
}

/// An etcd of these addresses; what it has been given is in the folder.
pub(super) fn etcd_at(place: &Path, clients: &str, peers: &str) -> Command {
    let mut command = Command::new("etcd");
    command
        .args(["--name", "one", "--listen-client-urls", clients, "--advertise-client-urls", clients])
        .args(["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers])
        .args(["--initial-cluster", &format!("one={peers}"), "--data-dir"])
        .arg(place.join("etcd"));
    command
}

/// Two addresses for an etcd.
pub(super) fn addresses() -> [String; 2] {
    [(); 2].map(|()| format!("http://127.0.0.1:{}", free_port()))
}

/// Waits until an etcd listens.
pub(super) fn listens(clients: &str) {
    let address = clients.trim_start_matches("http://");
    until(LONG, "etcd listens", || std::net::TcpStream::connect(address).err().map(|e| e.to_string()));
}

fn etcd(place: &Path) -> (RunningProcess, String) {
    let [clients, peers] = addresses();
    let running = start(etcd_at(place, &clients, &peers), place, "etcd-server");
    listens(&clients);
    (running, clients)
}

/// A conductor; where its clients are served.
fn conductor(place: &Path, etcd: &str, name: &str) -> (RunningProcess, std::net::SocketAddr) {
    let (clients, control) = (free_port(), free_port());
    let mut command = baton(place);
    command
        .args([
            "serve",
            "--listen",
            &format!("127.0.0.1:{clients}"),
            "--control",
            &format!("127.0.0.1:{control}"),
        ])
        .args(["--etcd", etcd, "--cluster", "several", "--name", name]);
    (start(command, place, name), std::net::SocketAddr::from(([127, 0, 0, 1], clients)))
}

fn node(place: &Path, etcd: &str, name: &str, role: &str) -> RunningProcess {
    let mut command = baton(place);
    command.args(["node", "--name", name, "--role", role, "--engine", "zero"]).args([
        "--etcd",
        etcd,
        "--cluster",
        "several",
    ]);
    start(command, place, name)
}

pub(super) fn ready(at: std::net::SocketAddr) -> Option<u16> {
    http::call(at, "GET /ready", &[], "").ok().map(|reply| reply.status)
}

#[test]
fn when_the_leading_conductor_is_killed_the_nodes_go_to_the_next() {
    let place = TempDir::new().unwrap();
    let (etcd, endpoint) = etcd(place.path());
    let (first, at_first) = conductor(place.path(), &endpoint, "first");
    let _nodes =
        [node(place.path(), &endpoint, "p0", "prefill"), node(place.path(), &endpoint, "d0", "decode")];
    let log = |name: &str| std::fs::read_to_string(place.path().join(format!("{name}.err"))).unwrap();
    let waits = |at, name: &'static str| {
        until(LONG, name, || (ready(at) != Some(200)).then(|| format!("{:?} {}", ready(at), log(name))));
    };
    waits(at_first, "first");
    let (mut second, at_second) = conductor(place.path(), &endpoint, "second");
    until(LONG, "the second serves", || ready(at_second).is_none().then(|| log("second")));
    assert_eq!(ready(at_second), Some(503), "it does not lead");
    for (at, shown) in [(at_first, 1), (at_second, 0)] {
        let page = http::call(at, "GET /metrics", &[], "").unwrap().ok().text;
        for line in [format!("\nbaton_ready {shown}\n"), format!("\nbaton_leads {shown}\n")] {
            assert!(page.contains(&line), "{line} is not in {page}");
        }
    }
    signal(first.0.id(), Signal::KILL);
    waits(at_second, "second");
    let asked = chat("hello", 4).to_string();
    let json = [("content-type", "application/json")];
    http::call(at_second, "POST /v1/chat/completions", &json, &asked).unwrap().ok();
    // A leader that cannot renew its lease stops before it ends: another may have it by then.
    drop(etcd);
    until(LONG, "the second stops", || second.0.try_wait().unwrap().is_none().then(|| log("second")));
    assert!(log("second").contains("no longer leads: its lease could not be renewed"), "{}", log("second"));
}

/// The text of a stream so far, whether the stream said that it is whole, and the error at its end.
fn rest_of(mut stream: http::OpenAnswer, mut text: String) -> (String, bool, String) {
    loop {
        match stream.event() {
            Ok(Some(data)) if data == "[DONE]" => return (text, true, String::new()),
            Ok(Some(data)) => {
                let event: serde_json::Value = serde_json::from_str(&data).unwrap();
                if !event["error"].is_null() {
                    return (text, false, data);
                }
                text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
            }
            Ok(None) => return (text, false, "it ended".into()),
            Err(why) => return (text, false, why),
        }
    }
}

#[test]
fn a_leader_that_slept_past_its_lease_orders_nothing_when_it_wakes() {
    let place = TempDir::new().unwrap();
    let (_etcd, endpoint) = etcd(place.path());
    let (mut first, at_first) = conductor(place.path(), &endpoint, "first");
    let _nodes = [("p0", "prefill"), ("d0", "decode")].map(|(name, role)| {
        let mut command = baton(place.path());
        command.args(["node", "--name", name, "--role", role, "--etcd", &endpoint, "--cluster", "several"]);
        start(command, place.path(), name)
    });
    let log = |name: &str| std::fs::read_to_string(place.path().join(format!("{name}.err"))).unwrap();
    let waits = |at, name: &'static str| {
        until(LONG, name, || (ready(at) != Some(200)).then(|| format!("{:?} {}", ready(at), log(name))));
    };
    waits(at_first, "first");
    let (_second, at_second) = conductor(place.path(), &endpoint, "second");
    until(LONG, "the second serves", || ready(at_second).is_none().then(|| log("second")));
    let json = [("content-type", "application/json")];
    let mut asked = completion("once upon a time", 400);
    let ask = |at, asked: &serde_json::Value| {
        http::OpenAnswer::new(at, "POST /v1/completions", &json, &asked.to_string())
    };
    asked["stream"] = true.into();
    let mut begun = ask(at_first, &asked).unwrap();
    let event: serde_json::Value = serde_json::from_str(&begun.event().unwrap().unwrap()).unwrap();
    let said = event["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
    signal(first.0.id(), Signal::STOP);
    waits(at_second, "second");
    let (whole, done, why) = rest_of(ask(at_second, &asked).unwrap(), String::new());
    assert!(done && whole.starts_with(&said), "{why}: {said:?} {whole:?}");
    // Calls that wait for it when it wakes: none of them is answered as if it still led.
    let late: Vec<_> = (0..4)
        .map(|_| {
            let asked = completion("too late", 4);
            std::thread::spawn(move || {
                let json = [("content-type", "application/json")];
                http::call(at_first, "POST /v1/completions", &json, &asked.to_string())
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    signal(first.0.id(), Signal::CONT);
    for answer in late {
        let answer = answer.join().unwrap();
        assert!(answer.as_ref().is_ok_and(|a| a.status >= 500) || answer.is_err(), "{answer:?}");
    }
    // The text of the open stream is a prefix of the answer, with no token twice. The stream does not end as whole,
    // unless it was whole before the first conductor was stopped.
    let (told, done, why) = rest_of(begun, said);
    assert!(whole.starts_with(&told) && (!done || told == whole), "{why}: {told:?} {whole:?}");
    until(LONG, "the first stops", || first.0.try_wait().unwrap().is_none().then(|| log("first")));
    assert!(log("first").contains("no longer leads"), "{}", log("first"));
    let asked = completion("once upon a time", 4).to_string();
    http::call(at_second, "POST /v1/completions", &json, &asked).unwrap().ok();
}

/// The TTFT objective in force at a conductor.
fn ttft_us(at: std::net::SocketAddr) -> Option<u64> {
    let config = http::call(at, "GET /admin/config", &[], "").ok()?.ok().json();
    config["scheduler"]["classes"][0]["ttft_us"].as_u64()
}

#[test]
fn one_policy_reaches_every_conductor_and_a_bad_one_none() {
    let place = TempDir::new().unwrap();
    let (etcd, endpoint) = etcd(place.path());
    let conductors = ["first", "second"].map(|name| conductor(place.path(), &endpoint, name));
    let log = |name: &str| std::fs::read_to_string(place.path().join(format!("{name}.err"))).unwrap();
    let in_force = |wanted: u64| {
        for (_, at) in &conductors {
            until(LONG, "the policy is in force", || {
                let now = ttft_us(*at);
                (now != Some(wanted)).then(|| format!("{now:?}: {}{}", log("first"), log("second")))
            });
        }
    };
    in_force(30_000_000);
    let policy_of = |ttft_us: u64| {
        let text = "[scheduler]\nblock_tokens = 16\n[[scheduler.classes]]\nname = \"default\"\n";
        format!("{text}ttft_us = {ttft_us}\n")
    };
    let file = |text: &str| std::fs::write(place.path().join("baton.toml"), text).unwrap();
    let config = |words: &[&str]| {
        let to = ["--etcd", &endpoint, "--cluster", "several"];
        run(place.path(), &[&["config"], words, &to[..]].concat())
    };
    // Its own sections stay each conductor's own.
    file(&format!("[service]\nheartbeat_us = 250000\n{}", policy_of(9_000_000)));
    let (code, said, why) = config(&["push", "baton.toml"]);
    assert!(code == Some(0) && said.contains("is in force"), "{said}{why}");
    in_force(9_000_000);
    assert!(log("second").contains("30000000 -> 9000000"), "the change is in the log: {}", log("second"));
    file(&policy_of(1));
    let (code, _, why) = config(&["push", "baton.toml"]);
    assert!(code == Some(1) && why.contains("ttft_us"), "{why}");
    // The one that leads takes it from operators; another says who does.
    let post = |at, path: &str, body: &str| http::call(at, &format!("POST {path}"), &[], body).unwrap();
    // At first no conductor leads.
    let mut answers = Vec::new();
    until(LONG, "one of them leads", || {
        answers =
            conductors.iter().map(|(_, at)| post(*at, "/admin/policy", &policy_of(8_000_000))).collect();
        answers.iter().all(|answer| answer.status != 200).then(|| format!("{answers:?}"))
    });
    assert_eq!(answers.iter().filter(|answer| answer.status == 200).count(), 1, "{answers:?}");
    let other = answers.iter().position(|answer| answer.status != 200).expect("one of two");
    // It hears of the leader a moment after that one begins to lead.
    until(LONG, "the other names the one that leads", || {
        let answer = post(conductors[other].1, "/admin/policy", &policy_of(8_000_000));
        assert!(answer.status == 503 && answer.text.contains("does not lead"), "{answer:?}");
        (!answer.text.contains("ask there")).then(|| format!("{answer:?}"))
    });
    in_force(8_000_000);
    let (code, said, why) = config(&["rollback"]);
    assert!(code == Some(0) && said.contains("9000000"), "{said}{why}");
    in_force(9_000_000);
    // From the command line at the one that leads; another refuses, and names it.
    let leads = answers.iter().position(|answer| answer.status == 200).unwrap();
    let policy = |at: std::net::SocketAddr, words: &[&str]| {
        run(place.path(), &[&["policy"], words, &["--url", &format!("http://{at}")]].concat())
    };
    let set = ["set", "class.default.ttft=7s"];
    let (code, _, why) = policy(conductors[other].1, &set);
    assert!(code == Some(1) && why.contains("does not lead"), "{why}");
    let (code, said, why) = policy(conductors[leads].1, &set);
    assert!(code == Some(0) && said.contains("\"9s\" -> \"7s\""), "{said}{why}");
    in_force(7_000_000);
    let (code, said, why) = policy(conductors[leads].1, &["rollback"]);
    assert!(code == Some(0) && said.contains("as before the last"), "{said}{why}");
    in_force(9_000_000);
    // What was made from an older version is refused.
    let old = [("if-match", "\"1-0000000000000000\"")];
    let late = http::call(conductors[leads].1, "POST /admin/policy", &old, &policy_of(6_000_000)).unwrap();
    assert!(late.status == 412 && late.text.contains("has changed since"), "{late:?}");
    // Each conductor checks a foreign write as a whole: none of it is in force.
    for (text, word) in [("[scheduler]\npolicy = \"moncake\"", "moncake"), ("[service]\n", "[service]")] {
        let put = Command::new("etcdctl")
            .args(["--endpoints", &endpoint, "put", "/baton/several/policy", text])
            .env("ETCDCTL_API", "3")
            .output();
        assert!(put.is_ok_and(|put| put.status.success()));
        for name in ["first", "second"] {
            let told = || log(name).lines().any(|l| l.contains("NOT applied") && l.contains(word));
            until(LONG, "a bad policy is named", || (!told()).then(|| log(name)));
        }
        in_force(9_000_000);
    }
    let (code, said, why) = config(&["rollback"]);
    assert_eq!(code, Some(0), "{said}{why}");
    in_force(7_000_000);
    // An invalid policy is the client's error (400); a dead etcd is not (503).
    let at = conductors[leads].1;
    let refused = post(at, "/admin/policy", &policy_of(1));
    assert_eq!(refused.status, 400, "{refused:?}");
    drop(etcd);
    for path in ["/admin/policy", "/admin/policy/rollback"] {
        let refused = post(at, path, &policy_of(6_000_000));
        assert!(refused.status == 503 && refused.text.contains("etcd"), "{path}: {refused:?}");
        assert!(refused.text.contains("Send it again"), "{path}: {refused:?}");
        refused.error_code();
    }
    assert_eq!(ttft_us(at), Some(7_000_000), "the policy in force goes on");
}

/// What the leader cannot apply while its requests are under way is not made the policy of all. A policy that another put
/// there all the same is tried until it can be applied, and is named where it bars a change.
#[test]
fn a_policy_that_live_requests_refuse_is_not_shared_and_a_foreign_one_is_tried_again() {
    let place = TempDir::new().unwrap();
    let (_etcd, endpoint) = etcd(place.path());
    let (_leader, at) = conductor(place.path(), &endpoint, "leader");
    let _nodes = [("p0", "prefill"), ("d0", "decode")].map(|(name, role)| {
        let mut command = baton(place.path());
        command.args(["node", "--name", name, "--role", role, "--etcd", &endpoint, "--cluster", "several"]);
        start(command, place.path(), name)
    });
    let log = || std::fs::read_to_string(place.path().join("leader.err")).unwrap();
    until(LONG, "it leads", || (ready(at) != Some(200)).then(log));
    let mut asked = completion("once upon a time", 3_000);
    asked["stream"] = true.into();
    let json = [("content-type", "application/json")];
    let mut open = http::OpenAnswer::new(at, "POST /v1/completions", &json, &asked.to_string()).unwrap();
    open.event().unwrap();
    let class = |name: &str| format!("[[scheduler.classes]]\nname = \"{name}\"\n");
    let moved = format!("[scheduler]\nblock_tokens = 16\n{}{}", class("before"), class("default"));
    for path in ["/admin/policy/check", "/admin/policy"] {
        let refused = http::call(at, &format!("POST {path}"), &[], &moved).unwrap();
        assert!(refused.status == 400 && refused.text.contains("keep the order"), "{path}: {refused:?}");
    }
    std::fs::write(place.path().join("moved.toml"), &moved).unwrap();
    let (code, said, why) =
        run(place.path(), &["config", "push", "moved.toml", "--etcd", &endpoint, "--cluster", "several"]);
    assert_eq!(code, Some(0), "{said}{why}");
    until(LONG, "it is refused", || (!log().contains("policy NOT applied")).then(log));
    let url = format!("http://{at}");
    let set = ["policy", "set", "class.default.ttft=7s", "--url", &url];
    let (code, _, why) = run(place.path(), &set);
    assert!(code == Some(1) && why.contains("does not apply it") && why.contains("keep the order"), "{why}");
    drop(open);
    until(LONG, "it is in force", || (!log().contains("policy is in force")).then(log));
    let (code, said, why) = run(place.path(), &set);
    assert_eq!(code, Some(0), "{said}{why}");
}
