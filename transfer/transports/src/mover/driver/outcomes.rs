//! Outcomes, kept for those who ask late.

use std::collections::{HashMap, VecDeque};

use baton_transfer::BatchId;

use super::batch::Outcome;

/// The last so many outcomes.
pub(super) struct Outcomes {
    kept: HashMap<BatchId, Outcome>,
    order: VecDeque<BatchId>,
    bound: usize,
}

impl Outcomes {
    pub(super) fn new(bound: usize) -> Self {
        Self { kept: HashMap::new(), order: VecDeque::new(), bound: bound.max(1) }
    }

    pub(super) fn get(&self, batch: BatchId) -> Option<&Outcome> {
        self.kept.get(&batch)
    }

    /// Keeps one; the oldest beyond the bound go.
    pub(super) fn keep(&mut self, batch: BatchId, outcome: Outcome) {
        self.kept.insert(batch, outcome);
        self.order.push_back(batch);
        while self.order.len() > self.bound {
            if let Some(old) = self.order.pop_front() {
                self.kept.remove(&old);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first() {
        let mut outcomes = Outcomes::new(2);
        for batch in 1..=3 {
            outcomes.keep(BatchId(batch), Outcome::Cancelled { remote_fenced: true });
        }
        assert_eq!(outcomes.get(BatchId(1)), None);
        assert!(outcomes.get(BatchId(2)).is_some() && outcomes.get(BatchId(3)).is_some());
    }
}
