//! Loads that are drawn, each at a pace at which Baton's policy serves a drawn share of it.

use std::sync::Arc;

use baton_scheduler::{AdmissionMode, PolicyName};
use baton_traces::{Dialect, Trace};
use baton_types::Rng;
use rayon::prelude::*;

use super::workloads::{BLOCK, Draw};
use super::{Load, OTHERS, load, run};

/// Prefill, decode and coupled instances.
const CLUSTERS: [[u32; 3]; 13] = [
    [8, 8, 0],
    [13, 3, 0],
    [14, 2, 0],
    [3, 13, 0],
    [1, 1, 0],
    [2, 2, 0],
    [4, 1, 0],
    [1, 3, 0],
    [5, 3, 0],
    [24, 8, 0],
    [6, 2, 4],
    [0, 0, 16],
    [0, 0, 4],
];
const TTFTS_MS: [u64; 6] = [1_000, 2_000, 5_000, 10_000, 30_000, 60_000];
const TBTS_MS: [u64; 5] = [40, 50, 60, 100, 200];

fn one_of<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[usize::try_from(rng.below(of.len() as u64)).expect("an index")]
}

/// A load without a pace, and its workload.
fn drawn(seed: u64) -> (Load, Draw) {
    let mut rng = Rng::fork(seed, 99);
    let draw = Draw::of(&mut rng);
    let instances = one_of(&mut rng, &CLUSTERS);
    let objective_ms = (one_of(&mut rng, &TTFTS_MS), one_of(&mut rng, &TBTS_MS));
    let mut load = Load { objective_ms, ..load("search", "search", instances, 1.0) };
    match rng.below(12) {
        0 => load.engine_permille = 667,
        1 => load.engine_permille = 1_500,
        2 => load.max_running = Some(one_of(&mut rng, &[16, 32, 64, 128])),
        3 => load.dram_tokens = 1_500_000,
        4 => load.net_gbps = one_of(&mut rng, &[10, 25, 50, 100]),
        5 => (load.net_gbps, load.link_permille) = (100, 250),
        6 if instances.iter().all(|count| count % 2 == 0) => load.gpus = ["8xa100", "8xh100"],
        7 => load.slow_nodes = (instances.iter().sum::<u32>() / 4).max(1),
        8 => load.chunk = one_of(&mut rng, &[2_048, 8_192]),
        _ => {}
    }
    (load, draw)
}

/// The row of one number.
#[expect(clippy::cast_precision_loss, reason = "figures of a table")]
fn row(seed: u64) -> Result<String, String> {
    let (mut load, draw) = drawn(seed);
    let records = draw.rows(seed);
    let block_tokens = u32::try_from(BLOCK).expect("small");
    let trace =
        Arc::new(Trace { block_tokens, records, assumptions: Vec::new(), dialect: Dialect::Mooncake });
    let all = trace.records.len() as f64;
    // As in the other rows, whole servers keep the step target.
    let parts = load.instances[0] == 0;
    let baton =
        |load: &Load, own: bool| run(load, &trace, (PolicyName::Baton, AdmissionMode::Auto, own || parts));
    let share = 0.45 + 0.53 * Rng::fork(seed, 100).unit();
    let (mut slow, mut fast) = (1e-3f64, 1e3f64);
    for _ in 0..10 {
        load.speed = (slow * fast).sqrt();
        let served = baton(&load, false)?.in_slo as f64 / all;
        *(if served > share { &mut slow } else { &mut fast }) = load.speed;
    }
    let (fixed, own) = (baton(&load, false)?, baton(&load, true)?);
    let mut best = (0, String::new());
    for (policy, admission) in OTHERS {
        let other = run(&load, &trace, (policy, admission, false))?;
        best = best.max((other.in_slo, format!("{}, {}", policy.name(), admission.name())));
    }
    let [prefills, decodes, both] = load.instances;
    let (ttft_ms, tbt_ms) = load.objective_ms;
    Ok(format!(
        "| {:+.1} % | {seed} | {} | {} | {} | {} | {} | {prefills}+{decodes}+{both}, {ttft_ms} and {tbt_ms} ms, x{:.2}, \
         speed {}, most {:?}, DRAM {}, {} Gbit/s at {}, {:?}, {} slow, chunk {} | prompts {:.0} ({:.1}), answers {:.0} \
         ({:.1}), arrivals {}, shares {} |",
        100.0 * (fixed.in_slo as f64 - best.0 as f64) / all,
        fixed.in_slo,
        fixed.late,
        best.0,
        best.1,
        own.in_slo,
        load.speed,
        load.engine_permille,
        load.max_running,
        load.dram_tokens,
        load.net_gbps,
        load.link_permille,
        load.gpus,
        load.slow_nodes,
        load.chunk,
        draw.prompt.0,
        draw.prompt.1,
        draw.answer.0,
        draw.answer.1,
        draw.arrivals,
        draw.shares,
    ))
}

/// Prints a row for each of the numbers that the arguments name, as they are done.
pub(crate) fn run_all() -> Result<(), String> {
    let number = |at: usize| {
        let text = std::env::args().nth(at).ok_or("search FROM TO")?;
        text.parse::<u64>().map_err(|e| format!("{text}: {e}"))
    };
    let (from, to) = (number(2)?, number(3)?);
    println!(
        "| difference | number | baton | late | best other | which | baton, its own engine | cluster | workload |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    (from..to).into_par_iter().try_for_each(|seed| {
        println!("{}", row(seed)?);
        Ok(())
    })
}
