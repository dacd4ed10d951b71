//! Blocks whose parent is not known yet, and what was taken away from them meanwhile.

use baton_types::Tier;
use hashbrown::HashMap;
use std::collections::BTreeMap;

use crate::model::StoredBlocks;

/// The state of a parked block, by its name.
#[derive(Clone, Copy, Debug, Default)]
struct Shadow {
    /// Parked copies by tier.
    parked: [u32; Tier::LOCAL.len()],
    /// Copies that were removed while parked: they join, and are gone at once.
    owed: [u32; Tier::LOCAL.len()],
}

/// Parked events, oldest first.
#[derive(Debug)]
pub(super) struct ParkedEvents {
    events: BTreeMap<u64, (StoredBlocks, Tier)>,
    by_parent: HashMap<u128, Vec<u64>>,
    shadows: HashMap<u128, Shadow>,
    blocks: usize,
    next: u64,
    max_blocks: usize,
}

impl ParkedEvents {
    pub(super) fn new(max_blocks: usize) -> Self {
        let (by_parent, shadows) = (HashMap::new(), HashMap::new());
        Self { events: BTreeMap::new(), by_parent, shadows, blocks: 0, next: 0, max_blocks }
    }

    #[cfg(test)]
    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.max_blocks);
    }

    /// Parks an event; the oldest make room, and one that is larger than the room is dropped.
    pub(super) fn park(&mut self, stored: &StoredBlocks, tier: Tier) {
        let Some(parent) = stored.parent else { return };
        let count = stored.hashes.len();
        if count == 0 || count > self.max_blocks {
            return;
        }
        while self.blocks + count > self.max_blocks {
            let Some((&oldest, _)) = self.events.first_key_value() else { break };
            self.drop_event(oldest);
        }
        for hash in &stored.hashes {
            let parked = &mut self.shadows.entry(hash.name()).or_default().parked[tier.index()];
            *parked = parked.saturating_add(1);
        }
        self.by_parent.entry(parent.name()).or_default().push(self.next);
        self.events.insert(self.next, (stored.clone(), tier));
        self.next += 1;
        self.blocks += count;
    }

    fn drop_event(&mut self, ticket: u64) {
        let Some((stored, tier)) = self.events.remove(&ticket) else { return };
        self.blocks -= stored.hashes.len();
        let parent = stored.parent.map_or(0, |parent| parent.name());
        if let Some(tickets) = self.by_parent.get_mut(&parent) {
            tickets.retain(|other| *other != ticket);
            if tickets.is_empty() {
                self.by_parent.remove(&parent);
            }
        }
        for hash in &stored.hashes {
            // A removal that came meanwhile was of the oldest copy: this one.
            self.owes(hash.name(), tier);
            self.release_copy(hash.name(), tier);
        }
    }

    /// Takes the events that waited for a block, oldest last. They are no longer parked.
    ///
    /// Their blocks are still [owed](Self::owes) what was removed meanwhile.
    pub(super) fn waiting_for(&mut self, name: u128) -> Vec<(StoredBlocks, Tier)> {
        if self.by_parent.is_empty() {
            return Vec::new();
        }
        let tickets = self.by_parent.remove(&name).unwrap_or_default();
        let mut found: Vec<(StoredBlocks, Tier)> =
            tickets.iter().rev().filter_map(|ticket| self.events.remove(ticket)).collect();
        for (stored, tier) in &mut found {
            self.blocks -= stored.hashes.len();
            for hash in &stored.hashes {
                self.release_copy(hash.name(), *tier);
            }
        }
        found
    }

    /// Notes that a block was removed, if it is parked with a copy left to remove.
    pub(super) fn owe(&mut self, name: u128, tier: Tier) {
        let Some(shadow) = self.shadows.get_mut(&name) else { return };
        let (parked, owed) = (shadow.parked[tier.index()], &mut shadow.owed[tier.index()]);
        *owed += u32::from(*owed < parked);
    }

    /// Whether a block that joins was removed meanwhile; that removal is then settled.
    pub(super) fn owes(&mut self, name: u128, tier: Tier) -> bool {
        if self.shadows.is_empty() {
            return false;
        }
        let Some(shadow) = self.shadows.get_mut(&name) else { return false };
        let owed = &mut shadow.owed[tier.index()];
        let settled = *owed > 0;
        *owed -= u32::from(settled);
        self.forget_if_settled(name);
        settled
    }

    /// One parked copy less; what is owed stays until it is settled.
    fn release_copy(&mut self, name: u128, tier: Tier) {
        let Some(shadow) = self.shadows.get_mut(&name) else { return };
        let parked = &mut shadow.parked[tier.index()];
        *parked = parked.saturating_sub(1);
        self.forget_if_settled(name);
    }

    fn forget_if_settled(&mut self, name: u128) {
        let zero = [0; Tier::LOCAL.len()];
        if self.shadows.get(&name).is_some_and(|shadow| shadow.parked == zero && shadow.owed == zero) {
            self.shadows.remove(&name);
        }
    }

    /// Drops what is parked in one tier.
    pub(super) fn clear_tier(&mut self, tier: Tier) {
        let of_tier = self.events.iter().filter(|(_, (_, at))| *at == tier);
        let tickets: Vec<u64> = of_tier.map(|(ticket, _)| *ticket).collect();
        for ticket in tickets {
            self.drop_event(ticket);
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let blocks: usize = self.events.values().map(|(stored, _)| stored.hashes.len()).sum();
        if blocks != self.blocks || blocks > self.max_blocks {
            return Err(format!(
                "{blocks} blocks are parked, {} counted, at most {}",
                self.blocks, self.max_blocks
            ));
        }
        let waiting: usize = self.by_parent.values().map(Vec::len).sum();
        if waiting != self.events.len() {
            return Err(format!("{waiting} events wait for a parent, {} are parked", self.events.len()));
        }
        let copies = |shadow: &Shadow| shadow.parked.iter().map(|n| *n as usize).sum::<usize>();
        let shadows: usize = self.shadows.values().map(copies).sum();
        if shadows != blocks {
            return Err(format!("{shadows} parked blocks are known by name, {blocks} are parked"));
        }
        let overdrawn =
            |shadow: &&Shadow| shadow.owed.iter().zip(&shadow.parked).any(|(owed, parked)| owed > parked);
        match self.shadows.values().filter(overdrawn).count() {
            0 => Ok(()),
            blocks => Err(format!("{blocks} parked blocks were removed more often than parked")),
        }
    }
}
