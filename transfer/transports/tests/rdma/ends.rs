//! Ends of paths: each ends as requested and reports everything once. Also their cost in resources.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use baton_transports::mover::rdma::RdmaConfig;
use baton_transports::mover::{Completion, Direction, Fault, Grant, Notice, PathEnd, PathId, Transport};

use crate::scene::{Node, config, pattern, slice, ticket};

const BYTES: usize = 4 << 20;
const PIECE: u64 = 64 << 10;

#[test]
fn a_path_closed_in_the_middle_ends_everything_once_and_closed_is_last() {
    let (here, there) = (Node::here(BYTES), Node::there(BYTES));
    here.fill(7);
    let (_, window) = there.window(0, BYTES as u64, Grant::Write);
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    let slices: Vec<_> = (0..64)
        .map(|at| {
            slice(at, Direction::Write, (&here.memory, at * PIECE), (&window, at * PIECE), PIECE as u32)
        })
        .collect();
    assert_eq!(way.path.post(&slices), 64);
    way.path.notify(64, Notice { bytes: vec![1] });
    way.path.close();
    let closed = way.wait_closed();
    there.memory.write(0, &vec![0; BYTES]);
    assert_eq!(closed, Completion::Closed { path: PathId(1), end: PathEnd::Fenced });
    let mut tickets: Vec<u64> = way.seen.iter().filter_map(ticket).collect();
    tickets.sort_unstable();
    assert_eq!(tickets, (0..65).collect::<Vec<_>>());
    assert!(!way.seen.iter().any(|one| matches!(one, Completion::Broken { .. })));
    way.path.close();
    assert_eq!(way.path.post(&slices), 0, "nothing comes after the end");
    way.path.probe(99);
    way.queue.wait(&mut way.seen, Duration::from_millis(300));
    assert_eq!(way.seen.last(), Some(&closed));
    assert_eq!(there.bytes(0, BYTES), vec![0; BYTES], "nothing lands after the end");
}

#[test]
fn a_dropped_path_is_closed_and_so_are_those_of_a_transport_that_stops() {
    let (here, there) = (Node::here(BYTES), Node::there(BYTES));
    let mut dropped = here.open(1, &there.id, "rxe_a0").unwrap();
    let mut stopped = here.open(2, &there.id, "rxe_a1").unwrap();
    dropped.path = stopped_path(&here, &there);
    assert!(matches!(dropped.wait_closed(), Completion::Closed { end: PathEnd::Fenced, .. }));
    here.transport.shutdown();
    assert!(matches!(stopped.wait_closed(), Completion::Closed { end: PathEnd::Fenced, .. }));
    assert!(matches!(here.open(3, &there.id, "rxe_a0").err(), Some(Fault::Path(_))));
    there.transport.shutdown();
    assert_eq!(there.transport.open_to_peers().1, 0);
    assert!(here.open(3, &there.id, "rxe_a0").is_err());
}

/// Any other path, to take the place of one.
fn stopped_path(here: &Node, there: &Node) -> Box<dyn baton_transports::mover::Path> {
    here.open(9, &there.id, "rxe_a0").unwrap().path
}

#[test]
fn a_peer_that_stops_breaks_its_paths() {
    let (here, there) = (Node::here(BYTES), Node::there(BYTES));
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    there.transport.shutdown();
    way.wait_closed();
    assert!(matches!(way.seen[0], Completion::Broken { .. }), "{:?}", way.seen);
}

#[test]
fn a_full_path_takes_more_when_it_says_so() {
    let few = |devices| RdmaConfig { outstanding_max: 4, ..config(devices) };
    let here = Node::with(few(&["rxe_a0"]), 1, BYTES);
    let there = Node::with(few(&["rxe_b0"]), 2, BYTES);
    here.fill(1);
    let (_, window) = there.window(0, BYTES as u64, Grant::ReadWrite);
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    let slices: Vec<_> = (0..64)
        .map(|at| {
            slice(at, Direction::Write, (&here.memory, at * PIECE), (&window, at * PIECE), PIECE as u32)
        })
        .collect();
    assert_eq!(way.path.post(&slices), 4);
    way.wait(|seen| seen.contains(&Completion::PathCapacity { path: PathId(1) }));
    way.post_all(&slices[4..]);
    way.wait_ended(64);
    assert!(way.failures().is_empty());
    assert_eq!(there.bytes(0, BYTES), pattern(1, BYTES));
}

#[test]
fn notices_keep_their_order_and_have_bounds() {
    let (here, there) = (Node::here(4_096), Node::there(4_096));
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    way.path.notify(0, Notice { bytes: vec![0; 4_097] });
    for ticket in 1..=200 {
        way.path.notify(ticket, Notice { bytes: vec![u8::try_from(ticket).unwrap(); 4_096] });
    }
    way.wait_ended(201);
    let invalid = |one: &&Completion| matches!(one, Completion::Failed { fault: Fault::Invalid(_), .. });
    assert_eq!(way.seen.iter().filter(invalid).count(), 1);
    let arrived: Vec<u8> = there.inbox.0.lock().unwrap().iter().map(|(_, bytes)| bytes[4_095]).collect();
    let notified: Vec<u64> =
        way.seen.iter().filter(|one| matches!(one, Completion::Notified { .. })).filter_map(ticket).collect();
    assert!(arrived.len() >= 64, "only {} of 200 were taken", arrived.len());
    assert_eq!(arrived, notified.iter().map(|ticket| *ticket as u8).collect::<Vec<_>>());
    assert!(notified.is_sorted());
}

#[test]
fn strangers_at_the_handshake_port_are_cut_and_do_no_harm() {
    let (here, there) = (Node::here(4_096), Node::there(4_096));
    for words in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[1, 0, 0, 0, 5], &[]] {
        let mut stranger = TcpStream::connect(&there.id.address).unwrap();
        stranger.write_all(words).unwrap();
        // It may have cut us already, and a reset is an end as well.
        let _ = stranger.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{answer:?}");
    }
    here.open(1, &there.id, "rxe_a0").unwrap();
}
