//! Blocks in a slab file on flash: which block rests in which slot.

use crate::checksum::block_checksum;
use crate::short::ByShort;
use crate::slab::{Disk, FILE_MAGIC, HEADER_BYTES, Layout, Place, Slab};
use crate::slots::Slots;
use crate::tier::{Tier, TierError, check_length};
use baton_types::{BlockHash, BlockKey};
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

const FILE_NAME: &str = "kv.slab";

/// The file, removed when dropped, with its directory if that was made for it.
#[derive(Debug)]
struct Trace {
    file: PathBuf,
    own_dir: Option<PathBuf>,
}

impl Drop for Trace {
    fn drop(&mut self) {
        // Nothing can be done about a file that will not go; the next start empties it.
        let _ = fs::remove_file(&self.file);
        if let Some(dir) = &self.own_dir {
            let _ = fs::remove_dir(dir);
        }
    }
}

/// A tier in a preallocated file. It always starts empty: what an earlier life left is not read.
#[derive(Debug)]
pub struct FileTier {
    slab: Arc<Slab>,
    places: ByShort<(BlockKey, Place)>,
    slots: Slots,
    next_generation: u64,
    buffer: Vec<u8>,
    _trace: Option<Trace>,
}

impl FileTier {
    /// Makes the file for `capacity_blocks` in `dir`, or in a new directory of its own under the
    /// system's temporary one. The file goes when the tier is dropped. Only this user can read
    /// what is made here: prompts could be told from KV.
    ///
    /// `fingerprint` stands for everything that gives a block's bytes their meaning; it is kept
    /// in the file's header.
    ///
    /// # Errors
    /// The directory cannot be made, a running process uses it, its `kv.slab` is somebody else's
    /// file, or the disk has no room for all blocks.
    pub fn create(
        dir: Option<&Path>,
        capacity_blocks: u32,
        block_bytes: usize,
        fingerprint: u64,
    ) -> io::Result<Self> {
        let layout = Layout { block_bytes, slots: capacity_blocks, fingerprint };
        let own_dir = if dir.is_none() { Some(fresh_dir()?) } else { None };
        let dir = match (dir, &own_dir) {
            (Some(dir), _) => dir,
            (None, own) => own.as_deref().expect("it was made because none was given"),
        };
        fs::create_dir_all(dir)?;
        let path = dir.join(FILE_NAME);
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        lock(&file)?;
        check_ours(&file)?;
        let is_own = own_dir.is_some();
        let trace = Trace { file: path, own_dir };
        file.set_len(0)?;
        allocate(&file, layout.file_bytes())?;
        let mut tier = Self::on_disk(Box::new(file), layout)?;
        // A directory of its own needs no name once it is open: a killed process leaves nothing behind.
        tier._trace = (!is_own).then_some(trace);
        Ok(tier)
    }

    /// A tier on any disk.
    pub(crate) fn on_disk(disk: Box<dyn Disk>, layout: Layout) -> io::Result<Self> {
        let slab = Slab::start(disk, layout, fresh_number())?;
        Ok(Self {
            buffer: vec![0; slab.buffer_bytes()],
            slab: Arc::new(slab),
            places: ByShort::default(),
            slots: Slots::new(layout.slots),
            next_generation: 1,
            _trace: None,
        })
    }

    /// The file itself, for the thread that does the writing.
    pub(crate) fn slab(&self) -> Arc<Slab> {
        Arc::clone(&self.slab)
    }

    /// A place to write a block to; commit it once written, or release it.
    pub(crate) fn reserve(&mut self) -> Option<Place> {
        let slot = self.slots.take()?;
        let generation = self.next_generation;
        self.next_generation += 1;
        Some(Place { slot, generation })
    }

    /// The block was written in full to a reserved place. `false`: a block of that short name
    /// rests here already, and the place stays the caller's.
    pub(crate) fn commit(&mut self, key: BlockKey, place: Place) -> bool {
        let is_new = !self.places.contains_key(&key.short());
        if is_new {
            self.places.insert(key.short(), (key, place));
        }
        is_new
    }

    /// A reserved place is not needed.
    pub(crate) fn release(&mut self, place: Place) {
        self.slots.give(place.slot);
    }

    /// Where a block rests.
    pub(crate) fn place(&self, key: BlockKey) -> Option<Place> {
        self.places.get(&key.short()).filter(|(known, _)| *known == key).map(|&(_, place)| place)
    }

    /// Committed blocks; `len_blocks` counts reserved places too.
    pub(crate) fn committed(&self) -> usize {
        self.places.len()
    }

    /// Forgets every block. Writes under way may still land; later ones land after them.
    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.slots = Slots::new(self.slab.layout().slots);
    }
}

impl Tier for FileTier {
    fn block_bytes(&self) -> usize {
        self.slab.layout().block_bytes
    }

    fn capacity_blocks(&self) -> usize {
        self.slab.layout().slots as usize
    }

    fn len_blocks(&self) -> usize {
        self.slots.taken()
    }

    fn put(&mut self, key: BlockKey, bytes: &[u8]) -> Result<(), TierError> {
        check_length(self.block_bytes(), bytes.len())?;
        match self.places.get(&key.short()) {
            Some((known, _)) if *known != key => return Err(TierError::SameShortName),
            Some(_) => _ = self.remove(key.short()),
            None => {}
        }
        let place = self.reserve().ok_or(TierError::Full)?;
        self.buffer[HEADER_BYTES..].copy_from_slice(bytes);
        let written = self.slab.write(place, key, block_checksum(key, bytes), &mut self.buffer);
        match written {
            Ok(()) => _ = self.commit(key, place),
            Err(_) => self.release(place),
        }
        written
    }

