//! The unpinned blocks of one tier, in the order in which they are to go.
//!
//! A block rests here while its copy in the tier is readable and nobody holds the block. It comes
//! in when the last pin goes, within one request from the last block to the first; hence under
//! `Lru`, `Lfu` and `LengthAware` a parent always goes after its children. Under `Reuse` a block
//! whose turn comes before its children's is *parked* until one of them left. A block whose turn is
//! near may be *condemned*: it keeps its place in line ahead of all others, so that its copy to
//! the next tier can be made in time; a new pin saves it.

mod ages;
mod chance;
mod ghosts;
mod leanings;
mod length_aware;
mod lfu;
mod list;
mod lru;
mod ranks;
pub(crate) mod reuse;
mod s3fifo;

use crate::config::Eviction;
use alloc::vec::Vec;
use list::Lists;
use ranks::Ranks;
use reuse::{Change, REUSE_LISTS};
use s3fifo::S3Fifo;

/// Lists that a policy may use.
const RANKS: usize = 60;
/// The list of condemned blocks.
const CONDEMNED: usize = RANKS;
/// The list of blocks that wait for their children to go, under `Reuse`.
const PARKED: usize = RANKS + 1;
/// The first of the lists of `Reuse`.
const FIRST_REUSE: usize = RANKS + 2;

/// What a policy may know of a block.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts {
    /// Times asked for, halved now and then.
    pub frequency: u8,
    /// Base-2 logarithm of its position in the chain.
    pub depth_class: u8,
    /// Its short name.
    pub hash: u64,
    /// Its list under `Reuse`.
    pub list: usize,
}

/// One tier's unpinned blocks.
#[derive(Debug)]
pub(crate) struct Resting {
    policy: Eviction,
    lists: Lists,
    condemned: usize,
    is_condemned: Vec<bool>,
    is_parked: Vec<bool>,
    s3: S3Fifo,
    ranks: Ranks,
}

impl Resting {
    /// Nobody rests yet in a tier of `capacity` slots.
    pub(crate) fn new(policy: Eviction, capacity: u64) -> Self {
        let s3_capacity = if policy == Eviction::S3Fifo { capacity } else { 0 };
        let reuse_lists = if policy == Eviction::Reuse && capacity > 0 { REUSE_LISTS } else { 0 };
        Self {
            policy,
            lists: Lists::new(FIRST_REUSE + reuse_lists),
            condemned: 0,
            is_condemned: Vec::new(),
            is_parked: Vec::new(),
            s3: S3Fifo::new(s3_capacity),
            ranks: Ranks::new(FIRST_REUSE, reuse_lists),
        }
    }

    /// Blocks at rest, condemned ones included: all of them can be evicted.
    pub(crate) const fn len(&self) -> usize {
        self.lists.len()
    }

    /// Condemned ones.
    pub(crate) const fn condemned_len(&self) -> usize {
        self.condemned
    }

    /// Whether `block` rests here.
    pub(crate) fn contains(&self, block: u32) -> bool {
        self.lists.contains(block)
    }

    /// Whether `block` is condemned.
    pub(crate) fn is_condemned(&self, block: u32) -> bool {
        self.is_condemned.get(block as usize).is_some_and(|&condemned| condemned)
    }

    /// `block`, which does not rest here, comes to rest as the newest.
    pub(crate) fn rest(&mut self, block: u32, facts: Facts) {
        let list = match self.policy {
            Eviction::Lru => lru::rank(facts),
            Eviction::Lfu => lfu::rank(facts),
            Eviction::LengthAware => length_aware::rank(facts),
            Eviction::S3Fifo => self.s3.rest(block, facts.hash),
            Eviction::Reuse => FIRST_REUSE + facts.list,
        };
        self.lists.push_newest(list, block);
        if self.policy == Eviction::Reuse {
            self.ranks.seat(list);
        }
    }

