//! Turns at an engine that holds a limited number of requests, or KV, at a time: first come, first served.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use baton_types::RequestId;

use crate::InstanceSpec;

/// A request's stay in the steps of its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// When it comes, µs: now if it has begun.
    pub at_us: u64,
    pub request: RequestId,
    /// How long it decodes from then on, µs.
    pub lasts_us: u64,
    /// Room that it takes, tokens.
    pub tokens: u64,
    /// When it has to begin, µs.
    pub due_us: u64,
    /// Whether it has begun.
    pub begun: bool,
}

/// When the places and the room of an engine are free.
#[derive(Clone)]
struct FreePlaces<'a> {
    spec: &'a InstanceSpec,
    /// When each that is there ends, µs, and the room that it leaves then.
    taken: BinaryHeap<Reverse<(u64, u64)>>,
    taken_tokens: u64,
    /// When the last one began, µs: nobody begins before those that came before.
    last_us: u64,
}

impl<'a> FreePlaces<'a> {
    const fn new(spec: &'a InstanceSpec) -> Self {
        Self { spec, taken: BinaryHeap::new(), taken_tokens: 0, last_us: 0 }
    }

    /// Takes a place and the room for a request as soon as both are free, and says from when on, µs. One that has begun has
    /// both, and one that is alone gets them.
    fn take(&mut self, turn: &Turn) -> u64 {
        self.last_us = self.last_us.max(turn.at_us);
        while !turn.begun
            && !self.spec.holds(self.taken.len() + 1, self.taken_tokens.saturating_add(turn.tokens))
            && let Some(Reverse((until_us, left_tokens))) = self.taken.pop()
        {
            self.taken_tokens = self.taken_tokens.saturating_sub(left_tokens);
            self.last_us = self.last_us.max(until_us);
        }
        self.taken.push(Reverse((self.last_us.saturating_add(turn.lasts_us), turn.tokens)));
        self.taken_tokens = self.taken_tokens.saturating_add(turn.tokens);
        self.last_us
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
    /// Of a request at an instance.
    pub(crate) fn among(mut others: Vec<Turn>, spec: &InstanceSpec, new: &Turn) -> Self {
        others.sort_unstable_by_key(|turn| (!turn.begun, turn.at_us, turn.request));
        let first_after = others.partition_point(|turn| turn.begun || turn.at_us <= new.at_us);
        let mut without = FreePlaces::new(spec);
        for turn in &others[..first_after] {
            without.take(turn);
        }
        let mut with = without.clone();
        let at_us = with.take(new);
        let mut makes_late = false;
        for turn in &others[first_after..] {
            let [before_us, after_us] = [&mut without, &mut with].map(|places| places.take(turn));
            assert!(before_us <= after_us, "request {} gains by another that comes first", turn.request);
            makes_late |= (before_us..after_us).contains(&turn.due_us);
        }
        Self { at_us, makes_late }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::spec;
    use baton_types::Role;
    use proptest::prelude::*;

    fn turn(request: u64, begun: bool, at_us: u64, lasts_us: u64, due_us: u64) -> Turn {
        Turn { at_us, request: RequestId(request), lasts_us, tokens: 10, due_us, begun }
    }

    fn limits(most: u32, capacity_tokens: u64) -> InstanceSpec {
        InstanceSpec { max_running: Some(most), capacity_tokens, ..spec(0, Role::Decode) }
    }

    #[test]
    fn one_that_comes_waits_for_the_first_end_and_lets_later_ones_be_in_time() {
        let others =
            || Vec::from([turn(1, true, 10, 50, 0), turn(2, true, 10, 90, 0), turn(3, false, 70, 20, 110)]);
        let of = |most: u32, comes_us, lasts_us| {
            let new = turn(9, false, comes_us, lasts_us, 0);
            let [by_count, by_room] = [limits(most, 1_000), limits(100, u64::from(most) * 10 + 9)]
                .map(|limits| NewTurn::among(others(), &limits, &new));
            assert_eq!(by_count, by_room, "each takes ten tokens");
            by_count
        };
        assert_eq!(of(4, 20, 500), NewTurn { at_us: 20, makes_late: false }, "there is a place for each");
        assert_eq!(
            of(3, 20, 500),
            NewTurn { at_us: 20, makes_late: false },
            "the third takes what the first leaves"
        );
        assert_eq!(of(2, 20, 40), NewTurn { at_us: 60, makes_late: false });
        assert_eq!(of(2, 20, 500), NewTurn { at_us: 60, makes_late: false }, "the third waits until 100");
        assert_eq!(of(1, 20, 5), NewTurn { at_us: 100, makes_late: false }, "both have begun");
        assert_eq!(of(1, 20, 20), NewTurn { at_us: 100, makes_late: true });
        assert_eq!(of(2, 75, 40), NewTurn { at_us: 90, makes_late: false }, "it comes after the third");
        let mut tight = others();
        tight[2].due_us = 99;
        let new = turn(9, false, 20, 500, 0);
        assert_eq!(NewTurn::among(tight, &limits(2, 99), &new), NewTurn { at_us: 60, makes_late: true });
    }

    #[test]
    fn a_large_one_waits_for_all_the_room_that_it_takes() {
        let others = || Vec::from([turn(1, true, 10, 50, 0), turn(2, true, 10, 90, 0)]);
        let of = |tokens, limit| {
            let new = Turn { tokens, ..turn(9, false, 20, 10, 0) };
            NewTurn::among(others(), &limits(100, limit), &new).at_us
        };
        assert_eq!([of(10, 30), of(11, 30), of(20, 30), of(21, 30)], [20, 60, 60, 100]);
        assert_eq!(of(500, 30), 100, "it is alone then");
        assert_eq!(of(1, 15), 60, "more than there is room for has begun");
    }

    /// Steps from microsecond to microsecond; says when each begins.
    fn naive(turns: &[Turn], limits: &InstanceSpec) -> Vec<(RequestId, u64)> {
        let mut order = turns.to_vec();
        order.sort_unstable_by_key(|turn| (!turn.begun, turn.at_us, turn.request));
        let (mut there, mut begins, mut now_us) = (Vec::new(), Vec::new(), 0);
        let mut waiting = order.into_iter().peekable();
        while let Some(next) = waiting.peek() {
            there.retain(|(end_us, _)| *end_us > now_us);
            let tokens: u64 = there.iter().map(|(_, tokens)| tokens).sum();
            let fits = there.len() < limits.max_running.unwrap() as usize
                && tokens + next.tokens <= limits.capacity_tokens;
            if next.begun || next.at_us <= now_us && (fits || there.is_empty()) {
                begins.push((next.request, now_us));
                there.push((now_us + next.lasts_us, next.tokens));
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
            turns in proptest::collection::vec((any::<bool>(), 0u64..60, 1u64..40, 0u64..120, 0u64..50), 0..14),
            most in 1u32..6, room in 1u64..120, comes_us in 0u64..60, lasts_us in 1u64..40, tokens in 0u64..50,
        ) {
            let mut left = most;
            let others: Vec<Turn> = (1..).zip(turns).map(|(id, (runs, at_us, lasts_us, due_us, tokens))| {
                let begun = runs && left > 0;
                left -= u32::from(begun);
                Turn { tokens, ..turn(id, begun, if begun { 0 } else { at_us }, lasts_us, due_us) }
            }).collect();
            // Of two that come together the newer one is last.
            let own = Turn { tokens, ..turn(u64::MAX, false, comes_us, lasts_us, 0) };
            let limits = limits(most, room);
            let new = NewTurn::among(others.clone(), &limits, &own);
            let before = naive(&others, &limits);
            let after = naive(&[&others[..], &[own]].concat(), &limits);
            let at = |begins: &[(RequestId, u64)], id| begins.iter().find(|(of, _)| *of == id).map(|(_, us)| *us);
            prop_assert_eq!(Some(new.at_us), at(&after, own.request));
            let late = |begins: &[(RequestId, u64)], turn: &Turn| at(begins, turn.request) > Some(turn.due_us);
            let made = others.iter().any(|turn| late(&after, turn) && !late(&before, turn));
            prop_assert_eq!(new.makes_late, made);
        }
    }
}