    fn get(&mut self, key: BlockKey, out: &mut [u8]) -> Result<u64, TierError> {
        check_length(self.block_bytes(), out.len())?;
        let place = self.place(key).ok_or(TierError::Absent)?;
        let checksum = self.slab.read(place, key, &mut self.buffer)?;
        out.copy_from_slice(&self.buffer[HEADER_BYTES..]);
        Ok(checksum)
    }

    fn remove(&mut self, block: BlockHash) -> bool {
        let removed = self.places.remove(&block);
        if let Some((_, place)) = removed {
            self.release(place);
        }
        removed.is_some()
    }
}

/// A number that no earlier call, here or in another process, is likely to have given.
fn fresh_number() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    since_epoch ^ (u64::from(std::process::id()) << 40) ^ (call << 56)
}

fn fresh_dir() -> io::Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("baton-kv-{:016x}", fresh_number()));
    DirBuilder::new().mode(0o700).create(&dir)?;
    Ok(dir)
}

fn lock(file: &File) -> io::Result<()> {
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => {
            io::Error::new(io::ErrorKind::ResourceBusy, "kv.slab is in use; give each node its own directory")
        }
        TryLockError::Error(error) => error,
    })
}

/// A file that is not empty is only overwritten if it is one of ours.
fn check_ours(file: &File) -> io::Result<()> {
    let mut magic = [0; FILE_MAGIC.len()];
    if file.metadata()?.len() == 0 {
        return Ok(());
    }
    // A file of only zeros is one whose header was not written before a crash.
    let is_ours = file.read_exact_at(&mut magic, 0).is_ok() && (magic == FILE_MAGIC || magic == [0; 8]);
    if is_ours {
        return Ok(());
    }
    let what = "kv.slab is not a slab file of ours; remove it or name another directory";
    Err(io::Error::new(io::ErrorKind::AlreadyExists, what))
}

/// Takes the disk space now, so that a full disk is found at the start; on file systems that
/// cannot, writes may fail later, which costs copies and nothing else.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => file.set_len(bytes),
        Err(error) => Err(io::Error::new(
            io::Error::from(error).kind(),
            format!("no room for {bytes} bytes ({error}); lower ssd_blocks or free some space"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::testing::Sick;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn its_own_directory_is_private_and_has_no_name_once_it_is_open() {
        let dir = fresh_dir().unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700, "only this user can read it");
        fs::remove_dir(&dir).unwrap();
        let mut tier = FileTier::create(None, 4, 100, 0).unwrap();
        assert!(tier._trace.is_none(), "nothing is left for a killed process to leave behind");
        tier.put(BlockKey(1), &[1; 100]).unwrap();
        let mut out = [0; 100];
        tier.get(BlockKey(1), &mut out).unwrap();
        assert_eq!(out, [1; 100]);
        let given = tempfile::tempdir().unwrap();
        let tier = FileTier::create(Some(given.path()), 4, 100, 0).unwrap();
        let file = fs::metadata(given.path().join(FILE_NAME)).unwrap();
        assert_eq!((file.len(), file.mode() & 0o777), (5 * 4096, 0o600));
        drop(tier);
    }

    #[test]
    fn a_given_directory_stays_and_old_content_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut old = FileTier::create(Some(dir.path()), 4, 100, 0).unwrap();
        old.put(BlockKey(1), &[1; 100]).unwrap();
        let left = fs::read(dir.path().join(FILE_NAME)).unwrap();
        drop(old);
        assert!(dir.path().exists() && !dir.path().join(FILE_NAME).exists());
        fs::write(dir.path().join(FILE_NAME), left).unwrap();
        let mut tier = FileTier::create(Some(dir.path()), 4, 100, 0).unwrap();
        assert!(matches!(tier.get(BlockKey(1), &mut [0; 100]), Err(TierError::Absent)));
    }

    #[test]
    fn a_directory_has_one_user_and_foreign_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let tier = FileTier::create(Some(dir.path()), 4, 100, 0).unwrap();
        let second = FileTier::create(Some(dir.path()), 4, 100, 0).unwrap_err();
        assert!(second.to_string().contains("in use"), "{second}");
        drop(tier);
        fs::write(dir.path().join(FILE_NAME), "somebody's thesis").unwrap();
        let foreign = FileTier::create(Some(dir.path()), 4, 100, 0).unwrap_err();
        assert!(foreign.to_string().contains("not a slab"), "{foreign}");
        assert_eq!(fs::read(dir.path().join(FILE_NAME)).unwrap(), b"somebody's thesis");
    }

    #[test]
    fn more_than_the_disk_has_is_refused_at_the_start() {
        let error = FileTier::create(None, u32::MAX, 1 << 30, 0).unwrap_err();
        assert!(error.to_string().contains("lower ssd_blocks"), "{error}");
    }

    #[test]
    fn a_failed_write_leaves_no_copy_and_takes_no_place() {
        let disk = Arc::new(Sick::default());
        let layout = Layout { block_bytes: 100, slots: 1, fingerprint: 0 };
        let mut tier = FileTier::on_disk(Box::new(Arc::clone(&disk)), layout).unwrap();
        tier.put(BlockKey(1), &[1; 100]).unwrap();
        disk.state.lock().unwrap().fail_writes = 1;
        assert!(matches!(tier.put(BlockKey(1), &[2; 100]), Err(TierError::Io(_))));
        assert!(matches!(tier.get(BlockKey(1), &mut [0; 100]), Err(TierError::Absent)));
        assert_eq!(tier.len_blocks(), 0);
        tier.put(BlockKey(2), &[2; 100]).unwrap();
    }
}
