//! Whether the thread that does a node's work still turns: a heartbeat is to tell of it, not of the line alone.

use std::time::Duration;

use parking_lot::Mutex;

/// How long the thread may be at one thing: longer than any pass of an engine, and than any wait for its disk.
const STILL_MOST: Duration = Duration::from_secs(30);

/// Whether a node's worker thread makes progress. It counts time in heartbeats, so that a pause of the whole
/// process does not count against the thread.
#[derive(Debug, Default)]
pub(super) struct Pulse(Mutex<PulseState>);

#[derive(Debug, Default)]
struct PulseState {
    turns: Option<u64>,
    still: Duration,
}

impl Pulse {
    /// Takes in how often the thread has turned, `after` the last look. False: it stands still for too long.
    pub(super) fn turns(&self, turns: Option<u64>, after: Duration) -> bool {
        let mut seen = self.0.lock();
        if turns.is_none() || turns != seen.turns {
            *seen = PulseState { turns, still: Duration::ZERO };
            return true;
        }
        seen.still = seen.still.saturating_add(after);
        seen.still < STILL_MOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_turns_lives_and_one_that_stands_still_for_too_long_does_not() {
        let (pulse, second) = (Pulse::default(), Duration::from_secs(1));
        assert!((0..1_000).all(|turn| pulse.turns(Some(turn), second)));
        let lived = (0..100).take_while(|_| pulse.turns(Some(999), second)).count();
        assert_eq!(lived, 29);
        assert!(!pulse.turns(Some(999), second), "it stays so");
        assert!(pulse.turns(Some(1_000), second), "it turns again");
        assert!(
            (0..100).all(|_| pulse.turns(None, second)),
            "where there is no thread nothing is asked of it"
        );
    }
}
