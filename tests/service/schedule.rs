//! What happens to nodes while clients are served: drawn from a seed, carried out by signals and cut lines.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_types::Rng;
use rustix::process::Signal;

use super::service::{Service, baton, signal};

/// A stretch of wire between nodes and conductor that can be cut.
pub struct Wire {
    /// Where nodes attach, as `http://ADDRESS:PORT`.
    pub url: String,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Wire {
    /// A wire to the conductor at `control`. Its threads end with the process.
    pub fn lay(control: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let to: SocketAddr = control.trim_start_matches("http://").parse().unwrap();
        let ends = Arc::new(Mutex::new(Vec::new()));
        let laid = Arc::clone(&ends);
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(to)) else { continue };
                let copies = [near.try_clone().unwrap(), far.try_clone().unwrap()];
                laid.lock().unwrap().extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                let [near_too, far_too] = copies;
                std::thread::spawn(move || carry(near, far_too));
                std::thread::spawn(move || carry(far, near_too));
            }
        });
        Self { url, ends }
    }

    /// Cuts every connection that goes through it.
    pub fn cut(&self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream) {
    let _ = to.set_nodelay(true);
    let mut bytes = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// The nodes, as whoever troubles them sees them.
pub struct Nodes<'a> {
    service: &'a Service,
    wire: Wire,
    engine: &'a [&'a str],
    pids: BTreeMap<String, u32>,
    started: Vec<Child>,
}

impl<'a> Nodes<'a> {
    /// The nodes of `service`; those that are started again get `engine` as their arguments.
    pub fn of(service: &'a Service, engine: &'a [&'a str]) -> Self {
        let wire = Wire::lay(&service.control);
        Self { pids: service.nodes().into_iter().collect(), service, wire, engine, started: Vec::new() }
    }

    fn kill(&mut self, name: &str) {
        signal(self.pids[name], Signal::KILL);
        let pid = self.pids[name];
        if let Some(at) = self.started.iter().position(|child| child.id() == pid) {
            let _ = self.started.swap_remove(at).wait();
        }
    }

    /// Starts a node of that name again, behind the wire.
    fn start(&mut self, name: &str) {
        let role = if name.starts_with('p') { "prefill" } else { "decode" };
        let err = std::fs::OpenOptions::new().append(true).create(true).open(self.service.path("err.nodes"));
        let mut command = baton(self.service.folder());
        command
            .args(["node", "--name", name, "--role", role, "--conductor", &self.wire.url, "--log", "warn"])
            .args(["--config", "baton.toml"])
            .args(self.engine)
            .stdout(Stdio::null())
            .stderr(err.unwrap());
        let child = command.spawn().unwrap();
        self.pids.insert(name.to_owned(), child.id());
        self.started.push(child);
    }

    /// Troubles nodes, one after another, until told to stop; says what it did.
    pub fn trouble(&mut self, seed: u64, stop: &AtomicBool) -> Vec<String> {
        let mut rng = Rng::fork(seed, 2);
        let mut done = Vec::new();
        let names: Vec<String> = self.pids.keys().cloned().collect();
        while !stop.load(Ordering::Relaxed) {
            let name = &names[rng.below(names.len() as u64) as usize];
            let mut pause = |most_ms: u64| {
                let wait_ms = 50 + rng.below(most_ms);
                std::thread::sleep(Duration::from_millis(wait_ms));
                wait_ms
            };
            let before_ms = pause(700);
            let (pid, kind) = (self.pids[name], rng.below(8));
            let what = match kind {
                0..=3 => {
                    self.kill(name);
                    let away_ms = 50 + rng.below(1_000);
                    std::thread::sleep(Duration::from_millis(away_ms));
                    self.start(name);
                    format!("killed {name} for {away_ms} ms")
                }
                4..=6 => {
                    signal(pid, Signal::STOP);
                    // From a hiccup to longer than it takes to be taken for lost.
                    let still_ms = 50 + rng.below(2_000);
                    std::thread::sleep(Duration::from_millis(still_ms));
                    signal(pid, Signal::CONT);
                    format!("stopped {name} for {still_ms} ms")
                }
                _ => {
                    self.wire.cut();
                    "cut the wire".to_owned()
                }
            };
            done.push(format!("after {before_ms} ms {what}"));
        }
        done
    }
}

impl Drop for Nodes<'_> {
    fn drop(&mut self) {
        for child in &mut self.started {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
