//! Reading for other nodes.

use super::hold::{HoldRecord, refusal};
use super::{HoldRefusal, KvCache, Pool};
use crate::checksum::block_checksum;
use crate::tier::{Tier as _, TierError};
use baton_store::{CopyState, Effect, Input, Owner};
use baton_types::{BlockKey, Tier};

/// Why a block could not be read: from no tier, verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockReadError {
    /// It is readable nowhere here.
    #[error("cache: the block is readable nowhere here; compute it")]
    Absent,
    /// Its copies are damaged or the disk does not answer.
    #[error("cache: no copy of the block passed its check; compute it")]
    Unreadable,
    /// The room given is not one block.
    #[error("cache: the room given is not one block; give block_bytes")]
    WrongLength,
}

impl KvCache {
    /// Pins the readable prefix of `chain`, in any tier, so that another node can be given it block by block; takes
    /// no HBM slot. Returns its length. End it with [`KvCache::close`].
    ///
    /// # Errors
    /// `AlreadyOpen`; then nothing changed.
    pub fn read_for_peer(&mut self, owner: Owner, chain: &[BlockKey]) -> Result<u32, HoldRefusal> {
        let answers = self.step(Input::Read { owner, chain });
        refusal(&answers)?;
        let readable = answers.iter().find_map(|answer| match answer {
            Effect::Opened { hbm, dram, ssd, .. } => Some(hbm + dram + ssd),
            _ => None,
        });
        let readable = readable.unwrap_or(0);
        let chain = chain[..readable as usize].to_vec();
        self.held.insert(owner, HoldRecord { chain, room: Vec::new(), sealed: 0, reads_only: true });
        Ok(readable)
    }

    /// Reads a block from the fastest tier whose copy can be vouched for, and gives its checksum:
    /// that of [`block_checksum`]. From flash this waits for the disk.
    ///
    /// # Errors
    /// [`BlockReadError`]; what `out` then holds is not to be used.
    pub fn read_block(
        &mut self,
        key: BlockKey,
        pool: &dyn Pool,
        out: &mut [u8],
    ) -> Result<u64, BlockReadError> {
        if out.len() != self.config.block_bytes {
            return Err(BlockReadError::WrongLength);
        }
        let mut failed = BlockReadError::Absent;
        for tier in Tier::LOCAL {
            if self.store.copy_state(key, tier) != CopyState::Ready {
                continue;
            }
            match self.read_from(tier, key, pool, out) {
                Ok(checksum) => return Ok(checksum),
                Err(error) => self.count_error(&error),
            }
            failed = BlockReadError::Unreadable;
        }
        Err(failed)
    }

    fn read_from(
        &mut self,
        tier: Tier,
        key: BlockKey,
        pool: &dyn Pool,
        out: &mut [u8],
    ) -> Result<u64, TierError> {
        match (tier, &mut self.file) {
            (Tier::Hbm, _) => {
                pool.read(self.address(key).ok_or(TierError::Absent)?, out);
                Ok(block_checksum(key, out))
            }
            (Tier::Dram, _) => self.dram.get(key, out),
            (Tier::Ssd, Some(file)) => file.get(key, out),
            _ => Err(TierError::Absent),
        }
    }
}
