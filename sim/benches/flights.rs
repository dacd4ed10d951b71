//! Benchmark of the cost of one start and one finish with many flights in progress.
//!
//! A closed loop holds the number of flights: whenever one ends another starts, on a random path of
//! two links. Half are paced. One iteration is one start and one end, with all timers between.

use std::time::{Duration, Instant};

use baton_sim::network::{
    Effect, Input, LinkId, LinkSpec, Network, NetworkConfig, PathLinks, Priority, ProducerPace, TransferId,
    TransferRequest,
};
use baton_types::Rng;
use criterion::{Criterion, criterion_group, criterion_main};

struct Loop {
    engine: Network,
    rng: Rng,
    links: u64,
    next: u64,
    now_us: u64,
    effects: Vec<Effect>,
}

impl Loop {
    fn new(links: u64, flights: u64) -> Self {
        let spec = LinkSpec { bytes_per_s: 12_500_000_000, latency_us: 5 };
        let specs = vec![spec; usize::try_from(links).expect("small")];
        let engine = Network::new(NetworkConfig::default(), &specs);
        let mut held = Self { engine, rng: Rng::new(7), links, next: 0, now_us: 0, effects: Vec::new() };
        for _ in 0..flights {
            held.start();
        }
        for _ in 0..2 * flights {
            held.turn();
        }
        held
    }

    fn path(&mut self) -> PathLinks {
        #[expect(clippy::cast_possible_truncation, reason = "as many as there are links")]
        let mut draw = || LinkId(self.rng.below(self.links) as u32);
        let first = draw();
        loop {
            if let Ok(path) = PathLinks::new(&[first, draw()]) {
                return path;
            }
        }
    }

    fn start(&mut self) {
        let (links, bytes) = (self.path(), 10_000_000 + self.rng.below(500_000_000));
        let produced_until_us = self.now_us + 100_000 + self.rng.below(400_000);
        let paced = ProducerPace { produced_until_us, last_bytes: bytes / 80 };
        let request = TransferRequest {
            transfer: TransferId(self.next),
            links,
            bytes,
            priority: Priority::ALL[usize::from(self.rng.chance_permille(300))],
            paced: self.rng.chance_permille(500).then_some(paced),
            deadline_us: None,
            rate_cap_bytes_per_s: None,
        };
        self.next += 1;
        self.engine.step(self.now_us, Input::Start(request), &mut self.effects);
    }

    /// Runs until a flight ends and starts another; simultaneous ends are replaced one a turn.
    fn turn(&mut self) {
        while self.effects.pop().is_none() {
            self.now_us = self.engine.next_deadline().expect("flights are in progress");
            self.engine.step(self.now_us, Input::TimerFired, &mut self.effects);
        }
        self.start();
    }
}

fn churn(c: &mut Criterion) {
    for (links, flights) in [(16, 100), (1_000, 10_000)] {
        let mut held = Loop::new(links, flights);
        c.bench_function(&format!("start+finish/{links} links/{flights} flights"), |b| {
            b.iter_custom(|turns| {
                let before = Instant::now();
                for _ in 0..turns {
                    held.turn();
                }
                before.elapsed()
            });
        });
    }
}

criterion_group! {
    name = flights;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    targets = churn
}
criterion_main!(flights);
