//! Recovers the entries of an earlier life from the file, without reading a single block.

use crate::aligned::{AlignedBuffer, PAGE_BYTES};
use crate::disk::Disk;
use crate::index::{Entry, Index, is_trial};
use crate::layout::{HeadPage, Header, Layout, VERSION};
use crate::slot_table::Places;
use std::fmt;
use std::io;

/// Index pages read at a time, both sides of each.
const CHUNK_PAGES: u32 = 128;

/// How a tier began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// The file is new.
    New,
    /// The file keeps nothing, because no folder was given for it.
    Temporary,
    /// The blocks that an earlier life reported as durable are back.
    Recovered {
        /// The number of blocks that are back.
        blocks: u64,
        /// Index pages whose last state is not to be known: their blocks are lost.
        lost_pages: u64,
        /// Other index pages with a side that was cut short or damaged, and was not the last to be answered.
        torn_pages: u64,
    },
    /// The file is ours, but what is in it cannot be used.
    Emptied {
        /// Why the content cannot be used.
        reason: String,
    },
}

impl fmt::Display for Beginning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::New => write!(f, "a new file"),
            Self::Temporary => write!(f, "a temporary file; give a folder to keep blocks over restarts"),
            Self::Recovered { blocks, lost_pages, torn_pages } => {
                write!(f, "{blocks} blocks recovered")?;
                if *torn_pages > 0 {
                    write!(f, ", {torn_pages} index pages cut short, as they were before")?;
                }
                if *lost_pages > 0 {
                    write!(f, ", {lost_pages} index pages damaged and given up; look at the disk")?;
                }
                Ok(())
            }
            Self::Emptied { reason } => write!(f, "started empty: {reason}"),
        }
    }
}

/// Why there is no flash tier.
#[derive(Debug, thiserror::Error)]
pub enum FlashError {
    /// Another process has the file open.
    #[error("kv.slab is in use; give each node its own directory")]
    InUse,
    /// The file is not one of ours.
    #[error("kv.slab is not a slab file of ours; remove it or name another directory")]
    Foreign,
    /// The file was written by a newer release.
    #[error("kv.slab has format {version}, this release knows {VERSION}; start a newer release or remove it")]
    Newer {
        /// The version of its format.
        version: u64,
    },
    /// The file is shorter than its header says.
    #[error(
        "kv.slab has {has_bytes} bytes where its header says {header_bytes}; it was cut short, remove it"
    )]
    Short {
        /// Actual size.
        has_bytes: u64,
        /// Expected size.
        header_bytes: u64,
    },
    /// The disk has no room for the file.
    #[error("no room for {file_bytes} bytes ({why}); lower ssd_blocks or free some space")]
    NoRoom {
        /// The bytes that were requested.
        file_bytes: u64,
        /// The system's error.
        why: String,
    },
    /// The operating system refused.
    #[error("{0}")]
    Io(io::Error),
}

impl From<io::Error> for FlashError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// An opened file.
#[derive(Debug)]
pub(crate) struct OpenedFile {
    /// Its header.
    pub header: Header,
    /// Its index; entries that do not count are still in it.
    pub index: Index,
    /// The blocks, no two with one short name.
    pub entries: Vec<Entry>,
    /// The places of the blocks by short name.
    pub places: Places,
    /// Entries that do not count: another of the same name is newer.
    pub stale: Vec<Entry>,
    /// How it began.
    pub beginning: Beginning,
}

/// The state of the head of a file.
pub(crate) enum FoundHeader {
    /// Nothing of use; the next header's sequence, and why if there was something.
    Unusable(u64, Option<String>),
    /// A header for the layout asked for.
    Usable(Header),
}

/// The parameters that a file is made for, if it has a header of ours. Changes nothing.
pub(crate) fn made_for(disk: &dyn Disk) -> Option<Layout> {
    let is_whole = disk.len_bytes().is_ok_and(|bytes| bytes >= 2 * PAGE_BYTES as u64);
    let seen = Some(disk).filter(|_| is_whole).and_then(|disk| sides(disk).ok())?;
    newest_header(&seen).map(|header| header.layout)
}

/// The two sides of the header.
fn sides(disk: &dyn Disk) -> io::Result<[HeadPage; 2]> {
    let mut sides = AlignedBuffer::new(2 * PAGE_BYTES);
    disk.read_at(&mut sides, 0)?;
    Ok([Header::parse_head(&sides[..PAGE_BYTES]), Header::parse_head(&sides[PAGE_BYTES..])])
}

