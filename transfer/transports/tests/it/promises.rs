//! Every promise of the mover's port, tried on every transport that is a [`Rig`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_transports::mover::*;

use crate::rigs::*;

/// Two endpoints, a window of the second, and a path to it.
struct Pair {
    here: Node,
    there: Node,
    local: Arc<Memory>,
    theirs: Arc<Memory>,
    window: Arc<RemoteSegment>,
    way: Way,
}

fn pair<R: Rig>(bytes: usize, grant: Grant) -> Pair {
    let (here, there) = (R::start(11, None), R::start(22, None));
    let (local, theirs) = (R::memory(bytes), R::memory(bytes));
    here.transport.register(&local).unwrap();
    let window = there.expose(&theirs, grant);
    let way = here.open(1, &there.peer);
    Pair { here, there, local, theirs, window, way }
}

impl Pair {
    fn slice(&self, ticket: u64, direction: Direction, bytes: u32) -> Slice {
        slice(ticket, direction, &self.local, &self.window, bytes)
    }

    fn end(self) {
        let ends = self.way.close();
        assert_eq!(ends.closed, Some(PathEnd::Fenced));
        assert_eq!(ends.broken, None);
        self.here.transport.shutdown();
        self.there.transport.shutdown();
    }
}

/// Random ranges that do not overlap go where they belong, and nothing else changes.
pub fn data_lands_where_it_belongs<R: Rig>() {
    const BYTES: usize = 6 << 20;
    for direction in [Direction::Write, Direction::Read] {
        let mut pair = pair::<R>(BYTES, Grant::ReadWrite);
        let mut rng = TestRng(7);
        rng.fill(&pair.local);
        rng.fill(&pair.theirs);
        let (source, target) = match direction {
            Direction::Write => (&pair.local, &pair.theirs),
            Direction::Read => (&pair.theirs, &pair.local),
        };
        let (from, mut expected) = (bytes_of(source), bytes_of(target));
        let target = target.clone();
        let (mut slices, mut at) = (Vec::new(), 0);
        while at < BYTES - (2 << 20) {
            let most = [1, 300, 5_000, 70_000, 1_500_000][usize::try_from(rng.roll(5)).unwrap()];
            let bytes = 1 + usize::try_from(rng.roll(most)).unwrap();
            let elsewhere = usize::try_from(rng.roll((BYTES - bytes) as u64)).unwrap();
            let (local_at, remote_at) = match direction {
                Direction::Write => (elsewhere, at),
                Direction::Read => (at, elsewhere),
            };
            let mut one = pair.slice(slices.len() as u64, direction, u32::try_from(bytes).unwrap());
            one.local.at = local_at as u64;
            one.remote_at = remote_at as u64;
            one.verify = rng.roll(2) == 0;
            expected[at..at + bytes].copy_from_slice(&from[elsewhere..elsewhere + bytes]);
            slices.push(one);
            at += bytes + usize::try_from(rng.roll(100)).unwrap();
        }
        pair.way.post(&slices);
        pair.way.wait_slices(0..slices.len() as u64);
        assert!(pair.way.ends.slices.values().all(Result::is_ok));
        assert!(bytes_of(&target) == expected, "{direction:?}: bytes differ");
        pair.end();
    }
}

/// Thousands of slices: each ends once; a path that is full says so and then says when it is not.
pub fn each_slice_ends_once<R: Rig>() {
    const MANY: u64 = 6_000;
    let mut pair = pair::<R>(1 << 20, Grant::ReadWrite);
    let one = |ticket: u64| {
        let direction = if ticket.is_multiple_of(3) { Direction::Read } else { Direction::Write };
        pair.slice(ticket, direction, 64 + u32::try_from(ticket % 1_000).unwrap())
    };
    let slices: Vec<Slice> = (0..MANY).map(one).collect();
    let most = usize::try_from(pair.here.transport.capabilities().outstanding_max).unwrap();
    assert!(pair.way.path.post(&slices[..0]) == 0 && most < slices.len());
    pair.way.post(&slices);
    pair.way.wait_slices(0..MANY);
    assert!(pair.way.ends.slices.values().all(Result::is_ok));
    assert!(!R::FILLS || pair.way.ends.room > 0, "it was full and never said that it had room again");
    pair.end();
}

