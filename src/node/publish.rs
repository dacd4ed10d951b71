//! Announces the content of this node's cache to subscribers, in the standard form.
//!
//! Blocks go by their standard names, which follow from their tokens alone. A block is therefore announced once its
//! tokens have been seen here, as those of every prompt and answer are. The tokens of copies that came by name, and of
//! blocks that an earlier life left on flash, are unknown, and such blocks are never announced.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};

use baton_events::hash::Rolling;
use baton_events::{
    Change, EngineHash, EventError, Form, Medium, Publisher, PublisherConfig, RemovedBlocks, Speaker,
    StoredBlocks,
};
use baton_types::{BlockHash, BlockKey, CacheChange, Tier};

/// Seed of the standard names, equal to the default of `baton indexer`.
const NAME_SEED: u64 = 0;
/// Blocks whose tokens are known and that have not come to rest yet.
const AWAITED_BLOCKS: usize = 1 << 16;

/// Where a node publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishAddress {
    /// `tcp://HOST:PORT` that subscribers connect to.
    pub endpoint: String,
    /// The address that repeats missed events.
    pub replay: Option<String>,
}

/// A block that can be named.
#[derive(Debug)]
struct NamedBlock {
    name: u64,
    parent: Option<u64>,
    /// The block's tokens, until they are announced.
    tokens: Vec<u32>,
    /// Whether it rests in each local tier.
    tiers: [bool; 3],
}

/// Blocks by our names, and how many of each standard name rest in each tier: tenants may have equal tokens.
#[derive(Debug, Default)]
pub(super) struct Names {
    block_tokens: usize,
    named: HashMap<BlockHash, NamedBlock>,
    awaited: VecDeque<BlockHash>,
    copies: BTreeMap<(u64, usize), u32>,
}

/// A publisher and the state with which it names the blocks.
#[derive(Debug)]
pub(super) struct Announcer {
    publisher: Publisher,
    names: Names,
}

impl Announcer {
    /// Listens, and serves subscribers from now on.
    ///
    /// # Errors
    /// An endpoint is none, or cannot be listened on.
    pub(super) async fn bind(at: &PublishAddress, speaker: Speaker) -> Result<Self, EventError> {
        let names = Names { block_tokens: speaker.block_tokens.max(1) as usize, ..Names::default() };
        let config = PublisherConfig {
            form: Form::Standard,
            speaker,
            ..PublisherConfig::new(at.endpoint.clone(), at.replay.clone())
        };
        let publisher = Publisher::bind(config).await?;
        let (endpoint, replay) = (publisher.endpoint(), publisher.replay_endpoint().unwrap_or("nowhere"));
        tracing::info!(endpoint, replay, "KV events are published");
        Ok(Self { publisher, names })
    }

    /// The tokens of a chain's blocks, from its root on.
    pub(super) fn learn(&mut self, chain: &[BlockKey], tokens: &[u32]) {
        self.names.learn(chain, tokens);
    }

    /// Publishes what changed, as one batch.
    pub(super) fn publish(&mut self, changes: &[CacheChange]) {
        let events: Vec<Change> = changes.iter().flat_map(|change| self.names.events(change)).collect();
        if !events.is_empty() {
            self.publisher.announce(events);
        }
    }
}

impl Names {
    fn learn(&mut self, chain: &[BlockKey], tokens: &[u32]) {
        let (mut rolling, mut parent) = (Rolling::new(NAME_SEED), None);
        for (key, block) in chain.iter().zip(tokens.chunks_exact(self.block_tokens)) {
            let name = rolling.push(block);
            let hash = key.short();
            if let Entry::Vacant(place) = self.named.entry(hash) {
                place.insert(NamedBlock { name, parent, tokens: block.to_vec(), tiers: [false; 3] });
                self.awaited.push_back(hash);
            }
            parent = Some(name);
        }
        while self.awaited.len() > AWAITED_BLOCKS {
            let Some(hash) = self.awaited.pop_front() else { return };
            self.forget_if_gone(hash);
        }
    }

    fn events(&mut self, change: &CacheChange) -> Vec<Change> {
        match change {
            CacheChange::Stored { hashes, tier, .. } => self.stored(hashes, *tier),
            CacheChange::Removed { hashes, tier } => self.removed(hashes, *tier),
            CacheChange::Cleared => {
                self.named.clear();
                self.awaited.clear();
                self.copies.clear();
                vec![Change::Cleared(None)]
            }
        }
    }

    /// Runs of blocks that came to rest, each block after its parent.
    fn stored(&mut self, hashes: &[BlockHash], tier: Tier) -> Vec<Change> {
        let mut runs: Vec<StoredBlocks> = Vec::new();
        for hash in hashes {
            let Some(known) = self.named.get_mut(hash) else { continue };
            let Some(rests) = known.tiers.get_mut(tier.index()).filter(|rests| !**rests) else { continue };
            *rests = true;
            let copies = self.copies.entry((known.name, tier.index())).or_default();
            *copies += 1;
            if *copies > 1 {
                continue;
            }
            let tokens = std::mem::take(&mut known.tokens);
            let name = EngineHash::Word(known.name);
            let parent = known.parent.map(EngineHash::Word);
            let goes_on = |run: &&mut StoredBlocks| {
                run.hashes.last().copied() == parent && run.tokens.is_empty() == tokens.is_empty()
            };
            match runs.last_mut().filter(goes_on) {
                Some(run) => {
                    run.hashes.push(name);
                    run.tokens.extend(tokens);
                }
                None => runs.push(StoredBlocks {
                    hashes: vec![name],
                    parent,
                    base_block: parent.is_none().then_some(0),
                    tokens,
                    block_tokens: u32::try_from(self.block_tokens).unwrap_or(u32::MAX),
                    medium: Some(Medium::at(tier)),
                    ..StoredBlocks::default()
                }),
            }
        }
        runs.into_iter().map(Change::Stored).collect()
    }

