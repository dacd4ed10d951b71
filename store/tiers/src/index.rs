//! Which block rests in which slot, as the file has it: pages of entries with two sides each.
//!
//! A page is written whole, to the side where its last lasting state is *not*, under the next
//! version. So a write that is cut short costs nothing: the other side still says what was true.
//! Of two sound sides the higher version counts.
//!
//! Each sector of a page has a checksum and the version of its own. A write that a crash cut short
//! leaves sectors of two versions, each sound; what rots leaves a sector that is not. So a newest
//! side that rotted is not taken for one that was never answered: the side before it still lists
//! what was removed since, so the page is given up. A side of zeros counts as never written: a disk
//! that forgets a whole page, and gives zeros for it, is believed.

use crate::aligned::PAGE_BYTES;
use crate::layout::{Layout, PAGE_ENTRIES, SECTOR_BYTES, SECTOR_ENTRIES, put_words, word};
use baton_types::BlockKey;
use crc_fast::{CrcAlgorithm, checksum};
use std::collections::BTreeSet;

/// The size of an entry, and of a sector's header.
const ENTRY_BYTES: usize = 64;
const PAGE_MAGIC: u64 = 0x4254_4E4B_5658_4944;
/// Bits of an entry's flags.
const PRESENT: u64 = 1;
const HAS_PARENT: u64 = 2;

/// Where a block rests, and what vouches for its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The slot's number.
    pub slot: u32,
    /// The how-manieth write to the file.
    pub generation: u64,
    /// Of the key and the bytes.
    pub checksum: u64,
}

/// One block of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The block.
    pub key: BlockKey,
    /// The block that it continues.
    pub parent: Option<BlockKey>,
    /// The block's place in the file.
    pub place: Place,
}

impl Entry {
    fn encode(&self, out: &mut [u8]) {
        let halves = |key: BlockKey| [key.0 as u64, (key.0 >> 64) as u64];
        let ([low, high], [above_low, above_high]) =
            (halves(self.key), halves(self.parent.unwrap_or(BlockKey(0))));
        let flags = PRESENT | if self.parent.is_some() { HAS_PARENT } else { 0 };
        let Place { slot, generation, checksum } = self.place;
        put_words(out, &[low, high, above_low, above_high, generation, checksum, u64::from(slot), flags]);
    }

    /// The entry of `slot` if there is one.
    fn decode(bytes: &[u8], slot: u32) -> Option<Self> {
        let key = |at| BlockKey(u128::from(word(bytes, at)) | u128::from(word(bytes, at + 1)) << 64);
        let flags = word(bytes, 7);
        if flags & PRESENT == 0 || word(bytes, 6) != u64::from(slot) {
            return None;
        }
        let parent = (flags & HAS_PARENT != 0).then(|| key(2));
        let place = Place { slot, generation: word(bytes, 4), checksum: word(bytes, 5) };
        Some(Self { key: key(0), parent, place })
    }
}

/// The keys of the blocks that a start tries the disk out with.
pub(crate) const fn trial_key(at: u64) -> BlockKey {
    BlockKey((u64::MAX as u128) << 64 | at as u128)
}

/// Whether a block is such a one, left by a start that was killed.
pub(crate) const fn is_trial(key: BlockKey) -> bool {
    (key.0 >> 64) as u64 == u64::MAX
}

/// How far a page got.
#[derive(Clone, Copy, Debug, Default)]
struct PageProgress {
    /// The version that lasts; its parity is its side.
    lasting: u64,
    /// The highest version that was tried; always for the other side.
    tried: u64,
}

/// The state of a sector of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sector {
    /// Of this life, in this version.
    Sound(u64),
    /// Never written in this life.
    Unused,
    /// Not as it was written.
    Rotten,
}

/// The state of a side of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// Of this life, in this version.
    Sound(u64),
    /// Never written in this life.
    Unused,
    /// Its last write was cut short: it never was the last word.
    Cut,
    /// Not as it was written: it may have been the last word, in this version at the most.
    Rotten(u64),
}

impl Side {
    fn of(sectors: impl Iterator<Item = Sector>) -> Self {
        let (mut versions, mut unused, mut rotten) = (BTreeSet::new(), 0, 0);
        for sector in sectors {
            match sector {
                Sector::Sound(version) => _ = versions.insert(version),
                Sector::Unused => unused += 1,
                Sector::Rotten => rotten += 1,
            }
        }
        let only = versions.first().copied().filter(|_| versions.len() == 1 && unused == 0);
        match (only, rotten) {
            (Some(version), 0) => Self::Sound(version),
            (Some(version), _) => Self::Rotten(version),
            // Sectors of zeros beside them prove nothing: another page that is mostly zeros may lie here by mistake.
            (None, 1..) if versions.is_empty() => Self::Rotten(u64::MAX),
            (None, 0) if versions.is_empty() => Self::Unused,
            _ => Self::Cut,
        }
    }

