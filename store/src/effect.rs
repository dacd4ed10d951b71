//! The outputs of the store: answers, orders to the driver, and changes for the index.

use crate::Owner;
use alloc::vec::Vec;
use baton_types::{BlockHash, Tier};

/// An answer, an order to the driver, or news for the conductor's index.
///
/// In each step, `Removed` comes last, after every `Stored`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The owner's hold stands. `hbm + dram + ssd + pending` blocks of its chain existed.
    Opened {
        /// The owner that asked.
        owner: Owner,
        /// Blocks readable in HBM.
        hbm: u32,
        /// Blocks readable in DRAM at best.
        dram: u32,
        /// Blocks readable on flash only.
        ssd: u32,
        /// Blocks whose HBM slot another owner is filling or bringing up: wait for their `Stored`
        /// in HBM, or for `Inherited` or `Onboard` if that owner goes first.
        pending: u32,
        /// HBM slots reserved for this owner to fill: the rest of its chain and its private room.
        reserved: u32,
    },
    /// The owner's chain and room do not fit beside what is pinned; nothing changed.
    Refused {
        /// The owner that asked.
        owner: Owner,
        /// HBM slots that it needs beyond what it shares.
        needed_blocks: u64,
        /// HBM slots that are free or that an eviction would free.
        free_or_evictable_blocks: u64,
    },
    /// The owner has a hold already; nothing changed.
    AlreadyOpen {
        /// The owner of the hold.
        owner: Owner,
    },
    /// The owner's private room grew.
    Grown {
        /// The owner of the hold.
        owner: Owner,
        /// All of its room now.
        room_blocks: u32,
    },
    /// The private room cannot grow; nothing changed.
    GrowRefused {
        /// The owner of the hold.
        owner: Owner,
        /// Slots asked for.
        needed_blocks: u64,
        /// Slots that could be had; 0 if the owner holds nothing to grow.
        free_or_evictable_blocks: u64,
    },
    /// Copy blocks up into their reserved HBM slots, then answer with `OnboardDone`.
    Onboard {
        /// The owner that waits for them.
        owner: Owner,
        /// Blocks to read from DRAM.
        dram_blocks: u32,
        /// Blocks to read from flash.
        ssd_blocks: u32,
    },
    /// Blocks could not be brought up: the owner must compute and seal them.
    OnboardFailed {
        /// The owner that must now compute them.
        owner: Owner,
        /// Number of unfilled blocks.
        blocks: u32,
    },
    /// The owner that was filling shared blocks left: this one must compute and seal them.
    Inherited {
        /// The new filler.
        owner: Owner,
        /// Number of blocks to compute.
        blocks: u32,
    },
    /// Copy blocks down, then answer with `OffloadDone`.
    Offload {
        /// Names this copy.
        ticket: u64,
        /// The faster tier, which keeps its copies.
        from: Tier,
        /// The slower tier, with a slot reserved for each block.
        to: Tier,
        /// Number of blocks.
        blocks: u32,
    },
    /// Blocks became readable in a tier; each of `hashes` continues the one before.
    Stored {
        /// The block before the first of `hashes`; `None` at the root.
        parent: Option<BlockHash>,
        /// The blocks.
        hashes: Vec<BlockHash>,
        /// The tier in which they are readable now.
        tier: Tier,
    },
    /// Blocks left a tier; they may rest in others.
    Removed {
        /// The blocks.
        hashes: Vec<BlockHash>,
        /// The tier that they left.
        tier: Tier,
    },
    /// Every block of this node is gone.
    Cleared,
}
