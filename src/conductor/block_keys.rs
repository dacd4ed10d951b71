//! Full keys of blocks by their short names: the core knows the short ones, the wire wants the full ones.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_types::{BlockHash, BlockKey};

/// Blocks that are remembered (a bound, I9): what the core may order to be copied, 16 MB.
const BLOCKS: usize = 1 << 20;
/// Chains that are remembered (a bound, I9).
const CHAINS: usize = 1 << 14;

/// The chains that requests brought, the latest of them. Remembering one costs the same however long it is; looking
/// goes through all of them, which only a copy ahead of demand does.
#[derive(Debug, Default)]
pub(super) struct BlockKeys {
    chains: VecDeque<Arc<[BlockKey]>>,
    blocks: usize,
}

impl BlockKeys {
    /// A request's chain.
    pub(super) fn learn(&mut self, chain: &Arc<[BlockKey]>) {
        if chain.is_empty() || chain.len() > BLOCKS {
            return;
        }
        self.blocks += chain.len();
        self.chains.push_back(Arc::clone(chain));
        while self.blocks > BLOCKS || self.chains.len() > CHAINS {
            let Some(oldest) = self.chains.pop_front() else { break };
            self.blocks -= oldest.len();
        }
    }

    /// The full keys of a chain's leading blocks, as far as they are known.
    pub(super) fn full(&self, chain: &[BlockHash]) -> Vec<BlockKey> {
        let mut best: &[BlockKey] = &[];
        for known in self.chains.iter().rev() {
            if best.len() == chain.len() {
                break;
            }
            let shared = shared_blocks(known, chain);
            if shared > best.len() {
                best = &known[..shared];
            }
        }
        best.to_vec()
    }
}

/// How many blocks both begin with. A name commits to all before it: where one is equal, so are those.
fn shared_blocks(known: &[BlockKey], chain: &[BlockHash]) -> usize {
    let (mut equal, mut differs) = (0, known.len().min(chain.len()) + 1);
    while equal + 1 < differs {
        let middle = equal.midpoint(differs);
        if known[middle - 1].short() == chain[middle - 1] {
            equal = middle;
        } else {
            differs = middle;
        }
    }
    equal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(chain: u64, at: u64) -> BlockKey {
        BlockKey(7 << 64 | u128::from(chain << 32 | at))
    }

    fn chain(number: u64, blocks: u64) -> Arc<[BlockKey]> {
        (0..blocks).map(|at| key(if at < 2 { 0 } else { number }, at)).collect()
    }

    fn short(chain: &[BlockKey]) -> Vec<BlockHash> {
        chain.iter().map(|key| key.short()).collect()
    }

    #[test]
    fn a_chain_is_known_as_far_as_any_that_came_shares_it() {
        let mut names = BlockKeys::default();
        (1..4).for_each(|number| names.learn(&chain(number, 5)));
        for blocks in 1..6 {
            assert_eq!(names.full(&short(&chain(2, blocks))), *chain(2, blocks));
        }
        assert_eq!(names.full(&short(&chain(3, 9))), *chain(3, 5), "longer than what came");
        assert_eq!(names.full(&short(&chain(8, 9))), *chain(8, 2), "only the beginning is known");
        assert!(names.full(&short(&[key(9, 9)])).is_empty() && names.full(&[]).is_empty());
    }

    #[test]
    fn what_came_first_goes_first() {
        let mut names = BlockKeys::default();
        let blocks = BLOCKS as u64 / 4;
        (1..6).for_each(|number| names.learn(&chain(number, blocks)));
        assert_eq!((names.chains.len(), names.blocks), (4, BLOCKS));
        assert_eq!(names.full(&short(&chain(1, 9))).len(), 2);
        assert_eq!(names.full(&short(&chain(2, 9))).len(), 9);
        (0..CHAINS as u64 + 3).for_each(|number| names.learn(&chain(number, 3)));
        assert_eq!((names.chains.len(), names.blocks), (CHAINS, 3 * CHAINS));
    }
}
