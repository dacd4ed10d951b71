//! Look-alikes of the published Mooncake traces: chains of prompts, each continuing the one before,
//! with the published counts, lengths, gaps and hit ratios.

use std::str::FromStr;

use baton_types::Rng;

use crate::dialect::Dialect;
use crate::record::{Record, Trace};
use crate::synth::sample::{EvenDraws, Quantiles, tokens};

const BLOCK: u64 = 512;

/// Which published trace to look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishedTrace {
    /// `conversation_trace.jsonl`: chats that all begin with the same block.
    Conversation,
    /// `synthetic_trace.jsonl`: documents asked about many times, among short requests.
    Synthetic,
}

impl FromStr for PublishedTrace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "conversation" => Ok(Self::Conversation),
            "synthetic" => Ok(Self::Synthetic),
            _ => Err(format!("no look-alike of {text:?} is known; choose conversation or synthetic")),
        }
    }
}

/// Figures of a published trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PublishedFigures {
    /// Number of requests (rows of the trace).
    pub requests: u64,
    /// From the first arrival to the last.
    pub span_ms: f64,
    /// Mean prompt length.
    pub input_mean: f64,
    /// Median and 90th percentile of the prompt length.
    pub input_p50_p90: (u64, u64),
    /// Mean output length.
    pub output_mean: f64,
    /// Median and 90th percentile of the output length.
    pub output_p50_p90: (u64, u64),
    /// Share of rows that reuse more than the first block of an earlier row.
    pub continuing_share: f64,
    /// `(capacity in tokens, block hit ratio)`; the last capacity stands for unbounded.
    pub block_hit_ratio: [(u64, f64); 5],
}

/// How far a look-alike may be from the published figures, for every seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Relative, of the span.
    pub span: f64,
    /// Relative, of the means of lengths.
    pub mean: f64,
    /// Relative, of their percentiles.
    pub percentile: f64,
    /// Absolute, of the share of continuing rows and of every hit ratio.
    pub ratio: f64,
}

/// The bounds within which [`like`] stays. The synthetic trace has a third of the rows, hence wider
/// ones.
#[must_use]
pub fn bounds(kind: PublishedTrace) -> Bounds {
    match kind {
        PublishedTrace::Conversation => Bounds { span: 0.001, mean: 0.04, percentile: 0.08, ratio: 0.025 },
        PublishedTrace::Synthetic => Bounds { span: 0.001, mean: 0.08, percentile: 0.25, ratio: 0.05 },
    }
}

/// The published figures that a look-alike is measured against.
#[must_use]
pub fn published(kind: PublishedTrace) -> PublishedFigures {
    match kind {
        PublishedTrace::Conversation => PublishedFigures {
            requests: 12_031,
            span_ms: 3_536_999.0,
            input_mean: 12_035.1,
            input_p50_p90: (6_909, 27_367),
            output_mean: 342.6,
            output_p50_p90: (350, 597),
            continuing_share: 0.387,
            block_hit_ratio: [
                (1_000_000, 0.0533),
                (3_000_000, 0.1361),
                (10_000_000, 0.2852),
                (50_000_000, 0.3635),
                (u64::MAX, 0.3664),
            ],
        },
        PublishedTrace::Synthetic => PublishedFigures {
            requests: 3_993,
            span_ms: 1_022_025.0,
            input_mean: 15_325.5,
            input_p50_p90: (11_587, 38_615),
            output_mean: 149.1,
            output_p50_p90: (69, 389),
            continuing_share: 0.446,
            block_hit_ratio: [
                (1_000_000, 0.1424),
                (3_000_000, 0.3094),
                (10_000_000, 0.5666),
                (50_000_000, 0.6396),
                (u64::MAX, 0.6396),
            ],
        },
    }
}

/// Parameters for the rows of a look-alike.
struct Shape {
    /// Arrivals fall on multiples of this; 0 for none.
    stamp_ms: f64,
    shares_first_block: bool,
    /// Share of chains that have more than one row.
    continued: f64,
    /// Chance that the second, third, ... row of a chain is continued as well.
    goes_on: &'static [f64],
    single_input: Quantiles,
    first_input: Quantiles,
    single_output: Quantiles,
    chain_output: Quantiles,
    gap_s: Quantiles,
    growth: Quantiles,
    /// Share of continuing rows that leave their predecessor before its end.
    branching: f64,
    branch_at: Quantiles,
    branch_length: Quantiles,
    least_input: u64,
    most_input: u64,
}