    fn removed(&mut self, hashes: &[BlockHash], tier: Tier) -> Vec<Change> {
        let mut gone = Vec::new();
        for hash in hashes {
            let Some(known) = self.named.get_mut(hash) else { continue };
            let Some(rests) = known.tiers.get_mut(tier.index()).filter(|rests| **rests) else { continue };
            *rests = false;
            let place = (known.name, tier.index());
            let left = self.copies.get_mut(&place).map_or(0, |copies| {
                *copies -= 1;
                *copies
            });
            if left == 0 {
                self.copies.remove(&place);
                gone.push(EngineHash::Word(place.0));
            }
            self.forget_if_gone(*hash);
        }
        let removed = RemovedBlocks { hashes: gone, medium: Some(Medium::at(tier)), group: None };
        if removed.hashes.is_empty() { Vec::new() } else { vec![Change::Removed(removed)] }
    }

    fn forget_if_gone(&mut self, hash: BlockHash) {
        if self.named.get(&hash).is_some_and(|known| known.tiers == [false; 3]) {
            self.named.remove(&hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        Names { block_tokens: 2, ..Names::default() }
    }

    fn chain(root: u128, blocks: u128) -> Vec<BlockKey> {
        (1..=blocks).map(|at| BlockKey(root << 32 | at)).collect()
    }

    fn shorts(chain: &[BlockKey]) -> Vec<BlockHash> {
        chain.iter().map(|key| key.short()).collect()
    }

    fn standard(tokens: &[u32]) -> Vec<EngineHash> {
        let mut rolling = Rolling::new(NAME_SEED);
        tokens.chunks_exact(2).map(|block| EngineHash::Word(rolling.push(block))).collect()
    }

    fn stored(hashes: Vec<BlockHash>, tier: Tier) -> CacheChange {
        CacheChange::Stored { parent: None, hashes, tier }
    }

    #[test]
    fn a_run_is_told_by_standard_names_with_its_tokens_once() {
        let (mut names, keys, tokens) = (names(), chain(7, 3), [1, 2, 3, 4, 5, 6, 9]);
        names.learn(&keys, &tokens);
        let events = names.events(&stored(shorts(&keys), Tier::Hbm));
        let [Change::Stored(run)] = &events[..] else { panic!("{events:?}") };
        assert_eq!((&run.hashes, &run.tokens[..], run.parent), (&standard(&tokens), &tokens[..6], None));
        assert_eq!((run.block_tokens, run.medium.clone(), run.base_block), (2, Some(Medium::Gpu), Some(0)));
        let copied = names.events(&stored(shorts(&keys[1..]), Tier::Dram));
        let [Change::Stored(run)] = &copied[..] else { panic!("{copied:?}") };
        assert_eq!((run.parent, run.tokens.len()), (Some(standard(&tokens)[0]), 0), "told before");
        assert_eq!(run.medium, Some(Medium::Cpu));
        assert_eq!(names.events(&stored(shorts(&keys), Tier::Hbm)), [], "said again, nothing changed");
    }

    #[test]
    fn what_leaves_is_told_when_the_last_of_equal_blocks_leaves() {
        let (mut names, ours, theirs) = (names(), chain(7, 1), chain(8, 1));
        names.learn(&ours, &[1, 2]);
        names.learn(&theirs, &[1, 2]);
        assert_eq!(names.events(&stored(shorts(&ours), Tier::Hbm)).len(), 1);
        assert_eq!(names.events(&stored(shorts(&theirs), Tier::Hbm)), [], "of equal tokens and equal name");
        let leaves = |keys: &[BlockKey]| CacheChange::Removed { hashes: shorts(keys), tier: Tier::Hbm };
        assert_eq!(names.events(&leaves(&ours)), []);
        let events = names.events(&leaves(&theirs));
        assert!(matches!(&events[..], [Change::Removed(r)] if r.hashes == standard(&[1, 2])), "{events:?}");
        assert!(names.named.is_empty() && names.copies.is_empty(), "{names:?}");
        assert_eq!(names.events(&leaves(&theirs)), []);
    }

    #[test]
    fn blocks_of_unknown_tokens_stay_untold_and_split_runs() {
        let (mut names, keys) = (names(), chain(7, 3));
        names.learn(&keys[..1], &[1, 2]);
        let events = names.events(&stored(shorts(&keys), Tier::Ssd));
        assert!(matches!(&events[..], [Change::Stored(run)] if run.hashes.len() == 1), "{events:?}");
        assert_eq!(names.events(&CacheChange::Cleared), [Change::Cleared(None)]);
    }

    #[test]
    fn what_never_comes_to_rest_is_forgotten() {
        let mut names = names();
        for at in 0..AWAITED_BLOCKS as u128 + 10 {
            names.learn(&[BlockKey(at + 1)], &[1, u32::try_from(at).unwrap()]);
        }
        assert_eq!((names.named.len(), names.awaited.len()), (AWAITED_BLOCKS, AWAITED_BLOCKS));
    }
}
