//! Blocks of one event on their way into changes.

use baton_types::{BlockHash, CacheChange, Tier};

use super::Start;
use crate::model::{ExtraKey, StoredBlocks};

/// The extra keys of a block of an event, without the name of its adapter.
pub(super) fn besides_lora(stored: &StoredBlocks, block: usize) -> Vec<&ExtraKey> {
    if stored.extra.is_empty() {
        return Vec::new();
    }
    let adapter = |key: &&ExtraKey| match key {
        ExtraKey::Text(text) => Some(text.as_str()) != stored.lora.as_deref(),
        _ => true,
    };
    let at = stored.extra.binary_search_by_key(&block, |extra| extra.block);
    at.map_or_else(|_| Vec::new(), |at| stored.extra[at].keys.iter().filter(adapter).collect())
}

/// New blocks in a row, reported in one change.
#[derive(Debug)]
pub(super) struct Run {
    tier: Tier,
    parent: Option<BlockHash>,
    hashes: Vec<BlockHash>,
}

impl Run {
    pub(super) const fn new(tier: Tier) -> Self {
        Self { tier, parent: None, hashes: Vec::new() }
    }

    /// The next block, `at.key` below `at.parent`: reported if `new` in this tier and named by its tokens.
    pub(super) fn next(&mut self, at: Start, new: bool, changes: &mut Vec<CacheChange>) {
        if !new || !at.named {
            return self.end(changes);
        }
        if self.hashes.is_empty() || self.hashes.last().copied() != at.parent {
            self.end(changes);
            self.parent = at.parent;
        }
        self.hashes.push(at.key.short());
    }

    /// Reports what has gathered; what comes next starts a new run.
    pub(super) fn end(&mut self, changes: &mut Vec<CacheChange>) {
        if !self.hashes.is_empty() {
            let hashes = std::mem::take(&mut self.hashes);
            changes.push(CacheChange::Stored { parent: self.parent, hashes, tier: self.tier });
        }
    }
}
