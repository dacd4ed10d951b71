//! When each flight next changes by itself: a binary heap with one entry a flight, indexed by slot,
//! so that a new rate moves the entry and leaves nothing stale behind.

use crate::network::TransferId;

/// Not in the heap.
const ABSENT: u32 = u32::MAX;

/// One flight's next event. Ordered by time, then by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Timer {
    pub(crate) at_ns: u64,
    pub(crate) id: TransferId,
    pub(crate) slot: u32,
}

/// The heap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers {
    heap: Vec<Timer>,
    place: Vec<u32>,
}

impl Timers {
    /// The earliest event.
    pub(crate) fn first(&self) -> Option<Timer> {
        self.heap.first().copied()
    }

    /// When `slot` is due, if it is.
    pub(crate) fn due_ns(&self, slot: u32) -> Option<u64> {
        let place = self.place.get(slot as usize).copied().filter(|&p| p != ABSENT)?;
        Some(self.heap[place as usize].at_ns)
    }

    /// Sets or moves the one event of `timer.slot`.
    pub(crate) fn set(&mut self, timer: Timer) {
        let slot = timer.slot as usize;
        if slot >= self.place.len() {
            self.place.resize(slot + 1, ABSENT);
        }
        let place = self.place[slot];
        if place == ABSENT {
            self.heap.push(timer);
            self.rise(self.heap.len() - 1);
            return;
        }
        let place = place as usize;
        let earlier = timer < self.heap[place];
        self.heap[place] = timer;
        if earlier { self.rise(place) } else { self.sink(place) }
    }

    /// Drops the event of `slot`, if it has one.
    pub(crate) fn clear(&mut self, slot: u32) {
        let Some(&place) = self.place.get(slot as usize) else { return };
        if place == ABSENT {
            return;
        }
        let place = place as usize;
        self.place[slot as usize] = ABSENT;
        self.heap.swap_remove(place);
        if place < self.heap.len() {
            self.sink(place);
            self.rise(place);
        }
    }

    /// Takes the earliest event if it is due at `at_ns` or before.
    pub(crate) fn pop_due(&mut self, at_ns: u64) -> Option<Timer> {
        let first = self.first().filter(|timer| timer.at_ns <= at_ns)?;
        self.clear(first.slot);
        Some(first)
    }

    /// Whether every entry is where its slot says and none is earlier than its parent.
    pub(crate) fn is_sound(&self) -> bool {
        let placed = self.place.iter().filter(|&&p| p != ABSENT).count();
        let ordered = |i: usize| i == 0 || self.heap[(i - 1) / 2] <= self.heap[i];
        let indexed = |i: usize, t: &Timer| self.place.get(t.slot as usize).is_some_and(|&p| p as usize == i);
        placed == self.heap.len() && self.heap.iter().enumerate().all(|(i, t)| ordered(i) && indexed(i, t))
    }

    fn rise(&mut self, mut at: usize) {
        let timer = self.heap[at];
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.heap[parent] <= timer {
                break;
            }
            self.put(at, self.heap[parent]);
            at = parent;
        }
        self.put(at, timer);
    }

    fn sink(&mut self, mut at: usize) {
        let timer = self.heap[at];
        loop {
            let left = 2 * at + 1;
            let Some(&first) = self.heap.get(left) else { break };
            let (child, entry) = match self.heap.get(left + 1) {
                Some(&second) if second < first => (left + 1, second),
                _ => (left, first),
            };
            if timer <= entry {
                break;
            }
            self.put(at, entry);
            at = child;
        }
        self.put(at, timer);
    }

    #[expect(clippy::cast_possible_truncation, reason = "slots are u32, one entry each")]
    fn put(&mut self, at: usize, timer: Timer) {
        self.heap[at] = timer;
        self.place[timer.slot as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn timer(slot: u32, at_ns: u64) -> Timer {
        Timer { at_ns, id: TransferId(u64::from(1000 - slot)), slot }
    }

    #[test]
    fn equal_times_go_by_name() {
        let mut timers = Timers::default();
        for slot in 0..5 {
            timers.set(timer(slot, 7));
        }
        let mut names = Vec::new();
        while let Some(due) = timers.pop_due(7) {
            names.push(due.id.0);
        }
        assert_eq!(names, [996, 997, 998, 999, 1000]);
    }

    #[test]
    fn clearing_what_is_not_there_does_nothing() {
        let mut timers = Timers::default();
        timers.clear(9);
        timers.set(timer(1, 5));
        timers.clear(0);
        timers.clear(1);
        timers.clear(1);
        assert_eq!(timers.first(), None);
        assert_eq!(timers.due_ns(1), None);
        assert!(timers.is_sound());
    }

    proptest! {
        #[test]
        fn behaves_as_a_sorted_map(
            ops in proptest::collection::vec((0u8..4, 0u32..24, 0u64..50), 1..200),
        ) {
            let mut timers = Timers::default();
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            for (op, slot, at_ns) in ops {
                match op {
                    0 | 1 => {
                        timers.set(timer(slot, at_ns));
                        model.insert(slot, at_ns);
                    }
                    2 => {
                        timers.clear(slot);
                        model.remove(&slot);
                    }
                    _ => {
                        let due = model.iter().map(|(&s, &t)| timer(s, t)).min();
                        let due = due.filter(|t| t.at_ns <= at_ns);
                        prop_assert_eq!(timers.pop_due(at_ns), due);
                        if let Some(due) = due {
                            model.remove(&due.slot);
                        }
                    }
                }
                prop_assert!(timers.is_sound());
                prop_assert_eq!(timers.due_ns(slot), model.get(&slot).copied());
            }
        }
    }
}
