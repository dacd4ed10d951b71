//! The memory that peers may reach: open windows only, and nothing after their close.

use std::sync::Arc;

use baton_transports::mover::{Completion, Direction, Fault, Grant, RemoteSegment, Transport, WindowId};

use crate::scene::{Node, Way, pattern, slice};

const MIB: u64 = 1 << 20;

/// Why slices failed, in order.
fn faults(way: &Way) -> Vec<&Fault> {
    way.seen.iter().filter_map(fault_of).collect()
}

fn fault_of(one: &Completion) -> Option<&Fault> {
    match one {
        Completion::Failed { fault, .. } => Some(fault),
        _ => None,
    }
}

/// Posts one slice and gives its fault; none when it is done.
fn try_one(node: &Node, way: &mut Way, direction: Direction, window: &Arc<RemoteSegment>) -> Option<Fault> {
    let before = faults(way).len();
    let ended = way.seen.iter().filter_map(crate::scene::ticket).count();
    way.post_all(&[slice(9, direction, (&node.memory, 0), (window, 0), 4_096)]);
    way.wait_ended(ended + 1);
    faults(way).get(before).map(|fault| (*fault).clone())
}

#[test]
fn nothing_lands_after_a_window_is_closed_and_others_live_on() {
    let (here, there) = (Node::here(4 * MIB as usize), Node::there(4 * MIB as usize));
    here.fill(1);
    let (closing, window) = there.window(0, 2 * MIB, Grant::Write);
    let (_, other) = there.window(2 * MIB, 2 * MIB, Grant::Write);
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    let mut bystander = here.open(2, &there.id, "rxe_a0").unwrap();
    let piece = 32 << 10;
    let into = |window: &Arc<RemoteSegment>| -> Vec<_> {
        let one = |at| {
            slice(
                at,
                Direction::Write,
                (&here.memory, at % 64 * piece),
                (window, at % 64 * piece),
                piece as u32,
            )
        };
        (0..128).map(one).collect()
    };
    way.post_all(&into(&window));
    bystander.post_all(&into(&other)[..64]);
    way.wait_ended(1);
    there.revoke(closing);
    there.memory.write(0, &vec![0; 2 * MIB as usize]);
    way.wait_closed();
    assert!(!faults(&way).is_empty(), "it was closed in the middle");
    assert!(faults(&way).iter().any(|fault| matches!(fault, Fault::Stale(_))), "{:?}", faults(&way)[0]);
    assert_eq!(there.bytes(0, 2 * MIB as usize), vec![0; 2 * MIB as usize], "nothing lands any more");
    bystander.wait_ended(64);
    assert!(bystander.failures().is_empty(), "{:?}", bystander.failures());
    assert_eq!(there.bytes(2 * MIB, 2 * MIB as usize), pattern(1, 2 * MIB as usize));
    assert_eq!(there.transport.open_to_peers().0, 1);
}

/// A copy of the window with an access that claims every right.
fn boastful(window: &Arc<RemoteSegment>) -> Arc<RemoteSegment> {
    let mut access = window.access.clone();
    access[0].1[1] = 3;
    Arc::new(RemoteSegment { access, ..(**window).clone() })
}

#[test]
fn a_window_grants_no_more_than_it_says() {
    let (here, there) = (Node::here(MIB as usize), Node::there(MIB as usize));
    there.fill(2);
    let (_, readable) = there.window(0, 8_192, Grant::Read);
    let (_, writable) = there.window(8_192, 8_192, Grant::Write);
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    assert!(matches!(try_one(&here, &mut way, Direction::Write, &readable), Some(Fault::Invalid(_))));
    assert!(matches!(try_one(&here, &mut way, Direction::Read, &writable), Some(Fault::Invalid(_))));
    assert_eq!(try_one(&here, &mut way, Direction::Read, &readable), None, "the path goes on");
    // The peer's device stops an opener that ignores the rights of its own access.
    assert!(try_one(&here, &mut way, Direction::Write, &boastful(&readable)).is_some());
    way.wait_closed();
    let mut way = here.open(2, &there.id, "rxe_a0").unwrap();
    assert_eq!(try_one(&here, &mut way, Direction::Write, &writable), None);
    assert!(try_one(&here, &mut way, Direction::Read, &boastful(&writable)).is_some());
    assert_eq!(there.bytes(0, 8_192), pattern(2, 8_192), "what is only to be read is as it was");
}

#[test]
fn a_wrong_key_writes_nothing() {
    let (here, there) = (Node::here(MIB as usize), Node::there(MIB as usize));
    let (_, window) = there.window(0, MIB, Grant::ReadWrite);
    let mut access = window.access.clone();
    // The last four bytes are the key of the last device: the one of rail 1.
    *access[0].1.last_mut().unwrap() ^= 0x5a;
    let wrong = Arc::new(RemoteSegment { access, ..(*window).clone() });
    here.fill(3);
    let mut way = here.open(1, &there.id, "rxe_a1").unwrap();
    let fault = try_one(&here, &mut way, Direction::Write, &wrong);
    assert!(matches!(fault, Some(Fault::Stale(_))), "{fault:?}");
    way.wait_closed();
    assert_eq!(there.bytes(0, MIB as usize), vec![0; MIB as usize]);
    let mut way = here.open(2, &there.id, "rxe_a1").unwrap();
    assert_eq!(try_one(&here, &mut way, Direction::Write, &window), None);
}

#[test]
fn what_cannot_be_right_fails_alone() {
    let (here, there) = (Node::here(MIB as usize), Node::there(MIB as usize));
    let (_, window) = there.window(0, 8_192, Grant::ReadWrite);
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    let unknown = Node::here(8_192);
    let without = Arc::new(RemoteSegment { access: Vec::new(), ..(*window).clone() });
    let garbled =
        Arc::new(RemoteSegment { access: vec![("rdma".into(), vec![1, 2, 3])], ..(*window).clone() });
    let write = |at, there_at, bytes, window: &Arc<RemoteSegment>| {
        slice(1, Direction::Write, (&here.memory, at), (window, there_at), bytes)
    };
    let wrong = [
        write(0, 8_000, 193, &window),
        write(0, u64::MAX, 2, &window),
        write(MIB, 0, 1, &window),
        write(0, 0, 0, &window),
        write(0, 0, 1, &without),
        write(0, 0, 1, &garbled),
        slice(1, Direction::Write, (&unknown.memory, 0), (&window, 0), 1),
    ];
    way.post_all(&wrong);
    way.wait_ended(wrong.len());
    assert!(faults(&way).iter().all(|fault| matches!(fault, Fault::Invalid(_))), "{:?}", faults(&way));
    assert_eq!(faults(&way).len(), wrong.len());
    assert_eq!(try_one(&here, &mut way, Direction::Write, &window), None, "the path lives");
}

#[test]
fn windows_that_are_not_open_are_not_given_out() {
    let there = Node::there(8_192);
    let (window, _) = there.window(0, 8_192, Grant::Read);
    there.revoke(window);
    let refused = there.transport.access(window, &there.memory, 0, 8_192);
    assert!(matches!(refused, Err(Fault::Stale(_))));
    assert!(matches!(there.transport.access(WindowId(0), &there.memory, 0, 1), Err(Fault::Stale(_))));
    let stranger = baton_transports::mover::Memory::private(4_096, Default::default()).unwrap();
    assert!(matches!(there.transport.access(window, &stranger, 0, 1), Err(Fault::Invalid(_))));
    assert_eq!(there.transport.open_to_peers(), (0, 0));
}
