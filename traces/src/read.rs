//! Reading a trace: streamed in bounded memory, or whole.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};
use std::path::{Path, PathBuf};

use crate::detect;
use crate::dialect::Dialect;
use crate::error::{RowFault, Stage, TraceError};
use crate::options::ReadOptions;
use crate::parser::{Parse, Row, Setup, parser};
use crate::record::{Record, SYNTHETIC_ID_BASE, Trace};
use crate::source::{self, CsvRows, Lines, Progress};

/// How rows that break a rule are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// They are errors.
    Strict,
    /// They are corrected or left out, and counted.
    Lenient,
    /// They are handed out as they are (for lint).
    AsWritten,
}

enum Rows {
    Json(Lines),
    Csv(Box<CsvRows>),
}

/// Rows of a trace file, one after another, as canonical records in time order.
///
/// Memory stays bounded: one row, the state of the dialect's sessions, and (only for dialects whose
/// rows do not come in time order) as many rows as `limits.reorder_rows`.
pub struct Reader {
    path: PathBuf,
    progress: Progress,
    setup: Setup,
    rows: Rows,
    parser: Box<dyn Parse>,
    mode: Mode,
    assumptions: Vec<String>,
    parsed: Vec<Record>,
    ready: VecDeque<(u64, Record)>,
    reorder: Option<ReorderBuffer>,
    /// The trace is read whole, so that negative times can be moved together with all others.
    keeps_negative: bool,
    corrections: Corrections,
    origin_ms: Option<f64>,
    last_ms: f64,
    next_own_id: u64,
    given: u64,
    max_rows: u64,
    ended: bool,
}

#[derive(Debug, Default)]
struct Corrections {
    without_ids: u64,
    id_counts: u64,
    late: u64,
    left_out: u64,
    first_left_out: Option<String>,
}

/// A row that waits for its turn.
struct WaitingRow {
    at_ms: f64,
    sequence: u64,
    row: u64,
    record: Record,
}

impl PartialEq for WaitingRow {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for WaitingRow {}
impl PartialOrd for WaitingRow {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for WaitingRow {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at_ms.total_cmp(&other.at_ms).then(self.sequence.cmp(&other.sequence))
    }
}

/// Rows held back until no earlier one can come.
struct ReorderBuffer {
    waiting: BinaryHeap<Reverse<WaitingRow>>,
    most: usize,
    sequence: u64,
}

/// Opens a trace for streaming. Fails at once where the reader cannot detect the dialect, the unit or the context;
/// see [`ReadOptions`].
pub fn open(path: &Path, options: &ReadOptions) -> Result<Reader, TraceError> {
    let opened = source::open(path, options.limits.row_bytes)?;
    let at_start = |fault: RowFault| fault.at(path, None);
    let settled = detect::settle(&opened.sample, opened.whole, options).map_err(at_start)?;
    let setup = settled.setup;
    let rows = if setup.dialect.is_csv() {
        let csv = CsvRows::new(opened.bytes, options.limits.row_bytes);
        Rows::Csv(Box::new(csv.map_err(at_start)?))
    } else {
        Rows::Json(Lines::new(opened.bytes, options.limits.row_bytes))
    };
    Ok(Reader {
        path: opened.path,
        progress: opened.progress,
        parser: parser(&setup).map_err(at_start)?,
        rows,
        mode: if options.strict { Mode::Strict } else { Mode::Lenient },
        assumptions: settled.assumptions,
        parsed: Vec::new(),
        ready: VecDeque::new(),
        reorder: (!setup.ordered).then(|| ReorderBuffer {
            waiting: BinaryHeap::new(),
            most: options.limits.reorder_rows.max(1),
            sequence: 0,
        }),
        setup,
        keeps_negative: false,
        corrections: Corrections::default(),
        origin_ms: None,
        last_ms: f64::NEG_INFINITY,
        next_own_id: SYNTHETIC_ID_BASE,
        given: 0,
        max_rows: options.max_rows.unwrap_or(u64::MAX),
        ended: false,
    })
}

/// Reads a whole trace into memory, in time order.
pub fn load(path: &Path, options: &ReadOptions) -> Result<Trace, TraceError> {
    let mut reader = open(path, options)?;
    if let Some(reorder) = &mut reader.reorder {
        reorder.most = usize::MAX;
    }
    reader.keeps_negative = !options.strict;
    let mut records = Vec::new();
    for record in &mut reader {
        records.push(record?);
    }
    if !options.strict {
        records.sort_by(|a: &Record, b| a.timestamp_ms.total_cmp(&b.timestamp_ms));
    }
    let mut assumptions = reader.assumptions();
    let first_ms = records.first().map_or(0.0, |record| record.timestamp_ms);
    if first_ms < 0.0 {
        records.iter_mut().for_each(|record| record.timestamp_ms -= first_ms);
        assumptions.push(format!("the earliest time is {first_ms} ms: all times were moved so that it is 0"));
    }
    Ok(Trace { block_tokens: reader.block_tokens(), assumptions, dialect: reader.dialect(), records })
}

impl Reader {
    /// The dialect the file is read as.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.setup.dialect
    }