fn shape(kind: PublishedTrace) -> Shape {
    match kind {
        PublishedTrace::Conversation => Shape {
            stamp_ms: 3000.0,
            shares_first_block: true,
            continued: 0.376,
            goes_on: &[0.455, 0.56, 0.63, 0.65, 0.70, 0.76, 0.75, 0.78, 0.80],
            single_input: Quantiles([
                891.0, 893.0, 896.0, 900.0, 1040.0, 4850.0, 12_350.0, 26_100.0, 40_327.0, 94_410.0, 126_195.0,
            ]),
            first_input: Quantiles([
                892.0, 1033.0, 1131.0, 1298.0, 2888.0, 6893.0, 14_593.0, 25_000.0, 31_500.0, 58_000.0,
                100_000.0,
            ]),
            single_output: Quantiles([
                1.0, 3.0, 8.0, 20.0, 144.0, 349.0, 465.0, 581.0, 677.0, 1022.0, 2000.0,
            ]),
            chain_output: Quantiles([
                1.0, 3.0, 12.0, 28.0, 166.0, 351.0, 478.0, 612.0, 722.0, 1250.0, 2000.0,
            ]),
            gap_s: Quantiles([1.5, 13.0, 32.0, 45.0, 78.0, 146.0, 310.0, 570.0, 740.0, 1700.0, 3200.0]),
            growth: Quantiles([
                -392.0, 0.0, 20.0, 63.0, 255.0, 460.0, 800.0, 3500.0, 5800.0, 13_500.0, 28_000.0,
            ]),
            branching: 0.18,
            branch_at: Quantiles([
                0.015, 0.031, 0.053, 0.068, 0.111, 0.214, 0.453, 0.833, 0.906, 0.957, 0.986,
            ]),
            branch_length: Quantiles([
                0.174, 0.284, 0.504, 0.609, 0.788, 0.993, 1.109, 1.385, 1.732, 2.827, 7.721,
            ]),
            least_input: 891,
            most_input: 126_195,
        },
        PublishedTrace::Synthetic => Shape {
            stamp_ms: 0.0,
            shares_first_block: false,
            continued: 0.235,
            goes_on: &[0.955, 0.95, 0.945, 0.935, 0.93, 0.93, 0.93, 0.93],
            single_input: Quantiles([
                13.0, 16.0, 19.0, 22.0, 34.0, 169.0, 14_221.0, 19_625.0, 24_429.0, 41_155.0, 134_773.0,
            ]),
            first_input: Quantiles([
                13.0, 13.0, 783.0, 2943.0, 9200.0, 18_800.0, 32_500.0, 41_500.0, 50_000.0, 66_454.0,
                191_374.0,
            ]),
            single_output: Quantiles([1.0, 3.0, 18.0, 46.0, 146.0, 258.0, 368.0, 530.0, 665.0, 782.0, 842.0]),
            chain_output: Quantiles([2.0, 2.0, 2.0, 2.0, 7.0, 18.0, 62.0, 140.0, 205.0, 528.0, 893.0]),
            gap_s: Quantiles([0.003, 0.55, 3.2, 8.5, 26.0, 70.0, 174.0, 308.0, 405.0, 608.0, 793.0]),
            growth: Quantiles([-460.0, -199.0, -38.0, -9.0, -2.0, 0.0, 6.0, 105.0, 362.0, 927.0, 1814.0]),
            branching: 0.18,
            branch_at: Quantiles([
                0.01, 0.714, 0.853, 0.897, 0.942, 0.956, 0.967, 0.974, 0.977, 0.981, 0.988,
            ]),
            branch_length: Quantiles([
                0.843, 0.95, 0.966, 0.974, 0.986, 0.998, 1.002, 1.011, 1.02, 1.042, 1.194,
            ]),
            least_input: 13,
            most_input: 191_378,
        },
    }
}

/// A row before its place in the trace, and so its ids, are known.
struct PlannedRow {
    at_ms: f64,
    chain: usize,
    input: u64,
    output: u64,
    /// Leading blocks kept of the row before it in its chain.
    kept_blocks: u64,
}

