//! Lookups: a walk from run to run along a chain, with the instances that hold everything so far.

use alloc::vec::Vec;

use baton_types::{BlockHash, InstanceId};

use super::PrefixIndex;
use super::run::{Holder, Run, RunId};

/// What one instance holds of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// The holder.
    pub instance: InstanceId,
    /// Leading blocks of the chain held without a gap, in any local tier.
    pub blocks: u32,
    /// Of those, how many have HBM, DRAM, SSD as their fastest tier.
    pub by_tier: [u32; 3],
}

/// Room for a lookup's intermediate results; reuse it, and lookups stop allocating.
#[derive(Debug, Default)]
pub struct MatchScratch {
    /// Instances that hold more than the first stretch, ascending.
    deep: Vec<Match>,
    /// The position of each of them among the holders of the first stretch.
    ranks: Vec<u32>,
}

/// More holders of a chain's first stretch than this are copied as they are, and not reported one by one.
const WIDE: usize = 256;

/// The holders of a chain's first stretch, where they are many.
#[derive(Debug, Default)]
pub(crate) struct WideMatch {
    holders: Vec<Holder>,
    blocks: u32,
}

impl WideMatch {
    pub(crate) fn clear(&mut self) {
        self.holders.clear();
    }

    fn base(&self) -> Base<'_> {
        Base { holders: &self.holders, blocks: self.blocks }
    }

    /// What an instance holds of the first stretch.
    pub(crate) fn of(&self, instance: InstanceId) -> Option<Match> {
        let at = self.holders.binary_search_by_key(&instance, |holder| holder.instance()).ok()?;
        Some(self.base().of(self.holders[at]))
    }

    /// What each holds of the first stretch, in the order of their ids.
    pub(crate) fn matches(&self) -> impl ExactSizeIterator<Item = Match> {
        self.holders.iter().map(|holder| self.base().of(*holder))
    }
}

/// The first stretch of a chain: every match holds it, and most matches end with it.
pub(super) struct Base<'a> {
    holders: &'a [Holder],
    blocks: u32,
}

impl MatchScratch {
    /// Reports the holders of `base` in order, the deep ones with what they hold beyond it.
    #[inline]
    pub(super) fn emit(&self, base: &Base<'_>, mut report: impl FnMut(Match)) {
        let mut from = 0;
        for (deep, &rank) in self.deep.iter().zip(&self.ranks) {
            let rank = rank as usize;
            base.holders[from..rank].iter().for_each(|&holder| report(base.of(holder)));
            report(*deep);
            from = rank + 1;
        }
        base.holders[from..].iter().for_each(|&holder| report(base.of(holder)));
    }

    /// Finds the holders of `base` that also hold the next stretch; returns their number.
    fn open(&mut self, base: &Base<'_>, next: &[Holder], blocks: u32) -> usize {
        let mut rank = 0;
        for &holder in next {
            rank += rank_of(&base.holders[rank..], |h| h.instance(), holder.instance());
            let Some(&first) = base.holders.get(rank) else { break };
            if first.instance() == holder.instance() {
                let mut deep = base.of(first);
                deep.deepen(holder, blocks);
                self.deep.push(deep);
                self.ranks.push(rank as u32);
                rank += 1;
            }
        }
        self.deep.len()
    }

    /// Deepens the matches that held everything so far (`depth` blocks) and hold the next stretch too.
    fn continue_with(&mut self, depth: u32, next: &[Holder], blocks: u32) -> usize {
        let (mut at, mut alive) = (0, 0);
        for &holder in next {
            at += rank_of(&self.deep[at..], |m| m.instance, holder.instance());
            let Some(deep) = self.deep.get_mut(at) else { break };
            if deep.instance == holder.instance() && deep.blocks == depth {
                deep.deepen(holder, blocks);
                alive += 1;
            }
        }
        alive
    }
}

impl Match {
    fn deepen(&mut self, holder: Holder, blocks: u32) {
        self.blocks += blocks;
        self.by_tier[holder.fastest()] += blocks;
    }
}

