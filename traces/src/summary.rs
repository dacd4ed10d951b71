//! Summary of a trace: rows, span, rate, lengths, hit ratios, top prefixes, sessions.

use serde::Serialize;

use crate::histogram::{Histogram, Spread};
use crate::lru::PrefixLru;
use crate::parser::session_key;
use crate::record::{Record, Trace};
use crate::seen::{IdMap, SeenIds};
use crate::top::{TopPrefix, TopPrefixes};

/// Width of the windows that arrivals are counted in.
pub const RATE_WINDOW_MS: f64 = 10_000.0;
const MOST_SESSIONS: usize = 2_000_000;
/// Windows without an arrival are counted up to this many at a stretch.
const MOST_EMPTY_WINDOWS: f64 = 1e7;

/// Options of a summary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SummaryOptions {
    /// Sizes of the cache to try, in tokens.
    pub capacities_tokens: Vec<u64>,
    /// Number of prefixes to list.
    pub top: usize,
}

impl Default for SummaryOptions {
    fn default() -> Self {
        Self { capacities_tokens: vec![1_000_000, 3_000_000, 10_000_000, 50_000_000], top: 5 }
    }
}

/// Share of the work that a cache saves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub struct HitRatio {
    /// Leading blocks found over all blocks.
    pub block_hit_ratio: f64,
    /// Tokens in the leading blocks found over all input tokens.
    pub token_hit_ratio: f64,
}

/// The hit ratio of one cache of a given size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CapacityHitRatio {
    /// Size of the cache.
    pub capacity_tokens: u64,
    /// Its hit ratios.
    #[serde(flatten)]
    pub hit: HitRatio,
}

/// Summary of the sessions in the rows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub struct SessionSummary {
    /// Distinct sessions named (counting stops at two million).
    pub sessions: u64,
    /// Turns a session.
    pub turns: Spread,
    /// Rows that wait for an earlier one.
    pub closed_loop_requests: u64,
    /// Rows that reuse more than the first block of an earlier row.
    pub continuing_requests: u64,
}

/// All that is worked out. Serialises to the JSON that `baton trace stats --json` prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Number of requests (rows of the trace).
    pub requests: u64,
    /// Tokens an id stands for.
    pub block_tokens: u32,
    /// From the first arrival to the last.
    pub span_ms: f64,
    /// Rows over the span.
    pub requests_per_s: f64,
    /// Arrivals in windows of ten seconds.
    pub arrivals_per_window: Spread,
    /// Prompt lengths.
    pub input_length: Spread,
    /// Output lengths.
    pub output_length: Spread,
    /// Prompt tokens in all.
    pub input_tokens: u64,
    /// Output tokens in all.
    pub output_tokens: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Distinct blocks.
    pub distinct_blocks: u64,
    /// Hit ratios of a cache that never forgets.
    pub unbounded: HitRatio,
    /// Hit ratios of caches of given sizes.
    pub capacity: Vec<CapacityHitRatio>,
    /// The prefixes that save most.
    pub top_prefixes: Vec<TopPrefix>,
    /// Figures of the sessions.
    pub sessions: SessionSummary,
    /// Memory that the set of distinct blocks took.
    pub state_bytes: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Hits {
    blocks: u64,
    tokens: u64,
}

impl Hits {
    fn add(&mut self, matched: u64, record: &Record, block_tokens: u64) {
        self.blocks += matched;
        self.tokens += matched.saturating_mul(block_tokens).min(record.input_length);
    }