fn newest_header(seen: &[HeadPage; 2]) -> Option<Header> {
    let good = |sighted: &HeadPage| if let HeadPage::Good(header) = sighted { Some(*header) } else { None };
    seen.iter().filter_map(good).max_by_key(|header| header.sequence)
}

/// Looks at the head of a file.
///
/// # Errors
/// The present content must not be overwritten.
pub(crate) fn look(disk: &dyn Disk, layout: &Layout) -> Result<FoundHeader, FlashError> {
    let has_bytes = disk.len_bytes()?;
    if has_bytes == 0 {
        return Ok(FoundHeader::Unusable(0, None));
    }
    if has_bytes < 2 * PAGE_BYTES as u64 {
        return look_at_stub(disk, has_bytes);
    }
    let seen = sides(disk)?;
    let Some(header) = newest_header(&seen) else {
        return unusable(&seen);
    };
    if header.layout != *layout {
        let reason = difference(&header.layout, layout);
        return Ok(FoundHeader::Unusable(header.sequence + 1, Some(reason)));
    }
    let header_bytes = layout.file_bytes();
    if has_bytes < header_bytes {
        return Err(FlashError::Short { has_bytes, header_bytes });
    }
    Ok(FoundHeader::Usable(header))
}

/// A file too short for a header is ours to overwrite only if it is all zeros.
fn look_at_stub(disk: &dyn Disk, has_bytes: u64) -> Result<FoundHeader, FlashError> {
    let mut bytes = AlignedBuffer::new(has_bytes as usize);
    disk.read_at(&mut bytes, 0)?;
    let is_blank = bytes.iter().all(|&byte| byte == 0);
    if is_blank { Ok(FoundHeader::Unusable(0, None)) } else { Err(FlashError::Foreign) }
}

fn unusable(seen: &[HeadPage; 2]) -> Result<FoundHeader, FlashError> {
    let versions = seen.iter().filter_map(|s| if let HeadPage::Version(v) = s { Some(*v) } else { None });
    match versions.max() {
        Some(version) if version > VERSION => return Err(FlashError::Newer { version }),
        Some(version) => {
            let reason = format!("its file has the older format {version}");
            return Ok(FoundHeader::Unusable(0, Some(reason)));
        }
        None => {}
    }
    // A header that a crash cut short at the file's birth leaves any mixture of it and zeros, but
    // never bytes that are neither.
    match seen {
        [HeadPage::Blank, HeadPage::Blank] => Ok(FoundHeader::Unusable(0, None)),
        _ if seen.contains(&HeadPage::Damaged) => {
            Ok(FoundHeader::Unusable(0, Some("its file's header is damaged; look at the disk".into())))
        }
        _ => Err(FlashError::Foreign),
    }
}

fn difference(was: &Layout, is: &Layout) -> String {
    if was.fingerprint != is.fingerprint {
        return "its file is for another model or layout of KV".into();
    }
    format!(
        "its file is for {} blocks of {} bytes, not {} of {}",
        was.capacity, was.block_bytes, is.capacity, is.block_bytes
    )
}

/// Begins a new life of a file that has its full length: `incarnation` is a number that no
/// earlier life had.
pub(crate) fn begin(disk: &dyn Disk, header: Header, beginning: Beginning) -> Result<OpenedFile, FlashError> {
    let mut page = AlignedBuffer::new(PAGE_BYTES);
    header.encode(&mut page);
    disk.write_at(&page, header.offset())?;
    disk.flush()?;
    let index = Index::new(header.layout, header.incarnation);
    let (entries, places, stale) = (Vec::new(), Places::default(), Vec::new());
    Ok(OpenedFile { header, index, entries, places, stale, beginning })
}

