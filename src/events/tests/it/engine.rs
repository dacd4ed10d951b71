//! A pretended engine with a cache of its own, and a consumer that follows it: both ends of every loopback test.

use baton_events::{
    BlockExtra, Change, EngineHash, EpochReason, ExtraKey, Feed, Medium, Mirror, MirrorConfig, RemovedBlocks,
    StoredBlocks, Subscriber,
};
use baton_types::{BlockHash, BlockKey, CacheChange, ChainHasher, Rng, Tier};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const SEED: u64 = 3;
const BLOCK_TOKENS: u32 = 4;

fn root(salted: bool) -> BlockKey {
    ChainHasher::new(SEED, &[u8::from(salted)]).parent()
}

/// A block's content, and whether its chain is salted.
type Prefix = (bool, Vec<u32>);

fn name(prefix: &Prefix) -> EngineHash {
    let mut chain = baton_events::hash::Rolling::new(u64::from(prefix.0));
    EngineHash::Word(prefix.1.iter().map(|symbol| chain.push(&[*symbol])).last().unwrap())
}

fn tokens(symbol: u32) -> [u32; 4] {
    [symbol, 1000, symbol, 2]
}

fn ours((salted, blocks): &Prefix) -> BlockHash {
    let mut chain = ChainHasher::resume(SEED, root(*salted));
    blocks.iter().map(|symbol| chain.push_tokens(&tokens(*symbol)).short()).last().unwrap()
}

/// The prefix of a request.
#[derive(Clone)]
pub struct Prompt(Prefix);

impl Prompt {
    /// As the engine's own come.
    pub fn draw(rng: &mut Rng) -> Self {
        let salted = rng.below(4) == 0;
        Self((salted, (0..6).map(|_| rng.below(3) as u32).collect()))
    }

    /// Of two that can be drawn, the one that comes more often: some begin many requests, most few.
    pub fn often(rng: &mut Rng) -> Self {
        let salted = rng.below(4) == 0;
        Self((salted, (0..6).map(|_| rng.below(3).min(rng.below(3)) as u32).collect()))
    }

    /// The names of its blocks, as requests are routed by them.
    pub fn chain(&self) -> Vec<BlockHash> {
        self.beginnings().map(|prefix| ours(&prefix)).collect()
    }

    /// Its beginnings, the shortest first.
    fn beginnings(&self) -> impl Iterator<Item = Prefix> + '_ {
        (1..=self.0.1.len()).map(|length| (self.0.0, self.0.1[..length].to_vec()))
    }
}

/// The engine: prompts come, leaves are evicted.
pub struct Engine {
    held: BTreeMap<Prefix, Medium>,
    rng: Rng,
}

impl Engine {
    pub fn new(seed: u64) -> Self {
        Self { held: BTreeMap::new(), rng: Rng::new(seed) }
    }

    /// Simulates one step, and returns its announcements.
    pub fn step(&mut self) -> Vec<Change> {
        let salted = self.rng.below(4) == 0;
        let length = 1 + self.rng.below(6) as usize;
        let blocks = (0..length).map(|_| self.rng.below(3) as u32).collect();
        let mut told = self.serve(&Prompt((salted, blocks)));
        if self.rng.below(200) == 0 {
            self.held.clear();
            told.push(Change::Cleared(None));
        }
        told
    }

    /// Serves a request, and returns the announcements of its cache changes.
    pub fn serve(&mut self, prompt: &Prompt) -> Vec<Change> {
        let mut told = vec![self.compute(prompt)];
        while self.held.len() > 60 {
            told.push(self.evict());
        }
        told
    }

    fn compute(&mut self, Prompt((salted, blocks)): &Prompt) -> Change {
        let (salted, length) = (*salted, blocks.len());
        let until = |length: usize| (salted, blocks[..length].to_vec());
        let there = (1..=length).take_while(|n| self.held.contains_key(&until(*n))).count();
        let new: Vec<Prefix> = (there + 1..=length).map(until).collect();
        new.iter().for_each(|prefix| drop(self.held.insert(prefix.clone(), Medium::Gpu)));
        let key = BlockExtra { block: 0, keys: vec![ExtraKey::Text("salt".into())] };
        Change::Stored(StoredBlocks {
            hashes: new.iter().map(name).collect(),
            parent: (there > 0).then(|| name(&until(there))),
            tokens: blocks[there..].iter().flat_map(|symbol| tokens(*symbol)).collect(),
            block_tokens: BLOCK_TOKENS,
            medium: Some(Medium::Gpu),
            extra: (salted && there == 0 && !new.is_empty()).then_some(key).into_iter().collect(),
            ..StoredBlocks::default()
        })
    }

