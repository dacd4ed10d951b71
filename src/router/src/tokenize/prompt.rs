//! From text to tokens and block chain, remembered by prefix: a conversation's next turn tokenises
//! and hashes only what is new in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_types::{BlockKey, ChainHasher, Packer, Tokens};
use parking_lot::Mutex;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use super::lru::Lru;

/// The inputs that block keys are derived from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lineage {
    /// The deployment's secret.
    pub seed: u64,
    /// Key of the namespace.
    pub root: BlockKey,
    /// Tokens in a block, at least 1.
    pub block_tokens: u32,
}

/// A prompt, ready to be submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its tokens, as they go over the wire: a long prompt is copied once.
    pub tokens: Tokens,
    /// Keys of its full blocks.
    pub chain: Arc<[BlockKey]>,
}

/// A part of a prompt as tokenised after all that is before it.
#[derive(Debug, Default)]
pub(crate) struct Part {
    tokens: Tokens,
    /// Keys of the blocks that are full at its end and were not before it.
    keys: Box<[BlockKey]>,
}

/// Tokens and keys by the prefix that they end.
pub(crate) struct PrefixCache {
    parts: Mutex<Lru<Arc<Part>>>,
    /// Guards the names of prefixes against texts made to collide.
    salt: u64,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Bytes that an entry takes beside its tokens and keys, roughly.
const ENTRY_BYTES: usize = 160;

impl PrefixCache {
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        Self {
            parts: Mutex::new(Lru::new(capacity_bytes)),
            salt: rand::random(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Parts found and not found so far.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed))
    }

    /// Looks up the cached parts of a prompt whose first tokens are `prefix`.
    pub(crate) fn look_up(&self, parts: &[&str], prefix: &[u32], lineage: &Lineage) -> PartLookup {
        let names = self.names(parts, prefix, lineage);
        let mut cache = self.parts.lock();
        // Deepest first: what others share ends up the newest and stays the longest.
        let mut found: Vec<Option<Arc<Part>>> = names.iter().rev().map(|&name| cache.get(name)).collect();
        drop(cache);
        found.reverse();
        let hits = found.iter().flatten().count() as u64;
        self.hits.fetch_add(hits, Ordering::Relaxed);
        self.misses.fetch_add(names.len() as u64 - hits, Ordering::Relaxed);
        PartLookup { names, found }
    }

    /// A name for each prefix that commits to its text and to all that its keys depend on.
    fn names(&self, parts: &[&str], prefix: &[u32], lineage: &Lineage) -> Vec<u128> {
        let mut start = Vec::with_capacity(32 + prefix.len() * 4);
        start.extend_from_slice(&lineage.root.0.to_le_bytes());
        start.extend_from_slice(&lineage.seed.to_le_bytes());
        start.extend_from_slice(&lineage.block_tokens.to_le_bytes());
        prefix.iter().for_each(|token| start.extend_from_slice(&token.to_le_bytes()));
        let mut name = xxh3_128_with_seed(&start, self.salt);
        let mut joint = [0u8; 32];
        let name_after = |part: &&str| {
            joint[..16].copy_from_slice(&name.to_le_bytes());
            joint[16..].copy_from_slice(&xxh3_128_with_seed(part.as_bytes(), self.salt).to_le_bytes());
            name = xxh3_128_with_seed(&joint, self.salt);
            name
        };
        parts.iter().map(name_after).collect()
    }

    fn remember(&self, fresh: Vec<(u128, Arc<Part>)>) {
        if fresh.is_empty() {
            return;
        }
        let mut cache = self.parts.lock();
        for (name, part) in fresh.into_iter().rev() {
            let weight_bytes = ENTRY_BYTES + part.tokens.bytes() + part.keys.len() * 16;
            cache.put(name, part, weight_bytes);
        }
    }
}

/// A prompt whose parts are partly known.
pub(crate) struct PartLookup {
    names: Vec<u128>,
    found: Vec<Option<Arc<Part>>>,
}

