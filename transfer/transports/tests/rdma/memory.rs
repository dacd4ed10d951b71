//! Registration: memory in pieces, several queue pairs.

use baton_transports::mover::rdma::RdmaConfig;
use baton_transports::mover::{Direction, Grant, Location, Memory, Transport};

use crate::scene::{Node, config, pattern, slice};

#[test]
fn slices_cross_the_pieces_of_a_large_memory() {
    let pieces = |devices| RdmaConfig {
        region_bytes: 1 << 20,
        slice_bytes_max: 1 << 20,
        queue_pairs: 4,
        outstanding_max: 6,
        ..config(devices)
    };
    let bytes: usize = (6 << 20) + 4_096;
    let here = Node::with(pieces(&["rxe_a0", "rxe_a1"]), 1, bytes);
    let there = Node::with(pieces(&["rxe_b0", "rxe_b1"]), 2, bytes);
    here.fill(4);
    // Neither end's pieces begin where the other's do, nor do slices.
    let (_, window) = there.window(4_096, bytes as u64 - 4_096, Grant::ReadWrite);
    let piece = 700_001;
    let slices: Vec<_> = (0..8)
        .map(|at| {
            slice(
                at,
                Direction::Write,
                (&here.memory, at * piece + 100_000),
                (&window, at * piece),
                piece as u32,
            )
        })
        .collect();
    let mut way = here.open(1, &there.id, "rxe_a1").unwrap();
    way.post_all(&slices);
    way.wait_ended(slices.len());
    assert!(way.failures().is_empty(), "{:?}", way.failures());
    let moved = 8 * piece as usize;
    assert!(there.bytes(4_096, moved) == pattern(4, bytes)[100_000..100_000 + moved]);
    let back = slice(50, Direction::Read, (&here.memory, 0), (&window, piece), piece as u32);
    way.post_all(&[back]);
    way.wait_ended(slices.len() + 1);
    assert!(here.bytes(0, piece as usize) == there.bytes(4_096 + piece, piece as usize));
}

#[test]
fn memory_that_is_gone_is_not_kept_registered() {
    let here = Node::here(4_096);
    // More in turn than the guest has room for at a time.
    for _ in 0..12 {
        let memory = Memory::private(256 << 20, Location::Anywhere).unwrap();
        here.transport.register(&memory).unwrap();
        here.transport.register(&memory).unwrap();
    }
}
