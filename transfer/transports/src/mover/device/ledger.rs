//! The books of a copier: which batches are open, how each ended, and who waits to hear of it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::fault::DeviceFault;

/// A batch's name, not used twice by a copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopyId(pub u64);

/// How a batch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyOutcome {
    /// Every byte is where it belongs.
    Done,
    /// Some are not; what is in the target ranges is anything.
    Failed {
        /// The first fault. A device that fails as a whole fails all that is under way on it.
        fault: DeviceFault,
        /// Whether nothing touches the ranges any more. Where it is not certain, their memories are never
        /// given back to the system, and the copier takes no more work.
        certain: bool,
    },
    /// Some were left out as was asked; what is in the target ranges is anything.
    Cancelled,
}

/// The end of a batch, told once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub batch: CopyId,
    /// How.
    pub outcome: CopyOutcome,
    /// Bytes that were copied: all of them where it is done.
    pub copied_bytes: u64,
}

/// Why a batch was not taken. Nothing of it was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Declined {
    /// Too much is waiting: come again when a batch has ended.
    Full,
    /// The copier is shut down.
    Closed,
    /// The device failed and cannot be asked what it still does: leave it until the process has ended.
    Broken(DeviceFault),
    /// The batch is empty, longer than the copier ever takes, or of another device.
    Invalid(&'static str),
}

/// What a copier has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopierStats {
    /// Batches taken.
    pub submitted: u64,
    /// Batches done.
    pub done: u64,
    /// Batches failed.
    pub failed: u64,
    /// Batches cancelled.
    pub cancelled: u64,
    /// Bytes copied.
    pub copied_bytes: u64,
    /// Pieces that were taken and have not ended.
    pub pieces: usize,
    /// Batches that were taken and have not ended.
    pub open: usize,
    /// Batches that have ended and were not told of yet.
    pub untold: usize,
}

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the copier is full: come again when a batch has ended"),
            Self::Closed => f.write_str("the copier is shut down"),
            Self::Broken(fault) => write!(f, "the device is lost to this process: {fault}"),
            Self::Invalid(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Declined {}

/// See the module.
pub(super) struct Ledger {
    batches_max: usize,
    pieces_max: usize,
    books: Mutex<Books>,
    came: Condvar,
}

#[derive(Default)]
struct Books {
    next: u64,
    open: BTreeMap<u64, Open>,
    ended: VecDeque<Ended>,
    broken: Option<DeviceFault>,
    closed: bool,
    stats: CopierStats,
}

/// A batch that has not ended.
#[derive(Default)]
struct Open {
    pieces: usize,
    copied_bytes: u64,
    fault: Option<DeviceFault>,
    uncertain: bool,
    /// Its pieces that wait are to be left out.
    unwanted: bool,
    left_out: bool,
}

/// What has become of some pieces of one batch.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) pieces: usize,
    pub(super) copied_bytes: u64,
    /// The fault, and whether it is certain that the device is through with them.
    pub(super) failure: Option<(DeviceFault, bool)>,
    /// They were never begun.
    pub(super) left_out: bool,
}

impl Ledger {
    pub(super) fn new(batches_max: usize, pieces_max: usize) -> Self {
        Self { batches_max, pieces_max, books: Mutex::default(), came: Condvar::new() }
    }

    /// Opens a batch of so many pieces.
    pub(super) fn open(&self, pieces: usize) -> Result<CopyId, Declined> {
        let mut books = self.books();
        if let Some(fault) = &books.broken {
            return Err(Declined::Broken(fault.clone()));
        }
        if books.closed {
            return Err(Declined::Closed);
        }
        if pieces == 0 || pieces > self.pieces_max {
            return Err(Declined::Invalid(
                "a batch has at least one piece, and no more than the copier's limit",
            ));
        }
        let batches = books.open.len() + books.ended.len();
        if batches >= self.batches_max || books.stats.pieces + pieces > self.pieces_max {
            return Err(Declined::Full);
        }
        let batch = books.next;
        books.next += 1;
        books.stats.submitted += 1;
        books.stats.pieces += pieces;
        books.open.insert(batch, Open { pieces, ..Open::default() });
        Ok(CopyId(batch))
    }

    /// Whether pieces of the batch that wait are still to be begun.
    pub(super) fn wants(&self, batch: CopyId) -> bool {
        let books = self.books();
        books.broken.is_none() && books.open.get(&batch.0).is_some_and(|open| !open.unwanted)
    }

    /// From now on pieces of the batch that wait are to be left out. Says whether it was open.
    pub(super) fn renounce(&self, batch: CopyId) -> bool {
        let mut books = self.books();
        let open = books.open.get_mut(&batch.0);
        open.is_some_and(|open| {
            open.unwanted = true;
            true
        })
    }

    /// Books what has become of some pieces, and ends their batch with the last of them.
    pub(super) fn enter(&self, batch: CopyId, entry: Entry) {
        let mut books = self.books();
        let broken = books.broken.clone();
        if let Some((fault, false)) = &entry.failure {
            books.broken.get_or_insert_with(|| fault.clone());
        }
        books.stats.pieces -= entry.pieces;
        books.stats.copied_bytes += entry.copied_bytes;
        let open = books.open.get_mut(&batch.0).expect("a batch is open until its last piece is booked");
        open.pieces -= entry.pieces;
        open.copied_bytes += entry.copied_bytes;
        open.left_out |= entry.left_out;
        if let Some((fault, certain)) = entry.failure {
            open.uncertain |= !certain;
            open.unwanted = true;
            open.fault.get_or_insert(fault);
        }
        if entry.left_out && !open.unwanted {
            open.fault = open.fault.take().or(broken);
        }
        if open.pieces == 0 {
            books.end(batch);
            drop(books);
            self.came.notify_all();
        }
    }

    /// Refuses new batches from now on.
    pub(super) fn close(&self) {
        self.books().closed = true;
    }

    /// Tells which batches have ended, waiting for the first no longer than `limit`.
    pub(super) fn wait(&self, into: &mut Vec<Ended>, limit: Duration) {
        let none = |books: &mut Books| books.ended.is_empty() && !books.open.is_empty();
        let waited = self.came.wait_timeout_while(self.books(), limit, none);
        let (mut books, _) = waited.unwrap_or_else(PoisonError::into_inner);
        into.extend(books.ended.drain(..));
    }

    /// Waits until no batch is open, no longer than `limit`; how many are.
    pub(super) fn wait_all(&self, limit: Duration) -> usize {
        let waited = self.came.wait_timeout_while(self.books(), limit, |books| !books.open.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.open.len()
    }

    pub(super) fn stats(&self) -> CopierStats {
        let books = self.books();
        CopierStats { open: books.open.len(), untold: books.ended.len(), ..books.stats }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    fn end(&mut self, batch: CopyId) {
        let open = self.open.remove(&batch.0).expect("the caller has just found it");
        let outcome = match open.fault {
            Some(fault) => CopyOutcome::Failed { fault, certain: !open.uncertain },
            None if open.left_out => CopyOutcome::Cancelled,
            None => CopyOutcome::Done,
        };
        let tally = match outcome {
            CopyOutcome::Done => &mut self.stats.done,
            CopyOutcome::Failed { .. } => &mut self.stats.failed,
            CopyOutcome::Cancelled => &mut self.stats.cancelled,
        };
        *tally += 1;
        self.ended.push_back(Ended { batch, outcome, copied_bytes: open.copied_bytes });
    }
}
