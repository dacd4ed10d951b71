//! The decisions of every policy, as digests that were written down: a change of form leaves them as they are.
//!
//! A change may alter a policy's decisions on purpose. Then copy the new lines from the file that the
//! failure names into `pinned.txt`, and state in the commit which policies decide otherwise, and why.
//! The loads are drawn with the logarithms of the C library. The load has digests of its own in the
//! file: they show when the load differs and not the decisions.

use std::fmt::Write as _;
use std::hash::Hasher;
use std::sync::Arc;

use baton_scheduler::{AdmissionMode, PolicyName, SchedulerConfig};
use baton_sim::engine::Mix;
use baton_sim::{Clients, Pool, Setup, TraceWorkload, World, profiles};
use baton_store::{Effect, Eviction, Input, Offload, Store, StoreConfig};
use baton_traces::Trace;
use baton_traces::synth::{Kind, Workload, workload};
use baton_types::{BlockKey, ChainHasher, RequestId, Role, SloClass};
use rayon::prelude::*;

use crate::scenario::Scenario;

const POLICIES: [PolicyName; 11] = PolicyName::ALL;
const EVICTIONS: [Eviction; 5] =
    [Eviction::Lru, Eviction::Lfu, Eviction::S3Fifo, Eviction::LengthAware, Eviction::Reuse];
const MODES: [AdmissionMode; 4] =
    [AdmissionMode::Auto, AdmissionMode::None, AdmissionMode::EarlyPredict, AdmissionMode::Slo];
const OFFLOADS: [Offload; 3] = [Offload::Off, Offload::OnEvict, Offload::WriteThrough];

/// Never within a run: the oracle keeps the digest and audits at rest alone.
const SELDOM: u64 = 1 << 40;
const BLOCK_TOKENS: u32 = 512;
/// So small beside the load that every cache evicts all the time.
const HBM_TOKENS: u64 = 300 * BLOCK_TOKENS as u64;

/// FNV-1a: the same everywhere, in every release.
struct Digest(u64);

impl Hasher for Digest {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        let mix = |digest: u64, byte: &u8| (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3);
        self.0 = bytes.iter().fold(self.0, mix);
    }
}

impl Digest {
    const fn new() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }

    fn of(what: &impl std::fmt::Debug) -> u64 {
        let mut digest = Self::new();
        digest.write(format!("{what:?}").as_bytes());
        digest.finish()
    }
}

/// Agents that share long openings, faster than the cluster can serve them all.
fn load() -> Arc<Trace> {
    let usual = Workload::new(Kind::Agents, 19);
    let agents = Workload {
        requests: 1_500,
        requests_per_s: 12.0,
        input_mean: 12_000.0,
        shared_tokens: 4_000,
        groups: 24,
        ..usual
    };
    Arc::new(workload(&agents).unwrap())
}

/// Four and four with a lender, or four that do both.
fn cluster(coupled: bool, policy: PolicyName, admission: AdmissionMode) -> Setup {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let classes = vec![SloClass { ttft_us: 3_000_000, tbt_us: 60_000, ..SloClass::default() }];
    let scheduler = SchedulerConfig {
        policy,
        admission,
        shadow: MODES[2..].to_vec(),
        explain_every: 5,
        classes,
        block_tokens: BLOCK_TOKENS,
        ..SchedulerConfig::default()
    };
    let mut setup = Setup::disaggregated(4, 4, &profile, scheduler);
    let mut lender = Pool::new(Role::Store, 1, Arc::clone(&profile));
    lender.dram_tokens = HBM_TOKENS;
    if coupled {
        setup.pools = vec![Pool::new(Role::Both, 4, profile)];
    } else {
        setup.pools.push(lender);
    }
    for pool in setup.pools.iter_mut().filter(|pool| pool.role != Role::Store) {
        pool.hbm_tokens = Some(HBM_TOKENS);
        pool.dram_tokens = 2 * HBM_TOKENS;
        pool.mix = Mix::Fixed(512);
        pool.net_bytes_per_s = 10_000_000_000;
    }
    setup.clients = Clients { retries: 1, jitter_permille: 100, leave_permille: 20 };
    setup.foresight_us = if policy == PolicyName::BatonInformed { 10_000_000 } else { 0 };
    setup.audit_every = SELDOM;
    setup
}

/// The digest of every order of a run.
fn orders(setup: Setup, trace: &Arc<Trace>) -> u64 {
    let mut world = World::new(setup, Box::new(TraceWorkload::new(Arc::clone(trace), 1.0))).unwrap();
    world.run().unwrap();
    world.orders_digest()
}