/// Bytes that change on the way are found where that is asked for.
pub fn verification_finds_damage<R: Rig>() {
    let mut pair = pair::<R>(2 << 20, Grant::ReadWrite);
    let verified = |ticket, direction, bytes| Slice { verify: true, ..pair.slice(ticket, direction, bytes) };
    let cases = [
        verified(0, Direction::Write, 5_000),
        verified(1, Direction::Read, 5_000),
        verified(2, Direction::Write, 1 << 20),
        verified(3, Direction::Read, 1 << 20),
    ];
    for case in cases {
        let receiver = if case.direction == Direction::Write { &pair.there } else { &pair.here };
        receiver.damage.arm(1);
        let again = Slice { ticket: case.ticket + 100, ..case.clone() };
        assert!(matches!(pair.way.one(case), Err(Fault::Corrupt(_))));
        assert_eq!(pair.way.one(again), Ok(()), "the path goes on");
    }
    pair.end();
}

/// A transport refuses another life of the peer, a closed window, a wrong range and a wrong right, each with its own
/// fault.
pub fn what_is_not_allowed_is_refused_by_name<R: Rig>() {
    let mut pair = pair::<R>(1 << 16, Grant::ReadWrite);
    let queue = Arc::new(CompletionQueue::default());
    let other = PeerId { epoch: 23, ..pair.there.peer.clone() };
    let device = pair.here.transport.devices().remove(0);
    let refused = pair.here.transport.open(PathId(2), &other, &device, queue);
    assert!(matches!(refused.err(), Some(Fault::Stale(_))));

    let mut ticket = 0;
    let mut ends = |pair: &mut Pair, window: &Arc<RemoteSegment>, direction, bytes| {
        ticket += 1;
        let one = Slice { remote: window.clone(), ..pair.slice(ticket, direction, bytes) };
        pair.way.one(one)
    };
    let memory = R::memory(1 << 16);
    let readable = pair.there.expose(&memory, Grant::Read);
    let writable = pair.there.expose(&memory, Grant::Write);
    let larger = Arc::new(RemoteSegment { bytes: 1 << 17, ..(*pair.window).clone() });
    for _ in 0..2 {
        assert!(matches!(ends(&mut pair, &readable, Direction::Write, 64), Err(Fault::Invalid(_))));
        assert!(matches!(ends(&mut pair, &writable, Direction::Read, 64), Err(Fault::Invalid(_))));
        assert_eq!(ends(&mut pair, &readable, Direction::Read, 64), Ok(()));
        assert_eq!(ends(&mut pair, &writable, Direction::Write, 64), Ok(()));
    }
    for direction in [Direction::Read, Direction::Write] {
        let beyond = Slice { remote_at: (1 << 16) - 10, ..slice(900, direction, &pair.local, &larger, 64) };
        let beyond = Slice { ticket: 900 + direction as u64, ..beyond };
        assert!(matches!(pair.way.one(beyond), Err(Fault::Invalid(_))));
        let most = pair.here.transport.capabilities().slice_bytes_max;
        assert!(matches!(ends(&mut pair, &larger, direction, most + 1), Err(Fault::Invalid(_))));
    }
    for window in [&readable, &writable] {
        pair.there.exposure.revoke(window.window, std::slice::from_ref(&pair.there.transport));
    }
    assert!(matches!(ends(&mut pair, &readable, Direction::Read, 64), Err(Fault::Stale(_))));
    assert!(matches!(ends(&mut pair, &writable, Direction::Write, 64), Err(Fault::Stale(_))));
    let window = pair.window.clone();
    assert_eq!(ends(&mut pair, &window, Direction::Write, 64), Ok(()), "the path goes on");
    pair.end();
}

/// Keeps a path busy with slices of one direction until `stop` is set; returns how many it posted.
fn fire(mut way: Way, one: Slice, stop: Arc<AtomicBool>) -> (Way, u64) {
    let mut next = 0;
    while !stop.load(Ordering::Acquire) {
        let from = next;
        let slices: Vec<Slice> = (next..next + 64).map(|ticket| Slice { ticket, ..one.clone() }).collect();
        next += 64;
        way.post(&slices);
        way.wait_slices(from..next);
    }
    (way, next)
}

/// Bytes of one copy: the smaller it is, the likelier a close falls into the middle of one.
const PIECE: u32 = 256 << 10;
/// Windows closed in such a test.
const CLOSES: u8 = 40;

