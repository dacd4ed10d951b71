//! Layout of the file, and the content of its header.
//!
//! All numbers are little-endian. The first two pages are the header's two sides; then come the two sides of each
//! index page, next to each other; then the slots, each a block rounded up to whole pages. Of two sides, the one with
//! the last durable state is never overwritten.

use crate::aligned::PAGE_BYTES;
use crc_fast::{CrcAlgorithm, checksum};

/// The first bytes of every slab file.
pub(crate) const FILE_MAGIC: [u8; 8] = *b"BATONKV\n";
/// The version of the format.
///
/// 3: each sector of an index page vouches for itself, and so does each header of a value.
pub(crate) const VERSION: u64 = 3;
/// Bytes that a disk writes at once or not at all.
pub(crate) const SECTOR_BYTES: usize = 512;
/// Entries in a sector of an index page, each 64 bytes; the sector's own header takes as much.
pub(crate) const SECTOR_ENTRIES: usize = 7;
/// Entries in an index page.
pub(crate) const PAGE_ENTRIES: usize = PAGE_BYTES / SECTOR_BYTES * SECTOR_ENTRIES;
/// Slots beyond the capacity at most.
const MAX_SPARE_SLOTS: u32 = 32;
/// The words of a header before its checksum.
const WORDS: usize = 8;

/// The parameters that a file is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The size of a block.
    pub block_bytes: usize,
    /// The most blocks that the file holds.
    pub capacity: u32,
    /// Stands for everything that gives the bytes of a block their meaning.
    pub fingerprint: u64,
}

impl Layout {
    /// How many slots there are. A few more than blocks: the slot of a block that went is free
    /// only once its entry is gone for good, and the next block should not have to wait for that.
    pub(crate) const fn slots(&self) -> u32 {
        if self.capacity == 0 {
            return 0;
        }
        let share = self.capacity / 64;
        self.capacity
            + if share < 1 {
                1
            } else if share > MAX_SPARE_SLOTS {
                MAX_SPARE_SLOTS
            } else {
                share
            }
    }

    /// How many index pages there are, each with two sides.
    pub(crate) const fn index_pages(&self) -> u32 {
        self.slots().div_ceil(PAGE_ENTRIES as u32)
    }

    /// Where a side of an index page is.
    pub(crate) const fn page_offset(&self, page: u32, side: u64) -> u64 {
        (2 + 2 * page as u64 + (side & 1)) * PAGE_BYTES as u64
    }

    /// From slot to slot.
    pub(crate) const fn stride_bytes(&self) -> usize {
        self.block_bytes.next_multiple_of(PAGE_BYTES)
    }

    /// Where a slot is.
    pub(crate) const fn slot_offset(&self, slot: u32) -> u64 {
        self.page_offset(self.index_pages(), 0) + self.stride_bytes() as u64 * slot as u64
    }

    /// The whole file.
    pub(crate) const fn file_bytes(&self) -> u64 {
        self.slot_offset(self.slots())
    }
}

/// The content of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The parameters that the file is made for.
    pub layout: Layout,
    /// Distinguishes the index pages of this life of the file from those of earlier ones.
    pub incarnation: u64,
    /// Counts the headers written; its parity is the side.
    pub sequence: u64,
}

/// The state of a page at the head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadPage {
    /// Zeros: nothing was written here yet.
    Blank,
    /// Not ours.
    Foreign,
    /// Ours, of another version.
    Version(u64),
    /// Ours, damaged or half written.
    Damaged,
    /// A header.
    Good(Header),
}

impl Header {
    /// The page that says it.
    pub(crate) fn encode(&self, page: &mut [u8]) {
        let Layout { block_bytes, capacity, fingerprint } = self.layout;
        page.fill(0);
        page[..8].copy_from_slice(&FILE_MAGIC);
        let numbers = [
            VERSION,
            block_bytes as u64,
            u64::from(capacity),
            fingerprint,
            self.incarnation,
            self.sequence,
            self.layout.file_bytes(),
        ];
        put_words(&mut page[8..], &numbers);
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &page[..WORDS * 8]);
        put_words(&mut page[WORDS * 8..], &[sum]);
    }

    /// Where it is written.
    pub(crate) const fn offset(&self) -> u64 {
        (self.sequence & 1) * PAGE_BYTES as u64
    }

    /// Reads a page.
    pub(crate) fn parse_head(page: &[u8]) -> HeadPage {
        if page[..8] != FILE_MAGIC {
            let is_blank = page.iter().all(|&byte| byte == 0);
            return if is_blank { HeadPage::Blank } else { HeadPage::Foreign };
        }
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &page[..WORDS * 8]);
        if word(page, 1) != VERSION {
            return HeadPage::Version(word(page, 1));
        }
        if word(page, WORDS) != sum {
            return HeadPage::Damaged;
        }
        let (Ok(block_bytes), Ok(capacity)) = (usize::try_from(word(page, 2)), u32::try_from(word(page, 3)))
        else {
            return HeadPage::Damaged;
        };
        let layout = Layout { block_bytes, capacity, fingerprint: word(page, 4) };
        HeadPage::Good(Self { layout, incarnation: word(page, 5), sequence: word(page, 6) })
    }
}

/// Writes numbers, eight bytes each.
pub(crate) fn put_words(out: &mut [u8], words: &[u64]) {
    for (place, number) in out.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&number.to_le_bytes());
    }
}

/// The number at position `at`, counted in numbers.
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().expect("eight bytes are eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { block_bytes: 5000, capacity: 200, fingerprint: 9 };

    #[test]
    fn nothing_overlaps_and_all_is_aligned() {
        assert_eq!((LAYOUT.slots(), LAYOUT.index_pages(), LAYOUT.stride_bytes()), (203, 4, 8192));
        assert_eq!([LAYOUT.page_offset(0, 0), LAYOUT.page_offset(0, 7)], [8192, 12288]);
        assert_eq!(LAYOUT.slot_offset(0), 10 * 4096);
        assert_eq!(LAYOUT.file_bytes(), 10 * 4096 + 203 * 8192);
        let none = Layout { capacity: 0, ..LAYOUT };
        assert_eq!((none.slots(), none.file_bytes()), (0, 8192));
    }

    #[test]
    fn a_header_is_read_as_written_and_every_damaged_bit_is_seen() {
        let header = Header { layout: LAYOUT, incarnation: 5, sequence: 3 };
        let mut page = vec![7; PAGE_BYTES];
        header.encode(&mut page);
        assert_eq!(Header::parse_head(&page), HeadPage::Good(header));
        for bit in 0..(WORDS + 1) * 64 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(!matches!(Header::parse_head(&page), HeadPage::Good(_)), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Header::parse_head(&[0; PAGE_BYTES]), HeadPage::Blank);
        assert_eq!(Header::parse_head(&[b'x'; PAGE_BYTES]), HeadPage::Foreign);
        page[8] = 4;
        assert_eq!(Header::parse_head(&page), HeadPage::Version(4));
    }
}
