//! The conductor's own pauses: a process that was stopped, a machine that was moved or asleep, a turn that took long.
//!
//! Nobody can be heard while the conductor itself is away. It knows when it meant to look at its clock again; where it
//! looks much later, nodes and stages get that time back, and what was said meanwhile is taken in before anything is
//! given up. Clients' own limits go on: their time passed.

use std::time::Duration;

use super::driver::Driver;

/// A turn that comes later than this, or takes longer, is a pause, µs.
const PAUSE_LEAST_US: u64 = 250_000;

/// Detects the conductor's own pauses, and measures them.
pub(super) struct PauseWatch {
    /// When the next turn begins at the latest, µs; never where nothing was planned.
    due_us: u64,
    /// When the present turn began, µs; moved on by a pause within it.
    begun_us: u64,
    /// Messages in the inbox at the begin of this turn, beside those of the turn.
    pub(super) waiting: usize,
    /// Messages from before the end of the latest pause that are not taken in yet.
    pub(super) behind: usize,
}

impl Default for PauseWatch {
    fn default() -> Self {
        Self { due_us: u64::MAX, begun_us: 0, waiting: 0, behind: 0 }
    }
}

impl Driver {
    /// How long nothing need be done if nothing comes in, from now on.
    pub(super) fn rest(&mut self) -> Duration {
        let wake = self.next_wake();
        // From the turn's last message on: a pause after that counts as one before the next turn.
        self.away.due_us = self.now_us + u64::try_from(wake.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.away.due_us.saturating_sub((self.clock)()).max(50))
    }

    /// A turn of `messages` begins: notices whether it comes too late.
    pub(super) fn begin_turn(&mut self, messages: usize) {
        self.now_us = (self.clock)();
        let due_us = std::mem::replace(&mut self.away.due_us, u64::MAX);
        let late_us = self.now_us.saturating_sub(due_us);
        self.away.begun_us = self.now_us;
        if late_us > PAUSE_LEAST_US {
            self.came_back(late_us);
            self.away.behind = self.away.waiting;
        } else {
            // Those of this turn were counted among its own, not among the waiting.
            self.away.behind = if messages == 0 { 0 } else { self.away.behind.saturating_sub(messages) };
        }
    }

    /// Notices whether the turn took so long that the conductor was away in the middle of it.
    pub(super) fn notice_a_pause(&mut self) {
        let spent_us = self.now_us.saturating_sub(self.away.begun_us);
        if spent_us > PAUSE_LEAST_US {
            self.came_back(spent_us);
            self.away.behind = self.away.behind.max(self.away.waiting);
        }
    }

    /// The last `pause_us` count for nobody: no node was silent in them, and no stage took them.
    fn came_back(&mut self, pause_us: u64) {
        let now_us = self.now_us;
        tracing::warn!(
            pause_ms = pause_us / 1000,
            "this conductor was itself away: no node counts as silent for that time, and no stage as late"
        );
        self.fleet.excuse(pause_us, now_us);
        self.pairs.excuse(now_us, pause_us);
    }
}