/// After a window has been closed nothing lands through it, whatever the peer still sends.
pub fn nothing_lands_in_a_closed_window<R: Rig>() {
    let pair = pair::<R>(PIECE as usize, Grant::ReadWrite);
    let Pair { here, there, local, theirs, mut way, mut window } = pair;
    local.write(0, &[0xAA; PIECE as usize]);
    for round in 0..CLOSES {
        let stop = Arc::new(AtomicBool::new(false));
        let one = slice(0, Direction::Write, &local, &window, PIECE);
        let firing = std::thread::spawn({
            let stop = stop.clone();
            move || fire(way, one, stop)
        });
        std::thread::sleep(Duration::from_micros(2_000 + 170 * u64::from(round)));
        there.exposure.revoke(window.window, std::slice::from_ref(&there.transport));
        theirs.write(0, &[round; PIECE as usize]);
        std::thread::sleep(Duration::from_millis(10));
        assert!(bytes_of(&theirs).iter().all(|byte| *byte == round), "something landed after the revoke");
        stop.store(true, Ordering::Release);
        let (back, _) = firing.join().unwrap();
        way = Way { ends: Ends::default(), ..back };
        window = there.expose(&theirs, Grant::ReadWrite);
    }
    assert_eq!(way.close().closed, Some(PathEnd::Fenced));
    here.transport.shutdown();
    there.transport.shutdown();
}

/// A read that ended well has not a byte of what its window's owner wrote after closing it.
pub fn no_read_returns_what_came_after_the_close<R: Rig>() {
    let mut pair = pair::<R>(PIECE as usize, Grant::ReadWrite);
    let into = R::memory(16 * PIECE as usize);
    let mut next = 0;
    for round in 0..u64::from(CLOSES) {
        pair.theirs.write(0, &[0; PIECE as usize]);
        let window = pair.there.expose(&pair.theirs, Grant::Read);
        let closing = std::thread::spawn({
            let (there, transport) = (pair.there.exposure.clone(), pair.there.transport.clone());
            let (theirs, window) = (pair.theirs.clone(), window.window);
            move || {
                std::thread::sleep(Duration::from_micros(1_000 + 170 * round));
                there.revoke(window, &[transport]);
                theirs.write(0, &[0xEE; PIECE as usize]);
            }
        });
        let first = next;
        loop {
            let piece = |ticket| slice(ticket, Direction::Read, &into, &window, PIECE);
            let place = |ticket: u64| Region { memory: into.clone(), at: ticket % 16 * u64::from(PIECE) };
            let slices = (next..next + 8).map(|ticket| Slice { local: place(ticket), ..piece(ticket) });
            pair.way.post(&slices.collect::<Vec<_>>());
            pair.way.wait_slices(next..next + 8);
            next += 8;
            if (next - 8..next).any(|ticket| pair.way.ends.slices[&ticket].is_err()) {
                break;
            }
        }
        // Those at the close are among the last sixteen; what came before need not be looked at, so that the
        // close finds a copy under way.
        let all = bytes_of(&into);
        for ticket in first.max(next.saturating_sub(16))..next {
            let at = usize::try_from(ticket % 16).unwrap() * PIECE as usize;
            match &pair.way.ends.slices[&ticket] {
                Ok(()) => {
                    assert!(all[at..at + PIECE as usize] == [0; PIECE as usize], "came after the close")
                }
                Err(fault) => assert!(matches!(fault, Fault::Stale(_)), "{fault:?}"),
            }
        }
        closing.join().unwrap();
    }
    pair.end();
}

/// Closing under load: each slice ends once, `Closed` is the last, and then nothing lands.
pub fn closing_ends_everything_once<R: Rig>() {
    let mut pair = pair::<R>(16 << 20, Grant::ReadWrite);
    pair.local.write(0, &vec![0xBB; 16 << 20]);
    let many = 200;
    let one = |ticket: u64| {
        let direction = if ticket.is_multiple_of(2) { Direction::Read } else { Direction::Write };
        pair.slice(ticket, direction, 1 << 20)
    };
    let slices: Vec<Slice> = (0..many).map(one).collect();
    let taken = pair.way.path.post(&slices);
    pair.way.path.close();
    pair.way.path.close();
    pair.way.wait("Closed", |ends| ends.closed.is_some());
    assert_eq!(pair.way.ends.closed, Some(PathEnd::Fenced));
    assert_eq!(pair.way.ends.slices.len(), taken);
    assert_eq!(pair.way.ends.broken, None);
    for memory in [&pair.local, &pair.theirs] {
        memory.write(0, &vec![0xCC; 16 << 20]);
    }
    std::thread::sleep(Duration::from_millis(50));
    for memory in [&pair.local, &pair.theirs] {
        assert!(bytes_of(memory).iter().all(|byte| *byte == 0xCC), "something landed after Closed");
    }
    assert_eq!(pair.way.path.post(&slices[..1]), 0, "nothing is taken after Closed");
    pair.here.transport.shutdown();
    pair.there.transport.shutdown();
}

