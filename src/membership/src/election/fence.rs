//! A fence for the recipients of leaders' orders: after a newer leader it rejects every older one.

use std::sync::atomic::{AtomicU64, Ordering};

/// The highest token seen.
#[derive(Debug, Default)]
pub struct Fence {
    highest: AtomicU64,
}

impl Fence {
    /// A fence that has seen nobody.
    #[must_use]
    pub const fn new() -> Self {
        Self { highest: AtomicU64::new(0) }
    }

    /// Lets the leader with `token` pass, and from then on none with a lower one.
    ///
    /// # Errors
    /// The higher token that has passed already: the holder of `token` is no longer the leader.
    pub fn pass(&self, token: u64) -> Result<(), u64> {
        let before = self.highest.fetch_max(token, Ordering::AcqRel);
        if token >= before { Ok(()) } else { Err(before) }
    }

    /// The highest token that has passed; 0: none.
    #[must_use]
    pub fn highest(&self) -> u64 {
        self.highest.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_older_leader_passes_after_a_newer() {
        let fence = Fence::new();
        assert_eq!(fence.pass(5), Ok(()));
        assert_eq!(fence.pass(5), Ok(()), "the same leader goes on");
        assert_eq!(fence.pass(4), Err(5));
        assert_eq!((fence.pass(9), fence.pass(5), fence.highest()), (Ok(()), Err(9), 9));
    }
}