impl PartLookup {
    /// Indices of the parts that have to be tokenised.
    pub(crate) fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        self.found.iter().enumerate().filter_map(|(at, part)| part.is_none().then_some(at))
    }

    /// The whole prompt between `affixes`, with `fresh` the tokens of the missing parts in order,
    /// which are remembered.
    pub(crate) fn assemble(
        self,
        cache: &PrefixCache,
        fresh: Vec<Vec<u32>>,
        affixes: (&[u32], &[u32]),
        lineage: &Lineage,
    ) -> Prompt {
        let total = affixes.0.len()
            + affixes.1.len()
            + fresh.iter().map(Vec::len).sum::<usize>()
            + self.found.iter().flatten().map(|part| part.tokens.len()).sum::<usize>();
        let blocks = total / lineage.block_tokens.max(1) as usize;
        let mut chain: Arc<[BlockKey]> = std::iter::repeat_n(BlockKey(0), blocks).collect();
        let mut growing = GrowingChain {
            open: Vec::new(),
            chain: Arc::get_mut(&mut chain).expect("made here, shared with nobody yet"),
            blocks: 0,
            lineage,
        };
        let mut packer = Packer::default();
        packer.push(affixes.0);
        growing.name(affixes.0);
        let (mut fresh, mut learned) = (fresh.into_iter(), Vec::new());
        for (name, found) in self.names.into_iter().zip(self.found) {
            if let Some(part) = found {
                packer.push_part(&part.tokens);
                growing.take(&part);
            } else {
                let new = fresh.next().expect("one for each missing part");
                let part = Part { keys: growing.name(&new).into(), tokens: Tokens::from(new) };
                packer.push_part(&part.tokens);
                learned.push((name, Arc::new(part)));
            }
        }
        packer.push(affixes.1);
        growing.name(affixes.1);
        cache.remember(learned);
        Prompt { tokens: packer.finish(), chain }
    }
}

/// A chain that grows with a prompt.
struct GrowingChain<'a> {
    /// The tokens of the last block, which is not full.
    open: Vec<u32>,
    chain: &'a mut [BlockKey],
    blocks: usize,
    lineage: &'a Lineage,
}

impl GrowingChain<'_> {
    /// Goes on by a part whose keys are known.
    fn take(&mut self, part: &Part) {
        self.chain[self.blocks..self.blocks + part.keys.len()].copy_from_slice(&part.keys);
        self.blocks += part.keys.len();
        let open = self.open.len() + part.tokens.len() - part.keys.len() * self.block_tokens();
        if open < part.tokens.len() {
            self.open = part.tokens.after(part.tokens.len() - open);
        } else {
            self.open.extend(part.tokens.iter());
        }
    }

    /// Goes on by tokens; the keys of the blocks that become full.
    fn name(&mut self, tokens: &[u32]) -> &[BlockKey] {
        let (from, block_tokens) = (self.blocks, self.block_tokens());
        let parent = if from == 0 { self.lineage.root } else { self.chain[from - 1] };
        let mut hasher = ChainHasher::resume(self.lineage.seed, parent);
        // The block that was begun before, then whole ones.
        let (head, rest) = tokens.split_at(tokens.len().min(block_tokens - self.open.len()));
        self.open.extend_from_slice(head);
        if self.open.len() < block_tokens {
            return &[];
        }
        self.chain[self.blocks] = hasher.push_tokens(&self.open);
        self.blocks += 1;
        let whole = rest.chunks_exact(block_tokens);
        self.open.clear();
        self.open.extend_from_slice(whole.remainder());
        for block in whole {
            self.chain[self.blocks] = hasher.push_tokens(block);
            self.blocks += 1;
        }
        &self.chain[from..self.blocks]
    }

    fn block_tokens(&self) -> usize {
        self.lineage.block_tokens.max(1) as usize
    }
}

/// The prompt that is given as tokens.
pub(crate) fn from_tokens(tokens: &[u32], lineage: &Lineage) -> Prompt {
    let mut hasher = ChainHasher::resume(lineage.seed, lineage.root);
    let chain = tokens
        .chunks_exact(lineage.block_tokens.max(1) as usize)
        .map(|block| hasher.push_tokens(block))
        .collect();
    Prompt { tokens: tokens.into(), chain }
}

/// A session's number: tenants with the same name for it do not share one.
pub(crate) fn session_number(tenant: Option<&str>, session: &str, seed: u64) -> u64 {
    xxh3_64_with_seed(session.as_bytes(), xxh3_64_with_seed(tenant.unwrap_or_default().as_bytes(), seed))
}
