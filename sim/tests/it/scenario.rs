//! Scenarios from a seed: a small cluster, its policies, its load and what befalls it.

use std::sync::Arc;

use baton_scheduler::{AdmissionMode, PolicyName, SchedulerConfig};
use baton_sim::engine::Mix;
use baton_sim::metrics::Collector;
use baton_sim::setup::NO_STAGE_LIMIT_US;
use baton_sim::{Clients, Handoff, Pool, Setup, TraceWorkload, World, profiles};
use baton_store::{Eviction, Offload};
use baton_traces::{Dialect, Record, Trace};
use baton_types::simulated::FaultPlan;
use baton_types::{CostProfile, Rng, Role, SloClass};

/// More moments than any of these runs can need: a run that goes on is stuck in a circle.
const MOST_MOMENTS: u64 = 20_000_000;

/// A setup with its load.
#[derive(Clone)]
pub struct Scenario {
    pub setup: Setup,
    pub trace: Arc<Trace>,
}

impl Scenario {
    /// Everything by lot, faults included.
    pub fn with_faults(seed: u64) -> Self {
        let mut scenario = Self::quiet(seed);
        let mut rng = Rng::fork(seed, 901);
        let up_to = |rng: &mut Rng, most: u64| u32::try_from(rng.below(most + 1)).unwrap();
        let news_delays_us = [0, 0, 1_000, 200_000, 5_000_000];
        scenario.setup.faults = FaultPlan {
            deaths: up_to(&mut rng, 5),
            slow_nodes: up_to(&mut rng, 2),
            lost_links: up_to(&mut rng, 3),
            lost_news_permille: [0, 0, 20, 300][pick(&mut rng, 4)],
            news_delay_us: news_delays_us[pick(&mut rng, 5)],
            seed,
            ..FaultPlan::default()
        };
        scenario.setup.clients.leave_permille = [0, 0, 100, 500][pick(&mut rng, 4)];
        if rng.chance_permille(80) {
            scenario.setup.network.max_flights_per_link = 2;
        }
        scenario
    }

    /// A scenario with or without faults, with instances that lend room, some of them on flash.
    pub fn with_stores(seed: u64) -> Self {
        let mut scenario = if seed.is_multiple_of(3) { Self::quiet(seed) } else { Self::with_faults(seed) };
        let mut rng = Rng::fork(seed, 902);
        let block = u64::from(scenario.setup.scheduler.block_tokens);
        let mut lender = Pool::new(Role::Store, 1 + u32::try_from(rng.below(3)).unwrap(), profile());
        lender.dram_tokens = block * (2 + rng.below(2000));
        lender.ssd_tokens = block * [0, 0, 3000][pick(&mut rng, 3)];
        lender.net_bytes_per_s = [200_000_000, 2_000_000_000, 100_000_000_000][pick(&mut rng, 3)];
        scenario.setup.pools.push(lender);
        scenario.setup.scheduler.replicate = true;
        scenario.setup.scheduler.fetch = true;
        scenario
    }

    /// Everything by lot but faults: every client stays, all news arrive at once.
    pub fn quiet(seed: u64) -> Self {
        let mut rng = Rng::fork(seed, 900);
        let block_tokens = [16, 64, 512][pick(&mut rng, 3)];
        let hbm_blocks = 40 + rng.below(360);
        let load = Load {
            requests: 30 + rng.below(120),
            block_tokens,
            longest_blocks: hbm_blocks * (2 + rng.below(8)) / 8,
            gap_ms: [5.0, 50.0, 300.0, 1500.0][pick(&mut rng, 4)],
            longest_output: [4, 60, 400][pick(&mut rng, 3)],
        };
        let trace = load.trace(&mut rng);
        let mut setup = cluster(&mut rng, block_tokens, hbm_blocks);
        setup.seed = seed;
        setup.scheduler.seed = seed;
        setup.keep_outcomes = true;
        setup.audit_every = 7;
        if !seed.is_multiple_of(4) {
            setup.stage_floor_us = NO_STAGE_LIMIT_US;
        }
        Self { setup, trace: Arc::new(trace) }
    }

