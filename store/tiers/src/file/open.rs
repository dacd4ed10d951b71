//! The file itself: where it is, whose it is, and how it is read and written.

use super::FileTier;
use crate::aligned::{AlignedBuffer, PAGE_BYTES};
use crate::disk::Disk;
use crate::layout::{Header, Layout};
use crate::queue::{Queue, Threads};
use crate::recover::{Beginning, FlashError, FoundHeader, OpenedFile, begin, look, made_for, recover};
use crate::ring::Ring;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const FILE_NAME: &str = "kv.slab";
/// Name of a mark beside a file whose owner went on without it: the next start must not trust the file's content.
const PASSED_BY: &str = "kv.slab.passed-by";
/// How often, and how far apart, the file is asked for.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// How the disk is read and written.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum IoChoice {
    /// io_uring if the kernel lets us, else threads.
    #[default]
    Auto,
    /// io_uring, or an error.
    Ring,
    /// A pool of threads.
    Threads,
}

/// Options for opening a [`FileTier`].
#[derive(Clone, Debug)]
pub struct FileOptions<'a> {
    /// The file's folder; blocks in it outlive the process. `None`: a file of its own under the
    /// system's temporary folder, which goes with the process.
    pub dir: Option<&'a Path>,
    /// Blocks that it may hold.
    pub capacity_blocks: u32,
    /// The size of each.
    pub block_bytes: usize,
    /// Stands for everything that gives a block's bytes their meaning.
    pub fingerprint: u64,
    /// How the disk is read and written.
    pub io: IoChoice,
}

impl FileTier {
    /// Opens the file, or makes it in its full length. Only this user can read a file made here: KV reveals prompts.
    ///
    /// The content of an earlier life is recovered if it is of the same block size, capacity and fingerprint, and
    /// else dropped; [`FileTier::beginning`] says which.
    ///
    /// # Errors
    /// [`FlashError`] says what stands against it. Then the file is as it was.
    pub fn open(options: &FileOptions<'_>) -> Result<Self, FlashError> {
        let FileOptions { capacity_blocks: capacity, block_bytes, fingerprint, .. } = *options;
        let layout = Layout { block_bytes, capacity, fingerprint };
        let own_dir = if options.dir.is_none() { Some(fresh_dir()?) } else { None };
        let opened = open_in(options.dir.or(own_dir.as_deref()).unwrap_or(Path::new(".")), layout);
        if let Some(dir) = &own_dir {
            // An open file needs no name: a killed process leaves nothing behind.
            let _ = fs::remove_file(dir.join(FILE_NAME));
            let _ = fs::remove_dir(dir);
        }
        let (file, mut opened) = opened?;
        if own_dir.is_some() {
            opened.beginning = Beginning::Temporary;
        }
        let refused = turn_direct(&file).err();
        let file = Arc::new(file);
        #[cfg(feature = "faults")]
        if let Some(faults) = options.dir.and_then(crate::faults::planned) {
            let disk = faults.over(file);
            let queue = Box::new(Threads::start(&disk)?);
            return Self::start(disk, queue, opened, true, "a disk with faults".into());
        }
        let (queue, engine) = queue(&file, options.io)?;
        let path = refused.map_or("direct".into(), |why| format!("through the page cache, as {why}"));
        Self::start(file, queue, opened, own_dir.is_none(), format!("{engine}, {path}"))
    }
}

/// Marks the file in a folder as passed by, if there is one.
pub(crate) fn pass_by(dir: &Path) -> io::Result<bool> {
    if !dir.join(FILE_NAME).try_exists()? {
        return Ok(false);
    }
    File::create(dir.join(PASSED_BY))?.sync_all()?;
    File::open(dir)?.sync_all()?;
    Ok(true)
}

/// Takes the name of the file in a folder away.
pub(crate) fn unlink(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(FILE_NAME)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::open(dir)?.sync_all()
}

/// The layout of the file in a folder, if there is one of ours. It is not locked, and nothing changes.
pub(crate) fn layout_in(dir: &Path) -> Option<Layout> {
    made_for(&File::open(dir.join(FILE_NAME)).ok()?)
}

fn open_in(dir: &Path, layout: Layout) -> Result<(File, OpenedFile), FlashError> {
    fs::create_dir_all(dir)?;
    let path = dir.join(FILE_NAME);
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    lock(&file)?;
    let mark = dir.join(PASSED_BY);
    let is_passed_by = mark.try_exists()?;
    let found = match look(&file, &layout)? {
        FoundHeader::Usable(header) if is_passed_by => {
            let reason = "an earlier start could not use it and went on without".to_owned();
            FoundHeader::Unusable(header.sequence + 1, Some(reason))
        }
        found => found,
    };
    let opened = match found {
        FoundHeader::Usable(header) => recover(&file, header)?,
        FoundHeader::Unusable(sequence, reason) => {
            file.set_len(0)?;
            allocate(&file, layout.file_bytes())?;
            // The length lasts before the header that speaks of it, and the name before both.
            file.sync_all()?;
            File::open(dir)?.sync_all()?;
            let beginning = reason.map_or(Beginning::New, |reason| Beginning::Emptied { reason });
            begin(&file, Header { layout, incarnation: fresh_number(), sequence }, beginning)?
        }
    };
    if is_passed_by {
        fs::remove_file(mark)?;
        File::open(dir)?.sync_all()?;
    }
    Ok((file, opened))
}

/// Makes this the only process that uses the file. One that was killed keeps it until the kernel
/// has ended its last write, so a moment is waited.
fn lock(file: &File) -> Result<(), FlashError> {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(error)) => return Err(FlashError::Io(error)),
        }
    }
    Err(FlashError::InUse)
}

/// From now on the page cache is passed by; or why not.
fn turn_direct(file: &File) -> Result<(), String> {
    let refused = |error: io::Error| format!("the file system refuses direct I/O: {error}");
    let flags = fcntl_getfl(file).map_err(|error| refused(error.into()))?;
    fcntl_setfl(file, flags | OFlags::DIRECT).map_err(|error| refused(error.into()))?;
    let tried = file.read_at(&mut AlignedBuffer::new(PAGE_BYTES), 0);
    if tried.is_err() {
        fcntl_setfl(file, flags).map_err(|error| refused(error.into()))?;
    }
    tried.map_err(refused)
}

fn queue(file: &Arc<File>, choice: IoChoice) -> Result<(Box<dyn Queue>, String), FlashError> {
    let threads = || Threads::start(&(Arc::clone(file) as Arc<dyn Disk>));
    if choice == IoChoice::Threads {
        return Ok((Box::new(threads()?), "threads".into()));
    }
    match Ring::start(Arc::clone(file)) {
        Ok(ring) => Ok((Box::new(ring), "io_uring".into())),
        Err(error) if choice == IoChoice::Ring => Err(FlashError::Io(io::Error::new(
            error.kind(),
            format!("io_uring: {error}; allow it or use threads"),
        ))),
        Err(error) => Ok((Box::new(threads()?), format!("threads, as io_uring is refused ({error})"))),
    }
}

/// A number that no earlier call, here or in another process, is likely to have given.
pub(super) fn fresh_number() -> u64 {
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

/// Takes the disk space now, so that a full disk is found at the start; on file systems that
/// cannot, writes may fail later, which costs copies and nothing else.
fn allocate(file: &File, file_bytes: u64) -> Result<(), FlashError> {
    match fallocate(file, FallocateFlags::empty(), 0, file_bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(file.set_len(file_bytes)?),
        Err(error) => Err(FlashError::NoRoom { file_bytes, why: error.to_string() }),
    }
}
