//! Turns at an engine that runs a limited number of requests at a time: first come, first served.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use baton_types::RequestId;

/// A request's stay in the steps of its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// When it comes, µs: now if it has begun.
    pub at_us: u64,
    pub request: RequestId,
    /// How long it decodes from then on, µs.
    pub lasts_us: u64,
    /// When it has to begin, µs.
    pub due_us: u64,
    /// Whether it has begun.
    pub begun: bool,
}

/// When each of the places of an engine is free.
struct FreePlaces {
    most: usize,
    taken_until_us: BinaryHeap<Reverse<u64>>,
}

impl FreePlaces {
    fn new(most: u32) -> Self {
        Self { most: most.max(1) as usize, taken_until_us: BinaryHeap::new() }
    }

    /// Takes the place that is free first, and says from when on, µs.
    fn take(&mut self, at_us: u64, lasts_us: u64) -> u64 {
        let full = self.taken_until_us.len() >= self.most;
        let free_us = if full { self.taken_until_us.pop().map_or(0, |Reverse(us)| us) } else { 0 };
        let from_us = at_us.max(free_us);
        self.taken_until_us.push(Reverse(from_us.saturating_add(lasts_us)));
        from_us
    }
}

/// The turn of a request that is not among the others yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewTurn {
    /// When it begins, µs.
    pub at_us: u64,
    /// Whether another that comes after it begins too late because of it.
    pub makes_late: bool,
}

impl NewTurn {
    /// Of a request that comes at that time and decodes for so long, where `most` run at a time.
    pub(crate) fn among(mut others: Vec<Turn>, most: u32, (comes_us, lasts_us): (u64, u64)) -> Self {
        others.sort_unstable_by_key(|turn| (!turn.begun, turn.at_us, turn.request));
        let first_after = others.partition_point(|turn| turn.begun || turn.at_us <= comes_us);
        let mut without = FreePlaces::new(most);
        for turn in &others[..first_after] {
            without.take(turn.at_us, turn.lasts_us);
        }
        let mut with = FreePlaces { most: without.most, taken_until_us: without.taken_until_us.clone() };
        let at_us = with.take(comes_us, lasts_us);
        let mut makes_late = false;
        for turn in &others[first_after..] {
            let [before_us, after_us] =
                [&mut without, &mut with].map(|places| places.take(turn.at_us, turn.lasts_us));
            assert!(before_us <= after_us, "request {} gains by another that comes first", turn.request);
            makes_late |= (before_us..after_us).contains(&turn.due_us);
        }
        Self { at_us, makes_late }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn turn(request: u64, begun: bool, at_us: u64, lasts_us: u64, due_us: u64) -> Turn {
        Turn { at_us, request: RequestId(request), lasts_us, due_us, begun }
    }

    #[test]
    fn one_that_comes_waits_for_the_first_end_and_lets_later_ones_be_in_time() {
        let others =
            || Vec::from([turn(1, true, 10, 50, 0), turn(2, true, 10, 90, 0), turn(3, false, 70, 20, 110)]);
        let of = |most, comes_us, lasts_us| NewTurn::among(others(), most, (comes_us, lasts_us));
        assert_eq!(of(4, 20, 500), NewTurn { at_us: 20, makes_late: false }, "there is a place for each");
        assert_eq!(
            of(3, 20, 500),
            NewTurn { at_us: 20, makes_late: false },
            "the third takes what the first leaves"
        );
        assert_eq!(of(2, 20, 40), NewTurn { at_us: 60, makes_late: false });
        assert_eq!(of(2, 20, 500), NewTurn { at_us: 60, makes_late: false }, "the third waits until 100");
        assert_eq!(
            of(1, 20, 10),
            NewTurn { at_us: 150, makes_late: false },
            "the third is late without it, too"
        );
        assert_eq!(of(2, 75, 40), NewTurn { at_us: 90, makes_late: false }, "it comes after the third");
        let mut tight = others();
        tight[2].due_us = 99;
        assert_eq!(NewTurn::among(tight, 2, (20, 500)), NewTurn { at_us: 60, makes_late: true });
    }

    /// Steps from microsecond to microsecond; says when each begins.
    fn naive(turns: &[Turn], most: usize) -> Vec<(RequestId, u64)> {
        let mut order = turns.to_vec();
        order.sort_unstable_by_key(|turn| (!turn.begun, turn.at_us, turn.request));
        let (mut ends, mut begins, mut now_us) = (Vec::new(), Vec::new(), 0);
        let mut waiting = order.into_iter().peekable();
        while let Some(next) = waiting.peek() {
            ends.retain(|end| *end > now_us);
            if next.at_us <= now_us && ends.len() < most {
                begins.push((next.request, now_us));
                ends.push(now_us + next.lasts_us);
                waiting.next();
            } else {
                now_us += 1;
            }
        }
        begins
    }

    proptest! {
        #[test]
        fn turns_are_those_of_a_queue_stepped_through(
            turns in proptest::collection::vec((any::<bool>(), 0u64..60, 1u64..40, 0u64..120), 0..14),
            most in 1u32..6, comes_us in 0u64..60, lasts_us in 1u64..40,
        ) {
            let mut left = most;
            let others: Vec<Turn> = (1..).zip(turns).map(|(id, (runs, at_us, lasts_us, due_us))| {
                let begun = runs && left > 0;
                left -= u32::from(begun);
                turn(id, begun, if begun { 0 } else { at_us }, lasts_us, due_us)
            }).collect();
            let new = NewTurn::among(others.clone(), most, (comes_us, lasts_us));
            let most = most as usize;
            let before = naive(&others, most);
            // Of two that come together the newer one is last.
            let own = turn(u64::MAX, false, comes_us, lasts_us, 0);
            let after = naive(&[&others[..], &[own]].concat(), most);
            let at = |begins: &[(RequestId, u64)], id| begins.iter().find(|(of, _)| *of == id).map(|(_, us)| *us);
            prop_assert_eq!(Some(new.at_us), at(&after, own.request));
            let late = |begins: &[(RequestId, u64)], turn: &Turn| at(begins, turn.request) > Some(turn.due_us);
            let made = others.iter().any(|turn| late(&after, turn) && !late(&before, turn));
            prop_assert_eq!(new.makes_late, made);
        }
    }
}
