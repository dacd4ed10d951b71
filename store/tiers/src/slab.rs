//! The slab file: a header, then slots of one size. Nothing in it is believed on its own: a slot
//! is read for one key, one write and one life of the file, and must say so itself.
//!
//! All numbers are little-endian. The file header fills the first 4096 bytes; slot `s` starts at
//! `4096 + s * stride`, the stride being header plus block rounded up to 4096.

use crate::checksum::block_checksum;
use crate::tier::{TierError, check_length};
use baton_types::BlockKey;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The first bytes of every slab file.
pub(crate) const FILE_MAGIC: [u8; 8] = *b"BATONKV\n";
const SLOT_MAGIC: u64 = 0x4254_4E4B_5653_4C54;
const VERSION: u64 = 1;
/// Alignment of everything in the file.
pub(crate) const PAGE_BYTES: usize = 4096;
/// What precedes a block in its slot, and in the buffers given to [`Slab::read`] and
/// [`Slab::write`].
pub(crate) const HEADER_BYTES: usize = 64;

/// Something that bytes can be written to and read from by offset, from several threads.
pub(crate) trait Disk: Debug + Send + Sync {
    /// Reads all of `out`, or fails.
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes`, or fails.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
}

impl Disk for File {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(out, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }
}

/// What the file is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The size of a block.
    pub block_bytes: usize,
    /// How many slots there are.
    pub slots: u32,
    /// Stands for everything that gives the bytes of a block their meaning.
    pub fingerprint: u64,
}

impl Layout {
    /// From slot to slot.
    pub(crate) const fn stride_bytes(&self) -> u64 {
        (HEADER_BYTES + self.block_bytes).next_multiple_of(PAGE_BYTES) as u64
    }

    /// The whole file.
    pub(crate) const fn file_bytes(&self) -> u64 {
        PAGE_BYTES as u64 + self.stride_bytes() * self.slots as u64
    }
}

/// One write of one block: which slot, and which of all writes of this life of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Which slot.
    pub slot: u32,
    /// The how-manieth write.
    pub generation: u64,
}

/// The file. Shared by the thread that writes and the one that may read.
#[derive(Debug)]
pub(crate) struct Slab {
    disk: Box<dyn Disk>,
    layout: Layout,
    incarnation: u64,
}

impl Slab {
    /// Starts a new life of the file: `incarnation` tells its slots from those of earlier lives.
    pub(crate) fn start(disk: Box<dyn Disk>, layout: Layout, incarnation: u64) -> io::Result<Self> {
        let mut header = [0u8; PAGE_BYTES];
        header[..8].copy_from_slice(&FILE_MAGIC);
        let numbers =
            [VERSION, layout.block_bytes as u64, u64::from(layout.slots), layout.fingerprint, incarnation];
        put_numbers(&mut header[8..], &numbers);
        disk.write_at(&header, 0)?;
        Ok(Self { disk, layout, incarnation })
    }

    /// What the file is made for.
    pub(crate) const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The length of the buffers for [`Slab::read`] and [`Slab::write`].
    pub(crate) const fn buffer_bytes(&self) -> usize {
        HEADER_BYTES + self.layout.block_bytes
    }

    /// Writes a block; its bytes are in `buffer` after the first `HEADER_BYTES`, which are
    /// overwritten.
    pub(crate) fn write(
        &self,
        place: Place,
        key: BlockKey,
        checksum: u64,
        buffer: &mut [u8],
    ) -> Result<(), TierError> {
        check_length(self.buffer_bytes(), buffer.len())?;
        buffer[..HEADER_BYTES].copy_from_slice(&self.slot_header(place, key, checksum));
        Ok(self.disk.write_at(buffer, self.offset(place))?)
    }

    /// Reads a block into `buffer`, after its header, verifies both and gives the checksum.
    pub(crate) fn read(&self, place: Place, key: BlockKey, buffer: &mut [u8]) -> Result<u64, TierError> {
        check_length(self.buffer_bytes(), buffer.len())?;
        self.disk.read_at(buffer, self.offset(place))?;
        let (header, bytes) = buffer.split_at(HEADER_BYTES);
        let checksum = block_checksum(key, bytes);
        if header == self.slot_header(place, key, checksum) {
            return Ok(checksum);
        }
        let of_this_write = header[..48] == self.slot_header(place, key, checksum)[..48];
        let what = if of_this_write { "the checksum of a block on flash" } else { "a slot header on flash" };
        Err(TierError::Corrupt { what })
    }

    fn offset(&self, place: Place) -> u64 {
        PAGE_BYTES as u64 + u64::from(place.slot) * self.layout.stride_bytes()
    }

    fn slot_header(&self, place: Place, key: BlockKey, checksum: u64) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        let (low, high) = (key.0 as u64, (key.0 >> 64) as u64);
        let length = self.layout.block_bytes as u64;
        put_numbers(
            &mut header,
            &[SLOT_MAGIC, low, high, place.generation, self.incarnation, length, checksum],
        );
        header
    }
}

fn put_numbers(out: &mut [u8], numbers: &[u64]) {
    for (place, number) in out.chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use std::sync::{Mutex, MutexGuard};

    /// A disk in memory that fails or lies when told to.
    #[derive(Debug, Default)]
    pub(crate) struct Sick {
        pub(crate) state: Mutex<SickState>,
    }

    /// What is wrong with it.
    #[derive(Debug, Default)]
    pub(crate) struct SickState {
        pub(crate) bytes: Vec<u8>,
        pub(crate) fail_reads: u32,
        pub(crate) fail_writes: u32,
        pub(crate) lose_writes: u32,
        pub(crate) flip_reads: u32,
        pub(crate) panic_on_read: bool,
        /// Lets nothing through; not for ever, or a failing test would hang.
        pub(crate) is_held: bool,
    }

    impl Sick {
        fn let_through(&self) -> MutexGuard<'_, SickState> {
            for _ in 0..10_000 {
                let state = self.state.lock().expect("no test panics while it holds the lock");
                if !state.is_held {
                    return state;
                }
                drop(state);
                std::thread::sleep(std::time::Duration::from_micros(500));
            }
            panic!("a test forgot to let the disk go on");
        }
    }

    fn due(count: &mut u32) -> bool {
        let due = *count > 0;
        *count = count.saturating_sub(1);
        due
    }

    impl Disk for std::sync::Arc<Sick> {
        fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
            let mut state = self.let_through();
            if state.panic_on_read {
                drop(state);
                panic!("asked for by a test");
            }
            if due(&mut state.fail_reads) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let from = offset as usize;
            let stored = state.bytes.get(from..from + out.len());
            out.copy_from_slice(stored.ok_or(io::ErrorKind::UnexpectedEof)?);
            if due(&mut state.flip_reads) {
                let middle = out.len() / 2;
                out[middle] ^= 1;
            }
            Ok(())
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            let mut state = self.let_through();
            if due(&mut state.fail_writes) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            if due(&mut state.lose_writes) {
                return Ok(());
            }
            let end = offset as usize + bytes.len();
            if state.bytes.len() < end {
                state.bytes.resize(end, 0);
            }
            state.bytes[offset as usize..end].copy_from_slice(bytes);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Sick;
    use super::*;
    use std::sync::Arc;

    const LAYOUT: Layout = Layout { block_bytes: 100, slots: 3, fingerprint: 7 };
    const KEY: BlockKey = BlockKey(1 << 100 | 5);

    fn slab(disk: &Arc<Sick>, incarnation: u64) -> Slab {
        Slab::start(Box::new(Arc::clone(disk)), LAYOUT, incarnation).unwrap()
    }

    fn write(slab: &Slab, place: Place, fill: u8) {
        let mut buffer = vec![fill; slab.buffer_bytes()];
        let checksum = block_checksum(KEY, &buffer[HEADER_BYTES..]);
        slab.write(place, KEY, checksum, &mut buffer).unwrap();
    }

    fn what(slab: &Slab, place: Place, key: BlockKey) -> &'static str {
        match slab.read(place, key, &mut vec![0; slab.buffer_bytes()]) {
            Err(TierError::Corrupt { what }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_layout_is_aligned() {
        assert_eq!((LAYOUT.stride_bytes(), LAYOUT.file_bytes()), (4096, 4 * 4096));
        let tight = Layout { block_bytes: 4096, ..LAYOUT };
        assert_eq!(tight.stride_bytes(), 8192);
    }

    #[test]
    fn a_slot_is_read_only_for_the_write_that_filled_it() {
        let disk = Arc::new(Sick::default());
        let first = slab(&disk, 1);
        let place = Place { slot: 2, generation: 9 };
        write(&first, place, 3);
        let mut buffer = vec![0; first.buffer_bytes()];
        let checksum = first.read(place, KEY, &mut buffer).unwrap();
        assert_eq!(checksum, block_checksum(KEY, &[3; 100]));
        assert_eq!(buffer[HEADER_BYTES..], [3; 100]);
        let header = "a slot header on flash";
        assert_eq!(what(&first, Place { generation: 8, ..place }, KEY), header);
        assert_eq!(what(&first, place, BlockKey(5)), header);
        assert_eq!(what(&slab(&disk, 2), place, KEY), header, "an earlier life of the file");
    }

    #[test]
    fn a_lost_write_and_a_flipped_bit_are_noticed() {
        let disk = Arc::new(Sick::default());
        let slab = slab(&disk, 1);
        let place = Place { slot: 0, generation: 1 };
        write(&slab, place, 3);
        disk.state.lock().unwrap().flip_reads = 1;
        assert_eq!(what(&slab, place, KEY), "the checksum of a block on flash");
        disk.state.lock().unwrap().lose_writes = 1;
        let later = Place { generation: 2, ..place };
        write(&slab, later, 4);
        assert_eq!(what(&slab, later, KEY), "a slot header on flash");
    }

    #[test]
    fn errors_and_wrong_sizes_are_passed_on() {
        let disk = Arc::new(Sick::default());
        let slab = slab(&disk, 1);
        let place = Place { slot: 1, generation: 1 };
        let mut short = vec![0; 10];
        assert!(matches!(slab.read(place, KEY, &mut short), Err(TierError::WrongLength { .. })));
        assert!(matches!(slab.write(place, KEY, 0, &mut short), Err(TierError::WrongLength { .. })));
        let mut buffer = vec![0; slab.buffer_bytes()];
        assert!(matches!(slab.read(place, KEY, &mut buffer), Err(TierError::Io(_))), "never written");
        disk.state.lock().unwrap().fail_writes = 1;
        assert!(matches!(slab.write(place, KEY, 0, &mut buffer), Err(TierError::Io(_))));
    }
}
