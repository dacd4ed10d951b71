//! `baton top` against a scripted service, and against a real one that `baton serve` and `baton node` make.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::program::Place;

/// The scripted service's answer to a path and a key.
type Script = fn(&str, Option<&str>) -> (u16, String);

/// Serves on connections that are kept open, until the test ends.
fn serve(script: Script) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || speak(&stream.unwrap(), script));
        }
    });
    url
}

fn speak(stream: &TcpStream, script: Script) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    while let Some(Ok(first)) = lines.next() {
        let head: Vec<String> = lines.by_ref().map_while(Result::ok).take_while(|l| !l.is_empty()).collect();
        let key = head.iter().find_map(|line| line.strip_prefix("authorization: Bearer "));
        let (status, body) = script(first.split(' ').nth(1).unwrap(), key);
        let length = body.len();
        let mut stream = stream;
        if write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}").is_err() {
            return;
        }
    }
}

fn status() -> Value {
    json!({
        "uptime_us": 61_000_000, "ready": true, "detail": "1 nodes", "live_requests": 1,
        "counters": {}, "decisions": ["req-7 prefill=b0 ttft_ms=3.0"],
        "nodes": [{
            "name": "b0", "instance": 4, "epoch": 1, "role": "both", "state": "draining", "heard_us_ago": 1000,
            "backlog_us": 0, "waiting": 0, "dispatched": 0, "decodes": 1, "reserved_tokens": 64, "step_us": 0,
            "running": 1, "holds": 2, "tiers": [["dram", 1, 0, 8, 5, 0]], "handoff_bytes": 0, "integrity_rejects": 0,
        }],
        "requests": [{
            "request_id": "req-7", "stage": "decode", "age_us": 5000, "prompt_tokens": 12, "answer_tokens": 3,
            "attempts": 1, "prefill": 4, "decode": 4,
        }],
    })
}

fn scripted(path: &str, key: Option<&str>) -> (u16, String) {
    let metrics = "baton_requests_total 5\nbaton_requests_refused_total{reason=\"room\"} 2\n";
    let config = json!({"scheduler": {"classes": [{"ttft_us": 5_000_000, "tbt_us": 50_000}]}});
    match (path, key) {
        ("/metrics", _) => (200, metrics.into()),
        (_, key) if key != Some("sesame") => (401, "{}".into()),
        ("/admin/status", _) => (200, status().to_string()),
        ("/admin/config", _) => (200, config.to_string()),
        _ => (404, "{}".into()),
    }
}

#[test]
fn without_a_terminal_one_frame_is_printed() {
    let url = serve(scripted);
    let args = ["top", "--url", &url, "--key", "sesame", "--interval", "0.1"];
    for args in [&args[..], &[&args[..], &["--once"]].concat()] {
        let frame = Place::new().baton(args).succeeded().stdout;
        for words in [
            "READY: 1 nodes  up 1:01",
            "refused: room 2;",
            "first tokens within 5.0 s: -  gaps within 50.0 ms: -",
            "draining",
            "dram 1/8 h5",
            "b0 > b0",
            "req-7 prefill=b0 ttft_ms=3.0",
        ] {
            assert!(frame.contains(words), "no '{words}' in\n{frame}");
        }
    }
}

#[test]
fn json_is_the_status_as_it_is() {
    let url = serve(scripted);
    let printed = Place::new().baton(&["top", "--json", "--url", &url, "--key", "sesame"]).succeeded().json();
    assert_eq!(printed, status());
}

#[test]
fn what_does_not_answer_is_named_with_what_to_do() {
    let top = |url: &str, words: &[&str]| {
        Place::new().baton(&["top", "--once", "--url", url]).refused(1, words);
    };
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    top(&format!("http://{free}"), &[&free.to_string(), "refused", "baton up", "--url"]);
    top(&serve(scripted), &["operators only", "service.admin_key", "--key"]);
    top(&serve(|_, _| (404, "<html>".into())), &["404", "use the same baton"]);
    top(&serve(|_, _| (200, "{\"hello\": 1}".into())), &["missing field", "use the same baton"]);
    top("localhost", &["http://127.0.0.1:8080"]);
    Place::new().baton(&["top", "--interval", "0"]).refused(2, &["0.1..=3600"]);
}

/// A process of the program, ended with the test.
struct RunningProcess(Child);