    /// Runs to the end under the oracle's eyes.
    pub fn run(&self) -> Result<Collector, String> {
        let workload = TraceWorkload::new(self.trace.clone(), 1.0);
        let mut world = World::new(self.setup.clone(), Box::new(workload))?;
        let mut moments = 0;
        while world.advance()? {
            moments += 1;
            if moments > MOST_MOMENTS {
                return Err(format!("no end after {moments} moments"));
            }
        }
        world.rest()?;
        Ok(world.into_metrics())
    }

    /// A one-line description, to find the cause of a failure.
    pub fn describe(&self) -> String {
        let s = &self.setup;
        let pools: Vec<String> = s
            .pools
            .iter()
            .map(|p| {
                let tiers = (p.hbm_tokens.unwrap_or(0), p.dram_tokens, p.ssd_tokens);
                format!("{}×{:?} {tiers:?} nodes {} {:?}", p.count, p.role, p.pipeline_nodes, p.mix)
            })
            .collect();
        format!(
            "{} {:?} stages from {} µs routers {} sync {} µs {:?} {:?} block {} retries {} leave {} {:?} [{}]",
            s.scheduler.policy.name(),
            s.scheduler.admission,
            s.stage_floor_us,
            s.routers,
            s.router_sync_us,
            s.handoff,
            s.offload,
            s.scheduler.block_tokens,
            s.clients.retries,
            s.clients.leave_permille,
            s.faults,
            pools.join(", ")
        )
    }
}

/// One of `n`, from zero.
pub fn pick(rng: &mut Rng, n: u64) -> usize {
    usize::try_from(rng.below(n)).unwrap()
}

fn profile() -> Arc<CostProfile> {
    Arc::new(profiles::named("llama3-70b-8xa100").unwrap())
}

fn cluster(rng: &mut Rng, block_tokens: u32, hbm_blocks: u64) -> Setup {
    let profile = profile();
    let count = |rng: &mut Rng| u32::try_from(1 + rng.below(6)).unwrap();
    let (prefills, decodes) = (count(rng), count(rng));
    let mut setup = Setup::disaggregated(prefills, decodes, &profile, scheduler(rng, block_tokens));
    match rng.below(6) {
        0 => setup.pools = vec![Pool::new(Role::Both, prefills, profile)],
        1 => setup.pools.push(Pool::new(Role::Both, 1 + decodes / 2, profile)),
        _ => {}
    }
    for pool in &mut setup.pools {
        // A few tokens more than whole blocks, as real capacities are.
        let blocks = hbm_blocks * (8 + [0, 0, 3][pick(rng, 3)]) / 8;
        pool.hbm_tokens = Some(blocks * u64::from(block_tokens) + rng.below(u64::from(block_tokens)));
        pool.dram_tokens = [0, 0, 2][pick(rng, 3)] * hbm_blocks * u64::from(block_tokens);
        pool.ssd_tokens = [0, 0, 3][pick(rng, 3)] * hbm_blocks * u64::from(block_tokens);
        pool.pass_tokens = [256, 2048, 8192][pick(rng, 3)];
        pool.mix =
            [Mix::PrefillFirst, Mix::Fixed(128), Mix::Target(60_000), Mix::Target(90_000)][pick(rng, 4)];
        pool.prefix_cache = !rng.chance_permille(50);
        pool.net_bytes_per_s = [200_000_000, 2_000_000_000, 100_000_000_000][pick(rng, 3)];
        if pool.role == Role::Prefill && rng.chance_permille(250) {
            pool.pipeline_nodes = u32::try_from(2 + rng.below(3)).unwrap();
        }
    }
    setup.eviction = Eviction::ALL[pick(rng, 5)];
    setup.offload = [Offload::Off, Offload::OnEvict, Offload::WriteThrough][pick(rng, 3)];
    setup.ssd_second_touch = rng.chance_permille(300);
    setup.handoff = [Handoff::Layerwise, Handoff::AfterPrefill][pick(rng, 2)];
    setup.shared_links = rng.chance_permille(700);
    setup.routers = [1, 1, 2, 3][pick(rng, 4)];
    setup.router_sync_us = [0, 500, 50_000][pick(rng, 3)];
    setup.clients = Clients {
        retries: u32::try_from(rng.below(4)).unwrap(),
        jitter_permille: [0, 100][pick(rng, 2)],
        leave_permille: 0,
    };
    setup.sample_us = [0, 100_000, 1_000_000][pick(rng, 3)];
    if setup.scheduler.policy == PolicyName::BatonInformed {
        setup.foresight_us = 10_000_000;
    }
    setup
}

