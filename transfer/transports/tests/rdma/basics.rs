//! Data both ways, notices after data, and the end.

use baton_transports::mover::{Completion, Direction, Fault, Grant, Notice, PathEnd, PeerId};

use crate::scene::{Node, TIME_LIMIT, pattern, slice, ticket};

const MIB: usize = 1 << 20;

#[test]
fn bytes_go_both_ways_and_notices_after_them() {
    let (here, there) = (Node::here(4 * MIB), Node::there(4 * MIB));
    here.fill(3);
    let (_, window) = there.window(0, 4 * MIB as u64, Grant::ReadWrite);
    let mut way = here.open(7, &there.id, "rxe_a0").unwrap();
    let piece = 64 << 10;
    let writes: Vec<_> = (0..32)
        .map(|at| {
            slice(at, Direction::Write, (&here.memory, at * piece), (&window, at * piece), piece as u32)
        })
        .collect();
    way.post_all(&writes);
    way.wait_ended(32);
    way.path.notify(100, Notice { bytes: b"32 pieces".to_vec() });
    way.wait_ended(33);
    assert!(way.failures().is_empty(), "{:?}", way.failures());
    assert!(
        way.seen.contains(&Completion::Notified { path: baton_transports::mover::PathId(7), ticket: 100 })
    );
    assert_eq!(there.bytes(0, 2 * MIB), pattern(3, 2 * MIB));
    assert_eq!(*there.inbox.0.lock().unwrap(), [(here.id.clone(), b"32 pieces".to_vec())]);

    there.fill(9);
    let reads: Vec<_> = (0..16)
        .map(|at| {
            slice(200 + at, Direction::Read, (&here.memory, at * piece), (&window, at * piece), piece as u32)
        })
        .collect();
    way.post_all(&reads);
    way.wait_ended(49);
    assert!(way.failures().is_empty(), "{:?}", way.failures());
    assert_eq!(here.bytes(0, MIB), pattern(9, MIB));
    way.path.probe(300);
    way.wait_ended(50);
    assert_eq!(ticket(way.seen.last().unwrap()), Some(300));
    way.path.close();
    assert!(matches!(way.wait_closed(), Completion::Closed { end: PathEnd::Fenced, .. }));
    assert_eq!(there.transport.open_to_peers().1, 0);
}

#[test]
fn another_life_is_refused_by_name() {
    let (here, there) = (Node::here(MIB), Node::there(MIB));
    let former = PeerId { epoch: 1_000, ..there.id.clone() };
    assert!(matches!(here.open(1, &former, "rxe_a0").err(), Some(Fault::Stale(_))));
    assert!(matches!(here.open(1, &there.id, "eth0").err(), Some(Fault::Invalid(_))));
    let nobody = PeerId { address: "127.0.0.1:1".into(), epoch: 2 };
    let started = std::time::Instant::now();
    assert!(matches!(here.open(1, &nobody, "rxe_a0").err(), Some(Fault::Silent(_))));
    assert!(started.elapsed() < TIME_LIMIT);
}
