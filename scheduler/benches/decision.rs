//! What one decision costs, end to end: a `RequestArrived` step with its look-up, every
//! candidate's terms, the decode choice and the dispatch, in a cluster that is warm and loaded.
//!
//! The cluster serves a made-up conversation workload (growing chats over a few shared openings, Poisson arrivals at
//! about seven tenths of what the prefill side can do), so that queues, decode batches and the index are as they would
//! be. Then requests are offered and withdrawn again, and only the offering is timed: to several clusters where that
//! takes little time. In a large cluster the same requests are also offered to a conductor that looks at all instances.
//!
//! Bars: with 32 prefill and 32 decode instances p99 at most 20 µs for a prompt of 24 blocks, at most 150 µs for one of
//! 8,192; with 1,000 instances p50 at most 30 µs, with 10,000 at most 60 µs.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_scheduler::{Conductor, Effect, Input, InstanceSpec, Request, SchedulerConfig};
use baton_types::{
    BlockHash, CacheChange, CacheEvent, CostProfile, DecodeCost, Epoch, FitReport, InstanceId, PrefillCost,
    RequestId, Rng, Role, Tier, ValidRange, blocks_for,
};
use criterion::{BenchmarkId, Criterion};

/// Offers that are timed where few instances are looked at, and where all are.
const SAMPLES: [u64; 2] = [20_000, 500];

/// One cluster and its prompts.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Prefill instances, and as many decode instances.
    pairs: u32,
    block_tokens: u32,
    /// Blocks of the prompts that are timed.
    blocks: u64,
    /// Of those, how many are known from before.
    known: u64,
    /// How many instances hold these: one measurement for each number.
    holders: &'static [u32],
    /// Requests served beforehand.
    warm_requests: u64,
    /// Clusters that are measured, each warmed up by requests of its own: what a decision costs depends on how many wait.
    clusters: u64,
    /// The quantile that has a bar, per mille, and the bar, µs.
    bar: (usize, f64),
}

const CASES: [Case; 5] = [
    Case { pairs: 8, warm_requests: 5_000, ..CONVERSATION },
    CONVERSATION,
    Case {
        block_tokens: 16,
        blocks: 8_192,
        known: 7_168,
        warm_requests: 3_000,
        bar: (990, 150.0),
        ..CONVERSATION
    },
    Case { pairs: 500, clusters: 2, holders: &[3, 30, 1_000], bar: (500, 30.0), ..CONVERSATION },
    Case {
        pairs: 5_000,
        holders: &[3, 300, 10_000],
        warm_requests: 150_000,
        clusters: 1,
        bar: (500, 60.0),
        ..CONVERSATION
    },
];

const CONVERSATION: Case = Case {
    pairs: 32,
    block_tokens: 512,
    blocks: 24,
    known: 18,
    holders: &[3],
    warm_requests: 20_000,
    clusters: 6,
    bar: (990, 20.0),
};

/// About a 70B model on eight GPUs: 1.3 s for 12,000 tokens, 28 s for 128,000.
fn profile() -> Arc<CostProfile> {
    Arc::new(CostProfile {
        name: String::from("bench"),
        source: String::from("round numbers of the size of the paper's"),
        kv_bytes_per_token: 327_680,
        kv_capacity_tokens: 1_500_000,
        layers: 80,
        shared_us: 5_000.0,
        fit: FitReport::default(),
        valid: ValidRange::default(),
        prefill: PrefillCost {
            knots_tokens: vec![0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 131_072],
            knots_us: vec![
                13_000.0,
                20_000.0,
                27_000.0,
                40_000.0,
                70_000.0,
                120_000.0,
                220_000.0,
                420_000.0,
                800_000.0,
                1_600_000.0,
                12_800_000.0,
            ],
            attention_ps_per_pair: 1_770.0,
        },
        decode: DecodeCost {
            batches: vec![1, 8, 32, 128],
            base_us: vec![28_000.0, 30_000.0, 34_000.0, 50_000.0],
            context_ps_per_token: vec![40_000.0; 4],
        },
    })
}

fn spec(id: u32, role: Role, profile: &Arc<CostProfile>) -> InstanceSpec {
    InstanceSpec {
        id: InstanceId(id),
        epoch: Epoch(1),
        role,
        profile: profile.clone(),
        capacity_tokens: 1_500_000,
        pass_tokens: 8192,
        pipeline_nodes: 1,
        mixed_chunk_tokens: None,
        max_running: None,
        net_bytes_per_s: 100_000_000_000,
        host_bytes_per_s: 128_000_000_000,
        ssd_bytes_per_s: 6_000_000_000,
        may_change_role: false,
        engine_moves_kv: false,
        kind: 0,
    }
}

