//! Privacy-safe capture of what was served, as a trace that `baton trace` and `baton replay` read.
//!
//! A row says when a request came, how long its prompt and answer were, which prefix it shared, its
//! class and its own objectives, its conversation and how it ended: no text, no token, no name. Block keys and sessions are
//! hashed under a salt that stays in the process, and block keys become the small numbers 0, 1, 2, …
//! of each file, so files cannot be joined by their blocks.
//!
//! Times are ms since a moment of the process. Where rows come faster than a reader believes of ms, it
//! says so and wants `--time-unit ms`.
//!
//! Rows come in the order in which requests end. They are appended to a `.partial` file at once; when
//! it is full, its rows are put in order of arrival and it appears under its final name. A file that
//! a crash left behind is completed at the next start.

mod error;

use std::collections::HashMap;
use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use baton_types::{BlockKey, ChainHasher, RequestObjectives};
use serde_json::json;

pub use error::CaptureError;

/// Distinct blocks in one file; a file that reaches them is full. Bounds the map of keys.
const MOST_BLOCKS: usize = 1 << 20;

/// Where and how much is captured.
#[derive(Clone, Debug)]
pub struct CaptureConfig {
    /// Folder of the files; made when it is not there.
    pub folder: PathBuf,
    /// Tokens in a block: part of the files' names, as `--block-tokens` for reading short ones.
    pub block_tokens: u32,
    /// Hides what sessions were called; keep it secret, and give the same one to go on after a restart.
    pub salt: u64,
    /// A file is full at this size, bytes.
    pub file_bytes: u64,
    /// A file is full at this many rows.
    pub file_rows: u64,
    /// Full files that are kept; the oldest go. Disk use is at most `(files + 2) * file_bytes` and a
    /// row.
    pub files: usize,
    /// Rows that may wait for the writer; more are dropped and counted.
    pub queue_rows: usize,
}

impl CaptureConfig {
    /// At most 16 files of 64 MiB in `folder`.
    pub fn new(folder: PathBuf, block_tokens: u32, salt: u64) -> Self {
        Self {
            folder,
            block_tokens,
            salt,
            file_bytes: 64 << 20,
            file_rows: 1_000_000,
            files: 16,
            queue_rows: 4096,
        }
    }
}

/// How a captured request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureOutcome {
    /// It got all its tokens.
    Completed,
    /// It was refused.
    Rejected,
    /// It was admitted and could not be served.
    Failed,
    /// Its client left.
    Cancelled,
}

impl CaptureOutcome {
    /// The word in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Rejected => "rejected",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// One request that has ended.
#[derive(Clone, Debug)]
pub struct CaptureRow {
    /// When it came, µs from any fixed moment of this process.
    pub at_us: u64,
    /// Prompt tokens, at least 1.
    pub prompt_tokens: u64,
    /// Tokens generated; for a request that was not served, those it asked for.
    pub output_tokens: u64,
    /// Keys of the prompt's full blocks.
    pub chain: Arc<[BlockKey]>,
    /// Its service class.
    pub class: Option<Arc<str>>,
    /// The objectives that it named itself.
    pub objectives: RequestObjectives,
    /// Names its conversation.
    pub session: Option<u64>,
    /// Outcome of the request.
    pub outcome: CaptureOutcome,
}

/// Counters of the rows so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureStats {
    /// Rows in a file.
    pub written: u64,
    /// Rows lost: the writer was behind, the disk failed, or the row made no sense.
    pub dropped: u64,
    /// Files completed.
    pub files: u64,
    /// Failures of the disk.
    pub disk_errors: u64,
}

#[derive(Debug, Default)]
struct Counters {
    written: AtomicU64,
    dropped: AtomicU64,
    files: AtomicU64,
    disk_errors: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// Takes rows in without ever making serving wait, and writes them on a thread of its own. Dropping
/// it completes the file under way.
pub struct Capture {
    queue: Option<SyncSender<CaptureRow>>,
    counters: Arc<Counters>,
    writer: Option<JoinHandle<()>>,
}

impl Capture {
    /// Starts capturing; completes what an earlier run left half done first.
    pub fn start(config: CaptureConfig) -> Result<Self, CaptureError> {
        std::fs::create_dir_all(&config.folder)
            .map_err(|error| CaptureError::Unmade { folder: config.folder.clone(), error })?;
        let counters = Arc::new(Counters::default());
        let mut files = Files::new(config, Arc::clone(&counters))?;
        let (queue, rows) = sync_channel(files.config.queue_rows);
        let writer = std::thread::Builder::new()
            .name("capture".into())
            .spawn(move || files.run(&rows))
            .map_err(CaptureError::Thread)?;
        Ok(Self { queue: Some(queue), counters, writer: Some(writer) })
    }

