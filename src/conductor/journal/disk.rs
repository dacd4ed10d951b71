//! The disk's side of the journal: a thread that turns what happened into lines and writes them, turns files over and
//! deletes old ones.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};

use baton_scheduler::{Effect, Input};

use super::{Chain, End, Header, Line, digest};

/// An order to the writing thread.
pub(super) enum Order {
    /// Begin the next file. The bytes of the lines after its header are counted here.
    Begin(Box<Header>, Arc<AtomicU64>),
    Step(Box<Step>),
    Lost(u64),
    End(End),
}

/// One step of the conductor, as values.
pub(super) struct Step {
    pub(super) now_us: u64,
    pub(super) input: Input,
    pub(super) effects: Vec<Effect>,
}

/// An order in the queue, with the memory that it takes there.
pub(super) struct QueueEntry {
    pub(super) order: Order,
    pub(super) bytes: u64,
}

/// State that both threads share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) pending_bytes: AtomicU64,
    pub(super) failed: AtomicBool,
    pub(super) error: Mutex<Option<String>>,
    /// Steps that were handed over when there was no file to write.
    pub(super) dropped_steps: AtomicU64,
}

impl Shared {
    /// Says why the journal stops, once until it goes on.
    pub(super) fn fail(&self, error: String) {
        let mut known = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_none() {
            tracing::error!("{error}");
        }
        *known = Some(error);
        self.failed.store(true, Ordering::Release);
    }

    /// A new file is begun.
    fn recover(&self) {
        if self.error.lock().unwrap_or_else(PoisonError::into_inner).take().is_some() {
            tracing::info!("the journal goes on in a new file");
        }
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

    /// Begins the next file with its header and deletes those that are too old. Where the header finds no room nothing
    /// changes: the old files are worth more than one without it.
    fn begin(&mut self, header: Box<Header>, written: Arc<AtomicU64>) -> std::io::Result<JournalFile> {
        let number = self.numbers.last().map_or(1, |last| last + 1);
        let out = BufWriter::with_capacity(1 << 20, File::create_new(self.path(number))?);
        let mut begun = JournalFile { out, chain: Chain::default(), written };
        if let Err(error) = begun.put(&Line::Header(header)).and_then(|_| begun.out.flush()) {
            std::fs::remove_file(self.path(number))?;
            return Err(error);
        }
        self.numbers.push(number);
        while self.numbers.len() > self.keep {
            let oldest = self.numbers.remove(0);
            std::fs::remove_file(self.path(oldest))?;
        }
        Ok(begun)
    }
}

/// The file that is being written.
struct JournalFile {
    out: BufWriter<File>,
    chain: Chain,
    written: Arc<AtomicU64>,
}

impl JournalFile {
    fn put(&mut self, line: &Line<Input>) -> std::io::Result<u64> {
        let line = self.chain.seal(serde_json::to_string(line)?);
        self.out.write_all(line.as_bytes())?;
        Ok(line.len() as u64)
    }

    fn line(&mut self, line: &Line<Input>) -> std::io::Result<()> {
        let bytes = self.put(line)?;
        self.written.fetch_add(bytes, Ordering::AcqRel);
        Ok(())
    }

    fn step(&mut self, step: Step) -> std::io::Result<()> {
        let Step { now_us, input, effects } = step;
        let effects = digest(&effects).map_err(std::io::Error::other)?;
        self.line(&Line::Step { now_us, input, effects })
    }
}

/// The writing thread: ends when the channel is closed and empty.
pub(super) fn write_all(orders: &Receiver<QueueEntry>, mut files: Files, shared: &Shared) {
    let mut file: Option<JournalFile> = None;
    loop {
        let entry = match orders.try_recv() {
            Ok(entry) => Ok(entry),
            Err(TryRecvError::Empty) => {
                // The queue is empty: flush, so that a process that follows the file sees all of it.
                give_up_on(flush(&mut file), &mut file, shared);
                orders.recv().map_err(|_| ())
            }
            Err(TryRecvError::Disconnected) => Err(()),
        };
        let Ok(QueueEntry { order, bytes }) = entry else { break };
        let done = carry_out(order, &mut file, &mut files, shared);
        give_up_on(done, &mut file, shared);
        shared.pending_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }
    give_up_on(flush(&mut file), &mut file, shared);
}

fn flush(file: &mut Option<JournalFile>) -> std::io::Result<()> {
    file.as_mut().map_or(Ok(()), |file| file.out.flush())
}

fn carry_out(
    order: Order,
    file: &mut Option<JournalFile>,
    files: &mut Files,
    shared: &Shared,
) -> std::io::Result<()> {
    match (order, file) {
        (Order::Begin(header, written), file) => {
            flush(file)?;
            *file = Some(files.begin(header, written)?);
            shared.recover();
            Ok(())
        }
        // After an error there is no file, and what still waited for it is dropped.
        (Order::Step(_), None) => {
            shared.dropped_steps.fetch_add(1, Ordering::AcqRel);
            Ok(())
        }
        (Order::Lost(_) | Order::End(_), None) => Ok(()),
        (Order::Step(step), Some(file)) => file.step(*step),
        (Order::Lost(steps), Some(file)) => file.line(&Line::Lost(steps)),
        (Order::End(end), Some(file)) => file.line(&Line::End(end)),
    }
}

/// After an error nothing more is written to that file; the status says why.
fn give_up_on(done: std::io::Result<()>, file: &mut Option<JournalFile>, shared: &Shared) {
    if let Err(error) = done {
        *file = None;
        shared.fail(format!("the journal stops: {error}; make room: it is tried again every minute"));
    }
}
