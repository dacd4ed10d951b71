//! Many blocks at a time, with as many under way as the disk is given.

use super::FileTier;
use crate::checksum::block_checksum;
use crate::index::Place;
use crate::io_sequencer::IoCompletion;
use crate::tier::TierError;
use baton_types::BlockKey;
use std::collections::BTreeMap;

impl FileTier {
    /// Stores blocks that do not rest here yet, each with the block that it continues; `fill`
    /// writes the bytes of each. Returns when all last.
    ///
    /// # Errors
    /// The first, after all that was begun has ended: `Full`, `SameShortName` or `Io`.
    pub fn put_all(
        &mut self,
        blocks: impl IntoIterator<Item = (BlockKey, Option<BlockKey>)>,
        mut fill: impl FnMut(BlockKey, &mut [u8]),
    ) -> Result<(), TierError> {
        let mut begun: BTreeMap<u64, (BlockKey, Place)> = BTreeMap::new();
        let mut first_error = None;
        for (key, parent) in blocks {
            while !self.takes_write() && !self.is_gone() {
                self.wait();
                self.take_written(&mut begun, &mut first_error);
            }
            if first_error.is_some() {
                break;
            }
            let mut buffer = self.buffer();
            let bytes = &mut buffer[..self.layout.block_bytes];
            fill(key, bytes);
            let checksum = block_checksum(key, bytes);
            match self.write((key, parent), checksum, buffer) {
                Ok((number, place)) => _ = begun.insert(number, (key, place)),
                Err(error) => first_error = Some(error),
            }
        }
        while !begun.is_empty() && !self.is_gone() {
            self.wait();
            self.take_written(&mut begun, &mut first_error);
        }
        match first_error {
            Some(error) => Err(error),
            None if begun.is_empty() => Ok(()),
            None => Err(super::gone()),
        }
    }

    /// Reads blocks, verified, in any order, and shows each to `each`.
    ///
    /// # Errors
    /// The first, after all that was begun has ended: `Absent`, `Corrupt` or `Io`.
    pub fn get_all(
        &mut self,
        keys: &[BlockKey],
        mut each: impl FnMut(BlockKey, &[u8]),
    ) -> Result<(), TierError> {
        let mut begun: BTreeMap<u64, BlockKey> = BTreeMap::new();
        let mut first_error = None;
        let mut todo = keys.iter();
        loop {
            while self.takes_read()
                && first_error.is_none()
                && let Some(&key) = todo.next()
            {
                match self.read(key) {
                    Some(number) => _ = begun.insert(number, key),
                    None => first_error = Some(TierError::Absent),
                }
            }
            if begun.is_empty() {
                return first_error.map_or(Ok(()), Err);
            }
            self.wait();
            if self.is_gone() {
                return Err(super::gone());
            }
            while let Some(done) = self.take_ended(|number| begun.contains_key(&number)) {
                let Some(key) = begun.remove(&done.number) else { continue };
                match done.outcome {
                    Ok(_) => each(key, &done.buffer[..self.layout.block_bytes]),
                    Err(error) => _ = first_error.get_or_insert(error),
                }
                self.recycle(done.buffer);
            }
        }
    }

    fn take_written(
        &mut self,
        begun: &mut BTreeMap<u64, (BlockKey, Place)>,
        first_error: &mut Option<TierError>,
    ) {
        while let Some(done) = self.take_ended(|number| begun.contains_key(&number)) {
            let IoCompletion { number, outcome, buffer } = done;
            self.recycle(buffer);
            let Some((key, place)) = begun.remove(&number) else { continue };
            match outcome {
                Ok(_) if self.commit(key, place) => {}
                Ok(_) => {
                    self.discard(place);
                    first_error.get_or_insert(TierError::SameShortName);
                }
                Err(error) => _ = first_error.get_or_insert(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::on_disk;
    use super::*;
    use crate::disk::testing::FailingDisk;
    use crate::layout::Layout;
    use crate::tier::Tier as _;
    use std::sync::Arc;

    const LAYOUT: Layout = Layout { block_bytes: 100, capacity: 200, fingerprint: 0 };

    fn fill(key: BlockKey, bytes: &mut [u8]) {
        bytes.fill(key.0 as u8);
    }

    fn keys(upto: u128) -> Vec<BlockKey> {
        (0..upto).map(BlockKey).collect()
    }

    #[test]
    fn more_than_fit_under_way_are_put_and_got() {
        let disk = Arc::new(FailingDisk::default());
        let mut tier = on_disk(&disk, LAYOUT).unwrap();
        tier.put_all(keys(150).into_iter().map(|key| (key, None)), fill).unwrap();
        let mut seen = Vec::new();
        tier.get_all(&keys(150), |key, bytes| {
            assert!(bytes.iter().all(|&byte| byte == key.0 as u8));
            seen.push(key);
        })
        .unwrap();
        seen.sort_unstable();
        assert_eq!(seen, keys(150));
        let flushes = disk.state.lock().unwrap().flushes;
        assert!(flushes < 150, "they share their flushes: {flushes}");
    }

    #[test]
    fn what_goes_wrong_is_told_once_all_has_ended() {
        let disk = Arc::new(FailingDisk::default());
        let mut tier = on_disk(&disk, LAYOUT).unwrap();
        let put = |tier: &mut FileTier, keys: Vec<BlockKey>| {
            tier.put_all(keys.into_iter().map(|key| (key, None)), fill)
        };
        put(&mut tier, keys(50)).unwrap();
        assert!(matches!(put(&mut tier, keys(1)), Err(TierError::SameShortName)));
        assert!(matches!(tier.get_all(&[BlockKey(99)], |_, _| ()), Err(TierError::Absent)));
        assert!(matches!(put(&mut tier, (100..300).map(BlockKey).collect()), Err(TierError::Full)));
        assert_eq!((tier.len_blocks(), tier.jobs()), (200, 0));
        disk.state.lock().unwrap().flip_reads = 1;
        assert!(matches!(tier.get_all(&keys(50), |_, _| ()), Err(TierError::Corrupt { .. })));
        assert_eq!(tier.jobs(), 0);
    }
}
