//! SIEVE: one queue in order of arrival, a mark on what was read since, and a hand that goes from the oldest to
//! the newest, takes the mark off what has one and evicts what has none (Zhang et al., NSDI 2024).
//!
//! A read only sets the mark: nothing moves. One thing is added: where every eviction is followed by an arrival, the
//! hand would never come round to those it has passed; after two steps for each entry it starts over.

use crate::entry::{Entries, Link, NONE};

/// How far the hand goes for one victim.
const STEPS_MAX: u32 = 128;
/// After so many marks taken off, the next entry that is not held is the victim, marked or not.
const MARKS_MAX: u32 = 32;

/// Which of an entry's neighbours are those of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueKind {
    /// Entries of one size class.
    Class = 0,
    /// Entries of one tenant.
    Tenant = 1,
}

/// Entries in order of arrival, with a hand.
#[derive(Debug)]
pub(crate) struct Queue {
    of: usize,
    newest: u32,
    oldest: u32,
    hand: u32,
    len: u32,
    /// Steps since the hand was at the oldest.
    turn: u32,
}

impl Queue {
    pub(crate) fn new(of: QueueKind) -> Self {
        Self { of: of as usize, newest: NONE, oldest: NONE, hand: NONE, len: 0, turn: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The entry that would be looked at next.
    pub(crate) fn hand(&self) -> u32 {
        if self.hand == NONE { self.oldest } else { self.hand }
    }

    /// Adds an entry as the newest.
    pub(crate) fn link(&mut self, entries: &mut Entries, number: u32) {
        let newest = self.newest;
        let link = &mut entries.at_mut(number).links[self.of];
        debug_assert!(!link.linked, "an entry is linked once");
        *link = Link { previous: NONE, next: newest, linked: true };
        if newest == NONE {
            self.oldest = number;
        } else {
            entries.at_mut(newest).links[self.of].previous = number;
        }
        self.newest = number;
        self.len += 1;
    }

    /// Takes an entry out; one that is not in is left as it is.
    pub(crate) fn unlink(&mut self, entries: &mut Entries, number: u32) {
        let link = &mut entries.at_mut(number).links[self.of];
        if !std::mem::take(&mut link.linked) {
            return;
        }
        let (previous, next) = (link.previous, link.next);
        (link.previous, link.next) = (NONE, NONE);
        if self.hand == number {
            self.hand = previous;
        }
        if previous == NONE {
            self.newest = next;
        } else {
            entries.at_mut(previous).links[self.of].next = next;
        }
        if next == NONE {
            self.oldest = previous;
        } else {
            entries.at_mut(next).links[self.of].previous = previous;
        }
        self.len -= 1;
    }

    /// The next victim that `may` go, still linked; none when the hand met none within its bound. The hand stays
    /// where it came to, so that the next call looks at others.
    pub(crate) fn victim(
        &mut self,
        entries: &mut Entries,
        now_us: u64,
        may: impl Fn(&crate::entry::Entry) -> bool,
    ) -> Option<u32> {
        let mut marks = 0;
        for _ in 0..self.len.saturating_mul(2).min(STEPS_MAX) {
            self.turn += 1;
            if self.hand == NONE || self.turn > self.len.saturating_mul(2) {
                (self.hand, self.turn) = (self.oldest, 0);
            }
            let number = self.hand;
            let entry = entries.at_mut(number);
            self.hand = entry.links[self.of].previous;
            if !may(entry) {
                continue;
            }
            if entry.visited && marks < MARKS_MAX && !entry.is_expired(now_us) {
                entry.visited = false;
                marks += 1;
                continue;
            }
            self.hand = number;
            return Some(number);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn queue_of(entries: &mut Entries, count: u32) -> (Queue, Vec<u32>) {
        let mut queue = Queue::new(QueueKind::Class);
        let numbers: Vec<u32> = (0..count).map(|_| entries.take()).collect();
        for number in &numbers {
            entries.at_mut(*number).generation = 1;
            queue.link(entries, *number);
        }
        (queue, numbers)
    }

    fn evict(queue: &mut Queue, entries: &mut Entries) -> Option<u32> {
        let victim = queue.victim(entries, 0, |entry| !entry.is_held(0, false))?;
        queue.unlink(entries, victim);
        Some(victim)
    }

    #[test]
    fn what_was_read_outlives_what_was_not_however_old() {
        let mut entries = Entries::new();
        let (mut queue, numbers) = queue_of(&mut entries, 4);
        entries.at_mut(numbers[0]).visited = true;
        assert_eq!(evict(&mut queue, &mut entries), Some(numbers[1]));
        assert_eq!(evict(&mut queue, &mut entries), Some(numbers[2]));
        entries.at_mut(numbers[3]).visited = true;
        assert_eq!(evict(&mut queue, &mut entries), Some(numbers[0]), "the mark counts once");
        assert_eq!(evict(&mut queue, &mut entries), Some(numbers[3]));
        assert_eq!(evict(&mut queue, &mut entries), None);
    }

    #[test]
    fn the_held_are_passed_over_within_a_bound() {
        let mut entries = Entries::new();
        let (mut queue, numbers) = queue_of(&mut entries, 300);
        for number in &numbers[..299] {
            entries.at_mut(*number).soft_pin_us = 10;
        }
        let tries = (0..3)
            .map(|_| queue.victim(&mut entries, 0, |entry| !entry.is_held(0, false)))
            .collect::<Vec<_>>();
        assert_eq!(tries, [None, None, Some(numbers[299])], "each try goes on where the last one ended");
    }

    #[test]
    fn a_queue_of_marks_alone_still_gives_a_victim() {
        let mut entries = Entries::new();
        let (mut queue, numbers) = queue_of(&mut entries, 500);
        numbers.iter().for_each(|number| entries.at_mut(*number).visited = true);
        assert!(evict(&mut queue, &mut entries).is_some());
    }

    proptest::proptest! {
        /// Beside the plain algorithm on a list, with queues too short for the bounds to matter.
        #[test]
        fn it_is_sieve(steps in proptest::collection::vec((0u8..3, 0usize..20), 1..200)) {
            let mut entries = Entries::new();
            let mut queue = Queue::new(QueueKind::Class);
            // Oldest first: number and mark; where the hand is, if it has begun; its steps since then.
            let mut model: VecDeque<(u32, bool)> = VecDeque::new();
            let (mut hand, mut turn) = (None, 0);
            for (what, which) in steps {
                match what {
                    0 if model.len() < 20 => {
                        let number = entries.take();
                        entries.at_mut(number).generation = 1;
                        queue.link(&mut entries, number);
                        model.push_back((number, false));
                    }
                    1 if !model.is_empty() => {
                        let at = which % model.len();
                        model[at].1 = true;
                        entries.at_mut(model[at].0).visited = true;
                    }
                    2 if !model.is_empty() => {
                        let expected = loop {
                            turn += 1;
                            if hand.is_none() || turn > 2 * model.len() {
                                (hand, turn) = (Some(0), 0);
                            }
                            let at = hand.expect("set above");
                            if std::mem::take(&mut model[at].1) {
                                hand = (at + 1 < model.len()).then_some(at + 1);
                                continue;
                            }
                            let (number, _) = model.remove(at).expect("in range");
                            hand = (at < model.len()).then_some(at);
                            break number;
                        };
                        proptest::prop_assert_eq!(evict(&mut queue, &mut entries), Some(expected));
                        entries.free(expected);
                    }
                    _ => {}
                }
                proptest::prop_assert_eq!(queue.len() as usize, model.len());
            }
        }
    }

    #[test]
    fn an_entry_that_the_hand_has_passed_is_met_again_while_others_come_and_go() {
        let mut entries = Entries::new();
        let (mut queue, numbers) = queue_of(&mut entries, 10);
        entries.at_mut(numbers[0]).visited = true;
        let mut evicted = Vec::new();
        for _ in 0..40 {
            evicted.extend(evict(&mut queue, &mut entries));
            let number = entries.take();
            entries.at_mut(number).generation = 1;
            queue.link(&mut entries, number);
        }
        assert!(evicted.contains(&numbers[0]));
    }
}
