//! Which thread that takes a path's answers sleeps, so that the server wakes the right one.

use std::sync::{Mutex, PoisonError};

use super::rings::{Rings, Sleeper};

/// Which thread that takes a path's answers sleeps.
#[derive(Default)]
pub(super) struct SleepState {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    thread_asleep: bool,
    /// Callers that wait for their queue.
    callers: u32,
}

impl SleepState {
    /// The I/O thread is about to sleep, or awake again.
    pub(super) fn thread(&self, rings: &Rings, asleep: bool) {
        self.change(rings, |state| state.thread_asleep = asleep);
    }

    /// A caller is about to sleep, or awake again.
    pub(super) fn caller(&self, rings: &Rings, asleep: bool) {
        self.change(rings, |state| if asleep { state.callers += 1 } else { state.callers -= 1 });
    }

    /// Publishes the new state under the lock, so that the last decision is also the last one published.
    fn change(&self, rings: &Rings, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        rings.opener_sleeps(match *state {
            State { callers: 1.., .. } => Sleeper::Caller,
            State { thread_asleep: true, .. } => Sleeper::Thread,
            State { .. } => Sleeper::Nobody,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::shm::rings::Answer;

    #[test]
    fn callers_are_woken_before_the_thread_and_the_thread_before_nobody() {
        let (rings, sleep_state) = (Rings::create(4).unwrap(), SleepState::default());
        let wakes = || {
            rings.answer(&Answer::default());
            rings.take_sleeper()
        };
        assert_eq!(wakes(), Sleeper::Nobody);
        sleep_state.thread(&rings, true);
        sleep_state.caller(&rings, true);
        sleep_state.caller(&rings, true);
        assert_eq!((wakes(), wakes()), (Sleeper::Caller, Sleeper::Nobody));
        sleep_state.caller(&rings, false);
        assert_eq!(wakes(), Sleeper::Caller);
        sleep_state.caller(&rings, false);
        assert_eq!(wakes(), Sleeper::Thread);
        sleep_state.thread(&rings, false);
        assert_eq!(wakes(), Sleeper::Nobody);
    }
}
