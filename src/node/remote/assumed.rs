//! The assumed cache content of an engine that announces nothing: the chains it computed last, as far as there is room.

use std::collections::VecDeque;

use baton_types::{BlockHash, BlockKey, CacheChange, Tier};
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

/// Outdated uses that the queue may contain, whatever is held.
const SPARE_USES: usize = 1_024;

/// The blocks that an engine without cache events probably holds. An error in either direction costs time, not
/// correctness (I6).
#[derive(Debug)]
pub(super) struct AssumedCache {
    capacity_blocks: usize,
    /// The latest use of each block.
    used: HashMap<BlockHash, u64>,
    /// Uses in order. One that is not its block's last is passed over.
    by_time: VecDeque<(u64, BlockHash)>,
    now: u64,
}

impl AssumedCache {
    pub(super) fn new(capacity_blocks: u64) -> Self {
        let capacity_blocks = usize::try_from(capacity_blocks).unwrap_or(usize::MAX);
        Self { capacity_blocks, used: HashMap::new(), by_time: VecDeque::new(), now: 0 }
    }

    /// The engine has computed this chain, from the root: what is news of that.
    pub(super) fn computed(&mut self, chain: &[BlockKey]) -> Vec<CacheChange> {
        let chain = &chain[..chain.len().min(self.capacity_blocks)];
        let mut known = chain.len();
        // From the end: of one chain the last block is the first to go.
        for (at, key) in chain.iter().enumerate().rev() {
            if self.touch(key.short()) {
                known = at;
            }
        }
        let mut news = Vec::new();
        if known < chain.len() {
            news.push(CacheChange::Stored {
                parent: known.checked_sub(1).map(|at| chain[at].short()),
                hashes: chain[known..].iter().map(|key| key.short()).collect(),
                tier: Tier::Hbm,
            });
        }
        let gone = self.evict();
        if !gone.is_empty() {
            news.push(CacheChange::Removed { hashes: gone, tier: Tier::Hbm });
        }
        news
    }

    /// When each block of this chain was last used, as far as it is held from the root.
    pub(super) fn held(&self, chain: &[BlockKey]) -> Vec<u64> {
        chain.iter().map_while(|key| self.used.get(&key.short()).copied()).collect()
    }

    /// Records that the engine found `found` blocks of a chain that was [held](Self::held) so. It has evicted the next
    /// block, and therefore every block unused for longer. Returns the resulting changes.
    pub(super) fn found(&mut self, held: &[u64], found: usize) -> Vec<CacheChange> {
        let Some(evicted) = held.get(found) else { return Vec::new() };
        let gone = self.forget(|_, time| time <= *evicted);
        match gone.is_empty() {
            true => Vec::new(),
            false => vec![CacheChange::Removed { hashes: gone, tier: Tier::Hbm }],
        }
    }

    /// Notes a use; whether the block was not held before.
    fn touch(&mut self, block: BlockHash) -> bool {
        self.now += 1;
        self.by_time.push_back((self.now, block));
        self.used.insert(block, self.now).is_none()
    }

    fn evict(&mut self) -> Vec<BlockHash> {
        let capacity_blocks = self.capacity_blocks;
        let gone = self.forget(|held, _| held > capacity_blocks);
        // Uses that are passed over do not outnumber the others by much.
        if self.by_time.len() > 2 * self.used.len() + SPARE_USES {
            let used = &self.used;
            self.by_time.retain(|(time, block)| used.get(block) == Some(time));
        }
        gone
    }

