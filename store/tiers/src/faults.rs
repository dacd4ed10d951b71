//! Disks that fail or hang when a test says so, under files that are opened as always.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::disk::Disk;

/// The outcome of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FaultMode {
    /// It is carried out.
    #[default]
    Well,
    /// It is refused.
    Fails,
    /// It is refused if it is longer than a page.
    FailsLong,
    /// It does not end before the mood changes.
    Hangs,
}

/// The outcomes of reads, writes and flushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Of reads.
    pub reads: FaultMode,
    /// Of writes.
    pub writes: FaultMode,
    /// Of flushes.
    pub flushes: FaultMode,
}

/// A disk's moods, and how much it was asked for.
#[derive(Debug, Default)]
pub struct Faults {
    state: Mutex<(FaultPlan, u64)>,
    changed: Condvar,
}

static PLANNED: LazyLock<Mutex<BTreeMap<PathBuf, Arc<Faults>>>> = LazyLock::new(Mutex::default);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The moods of the disk below every file that is opened in this folder from now on.
#[must_use]
pub fn plan(dir: &Path) -> Arc<Faults> {
    Arc::clone(locked(&PLANNED).entry(dir.to_owned()).or_default())
}

/// The faults planned for a folder.
pub(crate) fn planned(dir: &Path) -> Option<Arc<Faults>> {
    locked(&PLANNED).get(dir).cloned()
}

impl Faults {
    /// From now on it is like this.
    pub fn be(&self, fault_plan: FaultPlan) {
        locked(&self.state).0 = fault_plan;
        self.changed.notify_all();
    }

    /// Bytes read so far.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        locked(&self.state).1
    }

    pub(crate) fn over(self: Arc<Self>, file: Arc<File>) -> Arc<dyn Disk> {
        Arc::new(FaultyFile { file, faults: self })
    }

    fn pass(&self, of: impl Fn(&FaultPlan) -> FaultMode, bytes: usize) -> io::Result<()> {
        let mut state = locked(&self.state);
        while of(&state.0) == FaultMode::Hangs {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let fails = match of(&state.0) {
            FaultMode::Well | FaultMode::Hangs => false,
            FaultMode::Fails => true,
            FaultMode::FailsLong => bytes > crate::aligned::PAGE_BYTES,
        };
        if fails { Err(io::Error::other("asked for by a test")) } else { Ok(()) }
    }
}

#[derive(Debug)]
struct FaultyFile {
    file: Arc<File>,
    faults: Arc<Faults>,
}

impl Disk for FaultyFile {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        self.faults.pass(|fault_plan| fault_plan.reads, out.len())?;
        locked(&self.faults.state).1 += out.len() as u64;
        self.file.read_at(out, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.faults.pass(|fault_plan| fault_plan.writes, bytes.len())?;
        self.file.write_at(bytes, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.faults.pass(|fault_plan| fault_plan.flushes, 0)?;
        self.file.flush()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.file.len_bytes()
    }
}
