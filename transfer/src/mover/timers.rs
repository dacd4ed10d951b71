//! When what is due.

use alloc::collections::BTreeSet;

/// Whose time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// The batch in this slot: its deadline, or the end of its grace.
    Batch(u32),
    /// The path in this slot: silence, or a probe not answered.
    Path(u32),
    /// The peer in this slot: a route has rested, or takes long to open.
    Peer(u32),
    /// A path has been held for its turn while peers wait.
    Turn,
}

/// Timers in order of time. Each owner keeps when its own is due, and has one at most.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers {
    due: BTreeSet<(u64, Timer)>,
}

impl Timers {
    /// Sets, moves or (with none) clears the timer of which `kept` is the owner's note.
    pub(crate) fn set(&mut self, timer: Timer, kept: &mut Option<u64>, at_us: Option<u64>) {
        if *kept == at_us {
            return;
        }
        if let Some(old_us) = *kept {
            self.due.remove(&(old_us, timer));
        }
        if let Some(at_us) = at_us {
            self.due.insert((at_us, timer));
        }
        *kept = at_us;
    }

    pub(crate) fn first_us(&self) -> Option<u64> {
        self.due.first().map(|&(at_us, _)| at_us)
    }

    /// Takes the first that is due; its owner must clear its note.
    pub(crate) fn pop_due(&mut self, now_us: u64) -> Option<Timer> {
        if self.first_us()? > now_us {
            return None;
        }
        self.due.pop_first().map(|(_, timer)| timer)
    }

    pub(crate) fn holds(&self, timer: Timer, at_us: u64) -> bool {
        self.due.contains(&(at_us, timer))
    }

    pub(crate) fn len(&self) -> usize {
        self.due.len()
    }
}