    /// Hands a row to the writer; drops and counts it when the writer is too far behind.
    pub fn record(&self, row: CaptureRow) {
        if self.queue.as_ref().is_none_or(|queue| queue.try_send(row).is_err()) {
            add(&self.counters.dropped, 1);
        }
    }

    /// Returns the counters of the rows so far.
    pub fn stats(&self) -> CaptureStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counters;
        CaptureStats {
            written: read(&c.written),
            dropped: read(&c.dropped),
            files: read(&c.files),
            disk_errors: read(&c.disk_errors),
        }
    }

    /// Writes the waiting rows, completes the current file and returns the counters of all rows.
    #[cfg(test)]
    pub fn close(mut self) -> CaptureStats {
        self.end();
        self.stats()
    }

    fn end(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has lost rows; the counters say how many were written.
            let _ = writer.join();
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.end();
    }
}

/// The file under way.
struct CaptureFile {
    file: File,
    path: PathBuf,
    bytes: u64,
    rows: u64,
    /// The file's numbers for block keys.
    numbers: HashMap<BlockKey, u64>,
    next_number: u64,
}

/// The writer's side.
struct Files {
    config: CaptureConfig,
    counters: Arc<Counters>,
    sequence: u64,
    open: Option<CaptureFile>,
    /// The latest row could not be written.
    fails: bool,
}

impl Files {
    fn new(config: CaptureConfig, counters: Arc<Counters>) -> Result<Self, CaptureError> {
        let (sequence, left) = seal::found(&config.folder)?;
        let files = Self { config, counters, sequence, open: None, fails: false };
        left.into_iter().for_each(|path| files.seal(&path));
        Ok(files)
    }

    fn run(&mut self, rows: &Receiver<CaptureRow>) {
        for row in rows {
            match self.write(&row) {
                Ok(()) => add(&self.counters.written, 1),
                Err(why) => {
                    add(&self.counters.dropped, 1);
                    tracing::debug!("capture: a row was dropped: {why}");
                }
            }
        }
        self.rotate();
    }

    fn write(&mut self, row: &CaptureRow) -> Result<(), CaptureError> {
        let blocks = row.prompt_tokens / u64::from(self.config.block_tokens);
        if row.prompt_tokens == 0 || blocks != row.chain.len() as u64 || row.chain.len() > MOST_BLOCKS {
            return Err(CaptureError::Row);
        }
        if self.open.as_ref().is_some_and(|open| open.numbers.len() + row.chain.len() > MOST_BLOCKS) {
            self.rotate();
        }
        let outcome = self.append(row);
        let failed_before = std::mem::replace(&mut self.fails, outcome.is_err());
        match &outcome {
            Err(why) => {
                add(&self.counters.disk_errors, 1);
                if !failed_before {
                    let folder = self.config.folder.display();
                    tracing::warn!(
                        "capture: {why}; rows are dropped until it works: check the free space of {folder}"
                    );
                }
            }
            Ok(()) if failed_before => tracing::info!("capture: rows are written again"),
            Ok(()) => {}
        }
        let full = |o: &CaptureFile| o.bytes >= self.config.file_bytes || o.rows >= self.config.file_rows;
        if self.open.as_ref().is_some_and(full) {
            self.rotate();
        }
        outcome
    }

    fn append(&mut self, row: &CaptureRow) -> Result<(), CaptureError> {
        let open = match &mut self.open {
            Some(open) => open,
            none => none.insert(CaptureFile::create(&self.config, self.sequence + 1)?),
        };
        let line = open.line(row, self.config.block_tokens, self.config.salt);
        if let Err(error) = open.file.write_all(line.as_bytes()) {
            // Half a row must not stay: what follows would be joined to it.
            let undone =
                open.file.set_len(open.bytes).and_then(|()| open.file.seek(std::io::SeekFrom::End(0)));
            let path = open.path.clone();
            if undone.is_err() {
                self.rotate();
            }
            return Err(CaptureError::File { path, error });
        }
        open.bytes += line.len() as u64;
        open.rows += 1;
        Ok(())
    }

