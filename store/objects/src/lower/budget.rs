//! Bytes that may be in hand at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A bound on the bytes that are in use at a time.
#[derive(Debug)]
pub(crate) struct Budget {
    used: AtomicU64,
    most: u64,
    /// Smallest charge per part, which also bounds the number of parts.
    least: u64,
}

/// A part of it, until it is dropped.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    /// So many bytes, for so many at a time.
    pub(crate) fn new(most: u64, count: u64) -> Arc<Self> {
        Arc::new(Self { used: AtomicU64::new(0), most, least: (most / count).max(1) })
    }

    /// A part of it, if there is as much. One alone may have more than there is.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Option<BudgetShare> {
        let bytes = bytes.max(self.least);
        let more = |used: u64| (used == 0 || used + bytes <= self.most).then_some(used + bytes);
        self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).ok()?;
        Some(BudgetShare { budget: Arc::clone(self), bytes })
    }

    /// Bytes that are taken.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    pub(crate) fn is_free(&self) -> bool {
        self.used_bytes() == 0
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_count_have_a_bound_and_come_back() {
        let budget = Budget::new(100, 4);
        let large = budget.take(1_000).unwrap();
        assert!(budget.take(1).is_none(), "one alone may have more, others wait");
        drop(large);
        let small: Vec<BudgetShare> = (0..4).map(|_| budget.take(1).unwrap()).collect();
        assert!(budget.take(1).is_none() && !budget.is_free());
        drop(small);
        assert!(budget.is_free() && budget.take(100).is_some());
    }
}