impl Base<'_> {
    #[inline]
    fn of(&self, holder: Holder) -> Match {
        let fastest = holder.fastest();
        let share = |tier| if tier == fastest { self.blocks } else { 0 };
        Match { instance: holder.instance(), blocks: self.blocks, by_tier: [share(0), share(1), share(2)] }
    }
}

impl PrefixIndex {
    /// As [`Self::matches`]. Where very many hold the first stretch they are put into `wide`, and only those that hold
    /// more are reported.
    pub(crate) fn narrow_matches(
        &self,
        chain: &[BlockHash],
        scratch: &mut MatchScratch,
        wide: &mut WideMatch,
        mut report: impl FnMut(Match),
    ) {
        wide.clear();
        let Some(base) = self.walk(chain, scratch) else { return };
        if base.holders.len() <= WIDE {
            scratch.emit(&base, report);
        } else {
            wide.holders.extend_from_slice(base.holders);
            wide.blocks = base.blocks;
            scratch.deep.iter().for_each(|deep| report(*deep));
        }
    }

    /// Fills `scratch` with the deep matches of a chain; `None` when its first block has no holder.
    pub(super) fn walk<'a>(&'a self, chain: &[BlockHash], scratch: &mut MatchScratch) -> Option<Base<'a>> {
        scratch.deep.clear();
        scratch.ranks.clear();
        let run = self.head(*chain.first()?)?;
        let mut depth = self.agreement(run, chain);
        let base = Base { holders: run.holders.as_slice(), blocks: depth as u32 };
        while let Some(run) = chain.get(depth).and_then(|&hash| self.head(hash)) {
            let blocks = self.agreement(run, &chain[depth..]);
            let next = run.holders.as_slice();
            let alive = if depth == base.blocks as usize {
                scratch.open(&base, next, blocks as u32)
            } else {
                scratch.continue_with(depth as u32, next, blocks as u32)
            };
            if alive == 0 {
                break;
            }
            depth += blocks;
        }
        Some(base)
    }

    /// The run that starts with `hash`.
    ///
    /// Whatever follows a block in a chain either follows it in its run or starts a run, and so
    /// does a chain's first block; so a walk from the root never has to enter a run midway.
    #[inline]
    fn head(&self, hash: BlockHash) -> Option<&Run> {
        let id = self.heads.find(hash.0, |id| self.runs.get(RunId(id)).first == hash.0)?;
        Some(self.runs.get(RunId(id)))
    }

    /// How many blocks of `chain` a run covers that starts with its first block.
    ///
    /// Equal hashes mean equal prefixes, so the last block decides for the whole run. Otherwise chains mostly part near
    /// a run's end, and the search goes back from there.
    #[inline]
    fn agreement(&self, run: &Run, chain: &[BlockHash]) -> usize {
        let len = usize::from(run.len);
        if chain.get(len - 1).is_some_and(|hash| hash.0 == run.last) {
            return len;
        }
        let known = self.arena.hashes(run.blocks());
        let mut end = len.min(chain.len());
        let mut stride = 1;
        while end > stride && known[end - stride] != chain[end - stride].0 {
            end -= stride;
            stride *= 2;
        }
        let sure = end.saturating_sub(stride);
        let agree = chain[sure..end].iter().zip(&known[sure..end]);
        sure + partition(agree.len(), |at| chain[sure + at].0 == known[sure + at])
    }
}

/// The number of leading positions below `len` where `holds` is true; it must not hold after.
fn partition(len: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, len);
    while low < high {
        let middle = usize::midpoint(low, high);
        if holds(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

/// Where in a list sorted by instance the first entry at or after `instance` is, searched from
/// the front in growing strides.
#[inline]
fn rank_of<T: Copy>(list: &[T], of: impl Fn(T) -> InstanceId, instance: InstanceId) -> usize {
    let mut stride = 1;
    while stride < list.len() && of(list[stride]) < instance {
        stride *= 2;
    }
    let (from, to) = (stride / 2, list.len().min(stride + 1));
    from + list[from..to].partition_point(|&entry| of(entry) < instance)
}