/// The digest of everything that one store says when requests open, fill and close their chains one after the other,
/// eight at a time.
fn store_effects(eviction: Eviction, offload: Offload, trace: &Trace) -> u64 {
    let (hbm_blocks, dram_blocks, ssd_blocks) = (400, 600, 900);
    let config =
        StoreConfig { hbm_blocks, dram_blocks, ssd_blocks, eviction, offload, ssd_second_touch: false };
    let mut store = Store::new(config).unwrap();
    let (mut digest, mut effects) = (Digest::new(), Vec::new());
    for (at, record) in trace.records.iter().enumerate() {
        let now_us = at as u64 * 250_000;
        let mut hasher = ChainHasher::new(1, b"pinned");
        let chain: Vec<BlockKey> = record.hash_ids.iter().map(|id| hasher.push_id(*id)).collect();
        let owner = RequestId(at as u64);
        store.step(now_us, Input::Open { owner, chain: &chain, room_blocks: 1 }, &mut effects);
        store.step(now_us, Input::Seal { owner, upto_blocks: u32::MAX }, &mut effects);
        if let Some(done) = (at as u64).checked_sub(8) {
            store.step(now_us, Input::Close { owner: RequestId(done) }, &mut effects);
        }
        let mut open = 0;
        while open < effects.len() {
            let answer = match &effects[open] {
                Effect::Offload { ticket, .. } => Some(Input::OffloadDone { ticket: *ticket, ok: true }),
                Effect::Onboard { owner, .. } => Some(Input::OnboardDone { owner: *owner, ok: true }),
                _ => None,
            };
            if let Some(answer) = answer {
                store.step(now_us, answer, &mut effects);
            }
            open += 1;
        }
        effects.drain(..).for_each(|effect| digest.write(format!("{effect:?}").as_bytes()));
    }
    let evicted: u64 = store.stats().tiers.iter().map(|tier| tier.evicted_blocks).sum();
    assert!(evicted > 1_000, "{eviction:?} {offload:?} evicted {evicted}: nothing was at stake");
    digest.finish()
}

/// Names and digests, a line each.
fn lines() -> String {
    let trace = load();
    let mut runs: Vec<(String, Setup)> = Vec::new();
    for (name, coupled) in [("pair", false), ("coupled", true)] {
        for policy in POLICIES {
            for mode in MODES {
                runs.push((
                    format!("{name} {} {}", policy.name(), mode.name()),
                    cluster(coupled, policy, mode),
                ));
            }
        }
        for eviction in EVICTIONS {
            for offload in OFFLOADS {
                let mut setup = cluster(coupled, PolicyName::Baton, AdmissionMode::Auto);
                (setup.eviction, setup.offload) = (eviction, offload);
                runs.push((format!("{name} {eviction:?} {offload:?}"), setup));
            }
        }
    }
    let mut found = vec![("load agents".to_owned(), Digest::of(&trace.records))];
    found.par_extend(runs.into_par_iter().map(|(name, setup)| (name, orders(setup, &trace))));
    found.par_extend(EVICTIONS.into_par_iter().flat_map_iter(|eviction| {
        let trace = &trace;
        OFFLOADS.into_iter().map(move |offload| {
            (format!("store {eviction:?} {offload:?}"), store_effects(eviction, offload, trace))
        })
    }));
    found.par_extend((8_000u64..8_060).into_par_iter().map(|seed| {
        let scenario = if seed % 2 == 0 { Scenario::with_faults(seed) } else { Scenario::with_stores(seed) };
        (
            format!("seed {seed} load {:x}", Digest::of(&scenario.trace.records)),
            orders(scenario.setup, &scenario.trace),
        )
    }));
    let mut text = String::new();
    for (name, digest) in found {
        let _ = writeln!(text, "{name} {digest:016x}");
    }
    text
}

#[test]
fn every_policy_decides_as_it_was_written_down() {
    let (pinned, found) = (include_str!("pinned.txt"), lines());
    if found == pinned {
        return;
    }
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/pinned.txt");
    std::fs::write(path, &found).unwrap();
    let known: Vec<&str> = pinned.lines().collect();
    let other: Vec<&str> = found.lines().filter(|line| !known.contains(line)).collect();
    panic!(
        "{} of {} runs decide otherwise; all of them now: {path}\n{}",
        other.len(),
        found.lines().count(),
        other.join("\n")
    );
}
