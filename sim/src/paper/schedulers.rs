//! Set-ups shared by the experiments, and figure 5: which scheduler.

use std::sync::Arc;

use baton_scheduler::{AdmissionMode, PolicyName, SchedulerConfig};
use baton_traces::Trace;
use baton_types::{CostProfile, Role};

use super::{Row, Section, Traces, check, row};
use crate::engine::Mix;
use crate::metrics::RunResult;
use crate::setup::{NO_STAGE_LIMIT_US, Pool, Setup};
use crate::workload::TraceWorkload;
use crate::{World, profiles};

/// KV tokens in one node's DRAM: about 1 TB at 320 KB a token, as in the paper.
pub(crate) const DRAM_TOKENS: u64 = 3_000_000;

/// The paper's node: 8×A800, costed as 8×A100.
pub(crate) fn profile() -> Result<Arc<CostProfile>, String> {
    profiles::named("llama3-70b-8xa100").map(Arc::new).map_err(|e| e.to_string())
}

/// Disaggregated nodes with the paper's DRAM and network, under a policy.
pub(crate) fn mooncake_cluster(shape: (u32, u32), policy: PolicyName, tbt_us: u64) -> Result<Setup, String> {
    let mut scheduler =
        SchedulerConfig { policy, admission: AdmissionMode::None, ..SchedulerConfig::default() };
    scheduler.classes[0].tbt_us = tbt_us;
    let target = scheduler.step_target_us();
    let mut setup = Setup::disaggregated(shape.0, shape.1, &profile()?, scheduler);
    for pool in &mut setup.pools {
        pool.dram_tokens = DRAM_TOKENS;
        pool.mix = Mix::Target(target);
    }
    Ok(setup)
}

/// Coupled engines: prefills and decodes in one instance, nothing disaggregated.
pub(crate) fn coupled_cluster(
    count: u32,
    mix: Mix,
    prefix_cache: bool,
    tbt_us: u64,
) -> Result<Setup, String> {
    let mut scheduler = SchedulerConfig {
        policy: PolicyName::LeastLoaded,
        admission: AdmissionMode::None,
        ..SchedulerConfig::default()
    };
    scheduler.classes[0].tbt_us = tbt_us;
    let profile = profile()?;
    let mut setup = Setup::disaggregated(0, 0, &profile, scheduler);
    setup.pools = vec![Pool { mix, prefix_cache, ..Pool::new(Role::Both, count, profile) }];
    Ok(setup)
}

/// Runs a set-up over a trace.
pub(crate) fn simulate(setup: Setup, trace: &Arc<Trace>, speed: f64) -> Result<RunResult, String> {
    world(setup, trace, speed).map(|(result, _)| result)
}

/// Runs a set-up over a trace. Also returns the world, with the caches as they are at the end.
pub(crate) fn world(mut setup: Setup, trace: &Arc<Trace>, speed: f64) -> Result<(RunResult, World), String> {
    setup.scheduler.block_tokens = trace.block_tokens;
    // The published systems serve every request, however late.
    setup.stage_floor_us = NO_STAGE_LIMIT_US;
    let (policy, mode, seed) = (setup.scheduler.policy, setup.scheduler.effective_admission(), setup.seed);
    let mut world = World::new(setup, Box::new(TraceWorkload::new(Arc::clone(trace), speed)))?;
    world.run()?;
    world.finish_samples();
    let result = world.metrics.result((policy.name(), mode.name()), speed, seed);
    Ok((result, world))
}

/// Figure 5: mean TTFT by scheduler.
pub(crate) fn figure_5(traces: &Traces) -> Result<Vec<Section>, String> {
    let lines = [
        ("random", PolicyName::Random, Some(19.65)),
        ("load balancing", PolicyName::LeastLoaded, Some(5.27)),
        ("local cache aware", PolicyName::LocalCache, Some(3.58)),
        ("global cache aware (Mooncake, as published)", PolicyName::Mooncake, Some(3.07)),
        ("baton", PolicyName::Baton, None),
    ];
    let mut rows: Vec<Row> = Vec::new();
    for (name, policy, paper) in lines {
        let run = simulate(mooncake_cluster((8, 8), policy, 100_000)?, &traces.conversation, 1.0)?;
        rows.push(row(name, paper, run.ttft_s.mean.unwrap_or(f64::NAN), "s"));
    }
    let ordered = rows[..4].windows(2).all(|w| w[0].ours > w[1].ours);
    let better = rows[4].ours <= rows[3].ours;
    Ok(vec![Section {
        figure: "Figure 5",
        title: "mean TTFT by scheduler, conversation trace",
        setup: "8 prefill + 8 decode nodes, 3 M tokens of DRAM a node, trace at its own pace, nothing rejected.".into(),
        rows,
        checks: vec![
            check("the four schedulers stand in the paper's order", ordered),
            check("baton's mean TTFT is at most the published algorithm's", better),
        ],
        note: "Absolute times are below the paper's: the profile is of an engine of 2026 on an A100, and the paper's cluster was closer to saturation at this pace.".into(),
    }])
}