    fn version(self) -> Option<u64> {
        if let Self::Sound(version) = self { Some(version) } else { None }
    }
}

/// The result of recovering a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageOutcome {
    /// Whether blocks are lost: the last content of the page is unknown.
    pub is_lost: bool,
    /// Sides that are sound but outdated, of a page that is lost. They are wiped before the torn ones, or the next
    /// start would believe them.
    pub is_outdated: [bool; 2],
    /// Sides to be wiped before anything else is written. Otherwise a later write that is cut short could combine its
    /// own sectors and theirs into an outdated page.
    pub is_torn: [bool; 2],
}

/// The index in memory: every page as it is to be.
#[derive(Debug)]
pub(crate) struct Index {
    layout: Layout,
    incarnation: u64,
    bytes: Vec<u8>,
    pages: Vec<PageProgress>,
    dirty: BTreeSet<u32>,
}

impl Index {
    /// An empty one.
    pub(crate) fn new(layout: Layout, incarnation: u64) -> Self {
        let pages = layout.index_pages() as usize;
        Self {
            layout,
            incarnation,
            bytes: vec![0; pages * PAGE_ENTRIES * ENTRY_BYTES],
            pages: vec![PageProgress::default(); pages],
            dirty: BTreeSet::new(),
        }
    }

    /// Empties it for a new life of the file.
    pub(crate) fn restart(&mut self, incarnation: u64) {
        *self = Self::new(self.layout, incarnation);
    }

    /// Takes over the two sides of a page as they were read.
    pub(crate) fn adopt(&mut self, page: u32, side_pair: &[u8]) -> PageOutcome {
        let (first, second) = side_pair.split_at(PAGE_BYTES);
        let sides = [self.look(page, 0, first), self.look(page, 1, second)];
        let best = sides[0].version().max(sides[1].version());
        let is_torn = sides.map(|side| matches!(side, Side::Cut | Side::Rotten(_)));
        // Two that were cut short are no crash's doing: the one that lasted is not written to.
        let is_lost = sides.iter().any(|side| matches!(side, Side::Rotten(last) if Some(*last) > best))
            || (best.is_none() && is_torn == [true; 2]);
        if is_lost {
            return PageOutcome { is_lost, is_outdated: sides.map(|side| side.version().is_some()), is_torn };
        }
        if let Some(lasting) = best {
            self.pages[page as usize] = PageProgress { lasting, tried: lasting };
            let from = page as usize * PAGE_ENTRIES * ENTRY_BYTES;
            let entries = self.bytes[from..].chunks_exact_mut(SECTOR_ENTRIES * ENTRY_BYTES);
            let sectors = if lasting & 1 == 0 { first } else { second }.chunks_exact(SECTOR_BYTES);
            entries.zip(sectors).for_each(|(to, from)| to.copy_from_slice(&from[ENTRY_BYTES..]));
        }
        PageOutcome { is_lost, is_outdated: [false; 2], is_torn }
    }

    fn look(&self, page: u32, side: u64, bytes: &[u8]) -> Side {
        Side::of((0..).zip(bytes.chunks_exact(SECTOR_BYTES)).map(|(number, bytes)| {
            let is_sound = word(bytes, 0) == checksum(CrcAlgorithm::Crc64Nvme, &bytes[8..])
                && word(bytes, 1) == PAGE_MAGIC
                && word(bytes, 3) == u64::from(page)
                && word(bytes, 4) & 1 == side
                && word(bytes, 5) == number;
            match is_sound {
                true if word(bytes, 2) == self.incarnation => Sector::Sound(word(bytes, 4)),
                false if bytes.iter().any(|&byte| byte != 0) => Sector::Rotten,
                _ => Sector::Unused,
            }
        }))
    }