/// Takes up the life of a file where it ended.
pub(crate) fn recover(disk: &dyn Disk, header: Header) -> Result<OpenedFile, FlashError> {
    // Writes of a killed process may be readable and not durable. The next write of a page would then destroy the
    // only durable side.
    disk.flush()?;
    let layout = header.layout;
    let mut index = Index::new(layout, header.incarnation);
    let (mut lost_pages, mut torn_pages, mut outdated, mut torn) = (0, 0, Vec::new(), Vec::new());
    let mut chunk = AlignedBuffer::new(CHUNK_PAGES.min(layout.index_pages()) as usize * 2 * PAGE_BYTES);
    for first in (0..layout.index_pages()).step_by(CHUNK_PAGES as usize) {
        let pages = CHUNK_PAGES.min(layout.index_pages() - first);
        let bytes = &mut chunk[..pages as usize * 2 * PAGE_BYTES];
        let read = disk.read_at(bytes, layout.page_offset(first, 0));
        for (page, pair) in (first..).zip(bytes.chunks_exact_mut(2 * PAGE_BYTES)) {
            if read.is_err() {
                read_pair(disk, layout.page_offset(page, 0), pair);
            }
            let adopted = index.adopt(page, pair);
            lost_pages += u64::from(adopted.is_lost);
            torn_pages += u64::from(!adopted.is_lost && adopted.is_torn.contains(&true));
            let offsets = |sides: [bool; 2]| {
                let marked = (0u64..).zip(sides).filter(|(_, is_marked)| *is_marked);
                marked.map(move |(side, _)| layout.page_offset(page, side))
            };
            outdated.extend(offsets(adopted.is_outdated));
            torn.extend(offsets(adopted.is_torn));
        }
    }
    wipe(disk, &outdated)?;
    wipe(disk, &torn)?;
    let (entries, places, stale) = newest(&index);
    let beginning = Beginning::Recovered { blocks: entries.len() as u64, lost_pages, torn_pages };
    Ok(OpenedFile { header, index, entries, places, stale, beginning })
}

/// Overwrites sides of pages.
fn wipe(disk: &dyn Disk, offsets: &[u64]) -> io::Result<()> {
    let blank = AlignedBuffer::new(PAGE_BYTES);
    offsets.iter().try_for_each(|&offset| disk.write_at(&blank, offset))?;
    if offsets.is_empty() { Ok(()) } else { disk.flush() }
}

/// Reads what can be read of a page's two sides; the rest becomes what no page is.
fn read_pair(disk: &dyn Disk, offset: u64, pair: &mut [u8]) {
    for (side, bytes) in (0u64..).zip(pair.chunks_exact_mut(PAGE_BYTES)) {
        if disk.read_at(bytes, offset + side * PAGE_BYTES as u64).is_err() {
            bytes.fill(0xFF);
        }
    }
}

