//! Any small cluster, any policy, any load, any faults: everything ends once and nothing is left.
//!
//! `BATON_SEEDS` says how many seeds (60 by default), `BATON_SEED` the first of them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use baton_sim::metrics::{Collector, Outcome, Status};
use baton_sim::setup::NO_STAGE_LIMIT_US;

use crate::scenario::Scenario;

/// A number from the environment.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |v| v.parse().expect("a number"))
}

/// Checks the outcomes alone, independently of the policy that produced them.
pub fn judge(scenario: &Scenario, run: &Collector) -> Result<(), String> {
    if run.outcomes.len() != scenario.trace.records.len() {
        return Err(format!("{} requests, {} outcomes", scenario.trace.records.len(), run.outcomes.len()));
    }
    for outcome in &run.outcomes {
        judge_one(outcome).map_err(|what| format!("{what}: {outcome:?}"))?;
    }
    // What fits nowhere with its answer, in whole blocks, cannot be served to its end.
    let smallest = scenario.setup.pools.iter().filter_map(|pool| pool.hbm_tokens).min().unwrap_or(u64::MAX);
    let block_tokens = u64::from(scenario.setup.scheduler.block_tokens);
    let whole_tokens = |o: &Outcome| o.prompt_tokens + u64::from(o.output_tokens) + 2 * block_tokens;
    let failed =
        run.outcomes.iter().filter(|o| o.status == Status::Failed && whole_tokens(o) <= smallest).count();
    // Where stages have limits, an overload that no policy refuses ends requests.
    let untroubled = scenario.setup.stage_floor_us == NO_STAGE_LIMIT_US
        && scenario.setup.faults.deaths + scenario.setup.faults.lost_links == 0
        && scenario.setup.network.max_flights_per_link > 2;
    if untroubled && failed > 0 {
        return Err(format!("{failed} requests failed without a fault"));
    }
    // A request that was lost would end by the clock: most scenarios have none.
    let timed_out = run.outcomes.iter().filter(|o| o.status == Status::TimedOut).count();
    if timed_out > 0 && scenario.setup.stage_floor_us == NO_STAGE_LIMIT_US {
        return Err(format!("{timed_out} requests ran out of time, and there is no limit"));
    }
    Ok(())
}

fn judge_one(o: &Outcome) -> Result<(), &'static str> {
    if o.end_us < o.offer_us || o.offer_us < o.first_offer_us {
        return Err("time went back");
    }
    if o.status != Status::Completed {
        return Ok(());
    }
    if o.gaps.count + 1 != u64::from(o.output_tokens) {
        return Err("tokens are missing");
    }
    if o.ttft_us == 0 || o.offer_us + o.ttft_us > o.end_us {
        return Err("its first token came out of its time");
    }
    if o.gaps.worst_tenth_us < o.gaps.mean_us || o.gaps.max_us < o.gaps.worst_tenth_us {
        return Err("its gaps contradict each other");
    }
    Ok(())
}

/// Runs one scenario; a panic counts as a finding.
pub fn verdict(scenario: &Scenario) -> Result<Collector, String> {
    let run = catch_unwind(AssertUnwindSafe(|| scenario.run()));
    let run = run.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        format!("panic: {}", text.unwrap_or_default())
    })??;
    judge(scenario, &run)?;
    Ok(run)
}

fn sweep(what: &str, make: fn(u64) -> Scenario) {
    let (first, count) = (number("BATON_SEED", 1), number("BATON_SEEDS", 60));
    let (mut failures, mut ends) = (Vec::new(), [0usize; 5]);
    for seed in first..first + count {
        let scenario = make(seed);
        match verdict(&scenario) {
            Ok(run) => run.outcomes.iter().for_each(|o| ends[o.status as usize] += 1),
            Err(e) => failures.push(format!("seed {seed}: {e}\n    {}", scenario.describe())),
        }
        if failures.len() >= 10 {
            break;
        }
    }
    println!(
        "{what}: {count} seeds from {first}; completed, rejected, failed, cancelled, timed out: {ends:?}"
    );
    assert!(failures.is_empty(), "{what}:\n{}", failures.join("\n"));
    assert!(ends[Status::Completed as usize] > 0, "nothing was ever completed");
}

#[test]
fn seeds_with_faults() {
    sweep("with faults", Scenario::with_faults);
}

#[test]
fn seeds_with_stores() {
    sweep("with stores", Scenario::with_stores);
    let mut saves = 0;
    for seed in 1..=40 {
        let mut scenario = Scenario::with_stores(seed);
        scenario.setup.scheduler.policy = baton_scheduler::PolicyName::Baton;
        saves += verdict(&scenario).unwrap().result(("", ""), 1.0, seed).saves;
    }
    assert!(saves > 20, "only {saves} chains were saved");
}

#[test]
fn seeds_without_faults() {
    sweep("without faults", Scenario::quiet);
}