    /// All entries, by slot.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let bytes = self.bytes.chunks_exact(ENTRY_BYTES);
        (0..self.layout.slots()).zip(bytes).filter_map(|(slot, bytes)| Entry::decode(bytes, slot))
    }

    /// Adds a block, in place of what the slot's entry was.
    pub(crate) fn set(&mut self, entry: &Entry) {
        let slot = entry.place.slot;
        entry.encode(&mut self.bytes[range(slot)]);
        self.dirty.insert(slot / PAGE_ENTRIES as u32);
    }

    /// Takes out the block of one write, if its slot still has it.
    pub(crate) fn clear(&mut self, place: Place) {
        let known = Entry::decode(&self.bytes[range(place.slot)], place.slot);
        if known.is_some_and(|entry| entry.place.generation == place.generation) {
            self.bytes[range(place.slot)].fill(0);
            self.dirty.insert(place.slot / PAGE_ENTRIES as u32);
        }
    }

    /// Pages that do not last as they are in memory.
    pub(crate) fn dirty_pages(&self) -> usize {
        self.dirty.len()
    }

    /// Takes the dirty pages to be written. Each is to be reported [`Index::lasts`] or
    /// [`Index::missed`] before anything changes again.
    pub(crate) fn take_dirty(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.dirty).into_iter().collect()
    }

    /// A page under its next version, and where it goes.
    pub(crate) fn compose(&mut self, page: u32, out: &mut [u8]) -> u64 {
        let written = &mut self.pages[page as usize];
        // After a failed try two more: the side stays, and what the failed one left is outdone.
        written.tried += if written.tried == written.lasting { 1 } else { 2 };
        let from = page as usize * PAGE_ENTRIES * ENTRY_BYTES;
        let entries = self.bytes[from..].chunks_exact(SECTOR_ENTRIES * ENTRY_BYTES);
        for ((number, sector), entries) in (0..).zip(out.chunks_exact_mut(SECTOR_BYTES)).zip(entries) {
            let words = [PAGE_MAGIC, self.incarnation, u64::from(page), written.tried, number, 0, 0];
            put_words(&mut sector[8..], &words);
            sector[ENTRY_BYTES..].copy_from_slice(entries);
            let sum = checksum(CrcAlgorithm::Crc64Nvme, &sector[8..]);
            put_words(sector, &[sum]);
        }
        self.layout.page_offset(page, written.tried)
    }

    /// Marks the composed version of this page as durable.
    pub(crate) fn lasts(&mut self, page: u32) {
        let written = &mut self.pages[page as usize];
        written.lasting = written.tried;
    }

    /// Marks the composed version of this page as written or not: unknown.
    pub(crate) fn missed(&mut self, page: u32) {
        self.dirty.insert(page);
    }
}

