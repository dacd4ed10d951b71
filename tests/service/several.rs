//! Several conductors over an etcd: one leads and has the nodes; when it is gone, another does.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use super::http;
use super::service::{baton, chat, signal, until};

const LONG: Duration = Duration::from_secs(60);

/// A process that ends with this.
pub(super) struct Running(pub(super) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub(super) fn start(mut command: Command, place: &Path, name: &str) -> Running {
    let out = |end: &str| File::create(place.join(format!("{name}.{end}"))).unwrap();
    command.stdout(out("out")).stderr(out("err")).stdin(Stdio::null());
    let child = command.spawn();
    Running(child.unwrap_or_else(|e| panic!("{name}: {e}; scripts/ready.sh etcd installs what is missing")))
}

fn etcd(place: &Path) -> (Running, String) {
    let (clients, peers) =
        (format!("http://127.0.0.1:{}", free_port()), format!("http://127.0.0.1:{}", free_port()));
    let mut command = Command::new("etcd");
    command
        .args(["--name", "one", "--listen-client-urls", &clients, "--advertise-client-urls", &clients])
        .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
        .args(["--initial-cluster", &format!("one={peers}"), "--data-dir"])
        .arg(place.join("etcd"));
    (start(command, place, "etcd-server"), clients)
}

/// A conductor; where its clients are served.
fn conductor(place: &Path, etcd: &str, name: &str) -> (Running, std::net::SocketAddr) {
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

fn node(place: &Path, etcd: &str, name: &str, role: &str) -> Running {
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
    signal(first.0.id(), Signal::KILL);
    waits(at_second, "second");
    let asked = chat("hello", 4).to_string();
    let json = [("content-type", "application/json")];
    http::call(at_second, "POST /v1/chat/completions", &json, &asked).unwrap().ok();
    // A leader that cannot renew its lease stops before it ends: another may have it by then.
    drop(etcd);
    until(LONG, "the second stops", || second.0.try_wait().unwrap().is_none().then(|| log("second")));
    assert!(log("second").contains("leads no more: its lease could not be renewed"), "{}", log("second"));
}