/// Of blocks with one short name the one written last: its predecessors were to be removed, as
/// were the blocks of a trial.
fn newest(index: &Index) -> (Vec<Entry>, Places, Vec<Entry>) {
    let mut entries: Vec<Entry> = index.entries().collect();
    let mut places = Places::default();
    places.reserve(entries.len());
    for entry in entries.iter().filter(|entry| !is_trial(entry.key)) {
        let known = places.entry(entry.key.short()).or_insert((entry.key, entry.place));
        if known.1.generation < entry.place.generation {
            *known = (entry.key, entry.place);
        }
    }
    let mut stale = Vec::new();
    if places.len() < entries.len() {
        let counts =
            |entry: &Entry| places.get(&entry.key.short()).is_some_and(|(_, place)| *place == entry.place);
        stale.extend(entries.iter().filter(|entry| !counts(entry)).copied());
        entries.retain(counts);
    }
    (entries, places, stale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::testing::FailingDisk;
    use crate::index::{Place, trial_key};
    use baton_types::BlockKey;

    const LAYOUT: Layout = Layout { block_bytes: 100, capacity: 100, fingerprint: 1 };

    fn made(layout: Layout) -> FailingDisk {
        let disk = FailingDisk::with(vec![0; layout.file_bytes() as usize]);
        let header = Header { layout, incarnation: 5, sequence: 4 };
        begin(&disk, header, Beginning::New).unwrap();
        disk
    }

    #[test]
    fn a_newer_format_is_named_beside_ours() {
        let message = FlashError::Newer { version: 9 }.to_string();
        let expected = "kv.slab has format 9, this release knows 3; start a newer release or remove it";
        assert_eq!(message, expected);
    }

    /// Writes the index as it would be after the entries were written, and reads it.
    fn with_entries(entries: &[Entry]) -> (FailingDisk, OpenedFile) {
        let disk = made(LAYOUT);
        let mut index = Index::new(LAYOUT, 5);
        entries.iter().for_each(|entry| index.set(entry));
        for page in index.take_dirty() {
            let mut bytes = vec![0; PAGE_BYTES];
            let offset = index.compose(page, &mut bytes);
            disk.write_at(&bytes, offset).unwrap();
        }
        let opened = reopened(&disk);
        (disk, opened)
    }

    fn reopened(disk: &FailingDisk) -> OpenedFile {
        match look(disk, &LAYOUT).unwrap() {
            FoundHeader::Usable(header) => recover(disk, header).unwrap(),
            FoundHeader::Unusable(..) => panic!("it was made for this"),
        }
    }

    fn unusable(disk: &FailingDisk, layout: Layout) -> (u64, String) {
        match look(disk, &layout).unwrap() {
            FoundHeader::Unusable(sequence, reason) => (sequence, reason.unwrap_or_default()),
            FoundHeader::Usable(_) => panic!("it is of no use for {layout:?}"),
        }
    }

    fn refused(disk: &FailingDisk) -> String {
        look(disk, &LAYOUT).map(|_| ()).unwrap_err().to_string()
    }

    fn entry(key: BlockKey, slot: u32, generation: u64) -> Entry {
        Entry { key, parent: None, place: Place { slot, generation, checksum: 0 } }
    }

    #[test]
    fn what_is_not_ours_newer_or_cut_short_is_left_alone() {
        assert!(refused(&FailingDisk::with(b"somebody's thesis".to_vec())).contains("not a slab file"));
        assert!(refused(&FailingDisk::with(vec![b'x'; 100_000])).contains("not a slab file"));
        let disk = made(LAYOUT);
        disk.state.lock().unwrap().bytes.truncate(50_000);
        assert!(refused(&disk).contains("cut short"));
        let disk = made(LAYOUT);
        disk.state.lock().unwrap().bytes[8] = 9;
        let newer = refused(&disk);
        assert!(newer.contains("format 9") && newer.contains("newer release"), "{newer}");
        let disk = made(LAYOUT);
        disk.state.lock().unwrap().fail_reads = 1;
        assert!(matches!(look(&disk, &LAYOUT), Err(FlashError::Io(_))));
    }

    #[test]
    fn what_a_file_is_made_for_can_be_told_without_opening_it() {
        let disk = made(LAYOUT);
        assert_eq!(made_for(&disk), Some(LAYOUT));
        disk.state.lock().unwrap().fail_reads = 1;
        assert_eq!(made_for(&disk), None);
        disk.state.lock().unwrap().bytes[8] = 9;
        assert_eq!(made_for(&disk), None, "of a newer release");
        for bytes in [0, 10, 100_000] {
            assert_eq!(made_for(&FailingDisk::with(vec![b'x'; bytes])), None);
        }
    }

    #[test]
    fn what_is_ours_and_of_no_use_is_emptied_with_the_reason() {
        let disk = made(LAYOUT);
        let (sequence, reason) = unusable(&disk, Layout { fingerprint: 2, ..LAYOUT });
        assert!(sequence == 5 && reason.contains("another model"), "{reason}");
        let (_, reason) = unusable(&disk, Layout { capacity: 9, ..LAYOUT });
        assert!(reason.contains("100 blocks of 100 bytes, not 9 of 100"), "{reason}");
        disk.state.lock().unwrap().bytes[8] = 1;
        assert!(unusable(&disk, LAYOUT).1.contains("older format 1"));
        disk.state.lock().unwrap().bytes[8] = 3;
        disk.state.lock().unwrap().bytes[30] ^= 1;
        assert!(unusable(&disk, LAYOUT).1.contains("header is damaged"));
        for blank in [0, 10, 100_000] {
            assert_eq!(unusable(&FailingDisk::with(vec![0; blank]), LAYOUT), (0, String::new()));
        }
    }

    #[test]
    fn a_header_that_was_cut_short_leaves_the_one_before() {
        let disk = made(LAYOUT);
        let next = Header { layout: LAYOUT, incarnation: 6, sequence: 5 };
        begin(&disk, next, Beginning::New).unwrap();
        assert_eq!(reopened(&disk).header, next);
        disk.state.lock().unwrap().bytes[PAGE_BYTES + 40] ^= 1;
        assert_eq!(reopened(&disk).header.sequence, 4);
    }

    #[test]
    fn of_one_name_the_newest_counts_and_no_block_of_a_trial() {
        let twin = BlockKey(7 | 1 << 90);
        let entries = [
            entry(BlockKey(7), 3, 10),
            entry(twin, 80, 12),
            entry(BlockKey(8), 5, 11),
            entry(trial_key(0), 6, 13),
        ];
        let (_, opened) = with_entries(&entries);
        let keys = |entries: &[Entry]| entries.iter().map(|entry| entry.key).collect::<Vec<_>>();
        assert_eq!(keys(&opened.entries), [BlockKey(8), twin]);
        assert_eq!(keys(&opened.stale), [BlockKey(7), trial_key(0)]);
        assert_eq!(opened.beginning, Beginning::Recovered { blocks: 2, lost_pages: 0, torn_pages: 0 });
    }

    /// Two index pages: damage to one leaves the other; neither is read again as it was.
    #[test]
    fn a_page_that_is_damaged_or_cannot_be_read_costs_its_own_blocks() {
        let entries = [entry(BlockKey(7), 3, 10), entry(BlockKey(8), 80, 11)];
        let (disk, _) = with_entries(&entries);
        let at = LAYOUT.page_offset(0, 1) as usize;
        disk.state.lock().unwrap().bytes[at + 300] ^= 1;
        let opened = reopened(&disk);
        assert_eq!(opened.entries, entries[1..]);
        assert_eq!(opened.beginning, Beginning::Recovered { blocks: 1, lost_pages: 1, torn_pages: 0 });
        assert!(opened.beginning.to_string().contains("look at the disk"));
        assert!(disk.state.lock().unwrap().bytes[at..at + PAGE_BYTES].iter().all(|&byte| byte == 0));
        assert_eq!(
            reopened(&disk).beginning,
            Beginning::Recovered { blocks: 1, lost_pages: 0, torn_pages: 0 }
        );
    }

    /// The newest side of a page rots: the older one, which lists what was removed since, is not believed by this start
    /// nor by any later one, also if it is cut short in the middle of wiping.
    #[test]
    fn a_page_whose_newest_side_rotted_is_given_up_for_good() {
        let disk = made(LAYOUT);
        let mut index = Index::new(LAYOUT, 5);
        let removed = entry(BlockKey(7), 3, 10);
        for step in 0..2 {
            if step == 0 {
                index.set(&removed)
            } else {
                index.clear(removed.place)
            }
            for page in index.take_dirty() {
                let mut bytes = vec![0; PAGE_BYTES];
                let offset = index.compose(page, &mut bytes);
                disk.write_at(&bytes, offset).unwrap();
                index.lasts(page);
            }
        }
        let newest = LAYOUT.page_offset(0, 2) as usize;
        for bit in (0..PAGE_BYTES * 8).step_by(97) {
            let copy = FailingDisk::with(disk.state.lock().unwrap().bytes.clone());
            copy.state.lock().unwrap().bytes[newest + bit / 8] ^= 1 << (bit % 8);
            copy.state.lock().unwrap().fail_writes = u32::try_from(bit % 2).unwrap();
            let Ok(FoundHeader::Usable(header)) = look(&copy, &LAYOUT) else {
                panic!("it was made for this")
            };
            if bit % 2 == 1 {
                assert!(recover(&copy, header).is_err(), "it could not be wiped");
            }
            let opened = recover(&copy, header).unwrap();
            assert_eq!((opened.entries.len(), opened.stale.len()), (0, 0), "bit {bit}");
            assert_eq!(opened.beginning, Beginning::Recovered { blocks: 0, lost_pages: 1, torn_pages: 0 });
            let again = reopened(&copy);
            assert_eq!(again.entries.len(), 0);
            assert_eq!(again.beginning, Beginning::Recovered { blocks: 0, lost_pages: 0, torn_pages: 0 });
        }
    }

    #[test]
    fn a_chunk_that_cannot_be_read_is_read_page_by_page() {
        let entries = [entry(BlockKey(7), 3, 10), entry(BlockKey(8), 80, 11)];
        let (disk, _) = with_entries(&entries);
        let Ok(FoundHeader::Usable(header)) = look(&disk, &LAYOUT) else { panic!("it was made for this") };
        disk.state.lock().unwrap().fail_reads = 3;
        let opened = recover(&disk, header).unwrap();
        assert_eq!(opened.entries, entries[1..], "the chunk, and both sides of one page");
        disk.state.lock().unwrap().fail_flushes = 1;
        assert!(recover(&disk, header).is_err(), "what is not lasting is not built upon");
    }
}
