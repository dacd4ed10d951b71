//! Requests in SLO by the number of routers that serve the cluster: docs/scheduling.md.
//!
//! `cargo run --release -p baton-sim --example routers [DELAY_US]` prints a row for each cluster and load. News take so
//! long from router to router, else 10 ms. It needs the published conversation trace (`BATON_TRACES`).

use std::sync::Arc;

use baton_scheduler::SchedulerConfig;
use baton_sim::engine::Mix;
use baton_sim::{Setup, TraceWorkload, World, profiles};
use baton_traces::{ReadOptions, Trace};
use rayon::prelude::*;

const ROUTERS: [u32; 4] = [1, 2, 4, 8];
/// Prefill instances, as many decode instances, and the pace of the trace.
const LOADS: [(u32, f64); 5] = [(8, 1.0), (8, 3.0), (8, 4.0), (8, 6.0), (2, 1.0)];

/// Requests in SLO, and requests that were let in and came too late.
fn served(trace: &Arc<Trace>, (instances, speed): (u32, f64), routers: u32, delay_us: u64) -> (u64, u64) {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").expect("a shipped profile"));
    let mut setup = Setup::disaggregated(instances, instances, &profile, SchedulerConfig::default());
    setup.pools.iter_mut().for_each(|pool| pool.mix = Mix::Fixed(8192));
    (setup.routers, setup.router_sync_us, setup.sample_us) = (routers, delay_us, 0);
    let workload = TraceWorkload::new(Arc::clone(trace), speed);
    let mut world = World::new(setup, Box::new(workload)).expect("a valid setup");
    world.run().expect("a sound run");
    let result = world.into_metrics().result(("", ""), speed, 1);
    (result.in_slo, result.completed - result.in_slo)
}

fn main() {
    let delay_us = std::env::args().nth(1).map_or(10_000, |text| text.parse().expect("microseconds"));
    let path =
        baton_traces::locate("conversation_trace.jsonl").expect("the trace: name its folder in BATON_TRACES");
    let trace = Arc::new(baton_traces::load(&path, &ReadOptions::default()).expect("a readable trace"));
    println!("| cluster | load | 1 router | 2 | 4 | 8 |\n|---|---|---|---|---|---|");
    let runs: Vec<_> = LOADS.iter().flat_map(|load| ROUTERS.map(|routers| (*load, routers))).collect();
    let runs: Vec<_> =
        runs.par_iter().map(|(load, routers)| served(&trace, *load, *routers, delay_us)).collect();
    for ((instances, speed), row) in LOADS.iter().zip(runs.chunks(ROUTERS.len())) {
        print!("| {instances}+{instances} | ×{speed} |");
        for (in_slo, late) in row {
            #[expect(clippy::cast_precision_loss, reason = "a share of requests")]
            let gain = 100.0 * (*in_slo as f64 / row[0].0 as f64 - 1.0);
            print!(" {in_slo} ({gain:+.1} %), {late} late |");
        }
        println!();
    }
}