/// A prefill engine and its cache: work in series, chains forgotten in order of arrival.
#[derive(Default)]
struct Node {
    free_at_us: u64,
    held: VecDeque<Vec<BlockHash>>,
    held_blocks: usize,
}

/// The cluster: the conductor, its engines, and what will happen next.
struct Cluster {
    case: Case,
    conductor: Conductor,
    profile: Arc<CostProfile>,
    nodes: Vec<Node>,
    rng: Rng,
    now_us: u64,
    next_id: u64,
    coming: BinaryHeap<Reverse<(u64, u64)>>,
    inputs: Vec<Option<Input>>,
    live: std::collections::BTreeMap<u64, Request>,
    chats: Vec<Vec<BlockHash>>,
    effects: Vec<Effect>,
}

impl Cluster {
    fn new(case: Case, seed: u64) -> Self {
        let profile = profile();
        let config = SchedulerConfig { block_tokens: case.block_tokens, ..SchedulerConfig::default() };
        let mut conductor = Conductor::new(config).expect("a valid config");
        let mut effects = Vec::new();
        for id in 0..2 * case.pairs {
            let role = if id < case.pairs { Role::Prefill } else { Role::Decode };
            conductor.step(0, Input::InstanceJoined(spec(id, role, &profile)), &mut effects);
        }
        Self {
            case,
            conductor,
            profile,
            nodes: (0..2 * case.pairs).map(|_| Node::default()).collect(),
            rng: Rng::new(seed),
            now_us: 0,
            next_id: 0,
            coming: BinaryHeap::new(),
            inputs: Vec::new(),
            live: std::collections::BTreeMap::new(),
            chats: Vec::new(),
            effects,
        }
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.rng.unit()).ln() * mean
    }

    fn fresh_blocks(&mut self, count: u64) -> impl Iterator<Item = BlockHash> {
        let rng = &mut self.rng;
        (0..count).map(|_| BlockHash(rng.next_u64())).collect::<Vec<_>>().into_iter()
    }

    /// The next turn of a chat, or a new chat over one of eight shared openings.
    fn next_prompt(&mut self) -> Vec<BlockHash> {
        let most = blocks_for(100_000, self.case.block_tokens) as usize;
        let grown = self.exponential(5_000.0) as u64 + 300;
        let grown = blocks_for(grown, self.case.block_tokens);
        let old = !self.chats.is_empty() && self.rng.chance_permille(600);
        let at = self.rng.below(self.chats.len() as u64) as usize;
        let mut chain = if old && self.chats[at].len() < most {
            self.chats.swap_remove(at)
        } else {
            let opening = self.rng.below(8) + 1;
            (0..blocks_for(1_500, self.case.block_tokens)).map(|b| BlockHash(opening << 32 | b)).collect()
        };
        chain.extend(self.fresh_blocks(grown));
        self.chats.push(chain.clone());
        if self.chats.len() > 60 * self.case.pairs as usize {
            self.chats.swap_remove(0);
        }
        chain
    }

    fn request(&mut self, chain: Vec<BlockHash>) -> Request {
        self.next_id += 1;
        let prompt_tokens = chain.len() as u64 * u64::from(self.case.block_tokens) - 7;
        Request { id: RequestId(self.next_id), prompt_tokens, chain, ..Request::default() }
    }

    fn later(&mut self, at_us: u64, input: Input) {
        self.inputs.push(Some(input));
        self.coming.push(Reverse((at_us, self.inputs.len() as u64 - 1)));
    }

    fn feed(&mut self, input: Input) {
        let mut effects = std::mem::take(&mut self.effects);
        effects.clear();
        self.conductor.step(self.now_us, input, &mut effects);
        for effect in &effects {
            self.carry_out(effect);
        }
        self.effects = effects;
    }

    fn carry_out(&mut self, effect: &Effect) {
        match *effect {
            Effect::StartPrefill { request, instance, .. } => {
                let tokens = self.live[&request.0].prompt_tokens;
                // Two fifths are cached on the whole.
                let new = tokens * 3 / 5;
                let compute_us = self.profile.chunked_prefill_us(new, tokens - new, 8192) as u64;
                let node = &mut self.nodes[instance.index()];
                node.free_at_us = node.free_at_us.max(self.now_us) + compute_us;
                let end_us = node.free_at_us;
                self.later(
                    end_us,
                    Input::PrefillFinished { request, compute_us, cached_tokens: tokens - new },
                );
                self.later(end_us + 10_000, Input::HandoffFinished { request });
                self.store(instance, request, end_us);
            }
            Effect::StartDecode { request, instance } => {
                let output_tokens = self.exponential(343.0) as u32 + 1;
                let end_us = self.now_us + u64::from(output_tokens) * 40_000;
                self.later(end_us, Input::DecodeFinished { request, output_tokens, first_us: 0, tbt_us: 0 });
                self.store(instance, request, end_us);
            }
            Effect::Reject(ref rejection) => {
                self.live.remove(&rejection.request.0);
            }
            Effect::Replicate { to, .. } => {
                let arrival_us = self.now_us + 50_000;
                self.later(arrival_us, Input::ReplicateFinished { to });
            }
            _ => {}
        }
    }

    /// The chain will be readable there; the oldest ones make room.
    fn store(&mut self, instance: InstanceId, request: RequestId, at_us: u64) {
        let chain = self.live[&request.0].chain.clone();
        let feed = |change| Input::Cache(CacheEvent { instance, epoch: Epoch(1), change });
        let most = blocks_for(1_000_000, self.case.block_tokens) as usize;
        let node = &mut self.nodes[instance.index()];
        node.held_blocks += chain.len();
        node.held.push_back(chain.clone());
        let mut gone = Vec::new();
        while node.held_blocks > most {
            let oldest = node.held.pop_front().expect("blocks are held");
            node.held_blocks -= oldest.len();
            gone.push(oldest);
        }
        let tier = if self.next_id.is_multiple_of(3) { Tier::Hbm } else { Tier::Dram };
        self.later(at_us, feed(CacheChange::Stored { parent: None, hashes: chain, tier }));
        for hashes in gone {
            for tier in [Tier::Hbm, Tier::Dram] {
                let hashes = hashes.clone();
                self.later(at_us, feed(CacheChange::Removed { hashes, tier }));
            }
        }
    }

    /// Lets everything happen that is due by `until_us`.
    fn catch_up(&mut self, until_us: u64) {
        loop {
            let event = self.coming.peek().map_or(u64::MAX, |Reverse((at_us, _))| *at_us);
            let wake = self.conductor.next_deadline().unwrap_or(u64::MAX);
            let next = event.min(wake);
            if next > until_us {
                break;
            }
            self.now_us = self.now_us.max(next);
            if event > wake {
                self.feed(Input::TimerFired);
                continue;
            }
            let Some(Reverse((_, at))) = self.coming.pop() else { break };
            if let Some(input) = self.inputs[at as usize].take() {
                if let Input::DecodeFinished { request, .. } = &input {
                    self.live.remove(&request.0);
                }
                self.feed(input);
            }
        }
        self.now_us = self.now_us.max(until_us);
    }

    /// Serves the workload up to the middle of a busy day.
    fn warm_up(&mut self) {
        for _ in 0..self.case.warm_requests {
            let gap_us = self.exponential(1e6 * 32.0 / 23.0 / f64::from(self.case.pairs)) as u64;
            self.catch_up(self.now_us + gap_us);
            let chain = self.next_prompt();
            let request = self.request(chain);
            self.live.insert(self.next_id, request.clone());
            self.feed(Input::RequestArrived(request));
        }
    }

    /// A prompt of exactly the case's length whose beginning is known in a few places.
    fn probes(&mut self, holders: u32) -> Vec<Vec<BlockHash>> {
        let mut known = Vec::new();
        for _ in 0..16 {
            let chain: Vec<BlockHash> = self.fresh_blocks(self.case.known).collect();
            let (all, first) = (2 * self.case.pairs, self.rng.below(u64::from(2 * self.case.pairs)) as u32);
            for nth in 0..holders {
                let instance = InstanceId((first + nth * (all / holders)) % all);
                let change = CacheChange::Stored { parent: None, hashes: chain.clone(), tier: Tier::Hbm };
                self.feed(Input::Cache(CacheEvent { instance, epoch: Epoch(1), change }));
            }
            known.push(chain);
        }
        known
    }

    /// Offers one request and withdraws it; returns how long the offer took and whether it was let in.
    fn offer(&mut self, known: &[Vec<BlockHash>]) -> (Duration, bool) {
        let at = self.rng.below(known.len() as u64) as usize;
        let mut chain = known[at].clone();
        chain.extend(self.fresh_blocks(self.case.blocks - self.case.known));
        let request = self.request(chain);
        let id = request.id;
        self.effects.clear();
        let start = Instant::now();
        self.conductor.step(self.now_us, black_box(Input::RequestArrived(request)), &mut self.effects);
        let took = start.elapsed();
        let admitted = self.conductor.knows(id);
        let now_us = self.now_us;
        self.conductor.step(now_us, Input::RequestCancelled { request: id }, &mut self.effects);
        (took, admitted)
    }
}

