//! Blocks in host memory.

use crate::checksum::block_checksum;
use crate::short::ShortNameMap;
use crate::slots::Slots;
use crate::tier::{Tier, TierError, check_length};
use baton_types::{BlockHash, BlockKey};

/// One block's place, and what vouches for it.
#[derive(Clone, Copy, Debug)]
struct Place {
    key: BlockKey,
    slot: u32,
    checksum: u64,
}

/// A tier in host memory: one allocation, of which the operating system provides pages as they
/// are first written.
#[derive(Debug)]
pub struct Dram {
    block_bytes: usize,
    bytes: Vec<u8>,
    places: ShortNameMap<Place>,
    slots: Slots,
}

impl Dram {
    /// An empty tier. `capacity_blocks * block_bytes` must fit the address space.
    #[must_use]
    pub fn new(capacity_blocks: u32, block_bytes: usize) -> Self {
        Self {
            block_bytes,
            bytes: vec![0; capacity_blocks as usize * block_bytes],
            places: ShortNameMap::default(),
            slots: Slots::new(capacity_blocks),
        }
    }

    /// As [`Tier::put`], the bytes being written in place by `fill`.
    ///
    /// # Errors
    /// `Full` or `SameShortName`.
    pub fn put_with(&mut self, key: BlockKey, fill: impl FnOnce(&mut [u8])) -> Result<u64, TierError> {
        let slot = match self.places.get(&key.short()) {
            Some(place) if place.key == key => place.slot,
            Some(_) => return Err(TierError::SameShortName),
            None => self.slots.take().ok_or(TierError::Full)?,
        };
        let bytes = &mut self.bytes[range(slot, self.block_bytes)];
        fill(bytes);
        let checksum = block_checksum(key, bytes);
        self.places.insert(key.short(), Place { key, slot, checksum });
        Ok(checksum)
    }

    /// Looks at a block in place, verified; gives its checksum too.
    ///
    /// # Errors
    /// `Absent` or `Corrupt`.
    pub fn view(&self, key: BlockKey) -> Result<(&[u8], u64), TierError> {
        let place = self.places.get(&key.short()).filter(|place| place.key == key);
        let &Place { slot, checksum, .. } = place.ok_or(TierError::Absent)?;
        let bytes = &self.bytes[range(slot, self.block_bytes)];
        if block_checksum(key, bytes) != checksum {
            return Err(TierError::Corrupt { what: "the checksum of a block in host memory" });
        }
        Ok((bytes, checksum))
    }

    /// Forgets every block.
    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.slots = Slots::new(self.capacity_blocks() as u32);
    }

    /// Whether the block rests here.
    pub(crate) fn has(&self, key: BlockKey) -> bool {
        self.places.get(&key.short()).is_some_and(|place| place.key == key)
    }

    /// Flips a bit of a block at rest.
    #[cfg(test)]
    pub(crate) fn damage(&mut self, key: BlockKey) {
        let place = self.places[&key.short()];
        let bytes = &mut self.bytes[range(place.slot, self.block_bytes)];
        bytes[(key.0 % bytes.len() as u128) as usize] ^= 4;
    }
}

fn range(slot: u32, block_bytes: usize) -> std::ops::Range<usize> {
    let from = slot as usize * block_bytes;
    from..from + block_bytes
}

impl Tier for Dram {
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn capacity_blocks(&self) -> usize {
        self.bytes.len() / self.block_bytes.max(1)
    }

    fn len_blocks(&self) -> usize {
        self.slots.taken()
    }

    fn put(&mut self, key: BlockKey, bytes: &[u8]) -> Result<(), TierError> {
        check_length(self.block_bytes, bytes.len())?;
        self.put_with(key, |place| place.copy_from_slice(bytes)).map(|_| ())
    }

    fn get(&mut self, key: BlockKey, out: &mut [u8]) -> Result<u64, TierError> {
        check_length(self.block_bytes, out.len())?;
        let (bytes, checksum) = self.view(key)?;
        out.copy_from_slice(bytes);
        Ok(checksum)
    }

    fn remove(&mut self, block: BlockHash) -> bool {
        let removed = self.places.remove(&block);
        if let Some(place) = removed {
            self.slots.give(place.slot);
        }
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_noticed_and_a_new_put_repairs_it() {
        let mut dram = Dram::new(2, 32);
        dram.put(BlockKey(5), &[1; 32]).unwrap();
        dram.damage(BlockKey(5));
        let mut out = [0; 32];
        assert!(matches!(dram.get(BlockKey(5), &mut out), Err(TierError::Corrupt { .. })));
        dram.put(BlockKey(5), &[1; 32]).unwrap();
        assert_eq!(dram.get(BlockKey(5), &mut out).unwrap(), block_checksum(BlockKey(5), &[1; 32]));
        assert_eq!((out, dram.len_blocks()), ([1; 32], 1));
    }
}
