//! Time since the start of a run.

use std::time::{Duration, Instant};

/// Returns µs since a moment that all parts of a run share.
#[derive(Clone, Copy, Debug)]
pub struct RunClock {
    zero: Instant,
}

impl RunClock {
    /// A clock that shows 0 after `delay`.
    pub fn starting_in(delay: Duration) -> Self {
        Self { zero: Instant::now() + delay }
    }

    /// µs since zero; 0 before it.
    pub fn now_us(&self) -> u64 {
        u64::try_from(self.zero.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// How long it is until the clock shows `at_us`; nothing when that is over.
    pub fn until(&self, at_us: u64) -> Duration {
        (self.zero + Duration::from_micros(at_us)).saturating_duration_since(Instant::now())
    }
}