/// Clusters of one case, each with prompts whose beginnings it knows.
type WarmFleet = Vec<(Cluster, Vec<Vec<BlockHash>>)>;

/// What a decision costs, in ascending order, µs, and how many requests were let in.
fn measure(offered: &mut WarmFleet, samples: u64) -> (Vec<f64>, u64) {
    let mut each_us = Vec::new();
    let mut admitted = 0;
    for (cluster, known) in offered {
        for _ in 0..samples {
            let (took, in_) = cluster.offer(known);
            each_us.push(took.as_secs_f64() * 1e6);
            admitted += u64::from(in_);
        }
    }
    each_us.sort_by(f64::total_cmp);
    (each_us, admitted)
}

/// Prints what a decision costs beside its bar, and the states in which it was measured.
fn print(case: Case, offered: &mut WarmFleet, holders: u32) {
    let (each_us, admitted) = measure(offered, SAMPLES[0]);
    let at = |all: &[f64], permille: usize| all[(all.len() * permille / 1000).min(all.len() - 1)];
    let quantile = |permille| at(&each_us, permille);
    println!(
        "decision, {0}P+{0}D, {1} blocks, {holders} holders: p50 {2:.1} us, p99 {3:.1} us (bar of p{4} {5}), p99.9 {6:.1}, longest {7:.0}",
        case.pairs,
        case.blocks,
        quantile(500),
        quantile(990),
        case.bar.0 / 10,
        case.bar.1,
        quantile(999),
        quantile(1000)
    );
    println!("  {:.3} admitted", admitted as f64 / each_us.len() as f64);
    for (cluster, _) in &*offered {
        let load = cluster.conductor.snapshot();
        let decodes: u32 = load.instances.iter().map(|i| i.decodes).sum();
        let waiting: u32 = load.instances.iter().map(|i| i.waiting).sum();
        let index = cluster.conductor.index();
        println!(
            "  {} live, {waiting} waiting, {decodes} decodes; index {} blocks in {} runs",
            load.requests,
            index.len(),
            index.runs()
        );
    }
    if case.pairs > 32 {
        let few = SchedulerConfig { block_tokens: case.block_tokens, ..SchedulerConfig::default() };
        let all = SchedulerConfig { candidates: usize::MAX, ..few.clone() };
        let change = |offered: &mut WarmFleet, config: &SchedulerConfig| {
            for (cluster, _) in offered {
                cluster.feed(Input::PolicyChanged(Box::new(config.clone())));
            }
        };
        change(offered, &all);
        let (of_all_us, _) = measure(offered, SAMPLES[1]);
        change(offered, &few);
        let p50 = at(&of_all_us, 500);
        println!("  looking at all: p50 {p50:.1} us, {:.1} times as long", p50 / quantile(500));
    }
}

