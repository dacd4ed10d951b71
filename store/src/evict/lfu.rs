//! Least frequently used: one list for each frequency. Frequencies are halved now and then, so
//! that what was popular long ago can go.

use super::list::Lists;
use super::{Facts, Order};

/// Distinct frequencies.
const RANKS: usize = 60;

/// Every block is in the list of its frequency.
#[derive(Debug)]
pub(super) struct Lfu;

impl Order for Lfu {
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

/// The list of a block.
fn rank(facts: Facts) -> usize {
    usize::from(facts.frequency).min(RANKS - 1)
}

/// Where a list's blocks belong once all frequencies are halved.
const fn halved(rank: usize) -> usize {
    rank / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::{Eviction, RestingBlocks};

    fn facts(frequency: u8) -> Facts {
        Facts { frequency, ..Facts::default() }
    }

    #[test]
    fn the_least_frequent_goes_first_and_halving_keeps_the_order() {
        let mut resting = RestingBlocks::new(Eviction::Lfu, 8);
        for (block, frequency) in [(0, 9), (1, 2), (2, 3), (3, 200)] {
            resting.rest(block, facts(frequency));
        }
        assert_eq!(resting.victim(|_| true), Some(1));
        resting.halve();
        resting.rest(4, facts(1));
        let mut order = [0; 5];
        for slot in &mut order {
            *slot = resting.victim(|_| true).unwrap();
            resting.lift(*slot);
        }
        assert_eq!(order, [1, 2, 4, 0, 3], "2 and 3 uses are both 1 after halving, and older than block 4");
    }

    #[test]
    fn frequencies_beyond_the_last_list_share_it() {
        assert_eq!(rank(facts(u8::MAX)), RANKS - 1);
        assert_eq!(halved(RANKS - 1), (RANKS - 1) / 2);
    }
}
