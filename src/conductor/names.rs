//! Full keys of blocks by their short names: the core knows the short ones, the wire wants the full ones.

use std::collections::{HashMap, VecDeque};

use baton_types::{BlockHash, BlockKey};

/// Blocks that are remembered (a bound, I9): what the core may order to be copied, about 50 MB.
const BLOCKS: usize = 1 << 20;

/// Keys of the blocks that requests brought, the latest of them.
#[derive(Debug, Default)]
pub(super) struct Names {
    full: HashMap<BlockHash, BlockKey>,
    /// In order of their first coming.
    order: VecDeque<BlockHash>,
}

impl Names {
    /// A request's chain.
    pub(super) fn learn(&mut self, chain: &[BlockKey]) {
        for key in chain {
            if self.full.insert(key.short(), *key).is_none() {
                self.order.push_back(key.short());
            }
        }
        while self.order.len() > BLOCKS {
            if let Some(oldest) = self.order.pop_front() {
                self.full.remove(&oldest);
            }
        }
    }

    /// The full keys of a chain's leading blocks, as far as they are known.
    pub(super) fn full(&self, chain: &[BlockHash]) -> Vec<BlockKey> {
        chain.iter().map_while(|hash| self.full.get(hash).copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_latest_is_known_by_its_short_name() {
        let mut names = Names::default();
        let key = |at: u64| BlockKey(7 << 64 | u128::from(at));
        for at in 0..BLOCKS as u64 + 2 {
            names.learn(&[key(at)]);
        }
        names.learn(&[key(5)]);
        assert_eq!((names.full.len(), names.order.len()), (BLOCKS, BLOCKS));
        let known = [2, 3].map(|at| key(at).short());
        assert_eq!(names.full(&known), [key(2), key(3)]);
        assert_eq!(names.full(&[key(2).short(), key(1).short(), key(3).short()]), [key(2)]);
    }
}
