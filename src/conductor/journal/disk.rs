//! The disk's side of the journal: a thread that writes lines, turns files over and deletes old ones.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Mutex, PoisonError};

/// An order to the writing thread.
pub(super) enum Order {
    Begin(String),
    Line(String),
}

/// State that both threads share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) pending_bytes: AtomicU64,
    pub(super) failed: AtomicBool,
    pub(super) error: Mutex<Option<String>>,
}

impl Shared {
    pub(super) fn fail(&self, error: String) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.failed.store(true, Ordering::Release);
    }
}

/// The folder's files.
pub(super) struct Files {
    directory: PathBuf,
    /// Numbers of those that are there, oldest first.
    numbers: Vec<u64>,
    keep: usize,
}

impl Files {
    pub(super) fn find(directory: &Path, keep: usize) -> std::io::Result<Self> {
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|n| n.strip_prefix("journal-")?.strip_suffix(".jsonl"));
            numbers.extend(number.and_then(|n| n.parse::<u64>().ok()));
        }
        numbers.sort_unstable();
        Ok(Self { directory: directory.to_owned(), numbers, keep: keep.max(1) })
    }

    fn path(&self, number: u64) -> PathBuf {
        self.directory.join(format!("journal-{number:06}.jsonl"))
    }

    /// Begins the next file and deletes those that are too old.
    fn begin(&mut self) -> std::io::Result<BufWriter<File>> {
        let number = self.numbers.last().map_or(1, |last| last + 1);
        let file = File::create_new(self.path(number))?;
        self.numbers.push(number);
        while self.numbers.len() > self.keep {
            let oldest = self.numbers.remove(0);
            std::fs::remove_file(self.path(oldest))?;
        }
        Ok(BufWriter::with_capacity(1 << 20, file))
    }
}

/// The writing thread: ends when the channel is closed and empty.
pub(super) fn write_all(orders: &Receiver<Order>, mut files: Files, shared: &Shared) {
    let mut file: Option<BufWriter<File>> = None;
    loop {
        let order = match orders.try_recv() {
            Ok(order) => Ok(order),
            Err(TryRecvError::Empty) => {
                // The queue is empty: flush, so that a process that follows the file sees all of it.
                give_up_on(file.as_mut().map_or(Ok(()), BufWriter::flush), &mut file, shared);
                orders.recv().map_err(|_| ())
            }
            Err(TryRecvError::Disconnected) => Err(()),
        };
        let Ok(order) = order else { break };
        let bytes = match &order {
            Order::Begin(line) | Order::Line(line) => line.len() as u64,
        };
        let done = write_one(order, &mut file, &mut files);
        give_up_on(done, &mut file, shared);
        shared.pending_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }
    give_up_on(file.as_mut().map_or(Ok(()), BufWriter::flush), &mut file, shared);
}

fn write_one(order: Order, file: &mut Option<BufWriter<File>>, files: &mut Files) -> std::io::Result<()> {
    let line = match order {
        Order::Line(line) => line,
        Order::Begin(line) => {
            if let Some(mut done) = file.take() {
                done.flush()?;
            }
            *file = Some(files.begin()?);
            line
        }
    };
    file.as_mut().map_or(Ok(()), |file| file.write_all(line.as_bytes()))
}

/// After an error nothing more is written to that file; the status says why.
fn give_up_on(done: std::io::Result<()>, file: &mut Option<BufWriter<File>>, shared: &Shared) {
    if let Err(error) = done {
        *file = None;
        shared.fail(format!("journal: {error}; make room or choose another folder, and restart"));
    }
}
