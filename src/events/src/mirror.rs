//! An engine's cache in our names: a pure state machine from its events to changes for the conductor's index.
//!
//! Engines name blocks by hashes of their own. Their events also carry the tokens and the parent, so our chain
//! ([`ChainHasher`]) is computed beside theirs and only the pairing is kept: engine's name → our key, and how
//! often each medium holds it. An engine may keep the same block twice and removes it twice; it is gone when the
//! last copy is.
//!
//! A child that comes before its parent is parked, within bounds, and joins as soon as the parent is known. Blocks that
//! tokens alone do not identify (pictures, unknown adapters) are followed but not reported.

mod chain;
mod entry;
mod parked;
#[cfg(test)]
mod tests;

use baton_types::{BlockHash, BlockKey, CacheChange, ChainHasher, Tier};

use crate::model::{Batch, Change, Event, ExtraKey, Medium, RemovedBlocks, Source, StoredBlocks};
use chain::Run;
use entry::Entries;
use parked::ParkedEvents;

/// The inputs of a chain's root, besides the tokens.
#[derive(Clone, Copy, Debug)]
pub struct Lineage<'a> {
    /// Name of the adapter, if one is used.
    pub lora: Option<&'a str>,
    /// The first block's extra keys besides the adapter: a salt, mostly.
    pub extra: &'a [&'a ExtraKey],
    /// The publisher, in the standard form.
    pub source: Option<&'a Source>,
}

/// Gives the root key of a chain, or `None` where chains of this kind are not routed by.
///
/// Different lineages must get different roots, else a block that two of them hold counts as gone when one is.
pub type Roots = Box<dyn Fn(&Lineage<'_>) -> Option<BlockKey> + Send + Sync>;

/// Settings of a [`Mirror`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorConfig {
    /// Seed of our block keys, the conductor's.
    pub chain_seed: u64,
    /// Tokens of a block, the conductor's; blocks of another size are ignored.
    pub block_tokens: u32,
    /// Blocks followed at most, some 64 bytes each; further ones are ignored.
    pub max_blocks: usize,
    /// Blocks parked at most until their parent is known, with their tokens; the oldest make room.
    pub max_parked_blocks: usize,
    /// The cache group that counts, of an engine that has several.
    pub cache_group: u32,
}

impl Default for MirrorConfig {
    fn default() -> Self {
        Self {
            chain_seed: 0,
            block_tokens: 16,
            max_blocks: 4 << 20,
            max_parked_blocks: 1 << 16,
            cache_group: 0,
        }
    }
}

/// One engine's cache, as its events tell it.
pub struct Mirror {
    config: MirrorConfig,
    roots: Roots,
    entries: Entries,
    parked: ParkedEvents,
}

impl std::fmt::Debug for Mirror {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mirror").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Mirror {
    /// An empty mirror whose chains start where `roots` says.
    #[must_use]
    pub fn new(config: MirrorConfig, roots: Roots) -> Self {
        let parked = ParkedEvents::new(config.max_parked_blocks);
        Self { config, roots, entries: Entries::default(), parked }
    }

    /// A mirror that reports only chains without adapter and extra keys, all from `root`.
    #[must_use]
    pub fn plain(config: MirrorConfig, root: BlockKey) -> Self {
        let plain =
            move |lineage: &Lineage<'_>| (lineage.lora.is_none() && lineage.extra.is_empty()).then_some(root);
        Self::new(config, Box::new(plain))
    }

    /// Takes a batch in; what it changes for the conductor's index is appended to `changes`, in order.
    ///
    /// Total: nothing that an engine says makes it fail. Whatever cannot be followed is passed over.
    pub fn apply(&mut self, batch: &Batch, changes: &mut Vec<CacheChange>) {
        batch.events.iter().for_each(|event| self.apply_event(event, changes));
    }

    /// Takes one event in.
    pub fn apply_event(&mut self, event: &Event, changes: &mut Vec<CacheChange>) {
        match &event.change {
            Change::Stored(stored) => self.stored(stored, event.source.as_deref(), changes),
            Change::Removed(removed) => self.removed(removed, changes),
            Change::Cleared(None) => self.forget(changes),
            Change::Cleared(Some(medium)) => self.cleared(medium, changes),
            Change::Unknown(_) => {}
        }
    }

    /// Forgets everything, because the engine's cache is gone or no longer known.
    pub fn forget(&mut self, changes: &mut Vec<CacheChange>) {
        self.entries = Entries::default();
        self.parked.clear();
        changes.push(CacheChange::Cleared);
    }

    /// Everything that was reported and not taken back, for an index that starts anew: one change a block and
    /// tier, sorted.
    #[must_use]
    pub fn snapshot(&self) -> Vec<CacheChange> {
        self.entries.snapshot()
    }

