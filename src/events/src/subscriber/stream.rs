//! The way to the consumer: epochs, the number that comes next, and the counts.

use tokio::sync::{mpsc, watch};
use xxhash_rust::xxh3::xxh3_64;

use super::{EpochReason, Feed, SubscriberStatus};
use crate::codec::{Limits, decode};
use crate::error::EventError;

/// The consumer has gone: there is nobody to follow for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConsumerGoneError;

#[derive(Debug)]
pub(super) struct Stream {
    limits: Limits,
    feed: mpsc::Sender<Feed>,
    status: watch::Sender<SubscriberStatus>,
    epoch: u64,
    /// Number of the batch that comes next; `None` where any may.
    next: Option<u64>,
    /// Whether a batch was handed out in this epoch.
    begun: bool,
    /// Number and fingerprint of the last batch: times are in it, so that no two lives share one.
    last: Option<(u64, u64)>,
}

impl Stream {
    pub(super) fn new(
        limits: Limits,
        feed: mpsc::Sender<Feed>,
        status: watch::Sender<SubscriberStatus>,
    ) -> Self {
        Self { limits, feed, status, epoch: 0, next: None, begun: false, last: None }
    }

    pub(super) const fn next(&self) -> Option<u64> {
        self.next
    }

    /// Number of the last batch of this epoch.
    pub(super) fn last(&self) -> Option<u64> {
        self.last.map(|(sequence, _)| sequence)
    }

    /// Whether a batch is the one that was handed out last.
    pub(super) fn is_last(&self, sequence: u64, payload: &[u8]) -> bool {
        self.last == Some((sequence, xxh3_64(payload)))
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut SubscriberStatus)) {
        self.status.send_modify(change);
    }

    pub(super) fn note(&self, error: &EventError) {
        self.count(|status| status.last_error = Some(error.to_string()));
    }

    /// Begins an epoch, at number `next` if it is known; the one before is kept if nothing came in it yet.
    pub(super) async fn begin(
        &mut self,
        why: EpochReason,
        next: Option<u64>,
    ) -> Result<(), ConsumerGoneError> {
        let lost = match (why, self.next, next) {
            (EpochReason::Lost, Some(before), Some(next)) => next.saturating_sub(before),
            _ => 0,
        };
        let fresh = self.epoch > 0 && !self.begun;
        (self.next, self.begun, self.last) = (next, false, None);
        self.epoch += u64::from(!fresh);
        self.count(|status| {
            status.lost += lost;
            status.restarts += u64::from(why == EpochReason::Restarted);
            status.epoch = self.epoch;
        });
        if fresh {
            return Ok(());
        }
        let cleared = Feed::Cleared { epoch: self.epoch, why };
        self.feed.send(cleared).await.map_err(|_| ConsumerGoneError)
    }

    /// Hands out a batch, whose number must be the next.
    ///
    /// One that cannot be read ends the epoch: what it said is lost, and asking again brings the same bytes.
    pub(super) async fn deliver(&mut self, sequence: u64, payload: &[u8]) -> Result<(), ConsumerGoneError> {
        let batch = match decode(sequence, payload, &self.limits) {
            Ok(batch) => batch,
            Err(error) => {
                self.note(&error);
                self.count(|status| status.malformed += 1);
                return self.begin(EpochReason::Lost, Some(sequence.wrapping_add(1))).await;
            }
        };
        self.next = Some(sequence.wrapping_add(1));
        self.last = Some((sequence, xxh3_64(payload)));
        self.begun = true;
        self.count(|status| status.batches += 1);
        self.feed.send(Feed::Batch { epoch: self.epoch, batch }).await.map_err(|_| ConsumerGoneError)
    }

    /// Resolves when the consumer has gone.
    pub(super) fn gone(&self) -> impl Future<Output = ()> + use<> {
        let feed = self.feed.clone();
        async move { feed.closed().await }
    }
}
