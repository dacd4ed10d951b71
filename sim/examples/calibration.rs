//! How well TTFT and TBT are predicted on engines that are faster or slower than their profile, on every path: docs/scheduling.md.
//!
//! `cargo run --release -p baton-sim --example calibration [TARGET_PERMILLE]` prints a row for each cluster, speed of the
//! engines, load and path. It needs the published conversation trace (`BATON_TRACES`).

use std::sync::Arc;

use baton_scheduler::SchedulerConfig;
use baton_sim::engine::Mix;
use baton_sim::metrics::{ClassCounter, Outcome, Status};
use baton_sim::{Pool, Setup, TraceWorkload, World, profiles};
use baton_traces::{ReadOptions, Trace};
use baton_types::{Role, SloClass};
use rayon::prelude::*;

/// A cluster with the pace of the trace that it serves at the speed of its profile.
struct Cluster {
    name: &'static str,
    /// Prefill, decode and coupled instances.
    instances: [u32; 3],
    capacity: f64,
}

const CLUSTERS: [Cluster; 2] = [
    Cluster { name: "8+8", instances: [8, 8, 0], capacity: 2.7 },
    Cluster { name: "16 coupled", instances: [0, 0, 16], capacity: 1.0 },
];
/// Speeds of the engines over their profile, per mille.
const SPEEDS: [u32; 3] = [667, 1000, 1500];
/// Loads over the capacity.
const LOADS: [f64; 3] = [0.5, 0.9, 1.5];
/// Requests of a path that are left out, while the predictors learn.
const LEARNING: u64 = 500;

fn setup(cluster: &Cluster, permille: u32, classes: &[SloClass]) -> Setup {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").expect("a shipped profile"));
    let scheduler = SchedulerConfig { classes: classes.to_vec(), ..SchedulerConfig::default() };
    let mut setup = Setup::disaggregated(0, 0, &profile, scheduler);
    let pools = [(Role::Prefill, 8192), (Role::Decode, 8192), (Role::Both, 512)].into_iter();
    let pool = |((role, chunk), count)| {
        let mut pool = Pool::new(role, count, Arc::clone(&profile));
        pool.mix = Mix::Fixed(chunk);
        pool
    };
    let counted = pools.zip(cluster.instances).filter(|(_, count)| *count > 0);
    setup.pools = counted.map(pool).collect();
    setup.faults.engine_speed_permille = permille;
    (setup.keep_outcomes, setup.sample_us) = (true, 0);
    setup
}

/// A row for each path.
fn rows(
    trace: &Arc<Trace>,
    (cluster, permille, load): (&Cluster, u32, f64),
    classes: &[SloClass],
) -> Vec<String> {
    let pace = cluster.capacity * load * f64::from(permille) / 1000.0;
    let workload = TraceWorkload::new(Arc::clone(trace), pace);
    let mut world = World::new(setup(cluster, permille, classes), Box::new(workload)).expect("a valid setup");
    world.run().expect("a sound run");
    let outcomes = world.into_metrics().outcomes;
    let in_time = |o: &&Outcome| {
        let class = &classes[0];
        o.status == Status::Completed && o.ttft_us <= class.ttft_us && o.gaps.worst_tenth_us <= class.tbt_us
    };
    let in_slo = outcomes.iter().filter(in_time).count();
    let (mut counter, mut seen) = (ClassCounter::new(classes), [0; 4]);
    for outcome in &outcomes {
        let Some(prediction) = &outcome.prediction else { continue };
        let seen = &mut seen[prediction.path as usize];
        *seen += 1;
        if *seen > LEARNING {
            counter.ended(outcome);
        }
    }
    let percent =
        |share: Option<f64>| share.map_or_else(|| "–".into(), |share| format!("{:.1} %", 100.0 * share));
    let row = |path: &baton_scheduler::PathFigures| {
        let (ttft, tbt) = (&path.ttft, &path.tbt);
        format!(
            "| {} | {permille} | {load} | {in_slo} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            cluster.name,
            path.path.name(),
            ttft.requests,
            percent(ttft.median_error),
            percent(ttft.bias),
            percent(ttft.p90),
            percent(ttft.covered),
            percent(tbt.median_error),
            percent(tbt.bias),
            percent(tbt.covered)
        )
    };
    counter.results()[0].predictions.iter().map(row).collect()
}

fn main() {
    let target_permille =
        std::env::args().nth(1).map_or(900, |text| text.parse().expect("a share per mille"));
    let classes = [SloClass { target_permille, ..SloClass::default() }];
    let path =
        baton_traces::locate("conversation_trace.jsonl").expect("the trace: name its folder in BATON_TRACES");
    let trace = Arc::new(baton_traces::load(&path, &ReadOptions::default()).expect("a readable trace"));
    let cases: Vec<(&Cluster, u32, f64)> = CLUSTERS
        .iter()
        .flat_map(|cluster| SPEEDS.iter().map(move |speed| (cluster, *speed)))
        .flat_map(|(cluster, speed)| LOADS.iter().map(move |load| (cluster, speed, *load)))
        .collect();
    println!(
        "| cluster | engine speed, per mille | load | in SLO | path | compared | TTFT: median error | bias | p90 | within \
         | TBT: median error | bias | within |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let all: Vec<Vec<String>> = cases.par_iter().map(|case| rows(&trace, *case, &classes)).collect();
    all.iter().flatten().for_each(|row| println!("{row}"));
}
