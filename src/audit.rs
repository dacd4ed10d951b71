//! The books of cores are looked over while they serve: a ledger that is broken is said so, and counted.
//!
//! Such an audit costs a pass over all open requests. It therefore runs seldom: every ten seconds, and for at most a
//! thousandth of the time.

use std::time::{Duration, Instant};

/// Time between two looks at least.
const EVERY: Duration = Duration::from_secs(10);
/// So many times as long as a look takes passes before the next.
const WEIGHT: u32 = 1_000;

/// When the next look is due, and what was found so far.
pub struct Audit {
    due: Instant,
    looks: u64,
    failures: u64,
}

impl Audit {
    /// The first look is due after [`EVERY`].
    pub fn new(now: Instant) -> Self {
        Self { due: now + EVERY, looks: 0, failures: 0 }
    }

    /// Whether a look is due; the caller then makes it, and says so with [`Audit::looked`].
    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// A look began at `begun` and is over `now`; true if it found a broken ledger.
    pub fn looked(
        &mut self,
        whose: &str,
        (begun, now): (Instant, Instant),
        found: Result<(), String>,
    ) -> bool {
        let took = now.saturating_duration_since(begun);
        self.due = now + EVERY.max(took.saturating_mul(WEIGHT));
        self.looks += 1;
        let Err(why) = found else { return false };
        self.failures += 1;
        tracing::error!(
            whose,
            why,
            "a ledger is broken: what was decided from it may be wrong; report this, with the journal if there is one"
        );
        true
    }

    /// Looks so far.
    #[cfg(test)]
    pub const fn looks(&self) -> u64 {
        self.looks
    }

    /// Looks that found a broken ledger.
    pub const fn failures(&self) -> u64 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_seldom_and_the_slower_the_seldomer() {
        let start = Instant::now();
        let mut audit = Audit::new(start);
        assert!(!audit.is_due(start + EVERY - Duration::from_nanos(1)) && audit.is_due(start + EVERY));
        let at = start + EVERY;
        audit.looked("a test", (at, at + Duration::from_millis(1)), Ok(()));
        assert!(!audit.is_due(at + EVERY) && audit.is_due(at + EVERY + Duration::from_millis(1)));
        let at = at + 2 * EVERY;
        audit.looked("a test", (at, at + Duration::from_secs(1)), Ok(()));
        assert!(
            !audit.is_due(at + Duration::from_secs(1_000)) && audit.is_due(at + Duration::from_secs(1_001))
        );
    }

    #[test]
    fn what_is_broken_is_counted_and_looked_at_again() {
        let start = Instant::now();
        let mut audit = Audit::new(start);
        assert!(!audit.looked("a test", (start, start), Ok(())));
        assert!(audit.looked("a test", (start, start), Err("two and two are five".into())));
        assert_eq!((audit.failures(), audit.looks()), (1, 2));
        assert!(audit.is_due(start + EVERY));
    }
}
