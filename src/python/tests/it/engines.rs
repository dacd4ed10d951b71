//! The engine: bytes arrive where they belong, and nowhere else.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_python::Failure;
use baton_python::engine::{Engine, Note, Piece, State};
use baton_transports::mover::Direction;

use crate::scene::{ForeignMemory, engine, register, register_all, target};

const TIME_LIMIT: Duration = Duration::from_secs(60);
const PEER: &str = "BATON_TEST_PYTHON_PEER";
const PEER_BYTES: usize = 1 << 20;

fn piece(local: u64, remote: u64, bytes: u64) -> Piece {
    Piece { local, remote, bytes }
}

#[test]
fn pieces_go_both_ways_over_several_ranges() {
    let (here, there) = (engine(), engine());
    let (mut source, mut sink) = (ForeignMemory::new(3 << 20, 1), ForeignMemory::new(3 << 20, 99));
    let (from, to) = (source.address(), sink.address());
    // Two ranges here and three there, with other ends: a piece may lie over all of them.
    register_all(&here, &[(from, 1_000_000), (from + 1_000_000, source.len() - 1_000_000)]).unwrap();
    register_all(&there, &[(to, 10), (to + 10, 2 << 20), (to + 10 + (2 << 20), (1 << 20) - 10)]).unwrap();
    here.run(&target(&there), Direction::Write, &[piece(from, to, source.len())]).unwrap();
    assert_eq!(source.bytes(), sink.bytes());
    let mut back = ForeignMemory::new(5_000, 0);
    let at = back.address();
    register(&here, at, 5_000).unwrap();
    let pieces: Vec<Piece> = (0..5_000).rev().map(|n| piece(at + n, to + 2 * n, 1)).collect();
    here.run(&target(&there), Direction::Read, &pieces).unwrap();
    assert!((0..5_000).all(|n| back.bytes()[n] == sink.bytes()[2 * n]));
    here.run(&target(&there), Direction::Read, &[]).unwrap();
}

#[test]
fn foreign_addresses_are_refused_on_either_side() {
    let (here, there) = (engine(), engine());
    let (mut ours, mut theirs, mut foreign) =
        (ForeignMemory::new(4_096, 1), ForeignMemory::new(4_096, 2), ForeignMemory::new(4_096, 3));
    let (from, to, other) = (ours.address(), theirs.address(), foreign.address());
    register(&here, from, 4_096).unwrap();
    register(&there, to, 4_096).unwrap();
    let refused = |engine: &Engine, piece: Piece, why: &str| {
        let failure = engine.run(&target(&there), Direction::Write, &[piece]).unwrap_err();
        assert!(failure.code == Failure::FAILED && failure.text.contains(why), "{failure}");
    };
    refused(&here, piece(other, to, 8), "not registered here");
    refused(&here, piece(from, other, 8), "not memory that it has registered");
    refused(&here, piece(from, to + 4_000, 97), "not memory that it has registered");
    refused(&here, piece(from, u64::MAX, 97), "not memory that it has registered");
    assert_eq!(theirs.bytes(), ForeignMemory::new(4_096, 2).bytes(), "nothing of it has landed");
    assert_eq!(register(&here, from + 1, 8).unwrap_err().code, Failure::OVERLAPS);
    assert!(register(&here, 16, 8).unwrap_err().text.contains("not mapped"));
    let all = register_all(&here, &[(other, 8), (from, 8)]).unwrap_err();
    assert_eq!(all.code, Failure::OVERLAPS);
    register(&here, other, 8).unwrap();
    assert_eq!(here.unregister(other + 1).unwrap_err().code, Failure::NOT_REGISTERED);
}

#[test]
fn memory_taken_off_is_reached_by_nobody_any_more() {
    let (here, there) = (engine(), engine());
    let (mut ours, mut theirs) = (ForeignMemory::new(64, 1), ForeignMemory::new(64, 2));
    let (from, to) = (ours.address(), theirs.address());
    register(&here, from, 64).unwrap();
    register(&there, to, 64).unwrap();
    let go = || here.run(&target(&there), Direction::Write, &[piece(from, to, 64)]);
    go().unwrap();
    there.unregister(to).unwrap();
    assert!(go().is_err());
    // Registered again, it is another window under the same address. A peer that asks gets the new one.
    register(&there, to, 64).unwrap();
    let limit = Instant::now() + TIME_LIMIT;
    while go().is_err() {
        assert!(Instant::now() < limit, "a range that is back is found");
    }
    here.unregister(from).unwrap();
    assert!(go().unwrap_err().text.contains("not registered here"));
}

#[test]
fn memory_is_found_as_soon_as_it_is_registered() {
    let (here, there) = (engine(), engine());
    let (mut source, mut sink) = (ForeignMemory::new(64, 1), ForeignMemory::new(400 * 64, 0));
    let (from, to) = (source.address(), sink.address());
    register(&here, from, 64).unwrap();
    assert!(here.first_address(&target(&there)).is_err(), "it has registered nothing");
    let failed = (0..400).filter(|n| {
        register(&there, to + n * 64, 64).unwrap();
        let first = here.first_address(&target(&there));
        let all = [piece(from, to + n * 64, 64)];
        first != Ok(to) || here.run(&target(&there), Direction::Write, &all).is_err()
    });
    assert_eq!(failed.count(), 0);
    assert_eq!(sink.bytes(), source.bytes().repeat(400));
}

