//! Whether a stage that waits behind others is late, or only waits for them.

/// A request is late when this many times as many were served before it as can have been ahead of it: each is
/// counted by both of its instances, and moved ones come back into the line.
const TURN_SLACK: u64 = 4;

/// The progress of an instance. A stage that waits behind others is not late while this grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pace {
    /// Prefills that it ended.
    pub prefilled: u64,
    /// Hand-offs that it was a side of and that were verified.
    pub handed: u64,
    /// Answers that it decoded to their end: each makes room for KV that waits.
    pub answered: u64,
}

/// A request's place among those that are in the same stage on the same instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StageProgress {
    /// Progress of its instances when the stage began, and when its time was last over.
    begun: u64,
    seen: u64,
    /// Requests that may have been ahead of it; 0: not yet counted.
    ahead: u64,
}

impl StageProgress {
    pub(super) const fn new(done: u64) -> Self {
        Self { begun: done, seen: done, ahead: 0 }
    }

    /// Whether its instances got on since its time was last over. Only where they did not, others need be looked at, in a
    /// pass over all requests.
    pub(super) const fn gets_on(&self, done: u64) -> bool {
        done > self.seen
    }

    /// Whether its instances got on since its time was last over, and not so far that its turn must have come.
    /// `others`: it may wait for others that have time still. `live` counts the requests under way.
    pub(super) const fn is_to_come(&mut self, done: u64, others: bool, live: u64) -> bool {
        debug_assert!(live > 0, "itself at least is under way");
        if self.ahead == 0 {
            self.ahead = live;
        }
        let gets_on = self.gets_on(done);
        self.seen = done;
        (gets_on || others) && done.saturating_sub(self.begun) <= TURN_SLACK * self.ahead
    }
}
