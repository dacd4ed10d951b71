//! Whether the SSD answers at all: who asks one that does not would wait for nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A disk that has something to read and does not end anything for so long is not asked for more.
const STALL_AFTER: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct State {
    /// Reads that were not answered.
    open: u64,
    /// When the disk ended something, or was asked after it had nothing to do.
    since: Instant,
}

/// Whether the SSD answers. The reads in progress are the probe: when one of them ends, the disk is used again.
#[derive(Clone, Debug)]
pub(super) struct Pulse {
    state: Arc<Mutex<State>>,
}

/// A read that was not answered; it is once this is dropped.
#[derive(Debug)]
pub(super) struct PendingAnswer(Pulse);

impl Default for Pulse {
    fn default() -> Self {
        Self { state: Arc::new(Mutex::new(State { open: 0, since: Instant::now() })) }
    }
}

impl Pulse {
    /// The disk is asked for something.
    pub(super) fn start(&self) -> PendingAnswer {
        let mut state = self.state.lock();
        if state.open == 0 {
            state.since = Instant::now();
        }
        state.open += 1;
        PendingAnswer(self.clone())
    }

    /// The disk has ended something.
    pub(super) fn beat(&self) {
        self.state.lock().since = Instant::now();
    }

    /// Whether it is not worth asking.
    pub(super) fn is_stalled(&self) -> bool {
        self.is_stalled_for(STALL_AFTER)
    }

    fn is_stalled_for(&self, time: Duration) -> bool {
        let state = self.state.lock();
        state.open > 0 && state.since.elapsed() > time
    }
}

impl Drop for PendingAnswer {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.open -= 1;
        state.since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_stalled_while_it_owes_an_answer_and_ends_nothing() {
        let (pulse, moment) = (Pulse::default(), Duration::from_millis(1));
        let is_stalled = |pulse: &Pulse| {
            let end = Instant::now() + 20 * moment;
            while Instant::now() < end {
                std::thread::yield_now();
            }
            pulse.is_stalled_for(moment)
        };
        assert!(!is_stalled(&pulse), "it was asked for nothing");
        let (one, other) = (pulse.start(), pulse.start());
        assert!(!pulse.is_stalled() && is_stalled(&pulse));
        pulse.beat();
        assert!(!pulse.is_stalled() && is_stalled(&pulse));
        drop(one);
        assert!(!pulse.is_stalled() && is_stalled(&pulse));
        drop(other);
        assert!(!is_stalled(&pulse));
    }
}
