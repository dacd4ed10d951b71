//! Troubles of nodes while clients are served: drawn from a seed, carried out by signals and cut lines.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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

/// Nodes that are away or still at the same time.
const MOST_TROUBLED: usize = 3;

/// The end of a trouble.
enum RepairAction {
    Start,
    Continue,
}

/// The nodes, as the source of trouble sees them.
pub struct Nodes<'a> {
    service: &'a Service,
    wire: Wire,
    engine: &'a [&'a str],
    pids: BTreeMap<String, u32>,
    started: Vec<Child>,
    starts: u32,
}

impl<'a> Nodes<'a> {
    /// The nodes of `service`; those that are started again get `engine` as their arguments.
    pub fn of(service: &'a Service, engine: &'a [&'a str]) -> Self {
        let wire = Wire::lay(&service.control);
        Self {
            pids: service.nodes().into_iter().collect(),
            service,
            wire,
            engine,
            started: Vec::new(),
            starts: 0,
        }
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
        // Every other one shares no memory with the rest: its KV goes over TCP.
        self.starts += 1;
        let host: &[&str] = if self.starts.is_multiple_of(2) { &["--host", "elsewhere"] } else { &[] };
        let err = std::fs::OpenOptions::new().append(true).create(true).open(self.service.path("err.nodes"));
        let mut command = baton(self.service.folder());
        command
            .args(["node", "--name", name, "--role", role, "--conductor", &self.wire.url, "--log", "warn"])
            .args(["--config", "baton.toml"])
            .args(host)
            .args(self.engine)
            .stdout(Stdio::null())
            .stderr(err.unwrap());
        let child = command.spawn().unwrap();
        self.pids.insert(name.to_owned(), child.id());
        self.started.push(child);
    }

    /// Troubles nodes until `stop` is set, then repairs them all; returns a list of its actions.
    pub fn trouble(&mut self, seed: u64, stop: &AtomicBool, happened: &AtomicUsize) -> Vec<String> {
        let mut rng = Rng::fork(seed, 2);
        let (mut done, mut troubled) = (Vec::new(), BTreeMap::new());
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20 + rng.below(400)));
            self.repair(&mut troubled, Instant::now());
            // The draw depends on the seed alone, not on how quickly nodes come back.
            let (at, kind, still_ms) =
                (rng.below(self.pids.len() as u64), rng.below(8), 50 + rng.below(1_800));
            let name = self.pids.keys().nth(at as usize).expect("it was drawn among them").clone();
            if troubled.len() >= MOST_TROUBLED || troubled.contains_key(&name) {
                continue;
            }
            let until = Instant::now() + Duration::from_millis(still_ms);
            done.push(match kind {
                0..=2 => {
                    self.kill(&name);
                    troubled.insert(name.clone(), (until, RepairAction::Start));
                    format!("killed {name} for {still_ms} ms")
                }
                3..=6 => {
                    signal(self.pids[&name], Signal::STOP);
                    troubled.insert(name.clone(), (until, RepairAction::Continue));
                    format!("stopped {name} for {still_ms} ms")
                }
                _ => {
                    self.wire.cut();
                    "cut the wire".to_owned()
                }
            });
            happened.store(done.len(), Ordering::Relaxed);
        }
        self.repair(&mut troubled, Instant::now() + Duration::from_secs(60));
        done
    }

    /// Ends every trouble that is due by `now`.
    fn repair(&mut self, troubled: &mut BTreeMap<String, (Instant, RepairAction)>, now: Instant) {
        let due: Vec<String> =
            troubled.iter().filter(|(_, (until, _))| *until <= now).map(|(name, _)| name.clone()).collect();
        for name in due {
            match troubled.remove(&name) {
                Some((_, RepairAction::Start)) => self.start(&name),
                _ => signal(self.pids[&name], Signal::CONT),
            }
        }
    }
}

impl Drop for Nodes<'_> {
    fn drop(&mut self) {
        for child in &mut self.started {
            signal(child.id(), Signal::CONT);
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
