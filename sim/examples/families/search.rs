//! Loads that are drawn, each at a pace at which Baton's policy serves a drawn share of it.

use std::sync::Arc;

use baton_traces::Record;
use baton_types::Rng;
use rayon::prelude::*;

use super::workloads::{self, Source};
use super::{Load, baton, best_other, load};

/// Requests of a drawn workload.
const DRAWN: usize = 5_000;

/// A workload that is drawn: lengths, arrivals and what prompts have in common.
#[derive(Clone, Copy)]
struct Draw {
    /// Median and spread of the logarithm, of prompts and of answers.
    prompt: (f64, f64),
    answer: (f64, f64),
    /// Even, in bursts of about ten, in a slow wave, or four and a half times as many in the middle third.
    arrivals: u64,
    /// Nothing, one of 200 documents, the turns before, or one of three beginnings.
    shares: u64,
}

impl Draw {
    fn of(rng: &mut Rng) -> Self {
        let mut between = |low: f64, high: f64| (low.ln() + rng.unit() * (high / low).ln()).exp();
        let (prompt, answer) = (between(200.0, 16_000.0), between(8.0, 900.0));
        let spreads = [0.2 + 1.1 * rng.unit(), 0.2 + rng.unit()];
        Self {
            prompt: (prompt, spreads[0]),
            answer: (answer, spreads[1]),
            arrivals: rng.below(4),
            shares: rng.below(4),
        }
    }

    /// Its rows.
    #[expect(clippy::cast_precision_loss, reason = "a count of requests")]
    fn rows(self, seed: u64) -> Vec<Record> {
        let mut source = Source { rng: Rng::fork(seed, 3), now_ms: 0.0 };
        let document = |source: &mut Source| {
            let blocks = 1 + source.rng.below(60);
            source.own(blocks)
        };
        let documents: Vec<Vec<u64>> = (0..200).map(|_| document(&mut source)).collect();
        let mut sessions: Vec<Vec<u64>> = Vec::new();
        let row = |at: usize| {
            let part = at as f64 / DRAWN as f64;
            let gap_ms = match self.arrivals {
                1 if source.rng.chance_permille(100) => 2_700.0,
                1 => 33.0,
                2 => 300.0 * (1.0 - 0.8 * (6.0 * std::f64::consts::PI * part).sin()),
                3 if (1.0..2.0).contains(&(part * 3.0)) => 100.0,
                3 => 450.0,
                _ => 300.0,
            };
            source.after(gap_ms);
            let tokens = source.length(self.prompt.0, self.prompt.1, (16, 90_000));
            let answer = source.length(self.answer.0, self.answer.1, (1, 12_000));
            let prompt = self.prompt_of(&mut source, tokens, (&documents, &mut sessions));
            source.row(prompt, answer)
        };
        (0..DRAWN).map(row).collect()
    }

    /// A prompt with so many tokens of its own, or fewer beside what it shares.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below their number")]
    fn prompt_of(
        self,
        source: &mut Source,
        tokens: u64,
        (documents, sessions): (&[Vec<u64>], &mut Vec<Vec<u64>>),
    ) -> (u64, Vec<u64>) {
        match self.shares {
            // The first documents are asked for most.
            1 => {
                let document = (source.rng.unit().powi(3) * documents.len() as f64) as usize;
                source.prompt(&documents[document], tokens.min(4_000))
            }
            2 => {
                let at = source.rng.below(sessions.len().max(1) as u64) as usize;
                let begins = sessions.len() < 60 || source.rng.chance_permille(150);
                let before = sessions.get(at).filter(|had| !begins && had.len() <= 180).cloned();
                let own_tokens = if before.is_some() { (tokens / 4).max(16) } else { tokens };
                let goes_on = before.is_some();
                let prompt = source.prompt(&before.unwrap_or_default(), own_tokens);
                if goes_on || sessions.len() == 400 {
                    sessions[at].clone_from(&prompt.1);
                } else {
                    sessions.push(prompt.1.clone());
                }
                prompt
            }
            3 => {
                let beginning = source.rng.below(3) as usize;
                source.prompt(&documents[beginning], tokens)
            }
            _ => source.prompt(&[], tokens),
        }
    }
}

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
/// From this number on the KV of half of the clusters holds few prompts.
const FIRST_OF_SMALL_KV: u64 = 150;

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
    if seed >= FIRST_OF_SMALL_KV && rng.below(2) == 0 {
        let prompts = one_of(&mut rng, &[24.0, 48.0, 96.0]);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of tokens")]
        let hbm_tokens = (draw.prompt.0 * prompts) as u64;
        load.hbm_tokens = Some(hbm_tokens.max(16_384));
    }
    (load, draw)
}

/// The row of one number.
#[expect(clippy::cast_precision_loss, reason = "figures of a table")]
fn row(seed: u64) -> Result<String, String> {
    let (mut load, draw) = drawn(seed);
    let trace = Arc::new(workloads::trace(draw.rows(seed)));
    let all = trace.records.len() as f64;
    let share = 0.45 + 0.53 * Rng::fork(seed, 100).unit();
    let (mut slow, mut fast) = (1e-3f64, 1e3f64);
    for _ in 0..10 {
        load.speed = (slow * fast).sqrt();
        let served = baton(&load, &trace, false)?.in_slo as f64 / all;
        *(if served > share { &mut slow } else { &mut fast }) = load.speed;
    }
    let (fixed, own) = (baton(&load, &trace, false)?, baton(&load, &trace, true)?);
    let (best, _, name) = best_other(&load, &trace)?;
    let [prefills, decodes, both] = load.instances;
    let (ttft_ms, tbt_ms) = load.objective_ms;
    Ok(format!(
        "| {:+.1} % | {seed} | {} | {} | {} | {} | {} | {prefills}+{decodes}+{both}, {ttft_ms} and {tbt_ms} ms, x{:.2}, \
         speed {}, most {:?}, KV {:?}, DRAM {}, {} Gbit/s at {}, {:?}, {} slow, chunk {} | prompts {:.0} ({:.1}), answers {:.0} \
         ({:.1}), arrivals {}, shares {} |",
        100.0 * (fixed.in_slo as f64 - best as f64) / all,
        fixed.in_slo,
        fixed.late,
        best,
        name,
        own.in_slo,
        load.speed,
        load.engine_permille,
        load.max_running,
        load.hbm_tokens,
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
