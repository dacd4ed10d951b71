//! The prefix index: which instance holds how much of a prompt's block chain, and in which tier.
//!
//! A block's hash commits to its whole prefix (I1), so a hash alone names a place in the tree of all prompts. Blocks of
//! a chain that the same instances hold in the same tiers form a *run*; a lookup goes from run to run, not from block
//! to block. Blocks whose parent is unknown are kept under their own name and match as soon as the gap before them
//! closes, so an index that starts late or misses an event heals by itself. The index is a hint (I6): a stale entry
//! costs time, not correctness.

mod arena;
mod audit;
mod edit;
mod holdings;
mod lookup;
mod run;
mod table;
#[cfg(test)]
mod tests;

use alloc::string::String;
use alloc::vec::Vec;

use baton_types::{BlockHash, InstanceId, Tier};

use arena::{Arena, CHUNK_BYTES};
use edit::{Step, WARMED};
use holdings::Holdings;
pub(crate) use lookup::WideMatch;
pub use lookup::{Match, MatchScratch};
use run::{Holder, RunId, Runs, SLAB_BYTES};
use table::Table;

/// Instances are dense from zero; ids from here on are refused.
pub const MAX_INSTANCES: u32 = 65_536;

/// The bound of [`PrefixIndex::new`]: room for some sixty million blocks.
pub const DEFAULT_CAPACITY_BYTES: usize = 2 << 30;

const BLOCK_SHARD_BITS: u32 = 10;
const HEAD_SHARD_BITS: u32 = 6;

/// Why blocks were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The index is at its memory bound: raise the bound, or let instances announce less.
    Full,
    /// The instance id is [`MAX_INSTANCES`] or above.
    InstanceOutOfRange,
}

/// The result of an insert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InsertOutcome {
    /// Blocks that the instance did not hold in any tier before.
    pub added: usize,
    /// Blocks that were not taken: always the last ones of the insert.
    pub refused: usize,
    /// Why, where `refused` is not zero.
    pub refusal: Option<Refusal>,
    /// The instance does not hold the named parent (yet): the blocks are kept and match as soon as the gap is filled.
    pub orphan: bool,
}

/// The index. Single-threaded, deterministic, bounded in bytes.
#[derive(Debug)]
pub struct PrefixIndex {
    /// Every block's position.
    blocks: Table,
    /// Every run by its first block: small and hot, so that lookups leave `blocks` alone.
    heads: Table,
    arena: Arena,
    runs: Runs,
    holdings: Holdings,
    capacity_bytes: usize,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::new()
    }
}

impl PrefixIndex {
    /// An empty index bounded by [`DEFAULT_CAPACITY_BYTES`].
    #[must_use]
    pub fn new() -> Self {
        Self::with_capacity_bytes(DEFAULT_CAPACITY_BYTES)
    }

    /// An empty index that refuses blocks rather than outgrow `capacity_bytes` of heap.
    ///
    /// Nothing is allocated ahead. Below about 1 MiB there is no room for any block.
    #[must_use]
    pub fn with_capacity_bytes(capacity_bytes: usize) -> Self {
        Self {
            blocks: Table::new(BLOCK_SHARD_BITS),
            heads: Table::new(HEAD_SHARD_BITS),
            arena: Arena::new(),
            runs: Runs::new(),
            holdings: Holdings::default(),
            capacity_bytes,
        }
    }

    /// Records that `instance` holds `hashes`, each the child of the one before, in `tier`.
    ///
    /// Repeating an insert changes nothing. At the memory bound the rest of the blocks is refused.
    pub fn insert(
        &mut self,
        parent: Option<BlockHash>,
        hashes: &[BlockHash],
        instance: InstanceId,
        tier: Tier,
    ) -> InsertOutcome {
        let mut outcome = InsertOutcome::default();
        if let Some(refusal) = self.refusal(instance) {
            return InsertOutcome { refused: hashes.len(), refusal: Some(refusal), ..outcome };
        }
        self.warm(hashes);
        let mut step = Step::start(parent, parent.and_then(|hash| self.find(hash)));
        outcome.orphan = parent.is_some() && !self.holds_at(step.last_at, instance);
        let mut rest = hashes;
        while !rest.is_empty() {
            step = match self.find(rest[0]) {
                Some(position) => self.join(position, rest, step, (instance, tier)),
                None => self.append(rest, step, (instance, tier)),
            };
            outcome.added += step.added;
            rest = &rest[step.blocks..];
            if step.blocks == 0 {
                outcome.refused = rest.len();
                outcome.refusal = Some(Refusal::Full);
                break;
            }
        }
        debug_assert!(outcome.added + outcome.refused <= hashes.len(), "a block is taken or refused, once");
        outcome
    }

    /// Records that `hashes`, in any order, left `tier` of `instance`; returns how many were there.
    ///
    /// Blocks without a holder are forgotten. The blocks after them stay, and match again when the gap is filled.
    pub fn remove(&mut self, hashes: &[BlockHash], instance: InstanceId, tier: Tier) -> usize {
        self.warm(hashes);
        let mut removed = 0;
        let mut rest = hashes;
        while let Some(&hash) = rest.first() {
            let found = self.find(hash).map(|position| (position, self.holder_at(position, instance)));
            let blocks = match found {
                Some((position, holder)) if holder.is_in(tier) => {
                    let (id, blocks) = self.carve(position, rest);
                    self.withdraw(id, holder.without(tier));
                    removed += blocks;
                    blocks
                }
                _ => 1,
            };
            rest = &rest[blocks..];
        }
        removed
    }

