//! The blocks that were announced and not removed: the content of a snapshot.

use hashbrown::HashMap;
use std::collections::BTreeMap;

use crate::model::{BlockExtra, Change, EngineHash, Event, ExtraKey, Medium, StoredBlocks};

/// Blocks of a snapshot: in each of four media still fewer events than a subscriber takes in one batch.
const MAX_BLOCKS: usize = (1 << 17) - 1;

#[derive(Clone, Debug)]
struct LedgerBlock {
    hash: EngineHash,
    parent: Option<EngineHash>,
    tokens: Box<[u32]>,
    block_tokens: u32,
    lora: Option<String>,
    extra: Vec<ExtraKey>,
    /// The media that hold it; never empty. A second copy in a medium is not counted.
    media: Vec<Medium>,
}

impl LedgerBlock {
    /// Whether one event can contain it together with the block before it.
    fn continues(&self, before: &Self) -> bool {
        self.parent == Some(before.hash)
            && self.media == before.media
            && self.lora == before.lora
            && self.block_tokens == before.block_tokens
    }
}

/// Held blocks in the order of their announcement, so that parents mostly come first.
#[derive(Debug)]
pub(super) struct Ledger {
    places: HashMap<EngineHash, u64>,
    blocks: BTreeMap<u64, LedgerBlock>,
    next: u64,
    tokens: usize,
    max_tokens: usize,
}

impl Ledger {
    pub(super) fn new(max_tokens: usize) -> Self {
        Self { places: HashMap::new(), blocks: BTreeMap::new(), next: 0, tokens: 0, max_tokens }
    }

    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::Stored(stored) => self.stored(stored),
            Change::Removed(removed) => {
                let medium = removed.medium.clone().unwrap_or(Medium::Gpu);
                removed.hashes.iter().for_each(|hash| self.remove(hash, &medium));
            }
            Change::Cleared(None) => {
                *self = Self { next: self.next, ..Self::new(self.max_tokens) };
            }
            Change::Cleared(Some(medium)) => {
                let hashes: Vec<EngineHash> = self.blocks.values().map(|held| held.hash).collect();
                hashes.iter().for_each(|hash| self.remove(hash, medium));
            }
            Change::Unknown(_) => {}
        }
    }

    fn stored(&mut self, stored: &StoredBlocks) {
        let medium = stored.medium.clone().unwrap_or(Medium::Gpu);
        let block_tokens = stored.block_tokens.max(1) as usize;
        let mut parent = stored.parent;
        for (at, hash) in stored.hashes.iter().enumerate() {
            if let Some(held) = self.places.get(hash).and_then(|place| self.blocks.get_mut(place)) {
                if !held.media.contains(&medium) {
                    held.media.push(medium.clone());
                }
            } else {
                let tokens =
                    stored.tokens.get(at * block_tokens..(at + 1) * block_tokens).unwrap_or_default();
                let extra = stored.extra.iter().find(|extra| extra.block == at);
                self.insert(LedgerBlock {
                    hash: *hash,
                    parent,
                    tokens: tokens.into(),
                    block_tokens: stored.block_tokens,
                    lora: stored.lora.clone(),
                    extra: extra.map(|extra| extra.keys.clone()).unwrap_or_default(),
                    media: vec![medium.clone()],
                });
            }
            parent = Some(*hash);
        }
    }

    fn insert(&mut self, held: LedgerBlock) {
        // A block without tokens costs room as well.
        let cost = held.tokens.len().max(16);
        if self.tokens + cost > self.max_tokens || self.blocks.len() >= MAX_BLOCKS {
            return;
        }
        self.tokens += cost;
        self.places.insert(held.hash, self.next);
        self.blocks.insert(self.next, held);
        self.next += 1;
    }

    fn remove(&mut self, hash: &EngineHash, medium: &Medium) {
        let Some(place) = self.places.get(hash) else { return };
        let Some(held) = self.blocks.get_mut(place) else { return };
        held.media.retain(|other| other != medium);
        if held.media.is_empty() {
            self.tokens -= held.tokens.len().max(16);
            self.blocks.remove(place);
            self.places.remove(hash);
        }
    }

    /// Events that clear, and then store everything that is held.
    pub(super) fn snapshot(&self) -> Vec<Event> {
        let mut events = vec![Event::from(Change::Cleared(None))];
        let blocks: Vec<&LedgerBlock> = self.blocks.values().collect();
        for run in blocks.chunk_by(|before, after| after.continues(before)) {
            for medium in &run[0].media {
                events.push(Change::Stored(stored_blocks(run, medium)).into());
            }
        }
        events
    }
}

