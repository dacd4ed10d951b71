//! A window on its sending side: bytes leave in batches, as far as the receiver has room.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_transfer::Priority;

use super::{DataPlane, LentWindow};
use crate::arena::Loan;
use crate::error::{Kind, Stage, TransportError};
use crate::mover::{Batch, BatchId, Direction, Op, Outcome, PeerId, Region, RemoteSegment};

/// Bytes of one batch at most: what is there of a larger window is announced in good time.
const BATCH_BYTES: u64 = 1 << 20;
/// Pieces of one batch at most.
const BATCH_OPS: usize = 256;
/// Batches under way at most, so that one is announced while the next moves.
const BATCHES_MOST: usize = 4;
/// How long one batch may take.
const BATCH_WITHIN: Duration = Duration::from_secs(10);

/// Writes a stream into a peer's window.
pub(crate) struct WindowWriter {
    plane: Arc<DataPlane>,
    peer: PeerId,
    remote: Arc<RemoteSegment>,
    priority: Priority,
    limit: Duration,
    /// Lent until the last batch has ended, where the bytes are copies.
    loan: Option<Arc<Loan>>,
    written: u64,
    acknowledged: u64,
    ready: Vec<Op>,
    ready_bytes: u64,
    under_way: VecDeque<(BatchId, u64)>,
}

impl WindowWriter {
    /// For the window that the peer has lent, as urgent as `priority` says; no batch takes longer than `limit`.
    pub(crate) fn new(
        plane: &Arc<DataPlane>,
        to: LentWindow,
        priority: Priority,
        limit: Duration,
    ) -> Result<Self, TransportError> {
        if to.segment.bytes == 0 {
            return Err(TransportError::new(Kind::Bug, Stage::Send, "the peer lends a window of no bytes"));
        }
        Ok(Self {
            plane: plane.clone(),
            peer: to.peer,
            remote: Arc::new(to.segment),
            priority,
            limit: limit.min(BATCH_WITHIN),
            loan: None,
            written: 0,
            acknowledged: 0,
            ready: Vec::new(),
            ready_bytes: 0,
            under_way: VecDeque::new(),
        })
    }

    /// Sets the loan that holds the bytes to write. The writer keeps it for as long as the engine may read it.
    pub(crate) fn reading_from(mut self, loan: Arc<Loan>) -> Self {
        self.loan = Some(loan);
        self
    }

    /// Bytes of the window.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.remote.bytes
    }

    /// Bytes of the stream so far.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Bytes of the stream that the receiver has taken out.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// The receiver has taken so many bytes of the stream out.
    ///
    /// # Errors
    /// [`Kind::Bug`] where that is more than was written, or less than it said before.
    pub(crate) fn acknowledge(&mut self, upto: u64) -> Result<(), TransportError> {
        if upto < self.acknowledged || upto > self.written {
            let (before, written) = (self.acknowledged, self.written);
            let text = format!("the peer confirms {upto} bytes after {before}, but {written} were sent");
            return Err(TransportError::new(Kind::Bug, Stage::Acknowledge, text));
        }
        self.acknowledged = upto;
        Ok(())
    }

    /// How many bytes can be pushed before the receiver takes some out, or the window wraps.
    pub(crate) fn room(&self) -> u64 {
        let size = self.remote.bytes;
        (size - (self.written - self.acknowledged)).min(size - self.written % size)
    }

    /// Adds bytes to the stream: as many as there is room for. They leave with the next batch.
    pub(crate) fn push(&mut self, from: &Region, bytes: u64) -> u64 {
        let taken = bytes.min(self.room());
        if taken == 0 {
            return 0;
        }
        let remote_at = self.written % self.remote.bytes;
        match self.ready.last_mut() {
            // Bytes that follow each other at both ends go as one.
            Some(last)
                if Arc::ptr_eq(&last.local.memory, &from.memory)
                    && last.local.at + last.bytes == from.at
                    && last.remote_at + last.bytes == remote_at =>
            {
                last.bytes += taken;
            }
            _ => self.ready.push(Op {
                direction: Direction::Write,
                local: from.clone(),
                remote: self.remote.clone(),
                remote_at,
                bytes: taken,
            }),
        }
        self.written += taken;
        self.ready_bytes += taken;
        taken
    }

    /// Whether what has gathered is worth a batch.
    pub(crate) fn has_full_batch(&self) -> bool {
        let enough = (self.remote.bytes / 4).clamp(1, BATCH_BYTES);
        self.ready_bytes >= enough || self.ready.len() >= BATCH_OPS
    }

    /// Sends what has gathered as one batch; false where there is nothing.
    pub(crate) fn submit_writes(&mut self) -> Result<bool, TransportError> {
        if self.ready.is_empty() {
            return Ok(false);
        }
        self.ready_bytes = 0;
        let batch = Batch {
            peer: self.peer.clone(),
            priority: self.priority,
            limit: Some(self.limit),
            // The receiver verifies all of it.
            verify: false,
            notice: None,
            ops: std::mem::take(&mut self.ready),
        };
        let taken = self.plane.mover.submit(batch);
        let taken =
            taken.map_err(|refusal| TransportError::new(Kind::Retry, Stage::Send, refusal.to_string()))?;
        self.under_way.push_back((taken, self.written));
        Ok(true)
    }

    /// Whether the oldest batch has to end before another may leave.
    pub(crate) fn is_full(&self) -> bool {
        self.under_way.len() >= BATCHES_MOST
    }

    /// Waits for the oldest batch, and says how much of the stream is in the window then; none where none is under way.
    pub(crate) async fn arrived(&mut self) -> Result<Option<u64>, TransportError> {
        let Some(&(batch, upto)) = self.under_way.front() else { return Ok(None) };
        let ended = self.plane.mover.finished(batch).await;
        self.under_way.pop_front();
        let text = match ended {
            Some(Outcome::Done { .. }) => return Ok(Some(upto)),
            Some(Outcome::Failed { failure, cause, .. }) => format!("{failure} ({cause})"),
            Some(Outcome::Cancelled { .. }) => "cancelled".to_owned(),
            None => "its end is not known any more".to_owned(),
        };
        let text = format!("transfer to {}: {text}", self.peer.address);
        Err(TransportError::new(Kind::Unavailable, Stage::Send, text))
    }
}

impl Drop for WindowWriter {
    fn drop(&mut self) {
        let under_way: Vec<BatchId> = self.under_way.drain(..).map(|(batch, _)| batch).collect();
        if !under_way.is_empty() {
            self.plane.settle_unwanted(under_way, self.loan.take());
        }
    }
}
