//! Writing: the conductor's thread hands over values and never waits; a thread of its own turns them into JSON and writes
//! them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use baton_scheduler::{Conductor, Effect, Input};
use baton_types::CacheChange;

use super::disk::{Files, Order, QueueEntry, Shared, Step, write_all};
use super::{End, Header, JournalError, VERSION};

/// Where a journal goes and how large it may grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalSettings {
    /// Folder of the files; made if it is not there.
    pub directory: PathBuf,
    /// A new file is begun at the first quiet moment (no live request) after this many bytes of
    /// steps are written, and at any moment after twice as many. What waits for the disk then still goes to the old one.
    pub rotate_bytes: u64,
    /// Files kept, the one being written included; older ones are deleted.
    pub keep_files: usize,
    /// Bytes of memory, about, that may wait for the disk; what comes on top is dropped and counted.
    pub pending_bytes: u64,
    /// Blocks in the prefix index up to which a new file may be begun: its header lists them all.
    pub base_blocks: usize,
}

impl JournalSettings {
    /// 256 MiB a file, four files, 64 MiB waiting, a million blocks in a header.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            rotate_bytes: 256 << 20,
            keep_files: 4,
            pending_bytes: 64 << 20,
            base_blocks: 1_000_000,
        }
    }
}

/// How a journal fares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalStatus {
    /// Steps handed to the disk.
    pub steps: u64,
    /// Steps that were dropped.
    pub lost_steps: u64,
    /// Files begun.
    pub files: u64,
    /// Why nothing is written until the next try, if that is so.
    pub error: Option<String>,
}

/// Orders that may wait for the disk.
const PENDING_ORDERS: usize = 65_536;
/// Memory of an order beside what it points to.
const ORDER_BYTES: u64 = size_of::<QueueEntry>() as u64;
/// Memory of a block in a header, about: its key under each of a few holders.
const HEADER_BLOCK_BYTES: usize = 64;
/// Memory of a request in a header, about.
const HEADER_REQUEST_BYTES: usize = 1_024;

/// Between an error of the disk and the next file, µs.
const RETRY_US: u64 = 60_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Recording,
    /// So many steps of this file were dropped.
    Lossy(u64),
    /// The last file is full and closed.
    Off,
}

/// Records a conductor. Never blocks and never fails: what cannot be recorded is counted.
#[derive(Debug)]
pub struct JournalWriter {
    settings: JournalSettings,
    orders: Option<SyncSender<QueueEntry>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
    state: State,
    /// Bytes of this file's steps that are written.
    written: Arc<AtomicU64>,
    /// When a new file is tried after an error of the disk, µs.
    retry_us: Option<u64>,
    status: JournalStatus,
}

impl JournalWriter {
    /// Begins a journal with the conductor as it is.
    ///
    /// # Errors
    /// Names the folder that cannot be made or written, with the remedy.
    pub fn open(settings: JournalSettings, conductor: &Conductor) -> Result<Self, JournalError> {
        let failed = |why| JournalError::Folder { directory: settings.directory.clone(), why };
        std::fs::create_dir_all(&settings.directory).map_err(failed)?;
        let files = Files::find(&settings.directory, settings.keep_files).map_err(failed)?;
        let shared = Arc::new(Shared::default());
        let (orders, received) = sync_channel(PENDING_ORDERS);
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("baton-journal".into())
            .spawn(move || write_all(&received, files, &theirs))
            .map_err(failed)?;
        let mut writer = Self {
            settings,
            orders: Some(orders),
            thread: Some(thread),
            shared,
            state: State::Off,
            written: Arc::default(),
            retry_us: None,
            status: JournalStatus::default(),
        };
        writer.begin(conductor);
        Ok(writer)
    }

    /// Steps the conductor and records the step: the input, and the effects added, of which the file has a digest.
    pub fn step(&mut self, conductor: &mut Conductor, now_us: u64, input: Input, effects: &mut Vec<Effect>) {
        self.turn_over(conductor, now_us);
        let records = self.state == State::Recording && !self.shared.failed.load(Ordering::Acquire);
        // The step consumes it.
        let kept = records.then(|| input.clone());
        let before = effects.len();
        conductor.step(now_us, input, effects);
        let recorded = kept.is_some_and(|input| {
            let step = Step { now_us, input, effects: effects[before..].to_vec() };
            self.hand_over(step_bytes(&step), Order::Step(Box::new(step)))
        });
        if recorded {
            self.status.steps += 1;
            return;
        }
        self.status.lost_steps += 1;
        self.state = match self.state {
            State::Recording => State::Lossy(1),
            State::Lossy(lost) => State::Lossy(lost + 1),
            State::Off => State::Off,
        };
    }

    /// How it fares.
    pub fn status(&self) -> JournalStatus {
        let error = self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let dropped = self.shared.dropped_steps.load(Ordering::Acquire);
        let (steps, lost_steps) = (self.status.steps - dropped, self.status.lost_steps + dropped);
        JournalStatus { steps, lost_steps, error, files: self.status.files }
    }

    /// Acts as if the disk had all that may wait for it still to write, until `catch_up`.
    #[cfg(test)]
    pub fn fall_behind(&self) {
        self.shared.pending_bytes.fetch_add(self.settings.pending_bytes, Ordering::AcqRel);
    }

