//! What it costs to look at a few instances and not at all: docs/scheduling.md.
//!
//! `cargo run --release -p baton-sim --example scale [WORD]` prints a row for each load whose name holds the word. Traces
//! are repeated, with other prompts after a shared beginning, until the cluster is as loaded as 8+8 instances by one.

#[path = "families/workloads.rs"]
mod workloads;

use std::sync::Arc;
use std::time::Instant;

use baton_scheduler::SchedulerConfig;
use baton_sim::engine::Mix;
use baton_sim::{Pool, Setup, TraceWorkload, World, profiles};
use baton_traces::{Record, Trace};
use baton_types::{Rng, Role, SloClass};

/// Instances compared for a request: half of what is built in, that, twice that, and all.
const CANDIDATES: [usize; 4] = [24, 48, 96, usize::MAX];

/// Requests of a load, about.
const REQUESTS: usize = 40_000;

/// A workload of the families, its pace for 8+8 instances, the leading blocks that its repetitions share, its objectives,
/// and how many prefill and decode instances serve it.
struct Load {
    workload: &'static str,
    speed: f64,
    shared_blocks: usize,
    objective_ms: (u64, u64),
    pairs: u32,
    /// Profiles of the instances, in equal parts.
    profiles: &'static [&'static str],
}

const CONVERSATION: Load = Load {
    workload: "conversation",
    speed: 4.0,
    shared_blocks: 1,
    objective_ms: (30_000, 100),
    pairs: 64,
    profiles: &["llama3-70b-8xa100"],
};

const LOADS: &[Load] = &[
    CONVERSATION,
    Load { workload: "agents", shared_blocks: 12, speed: 12.0, ..CONVERSATION },
    Load { workload: "doctree", shared_blocks: 8, speed: 10.0, ..CONVERSATION },
    Load { pairs: 256, ..CONVERSATION },
    Load { speed: 6.66, ..CONVERSATION },
    Load { profiles: &["llama3-70b-8xa100", "llama3-70b-8xh200"], speed: 6.0, ..CONVERSATION },
    Load { workload: "chat", shared_blocks: 0, speed: 26.0, objective_ms: (2_000, 60), ..CONVERSATION },
    Load { workload: "reasoning", shared_blocks: 0, speed: 7.0, ..CONVERSATION },
    Load { workload: "agents", shared_blocks: 12, speed: 12.0, pairs: 256, ..CONVERSATION },
    Load { speed: 2.0, ..CONVERSATION },
];

impl Load {
    fn name(&self) -> String {
        let mixed = if self.profiles.len() > 1 { " two kinds of GPU" } else { "" };
        format!("{0} x{1} {2}+{2}{mixed}", self.workload, self.speed, self.pairs)
    }

    /// The beginning of the workload, once for every eight pairs.
    fn trace(&self) -> Result<Trace, String> {
        let mut once = workloads::rows(self.workload).map_err(|e| e.to_string())?;
        let copies = u64::from(self.pairs / 8);
        once.truncate(REQUESTS / usize::try_from(copies).expect("small"));
        let mut rng = Rng::fork(3, copies);
        let mut records: Vec<Record> = Vec::new();
        for copy in 0..copies {
            records.extend(once.iter().cloned().map(|mut row| {
                row.hash_ids.iter_mut().skip(self.shared_blocks).for_each(|id| *id ^= copy << 53);
                row.timestamp_ms += 10_000.0 * rng.unit();
                row
            }));
        }
        records.sort_by(|a, b| a.timestamp_ms.total_cmp(&b.timestamp_ms));
        Ok(workloads::trace(records))
    }

    /// Requests in SLO, their prompt tokens, and the time for all decisions and the simulation around them, s.
    fn run(&self, trace: &Arc<Trace>, candidates: usize) -> Result<(u64, u64, f64), String> {
        let (ttft_ms, tbt_ms) = self.objective_ms;
        let class = SloClass { ttft_us: ttft_ms * 1000, tbt_us: tbt_ms * 1000, ..SloClass::default() };
        let config = SchedulerConfig { candidates, classes: vec![class], ..SchedulerConfig::default() };
        let first = Arc::new(profiles::named(self.profiles[0]).map_err(|e| e.to_string())?);
        let mut setup = Setup::disaggregated(0, 0, &first, config);
        setup.pools.clear();
        let part = self.pairs / u32::try_from(self.profiles.len()).expect("small");
        for name in self.profiles {
            let profile = Arc::new(profiles::named(name).map_err(|e| e.to_string())?);
            for role in [Role::Prefill, Role::Decode] {
                setup
                    .pools
                    .push(Pool { mix: Mix::Fixed(8192), ..Pool::new(role, part, Arc::clone(&profile)) });
            }
        }
        setup.sample_us = 0;
        let mut world = World::new(setup, Box::new(TraceWorkload::new(Arc::clone(trace), self.speed)))?;
        let start = Instant::now();
        world.run()?;
        let took_s = start.elapsed().as_secs_f64();
        let result = world.into_metrics().result(("", ""), self.speed, 1);
        Ok((result.in_slo, result.input_tokens_in_slo, took_s))
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures of a table")]
fn main() -> Result<(), String> {
    let word = std::env::args().nth(1).unwrap_or_default();
    println!("| load | requests | all: in SLO / tokens | 24 | **48** | 96 |\n|---|---|---|---|---|---|");
    assert!(LOADS.iter().all(|load| workloads::NAMES.contains(&load.workload)), "each workload is known");
    for load in LOADS.iter().filter(|load| load.name().contains(&word)) {
        let trace = Arc::new(load.trace()?);
        let tokens: u64 = trace.records.iter().map(|row| row.input_length).sum();
        let runs: Result<Vec<_>, String> = CANDIDATES.iter().map(|few| load.run(&trace, *few)).collect();
        let runs = runs?;
        let (all, all_tokens, all_s) = runs[CANDIDATES.len() - 1];
        let share = 100.0 * all_tokens as f64 / tokens as f64;
        print!("| {} | {} | {all} / {share:.1} %, {all_s:.0} s |", load.name(), trace.records.len());
        for (in_slo, in_slo_tokens, took_s) in &runs[..CANDIDATES.len() - 1] {
            let more = |one: u64, all: u64| 100.0 * (one as f64 / all as f64 - 1.0);
            print!(
                " {:+.2} / {:+.2} %, {took_s:.0} s |",
                more(*in_slo, all),
                more(*in_slo_tokens, all_tokens)
            );
        }
        println!();
    }
    Ok(())
}
