//! Bytes that all connections together may have for commands that come in and answers that wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of each connection outside the budget: its buffers while it does nothing large.
pub(super) const FREE_BYTES: usize = 128 * 1024;

/// A bound on the bytes that all connections together hold.
#[derive(Debug)]
pub(super) struct Budget {
    used: AtomicU64,
    most: u64,
}

impl Budget {
    pub(super) fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { used: AtomicU64::new(0), most })
    }

    /// Bytes that connections have beyond what each may have anyway.
    pub(super) fn used_bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The part of one connection, which has nothing yet.
    pub(super) fn part(self: &Arc<Self>) -> Part {
        Part { budget: Arc::clone(self), bytes: 0 }
    }
}

/// The share of one connection in the budget; given back when it ends.
#[derive(Debug)]
pub(super) struct Part {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Part {
    fn above_free(weight: usize) -> u64 {
        weight.saturating_sub(FREE_BYTES) as u64
    }

    /// The connection weighs this much now.
    pub(super) fn weigh(&mut self, weight: usize) {
        let bytes = Self::above_free(weight);
        if bytes >= self.bytes {
            self.budget.used.fetch_add(bytes - self.bytes, Ordering::Relaxed);
        } else {
            self.budget.used.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
        }
        self.bytes = bytes;
    }

    /// Whether there is too much, and some of it here.
    pub(super) fn is_over(&self) -> bool {
        self.bytes > 0 && self.budget.used_bytes() > self.budget.most
    }

    /// Takes what a connection of this weight has, if there is as much. Else nothing changes.
    pub(super) fn try_weigh(&mut self, weight: usize) -> bool {
        let bytes = Self::above_free(weight);
        let more = bytes.saturating_sub(self.bytes);
        let taken = |used: u64| (more == 0 || used + more <= self.budget.most).then_some(used + more);
        if self.budget.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_err() {
            return false;
        }
        self.bytes += more;
        true
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_each_may_have_is_free_and_the_rest_is_shared_and_comes_back() {
        let budget = Budget::new(1_000);
        let (mut one, mut other) = (budget.part(), budget.part());
        assert!(one.try_weigh(FREE_BYTES) && one.try_weigh(FREE_BYTES + 600));
        assert!(!other.try_weigh(FREE_BYTES + 401) && other.try_weigh(FREE_BYTES + 400));
        assert_eq!(budget.used_bytes(), 1_000);
        one.weigh(FREE_BYTES + 100);
        assert!(other.try_weigh(FREE_BYTES + 900), "what one gave back");
        other.weigh(FREE_BYTES + 2_000);
        assert_eq!(budget.used_bytes(), 2_100, "what is there is counted, also when it is too much");
        assert!(one.try_weigh(FREE_BYTES + 100) && !one.try_weigh(FREE_BYTES + 101));
        drop((one, other));
        assert_eq!(budget.used_bytes(), 0);
    }
}