/// A trace like the published one: see [`published`] and [`bounds`].
///
/// ```
/// use baton_traces::synth::{PublishedTrace, like};
/// assert_eq!(like(PublishedTrace::Conversation, 7).records.len(), 12_031);
/// ```
#[must_use]
pub fn like(kind: PublishedTrace, seed: u64) -> Trace {
    let (shape, figures) = (shape(kind), published(kind));
    let mut rng = Rng::fork(seed, 0x6c69_6b65);
    let mut draws = Draws::new(&mut rng);
    let wanted = usize::try_from(figures.requests).expect("a few thousand rows");
    let mut rows: Vec<PlannedRow> = Vec::with_capacity(wanted + 64);
    let mut chain = 0;
    while rows.len() < wanted {
        plan_chain(&shape, (chain, figures.span_ms), &mut draws, &mut rng, &mut rows);
        chain += 1;
    }
    rows.truncate(wanted);
    rows.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms).then(a.chain.cmp(&b.chain)));
    pin_ends(&mut rows, figures.span_ms);
    Trace {
        block_tokens: 512,
        records: give_ids(&rows, chain, shape.shares_first_block),
        assumptions: vec![format!("made up to look like the published {kind:?} trace, seed {seed}")],
        dialect: Dialect::Mooncake,
    }
}

/// Evenly spread draws for what decides the figures of a whole trace: which chains are continued,
/// how they begin and how far they go. Random draws would let seeds differ by several percent.
struct Draws {
    continued: EvenDraws,
    single: EvenDraws,
    first: EvenDraws,
    turns: EvenDraws,
}

impl Draws {
    fn new(rng: &mut Rng) -> Self {
        Self {
            continued: EvenDraws::new(rng, std::f64::consts::SQRT_2),
            single: EvenDraws::new(rng, 5f64.sqrt()),
            first: EvenDraws::new(rng, 7f64.sqrt()),
            turns: EvenDraws::new(rng, std::f64::consts::E),
        }
    }
}

/// Rows that follow the first one of a continued chain, by where `share` falls among all chains.
fn turns_after_first(goes_on: &[f64], share: f64) -> usize {
    let mut reach = 1.0;
    let mut turns = 0;
    loop {
        turns += 1;
        let chance = goes_on.get(turns - 1).or(goes_on.last()).copied().unwrap_or(0.0);
        reach *= chance;
        if share >= reach || turns > 200 {
            return turns;
        }
    }
}

/// Adds the rows of one chain that fall inside the trace.
fn plan_chain(
    shape: &Shape,
    (chain, span_ms): (usize, f64),
    draws: &mut Draws,
    rng: &mut Rng,
    rows: &mut Vec<PlannedRow>,
) {
    let is_continued = draws.continued.next() < shape.continued;
    let (first, output) = if is_continued {
        (shape.first_input.at(draws.first.next()), &shape.chain_output)
    } else {
        (shape.single_input.at(draws.single.next()), &shape.single_output)
    };
    let mut input = bounded(first, shape);
    let mut at_ms = stamped(rng.unit() * span_ms, shape);
    rows.push(PlannedRow { at_ms, chain, input, output: tokens(output.draw(rng), 1), kept_blocks: 0 });
    let turns = if is_continued { turns_after_first(shape.goes_on, draws.turns.next()) } else { 0 };
    for _ in 0..turns {
        at_ms = stamped(at_ms + shape.gap_s.draw(rng) * 1000.0, shape);
        if at_ms > span_ms {
            return;
        }
        let (next, kept_blocks) = grow(shape, input, rng);
        rows.push(PlannedRow {
            at_ms,
            chain,
            input: next,
            output: tokens(shape.chain_output.draw(rng), 1),
            kept_blocks,
        });
        input = next;
    }
}

/// Length of the row that follows one of `input` tokens, and the blocks they share.
#[expect(clippy::cast_precision_loss, reason = "lengths are small")]
fn grow(shape: &Shape, input: u64, rng: &mut Rng) -> (u64, u64) {
    if rng.unit() < shape.branching {
        let next = bounded(input as f64 * shape.branch_length.draw(rng), shape);
        let kept = tokens((input / BLOCK) as f64 * shape.branch_at.draw(rng), 1);
        return (next, kept.min(input / BLOCK).min(next / BLOCK));
    }
    let next = bounded(input as f64 + shape.growth.draw(rng), shape);
    (next, (input / BLOCK).min(next / BLOCK))
}

fn bounded(value: f64, shape: &Shape) -> u64 {
    tokens(value, shape.least_input).min(shape.most_input)
}

fn stamped(at_ms: f64, shape: &Shape) -> f64 {
    if shape.stamp_ms > 0.0 { (at_ms / shape.stamp_ms).round() * shape.stamp_ms } else { at_ms.floor() }
}

/// Puts the first row at 0 and the last at the end of the span, as in the published trace.
fn pin_ends(rows: &mut [PlannedRow], span_ms: f64) {
    if let Some(first) = rows.first_mut() {
        first.at_ms = 0.0;
    }
    if let Some(last) = rows.last_mut() {
        last.at_ms = last.at_ms.max(span_ms.floor());
    }
}