fn scheduler(rng: &mut Rng, block_tokens: u32) -> SchedulerConfig {
    let modes = [
        AdmissionMode::Auto,
        AdmissionMode::None,
        AdmissionMode::AtDecode,
        AdmissionMode::Early,
        AdmissionMode::EarlyPredict,
        AdmissionMode::Slo,
    ];
    // Half of the runs are the product's own policy.
    let policy = if rng.chance_permille(500) { PolicyName::Baton } else { PolicyName::ALL[pick(rng, 11)] };
    SchedulerConfig {
        policy,
        admission: modes[pick(rng, 6)],
        shadow: if rng.chance_permille(200) { modes[2..].to_vec() } else { Vec::new() },
        block_tokens,
        fetch: rng.chance_permille(850),
        local_prefill: rng.chance_permille(700),
        max_waiting_requests: [100_000, 40][pick(rng, 2)],
        max_retries: u32::try_from(rng.below(4)).unwrap(),
        explain_every: [0, 10][pick(rng, 2)],
        classes: vec![SloClass {
            ttft_us: [500_000, 5_000_000, 30_000_000][pick(rng, 3)],
            tbt_us: [40_000, 100_000][pick(rng, 2)],
            ..SloClass::default()
        }],
        ..SchedulerConfig::default()
    }
}

/// The bounds of the requests that arrive.
pub struct Load {
    pub requests: u64,
    pub block_tokens: u32,
    pub longest_blocks: u64,
    pub gap_ms: f64,
    pub longest_output: u64,
}

impl Load {
    /// Prompts that begin as others did, some in bursts, some of a single token.
    pub fn trace(&self, rng: &mut Rng) -> Trace {
        let block = u64::from(self.block_tokens);
        let (mut at_ms, mut fresh) = (0.0, 0);
        let mut chains: Vec<Vec<u64>> = Vec::new();
        let mut records = Vec::new();
        for _ in 0..self.requests {
            if !rng.chance_permille(300) {
                at_ms += -(1.0 - rng.unit()).ln() * self.gap_ms;
            }
            let blocks = 1 + rng.below(self.longest_blocks.max(1)) * rng.below(1001) / 1000;
            let mut ids = Vec::new();
            if rng.chance_permille(600) && !chains.is_empty() {
                let known = &chains[pick(rng, chains.len() as u64)];
                let shared = rng.below(known.len() as u64 + 1).min(blocks - 1);
                ids.extend_from_slice(&known[..usize::try_from(shared).unwrap()]);
            }
            while (ids.len() as u64) < blocks {
                fresh += 1;
                ids.push(fresh);
            }
            let last_tokens = if rng.chance_permille(200) { block } else { 1 + rng.below(block) };
            records.push(Record {
                timestamp_ms: at_ms,
                input_length: (blocks - 1) * block + last_tokens,
                output_length: 1 + rng.below(self.longest_output) * rng.below(1001) / 1000,
                hash_ids: ids.clone(),
                extra: None,
            });
            // The last block may be partial: no other prompt continues it.
            ids.pop();
            if !ids.is_empty() {
                chains.push(ids);
            }
        }
        Trace { block_tokens: self.block_tokens, records, assumptions: vec![], dialect: Dialect::Mooncake }
    }
}
