//! The whole mover over two rails: batches go on while a rail is cut and restored, and their owner does not notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_transports::mover::{
    Batch, Direction, Grant, Mover, MoverSettings, Op, Outcome, Region, Transport,
};

use crate::rails::{Cut, RailCut};
use crate::scene::{Node, TIME_LIMIT, pattern};

const BYTES: usize = 4 << 20;

/// Writes batches one after the other until `stop` is set, and checks each byte for byte. Returns their count and the
/// longest time that one took.
fn write_batches(mover: &Mover, here: &Node, there: &Node, stop: &AtomicBool) -> (u32, Duration) {
    let (_, window) = there.window(0, BYTES as u64, Grant::ReadWrite);
    let (mut count, mut longest) = (0, Duration::ZERO);
    while !stop.load(Ordering::Acquire) {
        let seed = count as u8;
        here.fill(seed);
        let half = BYTES as u64 / 2;
        let op = |at, direction| Op {
            direction,
            local: Region { memory: here.memory.clone(), at },
            remote: window.clone(),
            remote_at: at,
            bytes: half,
        };
        // The second half travels there and back: what was read is what had been written.
        for direction in [Direction::Write, Direction::Read] {
            let started = Instant::now();
            let batch = Batch {
                peer: there.id.clone(),
                priority: baton_transfer::Priority::Fetch,
                limit: Some(TIME_LIMIT),
                verify: false,
                notice: None,
                ops: vec![op(0, direction), op(half, direction)],
            };
            let batch = mover.submit(batch).unwrap();
            let outcome = mover.wait(batch, TIME_LIMIT).expect("it ends in time");
            assert!(matches!(outcome, Outcome::Done { .. }), "batch {count}: {outcome:?}");
            longest = longest.max(started.elapsed());
            if direction == Direction::Write {
                assert!(there.bytes(0, BYTES) == pattern(seed, BYTES), "batch {count} differs");
                here.memory.write(0, &vec![0; BYTES]);
            }
        }
        assert!(here.bytes(0, BYTES) == pattern(seed, BYTES), "batch {count} came back differently");
        count += 1;
    }
    (count, longest)
}

fn owners_see_nothing_of(cut: Cut) {
    let (here, there) = (Node::here(BYTES), Node::there(BYTES));
    let transports: Vec<Arc<dyn Transport>> = vec![here.transport.clone()];
    let mover = Mover::new(MoverSettings::default(), here.exposure.clone(), transports).unwrap();
    mover.register(&here.memory).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| write_batches(&mover, &here, &there, &stop));
        std::thread::sleep(Duration::from_secs(1));
        let rail_cut = RailCut::new(0, cut);
        std::thread::sleep(Duration::from_secs(3));
        drop(rail_cut);
        std::thread::sleep(Duration::from_secs(1));
        stop.store(true, Ordering::Release);
        let (count, longest) = writing.join().unwrap();
        println!("{cut:?}: {count} batches of {} MiB each way, the longest {longest:?}", BYTES >> 20);
        assert!(count > 0);
    });
    mover.check().unwrap();
    mover.shutdown();
}

#[test]
fn a_link_that_goes_down_here() {
    owners_see_nothing_of(Cut::Here);
}

#[test]
fn a_link_that_goes_down_at_the_peer() {
    owners_see_nothing_of(Cut::There);
}

#[test]
fn packets_that_are_lost_in_silence() {
    owners_see_nothing_of(Cut::Silent);
}
