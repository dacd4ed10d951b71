//! No run of the simulator exceeds the bound, whatever its policy, admission mode, cluster, load and faults.

use std::sync::Arc;

use baton_scheduler::{AdmissionMode, PolicyName};
use baton_sim::bound::UpperBound;
use baton_sim::{RunResult, TraceWorkload};
use baton_traces::{Record, Trace};
use baton_types::Rng;

use crate::scenario::{Load, Scenario, pick};
use crate::seeds::number;

fn run(scenario: &Scenario) -> RunResult {
    scenario.run().unwrap_or_else(|e| panic!("{e}: {}", scenario.describe())).result(("", ""), 1.0, 1)
}

fn bound(scenario: &Scenario) -> UpperBound {
    let mut workload = TraceWorkload::new(scenario.trace.clone(), 1.0);
    UpperBound::of(&scenario.setup, &mut workload).unwrap()
}

#[track_caller]
fn assert_within(run: &RunResult, most: UpperBound, scenario: &Scenario) {
    let within = run.in_slo <= most.in_slo && run.input_tokens_in_slo <= most.input_tokens_in_slo;
    assert!(
        within,
        "{} in SLO with {} tokens, {most:?}: {}",
        run.in_slo,
        run.input_tokens_in_slo,
        scenario.describe()
    );
}

#[test]
fn no_scenario_exceeds_its_bound() {
    let first = number("BATON_SEED", 40_000);
    let mut below = 0;
    for seed in first..first + number("BATON_SEEDS", 60) {
        let mut scenario = match seed % 3 {
            0 => Scenario::quiet(seed),
            1 => Scenario::with_faults(seed),
            _ => Scenario::with_stores(seed),
        };
        scenario.setup.clients.retries = 0;
        scenario.setup.faults.engine_noise_permille = [0, 900][usize::from(seed % 2 == 1)];
        let (run, most) = (run(&scenario), bound(&scenario));
        assert_within(&run, most, &scenario);
        below += u32::from(most.in_slo < run.requests);
    }
    assert!(below > 0, "the bound is the number of requests in every scenario");
}

/// A few requests on a small cluster that has not enough time for all.
fn tight(seed: u64, requests: u64) -> Scenario {
    let mut rng = Rng::fork(seed, 903);
    let mut scenario = Scenario::quiet(seed);
    let setup = &mut scenario.setup;
    setup.scheduler.block_tokens = 512;
    (setup.clients.retries, setup.audit_every, setup.sample_us) = (0, 0, 0);
    (setup.scheduler.shadow, setup.scheduler.explain_every) = (Vec::new(), 0);
    for pool in &mut setup.pools {
        (pool.count, pool.hbm_tokens) = (1, None);
    }
    let ttft_us = [300_000, 1_000_000][pick(&mut rng, 2)];
    setup.scheduler.classes[0].ttft_us = ttft_us;
    let load = Load {
        requests,
        block_tokens: 512,
        longest_blocks: ttft_us / 30_000,
        gap_ms: [1.0, 100.0][pick(&mut rng, 2)],
        longest_output: [2, 30][pick(&mut rng, 2)],
    };
    scenario.trace = Arc::new(load.trace(&mut rng));
    scenario
}

fn subset(trace: &Trace, chosen: u32) -> Arc<Trace> {
    let records: Vec<Record> = (0..)
        .zip(&trace.records)
        .filter(|(at, _)| chosen >> at & 1 == 1)
        .map(|(_, row)| row.clone())
        .collect();
    Arc::new(Trace { records, ..trace.clone() })
}

/// A scheduler that knows everything refuses some requests at once and serves the rest: every choice of them is tried,
/// each with policies that serve whatever they are given.
#[test]
fn no_choice_of_a_few_requests_exceeds_the_bound_of_all() {
    let (mut reached, mut below) = (0, 0);
    let cases = number("BATON_SEEDS", 200);
    for seed in 0..cases {
        let mut scenario = tight(seed, 4);
        let (whole, most) = (scenario.trace.clone(), bound(&scenario));
        scenario.setup.scheduler.admission = AdmissionMode::None;
        let mut best = 0;
        for chosen in 1..1 << whole.records.len() {
            // Times count from the first row of a trace: a choice has the first row, or another start.
            scenario.trace = subset(&whole, chosen);
            for policy in [PolicyName::Baton, PolicyName::LeastLoaded, PolicyName::DynamoWspt] {
                scenario.setup.scheduler.policy = policy;
                let run = run(&scenario);
                assert_within(&run, most, &scenario);
                best = best.max(run.in_slo);
            }
        }
        reached += u64::from(best == most.in_slo);
        below += u64::from(most.in_slo < 4);
    }
    assert!(reached * 3 > cases && below * 8 > cases, "reached {reached}, below {below} of {cases}");
}

#[test]
fn no_policy_with_any_admission_exceeds_the_bound() {
    for seed in [1, 2, 3, 5] {
        let mut scenario = tight(seed, 120);
        let most = bound(&scenario);
        for policy in PolicyName::ALL {
            for admission in [
                AdmissionMode::None,
                AdmissionMode::AtDecode,
                AdmissionMode::Early,
                AdmissionMode::EarlyPredict,
                AdmissionMode::Slo,
            ] {
                (scenario.setup.scheduler.policy, scenario.setup.scheduler.admission) = (policy, admission);
                scenario.setup.foresight_us = if policy.foresees() { 10_000_000 } else { 0 };
                assert_within(&run(&scenario), most, &scenario);
            }
        }
    }
}
