//! Beginnings and ends: clients that leave, a service that drains, processes that are killed.

use std::io::{BufRead as _, BufReader};
use std::net::{Shutdown, TcpListener};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::http::{self, OpenAnswer};
use super::service::{Service, baton, chat, completion, signal, until};

const CHAT: &str = "/v1/chat/completions";
/// An engine that takes its time: 30 ms a token.
const TIMED: [&str; 2] = ["--engine", "timed"];

fn streamed(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body
}

/// Whether a process runs: one that ended and was not asked for its end yet does not.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// The files left in a folder for temporary files.
fn leftovers(service: &Service) -> Vec<String> {
    let entries = std::fs::read_dir(service.path("tmp")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

fn shared_memory() -> Vec<String> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

/// The reader of its output may end, as a log collector does on a restart.
#[test]
fn it_serves_on_when_nobody_reads_its_output() {
    let folder = tempfile::TempDir::new().unwrap();
    let mut command = baton(folder.path());
    command.args(["up", "--listen", "127.0.0.1:0", "--nodes", "1p1d", "--engine", "zero", "--log", "debug"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let greeting = lines.find_map(|line| Some(line.split_once("http://")?.1.to_owned())).unwrap();
    let address = greeting.split([' ', '\n']).next().unwrap().parse().unwrap();
    drop(lines);
    for round in 0..3 {
        let headers = [("content-type", "application/json")];
        let said = http::call(address, &format!("POST {CHAT}"), &headers, &chat("hello", 5).to_string());
        assert_eq!(said.map(|reply| reply.status).ok(), Some(200), "round {round}");
    }
    signal(child.id(), Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// A client that leaves frees everything on both legs, wherever its request was.
#[test]
fn a_client_that_leaves_holds_nothing() {
    let service = Service::up(&[&TIMED[..], &["--nodes", "1p1d"]].concat());
    let long = "word ".repeat(1_500);
    for (what, events) in [("mid-stream", 3), ("after the first token", 1), ("during prefill", 0)] {
        let mut open = service.open(CHAT, &streamed(chat(&format!("{what} {long}"), 2_000)));
        assert_eq!(open.status(), 200);
        for _ in 0..events {
            open.event().unwrap().expect("the stream goes on");
        }
        let before = service.status();
        assert!(before["live_requests"].as_u64().unwrap() >= 1, "{what}: {before}");
        drop(open);
        service.quiet(Duration::from_secs(5));
    }
    // A client that waits for the whole answer can leave, too.
    let address = service.clients;
    let waiting = std::net::TcpStream::connect(address).unwrap();
    let body = completion(&long, 2_000).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    std::io::Write::write_all(&mut &waiting, head.as_bytes()).unwrap();
    until(Duration::from_secs(5), "the call is under way", || {
        let status = service.status();
        (status["live_requests"] == 0).then(|| status.to_string())
    });
    waiting.shutdown(Shutdown::Both).unwrap();
    drop(waiting);
    service.quiet(Duration::from_secs(5));
    let counters = service.status()["counters"].clone();
    assert_eq!((&counters["cancelled"], &counters["nodes_lost"]), (&4.into(), &0.into()), "{counters}");
}

/// Ctrl-C: the service refuses new clients, connected clients get the whole answer, and nothing stays behind.
#[test]
fn ctrl_c_drains_and_leaves_nothing_behind() {
    let mut service = Service::up(&[&TIMED[..], &["--nodes", "1p1d", "--processes"]].concat());
    let nodes = service.nodes();
    assert_eq!(nodes.len(), 2, "{nodes:?}");
    let mut open = service.open(CHAT, &streamed(chat("Hello", 60)));
    open.event().unwrap().expect("the stream begins");
    signal(service.pid(), Signal::INT);
    until(Duration::from_secs(5), "it drains", || {
        (!service.errors().contains("draining")).then(|| service.errors())
    });
    assert!(
        service.errors().contains("baton: draining: 1 request is under way, 30 s at most"),
        "{}",
        service.errors()
    );
    let ready = service.get("/ready");
    assert_eq!(
        (ready.status, ready.json()["detail"].as_str()),
        (503, Some("draining: 1 request is under way"))
    );
    let late = service.ask(CHAT, &chat("too late", 1));
    assert_eq!((late.status, late.error_code().as_str()), (503, "shutting_down"), "{late:?}");
    assert!(late.header("retry-after").is_some(), "{late:?}");
    let (mut tokens, mut done) = (1, false);
    while let Some(data) = open.event().unwrap() {
        done = data == "[DONE]";
        tokens += u32::from(data.contains("\"content\":"));
    }
    assert!(done && tokens >= 60, "{tokens} tokens, done: {done}");
    let begun = Instant::now();
    assert_eq!(service.wait(Duration::from_secs(10)), Some(0), "{}", service.errors());
    assert!(begun.elapsed() < Duration::from_secs(5), "stopping took {:?}", begun.elapsed());
    for (name, pid) in &nodes {
        assert!(!runs(*pid), "node {name}, process {pid}, still runs");
    }
    assert_eq!(leftovers(&service), Vec::<String>::new(), "temporary files");
    // Other services of these tests may run: their rings come and go, by their own nodes' numbers.
    let ring = |name: &String| nodes.iter().any(|(_, pid)| name.contains(&format!("{pid}-")));
    assert_eq!(
        shared_memory().into_iter().filter(ring).collect::<Vec<_>>(),
        Vec::<String>::new(),
        "shared memory"
    );
    let control: std::net::SocketAddr = service.control.trim_start_matches("http://").parse().unwrap();
    for port in [service.clients, control] {
        TcpListener::bind(port).unwrap_or_else(|e| panic!("{port} is still taken: {e}"));
    }
}

/// The second Ctrl-C does not wait, and not even SIGKILL leaves nodes without their service.
#[test]
fn nodes_end_with_their_service_however_it_ends() {
    for kill in [false, true] {
        let mut service = Service::up(&[&TIMED[..], &["--nodes", "1p1d", "--processes"]].concat());
        let nodes = service.nodes();
        let mut open = service.open(CHAT, &streamed(chat("Hello", 5_000)));
        open.event().unwrap().expect("the stream begins");
        let begun = Instant::now();
        if kill {
            signal(service.pid(), Signal::KILL);
        } else {
            signal(service.pid(), Signal::INT);
            until(Duration::from_secs(5), "it drains", || {
                (!service.errors().contains("draining")).then(|| service.errors())
            });
            signal(service.pid(), Signal::INT);
        }
        let code = service.wait(Duration::from_secs(5));
        assert_eq!(code, if kill { None } else { Some(130) }, "{}", service.errors());
        assert!(begun.elapsed() < Duration::from_secs(3), "it took {:?}", begun.elapsed());
        until(Duration::from_secs(5), "the nodes end", || {
            nodes.iter().find(|(_, pid)| runs(*pid)).map(|(name, pid)| format!("{name} is {pid}"))
        });
        until(Duration::from_secs(1), "temporary files are gone", || leftovers(&service).first().cloned());
        drop(open);
    }
}

/// A stream that a killed service leaves is cut, not ended: no client takes it for whole.
#[test]
fn a_killed_service_ends_no_stream_as_if_it_were_whole() {
    let service = Service::up(&[&TIMED[..], &["--nodes", "1b"]].concat());
    let mut open: OpenAnswer = service.open(CHAT, &streamed(chat("Hello", 5_000)));
    open.event().unwrap().expect("the stream begins");
    signal(service.pid(), Signal::KILL);
    let ending = loop {
        match open.event() {
            Ok(Some(data)) => assert_ne!(data, "[DONE]"),
            Ok(None) => break None,
            Err(why) => break Some(why),
        }
    };
    assert!(ending.is_some(), "the stream ended as if it were whole");
}

/// The content of a node's disk outlives the node, power cut or not: a prompt is not computed again.
#[test]
fn a_killed_node_comes_back_with_what_its_disk_holds() {
    let data = tempfile::TempDir::new().unwrap();
    let folder = data.path().display().to_string();
    let start = || {
        Service::configured(
            "[scheduler]\nblock_tokens = 16\n[service]\nchain_seed = 7\n",
            &["--nodes", "1b", "--data", folder.as_str()],
        )
    };
    let mut body = chat(&"a long story, again ".repeat(30), 6);
    body["temperature"] = 0.into();
    let ask = |service: &Service| {
        let told = service.ask(CHAT, &body).ok().json();
        let text = told["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        (text, told["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap())
    };
    let mut first = start();
    let (said, cached) = ask(&first);
    assert_eq!(cached, 0, "nothing is known yet");
    // Four fifths of its blocks are reported durable.
    until(Duration::from_secs(20), "it is on the disk", || {
        let status = first.get("/admin/status").ok().json();
        let tiers = status["nodes"][0]["tiers"].as_array().cloned().unwrap_or_default();
        let used = tiers.iter().find(|t| t[0] == "ssd").and_then(|t| t[1].as_u64());
        used.is_none_or(|used| used < 30).then(|| status["nodes"][0].to_string())
    });
    signal(first.pid(), Signal::KILL);
    first.wait(Duration::from_secs(5));
    let second = start();
    let (again, cached) = ask(&second);
    assert_eq!(again, said);
    assert!(cached >= 480, "{cached} tokens of some 600 were there: {}", second.errors());
}
