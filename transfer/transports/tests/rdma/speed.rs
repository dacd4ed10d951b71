//! Measurements, for `scripts/rdma/bench.sh`: printed, not judged.

use std::time::Instant;

use baton_transports::mover::{Direction, Grant, Location, Memory, Slice, Transport};

use crate::scene::{Node, slice};

const BYTES: usize = 16 << 20;
const ROUNDS: usize = 5;

/// Moves so many bytes in slices, as many outstanding as the path takes, and says how fast.
fn mib_per_s(direction: Direction, piece: u64, total: u64) -> f64 {
    let (here, there) = (Node::here(BYTES), Node::there(BYTES));
    let (_, window) = there.window(0, BYTES as u64, Grant::ReadWrite);
    let mut way = here.open(1, &there.id, "rxe_a0").unwrap();
    // Moves one range repeatedly, as perftest does.
    let one = |ticket| slice(ticket, direction, (&here.memory, 0), (&window, 0), piece as u32);
    let slices: Vec<Slice> = (0..total / piece).map(one).collect();
    let started = Instant::now();
    way.post_all(&slices);
    way.wait_ended(slices.len());
    let took = started.elapsed();
    assert!(way.failures().is_empty(), "{:?}", way.failures());
    (total >> 20) as f64 / took.as_secs_f64()
}

#[test]
#[ignore = "a measurement, for scripts/rdma/bench.sh"]
fn bandwidth() {
    for direction in [Direction::Write, Direction::Read] {
        for piece in [64 << 10, 1 << 20] {
            let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| mib_per_s(direction, piece, 64 << 20)).collect();
            rounds.sort_by(f64::total_cmp);
            println!(
                "\nours {direction:?} {} KiB: median {:.1}, best {:.1} MiB/s",
                piece >> 10,
                rounds[ROUNDS / 2],
                rounds[ROUNDS - 1]
            );
        }
    }
}

#[test]
#[ignore = "a measurement, for scripts/rdma/bench.sh"]
fn registration() {
    let there = Node::there(4_096);
    let bytes = 256 << 20;
    let memory = Memory::private(bytes, Location::Anywhere).unwrap();
    memory.write(0, &vec![1; bytes]);
    let started = Instant::now();
    there.transport.register(&memory).unwrap();
    println!("\nregistering {} MiB with two devices: {:?}", bytes >> 20, started.elapsed());
    for mib in [1, 16, 256] {
        let window = there.exposure.open(memory.clone(), 0, mib << 20, Grant::Write).unwrap();
        let started = Instant::now();
        there.transport.access(window, &memory, 0, mib << 20).unwrap();
        let opened = started.elapsed();
        there.revoke(window);
        println!(
            "a window of {mib} MiB, two devices: opened in {opened:?}, revoked in {:?}",
            started.elapsed() - opened
        );
    }
}
