//! The batches that are kept, and what is held now.

use bytes::Bytes;
use std::collections::VecDeque;

use super::ledger::Ledger;
use super::{PublishedBatch, PublisherConfig};
use crate::model::Event;

/// The last batches, by number without a hole.
#[derive(Debug)]
pub(super) struct History {
    kept: VecDeque<Bytes>,
    kept_bytes: usize,
    next: u64,
    max_batches: usize,
    max_bytes: usize,
    ledger: Ledger,
}

/// The reply to a subscriber that asks for a number.
#[derive(Debug)]
pub(super) enum Answer {
    /// These, all that there are from that number on.
    Kept(Vec<PublishedBatch>),
    /// It is too old: the number of the newest batch, and events that tell what is held after it.
    Snapshot(u64, Vec<Event>),
}

impl History {
    pub(super) fn new(config: &PublisherConfig) -> Self {
        Self {
            kept: VecDeque::new(),
            kept_bytes: 0,
            next: 0,
            max_batches: config.history_batches,
            max_bytes: config.history_bytes,
            ledger: Ledger::new(config.snapshot_tokens),
        }
    }

    /// Number of the batch that comes next.
    pub(super) const fn next(&self) -> u64 {
        self.next
    }

    /// Notes what a batch changes.
    pub(super) fn record(&mut self, events: &[Event]) {
        events.iter().for_each(|event| self.ledger.apply(&event.change));
    }

    /// Keeps the next batch; the oldest make room.
    pub(super) fn push(&mut self, payload: Bytes) {
        self.kept_bytes += payload.len();
        self.kept.push_back(payload);
        self.next += 1;
        while self.kept.len() > self.max_batches || self.kept_bytes > self.max_bytes {
            let Some(oldest) = self.kept.pop_front() else { break };
            self.kept_bytes -= oldest.len();
        }
    }

    pub(super) fn from(&self, number: u64) -> Answer {
        let oldest = self.next - self.kept.len() as u64;
        if number < oldest {
            return Answer::Snapshot(self.next - 1, self.ledger.snapshot());
        }
        let skip = usize::try_from(number - oldest).unwrap_or(usize::MAX);
        let kept = self.kept.iter().enumerate().skip(skip);
        let published = |(at, payload): (usize, &Bytes)| PublishedBatch {
            sequence: oldest + at as u64,
            payload: payload.clone(),
        };
        Answer::Kept(kept.map(published).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(batches: usize, bytes: usize) -> History {
        let base = PublisherConfig::new("tcp://127.0.0.1:0", None);
        History::new(&PublisherConfig { history_batches: batches, history_bytes: bytes, ..base })
    }

    fn numbers(history: &History, from: u64) -> Option<Vec<u64>> {
        match history.from(from) {
            Answer::Kept(kept) => Some(kept.iter().map(|one| one.sequence).collect()),
            Answer::Snapshot(..) => None,
        }
    }

    #[test]
    fn what_is_kept_is_sent_and_what_is_not_becomes_a_snapshot() {
        let mut history = history(3, 1000);
        assert_eq!(numbers(&history, 0), Some(vec![]), "nothing was said yet");
        (0..5).for_each(|n| history.push(Bytes::from(vec![n; 10])));
        assert_eq!(numbers(&history, 2), Some(vec![2, 3, 4]));
        assert_eq!(numbers(&history, 4), Some(vec![4]));
        assert_eq!(numbers(&history, u64::MAX - 1), Some(vec![]));
        assert!(matches!(history.from(1), Answer::Snapshot(4, _)));
        assert_eq!((history.next, history.kept_bytes), (5, 30));
    }

    #[test]
    fn bytes_are_bounded_too() {
        let mut history = history(100, 25);
        (0..5).for_each(|_| history.push(Bytes::from_static(&[0; 10])));
        assert_eq!(numbers(&history, 3), Some(vec![3, 4]));
        history.push(Bytes::from_static(&[0; 26]));
        assert_eq!((numbers(&history, 6), numbers(&history, 5)), (Some(vec![]), None), "a giant is not kept");
    }
}
