//! The inputs of the store: facts about owners, copies and bytes.

use baton_types::{BlockKey, RequestId};

/// A holder of blocks. One owner has at most one hold on a store; a request that both fills blocks
/// and is read from on the same node uses two ids.
pub type Owner = RequestId;

/// A fact for the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// `owner` will compute over `chain` here. Pins what exists of the chain in any tier, reserves
    /// HBM slots for the rest of it, for blocks to be brought up from slower tiers, and for
    /// `room_blocks` private ones. Answered by `Opened` (then perhaps `Onboard`), or by `Refused`
    /// or `AlreadyOpen`, which change nothing.
    Open {
        /// The new owner of the blocks.
        owner: Owner,
        /// The prompt's blocks from the root; a partial last block is a key like any other.
        chain: &'a [BlockKey],
        /// Slots for blocks that will never be shared: generated tokens.
        room_blocks: u32,
    },
    /// `owner` will read `chain` here for another node. Pins the readable prefix, reserves
    /// nothing. Answered by `Opened` or `AlreadyOpen`.
    Read {
        /// The reader on behalf of the other node.
        owner: Owner,
        /// The blocks wanted, from the root.
        chain: &'a [BlockKey],
    },
    /// The unanswered `Onboard` of `owner` that comes first in its chain ended. What comes later waits: an inherited
    /// one may come before one that was under way.
    OnboardDone {
        /// As in the effect.
        owner: Owner,
        /// Whether the blocks now rest in HBM, verified. If not, the owner must compute them, and
        /// their copies below are given up unless another owner pins them.
        ok: bool,
    },
    /// The same `Onboard` ended before its end: its first blocks rest in HBM, verified, and the owner must compute the
    /// others.
    OnboardCutShort {
        /// As in the effect.
        owner: Owner,
        /// How many of the blocks that waited for their bytes rest in HBM.
        good_blocks: u32,
        /// Whether the block after them could not be read: its copies below are given up unless
        /// another owner pins it. Those of the blocks after it stay.
        next_is_lost: bool,
    },
    /// An `Offload` ended; tickets may end in any order.
    OffloadDone {
        /// As in the effect.
        ticket: u64,
        /// Whether the copies are complete.
        ok: bool,
    },
    /// The first `upto_blocks` of the owner's chain are filled in HBM and verified.
    Seal {
        /// The owner that filled them.
        owner: Owner,
        /// How many, from the root; what was sealed before stays so.
        upto_blocks: u32,
    },
    /// `owner` wants `room_blocks` more private blocks. Answered by `Grown` or `GrowRefused`.
    GrowRoom {
        /// An owner with an open hold that fills.
        owner: Owner,
        /// Number of further blocks.
        room_blocks: u32,
    },
    /// `owner` is done or gone. The store takes its pins and private room back. Unsealed blocks go to
    /// the next owner that waits for them, or are dropped. A second `Close` is only counted.
    Close {
        /// The owner whose hold ends.
        owner: Owner,
    },
    /// These blocks rest on flash from an earlier life of the node: parents before children, what
    /// was used last first. Those that fit, hang together from a root on and are not known yet
    /// become readable there, as if they had just been copied; the driver asks for
    /// [`Store::copy_state`](crate::Store::copy_state) and drops the bytes of the others.
    Recovered {
        /// Each with the block that it continues; `None` at the root.
        blocks: &'a [(BlockKey, Option<BlockKey>)],
    },
    /// Everything is gone: owners, blocks, copies under way.
    Clear,
}
