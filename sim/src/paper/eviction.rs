//! Eviction policies beside the optimum: what one cache of a given size hits on a trace, if each
//! request opens, seals and closes its chain at its arrival.
//!
//! The optimum knows the future. A request needs all its blocks in the cache at once, so what is
//! left to choose is which blocks to keep between two uses, and each block kept saves one miss.
//! Keeping a block occupies a slot for the interval between its uses, and at every request the
//! blocks kept and the request's own fit into the cache. Choosing the most of such intervals is
//! solved by giving up, whenever there are too many, the one that ends last: whatever another
//! choice keeps could be exchanged for it without needing more room later. That is Belady's rule:
//! the farthest next use goes first. A prefix adds no constraint of its own, because a request that
//! uses a block also uses its parent. So a parent's next use is never later than its child's. Among
//! equals the deepest goes first, and no child is left without its parent. Hence this is the true
//! optimum of the block hit ratio, not only a bound. (It is not that of the seconds saved, where deep
//! blocks count for more; there it is a heuristic.)

use std::collections::{BTreeSet, HashMap};

use baton_store::{Effect, Eviction, Input, Offload, Store, StoreConfig};
use baton_traces::Trace;
use baton_types::{BlockKey, CostProfile, RequestId};
use rayon::prelude::*;
use serde::Serialize;

use super::caches::keys;
use crate::profiles;

/// The name of the optimum's lines.
pub const OPTIMUM: &str = "optimum";

/// The name of the lines of an `lru` that knows which blocks are never used again, and evicts them
/// first. They show the value of knowing *whether* a block returns, without knowing when.
pub const TOLD: &str = "lru_told";

/// Runs for each size: every policy, [`TOLD`] and [`OPTIMUM`].
pub const RUNS: usize = Eviction::ALL.len() + 2;

/// The profile that seconds are counted by.
const PROFILE: &str = "llama3-70b-8xa100";

/// One policy at one size on one trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Which trace.
    pub trace: String,
    /// The cache, in tokens.
    pub cache_tokens: u64,
    /// The policy, or [`TOLD`] or [`OPTIMUM`].
    pub policy: String,
    /// Blocks found, of all asked for.
    pub block_hit_ratio: f64,
    /// Share of the gap between `lru` and the optimum that it closes.
    pub gap_closed: f64,
    /// Prefill time saved, of the time without a cache, by the cost profile `llama3-70b-8xa100`.
    pub prefill_saved: f64,
}

/// Blocks found at each request, and what that comes to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tally {
    hits: u64,
    saved_us: f64,
}

/// A trace made ready: chains, times and the cost of prefills.
struct Stream<'a> {
    trace: &'a Trace,
    chains: Vec<Vec<BlockKey>>,
    profile: CostProfile,
}

/// The lines for one trace, by size and policy in the order of [`Eviction::ALL`], then [`TOLD`] and [`OPTIMUM`].
/// `done` is called after each run, [`RUNS`] times for each size.
///
/// # Errors
/// Names the request whose chain a size cannot hold.
pub fn compare(
    name: &str,
    trace: &Trace,
    sizes_tokens: &[u64],
    done: &(dyn Fn() + Sync),
) -> Result<Vec<Line>, String> {
    let longest = trace.records.iter().map(|record| record.hash_ids.len() as u64).max().unwrap_or(0);
    let least = longest * u64::from(trace.block_tokens);
    if let Some(size) = sizes_tokens.iter().find(|&&size| size < least.max(1)) {
        return Err(format!(
            "eviction: a cache of {size} tokens cannot hold the longest prompt of {name}; give at least {least}"
        ));
    }
    let stream = Stream {
        trace,
        chains: trace.records.iter().map(|record| keys(&record.hash_ids)).collect(),
        profile: profiles::named(PROFILE).map_err(|e| e.to_string())?,
    };
    let runs: Vec<(u64, usize)> =
        sizes_tokens.iter().flat_map(|&size| (0..RUNS).map(move |run| (size, run))).collect();
    let tallies: Result<Vec<Tally>, String> = runs
        .par_iter()
        .map(|&(size, run)| {
            let blocks = size / u64::from(trace.block_tokens);
            let tally = match Eviction::ALL.get(run) {
                Some(&policy) => stream.under(policy, blocks),
                None if run == Eviction::ALL.len() => Ok(stream.tally(blocks as usize)),
                None => Ok(stream.optimum(blocks as usize)),
            };
            done();
            tally
        })
        .collect();
    let at_size = tallies?;
    Ok(sizes_tokens
        .iter()
        .zip(at_size.chunks(RUNS))
        .flat_map(|(&size, tallies)| lines(name, &stream, size, tallies))
        .collect())
}