    /// Forgets blocks, the longest unused first, while `more` says so of how many are held and the next one's last use.
    fn forget(&mut self, more: impl Fn(usize, u64) -> bool) -> Vec<BlockHash> {
        let mut gone = Vec::new();
        while let Some((time, block)) = self.by_time.front().copied() {
            let held = self.used.len();
            // One search a block: of a long prompt there are thousands, each a miss of the processor's cache.
            if let Entry::Occupied(last) = self.used.entry(block)
                && *last.get() == time
            {
                if !more(held, time) {
                    break;
                }
                last.remove();
                gone.push(block);
            }
            self.by_time.pop_front();
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn chain(family: u128, blocks: u128) -> Vec<BlockKey> {
        (0..blocks).map(|at| BlockKey((family << 32) + at + 1)).collect()
    }

    /// Applies the changes as an index does.
    fn apply(held: &mut BTreeSet<u64>, news: &[CacheChange]) {
        for change in news {
            match change {
                CacheChange::Stored { parent, hashes, .. } => {
                    assert!(parent.is_none_or(|parent| held.contains(&parent.0)), "an orphan: {change:?}");
                    held.extend(hashes.iter().map(|hash| hash.0));
                }
                CacheChange::Removed { hashes, .. } => {
                    hashes.iter().for_each(|hash| assert!(held.remove(&hash.0), "it was not there"));
                }
                CacheChange::Cleared => held.clear(),
            }
        }
    }

    #[test]
    fn what_is_known_is_not_told_again() {
        let mut assumed = AssumedCache::new(10);
        assert_eq!(assumed.computed(&chain(1, 3)).len(), 1);
        assert!(assumed.computed(&chain(1, 3)).is_empty());
        let more = assumed.computed(&chain(1, 5));
        let [CacheChange::Stored { parent, hashes, .. }] = &more[..] else { panic!("{more:?}") };
        assert_eq!((parent.map(|p| p.0), hashes.len()), (Some(chain(1, 3)[2].short().0), 2));
    }

    #[test]
    fn a_chain_goes_from_its_end_and_the_longest_unused_first() {
        let mut assumed = AssumedCache::new(4);
        let mut held = BTreeSet::new();
        apply(&mut held, &assumed.computed(&chain(1, 3)));
        apply(&mut held, &assumed.computed(&chain(2, 2)));
        let left: Vec<bool> = chain(1, 3).iter().map(|key| held.contains(&key.short().0)).collect();
        assert_eq!(left, [true, true, false]);
        apply(&mut held, &assumed.computed(&chain(1, 1)));
        apply(&mut held, &assumed.computed(&chain(3, 2)));
        let left: Vec<bool> = chain(1, 2).iter().map(|key| held.contains(&key.short().0)).collect();
        assert_eq!((left, held.len()), (vec![true, false], 4));
    }

    #[test]
    fn a_chain_longer_than_the_room_is_held_as_far_as_there_is_room() {
        let mut assumed = AssumedCache::new(3);
        let mut held = BTreeSet::new();
        apply(&mut held, &assumed.computed(&chain(1, 9)));
        assert_eq!(held, chain(1, 3).iter().map(|key| key.short().0).collect());
        assert!(AssumedCache::new(0).computed(&chain(1, 2)).is_empty());
    }

    #[test]
    fn an_engine_that_found_less_has_evicted_what_is_older_too() {
        let (mut assumed, mut held) = (AssumedCache::new(100), BTreeSet::new());
        for family in 1..=3 {
            apply(&mut held, &assumed.computed(&chain(family, 4)));
        }
        let known = assumed.held(&chain(2, 6));
        assert_eq!(known.len(), 4);
        assert!(assumed.found(&known, 4).is_empty() && assumed.found(&known, 9).is_empty(), "as assumed");
        // Of the second only one block was found: its others are gone, and all of the first, which is older.
        apply(&mut held, &assumed.found(&known, 1));
        let left = |family| chain(family, 4).iter().filter(|key| held.contains(&key.short().0)).count();
        assert_eq!([left(1), left(2), left(3)], [0, 1, 4]);
        assert_eq!(assumed.used.len(), 5);
        assert!(assumed.found(&known, 1).is_empty(), "told once");
        apply(&mut held, &assumed.computed(&chain(2, 4)));
        assert_eq!(held.len(), 8);
    }

    #[test]
    fn an_index_that_follows_the_news_never_holds_more_than_there_is_room_for() {
        let mut rng = baton_types::Rng::new(7);
        let mut assumed = AssumedCache::new(50);
        let mut held = BTreeSet::new();
        for _ in 0..2_000 {
            let (family, blocks) = (u128::from(rng.below(12)), u128::from(rng.below(12)));
            apply(&mut held, &assumed.computed(&chain(family, blocks)));
            assert!(held.len() <= 50 && held.len() == assumed.used.len());
            assert!(assumed.by_time.len() <= 2 * 50 + SPARE_USES);
        }
    }
}
