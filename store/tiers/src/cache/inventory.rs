//! The inventory of a cache, for a conductor that has just met this node, or met it again.

use super::KvCache;
use baton_types::{BlockKey, CacheChange};
use std::collections::BTreeMap;

impl KvCache {
    /// Everything readable, parents before children, as if it had just been stored.
    #[must_use]
    pub fn inventory(&self) -> Vec<CacheChange> {
        let blocks = self.store.snapshot().blocks;
        let mut children: BTreeMap<Option<BlockKey>, Vec<usize>> = BTreeMap::new();
        for (at, block) in blocks.iter().enumerate() {
            children.entry(block.parent).or_default().push(at);
        }
        let mut told = Vec::new();
        let mut open = children.get(&None).cloned().unwrap_or_default();
        while let Some(at) = open.pop() {
            let block = &blocks[at];
            for tier in &block.readable_in {
                let parent = block.parent.map(BlockKey::short);
                told.push(CacheChange::Stored { parent, hashes: vec![block.key.short()], tier: *tier });
            }
            open.extend(children.get(&Some(block.key)).into_iter().flatten());
        }
        told
    }

    /// The blocks that `key` continues here, from the root on; none if it is not known.
    #[must_use]
    pub fn ancestors(&self, key: BlockKey) -> Vec<BlockKey> {
        let mut above: Vec<BlockKey> =
            std::iter::successors(self.store.parent(key), |key| self.store.parent(*key)).collect();
        above.reverse();
        above
    }

    /// The full keys of the leading blocks that are in any tier here, where only short names are
    /// known (the high half of each key is zero); keys that are whole already stay as they are.
    #[must_use]
    pub fn full_keys(&self, keys: &[BlockKey]) -> Vec<BlockKey> {
        let full = |key: &BlockKey| {
            if key.0 >> 64 != 0 {
                return Some(*key);
            }
            let address = self.addresses.get(&key.short()).map(|address| address.key);
            address.or_else(|| self.store.named(key.short()))
        };
        keys.iter().map_while(full).collect()
    }
}