#[expect(clippy::cast_precision_loss, reason = "ratios")]
fn lines(name: &str, stream: &Stream<'_>, cache_tokens: u64, tallies: &[Tally]) -> Vec<Line> {
    let asked: u64 = stream.chains.iter().map(|chain| chain.len() as u64).sum();
    let all_us: f64 =
        stream.trace.records.iter().map(|record| stream.prefill_us(record.input_length, 0)).sum();
    let (lru, optimum) = (tallies[Eviction::Lru as usize].hits as f64, tallies[RUNS - 1].hits as f64);
    let names = Eviction::ALL.into_iter().map(Eviction::name).chain([TOLD, OPTIMUM]);
    let line = |(policy, tally): (&str, &Tally)| Line {
        trace: name.into(),
        cache_tokens,
        policy: policy.into(),
        block_hit_ratio: tally.hits as f64 / asked.max(1) as f64,
        gap_closed: (tally.hits as f64 - lru) / (optimum - lru).max(1.0),
        prefill_saved: tally.saved_us / all_us.max(1.0),
    };
    names.zip(tallies).map(line).collect()
}

impl Stream<'_> {
    fn prefill_us(&self, new: u64, prefix: u64) -> f64 {
        self.profile.chunked_prefill_us(new, prefix, 8192)
    }

    fn count(&self, tally: &mut Tally, request: usize, hits: u64) {
        let tokens = self.trace.records[request].input_length;
        let cached = (hits * u64::from(self.trace.block_tokens)).min(tokens.saturating_sub(1));
        tally.hits += hits;
        tally.saved_us += self.prefill_us(tokens, 0) - self.prefill_us(tokens - cached, cached);
    }

    /// The real store core as one tier of `blocks` slots.
    fn under(&self, eviction: Eviction, blocks: u64) -> Result<Tally, String> {
        let config = StoreConfig {
            hbm_blocks: blocks,
            dram_blocks: 0,
            ssd_blocks: 0,
            eviction,
            offload: Offload::Off,
            ssd_second_touch: false,
        };
        let mut store = Store::new(config).map_err(|e| e.to_string())?;
        let (mut tally, mut effects) = (Tally::default(), Vec::new());
        let mut now_us = 0;
        for (request, chain) in self.chains.iter().enumerate() {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a trace's times are small"
            )]
            let at_us = (self.trace.records[request].timestamp_ms * 1000.0) as u64;
            now_us = at_us.max(now_us);
            let owner = RequestId(request as u64);
            store.step(now_us, Input::Open { owner, chain, room_blocks: 0 }, &mut effects);
            let hits = match effects.first() {
                Some(Effect::Opened { hbm, .. }) => u64::from(*hbm),
                other => return Err(format!("eviction: request {request} was answered by {other:?}")),
            };
            store.step(now_us, Input::Seal { owner, upto_blocks: u32::MAX }, &mut effects);
            store.step(now_us, Input::Close { owner }, &mut effects);
            effects.clear();
            self.count(&mut tally, request, hits);
        }
        Ok(tally)
    }

    /// Belady: the block whose next use is farthest goes first, the deepest among equals.
    fn optimum(&self, blocks: usize) -> Tally {
        self.foreseen(blocks, |_, next| next)
    }

    /// `lru`, but blocks that are never used again go first.
    fn tally(&self, blocks: usize) -> Tally {
        self.foreseen(
            blocks,
            |request, next| if next == usize::MAX { next } else { usize::MAX - 1 - request },
        )
    }

    /// The block of the highest `rank(last use, next use)` goes first, the deepest among equals.
    fn foreseen(&self, blocks: usize, rank: impl Fn(usize, usize) -> usize) -> Tally {
        let next_uses = self.next_uses();
        let mut resident: HashMap<BlockKey, (usize, usize)> = HashMap::new();
        let mut order: BTreeSet<(usize, usize, BlockKey)> = BTreeSet::new();
        let mut tally = Tally::default();
        for (request, chain) in self.chains.iter().enumerate() {
            let mut hits = 0;
            for key in chain {
                if let Some((rank, position)) = resident.remove(key) {
                    order.remove(&(rank, position, *key));
                    hits += 1;
                }
            }
            while order.len() + chain.len() > blocks {
                let Some((_, _, key)) = order.pop_last() else { break };
                resident.remove(&key);
            }
            for (position, key) in chain.iter().enumerate() {
                let rank = rank(request, next_uses[request][position]);
                resident.insert(*key, (rank, position));
                order.insert((rank, position, *key));
            }
            self.count(&mut tally, request, hits);
        }
        tally
    }

    /// For each block of each request, the next request that uses it.
    fn next_uses(&self) -> Vec<Vec<usize>> {
        let mut next: HashMap<BlockKey, usize> = HashMap::new();
        let mut uses: Vec<Vec<usize>> = Vec::with_capacity(self.chains.len());
        for (request, chain) in self.chains.iter().enumerate().rev() {
            uses.push(chain.iter().map(|key| next.insert(*key, request).unwrap_or(usize::MAX)).collect());
        }
        uses.reverse();
        uses
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::Rng;

    fn trace(chains: &[&[u64]]) -> Trace {
        let mut trace = baton_traces::synth::like(baton_traces::synth::PublishedTrace::Synthetic, 1);
        trace.records.truncate(chains.len());
        trace.block_tokens = 16;
        for (record, chain) in trace.records.iter_mut().zip(chains) {
            record.hash_ids = chain.to_vec();
            record.input_length = 16 * chain.len() as u64;
        }
        trace
    }

    /// Every choice of what to keep, tried: the most hits that `blocks` slots can have.
    fn best(chains: &[Vec<u64>], kept: &BTreeSet<Vec<u64>>, blocks: usize) -> usize {
        let Some((chain, rest)) = chains.split_first() else { return 0 };
        let prefixes: BTreeSet<Vec<u64>> = (1..=chain.len()).map(|len| chain[..len].to_vec()).collect();
        let hits = prefixes.intersection(kept).count();
        let all: Vec<&Vec<u64>> = kept.union(&prefixes).collect();
        let choices = (0u32..1 << all.len()).map(|choice| {
            all.iter().enumerate().filter(|(i, _)| choice >> i & 1 == 1).map(|(_, p)| (*p).clone()).collect()
        });
        // The blocks kept must fit beside the whole chain, and each must have its parent among them.
        let fits = |after: &BTreeSet<Vec<u64>>| {
            after.difference(&prefixes).count() + prefixes.len() <= blocks
                && after.iter().all(|p| p.len() == 1 || after.contains(&p[..p.len() - 1]))
        };
        let later = choices.filter(fits).map(|after| best(rest, &after, blocks)).max().unwrap_or(0);
        hits + later
    }

    #[test]
    fn no_choice_hits_more_than_the_optimum() {
        let mut rng = Rng::new(3);
        for _ in 0..30 {
            let chains: Vec<Vec<u64>> =
                (0..5).map(|_| (0..1 + rng.below(3)).map(|_| rng.below(2)).collect()).collect();
            let ids: Vec<Vec<u64>> = chains
                .iter()
                .map(|chain| {
                    // A name for each prefix, so that equal ids mean equal prefixes.
                    (1..=chain.len())
                        .map(|len| chain[..len].iter().fold(1, |id, step| id * 2 + step))
                        .collect()
                })
                .collect();
            let borrowed: Vec<&[u64]> = ids.iter().map(Vec::as_slice).collect();
            let trace = trace(&borrowed);
            let stream = Stream {
                chains: trace.records.iter().map(|record| keys(&record.hash_ids)).collect(),
                trace: &trace,
                profile: profiles::named(PROFILE).expect("shipped"),
            };
            for blocks in 3..5 {
                let tried = best(&chains, &BTreeSet::new(), blocks) as u64;
                assert_eq!(stream.optimum(blocks).hits, tried, "{chains:?} in {blocks}");
            }
        }
    }

    #[test]
    fn every_policy_lies_between_nothing_and_the_optimum() {
        let chain: Vec<Vec<u64>> = (0..200).map(|i| vec![1, 2 + i % 7, 100 + i % 21]).collect();
        let borrowed: Vec<&[u64]> = chain.iter().map(Vec::as_slice).collect();
        let lines = compare("t", &trace(&borrowed), &[160, 1600], &|| ()).expect("fits");
        assert_eq!(lines.len(), 2 * RUNS);
        let best = &lines[RUNS - 1];
        assert_eq!((best.policy.as_str(), best.cache_tokens, best.gap_closed), (OPTIMUM, 160, 1.0));
        assert!(lines[..RUNS].iter().all(|line| line.block_hit_ratio <= best.block_hit_ratio));
        assert!(
            lines[RUNS..].iter().all(|line| line.block_hit_ratio > 0.8),
            "all fits: only first uses miss"
        );
        let error = compare("t", &trace(&borrowed), &[32], &|| ()).expect_err("three blocks of 16");
        assert!(error.contains("at least 48"), "{error}");
    }
}