    /// Completes the file under way, if there is one.
    fn rotate(&mut self) {
        if let Some(open) = self.open.take() {
            self.sequence += 1;
            drop(open.file);
            self.seal(&open.path);
        }
    }

    fn seal(&self, partial: &std::path::Path) {
        let sealed = seal::seal(partial);
        add(&self.counters.files, u64::from(sealed.is_ok()));
        let failed = [sealed, seal::keep_newest(&self.config.folder, self.config.files)];
        for why in failed.into_iter().filter_map(Result::err) {
            add(&self.counters.disk_errors, 1);
            tracing::warn!("capture: {}: {why}; it stays as it is", partial.display());
        }
    }
}

impl CaptureFile {
    fn create(config: &CaptureConfig, sequence: u64) -> Result<Self, CaptureError> {
        let path = config.folder.join(seal::partial_name(sequence, config.block_tokens));
        let file = File::create(&path).map_err(CaptureError::of_file(&path))?;
        Ok(Self { file, path, bytes: 0, rows: 0, numbers: HashMap::new(), next_number: 0 })
    }

    /// A row's line. The tail of a prompt that fills no block has a number of its own.
    fn line(&mut self, row: &CaptureRow, block_tokens: u32, salt: u64) -> String {
        let mut ids: Vec<u64> = Vec::with_capacity(row.chain.len() + 1);
        for key in &*row.chain {
            let number = *self.numbers.entry(*key).or_insert_with(|| {
                self.next_number += 1;
                self.next_number - 1
            });
            ids.push(number);
        }
        if !row.prompt_tokens.is_multiple_of(u64::from(block_tokens)) {
            ids.push(self.next_number);
            self.next_number += 1;
        }
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let timestamp_ms = row.at_us as f64 / 1e3;
        let mut line = json!({
            "timestamp": timestamp_ms,
            "input_length": row.prompt_tokens,
            "output_length": row.output_tokens.max(1),
            "hash_ids": ids,
            "outcome": row.outcome.name(),
        });
        if let Some(class) = &row.class {
            line["class"] = json!(&**class);
        }
        let objectives = [row.objectives.ttft_us, row.objectives.tbt_us];
        for (name, own_us) in ["slo_ttft_ms", "slo_tbt_ms"].into_iter().zip(objectives) {
            if let Some(own_us) = own_us {
                line[name] = json!(own_us / 1_000);
            }
        }
        if let Some(session) = row.session {
            let hidden = ChainHasher::new(salt, b"session").push_id(session).short().0;
            line["session_id"] = json!(format!("{hidden:016x}"));
        }
        format!("{line}\n")
    }
}

/// Completing files: rows in order of arrival, under a final name, the oldest files removed.
mod seal {
    use std::collections::HashMap;
    use std::fs::OpenOptions;
    use std::io::{Read as _, Seek as _, SeekFrom};
    use std::path::{Path, PathBuf};

    use baton_traces::write::{self, Output};
    use baton_traces::{Dialect, ReadOptions, Trace};

    use super::CaptureError;

    const PARTIAL: &str = ".partial";

    /// The name of a file under way.
    pub fn partial_name(sequence: u64, block_tokens: u32) -> String {
        format!("capture-{sequence:08}-b{block_tokens}.jsonl{PARTIAL}")
    }

    /// Number and block size of a capture file's name, and whether it is complete.
    fn parse(path: &Path) -> Option<(u64, u32, bool)> {
        let name = path.file_name()?.to_str()?;
        let whole = name.strip_suffix(PARTIAL);
        let (sequence, block) =
            whole.unwrap_or(name).strip_prefix("capture-")?.strip_suffix(".jsonl")?.split_once("-b")?;
        Some((sequence.parse().ok()?, block.parse().ok()?, whole.is_none()))
    }

