//! The trial at the start: does the disk give back what it was given, and how fast.

use super::FileTier;
use crate::index::trial_key;
use crate::tier::{Tier, TierError};
use baton_types::BlockKey;
use std::time::{Duration, Instant};

/// Blocks and bytes that the trial writes at most.
const TRIAL_BLOCKS: usize = 32;
const TRIAL_BYTES: usize = 16 << 20;

/// Measured speed of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    /// Bytes read per second.
    pub read_bytes_per_s: u64,
    /// Writing, until it lasts.
    pub write_bytes_per_s: u64,
}

impl FileTier {
    /// Writes blocks, reads them back, and removes them. `None`: every slot is in use, there is
    /// nothing to try it with.
    ///
    /// # Errors
    /// In words, what the disk did wrong: it is not to be used.
    pub fn try_out(&mut self) -> Result<Option<Speed>, String> {
        self.settle();
        let most = (TRIAL_BYTES / self.layout.stride_bytes().max(1)).clamp(1, TRIAL_BLOCKS);
        let blocks = most.min(self.capacity_blocks().saturating_sub(self.len_blocks()));
        if blocks == 0 {
            return Ok(None);
        }
        let keys: Vec<BlockKey> = (0..blocks as u64).map(trial_key).collect();
        let begun = Instant::now();
        self.put_all(keys.iter().map(|&key| (key, None)), fill)
            .map_err(|error| format!("writing: {error}"))?;
        let wrote = begun.elapsed();
        let begun = Instant::now();
        self.read_trial(&keys).map_err(|error| format!("reading back: {error}"))?;
        let read = begun.elapsed();
        self.remove_trial(&keys)?;
        let bytes = blocks * self.layout.block_bytes;
        Ok(Some(Speed { read_bytes_per_s: rate(bytes, read), write_bytes_per_s: rate(bytes, wrote) }))
    }

    fn read_trial(&mut self, keys: &[BlockKey]) -> Result<(), TierError> {
        let mut expected = vec![0; self.block_bytes()];
        let mut are_same = true;
        self.get_all(keys, |key, bytes| {
            fill(key, &mut expected);
            are_same &= bytes == expected;
        })?;
        if are_same { Ok(()) } else { Err(TierError::Corrupt { what: "a trial block on flash" }) }
    }

    fn remove_trial(&mut self, keys: &[BlockKey]) -> Result<(), String> {
        for &key in keys {
            if !self.remove(key.short()) || self.place(key).is_some() {
                return Err("a block that was removed is still there; please report this".into());
            }
        }
        self.settle();
        let is_free = self.slot_table.draining() == 0 && !self.is_off;
        if is_free { Ok(()) } else { Err("removing: the disk did not take it".into()) }
    }
}

/// Fills a trial block: no two alike, and not compressible.
fn fill(key: BlockKey, bytes: &mut [u8]) {
    let mut rng = baton_types::Rng::new(key.short().0);
    for chunk in bytes.chunks_mut(8) {
        let number = rng.next_u64().to_le_bytes();
        chunk.copy_from_slice(&number[..chunk.len()]);
    }
}

fn rate(bytes: usize, took: Duration) -> u64 {
    (bytes as f64 / took.as_secs_f64().max(1e-9)) as u64
}

#[cfg(test)]
mod tests {
    use super::super::testing::on_disk;
    use super::*;
    use crate::disk::testing::FailingDisk;
    use crate::layout::Layout;
    use std::sync::Arc;

    const LAYOUT: Layout = Layout { block_bytes: 100, capacity: 40, fingerprint: 0 };

    #[test]
    fn a_good_disk_passes_and_keeps_nothing_of_the_trial() {
        let mut tier = on_disk(&Arc::default(), LAYOUT).unwrap();
        let speed = tier.try_out().unwrap().expect("there is room");
        assert!(speed.read_bytes_per_s > 0 && speed.write_bytes_per_s > 0);
        assert_eq!((tier.len_blocks(), tier.under_way()), (0, 0));
        for key in 0..40 {
            tier.put(BlockKey(key), &[1; 100]).unwrap();
        }
        assert_eq!(tier.try_out(), Ok(None), "every slot is in use");
    }

    #[test]
    fn a_disk_that_fails_or_lies_is_found_out() {
        type Break = fn(&mut crate::disk::testing::SickState);
        let breaks: [(Break, &str); 5] = [
            (|state| state.fail_writes = 1, "writing"),
            (|state| state.fail_flushes = 1, "writing"),
            (|state| state.fail_reads = 1, "reading back"),
            (|state| state.lose_writes = 1, "reading back"),
            (|state| state.lose_all_writes = true, "reading back"),
        ];
        for (break_it, at) in breaks {
            let disk = Arc::new(FailingDisk::default());
            let mut tier = on_disk(&disk, LAYOUT).unwrap();
            break_it(&mut disk.state.lock().unwrap());
            let why = tier.try_out().unwrap_err();
            assert!(why.starts_with(at), "{why}");
        }
    }
}