    /// Waits until the disk has all that was handed over.
    #[cfg(test)]
    pub fn catch_up(&self) {
        self.shared.pending_bytes.fetch_sub(self.settings.pending_bytes, Ordering::AcqRel);
        self.settle();
    }

    /// Likewise, where it never fell behind.
    #[cfg(test)]
    pub fn settle(&self) {
        while self.shared.pending_bytes.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }

    /// Writes what is pending and ends the journal.
    #[cfg(test)]
    pub fn close(mut self) -> JournalStatus {
        self.finish();
        self.status()
    }

    fn finish(&mut self) {
        let Some(orders) = self.orders.take() else { return };
        let mut last = Vec::new();
        if let State::Lossy(lost) = self.state {
            last.push(Order::Lost(lost));
        }
        if self.state != State::Off {
            last.push(Order::End(End::Closed));
        }
        for order in last {
            // The thread drains until the channel is closed, so this waits for the disk at most.
            let _ = orders.send(QueueEntry { order, bytes: 0 });
        }
        drop(orders);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.shared.fail("journal: the writing thread died; report this".into());
        }
    }

    /// Begins the next file where that is due and possible.
    fn turn_over(&mut self, conductor: &Conductor, now_us: u64) {
        let quiet = conductor.live_requests() == 0;
        let small = conductor.index().len() <= self.settings.base_blocks;
        // A header is dear: it is made only when the disk has caught up.
        let relaxed = self.shared.pending_bytes.load(Ordering::Acquire) == 0;
        if self.shared.failed.load(Ordering::Acquire) {
            let retry_us = *self.retry_us.get_or_insert(now_us.saturating_add(RETRY_US));
            if now_us >= retry_us && small && relaxed {
                self.retry_us = None;
                self.shared.failed.store(false, Ordering::Release);
                self.begin(conductor);
            }
            return;
        }
        let written = self.written.load(Ordering::Acquire);
        let full = written > self.settings.rotate_bytes;
        match self.state {
            State::Recording if full && small && (quiet || written / 2 > self.settings.rotate_bytes) => {
                self.end(End::Rotated);
                self.begin(conductor);
            }
            State::Recording if written / 4 > self.settings.rotate_bytes => {
                self.end(End::Truncated);
                self.state = State::Off;
            }
            State::Lossy(lost) if small && relaxed && self.hand_over(ORDER_BYTES, Order::Lost(lost)) => {
                self.end(End::Rotated);
                self.begin(conductor);
            }
            State::Off if small && quiet && relaxed => self.begin(conductor),
            _ => {}
        }
    }

    fn end(&mut self, end: End) {
        self.hand_over(ORDER_BYTES, Order::End(end));
    }

    /// Begins a file; where the disk is behind, nothing is recorded until it is not.
    fn begin(&mut self, conductor: &Conductor) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let header = Header {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").into(),
            start_unix_us: u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX),
            lost_steps_before: self.status().lost_steps,
            base: conductor.save(),
        };
        let bytes = conductor.index().len() * HEADER_BLOCK_BYTES
            + conductor.live_requests() * HEADER_REQUEST_BYTES
            + size_of::<Header>();
        self.written = Arc::default();
        let begin = Order::Begin(Box::new(header), Arc::clone(&self.written));
        let begun = self.hand_over(bytes as u64, begin);
        self.state = if begun { State::Recording } else { State::Off };
        self.status.files += u64::from(begun);
    }

    /// Hands an order that takes so much memory to the disk's thread; false when too much waits there already.
    fn hand_over(&self, bytes: u64, order: Order) -> bool {
        let pending = self.shared.pending_bytes.fetch_add(bytes, Ordering::AcqRel);
        // A header larger than the bound goes through when nothing else waits.
        let room = pending == 0 || pending + bytes <= self.settings.pending_bytes;
        let entry = QueueEntry { order, bytes };
        let sent = room && self.orders.as_ref().is_some_and(|orders| orders.try_send(entry).is_ok());
        if !sent {
            self.shared.pending_bytes.fetch_sub(bytes, Ordering::AcqRel);
        }
        sent
    }
}

impl Drop for JournalWriter {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Memory of a step in the queue, about: what can be large is counted.
pub(super) fn step_bytes(step: &Step) -> u64 {
    let of_input = match &step.input {
        Input::RequestArrived(request) => size_of_val(&*request.chain),
        Input::PeerPlaced(placed) => size_of_val(&**placed) + size_of_val(&*placed.request.chain),
        Input::Cache(event) => match &event.change {
            CacheChange::Stored { hashes, .. } | CacheChange::Removed { hashes, .. } => {
                size_of_val(&**hashes)
            }
            CacheChange::Cleared => 0,
        },
        Input::PolicyChanged(config) => size_of_val(&**config) + size_of_val(&*config.classes),
        _ => 0,
    };
    let of_effect = |effect: &Effect| match effect {
        Effect::Explain(decision) => size_of_val(&*decision.candidates),
        Effect::Replicate { chain, .. } => size_of_val(&**chain),
        _ => 0,
    };
    let of_effects: usize = step.effects.iter().map(of_effect).sum();
    ORDER_BYTES + (size_of_val(step) + size_of_val(&*step.effects) + of_input + of_effects) as u64
}