    /// `block` was pinned or is to be dropped: it rests no longer. Nothing if it did not.
    pub(crate) fn lift(&mut self, block: u32) {
        if !self.lists.contains(block) {
            return;
        }
        self.lists.unlink(block);
        if self.is_condemned(block) {
            self.is_condemned[block as usize] = false;
            self.condemned -= 1;
        } else if self.policy == Eviction::S3Fifo {
            self.s3.lifted(block);
        } else if self.is_parked(block) {
            self.is_parked[block as usize] = false;
        }
    }

    /// `block`, at rest here, left its faster tier: it counts as having just arrived.
    pub(crate) fn refresh(&mut self, block: u32, facts: Facts) {
        let keeps_its_place = matches!(self.policy, Eviction::S3Fifo | Eviction::Reuse);
        if self.contains(block) && (!keeps_its_place || self.is_condemned(block)) {
            self.lift(block);
            self.rest(block, facts);
        }
    }

    /// The copy of `block`, which does not rest here, left the tier by `eviction` or otherwise.
    pub(crate) fn forget(&mut self, block: u32, hash: u64) {
        if self.policy == Eviction::S3Fifo {
            self.s3.forget(block, hash);
        }
    }

    /// The block to evict now, still at rest; condemned ones first, in the order of their
    /// condemnation. `is_leaf` tells whether no child would be left in front of it.
    pub(crate) fn victim(&mut self, is_leaf: impl Fn(u32) -> bool) -> Option<u32> {
        self.lists.oldest(CONDEMNED).or_else(|| self.next_in_policy(is_leaf))
    }

    /// Condemns the next block in line, if any is left that is not.
    pub(crate) fn condemn(&mut self, is_leaf: impl Fn(&Self, u32) -> bool) -> Option<u32> {
        let block = match self.policy {
            Eviction::S3Fifo => {
                let mut s3 = core::mem::take(&mut self.s3);
                let mut lists = core::mem::take(&mut self.lists);
                let block = s3.victim(&mut lists, |block| is_leaf(self, block));
                (self.s3, self.lists) = (s3, lists);
                block
            }
            Eviction::Reuse => self.next_by_reuse(is_leaf),
            _ => self.lists.oldest_of_lowest(RANKS),
        }?;
        self.lift(block);
        self.lists.push_newest(CONDEMNED, block);
        self.condemned += 1;
        flag(&mut self.is_condemned, block);
        Some(block)
    }

    /// Whether `block` waits for its children to go.
    pub(crate) fn is_parked(&self, block: u32) -> bool {
        self.is_parked.get(block as usize).is_some_and(|&parked| parked)
    }

    /// A child of `block` left or was condemned: if `block` waited for that, it is in line again.
    pub(crate) fn unpark(&mut self, block: u32, facts: Facts) {
        if self.is_parked(block) {
            self.lift(block);
            self.rest(block, facts);
        }
    }

    /// What is known of reuse changed.
    pub(crate) fn change(&mut self, change: &Change) {
        match change {
            _ if self.ranks.is_empty() => {}
            Change::Moved { .. } if self.lists.len() == 0 => {}
            Change::Moved { from, to } => {
                for (from, to) in reuse::moves(*from, *to) {
                    if self.lists.oldest(FIRST_REUSE + from).is_some() {
                        self.lists.append(FIRST_REUSE + to, FIRST_REUSE + from);
                        self.ranks.seat(FIRST_REUSE + to);
                    }
                }
            }
            Change::Valued { class, worth } => {
                for (list, rank) in reuse::ranks(*class, worth) {
                    self.ranks.rerank(FIRST_REUSE + list, rank);
                }
            }
        }
    }

    /// All frequencies were halved.
    pub(crate) fn halve(&mut self) {
        match self.policy {
            Eviction::Lru | Eviction::S3Fifo | Eviction::Reuse => {}
            Eviction::Lfu => self.lists.merge(RANKS, lfu::halved),
            Eviction::LengthAware => self.lists.merge(RANKS, length_aware::halved),
        }
    }