fn range(slot: u32) -> std::ops::Range<usize> {
    let from = slot as usize * ENTRY_BYTES;
    from..from + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { block_bytes: 100, capacity: 100, fingerprint: 0 };

    fn entry(slot: u32, generation: u64) -> Entry {
        let key = BlockKey(u128::from(generation) << 70 | 5);
        let parent = generation.is_multiple_of(2).then_some(BlockKey(u128::MAX - 3));
        Entry { key, parent, place: Place { slot, generation, checksum: !generation } }
    }

    /// Writes the dirty pages to a file in memory.
    fn write(index: &mut Index, file: &mut [u8]) {
        for page in index.take_dirty() {
            let mut bytes = vec![9; PAGE_BYTES];
            let at = index.compose(page, &mut bytes) as usize;
            file[at..at + PAGE_BYTES].copy_from_slice(&bytes);
            index.lasts(page);
        }
    }

    fn read(file: &[u8], incarnation: u64) -> (Index, usize) {
        let mut index = Index::new(LAYOUT, incarnation);
        let pair = |page| {
            let at = LAYOUT.page_offset(page, 0) as usize;
            &file[at..at + 2 * PAGE_BYTES]
        };
        let lost = (0..LAYOUT.index_pages()).filter(|&page| index.adopt(page, pair(page)).is_lost).count();
        (index, lost)
    }

    #[test]
    fn what_is_written_is_read_and_a_removed_block_stays_removed() {
        let mut file = vec![0; LAYOUT.slot_offset(0) as usize];
        let mut index = Index::new(LAYOUT, 7);
        let all = [entry(0, 1), entry(55, 2), entry(56, 3), entry(100, 4)];
        all.iter().for_each(|entry| index.set(entry));
        assert_eq!(index.dirty_pages(), 2);
        write(&mut index, &mut file);
        assert_eq!(read(&file, 7).0.entries().collect::<Vec<_>>(), all);
        index.clear(all[1].place);
        index.clear(Place { generation: 99, ..all[2].place });
        assert_eq!(index.dirty_pages(), 1, "a slot that has another block by now is left alone");
        write(&mut index, &mut file);
        let (again, lost) = read(&file, 7);
        assert_eq!((again.entries().collect::<Vec<_>>(), lost), (vec![all[0], all[2], all[3]], 0));
        let (other, lost) = read(&file, 8);
        assert_eq!((other.entries().count(), lost), (0, 0), "an earlier life of the file");
    }

    /// A page in versions 1 to `rounds`, each with one entry more.
    fn written(rounds: u64) -> Vec<u8> {
        let mut file = vec![0; LAYOUT.slot_offset(0) as usize];
        let mut index = Index::new(LAYOUT, 7);
        for round in 1..=rounds {
            index.set(&entry(round as u32, round));
            write(&mut index, &mut file);
        }
        file
    }

    fn side_of(round: u64) -> std::ops::Range<usize> {
        let from = LAYOUT.page_offset(0, round) as usize;
        from..from + PAGE_BYTES
    }

    #[test]
    fn a_write_that_was_cut_short_leaves_what_was_true_before() {
        for round in 1..6 {
            let (before, after) = (written(round - 1), written(round));
            assert_eq!(read(&after, 7).0.entries().count(), round as usize);
            for mask in 0..255_u32 {
                let mut file = before.clone();
                let sectors = side_of(round).step_by(SECTOR_BYTES);
                for at in sectors.enumerate().filter(|(number, _)| mask >> number & 1 == 1).map(|(_, at)| at)
                {
                    file[at..at + SECTOR_BYTES].copy_from_slice(&after[at..at + SECTOR_BYTES]);
                }
                let (older, lost) = read(&file, 7);
                assert_eq!((older.entries().count(), lost), (round as usize - 1, 0), "{round} {mask:b}");
            }
        }
    }

    /// Any bit of the newest side: the side before it is not believed, for it lists what was removed since. Any bit of
    /// the other side costs nothing, if that was ever written.
    #[test]
    fn a_flipped_bit_in_the_newest_side_gives_the_page_up_and_in_the_other_nothing() {
        for round in 1..5 {
            let mut file = written(round);
            for (side, is_newest) in [(side_of(round), true), (side_of(round - 1), false)] {
                for bit in (side.start * 8..side.end * 8).step_by(3) {
                    file[bit / 8] ^= 1 << (bit % 8);
                    let (index, lost) = read(&file, 7);
                    let expected = if is_newest || round == 1 { (0, 1) } else { (round as usize, 0) };
                    assert_eq!((index.entries().count(), lost), expected, "version {round}, bit {bit}");
                    file[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
    }

    /// A disk may put the page of a header, one sector and zeros, where the newest side was.
    #[test]
    fn a_newest_side_under_a_page_of_mostly_zeros_gives_the_page_up() {
        for number in 0..PAGE_BYTES / SECTOR_BYTES {
            let mut file = written(4);
            let newest = side_of(4);
            file[newest.clone()].fill(0);
            file[newest.start + number * SECTOR_BYTES..][..100].fill(7);
            let (index, lost) = read(&file, 7);
            assert_eq!((index.entries().count(), lost), (0, 1), "sector {number}");
        }
    }

    #[test]
    fn of_a_page_that_is_lost_the_older_side_is_to_be_wiped_first() {
        let mut file = written(4);
        file[side_of(4).start + 700] ^= 1;
        let pair = file[side_of(4).start..side_of(5).end].to_vec();
        let adopted = Index::new(LAYOUT, 7).adopt(0, &pair);
        let expected = PageOutcome { is_lost: true, is_outdated: [false, true], is_torn: [true, false] };
        assert_eq!(adopted, expected);
        file[side_of(4)].fill(0xFF);
        assert_eq!(read(&file, 7).1, 1, "nothing of it can be read");
        file[side_of(3)].fill(0xFF);
        assert_eq!(read(&file, 7).1, 1);
    }

    #[test]
    fn a_failed_write_is_tried_again_on_the_same_side_and_outdoes_it() {
        let mut index = Index::new(LAYOUT, 7);
        let mut bytes = vec![0; PAGE_BYTES];
        index.set(&entry(1, 1));
        index.take_dirty();
        let first = index.compose(0, &mut bytes);
        index.lasts(0);
        let offsets: Vec<_> = (0..3).map(|_| index.compose(0, &mut bytes)).collect();
        assert!(offsets.iter().all(|&at| at == offsets[0] && at != first));
        assert_eq!(word(&bytes, 4), 6);
        index.lasts(0);
        assert_eq!(index.compose(0, &mut bytes), first);
        index.missed(0);
        assert_eq!(index.dirty_pages(), 1);
    }
}