/// Numbers blocks in order of first appearance, as the published traces do.
fn give_ids(rows: &[PlannedRow], chains: usize, shares_first_block: bool) -> Vec<Record> {
    let mut last_ids: Vec<Vec<u64>> = vec![Vec::new(); chains];
    let mut next_id = 0u64;
    let mut fresh = || {
        next_id += 1;
        next_id - 1
    };
    let root = shares_first_block.then(&mut fresh);
    let mut records = Vec::with_capacity(rows.len());
    for row in rows {
        let blocks = usize::try_from(row.input.div_ceil(BLOCK)).expect("lengths are bounded");
        let kept = usize::try_from(row.kept_blocks).expect("lengths are bounded");
        let held = &mut last_ids[row.chain];
        held.truncate(kept);
        if held.is_empty() && row.input >= BLOCK {
            held.extend(root);
        }
        held.truncate(blocks);
        held.resize_with(blocks, &mut fresh);
        records.push(Record {
            timestamp_ms: row.at_ms,
            input_length: row.input,
            output_length: row.output,
            hash_ids: held.clone(),
            extra: None,
        });
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::{Summary, SummaryOptions, summarise};

    fn near(what: &str, got: f64, wanted: f64, bound: f64) {
        let off = (got - wanted).abs();
        assert!(off <= bound, "{what}: {got} is {off} from the published {wanted}, bound {bound}");
    }

    #[expect(clippy::cast_precision_loss, reason = "figures are small")]
    fn check(summary: &Summary, kind: PublishedTrace) {
        let (figures, bounds) = (published(kind), bounds(kind));
        assert_eq!(summary.requests, figures.requests);
        near("span", summary.span_ms, figures.span_ms, bounds.span * figures.span_ms);
        for (what, spread, mean, (p50, p90)) in [
            ("input", summary.input_length, figures.input_mean, figures.input_p50_p90),
            ("output", summary.output_length, figures.output_mean, figures.output_p50_p90),
        ] {
            near(what, spread.mean, mean, bounds.mean * mean);
            near(what, spread.p50 as f64, p50 as f64, bounds.percentile * p50 as f64);
            near(what, spread.p90 as f64, p90 as f64, bounds.percentile * p90 as f64);
        }
        let continuing = summary.sessions.continuing_requests as f64 / summary.requests as f64;
        near("continuing", continuing, figures.continuing_share, bounds.ratio);
        let hits =
            summary.capacity.iter().map(|c| c.hit.block_hit_ratio).chain([summary.unbounded.block_hit_ratio]);
        for (got, (capacity, wanted)) in hits.zip(figures.block_hit_ratio) {
            near(&format!("hit ratio at {capacity}"), got, wanted, bounds.ratio);
        }
    }

    #[test]
    fn look_alikes_stay_within_the_stated_bounds_for_every_seed() {
        for kind in [PublishedTrace::Conversation, PublishedTrace::Synthetic] {
            for seed in 0..24 {
                let trace = like(kind, seed);
                let summary = summarise(&trace, &SummaryOptions::default());
                println!(
                    "{kind:?} {seed}: in {:?} out {:?} continuing {} hits {:?} {:.4}",
                    summary.input_length,
                    summary.output_length,
                    summary.sessions.continuing_requests,
                    summary
                        .capacity
                        .iter()
                        .map(|c| (c.hit.block_hit_ratio * 1e4).round() / 1e4)
                        .collect::<Vec<_>>(),
                    summary.unbounded.block_hit_ratio
                );
                check(&summary, kind);
            }
        }
    }

    #[test]
    fn the_structure_is_that_of_the_published_traces() {
        let trace = like(PublishedTrace::Conversation, 1);
        assert!(trace.records.iter().all(|r| r.hash_ids[0] == 0), "one block begins every prompt");
        assert!(trace.records.iter().all(|r| r.hash_ids.len() as u64 == r.input_length.div_ceil(512)));
        assert!(trace.records.is_sorted_by(|a, b| a.timestamp_ms <= b.timestamp_ms));
        assert!(
            trace.records.iter().all(|r| r.timestamp_ms % 3000.0 == 0.0 || r.timestamp_ms == 3_536_999.0)
        );
    }

    #[test]
    fn equal_seeds_give_equal_traces_and_others_do_not() {
        assert_eq!(like(PublishedTrace::Synthetic, 4), like(PublishedTrace::Synthetic, 4));
        assert_ne!(like(PublishedTrace::Synthetic, 4).records, like(PublishedTrace::Synthetic, 5).records);
    }
}