/// A notice finds the data that was done before it, comes once, and names its sender.
pub fn notices_come_after_the_data<R: Rig>() {
    let mut pair = pair::<R>(1 << 20, Grant::ReadWrite);
    for round in 0_u8..20 {
        pair.local.write(0, &vec![round; 1 << 20]);
        let ticket = u64::from(round);
        assert_eq!(pair.way.one(pair.slice(ticket, Direction::Write, 1 << 20)), Ok(()));
        pair.way.path.notify(NOTICES + ticket, Notice { bytes: vec![round; 1 + usize::from(round) * 200] });
        pair.way.wait("the notice", |ends| ends.notified.contains_key(&(NOTICES + ticket)));
        let came = pair.there.inbox.0.lock().unwrap().clone();
        assert_eq!(came.len(), usize::from(round) + 1);
        assert_eq!(came.last().unwrap().1.bytes, vec![round; 1 + usize::from(round) * 200]);
        assert_eq!(came.last().unwrap().0, pair.here.peer);
    }
    pair.way.path.notify(NOTICES + 100, Notice { bytes: vec![0; 4_097] });
    pair.way.path.notify(NOTICES + 101, Notice { bytes: vec![] });
    pair.way.path.probe(NOTICES + 102);
    pair.way.wait("the last", |ends| ends.notified.len() == 23);
    assert!(matches!(pair.way.ends.notified[&(NOTICES + 100)], Err(Fault::Invalid(_))));
    assert_eq!(pair.way.ends.notified[&(NOTICES + 101)], Ok(()));
    assert_eq!(pair.way.ends.notified[&(NOTICES + 102)], Ok(()));
    assert_eq!(pair.there.inbox.0.lock().unwrap().len(), 21);
    pair.end();
}

/// A killed peer: outstanding slices fail, the path ends, and the peer's next life differs from it.
pub fn a_killed_peer_fails_what_was_outstanding<R: Rig>() {
    let here = R::start(11, None);
    let mut peer = Peer::start::<R>(22, None);
    let local = R::memory(1 << 20);
    here.transport.register(&local).unwrap();
    let mut way = here.open(1, &peer.id);
    assert_eq!(way.one(slice(0, Direction::Write, &local, &peer.window, 1 << 20)), Ok(()));
    peer.freeze();
    let many =
        |from| (from..from + 40).map(|ticket| slice(ticket, Direction::Write, &local, &peer.window, 1 << 20));
    let slices: Vec<Slice> = many(1).collect();
    let taken = way.path.post(&slices) as u64;
    std::thread::sleep(Duration::from_millis(50));
    peer.kill();
    let began = Instant::now();
    way.wait("Closed", |ends| ends.closed.is_some());
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(way.ends.broken.is_some());
    assert_eq!(way.ends.slices.len() as u64, 1 + taken);
    assert!(way.ends.slices[&taken].is_err());
    assert_eq!(way.ends.closed, Some(R::KILLED));

    let again = Peer::start::<R>(33, Some(&peer.id.address));
    let queue = Arc::new(CompletionQueue::default());
    let device = here.transport.devices().remove(0);
    let refused = here.transport.open(PathId(2), &peer.id, &device, queue);
    assert!(matches!(refused.err(), Some(Fault::Stale(_))), "its former life is over");
    let mut way = here.open(3, &again.id);
    assert_eq!(way.one(slice(0, Direction::Write, &local, &again.window, 1 << 20)), Ok(()));
    assert_eq!(way.close().closed, Some(PathEnd::Fenced));
    here.transport.shutdown();
}

/// A peer that is frozen is silent; whether it is fenced is unknown, for it cannot say.
pub fn a_frozen_peer_is_silent<R: Rig>() {
    let here = R::start(11, None);
    let peer = Peer::start::<R>(22, None);
    let local = R::memory(1 << 20);
    here.transport.register(&local).unwrap();
    let mut way = here.open(1, &peer.id);
    assert_eq!(way.one(slice(0, Direction::Write, &local, &peer.window, 1 << 20)), Ok(()));
    peer.freeze();
    let began = Instant::now();
    let many = |ticket| slice(ticket, Direction::Write, &local, &peer.window, 1 << 20);
    let taken = way.path.post(&(1..=60).map(many).collect::<Vec<_>>()) as u64;
    way.path.probe(NOTICES);
    way.wait("Closed", |ends| ends.closed.is_some());
    assert!(began.elapsed() < Duration::from_secs(6));
    assert!(matches!(way.ends.broken, Some(Fault::Silent(_))), "{:?}", way.ends.broken);
    assert_eq!(way.ends.closed, Some(PathEnd::PeerUnknown));
    assert!(way.ends.slices[&taken].is_err() && way.ends.notified[&NOTICES].is_err());
    let queue = Arc::new(CompletionQueue::default());
    let device = here.transport.devices().remove(0);
    let silent = here.transport.open(PathId(2), &peer.id, &device, queue);
    assert!(matches!(silent.err(), Some(Fault::Silent(_))));
    peer.thaw();
    let mut way = here.open(3, &peer.id);
    assert_eq!(way.one(many(0)), Ok(()), "thawed, it serves again");
    here.transport.shutdown();
    way.wait("Closed", |ends| ends.closed.is_some());
}

