//! The slab file as a [`Slab`], for the blob log.

use super::FileTier;
use crate::aligned::AlignedBuffer;
use crate::blob_log::Slab;
use crate::index::{Entry, Place};
use crate::io_sequencer::IoCompletion;
use crate::tier::{Tier, TierError};
use baton_types::BlockKey;

impl Slab for FileTier {
    fn block_bytes(&self) -> usize {
        self.layout.block_bytes
    }

    fn capacity_blocks(&self) -> usize {
        self.slot_table.capacity() as usize
    }

    fn used_blocks(&self) -> usize {
        self.slot_table.in_use()
    }

    fn recovered(&mut self) -> (Vec<Entry>, Vec<Entry>) {
        (self.take_recovered(), std::mem::take(&mut self.stale))
    }

    fn place(&self, key: BlockKey) -> Option<Place> {
        Self::place(self, key)
    }

    fn takes_write(&self) -> bool {
        Self::takes_write(self)
    }

    fn takes_read(&self) -> bool {
        Self::takes_read(self)
    }

    fn buffer(&mut self) -> AlignedBuffer {
        Self::buffer(self)
    }

    fn recycle(&mut self, buffer: AlignedBuffer) {
        Self::recycle(self, buffer);
    }

    fn write(
        &mut self,
        keys: (BlockKey, Option<BlockKey>),
        checksum: u64,
        buffer: AlignedBuffer,
    ) -> Result<(u64, Place), TierError> {
        Self::write(self, keys, checksum, buffer)
    }

    fn read(&mut self, key: BlockKey) -> Option<u64> {
        Self::read(self, key)
    }

    fn peek(&mut self, key: BlockKey) -> Option<u64> {
        Self::peek(self, key)
    }

    fn next_done(&mut self) -> Option<IoCompletion> {
        Self::next_done(self)
    }

    fn next_freed(&mut self) -> Option<u32> {
        self.freed.pop_front()
    }

    fn commit(&mut self, key: BlockKey, place: Place) -> bool {
        Self::commit(self, key, place)
    }

    fn discard(&mut self, place: Place) {
        Self::discard(self, place);
    }

    fn remove(&mut self, key: BlockKey) -> bool {
        Self::place(self, key).is_some() && Tier::remove(self, key.short())
    }

    fn is_lost(&self) -> bool {
        self.is_gone()
    }

    fn is_off(&self) -> bool {
        Self::is_off(self)
    }
}
