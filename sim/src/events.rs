//! The event queue: by time, then by order of scheduling, so that a run repeats bit for bit.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Something that will happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// The next request of the workload arrives.
    Arrival,
    /// A client comes back after a refusal, or a request is sent on by its client's schedule.
    Retry(u32),
    /// A client leaves.
    Cancel(u32, u32),
    /// An engine's stride is due.
    Engine(u32, u32),
    /// A pipelined pass leaves an engine.
    Pipeline(u32),
    /// A transfer is due.
    Transfers,
    /// A conductor wants to be woken.
    Conductor(u32),
    /// News about a cache reach a conductor.
    News(u32),
    /// A fault of the plan strikes.
    Fault(u32),
    /// Time to sample loads.
    Sample,
}

/// Events by time.
#[derive(Debug, Default)]
pub struct Events {
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
}

impl Events {
    /// Schedules an event.
    pub fn push(&mut self, at_us: u64, event: Event) {
        self.sequence += 1;
        self.heap.push(Reverse((at_us, self.sequence, event)));
    }

    /// The next event's time.
    #[must_use]
    pub fn next_us(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((at_us, ..))| *at_us)
    }

    /// Whether nothing will happen any more.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Takes the next event if it is due at `now_us`.
    pub fn pop_at(&mut self, now_us: u64) -> Option<Event> {
        if self.next_us()? > now_us {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, event))| event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_keep_the_order_of_scheduling() {
        let mut events = Events::default();
        events.push(5, Event::Sample);
        events.push(3, Event::Transfers);
        events.push(5, Event::Arrival);
        assert_eq!(events.next_us(), Some(3));
        assert_eq!(events.pop_at(2), None);
        assert_eq!(events.pop_at(3), Some(Event::Transfers));
        assert_eq!(events.pop_at(9), Some(Event::Sample));
        assert_eq!(events.pop_at(9), Some(Event::Arrival));
        assert_eq!(events.pop_at(9), None);
    }
}
