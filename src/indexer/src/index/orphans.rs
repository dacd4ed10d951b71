//! Events whose parent is not known yet, with their tokens, oldest first.

use std::collections::BTreeMap;

use hashbrown::HashMap;

/// Blocks in a row that wait for the one before them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Orphan {
    pub(super) parent: u64,
    pub(super) names: Vec<u64>,
    pub(super) tokens: Vec<u32>,
    /// Blocks from this one on are not named by tokens alone.
    pub(super) nameable: usize,
}

/// All that wait, within a bound of blocks.
#[derive(Debug)]
pub(super) struct Orphans {
    by_age: BTreeMap<u64, Orphan>,
    by_parent: HashMap<u64, Vec<u64>>,
    next: u64,
    blocks: usize,
    max_blocks: usize,
}

impl Orphans {
    pub(super) fn new(max_blocks: usize) -> Self {
        Self { by_age: BTreeMap::new(), by_parent: HashMap::new(), next: 0, blocks: 0, max_blocks }
    }

    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.max_blocks);
    }

    /// Lets blocks wait; returns how many were given up to make room, or for want of it.
    pub(super) fn park(&mut self, orphan: Orphan) -> u64 {
        let count = orphan.names.len();
        if count > self.max_blocks {
            return count as u64;
        }
        let mut given_up = 0;
        while self.blocks + count > self.max_blocks {
            let Some((age, oldest)) = self.by_age.pop_first() else { break };
            self.blocks -= oldest.names.len();
            given_up += oldest.names.len() as u64;
            if let Some(ages) = self.by_parent.get_mut(&oldest.parent) {
                ages.retain(|other| *other != age);
                if ages.is_empty() {
                    self.by_parent.remove(&oldest.parent);
                }
            }
        }
        self.by_parent.entry(orphan.parent).or_default().push(self.next);
        self.by_age.insert(self.next, orphan);
        self.next += 1;
        self.blocks += count;
        given_up
    }

    /// Takes the blocks that waited for a parent. They are no longer orphans.
    pub(super) fn take(&mut self, parent: u64) -> Vec<Orphan> {
        if self.by_parent.is_empty() {
            return Vec::new();
        }
        let ages = self.by_parent.remove(&parent).unwrap_or_default();
        let taken: Vec<Orphan> = ages.iter().filter_map(|age| self.by_age.remove(age)).collect();
        self.blocks -= taken.iter().map(|orphan| orphan.names.len()).sum::<usize>();
        taken
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let blocks: usize = self.by_age.values().map(|orphan| orphan.names.len()).sum();
        let waiting: usize = self.by_parent.values().map(Vec::len).sum();
        if blocks != self.blocks || blocks > self.max_blocks || waiting != self.by_age.len() {
            let (counted, events) = (self.blocks, self.by_age.len());
            return Err(format!(
                "{blocks} blocks wait in {events} events, {counted} are counted, {waiting} are filed"
            ));
        }
        Ok(())
    }
}
