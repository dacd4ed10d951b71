//! The memory of a segment: bytes that peers read and write by ranges of addresses.
//!
//! Its addresses are names, not places: they begin at a random number in every life of the process, so that what a peer
//! still knows of an earlier life lies outside and is refused, instead of reading other bytes as if nothing had happened.

use std::hash::{BuildHasher as _, RandomState};

use parking_lot::RwLock;

use crate::error::{MooncakeError, Result};

/// Bytes that are locked together.
const PAGE_BYTES: usize = 1 << 20;
/// Lowest first address: no small number is ever a valid one.
const BASE_MIN: u64 = 1 << 36;
/// First addresses differ by multiples of this, which every allocator of a master is content with.
const BASE_STEP: u64 = 1 << 30;
/// How many first addresses there are: all below what a process can address.
const BASES: u64 = 1 << 16;
/// Bytes of a segment at most.
pub const REGION_BYTES_MAX: u64 = 1 << 40;

/// The memory of one segment. A page that nobody wrote costs no memory.
pub struct Region {
    base: u64,
    bytes: u64,
    pages: Vec<RwLock<Box<[u8]>>>,
}

impl Region {
    /// A region of `bytes` zeros at a random first address.
    ///
    /// # Errors
    /// When that is nothing, or more than any machine has.
    pub fn new(bytes: u64) -> Result<Self> {
        let base = BASE_MIN + (random() % BASES) * BASE_STEP;
        Self::at(base, bytes)
    }

    /// A region that begins at a given address.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn at(base: u64, bytes: u64) -> Result<Self> {
        if bytes == 0 || bytes > REGION_BYTES_MAX || base.checked_add(bytes).is_none() {
            let message = format!("a segment of {bytes} bytes cannot be; take 1 to {REGION_BYTES_MAX}");
            return Err(MooncakeError::invalid("segment", message));
        }
        let pages = (0..bytes.div_ceil(PAGE_BYTES as u64)).map(|page| {
            let left = bytes - page * PAGE_BYTES as u64;
            RwLock::new(vec![0; (PAGE_BYTES as u64).min(left) as usize].into_boxed_slice())
        });
        Ok(Self { base, bytes, pages: pages.collect() })
    }

    /// Its first address.
    #[must_use]
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// How many bytes it has.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all of a range lies inside.
    #[must_use]
    pub fn holds(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        address >= self.base && end <= self.base + self.bytes
    }

    /// Fills `into` with the bytes from `address` on; the range [holds](Region::holds).
    pub fn read(&self, address: u64, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let (page, at) = self.place(address + done as u64);
            let page = self.pages[page].read();
            let count = (page.len() - at).min(into.len() - done);
            into[done..done + count].copy_from_slice(&page[at..at + count]);
            done += count;
        }
    }

    /// Puts `bytes` at `address`; the range [holds](Region::holds).
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let (page, at) = self.place(address + done as u64);
            let mut page = self.pages[page].write();
            let count = (page.len() - at).min(bytes.len() - done);
            page[at..at + count].copy_from_slice(&bytes[done..done + count]);
            done += count;
        }
    }

    fn place(&self, address: u64) -> (usize, usize) {
        let offset = (address - self.base) as usize;
        (offset / PAGE_BYTES, offset % PAGE_BYTES)
    }
}

/// A number that cannot be predicted: the standard library's hash keys are drawn by the system.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_across_pages_are_found_again() {
        let region = Region::at(1 << 40, 3 * PAGE_BYTES as u64 + 5).unwrap();
        let bytes: Vec<u8> = (0..PAGE_BYTES + 17).map(|i| (i % 251) as u8).collect();
        let address = region.base() + PAGE_BYTES as u64 - 9;
        region.write(address, &bytes);
        let mut back = vec![0; bytes.len()];
        region.read(address, &mut back);
        assert_eq!(back, bytes);
        let mut before = [1; 3];
        region.read(region.base(), &mut before);
        assert_eq!(before, [0; 3], "what nobody wrote is zero");
        let mut last = [1; 5];
        region.read(region.base() + region.bytes() - 5, &mut last);
        assert_eq!(last, [0; 5]);
    }

    #[test]
    fn only_whole_ranges_inside_are_held() {
        let region = Region::at(4096, 100).unwrap();
        assert!(region.holds(4096, 100) && region.holds(4195, 1) && region.holds(4196, 0));
        for (address, bytes) in [(4095, 1), (4096, 101), (4196, 1), (u64::MAX, 2), (4100, u64::MAX)] {
            assert!(!region.holds(address, bytes), "{address}+{bytes}");
        }
    }

    #[test]
    fn every_life_has_other_addresses() {
        let bases: Vec<u64> = (0..8).map(|_| Region::new(1).unwrap().base()).collect();
        assert!(bases.iter().any(|base| *base != bases[0]), "{bases:?}");
        assert!(bases.iter().all(|base| base.is_multiple_of(BASE_STEP)));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for bytes in [0, REGION_BYTES_MAX + 1] {
            assert!(Region::new(bytes).is_err());
        }
        assert!(Region::at(u64::MAX, 2).is_err());
    }
}