    fn evict(&mut self) -> Change {
        let leaf = |prefix: &&Prefix| {
            !self
                .held
                .keys()
                .any(|o| o.0 == prefix.0 && o.1.len() > prefix.1.len() && o.1.starts_with(&prefix.1))
        };
        let leaves: Vec<Prefix> = self.held.keys().filter(leaf).cloned().collect();
        let gone = leaves[self.rng.below(leaves.len() as u64) as usize].clone();
        self.held.remove(&gone);
        Change::Removed(RemovedBlocks { hashes: vec![name(&gone)], medium: Some(Medium::Gpu), group: None })
    }

    /// Blocks of a prompt that it holds from the first on.
    pub fn holds(&self, prompt: &Prompt) -> usize {
        prompt.beginnings().take_while(|prefix| self.held.contains_key(prefix)).count()
    }

    pub fn truth(&self) -> BTreeSet<BlockHash> {
        self.held.keys().map(ours).collect()
    }
}

/// Subscriber, mirror and index of one engine.
pub struct Follower {
    pub subscriber: Subscriber,
    pub mirror: Mirror,
    pub index: BTreeSet<BlockHash>,
    /// The changes since the last time they were taken.
    pub news: Vec<CacheChange>,
    /// Why each epoch began.
    pub epochs: Vec<EpochReason>,
    /// Number that comes next, by what was consumed.
    pub next: u64,
}

impl Follower {
    pub fn new(subscriber: Subscriber) -> Self {
        let config = MirrorConfig { chain_seed: SEED, block_tokens: BLOCK_TOKENS, ..MirrorConfig::default() };
        let mirror = Mirror::new(config, Box::new(|lineage| Some(root(!lineage.extra.is_empty()))));
        Self { subscriber, mirror, index: BTreeSet::new(), news: vec![], epochs: vec![], next: 0 }
    }

    /// Blocks of a prompt that the engine is said to hold from the first on.
    pub fn holds(&self, prompt: &Prompt) -> usize {
        prompt.beginnings().take_while(|prefix| self.index.contains(&ours(prefix))).count()
    }

    /// Takes what comes next.
    pub async fn take(&mut self) {
        let mut changes = Vec::new();
        match self.subscriber.next().await.unwrap() {
            Feed::Cleared { epoch, why } => {
                self.epochs.push(why);
                assert_eq!(epoch, self.epochs.len() as u64);
                self.mirror.forget(&mut changes);
                self.next = u64::MAX;
            }
            Feed::Batch { epoch, batch } => {
                assert_eq!(epoch, self.epochs.len() as u64);
                assert!(self.next == u64::MAX || self.next == batch.sequence, "no hole within an epoch");
                self.next = batch.sequence + 1;
                self.mirror.apply(&batch, &mut changes);
            }
        }
        self.news.extend(changes.iter().cloned());
        for change in changes {
            match change {
                CacheChange::Stored { hashes, tier, .. } => {
                    assert_eq!(tier, Tier::Hbm);
                    hashes.into_iter().for_each(|hash| assert!(self.index.insert(hash)));
                }
                CacheChange::Removed { hashes, .. } => {
                    hashes.iter().for_each(|h| assert!(self.index.remove(h)))
                }
                CacheChange::Cleared => self.index.clear(),
            }
        }
    }

    /// Goes on until everything up to number `next` was consumed.
    pub async fn reach(&mut self, next: u64) {
        self.until(|follower| follower.next == next).await;
    }

    /// Goes on until `done`; half a minute without getting there fails.
    pub async fn until(&mut self, done: impl Fn(&Self) -> bool) {
        let going = async {
            while !done(self) {
                self.take().await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(30), going).await.is_ok();
        assert!(ended, "at {}: {:?}", self.next, self.subscriber.status());
    }
}
