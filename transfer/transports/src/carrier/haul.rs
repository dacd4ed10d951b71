//! Blocks on their way to whoever asked for them: copied into registered memory here, written into the asker's
//! window in one batch.

use std::sync::Arc;
use std::time::Duration;

use baton_transfer::Priority;

use super::{BATCH_WITHIN, BerthTold, Carrier};
use crate::arena::Loan;
use crate::mover::{Batch, BatchId, Direction, Op, Outcome, Region};
use crate::receiver::FetchedBlock;

impl Carrier {
    /// Writes the blocks into a window, one after another, within `limit`. Says why it did not, where it did not.
    pub(crate) async fn haul(
        self: &Arc<Self>,
        to: BerthTold,
        blocks: &[FetchedBlock],
        priority: Priority,
        limit: Duration,
    ) -> Result<(), String> {
        let bytes = blocks.iter().map(|block| block.bytes.len() as u64).sum();
        if bytes == 0 || to.segment.bytes != bytes {
            return Err(format!("a window of {} bytes for blocks of {bytes}", to.segment.bytes));
        }
        if self.shuns(&to.peer) {
            return Err("its engine could not be reached a moment ago".to_owned());
        }
        let loan = self.outgoing.lend(bytes).ok_or("no room for a copy here")?;
        let loan = Arc::new(self.laden(loan, blocks).await?);
        let remote = Arc::new(to.segment);
        let local = Region { memory: loan.memory().clone(), at: loan.at() };
        let batch = Batch {
            peer: to.peer.clone(),
            priority,
            limit: Some(limit.min(BATCH_WITHIN)),
            // Each block is verified at the end.
            verify: false,
            notice: None,
            ops: vec![Op { direction: Direction::Write, local, remote, remote_at: 0, bytes }],
        };
        let taken = self.mover.submit(batch).map_err(|refusal| refusal.to_string())?;
        let mut under_way = UnderWay { carrier: self.clone(), batch: Some(taken), loan };
        let ended = self.mover.finished(taken).await;
        under_way.batch = None;
        match ended {
            Some(Outcome::Done { .. }) => Ok(()),
            Some(Outcome::Failed { failure, cause, .. }) => {
                self.shun(&to.peer, &failure);
                Err(format!("{failure} ({cause})"))
            }
            Some(Outcome::Cancelled { .. }) | None => Err("cancelled".to_owned()),
        }
    }

    /// Copies the blocks into the loan: many bytes, so not on a thread of the runtime.
    async fn laden(&self, loan: Loan, blocks: &[FetchedBlock]) -> Result<Loan, String> {
        let blocks: Vec<bytes::Bytes> = blocks.iter().map(|block| block.bytes.clone()).collect();
        let copy = move || {
            let mut at = loan.at();
            for block in blocks {
                loan.memory().write(at, &block);
                at += block.len() as u64;
            }
            loan
        };
        tokio::task::spawn_blocking(copy).await.map_err(|error| format!("copying blocks: {error}"))
    }
}

/// A batch that reads from a loan. Dropped before it has ended, it is cancelled, and the loan kept until then.
struct UnderWay {
    carrier: Arc<Carrier>,
    batch: Option<BatchId>,
    loan: Arc<Loan>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let Some(batch) = self.batch.take() else { return };
        self.carrier.settle_unwanted(vec![batch], self.loan.clone());
    }
}