    /// Tokens that one id stands for.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.setup.block_tokens
    }

    /// The assumptions so far; complete once the last row was read.
    #[must_use]
    pub fn assumptions(&self) -> Vec<String> {
        let mut all = self.assumptions.clone();
        all.extend(self.parser.notes());
        let corrections = &self.corrections;
        if corrections.without_ids > 0 {
            all.push(format!(
                "{} rows have no block ids: each got ids that no other shares",
                corrections.without_ids
            ));
        }
        if corrections.id_counts > 0 {
            all.push(format!(
                "{} rows had too few or too many block ids: filled up or cut",
                corrections.id_counts
            ));
        }
        if corrections.late > 0 {
            all.push(format!("{} rows were out of time order", corrections.late));
        }
        if let Some(first) = &corrections.first_left_out {
            all.push(format!(
                "{} faulty rows were left out, the first because {first}",
                corrections.left_out
            ));
        }
        all
    }

    /// How far reading has come in the file.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Hands rows out as they are written, with no rule checked and no id made up (for lint).
    pub(crate) fn as_written(&mut self) {
        self.mode = Mode::AsWritten;
        self.reorder = None;
    }

    /// Whether ids leave out a tail shorter than a block.
    pub(crate) fn tails_dropped(&self) -> bool {
        self.setup.tails_dropped
    }

    /// Whether rows ought to come in time order.
    pub(crate) fn ordered(&self) -> bool {
        self.setup.ordered
    }

    /// The next record with the line it came from.
    pub(crate) fn next_row(&mut self) -> Option<Result<(u64, Record), TraceError>> {
        if self.given >= self.max_rows {
            return None;
        }
        loop {
            if let Some((row, record)) = self.ready.pop_front() {
                self.given += 1;
                return Some(Ok((row, record)));
            }
            if self.ended {
                return None;
            }
            if let Err((row, fault)) = self.fill() {
                let fatal = fault.stage == Stage::Open || fault.stage == Stage::Bound;
                self.ended |= fatal || self.mode == Mode::Strict;
                let error = fault.at(&self.path, Some(row));
                if self.mode != Mode::Lenient || fatal {
                    return Some(Err(error));
                }
                self.leave_out(&error);
            }
        }
    }

    fn leave_out(&mut self, error: &TraceError) {
        self.corrections.left_out += 1;
        self.corrections
            .first_left_out
            .get_or_insert_with(|| format!("row {}: {}", error.row.unwrap_or_default(), error.problem));
    }

    /// Reads one row of the file into `ready`, or finishes.
    fn fill(&mut self) -> Result<(), (u64, RowFault)> {
        self.parsed.clear();
        let (row, outcome) = match &mut self.rows {
            Rows::Json(lines) => {
                let parser = &mut self.parser;
                let parsed = &mut self.parsed;
                let outcome = match lines.next_line() {
                    Ok(Some(line)) => parser.parse(&Row::Json(line), parsed).map(|()| true),
                    Ok(None) => Ok(false),
                    Err(fault) => Err(fault),
                };
                (lines.number(), outcome)
            }
            Rows::Csv(csv) => {
                let outcome = match csv.next_record() {
                    Ok(Some(record)) => self.parser.parse(&Row::Csv(record), &mut self.parsed).map(|()| true),
                    Ok(None) => Ok(false),
                    Err(fault) => Err(fault),
                };
                (csv.number(), outcome)
            }
        };
        if !outcome.map_err(|fault| (row, fault))? {
            self.ended = true;
            return self.release_all();
        }
        let mut parsed = std::mem::take(&mut self.parsed);
        let settled = parsed.drain(..).try_for_each(|record| self.accept(row, record));
        self.parsed = parsed;
        settled.map_err(|fault| (row, fault))
    }

    /// Settles a record and queues it.
    fn accept(&mut self, row: u64, mut record: Record) -> Result<(), RowFault> {
        if self.mode == Mode::AsWritten {
            self.ready.push_back((row, record));
            return Ok(());
        }
        check_times(&record)?;
        self.check_lengths(&record)?;
        self.settle_ids(&mut record)?;
        let Some(reorder) = &mut self.reorder else {
            return self.emit(row, record);
        };
        reorder.sequence += 1;
        reorder.waiting.push(Reverse(WaitingRow {
            at_ms: record.timestamp_ms,
            sequence: reorder.sequence,
            row,
            record,
        }));
        if reorder.waiting.len() <= reorder.most {
            return Ok(());
        }
        match reorder.waiting.pop() {
            Some(Reverse(first)) => self.emit(first.row, first.record),
            None => Ok(()),
        }
    }

    fn release_all(&mut self) -> Result<(), (u64, RowFault)> {
        while let Some(Reverse(first)) = self.reorder.as_mut().and_then(|r| r.waiting.pop()) {
            let row = first.row;
            self.emit(row, first.record).map_err(|fault| (row, fault))?;
        }
        Ok(())
    }

    /// Moves dates to 0, checks the order of times, and queues the record.
    fn emit(&mut self, row: u64, mut record: Record) -> Result<(), RowFault> {
        if self.setup.rebase {
            let origin = *self.origin_ms.get_or_insert(record.timestamp_ms);
            record.timestamp_ms -= origin;
        }
        let late = record.timestamp_ms < self.last_ms;
        let negative = record.timestamp_ms < 0.0;
        if (late || negative) && self.mode == Mode::Strict {
            return Err(self.time_fault(record.timestamp_ms));
        }
        let kept = negative && self.keeps_negative;
        self.corrections.late += u64::from(late || negative && !kept);
        if !kept {
            record.timestamp_ms = record.timestamp_ms.max(0.0);
        }
        self.last_ms = self.last_ms.max(record.timestamp_ms);
        self.ready.push_back((row, record));
        Ok(())
    }

    fn time_fault(&self, at_ms: f64) -> RowFault {
        let problem = if at_ms < 0.0 && !self.setup.rebase {
            format!("the time {at_ms} ms is negative")
        } else {
            format!("the time {at_ms} ms comes after {} ms", self.last_ms)
        };
        let remedy = match &self.reorder {
            Some(reorder) => format!(
                "more than {} rows are out of order: load the file whole (trace convert --whole)",
                reorder.most
            ),
            None => "sort the file (trace convert --lenient --whole does)".to_string(),
        };
        RowFault::check("time-order", problem, remedy)
    }

    fn check_lengths(&self, record: &Record) -> Result<(), RowFault> {
        let zero = match (record.input_length, record.output_length) {
            (0, _) => "input_length",
            (_, 0) => "output_length",
            _ => return Ok(()),
        };
        Err(RowFault::check("length", format!("{zero} is 0"), "fix or remove the row"))
    }

    /// Makes the ids cover the whole prompt, one a block.
    fn settle_ids(&mut self, record: &mut Record) -> Result<(), RowFault> {
        let block_tokens = u64::from(self.setup.block_tokens);
        let wanted = record.input_length.div_ceil(block_tokens);
        let given = record.hash_ids.len() as u64;
        if given == wanted {
            return Ok(());
        }
        if wanted > self.setup.limits.ids {
            return Err(RowFault::bound(
                format!(
                    "{} tokens make {wanted} blocks, over the bound of {}",
                    record.input_length, self.setup.limits.ids
                ),
                "check the row and the block size",
            ));
        }
        let is_short_tail = self.setup.tails_dropped && given == record.input_length / block_tokens;
        if given == 0 && !is_short_tail {
            self.corrections.without_ids += 1;
        } else if !is_short_tail {
            if self.mode == Mode::Strict {
                return Err(self.count_fault(record.input_length, given, wanted));
            }
            self.corrections.id_counts += 1;
        }
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        record.hash_ids.truncate(wanted);
        while record.hash_ids.len() < wanted {
            record.hash_ids.push(self.next_own_id);
            self.next_own_id += 1;
        }
        Ok(())
    }

    fn count_fault(&self, tokens: u64, given: u64, wanted: u64) -> RowFault {
        RowFault::check(
            "block-count",
            format!(
                "{given} block ids for {tokens} tokens at {} a block; expected {wanted}",
                self.setup.block_tokens
            ),
            "pass the block size the file was made with, or fix the row",
        )
    }
}

/// A number of a row may be finite, and what it comes to in ms not.
fn check_times(record: &Record) -> Result<(), RowFault> {
    if record.timestamp_ms.is_finite() && record.delay_ms().is_none_or(f64::is_finite) {
        return Ok(());
    }
    Err(RowFault::bound("its time or delay is more than a number can hold", "fix or remove the row"))
}

impl Iterator for Reader {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_row().map(|outcome| outcome.map(|(_, record)| record))
    }
}