    /// Checks every invariant of the whole state.
    ///
    /// # Errors
    /// The invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.entries.check(self.config.max_blocks)?;
        self.parked.check()
    }

    fn stored(&mut self, stored: &StoredBlocks, source: Option<&Source>, changes: &mut Vec<CacheChange>) {
        if !self.counts(stored.group, stored.attention.as_deref()) {
            return;
        }
        let Some(tier) = local_tier(stored.medium.as_ref()) else { return };
        if stored.tokens.is_empty() {
            return self.stored_without_tokens(stored, tier, changes);
        }
        let expected = stored.hashes.len() * self.config.block_tokens as usize;
        if stored.block_tokens != self.config.block_tokens || stored.tokens.len() != expected {
            return;
        }
        let start = match stored.parent {
            Some(parent) => match self.entries.start_after(parent.name()) {
                Some(start) => start,
                None => return self.parked.park(stored, tier),
            },
            None if stored.base_block.unwrap_or(0) > 0 => return,
            None => self.root(stored, source),
        };
        self.place(stored, tier, start, changes);
    }

    /// Where a chain without parent starts.
    fn root(&self, stored: &StoredBlocks, source: Option<&Source>) -> Start {
        let extra = chain::besides_lora(stored, 0);
        let root = (self.roots)(&Lineage { lora: stored.lora.as_deref(), extra: &extra, source });
        Start { key: root.unwrap_or_default(), named: root.is_some(), parent: None }
    }

    /// Places blocks below a known start, and then whatever was parked below them.
    fn place(&mut self, stored: &StoredBlocks, tier: Tier, start: Start, changes: &mut Vec<CacheChange>) {
        let mut ready = Vec::new();
        self.place_one(stored, (tier, start), &mut ready, changes);
        while let Some((child, at)) = ready.pop() {
            self.place_one(&child, at, &mut ready, changes);
        }
    }

    fn place_one(
        &mut self,
        stored: &StoredBlocks,
        (tier, mut start): (Tier, Start),
        ready: &mut Vec<(StoredBlocks, (Tier, Start))>,
        changes: &mut Vec<CacheChange>,
    ) {
        let mut hasher = ChainHasher::resume(self.config.chain_seed, start.key);
        let mut run = Run::new(tier);
        let blocks = stored.tokens.chunks(self.config.block_tokens.max(1) as usize);
        for (at, (hash, tokens)) in stored.hashes.iter().zip(blocks).enumerate() {
            // At the root the extra keys have chosen the root; further on they are no part of our names.
            if (at > 0 || start.parent.is_some()) && !chain::besides_lora(stored, at).is_empty() {
                start.named = false;
            }
            start.key = hasher.push_tokens(tokens);
            let name = hash.name();
            if self.parked.owes(name, tier) {
                run.end(changes);
            } else if self.entries.len() < self.config.max_blocks || self.entries.has(name) {
                let (known, new) = self.entries.hold(name, tier, start);
                run.next(known, new, changes);
            } else {
                run.end(changes);
            }
            start.parent = Some(start.key.short());
            let waiting = self.parked.waiting_for(name).into_iter();
            ready.extend(waiting.map(|(child, tier)| (child, (tier, start))));
        }
        run.end(changes);
    }

    /// A copy in another tier, announced by name alone: it counts where the name is known.
    fn stored_without_tokens(&mut self, stored: &StoredBlocks, tier: Tier, changes: &mut Vec<CacheChange>) {
        let mut run = Run::new(tier);
        for hash in &stored.hashes {
            if let Some((known, new)) = self.entries.hold_known(hash.name(), tier) {
                run.next(known, new, changes);
            }
        }
        run.end(changes);
    }

    fn removed(&mut self, removed: &RemovedBlocks, changes: &mut Vec<CacheChange>) {
        if !self.counts(removed.group, None) {
            return;
        }
        let Some(tier) = local_tier(removed.medium.as_ref()) else { return };
        let mut gone = Vec::new();
        for hash in &removed.hashes {
            match self.entries.release(hash.name(), tier) {
                Some(reported) => gone.extend(reported),
                None => self.parked.owe(hash.name(), tier),
            }
        }
        if !gone.is_empty() {
            changes.push(CacheChange::Removed { hashes: gone, tier });
        }
    }

    fn cleared(&mut self, medium: &Medium, changes: &mut Vec<CacheChange>) {
        let Some(tier) = local_tier(Some(medium)) else { return };
        self.parked.clear_tier(tier);
        let gone = self.entries.clear_tier(tier);
        if self.entries.len() == 0 {
            changes.push(CacheChange::Cleared);
        } else if !gone.is_empty() {
            changes.push(CacheChange::Removed { hashes: gone, tier });
        }
    }

    /// Whether events of this cache group tell about whole prefixes.
    fn counts(&self, group: Option<u32>, attention: Option<&str>) -> bool {
        let full = |kind: &str| kind.contains("full") || kind.contains("mla");
        group.is_none_or(|group| group == self.config.cache_group) && attention.is_none_or(full)
    }
}

/// Where the next block of a chain goes on.
#[derive(Clone, Copy, Debug)]
struct Start {
    /// Our key of the block before, or of the root.
    key: BlockKey,
    /// Whether the chain so far is one that tokens alone name.
    named: bool,
    /// The block before, as reported; `None` at the root.
    parent: Option<BlockHash>,
}

/// The instance's own tier behind a medium; an engine that names none means its device.
fn local_tier(medium: Option<&Medium>) -> Option<Tier> {
    medium.map_or(Some(Tier::Hbm), Medium::tier)
}
