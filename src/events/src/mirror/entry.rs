//! The blocks that are followed: engine's name → our key, and how often each tier holds it.

use baton_types::{BlockHash, BlockKey, CacheChange, Tier};
use hashbrown::HashMap;
use hashbrown::hash_map::Entry as Slot;

use super::Start;

/// Tiers that an instance owns itself.
const TIERS: usize = Tier::LOCAL.len();

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: BlockKey,
    parent: Option<BlockHash>,
    named: bool,
    /// Copies by tier; never all zero.
    held: [u16; TIERS],
}

impl Entry {
    const fn start(&self) -> Start {
        Start { key: self.key, named: self.named, parent: self.parent }
    }

    fn hold(&mut self, tier: Tier) -> bool {
        let held = &mut self.held[tier.index()];
        *held = held.saturating_add(1);
        *held == 1
    }
}

/// Every followed block.
#[derive(Debug, Default)]
pub(super) struct Entries {
    by_name: HashMap<u128, Entry>,
}

impl Entries {
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn has(&self, name: u128) -> bool {
        self.by_name.contains_key(&name)
    }

    /// Where the child of a followed block starts.
    pub(super) fn start_after(&self, name: u128) -> Option<Start> {
        let entry = self.by_name.get(&name)?;
        Some(Start { parent: Some(entry.key.short()), ..entry.start() })
    }

    /// One more copy of a block, which lies at `start` unless it is known already: where it lies, and whether
    /// the copy is the first in that tier.
    pub(super) fn hold(&mut self, name: u128, tier: Tier, start: Start) -> (Start, bool) {
        match self.by_name.entry(name) {
            Slot::Occupied(mut slot) => {
                let entry = slot.get_mut();
                let new = entry.hold(tier);
                (entry.start(), new)
            }
            Slot::Vacant(slot) => {
                let Start { key, named, parent } = start;
                let new = slot.insert(Entry { key, parent, named, held: [0; TIERS] }).hold(tier);
                (start, new)
            }
        }
    }

    /// Counts another copy of a block that is known by its name. `None` if there is no such block.
    pub(super) fn hold_known(&mut self, name: u128, tier: Tier) -> Option<(Start, bool)> {
        let entry = self.by_name.get_mut(&name)?;
        let new = entry.hold(tier);
        Some((entry.start(), new))
    }

    /// One copy less: `None` if there was none, else what to take back, if it was the last that was reported.
    pub(super) fn release(&mut self, name: u128, tier: Tier) -> Option<Option<BlockHash>> {
        let Slot::Occupied(mut slot) = self.by_name.entry(name) else { return None };
        let entry = slot.get_mut();
        let held = &mut entry.held[tier.index()];
        *held = held.checked_sub(1)?;
        let gone = (*held == 0 && entry.named).then(|| entry.key.short());
        if entry.held == [0; TIERS] {
            slot.remove();
        }
        Some(gone)
    }

    /// Empties one tier; what was reported of it, sorted.
    pub(super) fn clear_tier(&mut self, tier: Tier) -> Vec<BlockHash> {
        let mut gone = Vec::new();
        self.by_name.retain(|_, entry| {
            if std::mem::take(&mut entry.held[tier.index()]) > 0 && entry.named {
                gone.push(entry.key.short());
            }
            entry.held != [0; TIERS]
        });
        gone.sort_unstable();
        gone
    }

    pub(super) fn snapshot(&self) -> Vec<CacheChange> {
        let mut named: Vec<Entry> = self.by_name.values().filter(|entry| entry.named).copied().collect();
        named.sort_unstable_by_key(|entry| entry.key);
        let tiers_of =
            |entry: &Entry| Tier::LOCAL.into_iter().filter(|tier| entry.held[tier.index()] > 0).collect();
        let changes = named.into_iter().flat_map(|entry| {
            let tiers: Vec<Tier> = tiers_of(&entry);
            let (parent, hashes) = (entry.parent, vec![entry.key.short()]);
            tiers.into_iter().map(move |tier| CacheChange::Stored { parent, hashes: hashes.clone(), tier })
        });
        changes.collect()
    }

    pub(super) fn check(&self, max_blocks: usize) -> Result<(), String> {
        if self.len() > max_blocks {
            return Err(format!("{} blocks are followed, at most {max_blocks}", self.len()));
        }
        let empty = self.by_name.values().filter(|entry| entry.held == [0; TIERS]).count();
        if empty > 0 { Err(format!("{empty} blocks are followed and held nowhere")) } else { Ok(()) }
    }
}
