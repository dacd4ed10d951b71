//! Cost of one slice in the mover's core, from the batch's submission to the slice's end.
//!
//! Slices end in the order in which they were posted, each as its own input, one microsecond after the one
//! before; a new batch is submitted whenever one ends. One iteration is one slice: its post and its end.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_transfer::Priority;
use baton_transfer::{
    BatchId, BatchRequest, Direction, Effect, Input, MoverConfig, MoverCore, Op, PathNumber, PeerNumber,
    RailNumber, RailSpec, Route, SliceTicket,
};
use criterion::{Criterion, criterion_group, criterion_main};

/// Sixteen slices of the smallest size.
const BATCH_BYTES: u64 = 1 << 20;

struct Loop {
    core: MoverCore,
    peers: u32,
    next: u64,
    now_us: u64,
    effects: Vec<Effect>,
    posted: VecDeque<(PathNumber, SliceTicket)>,
}

impl Loop {
    fn new(peers: u32, rails: u8, batches: u64) -> Self {
        let config =
            MoverConfig { rails: vec![RailSpec::default(); usize::from(rails)], ..MoverConfig::default() };
        let core = MoverCore::new(config);
        let mut held = Self { core, peers, next: 0, now_us: 0, effects: Vec::new(), posted: VecDeque::new() };
        for peer in 0..peers {
            let routes = (0..rails).map(|rail| Route { rail: RailNumber(rail), tier: 0 }).collect();
            held.feed(Input::PeerKnown { peer: PeerNumber(peer), routes });
        }
        for _ in 0..batches {
            held.submit();
        }
        for _ in 0..20_000 {
            held.turn();
        }
        held.core.check().expect("the core is sound");
        held
    }

    fn submit(&mut self) {
        let op = Op { direction: Direction::Write, bytes: BATCH_BYTES, location: 0 };
        let batch = BatchId(self.next);
        #[expect(clippy::cast_possible_truncation, reason = "below the number of peers")]
        let peer = PeerNumber((self.next % u64::from(self.peers)) as u32);
        let priority = Priority::ALL[(self.next / 7 % 4) as usize];
        self.next += 1;
        let request = BatchRequest { batch, peer, priority, deadline_us: None, notice: false, ops: vec![op] };
        self.feed(Input::Submit(request));
    }

    fn feed(&mut self, input: Input) {
        let mut effects = std::mem::take(&mut self.effects);
        self.core.step(self.now_us, input, &mut effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::Post { path, ticket, .. } => self.posted.push_back((path, ticket)),
                Effect::OpenPath { path, .. } => {
                    let mut more = Vec::new();
                    self.core.step(self.now_us, Input::PathOpened { path }, &mut more);
                    for effect in more {
                        if let Effect::Post { path, ticket, .. } = effect {
                            self.posted.push_back((path, ticket));
                        }
                    }
                }
                Effect::Done { .. } => self.next |= 1 << 63,
                other => panic!("a sound world needs no {other:?}"),
            }
        }
        self.effects = effects;
    }

    /// One slice ends, and what may be posted then is.
    fn turn(&mut self) {
        let (path, ticket) = self.posted.pop_front().expect("there is always work");
        self.now_us += 1;
        self.feed(Input::SliceDone { path, ticket });
        if self.next >> 63 == 1 {
            self.next &= !(1 << 63);
            self.submit();
        }
    }
}

fn slices(criterion: &mut Criterion) {
    for (peers, rails, batches) in [(1, 1, 8), (1, 8, 64), (64, 2, 256), (128, 2, 4_096)] {
        let name = format!("slice/{peers}_peers_{rails}_rails_{batches}_batches");
        let mut held = Loop::new(peers, rails, batches);
        criterion.bench_function(&name, |bencher| bencher.iter(|| held.turn()));
        held.core.check().expect("the core is sound");
    }
}

/// One large batch from its submission to its end, over eight paths.
fn large_batch(criterion: &mut Criterion) {
    criterion.bench_function("batch/1_GiB_8_rails", |bencher| {
        bencher.iter_custom(|rounds| {
            let mut held = Loop::new(1, 8, 1);
            let mut spent = Duration::ZERO;
            for _ in 0..rounds {
                let started = Instant::now();
                let op = Op { direction: Direction::Read, bytes: 1 << 30, location: 0 };
                let batch = BatchId(u64::MAX);
                let (peer, priority) = (PeerNumber(0), Priority::Handoff);
                let request =
                    BatchRequest { batch, peer, priority, deadline_us: None, notice: false, ops: vec![op] };
                held.feed(Input::Submit(request));
                while held.core.done_bytes(batch).is_some() {
                    held.turn();
                }
                spent += started.elapsed();
            }
            spent
        });
    });
}

criterion_group!(benches, slices, large_batch);
criterion_main!(benches);
