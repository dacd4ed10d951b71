//! The messages between the two ends of a transfer, and the trait that a receiving node implements.

use std::future::Future;
use std::pin::Pin;

use baton_transfer::Priority;
use bytes::Bytes;

use crate::data_plane::ArrivedPieces;
use crate::error::{Kind, Stage, TransportError};
use crate::limits::Limits;

/// Names one try of one hand-off. The receiver refuses tickets that it does not expect (I8, I12).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HandoffTicket {
    /// The request whose KV moves.
    pub request: u64,
    /// Number of the attempt.
    pub attempt: u32,
    /// The receiving instance's epoch, as the conductor knew it when it ordered the hand-off.
    pub epoch: u32,
}

/// The shape of a flight: `blocks * layers` slices of `layer_bytes` each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Blocks of the chain, those that the receiver holds included.
    pub blocks: u32,
    /// Layers of each block.
    pub layers: u32,
    /// Bytes of one layer of one block.
    pub layer_bytes: u32,
}

impl Plan {
    /// Slices from block `have_blocks` on.
    pub fn slices_after(&self, have_blocks: u32) -> u64 {
        u64::from(self.blocks.saturating_sub(have_blocks)) * u64::from(self.layers)
    }

    /// Bytes of the slices from block `have_blocks` on.
    pub(crate) fn bytes_after(&self, have_blocks: u32) -> u64 {
        self.slices_after(have_blocks).saturating_mul(u64::from(self.layer_bytes))
    }

    /// Is it a shape that `limits` allow?
    pub(crate) fn check(&self, limits: &Limits, stage: Stage) -> Result<(), TransportError> {
        let wrong = |text: String| Err(TransportError::new(Kind::Invalid, stage, text));
        if self.blocks == 0 || self.layers == 0 || self.layer_bytes == 0 {
            return wrong(format!("an empty plan {self:?}: nothing to hand off"));
        }
        if self.slices_after(0) > limits.flight_slices {
            let (slices, most) = (self.slices_after(0), limits.flight_slices);
            return wrong(format!("a plan of {slices} slices is over the limit flight_slices {most}"));
        }
        if self.layer_bytes > limits.slice_bytes {
            let (bytes, most) = (self.layer_bytes, limits.slice_bytes);
            return wrong(format!("slices of {bytes} bytes are over the limit slice_bytes {most}"));
        }
        Ok(())
    }
}

/// The position of a slice in a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlicePosition {
    /// Block of the chain, from 0.
    pub block: u32,
    /// Layer of the block, from 0.
    pub layer: u32,
}

/// The receiver takes the flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedFlight {
    /// Leading blocks that the receiver holds already and that must not be sent.
    pub have_blocks: u32,
}

/// The receiver does not take the flight or the slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlightRefusal {
    /// Could the same offer be taken a little later? Of no meaning for a slice.
    pub retry: bool,
    /// In words, for the sender's log.
    pub why: String,
}

/// Blocks wanted by another node, in the order of their chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// Their keys. One whose upper half is zero is short: any block whose key ends like it will do.
    pub keys: Vec<u128>,
    /// The holder's epoch, as the asker knows it.
    pub epoch: u32,
    /// Priority of the blocks among other transfers.
    pub priority: Priority,
}

/// Is the block `key` what was asked for by `wanted`, whole or short?
pub(crate) fn answers(key: u128, wanted: u128) -> bool {
    let short = |key: u128| key & u128::from(u64::MAX);
    key == wanted || (wanted >> 64 == 0 && short(key) == wanted)
}

/// One block with the checksum that it has carried since it was sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedBlock {
    /// Its key.
    pub key: u128,
    /// Its bytes, all layers.
    pub bytes: Bytes,
    /// [`crate::checksum`] of the bytes.
    pub checksum: u64,
}

/// The answer to a fetch, as it is being made.
pub type Serving<'a> = Pin<Box<dyn Future<Output = Vec<FetchedBlock>> + Send + 'a>>;

/// The node behind an [`crate::Endpoint`]. The calls for one ticket come one after another: an accepted
/// `offer`, any number of `land`, then exactly one of `complete` and `abort`. All but `land` run on the runtime's
/// threads and must not block.
pub trait Receiver: Send + Sync {
    /// A sender asks to hand over. Decode room must be reserved before (I8); a ticket that is unknown,
    /// of another epoch, outdated or already completed must be refused (I12, I7).
    ///
    /// # Errors
    /// [`FlightRefusal`], with `retry` where the order to expect the ticket may still be on its way.
    fn offer(&self, ticket: HandoffTicket, plan: &Plan) -> Result<AcceptedFlight, FlightRefusal>;

    /// Takes the note of the sender's program, which comes besides the KV: at most once, verified, before the first
    /// slice. A receiver that has no use for a note refuses it.
    ///
    /// # Errors
    /// [`FlightRefusal`] ends the flight.
    fn note(&self, ticket: HandoffTicket, bytes: Bytes) -> Result<(), FlightRefusal> {
        let why = format!("no note is expected for {ticket:?}, least of all one of {} bytes", bytes.len());
        Err(FlightRefusal { retry: false, why })
    }

    /// Copies arrived pieces of slices to where they belong, and returns the checksum of the copies, piece after
    /// piece. Each byte of each position comes at most once. A mismatch with the sender's checksum ends the flight.
    /// The caller runs this on a thread that may block for as long as a copy takes.
    ///
    /// # Errors
    /// [`FlightRefusal`] ends the flight: the request was cancelled, or the ticket is outdated.
    fn land(&self, ticket: HandoffTicket, arrived: &ArrivedPieces) -> Result<u64, FlightRefusal>;

    /// Every slice of the plan has come, exactly once: the blocks may be sealed.
    fn complete(&self, ticket: HandoffTicket);

    /// The flight is over without being complete: nothing of it may be sealed.
    fn abort(&self, ticket: HandoffTicket, why: &str);

    /// Another node wants blocks. The answer holds, for each key in order, verified bytes; it stops at
    /// the first block missing, and is empty where the epoch is not ours. Dropped at the asker's deadline.
    fn wanted(&self, want: Want) -> Serving<'_>;
}

/// Where a node's endpoint is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerAddress {
    /// `address:port` or `name:port` of its endpoint.
    pub kv_address: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_bounded() {
        let limits = Limits { flight_slices: 6, slice_bytes: 8, ..Limits::default() };
        let check = |blocks, layers, layer_bytes| {
            Plan { blocks, layers, layer_bytes }.check(&limits, Stage::Offer).map_err(|error| error.text)
        };
        assert_eq!(check(2, 3, 8), Ok(()));
        assert!(check(0, 3, 8).unwrap_err().contains("empty plan"));
        assert!(check(7, 1, 8).unwrap_err().contains("7 slices"));
        assert!(check(2, 3, 9).unwrap_err().contains("9 bytes"));
        assert!(check(u32::MAX, u32::MAX, 8).is_err());
    }

    #[test]
    fn held_blocks_are_not_counted() {
        let plan = Plan { blocks: 5, layers: 4, layer_bytes: 1 };
        assert_eq!((plan.slices_after(0), plan.slices_after(2), plan.slices_after(5)), (20, 12, 0));
    }
}
