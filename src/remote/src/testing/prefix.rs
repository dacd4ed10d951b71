//! An engine's prefix cache: blocks of computed prompts, with the least recently used ones evicted.

use std::collections::{HashMap, VecDeque};

/// Whole blocks of prompts, each named by everything before it.
#[derive(Debug)]
pub(super) struct PrefixCache {
    block_tokens: usize,
    capacity: usize,
    /// When a block was last used.
    used: HashMap<u64, u64>,
    /// Uses in order. Those that are not a block's last are outdated.
    order: VecDeque<(u64, u64)>,
    uses: u64,
}

impl PrefixCache {
    /// A cache of `capacity` blocks; of none, nothing is ever found.
    pub(super) fn new(capacity: u32, block_tokens: u32) -> Self {
        Self {
            block_tokens: block_tokens.max(1) as usize,
            capacity: capacity as usize,
            used: HashMap::new(),
            order: VecDeque::new(),
            uses: 0,
        }
    }

    /// How many of the prompt's tokens need no computing; from now on its whole blocks are there. At least one token of
    /// every prompt is computed: the next one is drawn from it. Prompts of different salts share nothing.
    pub(super) fn take(&mut self, salt: &str, prompt: &[u32]) -> usize {
        if self.capacity == 0 {
            return 0;
        }
        let names = self.names(salt, prompt);
        let most = prompt.len().saturating_sub(1) / self.block_tokens;
        let hits = names.iter().take(most).take_while(|name| self.used.contains_key(name)).count();
        // From the end, so that a prefix outlives what follows it.
        for name in names.into_iter().rev() {
            self.uses += 1;
            self.used.insert(name, self.uses);
            self.order.push_back((self.uses, name));
        }
        self.shrink();
        hits * self.block_tokens
    }

    fn names(&self, salt: &str, prompt: &[u32]) -> Vec<u64> {
        let mut hash = salt.bytes().fold(SEED, |hash, byte| mixed(hash, u64::from(byte)));
        let block = |block: &[u32]| {
            hash = block.iter().fold(hash, |hash, token| mixed(hash, u64::from(*token)));
            hash
        };
        prompt.chunks_exact(self.block_tokens).map(block).collect()
    }

    fn shrink(&mut self) {
        while self.used.len() > self.capacity {
            let Some((use_, name)) = self.order.pop_front() else { return };
            if self.used.get(&name) == Some(&use_) {
                self.used.remove(&name);
            }
        }
        // Drops outdated uses before they outnumber the others.
        if self.order.len() > 2 * self.capacity + 1_024 {
            let used = &self.used;
            self.order.retain(|(use_, name)| used.get(name) == Some(use_));
        }
    }
}

const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// One step of a hash, one to one in each of both.
const fn mixed(hash: u64, with: u64) -> u64 {
    (hash ^ with).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(29)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A naive version of the cache: prefixes in order of their last use.
    struct Naive {
        capacity: usize,
        blocks: Vec<Vec<u32>>,
    }

    impl Naive {
        fn take(&mut self, prompt: &[u32]) -> usize {
            let whole = prompt.len() / 4;
            let most = (prompt.len() - 1) / 4;
            let held = |n: &usize| self.blocks.contains(&prompt[..n * 4].to_vec());
            let hits = (1..=most).take_while(held).count();
            for n in (1..=whole).rev() {
                self.blocks.retain(|block| *block != prompt[..n * 4]);
                self.blocks.push(prompt[..n * 4].to_vec());
            }
            let over = self.blocks.len().saturating_sub(self.capacity);
            self.blocks.drain(..over);
            hits * 4
        }
    }

    #[test]
    fn hits_are_those_of_a_list_of_prefixes() {
        let mut rng = baton_types::Rng::new(3);
        let (mut cache, mut naive) = (PrefixCache::new(40, 4), Naive { capacity: 40, blocks: Vec::new() });
        let mut found = 0;
        for _ in 0..3_000 {
            let family = u32::try_from(rng.below(12)).unwrap();
            let length = 1 + rng.below(40);
            let turn = rng.below(30);
            let prompt: Vec<u32> = (0..length)
                .map(|at| if at < turn { family } else { u32::try_from(at % 3).unwrap() })
                .collect();
            let hits = cache.take("", &prompt);
            assert_eq!(hits, naive.take(&prompt));
            found += hits;
            assert!(cache.used.len() <= 40 && cache.order.len() <= 2 * 40 + 1_024);
        }
        assert!(found > 10_000, "{found}");
    }

    #[test]
    fn the_last_token_is_always_computed_and_salts_share_nothing() {
        let mut cache = PrefixCache::new(100, 4);
        assert_eq!(cache.take("a", &[1; 8]), 0);
        assert_eq!((cache.take("a", &[1; 8]), cache.take("a", &[1; 9])), (4, 8));
        assert_eq!(cache.take("b", &[1; 9]), 0);
        assert_eq!(PrefixCache::new(0, 4).take("a", &[1; 9]), 0);
    }
}
