//! The unpinned blocks of one tier, in the order in which they are to go.
//!
//! A block rests here while its copy in the tier is readable and nobody holds the block. It comes
//! in when the last pin goes, within one request from the last block to the first. Which goes first
//! is a policy's [`Order`]: one in a file of its own, and a line in the table at the end of this one.
//! A block whose turn is near may be *condemned*: it keeps its place in line ahead of all others, so
//! that its copy to the next tier can be made in time; a new pin saves it.

mod ages;
mod chance;
#[cfg(test)]
mod deepest;
mod ghosts;
mod length_aware;
mod lfu;
mod list;
mod lru;
#[cfg(test)]
mod model;
mod ranks;
pub(crate) mod reuse;
mod s3fifo;
mod trait_factors;

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use list::Lists;
use reuse::Change;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The facts about a block that a policy may use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts {
    /// Times asked for, halved now and then.
    pub frequency: u8,
    /// Base-2 logarithm of its position in the chain.
    pub depth_class: u8,
    /// Its short name.
    pub hash: u64,
    /// Its list, where the store learns of reuse.
    pub list: usize,
}

/// An eviction policy: the order in which the blocks of one tier are evicted.
///
/// A parent is to go after its children: it comes to rest after them, and of blocks that are alike
/// the one that has rested longest goes first. An order that may have it otherwise asks `is_leaf`.
trait Order: core::fmt::Debug + Send + Sync {
    /// Makes the order for a tier of `capacity` slots without resting blocks.
    fn new(capacity: u64) -> Self
    where
        Self: Sized;

    /// Lists that it keeps blocks in, numbered from 0; lower ones go first unless it says otherwise.
    fn lists(&self) -> usize;

    /// `block`, which is in no list, comes to rest as the newest of one.
    fn rest(&mut self, lists: &mut Lists, block: u32, facts: Facts);

    /// The next block to evict, left at rest. `is_leaf` says whether the block has no child left in the tier.
    fn next(&mut self, lists: &mut Lists, _is_leaf: &dyn Fn(u32) -> bool) -> Option<u32> {
        lists.oldest_of_lowest(self.lists())
    }

    /// `block` was taken out of its list.
    fn lifted(&mut self, _block: u32) {}

    /// The copy of `block` left the tier.
    fn forget(&mut self, _block: u32, _hash: u64) {}

    /// Whether a block stays where it is when it leaves its faster tier, or counts as new.
    fn keeps_its_place(&self) -> bool {
        false
    }

    /// Whether `block` waits for its children to go before it is in line again.
    fn is_parked(&self, _block: u32) -> bool {
        false
    }

    /// All frequencies were halved.
    fn halve(&mut self, _lists: &mut Lists) {}

    /// Whether the store is to learn of reuse, and to tell what changed.
    fn learns(&self) -> bool {
        false
    }

    /// Updates the order after a change in the statistics of reuse.
    fn change(&mut self, _lists: &mut Lists, _change: &Change) {}

    /// Audits what it keeps beside the lists.
    fn check(&self, _lists: &Lists) -> Result<(), String> {
        Ok(())
    }
}

/// Blocks that are kept apart, in a list of their own.
#[derive(Debug)]
pub(crate) struct SeparateList {
    list: usize,
    flags: Vec<bool>,
    len: usize,
}

impl SeparateList {
    const fn new(list: usize) -> Self {
        Self { list, flags: Vec::new(), len: 0 }
    }

    /// Whether `block` is one of them.
    pub(crate) fn contains(&self, block: u32) -> bool {
        self.flags.get(block as usize).is_some_and(|&apart| apart)
    }

    /// `block`, which is in no list, is the newest of them.
    fn push(&mut self, lists: &mut Lists, block: u32) {
        assert!(!self.contains(block), "a block is kept apart once");
        lists.push_newest(self.list, block);
        if self.flags.len() <= block as usize {
            self.flags.resize(block as usize + 1, false);
        }
        self.flags[block as usize] = true;
        self.len += 1;
    }

    /// `block` was taken out of its list; whether it was one of them.
    fn lifted(&mut self, block: u32) -> bool {
        let apart = self.contains(block);
        if apart {
            assert!(self.len > 0, "blocks that are kept apart are counted");
            self.flags[block as usize] = false;
            self.len -= 1;
        }
        apart
    }

    /// Audits that the list has the blocks that are flagged, and as many as are counted.
    fn check(&self, lists: &Lists, what: &str) -> Result<(), String> {
        let listed = lists.iter(self.list).count();
        let both = lists.iter(self.list).filter(|&block| self.contains(block)).count();
        let flagged = self.flags.iter().filter(|&&flag| flag).count();
        if [listed, both, flagged] == [self.len; 3] {
            return Ok(());
        }
        Err(alloc::format!("{listed} {what}, {both} of them flagged, {flagged} in all, {} counted", self.len))
    }
}

/// One tier's unpinned blocks.
#[derive(Debug)]
pub(crate) struct RestingBlocks {
    order: Box<dyn Order>,
    lists: Lists,
    /// In the list after those of the order.
    condemned: SeparateList,
}

impl RestingBlocks {
    /// A tier of `capacity` slots without resting blocks.
    pub(crate) fn new(policy: Eviction, capacity: u64) -> Self {
        let order = policy.order(capacity);
        let own = order.lists();
        Self { order, lists: Lists::new(own + 1), condemned: SeparateList::new(own) }
    }

    /// Blocks at rest, condemned ones included: all of them can be evicted.
    pub(crate) const fn len(&self) -> usize {
        self.lists.len()
    }

    /// Condemned ones.
    pub(crate) const fn condemned_len(&self) -> usize {
        self.condemned.len
    }

