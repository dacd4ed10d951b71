//! Rails cut in the middle of a transfer: everything ends once, and another rail brings the rest home.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_transports::mover::{Completion, Direction, Grant, PathEnd, RemoteSegment, Slice};

use crate::rails::{Cut, RailCut, set_mtu};
use crate::scene::{Node, TIME_LIMIT, Way, pattern, slice, ticket};

const BYTES: usize = 8 << 20;
const PIECE: u64 = 64 << 10;

fn writes(node: &Node, window: &Arc<RemoteSegment>) -> Vec<Slice> {
    let one =
        |at| slice(at, Direction::Write, (&node.memory, at * PIECE), (window, at * PIECE), PIECE as u32);
    (0..BYTES as u64 / PIECE).map(one).collect()
}

/// How often each ticket has ended, and which are done.
fn outcome(way: &Way) -> (BTreeMap<u64, u32>, Vec<u64>) {
    let mut ended = BTreeMap::new();
    way.seen.iter().filter_map(ticket).for_each(|ticket| *ended.entry(ticket).or_default() += 1);
    let done = way.seen.iter().filter(|one| matches!(one, Completion::Done { .. })).filter_map(ticket);
    (ended, done.collect())
}

/// Writes the same slices again and again until the path breaks; gives how many were posted.
fn write_until_broken(way: &mut Way, slices: &[Slice]) -> u64 {
    let mut posted = 0;
    let closed = |way: &Way| way.seen.iter().any(|one| matches!(one, Completion::Closed { .. }));
    let until = Instant::now() + TIME_LIMIT;
    while !closed(way) {
        assert!(Instant::now() < until, "it does not break");
        let next = Slice { ticket: posted, ..slices[posted as usize % slices.len()].clone() };
        if way.path.post(&[next]) == 1 {
            posted += 1;
        } else {
            way.queue.wait(&mut way.seen, Duration::from_millis(100));
        }
    }
    posted
}

fn cut_in_the_middle(cut: Cut) {
    let (here, there) = (Node::here(BYTES), Node::there(BYTES));
    here.fill(5);
    let (_, window) = there.window(0, BYTES as u64, Grant::Write);
    let slices = writes(&here, &window);
    let mut first = here.open(1, &there.id, "rxe_a0").unwrap();
    first.post_all(&slices[..4]);
    first.wait_ended(4);
    first.seen.clear();
    let cutting = std::thread::spawn(move || RailCut::new(0, cut));
    let posted = write_until_broken(&mut first, &slices);
    let rail_cut = cutting.join().unwrap();
    // TCP goes another way, so the peer can be asked.
    let closed = first.seen.last().unwrap();
    assert!(matches!(closed, Completion::Closed { end: PathEnd::Fenced, .. }), "{cut:?}: {closed:?}");
    assert_eq!(first.seen.iter().filter(|one| matches!(one, Completion::Broken { .. })).count(), 1);
    let (ended, done) = outcome(&first);
    assert_eq!(ended.len() as u64, posted, "{cut:?}: every slice ends");
    assert!(ended.values().all(|times| *times == 1), "{cut:?}: and once");
    assert!((done.len() as u64) < posted, "{cut:?}: it was cut in the middle");
    assert!(here.open(2, &there.id, "rxe_a0").is_err(), "{cut:?}: the rail is cut");

    // Slices that were never done, or have failed since, go over the other rail.
    let count = slices.len() as u64;
    let failed = ended.into_keys().filter(|ticket| !done.contains(ticket)).map(|ticket| ticket % count);
    let mut rest: Vec<u64> = failed.collect();
    rest.extend(posted.min(count)..count);
    let rest: Vec<Slice> = rest.iter().map(|at| slices[*at as usize].clone()).collect();
    let mut second = here.open(3, &there.id, "rxe_a1").unwrap();
    second.post_all(&rest);
    second.wait_ended(rest.len());
    assert!(second.failures().is_empty(), "{cut:?}: {:?}", second.failures());
    assert_eq!(there.bytes(0, BYTES), pattern(5, BYTES), "{cut:?}");

    drop(rail_cut);
    here.fill(6);
    let mut repaired = here.open(4, &there.id, "rxe_a0").unwrap();
    repaired.post_all(&slices);
    repaired.wait_ended(slices.len());
    assert!(repaired.failures().is_empty(), "{cut:?}: {:?}", repaired.failures());
    assert_eq!(there.bytes(0, BYTES), pattern(6, BYTES), "{cut:?}");
}

#[test]
fn a_link_that_goes_down_here() {
    cut_in_the_middle(Cut::Here);
}

#[test]
fn a_link_that_goes_down_at_the_peer() {
    cut_in_the_middle(Cut::There);
}

#[test]
fn packets_that_are_lost_in_silence() {
    cut_in_the_middle(Cut::Silent);
}

#[test]
fn ends_with_unequal_packets_use_the_smaller() {
    set_mtu("a0", 1_500);
    let (here, there) = (Node::here(BYTES), Node::there(BYTES));
    here.fill(8);
    let (_, window) = there.window(0, BYTES as u64, Grant::ReadWrite);
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    let slices = writes(&here, &window);
    way.post_all(&slices);
    way.wait_ended(slices.len());
    assert!(way.failures().is_empty(), "{:?}", way.failures());
    let back = slice(1_000, Direction::Read, (&here.memory, 0), (&window, PIECE), PIECE as u32);
    way.post_all(&[back]);
    way.wait_ended(slices.len() + 1);
    set_mtu("a0", 9_000);
    assert_eq!(there.bytes(0, BYTES), pattern(8, BYTES));
    assert_eq!(here.bytes(0, PIECE as usize), there.bytes(PIECE, PIECE as usize));
}
