//! Length-aware: blocks deep in a chain serve fewer other requests than those near its root, so
//! among blocks of about equal use the deepest go first (the technical report's third policy).

use super::list::Lists;
use super::{Facts, Order};
use crate::lifecycle::MAX_DEPTH_CLASS;

/// Lists for each frequency class: one per depth class.
const DEPTHS: usize = MAX_DEPTH_CLASS as usize + 1;
/// The highest frequency class.
const MAX_FREQUENCY_CLASS: usize = 3;
/// All lists.
const RANKS: usize = (MAX_FREQUENCY_CLASS + 1) * DEPTHS;

/// Every block is in the list of its frequency and depth.
#[derive(Debug)]
pub(super) struct LengthAwareOrder;

impl Order for LengthAwareOrder {
    fn new(_capacity: u64) -> Self {
        Self
    }

    fn lists(&self) -> usize {
        RANKS
    }

    fn rest(&mut self, lists: &mut Lists, block: u32, facts: Facts) {
        lists.push_newest(rank(facts), block);
    }

    fn halve(&mut self, lists: &mut Lists) {
        lists.merge(RANKS, halved);
    }
}

/// The list of a block: by capped frequency, then deepest first.
fn rank(facts: Facts) -> usize {
    let frequency = usize::from(facts.frequency).min(MAX_FREQUENCY_CLASS);
    frequency * DEPTHS + usize::from(MAX_DEPTH_CLASS - facts.depth_class)
}

/// Where a list's blocks belong once all frequencies are halved.
const fn halved(rank: usize) -> usize {
    rank / DEPTHS / 2 * DEPTHS + rank % DEPTHS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::{Eviction, RestingBlocks};

    #[test]
    fn rare_goes_before_common_and_deep_before_shallow() {
        let mut resting = RestingBlocks::new(Eviction::LengthAware, 8);
        for (block, frequency, depth_class) in [(0, 1, 0), (1, 1, 9), (2, 2, 14), (3, 60, 3), (4, 1, 9)] {
            resting.rest(block, Facts { frequency, depth_class, ..Facts::default() });
        }
        let mut order = [0; 5];
        for slot in &mut order {
            *slot = resting.victim(|_| true).unwrap();
            resting.lift(*slot);
        }
        assert_eq!(order, [1, 4, 0, 2, 3]);
    }

    #[test]
    fn halving_keeps_the_depth() {
        let of = |frequency, depth_class| rank(Facts { frequency, depth_class, ..Facts::default() });
        for depth in 0..=MAX_DEPTH_CLASS {
            assert_eq!(halved(of(3, depth)), of(1, depth));
            assert_eq!(halved(of(1, depth)), of(0, depth));
        }
        assert!(of(u8::MAX, 0) < RANKS);
    }
}
