//! The port of a tier below HBM.

use baton_types::{BlockHash, BlockKey};
use std::io;

/// Blocks of one fixed size at rest, by key.
///
/// Contract: `get` gives exactly the bytes of the last successful `put` under that key, or an
/// error; it never gives others. No two blocks with the same short name rest here at once.
pub trait Tier {
    /// The size of every block.
    fn block_bytes(&self) -> usize;

    /// How many blocks it may hold.
    fn capacity_blocks(&self) -> usize;

    /// How many it holds.
    fn len_blocks(&self) -> usize;

    /// Stores a block, in place of an older copy of it. On an error there is no copy.
    ///
    /// # Errors
    /// `Full`, `WrongLength`, `SameShortName` or `Io`.
    fn put(&mut self, key: BlockKey, bytes: &[u8]) -> Result<(), TierError>;

    /// Reads a block into `out` and returns its checksum. After an error the bytes in `out` are undefined.
    ///
    /// # Errors
    /// `Absent`, `WrongLength`, `Corrupt` or `Io`.
    fn get(&mut self, key: BlockKey, out: &mut [u8]) -> Result<u64, TierError>;

    /// Gives a block's place up; `false` if there was none.
    fn remove(&mut self, block: BlockHash) -> bool;
}

/// Why a tier cannot do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The block does not rest here.
    #[error("tier: the block does not rest here; compute it")]
    Absent,
    /// Every place is taken: remove a block first.
    #[error("tier: every place is taken; remove a block first")]
    Full,
    /// The bytes given or the room for them are not one block.
    #[error("tier: {given_bytes} bytes given where a block has {block_bytes}")]
    WrongLength {
        /// The size of a block.
        block_bytes: usize,
        /// The length given.
        given_bytes: usize,
    },
    /// Another block with the same 64-bit name rests here.
    #[error("tier: another block with the same 64-bit name rests here; remove it first")]
    SameShortName,
    /// The bytes at rest are not those that were stored.
    #[error("tier: {what} is not as stored; compute the block again and look at the disk")]
    Corrupt {
        /// The evidence of the damage.
        what: &'static str,
    },
    /// The operating system refused.
    #[error("tier: {0}; look at the disk and its free space")]
    Io(io::Error),
}

impl From<io::Error> for TierError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// `Ok` if `given_bytes` is one block.
pub(crate) fn check_length(block_bytes: usize, given_bytes: usize) -> Result<(), TierError> {
    if block_bytes == given_bytes { Ok(()) } else { Err(TierError::WrongLength { block_bytes, given_bytes }) }
}
