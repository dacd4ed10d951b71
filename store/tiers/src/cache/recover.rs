//! The start of a cache: its flash is tried out, and what it kept comes back.

use super::{Flash, KvCache};
use crate::file::FileTier;
use crate::index::Entry;
use crate::short::ShortNameMap;
use crate::tier::Tier as _;
use baton_store::{CopyState, Input};
use baton_types::{BlockKey, Tier};

/// The tier if it can be trusted, and what to tell of it.
pub(super) fn try_out(file: Option<FileTier>) -> (Option<FileTier>, Flash) {
    let Some(mut file) = file else { return (None, Flash::default()) };
    match file.try_out() {
        Ok(speed) => {
            let words = format!("{}; {}", file.device(), file.beginning());
            (Some(file), Flash { words, speed, ..Flash::default() })
        }
        Err(why) => {
            let words = format!("off, for it failed its trial: {why}; look at the disk");
            (None, Flash { words, is_off: true, ..Flash::default() })
        }
    }
}

impl KvCache {
    /// Hands the store what flash kept, and drops what the store has no place for: blocks whose
    /// ancestors are gone.
    pub(super) fn recover(&mut self) {
        let Some(file) = &mut self.file else { return };
        let blocks = parents_first(&file.take_recovered());
        if blocks.is_empty() {
            return;
        }
        self.step(Input::Recovered { blocks: &blocks });
        self.flash.recovered_blocks = self.store.stats().tiers[Tier::Ssd.index()].used_blocks;
        self.flash.dropped_blocks = blocks.len() as u64 - self.flash.recovered_blocks;
        if self.flash.dropped_blocks > 0 {
            self.drop_unknown(&blocks);
        }
    }

    fn drop_unknown(&mut self, blocks: &[(BlockKey, Option<BlockKey>)]) {
        let Some(file) = &mut self.file else { return };
        for (key, _) in blocks {
            if self.store.copy_state(*key, Tier::Ssd) != CopyState::Ready {
                file.remove(key.short());
            }
        }
    }
}

/// The blocks, what was written last first, but none before those of its ancestors that are there.
fn parents_first(entries: &[Entry]) -> Vec<(BlockKey, Option<BlockKey>)> {
    let mut newest: Vec<&Entry> = entries.iter().collect();
    newest.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.place.generation));
    let mut waiting: ShortNameMap<&Entry> = newest.iter().map(|&entry| (entry.key.short(), entry)).collect();
    let mut ordered = Vec::with_capacity(entries.len());
    let mut climb = Vec::new();
    for entry in newest {
        let mut next = waiting.remove(&entry.key.short());
        while let Some(entry) = next {
            climb.push((entry.key, entry.parent));
            next = entry.parent.and_then(|parent| waiting.remove(&parent.short()));
        }
        ordered.extend(climb.drain(..).rev());
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Place;

    fn entry(key: u128, parent: u128, generation: u64) -> Entry {
        let parent = (parent > 0).then_some(BlockKey(parent));
        let place = Place { slot: generation as u32, generation, checksum: 0 };
        Entry { key: BlockKey(key), parent, place }
    }

    #[test]
    fn ancestors_go_first_and_of_chains_the_newest() {
        // 1-2-3 and 1-4; 9 hangs in the air; 5 and 6 claim to continue each other.
        let entries = [
            entry(3, 2, 1),
            entry(2, 1, 2),
            entry(1, 0, 3),
            entry(4, 1, 8),
            entry(9, 77, 4),
            entry(5, 6, 6),
            entry(6, 5, 5),
        ];
        let ordered: Vec<u128> = parents_first(&entries).iter().map(|(key, _)| key.0).collect();
        assert_eq!(ordered, [1, 4, 6, 5, 9, 2, 3]);
    }
}