    /// Whether `block` rests here.
    pub(crate) fn contains(&self, block: u32) -> bool {
        self.lists.contains(block)
    }

    /// Whether the store is to learn of reuse for the order here.
    pub(crate) fn learns(&self) -> bool {
        self.order.learns()
    }

    /// `block`, which does not rest here, comes to rest as the newest.
    pub(crate) fn rest(&mut self, block: u32, facts: Facts) {
        self.order.rest(&mut self.lists, block, facts);
    }

    /// `block` was pinned or is to be dropped: it rests no longer. Nothing if it did not.
    pub(crate) fn lift(&mut self, block: u32) {
        if !self.lists.contains(block) {
            return;
        }
        self.lists.unlink(block);
        if !self.condemned.lifted(block) {
            self.order.lifted(block);
        }
    }

    /// `block`, at rest here, left its faster tier: it counts as having just arrived.
    pub(crate) fn refresh(&mut self, block: u32, facts: Facts) {
        if self.contains(block) && (!self.order.keeps_its_place() || self.condemned.contains(block)) {
            self.lift(block);
            self.rest(block, facts);
        }
    }

    /// The copy of `block`, which does not rest here, left the tier by `eviction` or otherwise.
    pub(crate) fn forget(&mut self, block: u32, hash: u64) {
        self.order.forget(block, hash);
    }

    /// The block to evict now, still at rest; condemned ones first, in the order of their condemnation. `is_leaf`
    /// says whether the block has no child left in the tier.
    pub(crate) fn victim(&mut self, is_leaf: impl Fn(u32) -> bool) -> Option<u32> {
        self.lists.oldest(self.condemned.list).or_else(|| self.order.next(&mut self.lists, &is_leaf))
    }

    /// Condemns the next block in line that is not condemned yet, if there is one. `is_leaf` gets the set of
    /// condemned blocks.
    pub(crate) fn condemn(&mut self, is_leaf: impl Fn(&SeparateList, u32) -> bool) -> Option<u32> {
        let condemned = &self.condemned;
        let block = self.order.next(&mut self.lists, &|block| is_leaf(condemned, block))?;
        assert!(self.lists.contains(block), "the next in line rests here");
        self.lift(block);
        self.condemned.push(&mut self.lists, block);
        Some(block)
    }

    /// Whether `block` waits for its children to go.
    pub(crate) fn is_parked(&self, block: u32) -> bool {
        self.order.is_parked(block)
    }

    /// A child of `block` left or was condemned: if `block` waited for that, it is in line again.
    pub(crate) fn unpark(&mut self, block: u32, facts: Facts) {
        if self.is_parked(block) {
            self.lift(block);
            self.rest(block, facts);
        }
    }

    /// Updates the order after a change in the statistics of reuse.
    pub(crate) fn change(&mut self, change: &Change) {
        self.order.change(&mut self.lists, change);
    }

    /// All frequencies were halved.
    pub(crate) fn halve(&mut self) {
        self.order.halve(&mut self.lists);
    }

    /// Audits the lists.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.lists.check()?;
        self.condemned.check(&self.lists, "condemned")?;
        self.order.check(&self.lists)
    }
}

/// Makes [`Eviction`] of the table: for each policy its sentence, its variant, its word and its order.
macro_rules! policies {
    ($($(#[doc = $about:literal])+ $(#[cfg($when:meta)])? $name:ident = $word:literal, $order:ty;)+) => {
        /// Which unpinned block a full tier gives up first.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        pub enum Eviction {
            $($(#[doc = $about])+ $(#[cfg($when)])? #[serde(rename = $word)] $name,)+
        }

        impl Eviction {
            /// Every policy, in the order of reports.
            pub const ALL: [Self; [$($(#[cfg($when)])? $word,)+].len()] =
                [$($(#[cfg($when)])? Self::$name,)+];

            /// The word used in configs and reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $($(#[cfg($when)])? Self::$name => $word,)+
                }
            }

            fn order(self, capacity: u64) -> Box<dyn Order> {
                match self {
                    $($(#[cfg($when)])? Self::$name => Box::new(<$order>::new(capacity)),)+
                }
            }
        }
    };
}

policies! {
    /// The one that came to rest longest ago; within a request its last block first.
    Lru = "lru", lru::Lru;
    /// The least often asked for, counts being halved now and then; ties as in `lru`.
    Lfu = "lfu", lfu::Lfu;
    /// Two queues: new blocks pass a short trial queue before they may stay in the long one.
    S3Fifo = "s3_fifo", s3fifo::S3Fifo;
    /// Like `lfu` with coarse counts, but blocks deep in a chain go before those near its root.
    LengthAware = "length_aware", length_aware::LengthAwareOrder;
    /// The leaf whose slot is expected to save the least time: its chance of return, learnt from
    /// what was seen of blocks used alike, times what it costs to compute at its position.
    Reuse = "reuse", reuse::ReuseOrder;
    /// The deepest of all; for tests alone, which it shows what a policy takes.
    #[cfg(test)]
    Deepest = "deepest", deepest::DeepestOrder;
}

#[expect(clippy::derivable_impls, reason = "the table has no place for it")]
impl Default for Eviction {
    fn default() -> Self {
        Self::Reuse
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn drain(resting: &mut RestingBlocks) -> Vec<u32> {
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
        let mut resting = RestingBlocks::new(Eviction::Lru, 8);
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
        let mut resting = RestingBlocks::new(Eviction::Lru, 8);
        for block in 0..3 {
            resting.rest(block, Facts::default());
        }
        resting.condemn(|_, _| true);
        resting.refresh(0, Facts::default());
        resting.refresh(9, Facts::default());
        assert_eq!(drain(&mut resting), vec![1, 2, 0]);
    }
}
