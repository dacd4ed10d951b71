//! Clients that others wrote: `curl` and the `openai` Python package.
//!
//! Where one is not installed, the test says so and passes; under CI (`CI=true`) it fails instead.

use std::path::Path;
use std::process::{Command, Output};

use super::service::{Service, chat};

/// Runs to the end.
#[track_caller]
pub fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

/// Whether a program is missing; says so, and fails under CI.
#[track_caller]
pub fn missing(program: &str, argument: &str) -> bool {
    let there = Command::new(program).arg(argument).output().is_ok_and(|out| out.status.success());
    if !there {
        skipped(&format!("there is no '{program}'"));
    }
    !there
}

/// Says why a test is skipped, and fails under CI.
#[track_caller]
fn skipped(why: &str) {
    let strict = std::env::var("CI").is_ok_and(|ci| ci == "true" || ci == "1");
    assert!(!strict, "skipped, which CI does not allow: {why}");
    eprintln!("skipped: {why}");
}

#[test]
fn curl_talks_to_the_front_door() {
    if missing("curl", "--version") {
        return;
    }
    let service = Service::up(&["--engine", "zero", "--nodes", "1p1d"]);
    let url = |path: &str| format!("http://{}{path}", service.clients);
    let curl = |args: &[&str]| {
        let done = output(Command::new("curl").args(["-sS", "--noproxy", "*"]).args(args));
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    let body = |stream: bool| {
        let mut body = chat("Hello", 5);
        body["stream"] = stream.into();
        body.to_string()
    };
    let json = ["-H", "content-type: application/json"];
    let whole = curl(&[&json[..], &["-d", &body(false), &url("/v1/chat/completions")]].concat());
    assert!(whole.contains("\"object\":\"chat.completion\""), "{whole}");
    // Large bodies ask first whether they may be sent.
    let expect = ["-H", "expect: 100-continue", "-d", &body(false), &url("/v1/chat/completions")];
    assert!(curl(&[&json[..], &expect].concat()).contains("chat.completion"));
    let streamed = curl(&[&json[..], &["-N", "-d", &body(true), &url("/v1/chat/completions")]].concat());
    assert!(streamed.ends_with("data: [DONE]\n\n"), "{streamed}");
    // HTTP/2 without TLS, as load balancers speak it.
    let second = curl(&["--http2-prior-knowledge", "-i", &url("/v1/models")]);
    assert!(second.starts_with("HTTP/2 200"), "{second}");
    let head = curl(&["-I", &url("/health")]);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
}

/// The Python with the packages that tests use; none, said and refused by CI, where it cannot be had.
#[track_caller]
pub fn prepared_python() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let prepared = output(Command::new(root.join("scripts/clients.sh")).current_dir(root));
    let python = String::from_utf8_lossy(&prepared.stdout).trim().to_owned();
    if !prepared.status.success() || python.is_empty() {
        skipped(String::from_utf8_lossy(&prepared.stderr).trim());
        return None;
    }
    Some(python)
}

#[test]
fn the_openai_package_talks_to_the_front_door() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let Some(python) = prepared_python() else { return };
    let service = Service::up(&["--nodes", "1p1d"]);
    let base = format!("http://{}/v1", service.clients);
    let checks = output(
        Command::new(python).arg(root.join("tests/clients/openai_client.py")).arg(&base).env("NO_PROXY", "*"),
    );
    let told = String::from_utf8_lossy(&checks.stdout);
    assert!(checks.status.success(), "{told}{}", String::from_utf8_lossy(&checks.stderr));
    println!("{told}");
    service.quiet(std::time::Duration::from_secs(10));
}