/// A run of blocks as one event.
fn stored_blocks(run: &[&LedgerBlock], medium: &Medium) -> StoredBlocks {
    let keyed = run.iter().enumerate().filter(|(_, held)| !held.extra.is_empty());
    StoredBlocks {
        hashes: run.iter().map(|held| held.hash).collect(),
        parent: run[0].parent,
        base_block: None,
        tokens: run.iter().flat_map(|held| held.tokens.iter().copied()).collect(),
        block_tokens: run[0].block_tokens,
        lora: run[0].lora.clone(),
        medium: Some(medium.clone()),
        extra: keyed.map(|(block, held)| BlockExtra { block, keys: held.extra.clone() }).collect(),
        group: None,
        attention: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::RemovedBlocks;

    fn stored(names: &[u64], parent: Option<u64>, medium: Medium) -> Change {
        Change::Stored(StoredBlocks {
            hashes: names.iter().map(|name| EngineHash::Word(*name)).collect(),
            parent: parent.map(EngineHash::Word),
            tokens: names.iter().flat_map(|name| [*name as u32, 0]).collect(),
            block_tokens: 2,
            medium: Some(medium),
            ..StoredBlocks::default()
        })
    }

    fn removed(name: u64, medium: Medium) -> Change {
        Change::Removed(RemovedBlocks {
            hashes: vec![EngineHash::Word(name)],
            medium: Some(medium),
            group: None,
        })
    }

    fn ledger(max_tokens: usize, changes: &[Change]) -> Ledger {
        let mut ledger = Ledger::new(max_tokens);
        changes.iter().for_each(|change| ledger.apply(change));
        ledger
    }

    /// The snapshot's events without the clear before them: names, parent, medium.
    fn stored_blocks(ledger: &Ledger) -> Vec<(Vec<u64>, Option<u64>, Medium)> {
        let events = ledger.snapshot();
        assert_eq!(events[0].change, Change::Cleared(None));
        let of = |event: &Event| match &event.change {
            Change::Stored(stored) => (
                stored.hashes.iter().map(EngineHash::low64).collect(),
                stored.parent.map(|parent| parent.low64()),
                stored.medium.clone().unwrap(),
            ),
            other => panic!("{other:?} is no storing"),
        };
        events[1..].iter().map(of).collect()
    }

    #[test]
    fn chains_are_told_in_one_event_for_each_medium() {
        let ledger = ledger(
            1000,
            &[
                stored(&[1, 2], None, Medium::Gpu),
                stored(&[3], Some(2), Medium::Gpu),
                stored(&[4], Some(1), Medium::Gpu),
                stored(&[1], None, Medium::Cpu),
                removed(3, Medium::Cpu),
            ],
        );
        assert_eq!(
            stored_blocks(&ledger),
            [
                (vec![1], None, Medium::Gpu),
                (vec![1], None, Medium::Cpu),
                (vec![2, 3], Some(1), Medium::Gpu),
                (vec![4], Some(1), Medium::Gpu),
            ]
        );
    }

    #[test]
    fn what_is_gone_from_every_medium_is_not_told() {
        let mut ledger =
            ledger(1000, &[stored(&[1, 2], None, Medium::Gpu), stored(&[1], None, Medium::Disk)]);
        ledger.apply(&removed(1, Medium::Gpu));
        ledger.apply(&removed(2, Medium::Gpu));
        assert_eq!(stored_blocks(&ledger), [(vec![1], None, Medium::Disk)]);
        ledger.apply(&Change::Cleared(Some(Medium::Disk)));
        assert_eq!((stored_blocks(&ledger), ledger.tokens), (vec![], 0));
        ledger.apply(&stored(&[5], None, Medium::Gpu));
        ledger.apply(&Change::Cleared(None));
        assert_eq!((stored_blocks(&ledger), ledger.blocks.len()), (vec![], 0));
    }

    #[test]
    fn room_is_bounded() {
        let ledger = ledger(40, &[stored(&[1, 2, 3], None, Medium::Gpu)]);
        assert_eq!(ledger.blocks.len(), 2);
    }

    #[test]
    fn a_snapshot_of_lone_blocks_is_not_more_than_a_subscriber_takes() {
        let mut full = Ledger::new(usize::MAX);
        for name in 0..=MAX_BLOCKS as u64 {
            full.apply(&stored(&[name], None, Medium::Gpu));
        }
        assert_eq!(full.blocks.len(), MAX_BLOCKS);
        assert!(4 * full.blocks.len() < crate::Limits::default().events);
    }

    #[test]
    fn extra_keys_stay_with_their_block() {
        let Change::Stored(mut event) = stored(&[1, 2], None, Medium::Gpu) else { unreachable!() };
        event.extra = vec![BlockExtra { block: 1, keys: vec![ExtraKey::Number(7)] }];
        let events = ledger(1000, &[Change::Stored(event.clone())]).snapshot();
        assert_eq!(events[1].change, Change::Stored(event));
    }
}
