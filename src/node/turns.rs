//! Which hand-offs may be under way at a time.
//!
//! Slices of a flight are copies of what lies in the engine's pool, and wait in memory until the peer takes them. The
//! flights under way together are for no more blocks than the pool has, or 1 GiB holds: so their copies never take more
//! memory than that, also when many requests share a prefix. A flight that waits for its turn has no copies yet.

use std::sync::Arc;

use baton_engine::KvShape;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Hand-offs under way at a time, below what an endpoint sends at most.
const FLIGHTS_MAX: usize = 64;

/// Bytes of the blocks that flights under way are for, where the pool is smaller.
const LEAST_BYTES: usize = 1 << 30;

/// See the module.
pub(super) struct Turns {
    flights: Arc<Semaphore>,
    blocks: Arc<Semaphore>,
    blocks_max: u32,
}

/// The right of one hand-off to be under way, until it is dropped.
pub(super) struct Turn {
    _flight: OwnedSemaphorePermit,
    _blocks: OwnedSemaphorePermit,
}

impl Turns {
    /// For an engine with a pool of this shape.
    pub(super) fn of(shape: &KvShape) -> Self {
        let least = u32::try_from(LEAST_BYTES / shape.block_bytes().max(1)).unwrap_or(u32::MAX);
        // Of what a semaphore counts there may not be more.
        Self::new(shape.blocks.max(least).min(1 << 28))
    }

    /// For copies of at most so many blocks. One hand-off alone may have more.
    pub(super) fn new(blocks_max: u32) -> Self {
        let blocks_max = blocks_max.max(1);
        let (flights, blocks) = (Semaphore::new(FLIGHTS_MAX), Semaphore::new(blocks_max as usize));
        Self { flights: Arc::new(flights), blocks: Arc::new(blocks), blocks_max }
    }

    /// A turn for so many blocks, if nobody waits for one and there is room.
    pub(super) fn try_take(&self, blocks: u32) -> Option<Turn> {
        let flight = Arc::clone(&self.flights).try_acquire_owned().ok()?;
        let blocks = Arc::clone(&self.blocks).try_acquire_many_owned(blocks.min(self.blocks_max)).ok()?;
        Some(Turn { _flight: flight, _blocks: blocks })
    }

    /// A turn for so many blocks, in the order in which it was asked for.
    pub(super) async fn take(&self, blocks: u32) -> Turn {
        let open = "nobody closes it";
        let flight = Arc::clone(&self.flights).acquire_owned().await.expect(open);
        let blocks = blocks.min(self.blocks_max);
        let blocks = Arc::clone(&self.blocks).acquire_many_owned(blocks).await.expect(open);
        Turn { _flight: flight, _blocks: blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[tokio::test]
    async fn flights_under_way_are_for_no_more_blocks_than_there_are_and_none_is_overtaken() {
        let turns = Turns::new(100);
        let (one, two) = (turns.try_take(60).unwrap(), turns.try_take(30).unwrap());
        assert!(turns.try_take(11).is_none());
        let mut large = Box::pin(turns.take(500));
        assert!((&mut large).now_or_never().is_none());
        assert!(turns.try_take(1).is_none(), "a small one does not go before a large one that waits");
        drop(one);
        assert!((&mut large).now_or_never().is_none());
        drop(two);
        let large = large.now_or_never().expect("alone it may have more than there are");
        assert!(turns.try_take(1).is_none());
        drop(large);
        assert!(turns.try_take(100).is_some());
    }

    #[tokio::test]
    async fn flights_have_a_number_too() {
        let turns = Turns::new(1_000_000);
        let taken: Vec<Turn> = std::iter::from_fn(|| turns.try_take(1)).collect();
        assert_eq!(taken.len(), FLIGHTS_MAX);
        let mut next = Box::pin(turns.take(1));
        assert!((&mut next).now_or_never().is_none());
        drop(taken);
        assert!(next.now_or_never().is_some());
    }
}
