//! What an instance says about the blocks that it holds.

use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

use crate::{BlockHash, Epoch, InstanceId, Tier};

/// A change of an instance's cache, as the conductor's index learns of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheEvent {
    /// The publisher.
    pub instance: InstanceId,
    /// Which life of that instance; older epochs are ignored (I12).
    pub epoch: Epoch,
    /// The change.
    pub change: CacheChange,
}

/// The change itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum CacheChange {
    /// Blocks became readable in `tier`; `hashes` continue the chain below `parent`.
    Stored {
        /// The block before the first of `hashes`; `None` at the root of a chain.
        parent: Option<BlockHash>,
        /// The blocks, each the parent of the next.
        hashes: Vec<BlockHash>,
        /// The tier that holds the blocks.
        tier: Tier,
    },
    /// Blocks left `tier`.
    Removed {
        /// The blocks, in any order.
        hashes: Vec<BlockHash>,
        /// The tier that they left.
        tier: Tier,
    },
    /// Every block of the instance is gone.
    Cleared,
}
