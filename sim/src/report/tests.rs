//! The page as a whole: well formed, self-contained, bounded, and never at a loss.

mod cases;
mod checks;

use std::collections::VecDeque;
use std::sync::Arc;

use baton_scheduler::{PolicyName, SchedulerConfig};
use baton_types::RequestObjectives;

use super::html;
use crate::metrics::{Bin, Collector, HotBlocks, RunResult, TenantResult};
use crate::workload::{Arrival, Requests};
use crate::{Setup, World, profiles};

use checks::{assert_loads_nothing, assert_well_formed};

fn setup(policy: PolicyName) -> Setup {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    Setup::disaggregated(2, 2, &profile, SchedulerConfig { policy, ..SchedulerConfig::default() })
}

/// A run of nothing.
fn empty(policy: &str) -> RunResult {
    let nothing = Requests(VecDeque::new());
    Collector::new(&setup(PolicyName::Baton), &nothing).result((policy, "slo"), 1.0, 1)
}

/// A real run of a few hundred requests that share prefixes.
fn real(policy: PolicyName) -> RunResult {
    let arrival = |n: u64| Arrival {
        at_us: n * 200_000,
        prompt_tokens: 512 * (4 + n % 30),
        output_tokens: 50 + (n % 200) as u32,
        ids: (0..4 + n % 30).map(|b| if b < 3 { n % 5 * 10 + b } else { 1000 * n + b }).collect(),
        class: 0,
        objectives: RequestObjectives::default(),
        tenant: 0,
        cancel_after_us: None,
    };
    let mut world = World::new(setup(policy), Box::new(Requests((0..300).map(arrival).collect()))).unwrap();
    world.run().unwrap();
    world.into_metrics().result((policy.name(), "slo"), 1.0, 1)
}

/// A run made up to be as rough as can be: no two neighbouring cells or points alike.
fn rough(seed: u64, instances: usize, bins: usize) -> RunResult {
    let mut run = empty("baton");
    let noise = |a: usize, b: usize| (a as u64 * 7919 + b as u64 * 104_729 + seed * 31) % 97;
    run.seed = seed;
    (run.requests, run.completed, run.in_slo, run.rejected) = (12_031, 9_000, 8_000, 3_031);
    run.series.bin_us = 1_000_000;
    run.series.bins = (0..bins)
        .map(|b| Bin {
            arrived: noise(1, b),
            completed: noise(2, b),
            in_slo: noise(3, b),
            rejected: noise(4, b),
            ttft_us: noise(5, b) * 1_000_000,
            hit_blocks: noise(6, b),
            blocks: 97,
            ticks: 1,
            samples: 2,
            backlog_us: noise(7, b) * 1_000_000,
            batch: noise(8, b),
        })
        .collect();
    let row = |i: usize| (0..bins).map(|b| noise(i, b) as u32 * 10_000).collect();
    run.series.prefill_us = if instances <= 256 { (0..instances).map(row).collect() } else { Vec::new() };
    run.series.decode_step_us =
        run.series.prefill_us.iter().map(|r| r.iter().map(|us: &u32| us / 10).collect()).collect();
    let template = crate::metrics::InstanceResult {
        instance: 0,
        role: baton_types::Role::Both,
        prefill_busy_s: 10.0,
        decode_busy_s: 5.0,
        tier_hit_blocks: [3000, 200, 10],
        tier_evicted_blocks: [0; 3],
        tier_used_blocks: [0; 3],
    };
    run.instances =
        (0..instances).map(|i| crate::metrics::InstanceResult { instance: i as u32, ..template }).collect();
    let quantiles =
        |scale: f32| (0..=102).map(|q| (q as f32 / 102.0, scale * (1.0 + (q * q) as f32 * 1.37))).collect();
    (run.ttft_quantiles_s, run.tbt_quantiles_ms) = (quantiles(0.01), quantiles(1.0));
    run.refusals_by_reason = vec![("ttft", 2000), ("queue_full", 1031)];
    (run.refusals, run.retries, run.readmitted, run.readmitted_in_slo) = (3_500, 469, 400, 350);
    run.hot_blocks = vec![
        HotBlocks { first_rank: 1, last_rank: 1, asked: 900.0, replicas: 8.0, replicas_max: 16 },
        HotBlocks { first_rank: 2, last_rank: 4, asked: 90.0, replicas: 2.5, replicas_max: 4 },
    ];
    run
}

fn facts() -> Vec<(String, String)> {
    vec![
        ("trace".into(), "conversation_trace.jsonl".into()),
        ("cluster".into(), "2 prefill + 2 decode".into()),
    ]
}

fn page(runs: &[RunResult]) -> String {
    let html = html("Replay", &facts(), runs);
    assert_well_formed(&html);
    assert_loads_nothing(&html);
    html
}
