//! A thousand segments at once, over shared memory and over TCP: each is reached, none of their transfers starves,
//! and nothing of them stays.

use std::sync::Arc;
use std::time::Duration;

use baton_transfer::Priority;
use baton_transports::mover::*;

use crate::mover_driver::DoneCheck as _;
use crate::rigs::fresh_name;

const SEGMENTS: usize = 1_000;
const BYTES: usize = 16 << 10;
const LIMIT: Duration = Duration::from_secs(40);
/// Hand-offs that are kept under way while the least urgent wait for their turn, and how many there may be in all.
const URGENT: usize = 64;
const URGENT_MOST: usize = 100_000;

struct NullReceiver;

impl NoticeReceiver for NullReceiver {
    fn notice(&self, _: &PeerId, _: Notice) {}
}

struct Node {
    mover: Mover,
    exposure: Arc<Exposure>,
    id: PeerId,
    memories: Vec<Arc<Memory>>,
}

impl Node {
    fn start(shared_memory: bool, epoch: u64) -> Self {
        let (exposure, inbound) = (Exposure::new(), Arc::new(NullReceiver));
        let (id, transport): (PeerId, Arc<dyn Transport>) = if shared_memory {
            let config = ShmConfig::new(fresh_name(), epoch);
            let shm = ShmTransport::start(config, exposure.clone(), inbound).unwrap();
            (shm.peer_id(), shm)
        } else {
            let config = TcpConfig::new(([127, 0, 0, 1], 0).into(), epoch);
            let tcp = TcpTransport::start(config, exposure.clone(), inbound).unwrap();
            (tcp.peer_id(), tcp)
        };
        let mover = Mover::new(MoverSettings::default(), exposure.clone(), vec![transport]).unwrap();
        Self { mover, exposure, id, memories: Vec::new() }
    }

    fn share(&mut self) {
        for _ in 0..SEGMENTS {
            let memory = Memory::shared(BYTES, Pages::Ordinary, Location::Anywhere).unwrap();
            self.mover.register(&memory).unwrap();
            self.memories.push(memory);
        }
    }

    fn open(&self) -> Vec<Arc<RemoteSegment>> {
        let open = |memory| self.mover.open_window(memory, 0, BYTES as u64, Grant::ReadWrite).unwrap();
        self.memories.iter().map(open).map(Arc::new).collect()
    }

    fn batch(
        &self,
        (number, peer): (usize, &PeerId),
        (direction, priority): (Direction, Priority),
        remote: &Arc<RemoteSegment>,
    ) -> Batch {
        let local = Region { memory: self.memories[number].clone(), at: 0 };
        let op = Op { direction, local, remote: remote.clone(), remote_at: 0, bytes: BYTES as u64 };
        Batch { peer: peer.clone(), priority, limit: Some(LIMIT), verify: true, notice: None, ops: vec![op] }
    }

    fn all_done(&self, batches: Vec<BatchId>) {
        for batch in batches {
            let outcome = self.mover.wait(batch, LIMIT);
            assert!(outcome.as_ref().is_some_and(Outcome::is_done), "{outcome:?}: {:?}", self.mover.stats());
        }
        self.mover.check().unwrap();
        let stats = self.mover.stats();
        assert_eq!(
            (stats.live_batches, stats.outstanding_slices, stats.paths_broken),
            (0, 0, 0),
            "{stats:?}"
        );
    }
}

fn pattern(number: usize) -> Vec<u8> {
    (0..BYTES).map(|at| (at * 13 + number * 7 + at / 251) as u8).collect()
}

fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    memory.read(0, &mut bytes);
    bytes
}

/// Segments that this process maps, those of other tests included: a few dozen.
fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("baton-segment")).count()
}

fn a_thousand(shared_memory: bool) {
    let epoch = if shared_memory { 71 } else { 81 };
    let (mut here, mut there) = (Node::start(shared_memory, epoch), Node::start(shared_memory, epoch + 1));
    there.share();
    here.share();
    let windows = there.open();
    for (number, memory) in here.memories.iter().enumerate() {
        memory.write(0, &pattern(number));
    }
    let all = |direction| -> Vec<BatchId> {
        let submit = |(number, window): (usize, &Arc<RemoteSegment>)| {
            let how = (direction, Priority::ALL[number % 4]);
            here.mover.submit(here.batch((number, &there.id), how, window)).unwrap()
        };
        windows.iter().enumerate().map(submit).collect()
    };
    here.all_done(all(Direction::Write));
    for (number, memory) in there.memories.iter().enumerate() {
        assert!(bytes_of(memory) == pattern(number), "segment {number}");
        memory.write(0, &pattern(number + 5));
    }
    here.all_done(all(Direction::Read));
    for (number, memory) in here.memories.iter().enumerate() {
        assert!(bytes_of(memory) == pattern(number + 5), "segment {number}");
    }

    the_least_urgent_get_their_turn(&here, &there, &windows);

    assert!(!shared_memory || mapped() >= 3 * SEGMENTS, "both ends map each other's");
    windows.iter().for_each(|window| there.mover.revoke(window.window));
    assert_eq!(there.exposure.windows(), 0);
    for node in [&mut here, &mut there] {
        node.memories.clear();
        // Peers learn which memories are gone when the mover registers one more.
        let last = Memory::shared(BYTES, Pages::Ordinary, Location::Anywhere).unwrap();
        node.mover.register(&last).unwrap();
        node.memories.push(last);
    }
    for _ in 0..500 {
        if mapped() < SEGMENTS {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} segments are still mapped", mapped());
}

/// Hand-offs are kept coming until the last offload has ended; that it ends at all is what is asked.
fn the_least_urgent_get_their_turn(here: &Node, there: &Node, windows: &[Arc<RemoteSegment>]) {
    let submit = |number: usize, priority| {
        let batch = here.batch((number, &there.id), (Direction::Write, priority), &windows[number]);
        here.mover.submit(batch).unwrap()
    };
    // Of ranges that no other batch touches.
    let (urgent, idle) = (SEGMENTS / 2, SEGMENTS / 2..SEGMENTS);
    let mut handoffs: Vec<BatchId> = (0..URGENT).map(|at| submit(at, Priority::Handoff)).collect();
    let mut offloads: Vec<BatchId> = idle.map(|number| submit(number, Priority::Offload)).collect();
    let mut count = URGENT;
    while !offloads.is_empty() {
        assert!(count < URGENT_MOST, "{} offloads starve behind {count} hand-offs", offloads.len());
        let first = handoffs.remove(0);
        assert!(here.mover.wait(first, LIMIT).is_some_and(|outcome| outcome.is_done()));
        handoffs.push(submit(count % urgent, Priority::Handoff));
        count += 1;
        offloads.retain(|&batch| match here.mover.poll(batch) {
            Progress::Running { .. } => true,
            Progress::Ended(outcome) => {
                assert!(outcome.is_done(), "{outcome:?}");
                false
            }
            Progress::Unknown => panic!("an offload was forgotten"),
        });
    }
    here.all_done(handoffs);
}

#[test]
fn a_thousand_segments_over_shared_memory() {
    a_thousand(true);
}

#[test]
fn a_thousand_segments_over_tcp() {
    a_thousand(false);
}