impl RunningProcess {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    /// Sends it SIGTERM and returns its exit code.
    fn stop(mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(60) {
            if let Some(ended) = self.0.try_wait().unwrap() {
                return ended.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("still running a minute after SIGTERM");
    }
}

impl Drop for RunningProcess {
    fn drop(&mut self) {
        // One that has ended already cannot be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The word after `before` in `line`, up to a comma or a space.
fn word_after<'a>(line: &'a str, before: &str) -> &'a str {
    let rest = line.split_once(before).unwrap_or_else(|| panic!("no '{before}' in {line}")).1;
    rest.split([',', ' ', ';']).next().unwrap()
}

#[test]
fn serve_takes_nodes_and_calls_and_drains() {
    let mut service =
        RunningProcess::start(&["serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"]);
    let mut told = BufReader::new(service.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let first = told.next().unwrap();
    let (url, control) =
        (word_after(&first, "front door on ").to_owned(), word_after(&first, "attach on ").to_owned());
    let line = told.next().unwrap();
    assert!(
        line.contains(&format!("baton node --name p0 --role prefill --conductor http://{control}")),
        "{line}"
    );
    let conductor = format!("--conductor=http://{control}");
    let node = |name: &str, role: &str| {
        let engine = ["--engine", "zero", "--ssd-blocks", "0", "--dram-blocks", "16"];
        RunningProcess::start(&[&["node", "--name", name, "--role", role, &conductor][..], &engine].concat())
    };
    let nodes = [node("p0", "prefill"), node("d0", "decode")];
    let ready = told.find(|line| line.starts_with("ready"));
    assert!(ready.is_some(), "the service ended before it was ready");
    let body = r#"{"prompt":"good morning","max_tokens":4,"ignore_eos":true}"#;
    let answer = post(&url, "/v1/completions", body);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"completion_tokens\":4"), "{answer}");
    let frame = Place::new().baton(&["top", "--url", &url, "--interval", "0.1"]).succeeded().stdout;
    for words in ["READY: 2 nodes", "p0 ", "d0 ", "finished 2;", "first tokens within 30.0 s: 100 %"] {
        assert!(frame.contains(words), "no '{words}' in\n{frame}");
    }
    assert_eq!(service.stop(), Some(0));
    for node in nodes {
        assert_eq!(node.stop(), Some(0));
    }
}

#[test]
fn behind_tls_and_keys_only_operators_look_in() {
    let place = Place::new();
    let certificate = |name: &str| {
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        place.write(&format!("{name}.pem"), &made.cert.pem());
        place.write(&format!("{name}.key"), &made.signing_key.serialize_pem());
        place.path(&format!("{name}.pem")).to_str().unwrap().to_owned()
    };
    let (ca, other_ca) = (certificate("ours"), certificate("theirs"));
    let key_file = ca.replace(".pem", ".key");
    let config = format!(
        "[scheduler]\nblock_tokens = 16\n[service]\nlisten = '127.0.0.1:0'\ntls_cert = '{ca}'\n\
         tls_key = '{key_file}'\nadmin_key = 'operator'\n[[service.api_keys]]\nkey = 'client'\ntenant = 'a'\n"
    );
    place.write("baton.toml", &config);
    let file = place.path("baton.toml");
    let mut service =
        RunningProcess::start(&["serve", "--control", "127.0.0.1:0", "-c", file.to_str().unwrap()]);
    let mut told = BufReader::new(service.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let url = word_after(&told.next().unwrap(), "front door on ").to_owned();
    assert!(url.starts_with("https://"), "{url}");
    let look =
        |more: &[&str]| place.baton(&[&["top", "--interval", "0.1", "--url", &url][..], more].concat());
    let frame = look(&["--ca", &ca, "--key", "operator"]).succeeded().stdout;
    assert!(frame.contains("NOT READY: no node has attached yet"), "{frame}");
    look(&["--ca", &ca, "--key", "client"]).refused(1, &["operators only", "--key"]);
    look(&["--ca", &ca]).refused(1, &["operators only"]);
    look(&["--ca", &other_ca, "--key", "operator"]).refused(1, &["TLS", "--ca"]);
    look(&["--key", "operator"]).refused(1, &["--ca FILE"]);
    assert_eq!(service.stop(), Some(0));
}

fn post(url: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}
