//! The event queue: by time, then engines in order of their ids, then by order of scheduling.
//!
//! So a run repeats bit for bit. The order within a moment does not depend on when an engine scheduled
//! its events: a stepped engine schedules them later than a fast-forwarded one.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Something that will happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// The next request of the workload arrives.
    Arrival,
    /// A client comes back after a refusal: its slot, and which use of the slot it is.
    Retry(u32, u32),
    /// A client leaves: its slot, and which use of the slot it is.
    Cancel(u32, u32),
    /// An engine's stride is due.
    Engine(u32, u32),
    /// A pipelined pass leaves an engine.
    Pipeline(u32),
    /// The network has something due.
    Network,
    /// The next deadline of a conductor.
    Conductor(u32),
    /// The next deadline of a conductor's pairs.
    Pairs(u32),
    /// News about a cache reach a conductor.
    DelayedDue(u32),
    /// A fault of the plan strikes.
    Fault(u32),
    /// Time to sample loads.
    Sample,
}

/// Rank of everything but engines within a moment.
const LATER: u32 = u32::MAX;

impl Event {
    const fn rank(self) -> u32 {
        match self {
            Self::Engine(node, _) => 2 * node,
            Self::Pipeline(node) => 2 * node + 1,
            _ => LATER,
        }
    }
}

/// Time, rank, order of scheduling.
type Key = (u64, u32, u64);

/// Events by time.
#[derive(Debug, Default)]
pub struct Events {
    heap: BinaryHeap<Reverse<(Key, Event)>>,
    sequence: u64,
}

impl Events {
    /// Schedules an event.
    pub fn push(&mut self, at_us: u64, event: Event) {
        self.sequence += 1;
        self.heap.push(Reverse(((at_us, event.rank(), self.sequence), event)));
    }

    /// The next event's time.
    #[must_use]
    pub fn next_us(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse(((at_us, ..), _))| *at_us)
    }

    /// Whether the next event is an engine's, at `now_us`.
    #[must_use]
    pub fn engine_is_next_at(&self, now_us: u64) -> bool {
        self.heap.peek().is_some_and(|Reverse(((at_us, rank, _), _))| *at_us <= now_us && *rank != LATER)
    }

    /// Whether no event is scheduled.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Takes the next event if it is due at `now_us`.
    pub fn pop_at(&mut self, now_us: u64) -> Option<Event> {
        if self.next_us()? > now_us {
            return None;
        }
        self.heap.pop().map(|Reverse((_, event))| event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_come_first_and_in_order_whenever_they_were_scheduled() {
        let mut events = Events::default();
        for event in [Event::Sample, Event::Engine(7, 1), Event::Pipeline(2), Event::Engine(2, 9)] {
            events.push(5, event);
        }
        assert!(events.engine_is_next_at(5) && !events.engine_is_next_at(4));
        assert_eq!(events.pop_at(5), Some(Event::Engine(2, 9)));
        assert_eq!(events.pop_at(5), Some(Event::Pipeline(2)));
        assert_eq!(events.pop_at(5), Some(Event::Engine(7, 1)));
        assert!(!events.engine_is_next_at(5));
        assert_eq!(events.pop_at(5), Some(Event::Sample));
    }

    #[test]
    fn ties_keep_the_order_of_scheduling() {
        let mut events = Events::default();
        events.push(5, Event::Sample);
        events.push(3, Event::Network);
        events.push(5, Event::Arrival);
        assert_eq!(events.next_us(), Some(3));
        assert_eq!(events.pop_at(2), None);
        assert_eq!(events.pop_at(3), Some(Event::Network));
        assert_eq!(events.pop_at(9), Some(Event::Sample));
        assert_eq!(events.pop_at(9), Some(Event::Arrival));
        assert_eq!(events.pop_at(9), None);
    }
}
