//! Turns of those who were sent away: each is told a moment of its own to come again, so that whoever
//! comes when told finds room, and no herd comes at once for a place that only one can have.

/// A turn is at most this long after the moment at which there is room again, µs.
const HORIZON_US: u64 = 60_000_000;

/// The turns that were given.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// When those who were sent away so far will have been let in, µs.
    until_us: u64,
}

impl Turns {
    /// How long a request that finds room in `wait_us` waits for its turn, µs. Whoever is refused after
    /// it comes `cost_us` later: the time for which it takes the room.
    pub(super) fn give(&mut self, now_us: u64, wait_us: u64, cost_us: u64) -> u64 {
        let free_us = now_us.saturating_add(wait_us);
        let turn_us = self.until_us.clamp(free_us, free_us.saturating_add(HORIZON_US));
        self.until_us = turn_us.saturating_add(cost_us);
        turn_us - now_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_herd_is_spread_by_what_each_of_it_costs() {
        let mut turns = Turns::default();
        let waits: Vec<u64> = (0..4).map(|at| turns.give(1_000 + at, 500 - at, 100)).collect();
        assert_eq!(waits, [500, 599, 698, 797], "one each 100 µs from 1,500 on");
        // Whoever comes after all of their turns finds nobody before it.
        assert_eq!(turns.give(10_000, 50, 100), 50);
    }

    #[test]
    fn turns_end_at_the_horizon() {
        let mut turns = Turns::default();
        let last = (0..1_000).map(|_| turns.give(0, 10, 1_000_000)).last();
        assert_eq!(last, Some(10 + HORIZON_US));
    }

    #[test]
    fn nothing_overflows() {
        let mut turns = Turns::default();
        assert_eq!(turns.give(5, u64::MAX, u64::MAX), u64::MAX - 5);
        assert_eq!(turns.give(5, 1, 1), 1 + HORIZON_US);
    }
}
