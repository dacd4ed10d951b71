//! Least recently used: one list, by the time of coming to rest.

use super::list::Lists;
use super::{Facts, Order};

/// Every block is in the one list.
#[derive(Debug)]
pub(super) struct Lru;

impl Order for Lru {
    fn new(_capacity: u64) -> Self {
        Self
    }

    fn lists(&self) -> usize {
        1
    }

    fn rest(&mut self, lists: &mut Lists, block: u32, _facts: Facts) {
        lists.push_newest(0, block);
    }
}

#[cfg(test)]
mod tests {
    use crate::evict::{Eviction, Facts, RestingBlocks};

    #[test]
    fn the_longest_at_rest_goes_first_however_often_it_was_used() {
        let mut resting = RestingBlocks::new(Eviction::Lru, 4);
        resting.rest(5, Facts { frequency: 40, ..Facts::default() });
        resting.rest(3, Facts { frequency: 1, ..Facts::default() });
        resting.halve();
        assert_eq!(resting.victim(|_| true), Some(5));
        resting.lift(5);
        assert_eq!(resting.victim(|_| true), Some(3));
    }
}