fn main() {
    let measured = std::env::args().any(|arg| arg == "--bench");
    let mut criterion = measured.then(|| Criterion::default().configure_from_args());
    for mut case in CASES {
        // `cargo test --benches` runs each bench once, unoptimised: show that it works and stop.
        if !measured {
            (case.warm_requests, case.clusters, case.pairs) = (50, 1, case.pairs.min(500));
        }
        let warm = |seed| {
            let mut cluster = Cluster::new(case, seed);
            cluster.warm_up();
            (cluster, Vec::new())
        };
        let mut offered: WarmFleet = (1..=case.clusters).map(warm).collect();
        for &holders in case.holders {
            for (cluster, known) in &mut offered {
                *known = cluster.probes(holders);
            }
            let Some(criterion) = criterion.as_mut() else {
                let (cluster, known) = &mut offered[0];
                assert!(cluster.offer(known).1, "an idle cluster lets the request in");
                continue;
            };
            print(case, &mut offered, holders);
            let mut group = criterion.benchmark_group("decision");
            group.sample_size(20).measurement_time(Duration::from_secs(2));
            let name = format!("{0}P+{0}D, {1} blocks, {holders} holders", case.pairs, case.blocks);
            group.bench_function(BenchmarkId::from_parameter(name), |bench| {
                bench.iter_custom(|times| {
                    let count = offered.len() as u64;
                    (0..times)
                        .map(|nth| {
                            let (cluster, known) = &mut offered[(nth % count) as usize];
                            cluster.offer(known).0
                        })
                        .sum()
                });
            });
            group.finish();
        }
    }
    if let Some(criterion) = criterion.as_mut() {
        criterion.final_summary();
    }
}