    fn ratio(self, blocks: u64, tokens: u64) -> HitRatio {
        HitRatio { block_hit_ratio: share(self.blocks, blocks), token_hit_ratio: share(self.tokens, tokens) }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio needs no more than 53 bits")]
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Works a summary out row by row, in memory bounded by the caches tried and a bit (or, where ids
/// are hashes, an entry) per distinct block.
pub struct Summariser {
    block_tokens: u32,
    top: usize,
    requests: u64,
    first_ms: f64,
    last_ms: f64,
    window: Option<(f64, u64)>,
    arrivals: Histogram,
    input: Histogram,
    output: Histogram,
    input_tokens: u64,
    output_tokens: u64,
    blocks: u64,
    seen: SeenIds,
    unbounded: Hits,
    caches: Vec<(u64, PrefixLru, Hits)>,
    prefixes: TopPrefixes,
    turns: IdMap<u64>,
    closed_loop: u64,
    continuing: u64,
}

impl Summariser {
    /// A summary of nothing yet.
    #[must_use]
    pub fn new(block_tokens: u32, options: &SummaryOptions) -> Self {
        let blocks_of = |tokens: u64| tokens / u64::from(block_tokens.max(1));
        Self {
            block_tokens: block_tokens.max(1),
            top: options.top,
            requests: 0,
            first_ms: 0.0,
            last_ms: 0.0,
            window: None,
            arrivals: Histogram::default(),
            input: Histogram::default(),
            output: Histogram::default(),
            input_tokens: 0,
            output_tokens: 0,
            blocks: 0,
            seen: SeenIds::default(),
            unbounded: Hits::default(),
            caches: options
                .capacities_tokens
                .iter()
                .map(|&tokens| (tokens, PrefixLru::new(blocks_of(tokens)), Hits::default()))
                .collect(),
            prefixes: TopPrefixes::default(),
            turns: IdMap::default(),
            closed_loop: 0,
            continuing: 0,
        }
    }

    /// Takes the next row in.
    pub fn add(&mut self, record: &Record) {
        if self.requests == 0 {
            self.first_ms = record.timestamp_ms;
        }
        self.requests += 1;
        self.last_ms = self.last_ms.max(record.timestamp_ms);
        self.count_arrival(record.timestamp_ms);
        self.input.add(record.input_length);
        self.output.add(record.output_length);
        self.input_tokens += record.input_length;
        self.output_tokens += record.output_length;
        self.blocks += record.hash_ids.len() as u64;
        self.count_hits(record);
        if let Some(session) = record.session_id() {
            let key = session_key(session);
            if self.turns.len() < MOST_SESSIONS || self.turns.contains_key(&key) {
                *self.turns.entry(key).or_default() += 1;
            }
        }
        self.closed_loop += u64::from(record.delay_ms().is_some());
    }

    fn count_arrival(&mut self, at_ms: f64) {
        let window = (at_ms / RATE_WINDOW_MS).floor();
        match &mut self.window {
            Some((current, count)) if window <= *current => *count += 1,
            Some((current, count)) => {
                self.arrivals.add(*count);
                let empty = (window - *current - 1.0).min(MOST_EMPTY_WINDOWS);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "bounded above, and at least 0"
                )]
                self.arrivals.add_times(0, empty as u64);
                (*current, *count) = (window, 1);
            }
            None => self.window = Some((window, 1)),
        }
    }

    fn count_hits(&mut self, record: &Record) {
        let block_tokens = u64::from(self.block_tokens);
        let (mut matched, mut leading) = (0, true);
        for &id in &record.hash_ids {
            leading &= !self.seen.insert(id);
            matched += usize::from(leading);
        }
        self.unbounded.add(matched as u64, record, block_tokens);
        self.continuing += u64::from(matched > 1);
        self.prefixes.add(&record.hash_ids[..matched]);
        for (_, cache, hits) in &mut self.caches {
            hits.add(cache.request(&record.hash_ids), record, block_tokens);
        }
    }

    /// The summary of all rows taken in.
    #[must_use]
    pub fn finish(mut self) -> Summary {
        if let Some((_, count)) = self.window {
            self.arrivals.add(count);
        }
        let mut turns = Histogram::default();
        self.turns.values().for_each(|n| turns.add(*n));
        let span_ms = self.last_ms - self.first_ms;
        let (blocks, tokens) = (self.blocks, self.input_tokens);
        #[expect(clippy::cast_precision_loss, reason = "a rate needs no more than 53 bits")]
        let requests_per_s = if span_ms > 0.0 { self.requests as f64 * 1000.0 / span_ms } else { 0.0 };
        Summary {
            requests: self.requests,
            block_tokens: self.block_tokens,
            span_ms,
            requests_per_s,
            arrivals_per_window: self.arrivals.spread(),
            input_length: self.input.spread(),
            output_length: self.output.spread(),
            input_tokens: tokens,
            output_tokens: self.output_tokens,
            blocks,
            distinct_blocks: self.seen.count(),
            unbounded: self.unbounded.ratio(blocks, tokens),
            capacity: self
                .caches
                .iter()
                .map(|(capacity_tokens, _, hits)| CapacityHitRatio {
                    capacity_tokens: *capacity_tokens,
                    hit: hits.ratio(blocks, tokens),
                })
                .collect(),
            top_prefixes: self.prefixes.top(self.top, self.block_tokens),
            sessions: SessionSummary {
                sessions: self.turns.len() as u64,
                turns: turns.spread(),
                closed_loop_requests: self.closed_loop,
                continuing_requests: self.continuing,
            },
            state_bytes: self.seen.bytes(),
        }
    }
}

/// Summarises a trace in memory.
#[must_use]
pub fn summarise(trace: &Trace, options: &SummaryOptions) -> Summary {
    let mut summariser = Summariser::new(trace.block_tokens, options);
    trace.records.iter().for_each(|record| summariser.add(record));
    summariser.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(at: f64, tokens: u64, ids: &[u64]) -> Record {
        Record {
            timestamp_ms: at,
            input_length: tokens,
            output_length: 2,
            hash_ids: ids.to_vec(),
            extra: None,
        }
    }

    #[test]
    fn hits_are_leading_blocks_and_the_tokens_in_them() {
        let options = SummaryOptions { capacities_tokens: vec![0, 20, 1000], top: 3 };
        let mut summariser = Summariser::new(10, &options);
        summariser.add(&record(0.0, 25, &[1, 2, 3]));
        summariser.add(&record(25_000.0, 25, &[1, 2, 3]));
        summariser.add(&record(30_000.0, 25, &[1, 9, 3]));
        let summary = summariser.finish();
        assert_eq!(summary.requests, 3);
        assert_eq!((summary.blocks, summary.distinct_blocks), (9, 4));
        assert!((summary.unbounded.block_hit_ratio - 4.0 / 9.0).abs() < 1e-12);
        assert!((summary.unbounded.token_hit_ratio - 35.0 / 75.0).abs() < 1e-12);
        let blocks: Vec<f64> = summary.capacity.iter().map(|c| c.hit.block_hit_ratio * 9.0).collect();
        assert!(
            (blocks[0]).abs() < 1e-9 && (blocks[1] - 3.0).abs() < 1e-9 && (blocks[2] - 4.0).abs() < 1e-9,
            "{blocks:?}"
        );
        assert_eq!(summary.sessions.continuing_requests, 1);
        assert_eq!(summary.arrivals_per_window.min, 0, "the window from 10 s to 20 s is empty");
        assert_eq!(summary.top_prefixes[0].tokens, 10, "three requests share the first block");
    }

    #[test]
    fn the_json_has_the_names_that_scripts_rely_on() {
        let json = serde_json::to_value(Summariser::new(512, &SummaryOptions::default()).finish()).unwrap();
        assert_eq!(json["requests"], 0);
        assert_eq!(json["capacity"][1]["capacity_tokens"], 3_000_000);
        assert!(json["capacity"][0]["block_hit_ratio"].is_number());
        assert!(json["capacity"][0]["token_hit_ratio"].is_number());
    }
}