fn note() -> Note {
    Note { name: "who".into(), msg: "there".into() }
}

#[test]
fn what_is_begun_can_be_asked_about_and_notices_come_after_the_bytes() {
    let (here, there) = (engine(), engine());
    let bytes = 8 << 20;
    let (from, to) = (here.allocate(bytes).unwrap(), there.allocate(bytes).unwrap());
    here.fill(from + bytes - 5, b"last!").unwrap();
    assert!(here.fill(from + bytes - 4, b"last!").is_err());
    let all = [piece(from, to, bytes)];
    let mut moving = here.start_moving(&target(&there), Direction::Write, &all, None).unwrap();
    let limit = Instant::now() + TIME_LIMIT;
    while moving.state() == State::Running {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(moving.state(), State::Done);
    assert_eq!(there.copy(to + bytes - 5, 5).unwrap(), b"last!");
    assert_eq!(here.first_address(&target(&there)), Ok(to));
    here.run_with_notice(&target(&there), Direction::Write, &all, note()).unwrap();
    assert_eq!(there.notes(), [note()]);
    here.run_with_notice(&target(&there), Direction::Write, &[], note()).unwrap();
    assert_eq!(there.notes(), [note()], "alone too");
    drop(here.start_moving(&target(&there), Direction::Write, &all, None).unwrap());
    here.unregister(from).unwrap();
}

#[test]
fn memory_that_a_transfer_holds_can_be_unregistered_again_once_it_has_ended() {
    let (here, there) = (engine(), engine());
    let (mut source, mut sink) = (ForeignMemory::new(64, 1), ForeignMemory::new(64, 0));
    let (from, to) = (source.address(), sink.address());
    register(&here, from, 64).unwrap();
    register(&there, to, 64).unwrap();
    // Never asked about, it counts as under way.
    let moving = here.start_moving(&target(&there), Direction::Write, &[piece(from, to, 64)], None).unwrap();
    let unregister =
        || here.unregister_within(from, Duration::from_millis(1)).map_err(|failure| failure.code);
    assert_eq!(unregister(), Err(Failure::IN_USE));
    assert_eq!(unregister(), Err(Failure::IN_USE), "the second try finds it too");
    assert!(register(&here, from, 64).unwrap_err().text.contains("not unregistered yet"));
    drop(moving);
    assert_eq!((unregister(), unregister()), (Ok(()), Err(Failure::NOT_REGISTERED)));
    register(&here, from, 64).unwrap();
}

/// The body of a process of its own: it registers memory and says where, until its input ends.
#[test]
#[ignore = "runs in a process of its own, which the test below starts"]
fn peer() {
    let Ok(host) = std::env::var(PEER) else { return };
    let engine = Engine::start(&host, "tcp", true).unwrap();
    let mut held = ForeignMemory::new(PEER_BYTES, 0);
    register(&engine, held.address(), held.len()).unwrap();
    println!("peer {} {}", engine.port(), held.address());
    let _ = std::io::stdin().read(&mut [0]);
}

struct Peer {
    child: Child,
    target: String,
    address: u64,
}

impl Peer {
    fn start(host: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "engines::peer", "--ignored", "--nocapture"])
            .env(PEER, host)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let told = lines.map_while(Result::ok).find_map(|line| {
            let (_, rest) = line.split_once("peer ")?;
            let (port, address) = rest.split_once(' ')?;
            Some((port.parse::<u16>().ok()?, address.parse().ok()?))
        });
        let (port, address) = told.expect("it says where it is");
        Self { child, target: format!("127.0.0.1:{port}"), address }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_killed_peer_is_a_failure_and_its_next_life_is_another() {
    let here = engine();
    let mut held = ForeignMemory::new(PEER_BYTES, 5);
    let from = held.address();
    register(&here, from, held.len()).unwrap();
    let mut peer = Peer::start("127.0.0.1");
    let go = |peer: &Peer| {
        here.run(&peer.target, Direction::Write, &[piece(from, peer.address, PEER_BYTES as u64)])
    };
    go(&peer).unwrap();
    peer.kill();
    let began = Instant::now();
    let failure = go(&peer).unwrap_err();
    assert!(failure.code == Failure::FAILED && failure.text.contains(&peer.target), "{failure}");
    assert!(began.elapsed() < TIME_LIMIT, "nobody waits for the dead");
    let again = Peer::start(&peer.target);
    assert_eq!(again.target, peer.target);
    go(&again).unwrap();
    let read = here.run(&again.target, Direction::Read, &[piece(from, again.address, PEER_BYTES as u64)]);
    assert_eq!(read, Ok(()));
}