    /// Audits the lists.
    pub(crate) fn check(&self) -> Result<(), alloc::string::String> {
        self.lists.check()?;
        let condemned = self.lists.iter(CONDEMNED).filter(|&block| self.is_condemned(block)).count();
        let flagged = self.is_condemned.iter().filter(|&&flag| flag).count();
        if condemned != self.condemned
            || flagged != self.condemned
            || self.lists.iter(CONDEMNED).count() != condemned
        {
            return Err(alloc::format!(
                "{condemned} condemned, {flagged} flagged, {} counted",
                self.condemned
            ));
        }
        let parked = self.lists.iter(PARKED).filter(|&block| self.is_parked(block)).count();
        let flagged = self.is_parked.iter().filter(|&&flag| flag).count();
        if parked != flagged || self.lists.iter(PARKED).count() != parked {
            return Err(alloc::format!("{parked} parked, {flagged} flagged"));
        }
        match self.policy {
            Eviction::S3Fifo => self.s3.check(&self.lists),
            Eviction::Reuse => self.ranks.check(&self.lists),
            Eviction::Lru | Eviction::Lfu | Eviction::LengthAware => Ok(()),
        }
    }

    fn next_in_policy(&mut self, is_leaf: impl Fn(u32) -> bool) -> Option<u32> {
        match self.policy {
            Eviction::S3Fifo => self.s3.victim(&mut self.lists, is_leaf),
            Eviction::Reuse => self.next_by_reuse(|_, block| is_leaf(block)),
            _ => self.lists.oldest_of_lowest(RANKS),
        }
    }

    /// The leaf of the lowest rank; blocks found before it that are none are parked, each once
    /// for each child that leaves it. Parked ones have children in line, so some leaf is found.
    fn next_by_reuse(&mut self, is_leaf: impl Fn(&Self, u32) -> bool) -> Option<u32> {
        while let Some(list) = self.ranks.lowest(&self.lists) {
            let block = self.lists.oldest(list).expect("the lowest list has blocks");
            if is_leaf(self, block) {
                return Some(block);
            }
            self.lists.unlink(block);
            self.lists.push_newest(PARKED, block);
            flag(&mut self.is_parked, block);
        }
        self.lists.oldest(PARKED)
    }
}

/// Sets a block's flag.
fn flag(flags: &mut Vec<bool>, block: u32) {
    if flags.len() <= block as usize {
        flags.resize(block as usize + 1, false);
    }
    flags[block as usize] = true;
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn drain(resting: &mut Resting) -> Vec<u32> {
        let mut order = Vec::new();
        while let Some(block) = resting.victim(|_| true) {
            resting.lift(block);
            resting.forget(block, u64::from(block));
            order.push(block);
        }
        order
    }

    #[test]
    fn condemned_blocks_go_first_unless_saved() {
        let mut resting = Resting::new(Eviction::Lru, 8);
        for block in 0..4 {
            resting.rest(block, Facts::default());
        }
        assert_eq!(resting.condemn(|_, _| true), Some(0));
        assert_eq!(resting.condemn(|_, _| true), Some(1));
        assert_eq!((resting.len(), resting.condemned_len()), (4, 2));
        resting.lift(0);
        resting.rest(0, Facts::default());
        assert_eq!((resting.len(), resting.condemned_len()), (4, 1));
        assert_eq!(resting.check(), Ok(()));
        assert_eq!(drain(&mut resting), vec![1, 2, 3, 0]);
    }

    #[test]
    fn a_block_that_left_its_faster_tier_counts_as_new() {
        let mut resting = Resting::new(Eviction::Lru, 8);
        for block in 0..3 {
            resting.rest(block, Facts::default());
        }
        resting.condemn(|_, _| true);
        resting.refresh(0, Facts::default());
        resting.refresh(9, Facts::default());
        assert_eq!(drain(&mut resting), vec![1, 2, 0]);
    }
}
