//! Least recently used: one list, by the time of coming to rest.

use super::Facts;

/// Every block ranks the same.
pub(super) const fn rank(_: Facts) -> usize {
    0
}

#[cfg(test)]
mod tests {
    use super::super::Resting;
    use super::*;
    use crate::config::Eviction;

    #[test]
    fn the_longest_at_rest_goes_first_however_often_it_was_used() {
        let mut resting = Resting::new(Eviction::Lru, 4);
        resting.rest(5, Facts { frequency: 40, ..Facts::default() });
        resting.rest(3, Facts { frequency: 1, ..Facts::default() });
        resting.halve();
        assert_eq!(resting.victim(|_| true), Some(5));
        resting.lift(5);
        assert_eq!(resting.victim(|_| true), Some(3));
    }
}
