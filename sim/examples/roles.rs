//! Roles by forecast beside fixed roles on a day whose mix of requests drifts: docs/scheduling.md.
//!
//! `cargo run --release -p baton-sim --example roles [LOAD] [INSTANCES]` prints the table; a load of 1 is two requests a
//! second on 16 instances.

use std::sync::Arc;

use baton_scheduler::SchedulerConfig;
use baton_sim::engine::Mix;
use baton_sim::metrics::{Outcome, Status};
use baton_sim::{Setup, TraceWorkload, World, profiles};
use baton_traces::{Dialect, Record, Trace};
use baton_types::Rng;
use rayon::prelude::*;

const BLOCK: u32 = 512;
const HOURS: u32 = 24;
const HOUR_MS: f64 = 3_600_000.0;
const TTFT_US: u64 = 30_000_000;
const TBT_US: u64 = 100_000;

/// A day that begins with long prompts and short answers, has short prompts and long answers at noon, and jumps back in
/// the evening.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "lengths of a workload")]
fn day(load: f64, instances: f64) -> Vec<Record> {
    let mut rng = Rng::fork(5, 3);
    let (mut now_ms, mut rows) = (0.0, Vec::new());
    let mean_ms = 8_000.0 / (load * instances);
    while now_ms < f64::from(HOURS) * HOUR_MS {
        now_ms -= mean_ms * (1.0 - rng.unit()).ln();
        let hour = now_ms / HOUR_MS;
        let long_answers =
            if hour < 18.0 { 0.5 - 0.5 * (hour / 12.0 * std::f64::consts::PI).cos() } else { 0.1 };
        let normal = (-2.0 * (1.0 - rng.unit()).ln()).sqrt() * (std::f64::consts::TAU * rng.unit()).cos();
        let length = |median: f64, most: f64| (median * (0.8 * normal).exp()).clamp(16.0, most) as u64;
        let (prompt, answer) = if rng.unit() < long_answers {
            (length(900.0, 8e3), length(2_500.0, 3e4))
        } else {
            (length(9_000.0, 1e5), length(120.0, 2e3))
        };
        let base = rng.below(1 << 40) << 12;
        let blocks = prompt.div_ceil(u64::from(BLOCK));
        rows.push(Record {
            timestamp_ms: now_ms,
            input_length: prompt,
            output_length: answer,
            hash_ids: (0..blocks).map(|at| base + at).collect(),
            extra: None,
        });
    }
    rows
}

/// Requests in SLO by the hour of their arrival, and changes of roles.
fn run(
    trace: &Arc<Trace>,
    (prefills, decodes): (u32, u32),
    changes: bool,
) -> Result<(Vec<u32>, u64), String> {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").map_err(|e| e.to_string())?);
    let config = SchedulerConfig::default();
    let mut setup = Setup::disaggregated(prefills, decodes, &profile, config);
    for pool in &mut setup.pools {
        (pool.mix, pool.may_change_role) = (Mix::Fixed(8192), changes);
    }
    (setup.keep_outcomes, setup.sample_us) = (true, 0);
    let workload = TraceWorkload::new(Arc::clone(trace), 1.0);
    let mut world = World::new(setup, Box::new(workload))?;
    world.run()?;
    let good = |o: &&Outcome| {
        let first = o.status == Status::Completed && o.ttft_us <= TTFT_US;
        first && (o.gaps.count == 0 || o.gaps.worst_tenth_us <= TBT_US)
    };
    let mut hours = vec![0; HOURS as usize];
    for outcome in world.outcomes().iter().filter(good) {
        let hour = usize::try_from(outcome.first_offer_us / 3_600_000_000).expect("an hour of the day");
        hours[hour.min(HOURS as usize - 1)] += 1;
    }
    let changed = world.into_metrics().result(("", ""), 1.0, 1).role_changes;
    Ok((hours, changed))
}

fn main() -> Result<(), String> {
    let argument =
        |at: usize, usual: f64| std::env::args().nth(at).and_then(|a| a.parse().ok()).unwrap_or(usual);
    let (load, instances) = (argument(1, 1.0), argument(2, 16.0));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
    let count = instances as u32;
    let records = day(load, instances);
    let requests = records.len();
    let trace =
        Arc::new(Trace { block_tokens: BLOCK, records, assumptions: Vec::new(), dialect: Dialect::Mooncake });
    let fixed: Result<Vec<_>, String> = (1..count)
        .into_par_iter()
        .map(|prefills| Ok((prefills, run(&trace, (prefills, count - prefills), false)?.0)))
        .collect();
    let fixed = fixed?;
    let forecast = run(&trace, (count / 2, count - count / 2), true)?;
    let sum = |hours: &[u32]| hours.iter().sum::<u32>();
    let best_of_hours: u32 =
        (0..HOURS as usize).map(|hour| fixed.iter().map(|(_, hours)| hours[hour]).max().unwrap_or(0)).sum();
    println!("{requests} requests");
    println!("| roles | in SLO | changes |");
    println!("|---|---|---|");
    for (prefills, hours) in &fixed {
        println!("| {prefills}+{} | {} | |", count - prefills, sum(hours));
    }
    println!("| best of each hour | {best_of_hours} | |");
    println!("| by forecast | {} | {} |", sum(&forecast.0), forecast.1);
    Ok(())
}
