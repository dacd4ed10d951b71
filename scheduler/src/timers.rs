//! Wake-ups: one live entry per instance, the earliest first.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use baton_types::InstanceId;
use core::cmp::Reverse;

/// When each instance's queue must be run again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(u64, InstanceId)>>,
    due: Vec<u64>,
}

impl Timers {
    /// Sets an instance's wake-up, replacing the one that it had.
    pub(crate) fn set(&mut self, instance: InstanceId, at_us: u64) {
        let index = instance.index();
        if index >= self.due.len() {
            self.due.resize(index + 1, u64::MAX);
        }
        if self.due[index] != at_us {
            self.due[index] = at_us;
            self.heap.push(Reverse((at_us, instance)));
        }
    }

    /// Forgets an instance's wake-up.
    pub(crate) fn unset(&mut self, instance: InstanceId) {
        if let Some(due) = self.due.get_mut(instance.index()) {
            *due = u64::MAX;
        }
    }

    /// Each instance's wake-up, `u64::MAX` where it has none.
    pub(crate) fn save(&self) -> Vec<u64> {
        self.due.clone()
    }

    /// Wake-ups as they were saved.
    pub(crate) fn restore(due: Vec<u64>) -> Self {
        let set = (0..).map(InstanceId).zip(&due).filter(|(_, at_us)| **at_us != u64::MAX);
        Self { heap: set.map(|(id, at_us)| Reverse((*at_us, id))).collect(), due }
    }

    /// The next wake-up, if any.
    pub(crate) fn next(&mut self) -> Option<u64> {
        while let Some(&Reverse((at_us, instance))) = self.heap.peek() {
            if self.due[instance.index()] == at_us {
                return Some(at_us);
            }
            self.heap.pop();
        }
        None
    }

    /// Removes and returns one instance whose wake-up time has come.
    pub(crate) fn pop_due(&mut self, now_us: u64) -> Option<InstanceId> {
        if self.next()? > now_us {
            return None;
        }
        let Reverse((at_us, instance)) = self.heap.pop()?;
        assert!(
            at_us == self.due[instance.index()] && at_us <= now_us,
            "{instance} is woken at another time"
        );
        self.unset(instance);
        Some(instance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_wake_up_replaces_the_older() {
        let mut timers = Timers::default();
        timers.set(InstanceId(1), 50);
        timers.set(InstanceId(0), 40);
        timers.set(InstanceId(1), 30);
        assert_eq!(timers.next(), Some(30));
        assert_eq!(timers.pop_due(29), None);
        assert_eq!(timers.pop_due(45), Some(InstanceId(1)));
        assert_eq!(timers.pop_due(45), Some(InstanceId(0)));
        assert_eq!(timers.pop_due(99), None, "the stale entry at 50 is gone");
        timers.set(InstanceId(2), 7);
        timers.unset(InstanceId(2));
        assert_eq!(timers.next(), None);
    }
}
