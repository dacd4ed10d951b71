//! Writing: the conductor's thread serialises and never waits; a thread of its own does the disk.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use baton_scheduler::{Conductor, Effect, Input};

use super::disk::{Files, Order, Shared, write_all};
use super::{Chain, End, Header, Line, VERSION, digest};

/// Where a journal goes and how large it may grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalSettings {
    /// Folder of the files; made if it is not there.
    pub directory: PathBuf,
    /// A new file is begun at the first quiet moment (no live request) after this many bytes of
    /// steps, and at any moment after twice as many.
    pub rotate_bytes: u64,
    /// Files kept, the one being written included; older ones are deleted.
    pub keep_files: usize,
    /// Bytes that may wait for the disk; what comes on top is dropped and counted.
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
    /// Why the disk was given up, if it was.
    pub error: Option<String>,
}

/// Lines that may wait for the disk.
const PENDING_LINES: usize = 65_536;

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
    orders: Option<SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
    chain: Chain,
    state: State,
    /// Bytes of this file's steps.
    file_bytes: u64,
    status: JournalStatus,
}

impl JournalWriter {
    /// Begins a journal with the conductor as it is.
    ///
    /// # Errors
    /// Names the folder that cannot be made or written, with the remedy.
    pub fn open(settings: JournalSettings, conductor: &Conductor) -> Result<Self, String> {
        let failed = |e: std::io::Error| {
            format!("journal {}: {e}; give a folder that can be written", settings.directory.display())
        };
        std::fs::create_dir_all(&settings.directory).map_err(failed)?;
        let files = Files::find(&settings.directory, settings.keep_files).map_err(failed)?;
        let shared = Arc::new(Shared::default());
        let (orders, received) = sync_channel(PENDING_LINES);
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
            chain: Chain::default(),
            state: State::Off,
            file_bytes: 0,
            status: JournalStatus::default(),
        };
        writer.begin(conductor);
        Ok(writer)
    }

    /// Steps the conductor and records the step: the input, and a digest of the effects added.
    pub fn step(&mut self, conductor: &mut Conductor, now_us: u64, input: Input, effects: &mut Vec<Effect>) {
        self.turn_over(conductor);
        let line = (self.state == State::Recording && !self.shared.failed.load(Ordering::Acquire))
            .then(|| serde_json::to_string(&input));
        let before = effects.len();
        conductor.step(now_us, input, effects);
        let line = line.and_then(Result::ok).zip(digest(&effects[before..]).ok());
        let recorded = line.is_some_and(|(input, effects)| {
            // Put together by hand: the input is serialised before the step consumes it.
            self.send(format!(
                "{{\"step\":{{\"now_us\":{now_us},\"input\":{input},\"effects\":\"{effects}\"}}}}"
            ))
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
        JournalStatus { error, ..self.status.clone() }
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
            last.push(Line::Lost(lost));
        }
        if self.state != State::Off {
            last.push(Line::End(End::Closed));
        }
        for line in last.iter().filter_map(json) {
            // The thread drains until the channel is closed, so this waits for the disk at most.
            let _ = orders.send(Order::Line(self.chain.seal(line)));
        }
        drop(orders);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.shared.fail("journal: the writing thread died; report this".into());
        }
    }

    /// Begins the next file where that is due and possible.
    fn turn_over(&mut self, conductor: &Conductor) {
        if self.shared.failed.load(Ordering::Acquire) {
            return;
        }
        let quiet = conductor.live_requests() == 0;
        let small = conductor.index().len() <= self.settings.base_blocks;
        // A header is dear: it is made only when the disk has caught up.
        let relaxed = self.shared.pending_bytes.load(Ordering::Acquire) == 0;
        let full = self.file_bytes > self.settings.rotate_bytes;
        match self.state {
            State::Recording
                if full && small && (quiet || self.file_bytes / 2 > self.settings.rotate_bytes) =>
            {
                self.end(End::Rotated);
                self.begin(conductor);
            }
            State::Recording if self.file_bytes / 4 > self.settings.rotate_bytes => {
                self.end(End::Truncated);
                self.state = State::Off;
            }
            State::Lossy(lost) if small && relaxed => {
                let told = json(&Line::Lost(lost)).is_some_and(|line| self.send(line));
                if told {
                    self.end(End::Rotated);
                    self.begin(conductor);
                }
            }
            State::Off if small && quiet && relaxed => self.begin(conductor),
            _ => {}
        }
    }

    fn end(&mut self, end: End) {
        if let Some(line) = json(&Line::End(end)) {
            self.send(line);
        }
    }

    /// Begins a file; where the disk is behind, nothing is recorded until it is not.
    fn begin(&mut self, conductor: &Conductor) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let header = Header {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").into(),
            start_unix_us: u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX),
            base: conductor.save(),
        };
        self.chain = Chain::default();
        let line = json(&Line::Header(Box::new(header))).map(|line| self.chain.seal(line));
        let begun = line.is_some_and(|line| self.hand_over(line, Order::Begin));
        // Only the steps count: a header may be larger than they are.
        self.file_bytes = 0;
        self.state = if begun { State::Recording } else { State::Off };
        self.status.files += u64::from(begun);
    }

    /// Hands a line to the disk's thread; false when too much waits there already.
    fn send(&mut self, line: String) -> bool {
        let before = self.chain.0;
        let sealed = self.chain.seal(line);
        let sent = self.hand_over(sealed, Order::Line);
        if !sent {
            self.chain.0 = before;
        }
        sent
    }

    fn hand_over(&mut self, line: String, order: fn(String) -> Order) -> bool {
        let bytes = line.len() as u64;
        let pending = self.shared.pending_bytes.fetch_add(bytes, Ordering::AcqRel);
        // A header larger than the bound goes through when nothing else waits.
        let room = pending == 0 || pending + bytes <= self.settings.pending_bytes;
        let sent = room && self.orders.as_ref().is_some_and(|orders| orders.try_send(order(line)).is_ok());
        if sent {
            self.file_bytes += bytes;
        } else {
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

fn json(line: &Line<Input>) -> Option<String> {
    serde_json::to_string(line).ok()
}