    fn captures(folder: &Path) -> Result<Vec<(u64, u32, bool, PathBuf)>, CaptureError> {
        let entries = std::fs::read_dir(folder)
            .map_err(|error| CaptureError::Unlisted { folder: folder.to_owned(), error })?;
        let mut found: Vec<_> = entries
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                parse(&path).map(|(sequence, block, complete)| (sequence, block, complete, path))
            })
            .collect();
        found.sort();
        Ok(found)
    }

    /// The highest number in a folder, and the files that were left half done.
    pub fn found(folder: &Path) -> Result<(u64, Vec<PathBuf>), CaptureError> {
        let all = captures(folder)?;
        let last = all.last().map_or(0, |f| f.0);
        Ok((last, all.into_iter().filter(|f| !f.2).map(|f| f.3).collect()))
    }

    /// Removes the oldest files beyond `most`; call it while none is being written.
    pub fn keep_newest(folder: &Path, most: usize) -> Result<(), CaptureError> {
        let all = captures(folder)?;
        for (_, _, _, path) in all.iter().take(all.len().saturating_sub(most)) {
            std::fs::remove_file(path).map_err(CaptureError::of_file(path))?;
        }
        Ok(())
    }

    /// Puts a file's rows in order of arrival and gives it its final name. One without a whole row is
    /// removed.
    pub fn seal(partial: &Path) -> Result<(), CaptureError> {
        let (_, block_tokens, _) = parse(partial).ok_or(CaptureError::Name)?;
        if cut_torn_row(partial).map_err(CaptureError::Cut)? == 0 {
            return std::fs::remove_file(partial).map_err(CaptureError::Cut);
        }
        let options = ReadOptions {
            dialect: Some(Dialect::Mooncake),
            block_tokens: Some(block_tokens),
            strict: false,
            ..ReadOptions::default()
        };
        let mut trace = baton_traces::load(partial, &options)?;
        part_sessions(&mut trace);
        let path = partial.with_extension("");
        let mut writer = write::create(&path, Output::Mooncake, true)?;
        for record in &trace.records {
            writer.write(record)?;
        }
        writer.finish()?;
        std::fs::remove_file(partial).map_err(CaptureError::Cut)
    }

    /// Cuts off what follows the last line's end, which a crash may have left; returns what is left, bytes.
    fn cut_torn_row(path: &Path) -> std::io::Result<u64> {
        const STEP: u64 = 64 << 10;
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut end = file.metadata()?.len();
        let mut piece = Vec::new();
        while end > 0 {
            let from = end.saturating_sub(STEP);
            file.seek(SeekFrom::Start(from))?;
            piece.clear();
            (&mut file).take(end - from).read_to_end(&mut piece)?;
            if let Some(at) = piece.iter().rposition(|b| *b == b'\n') {
                let keep = from + at as u64 + 1;
                file.set_len(keep)?;
                return Ok(keep);
            }
            end = from;
        }
        Ok(0)
    }

    /// A conversation whose prompt became shorter has begun anew: its later turns get a name of their
    /// own, because readers take a session's prompts to grow. Arrivals stay the rows' own times.
    fn part_sessions(trace: &mut Trace) {
        let mut known: HashMap<String, (u64, u32)> = HashMap::new();
        for record in &mut trace.records {
            let Some(extra) = record.extra.as_deref_mut() else { continue };
            extra.delay_ms = None;
            let Some(session) = &mut extra.session_id else { continue };
            let (longest, part) = known.entry(session.clone()).or_insert((0, 0));
            *part += u32::from(record.input_length < *longest);
            *longest = record.input_length;
            if *part > 0 {
                *session = format!("{session}-{part}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_traces::{ReadOptions, lint};
    use std::path::Path;

    /// A conversation's prompt of `tokens` tokens, of a given namespace.
    fn row(at_us: u64, namespace: &[u8], tokens: u64) -> CaptureRow {
        let mut hasher = ChainHasher::new(7, namespace);
        let chain: Vec<BlockKey> = (0..tokens / 16).map(|id| hasher.push_id(id)).collect();
        CaptureRow {
            at_us,
            prompt_tokens: tokens,
            output_tokens: 9,
            chain: chain.into(),
            class: Some("batch".into()),
            objectives: RequestObjectives::default(),
            session: Some(5),
            outcome: CaptureOutcome::Completed,
        }
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
        all.sort();
        all
    }

    fn text(folder: &Path) -> String {
        files(folder).iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
    }

    fn lines(folder: &Path) -> Vec<serde_json::Value> {
        text(folder).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn what_is_captured_passes_lint_and_reads_back_as_it_was() {
        let place = tempfile::tempdir().unwrap();
        let capture = Capture::start(CaptureConfig::new(place.path().into(), 16, 3)).unwrap();
        // In order of ends: later arrivals first, two namespaces, growing and shrinking turns.
        for at in (0..20u64).rev() {
            let name: &[u8] = if at.is_multiple_of(2) { b"a" } else { b"b" };
            capture.record(row(at * 150_500, name, 40 + 33 * (at % 7)));
        }
        let stats = capture.close();
        assert_eq!((stats.written, stats.dropped, stats.files, stats.disk_errors), (20, 0, 1, 0));
        let all = files(place.path());
        assert_eq!(all.len(), 1, "{all:?}");
        let report = lint::lint(&all[0], &ReadOptions::default(), |_| {}).unwrap();
        assert!(report.is_clean(), "{report:?}");
        let trace = baton_traces::load(&all[0], &ReadOptions::default()).unwrap();
        assert_eq!((trace.records.len(), trace.block_tokens), (20, 16), "the block size tells itself");
        for (at, record) in trace.records.iter().enumerate() {
            let at = at as u64;
            let wanted = row(0, b"", 40 + 33 * (at % 7));
            assert_eq!((record.timestamp_ms, record.input_length), (at as f64 * 150.5, wanted.prompt_tokens));
            assert_eq!(record.extra.as_ref().unwrap().class.as_deref(), Some("batch"));
            // Prefixes are shared exactly within a namespace.
            let shared = |other: u64| {
                let ids = &trace.records[other as usize].hash_ids;
                record.hash_ids.iter().zip(ids).take_while(|(a, b)| a == b).count() as u64
            };
            for other in (0..20).filter(|other| *other != at) {
                let both = (40 + 33 * (at % 7)).min(40 + 33 * (other % 7)) / 16;
                assert_eq!(
                    shared(other),
                    if (at + other).is_multiple_of(2) { both } else { 0 },
                    "{at} and {other}"
                );
            }
        }
    }

    #[test]
    fn a_file_tells_nothing_but_lengths_and_shared_prefixes() {
        let place = tempfile::tempdir().unwrap();
        let captured = |salt| {
            let folder = place.path().join(format!("{salt}"));
            let capture = Capture::start(CaptureConfig::new(folder.clone(), 16, salt)).unwrap();
            capture.record(row(0, b"a", 40));
            drop(capture);
            lines(&folder).remove(0)
        };
        let (one, other) = (captured(1), captured(2));
        assert_eq!(one["hash_ids"], json!([0, 1, 2]), "numbers, not hashes");
        assert_ne!(one["session_id"], other["session_id"], "the session is salted");
        let mut names: Vec<&String> = one.as_object().unwrap().keys().collect();
        names.sort();
        assert_eq!(
            names,
            ["class", "hash_ids", "input_length", "outcome", "output_length", "session_id", "timestamp"]
        );
    }

    #[test]
    fn objectives_that_a_request_named_are_read_back_from_its_row() {
        let place = tempfile::tempdir().unwrap();
        let capture = Capture::start(CaptureConfig::new(place.path().into(), 16, 1)).unwrap();
        let named = [(None, Some(40_000)), (Some(1_500_000), None)];
        for (at, (ttft_us, tbt_us)) in (0..).zip(named) {
            let objectives = RequestObjectives { ttft_us, tbt_us };
            capture.record(CaptureRow { objectives, ..row(at * 200_000, b"a", 50) });
        }
        drop(capture);
        let options = ReadOptions { block_tokens: Some(16), ..ReadOptions::default() };
        let trace = baton_traces::load(&files(place.path())[0], &options).unwrap();
        let read = |at: usize| trace.records[at].extra.as_deref().map(|e| (e.slo_ttft_ms, e.slo_tbt_ms));
        assert_eq!([read(0), read(1)], [Some((None, Some(40.0))), Some((Some(1500.0), None))]);
    }

    #[test]
    fn every_ending_has_its_word_and_a_length_to_replay() {
        use CaptureOutcome::{Cancelled, Completed, Failed, Rejected};
        let place = tempfile::tempdir().unwrap();
        let capture = Capture::start(CaptureConfig::new(place.path().into(), 16, 1)).unwrap();
        for (at, outcome) in (0..).zip([Completed, Rejected, Failed, Cancelled]) {
            capture.record(CaptureRow { outcome, output_tokens: 0, ..row(at * 200_000, b"a", 50) });
        }
        capture.close();
        let rows = lines(place.path());
        let words: Vec<&str> = rows.iter().map(|r| r["outcome"].as_str().unwrap()).collect();
        assert_eq!(words, ["completed", "rejected", "failed", "cancelled"]);
        assert!(rows.iter().all(|r| r["output_length"] == 1), "no length of 0, which no reader takes");
    }

    #[test]
    fn files_rotate_and_the_oldest_go() {
        let place = tempfile::tempdir().unwrap();
        let config =
            CaptureConfig { file_rows: 10, files: 3, ..CaptureConfig::new(place.path().into(), 16, 1) };
        let capture = Capture::start(config).unwrap();
        for at in 0..95 {
            capture.record(row(at, b"a", 50));
        }
        assert_eq!(capture.close().files, 10);
        let kept = lines(place.path());
        assert_eq!((files(place.path()).len(), kept.len()), (3, 25));
        assert_eq!(kept[0]["timestamp"], json!(0.070), "the newest are kept");
        assert_eq!(kept[10]["hash_ids"], json!([0, 1, 2, 3]), "each file numbers its own blocks");
        let config = CaptureConfig { file_bytes: 1, ..CaptureConfig::new(place.path().into(), 16, 1) };
        let capture = Capture::start(config).unwrap();
        (0..2).for_each(|at| capture.record(row(at, b"a", 50)));
        assert_eq!(capture.close().files, 2, "a size is a bound too");
    }

    #[test]
    fn a_torn_file_of_a_crash_is_completed() {
        let place = tempfile::tempdir().unwrap();
        let whole = r#"{"timestamp":5,"input_length":20,"output_length":1,"hash_ids":[0,1]}"#;
        let path = place.path().join(seal::partial_name(4, 16));
        std::fs::write(&path, format!("{whole}\n{{\"timestamp\":9,\"inp")).unwrap();
        std::fs::write(place.path().join(seal::partial_name(5, 16)), "{").unwrap();
        std::fs::write(place.path().join("notes.txt"), "mine").unwrap();
        let capture = Capture::start(CaptureConfig::new(place.path().into(), 16, 1)).unwrap();
        capture.record(row(0, b"a", 50));
        drop(capture);
        let names: Vec<String> =
            files(place.path()).iter().map(|p| p.file_name().unwrap().to_string_lossy().into()).collect();
        assert_eq!(names, ["capture-00000004-b16.jsonl", "capture-00000006-b16.jsonl", "notes.txt"]);
    }

    #[test]
    fn serving_never_waits_and_what_is_lost_is_counted() {
        let place = tempfile::tempdir().unwrap();
        let config = CaptureConfig { queue_rows: 1, ..CaptureConfig::new(place.path().into(), 16, 1) };
        let capture = Capture::start(config).unwrap();
        // Far faster than rows of 60,000 blocks can be written.
        let big = row(0, b"a", 960_000);
        for _ in 0..200 {
            capture.record(big.clone());
        }
        capture.record(CaptureRow { prompt_tokens: 0, ..row(0, b"a", 50) });
        let stats = capture.close();
        assert_eq!(stats.written + stats.dropped, 201);
        assert!(stats.dropped > 1, "the writer kept up with everything: {stats:?}");
        assert_eq!(lines(place.path()).len() as u64, stats.written);
    }

    #[test]
    fn a_disk_that_fails_costs_rows_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("gone");
        let capture = Capture::start(CaptureConfig::new(folder.clone(), 16, 1)).unwrap();
        std::fs::remove_dir(&folder).unwrap();
        capture.record(row(0, b"a", 50));
        let stats = capture.close();
        assert_eq!((stats.written, stats.dropped, stats.disk_errors), (0, 1, 1));
        let error = Capture::start(CaptureConfig::new("/proc/none".into(), 16, 1)).err().unwrap();
        let error = error.to_string();
        assert!(error.contains("/proc/none") && error.contains("can be written"), "{error}");
    }
}
