//! Spreads the retries of refused clients. Each client gets its own time to retry, at which it finds room,
//! so that they do not all retry at once for the same place.

use alloc::collections::BTreeMap;

/// The most by which the work of earlier clients delays a retry, µs.
const HORIZON_US: u64 = 60_000_000;
/// Turns that are remembered at most; the nearest ones are forgotten first (I9).
const MOST_TURNS: usize = 16_384;

/// The turns that were given and have not come yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Pacing {
    /// By moment and number: for how long the room will be taken, µs.
    ahead: BTreeMap<(u64, u64), u64>,
    owed_us: u64,
    given: u64,
}

impl Pacing {
    /// How long a request that finds room in `wait_us` waits for its turn, µs: those that were refused
    /// before it go first, each for its cost. It takes the room for `cost_us` itself.
    pub(super) fn give(&mut self, now_us: u64, wait_us: u64, cost_us: u64) -> u64 {
        while let Some(entry) = self.ahead.first_entry() {
            if entry.key().0 > now_us {
                break;
            }
            self.owed_us -= entry.remove();
        }
        debug_assert!(!self.ahead.is_empty() || self.owed_us == 0, "nobody is ahead, and something is owed");
        let turn_us = wait_us.saturating_add(self.owed_us.min(HORIZON_US));
        let cost_us = cost_us.min(HORIZON_US);
        self.ahead.insert((now_us.saturating_add(turn_us), self.given), cost_us);
        self.given += 1;
        self.owed_us += cost_us;
        if self.ahead.len() > MOST_TURNS
            && let Some((_, cost_us)) = self.ahead.pop_first()
        {
            self.owed_us -= cost_us;
        }
        turn_us
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn a_herd_is_spread_by_what_each_of_it_costs() {
        let mut turns = Pacing::default();
        let waits: Vec<u64> = (0..4).map(|_| turns.give(1_000, 500, 100)).collect();
        assert_eq!(waits, [500, 600, 700, 800]);
        // Two of them have come: two are still before the one that is refused now.
        assert_eq!(turns.give(1_650, 500, 100), 700);
        // After all of their turns nothing is before it.
        assert_eq!(turns.give(10_000, 50, 100), 50);
    }

    #[test]
    fn one_long_wait_puts_nobody_else_off_by_more_than_its_cost() {
        let mut turns = Pacing::default();
        assert_eq!(turns.give(0, 200_000_000, 100), 200_000_000);
        assert_eq!(turns.give(0, 10, 100), 110);
    }

    #[test]
    fn what_is_owed_and_remembered_is_bounded() {
        let mut turns = Pacing::default();
        let last = (0..1_000).map(|_| turns.give(0, 10, 1_000_000)).last();
        assert_eq!(last, Some(10 + HORIZON_US));
        (0..2 * MOST_TURNS as u64).for_each(|at| assert!(turns.give(at, 1_000_000, u64::MAX) >= 1_000_000));
        assert!(turns.ahead.len() <= MOST_TURNS);
        assert_eq!(turns.owed_us, turns.ahead.values().sum::<u64>());
        assert_eq!(turns.give(5, u64::MAX, u64::MAX), u64::MAX);
    }
}