    /// Forgets everything about `instance`; returns how many blocks it held.
    pub fn clear(&mut self, instance: InstanceId) -> usize {
        let before = self.held_blocks(instance);
        for id in self.holdings.take_runs(instance) {
            // The list may name runs that were withdrawn, merged or listed twice.
            if self.runs.live(id).is_some_and(|run| !run.holders.get(instance).is_nowhere()) {
                self.withdraw(id, Holder::new(instance));
            }
        }
        debug_assert_eq!(self.held_blocks(instance), 0, "{instance} is forgotten, and holds blocks");
        before - self.held_blocks(instance)
    }

    /// Reports every instance that holds the first block of `chain`, each once, in ascending
    /// order, with how much of the chain it holds from the start without a gap.
    ///
    /// Allocates nothing once `scratch` has served a lookup as wide.
    #[inline]
    pub fn matches(&self, chain: &[BlockHash], scratch: &mut MatchScratch, report: impl FnMut(Match)) {
        if let Some(base) = self.walk(chain, scratch) {
            scratch.emit(&base, report);
        }
    }

    /// How many instances hold `hash` in some tier.
    #[must_use]
    pub fn holders(&self, hash: BlockHash) -> usize {
        let run = self.find(hash).map(|position| self.runs.get(self.owner(position)));
        run.map_or(0, |run| run.holders.as_slice().len())
    }

    /// How many blocks `instance` holds.
    #[must_use]
    pub fn held_blocks(&self, instance: InstanceId) -> usize {
        self.holdings.blocks(instance)
    }

    /// Calls `piece` with everything that is held, in pieces that [`Self::insert`] takes: the parent, the blocks, their
    /// holder and tier. The order follows the history of the index.
    pub fn export(&self, mut piece: impl FnMut(Option<BlockHash>, &[BlockHash], InstanceId, Tier)) {
        for (_, run) in self.runs.iter() {
            let hashes: Vec<BlockHash> =
                self.arena.hashes(run.blocks()).iter().map(|h| BlockHash(*h)).collect();
            for holder in run.holders.as_slice() {
                let tiers = Tier::LOCAL.into_iter().filter(|tier| holder.is_in(*tier));
                tiers.for_each(|tier| piece(run.known_parent(), &hashes, holder.instance(), tier));
            }
        }
    }

    /// How many distinct blocks are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True when no block is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.len() == 0
    }

    /// How many runs the blocks form: blocks per run show how well the index compresses.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Bytes of heap in use, by capacity. Inserts keep it below the bound. A removal is never refused, and may add the
    /// headers of the runs that it cuts.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.blocks.memory_bytes()
            + self.heads.memory_bytes()
            + self.arena.memory_bytes()
            + self.runs.memory_bytes()
            + self.holdings.memory_bytes()
    }

    /// The memory bound, which inserts keep.
    #[must_use]
    pub const fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// Audits every invariant; its cost grows with the whole index.
    ///
    /// # Errors
    /// The first invariant found broken, in words; the remedy is to rebuild the index.
    pub fn check(&self) -> Result<(), String> {
        self.audit()
    }

    /// Why the index refuses an instance, if it does.
    fn refusal(&self, instance: InstanceId) -> Option<Refusal> {
        if instance.0 >= MAX_INSTANCES {
            return Some(Refusal::InstanceOutOfRange);
        }
        let growth_bytes = self.holdings.growth_bytes(instance);
        (growth_bytes > 0 && growth_bytes > self.room_bytes()).then_some(Refusal::Full)
    }

    fn find(&self, hash: BlockHash) -> Option<u32> {
        self.blocks.find(hash.0, |position| self.arena.hash(position) == hash.0)
    }

    fn warm(&self, hashes: &[BlockHash]) {
        self.blocks.warm(hashes.iter().take(WARMED).map(|hash| hash.0));
    }

    fn owner(&self, position: u32) -> RunId {
        self.arena.owner(position).expect("a position in the table is owned by a run")
    }

    fn holder_at(&self, position: u32, instance: InstanceId) -> Holder {
        self.runs.get(self.owner(position)).holders.get(instance)
    }

    fn holds_at(&self, position: Option<u32>, instance: InstanceId) -> bool {
        position.is_some_and(|position| !self.holder_at(position, instance).is_nowhere())
    }

    /// Bytes that an insert may still add to the block table and the arena.
    ///
    /// The rest of the room is kept for parts that cannot be refused half-way: run headers, their table and the lists
    /// by instance. Each of them grows by a small share of itself.
    fn room_bytes(&self) -> usize {
        let kept = 2 * SLAB_BYTES + CHUNK_BYTES + self.capacity_bytes / 32;
        self.capacity_bytes.saturating_sub(self.memory_bytes() + kept)
    }
}
