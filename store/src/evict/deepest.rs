//! The deepest block first. Tests alone compile it: this file and its line in the table are all that a policy takes, and
//! whatever holds for every policy is tried with it.

use super::list::Lists;
use super::{Facts, Order};
use crate::lifecycle::MAX_DEPTH_CLASS;

/// Every block is in the list of its depth.
#[derive(Debug)]
pub(super) struct DeepestOrder;

impl Order for DeepestOrder {
    fn new(_capacity: u64) -> Self {
        Self
    }

    fn lists(&self) -> usize {
        usize::from(MAX_DEPTH_CLASS) + 1
    }

    fn rest(&mut self, lists: &mut Lists, block: u32, facts: Facts) {
        lists.push_newest(usize::from(MAX_DEPTH_CLASS - facts.depth_class), block);
    }
}

#[cfg(test)]
mod tests {
    use crate::evict::{Eviction, Facts, RestingBlocks};

    #[test]
    fn it_orders_by_the_rule_in_its_file() {
        let mut resting = RestingBlocks::new(Eviction::Deepest, 8);
        for (block, depth_class) in [(0, 3), (1, 9), (2, 0), (3, 9)] {
            resting.rest(block, Facts { depth_class, ..Facts::default() });
        }
        for expected in [1, 3, 0, 2] {
            assert_eq!(resting.victim(|_| true), Some(expected));
            resting.lift(expected);
        }
    }
}
