//! A peer in a process of its own: killed, started again, and stopped for a while.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use baton_transports::mover::rdma::RdmaConfig;
use baton_transports::mover::{
    Completion, Direction, Fault, Grant, PathEnd, PeerId, RemoteSegment, WindowId,
};

use crate::scene::{Node, slice, ticket};

const BYTES: usize = 4 << 20;
const EPOCH: &str = "BATON_RDMA_PEER_EPOCH";

/// The peer itself, when this program is started as one; else nothing.
#[test]
fn peer() {
    let Ok(epoch) = std::env::var(EPOCH) else { return };
    let node = Node::with(crate::scene::config(&["rxe_b0", "rxe_b1"]), epoch.parse().unwrap(), BYTES);
    let (window, segment) = node.window(0, BYTES as u64, Grant::ReadWrite);
    let access: String = segment.access[0].1.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\npeer {} {} {access}", node.id.address, window.0);
    // Lives until it is killed or its parent is gone.
    let _ = std::io::stdin().lines().next();
}

struct Peer {
    process: Child,
    id: PeerId,
    window: Arc<RemoteSegment>,
}

impl Peer {
    fn start(epoch: u64) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed::peer", "--nocapture"])
            .env(EPOCH, epoch.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
        let line = lines.into_iter().find(|line| line.starts_with("peer ")).unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let access =
            (0..words[3].len() / 2).map(|at| u8::from_str_radix(&words[3][2 * at..2 * at + 2], 16).unwrap());
        let window = RemoteSegment {
            window: WindowId(words[2].parse().unwrap()),
            bytes: BYTES as u64,
            access: vec![("rdma".into(), access.collect())],
        };
        Self { process, id: PeerId { address: words[1].into(), epoch }, window: Arc::new(window) }
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

#[test]
fn a_killed_peer_fails_everything_and_its_next_life_is_another() {
    let here = Node::here(BYTES);
    let peer = Peer::start(11);
    let mut way = here.open(1, &peer.id, "rxe_a0").unwrap();
    let piece = 64 << 10;
    let slices: Vec<_> = (0..64)
        .map(|at| {
            slice(at, Direction::Write, (&here.memory, at * piece), (&peer.window, at * piece), piece as u32)
        })
        .collect();
    way.post_all(&slices);
    let former = peer.id.clone();
    drop(peer);
    let closed = way.wait_closed();
    let Completion::Closed { end, .. } = closed else { panic!("{closed:?}") };
    // No process is left to confirm it, unless another has taken over the port.
    assert_eq!(end, PathEnd::PeerUnknown);
    assert_eq!(way.seen.iter().filter_map(ticket).count(), 64);
    assert!(matches!(here.open(2, &former, "rxe_a0").err(), Some(Fault::Silent(_))));

    let next = Peer::start(12);
    let confused = PeerId { epoch: 11, ..next.id.clone() };
    assert!(matches!(here.open(3, &confused, "rxe_a0").err(), Some(Fault::Stale(_))));
    let mut way = here.open(4, &next.id, "rxe_a0").unwrap();
    let write = slice(1, Direction::Write, (&here.memory, 0), (&next.window, 0), 4_096);
    way.post_all(&[write]);
    way.wait_ended(1);
    assert!(way.failures().is_empty(), "{:?}", way.failures());
}

#[test]
fn a_peer_that_is_stopped_cannot_confirm_the_end() {
    let config = RdmaConfig { fence_timeout_us: 500_000, ..crate::scene::config(&["rxe_a0"]) };
    let here = Node::with(config, 1, BYTES);
    let peer = Peer::start(21);
    let mut way = here.open(1, &peer.id, "rxe_a0").unwrap();
    peer.signal("-STOP");
    way.path.close();
    assert!(matches!(way.wait_closed(), Completion::Closed { end: PathEnd::PeerUnknown, .. }));
    peer.signal("-CONT");
    here.open(2, &peer.id, "rxe_a0").unwrap();
}

#[test]
fn a_peer_that_does_not_answer_is_silent() {
    let config = RdmaConfig {
        answer_timeout_us: 500_000,
        fence_timeout_us: 300_000,
        ..crate::scene::config(&["rxe_a0"])
    };
    let here = Node::with(config, 1, BYTES);
    let peer = Peer::start(31);
    let mut way = here.open(1, &peer.id, "rxe_a0").unwrap();
    peer.signal("-STOP");
    // Its device goes on without it, so data still lands: only an answer shows that it lives.
    way.post_all(&[slice(1, Direction::Write, (&here.memory, 0), (&peer.window, 0), 4_096)]);
    way.wait_ended(1);
    assert!(way.failures().is_empty(), "{:?}", way.failures());
    way.path.probe(2);
    assert!(matches!(way.wait_closed(), Completion::Closed { end: PathEnd::PeerUnknown, .. }));
    let silent = |one: &Completion| matches!(one, Completion::Broken { fault: Fault::Silent(_), .. });
    assert!(way.seen.iter().any(silent), "{:?}", way.seen);
    peer.signal("-CONT");
}