/// `Fenced` is the peer's word: what it had not taken by then never lands.
pub fn a_fence_holds_what_the_peer_had_not_taken<R: Rig>() {
    let (here, peer) = (R::start(11, None), Peer::start::<R>(22, None));
    let (old, new, back) = (R::memory(1 << 20), R::memory(1 << 20), R::memory(1 << 20));
    old.write(0, &[0xAA; 1 << 20]);
    new.write(0, &[0x55; 1 << 20]);
    for memory in [&old, &new] {
        here.transport.register(memory).unwrap();
    }
    let write = |ticket, from| slice(ticket, Direction::Write, from, &peer.window, 1 << 20);
    for round in 0..8 {
        let mut way = here.open(2 * round, &peer.id);
        assert_eq!(way.one(write(0, &old)), Ok(()));
        peer.freeze();
        way.path.post(&(1..40).map(|ticket| write(ticket, &old)).collect::<Vec<_>>());
        std::thread::sleep(Duration::from_millis(20));
        way.path.close();
        peer.thaw();
        way.wait("Closed", |ends| ends.closed.is_some());
        assert_eq!(way.ends.closed, Some(PathEnd::Fenced));
        let mut way = here.open(2 * round + 1, &peer.id);
        assert_eq!(way.one(write(0, &new)), Ok(()));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(way.one(slice(1, Direction::Read, &back, &peer.window, 1 << 20)), Ok(()));
        assert!(bytes_of(&back).iter().all(|byte| *byte == 0x55), "the old path still wrote");
        assert_eq!(way.close().closed, Some(PathEnd::Fenced));
    }
    here.transport.shutdown();
}

/// Shutdown ends paths that are open, and refuses more.
pub fn shutdown_ends_what_is_open<R: Rig>() {
    let mut pair = pair::<R>(1 << 20, Grant::ReadWrite);
    let one = |ticket| pair.slice(ticket, Direction::Write, 1 << 20);
    let taken = pair.way.path.post(&(0..50).map(one).collect::<Vec<_>>());
    pair.here.transport.shutdown();
    pair.way.wait("Closed", |ends| ends.closed.is_some());
    assert_eq!(pair.way.ends.slices.len(), taken);
    let queue = Arc::new(CompletionQueue::default());
    let device = pair.here.transport.devices().remove(0);
    assert!(pair.here.transport.open(PathId(2), &pair.there.peer, &device, queue).is_err());
    pair.here.transport.shutdown();
    pair.there.transport.shutdown();
}

/// Tests for one rig.
macro_rules! promises {
    ($name:ident, $rig:ident: $($test:ident)*) => {
        mod $name {
            $(
                #[test]
                fn $test() {
                    super::$test::<crate::rigs::$rig>();
                }
            )*
        }
    };
}

/// All of them.
macro_rules! every_promise {
    ($name:ident, $rig:ident) => {
        promises! { $name, $rig:
            data_lands_where_it_belongs
            each_slice_ends_once
            verification_finds_damage
            what_is_not_allowed_is_refused_by_name
            nothing_lands_in_a_closed_window
            no_read_returns_what_came_after_the_close
            closing_ends_everything_once
            notices_come_after_the_data
            a_killed_peer_fails_what_was_outstanding
            a_frozen_peer_is_silent
            a_fence_holds_what_the_peer_had_not_taken
            shutdown_ends_what_is_open
            leaves_nothing
        }
    };
}

every_promise!(tcp, Tcp);
every_promise!(tls, Tls);
every_promise!(shm, Shm);

// Inside a process there is no peer to kill or freeze, no thread that could be left, and no way for damage.
promises! { loopback, Loop:
    data_lands_where_it_belongs
    each_slice_ends_once
    what_is_not_allowed_is_refused_by_name
    nothing_lands_in_a_closed_window
    no_read_returns_what_came_after_the_close
    closing_ends_everything_once
    notices_come_after_the_data
    shutdown_ends_what_is_open
}
