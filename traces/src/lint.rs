//! Naming every row that breaks a rule, in one pass and bounded memory.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use crate::detect::block::{FEWEST_AGREEING_ROWS, implied_block};
use crate::dialect::Dialect;
use crate::error::{Stage, TraceError};
use crate::options::ReadOptions;
use crate::parser::Sessions;
use crate::read::{Reader, open};
use crate::record::Record;
use crate::seen::RecentIds;

/// The rules, each with what breaks it.
pub const RULES: [(&str, &str); 10] = [
    ("parse", "the row is not in the dialect's form"),
    ("time-unit", "the times fit another unit better than the dialect's"),
    ("time-order", "a time is negative, or before that of an earlier row"),
    ("length", "a prompt or output is of 0 or fewer tokens"),
    ("block-size", "ids and lengths of all rows agree on another block size"),
    ("block-count", "a row has too few or too many block ids for its prompt"),
    ("predecessor", "a block id follows different blocks in different rows"),
    ("partial-full", "a block id is both a full block and a shorter tail"),
    ("shrink", "a later turn of a session is shorter than the one before (delta rows?)"),
    ("bound", "a row is larger than any sensible one; reading stops there"),
];

/// Distinct ids whose predecessors are remembered; beyond, the longest unused are forgotten.
const MOST_IDS: usize = 4_000_000;
/// Findings kept a rule; all are counted.
const MOST_FINDINGS: usize = 20;
/// Stands for "nothing precedes".
const ROOT: u64 = u64::MAX;

/// One row that breaks one rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Line of the file; `None` where the whole file is to blame.
    pub row: Option<u64>,
    /// The rule, one of [`RULES`] (or a dialect's own, such as `context`).
    pub rule: String,
    /// The problem with the row.
    pub problem: String,
}

/// The findings of lint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LintReport {
    /// Records looked at.
    pub records: u64,
    /// The first findings of each rule, in file order within a rule.
    pub findings: Vec<Finding>,
    /// Findings in all, by rule.
    pub counts: BTreeMap<String, u64>,
    /// The reader's assumptions about the file.
    pub assumptions: Vec<String>,
}

impl LintReport {
    /// Whether no rule is broken.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.counts.is_empty()
    }

    fn add(&mut self, row: Option<u64>, rule: &str, problem: String) {
        let count = self.counts.entry(rule.to_string()).or_default();
        *count += 1;
        if *count <= MOST_FINDINGS as u64 {
            self.findings.push(Finding { row, rule: rule.to_string(), problem });
        }
    }
}

/// Checks a file against every rule. Fails only where it cannot be read as rows at all. `each` is
/// called after every record with the reader, for a progress bar.
pub fn lint(
    path: &Path,
    options: &ReadOptions,
    mut each: impl FnMut(&Reader),
) -> Result<LintReport, TraceError> {
    let mut report =
        LintReport { records: 0, findings: Vec::new(), counts: BTreeMap::new(), assumptions: Vec::new() };
    let mut reader = open_anyway(path, options, &mut report)?;
    reader.as_written();
    let mut rules = Rules::new(&reader, options);
    let written = path.extension().is_some_and(|extension| extension == "partial");
    if written {
        (rules.ordered, rules.sessions_grow) = (false, false);
    }
    while let Some(outcome) = reader.next_row() {
        match outcome {
            Ok((row, record)) => {
                report.records += 1;
                rules.check(row, &record, &mut report);
            }
            Err(error) if error.stage == Stage::Open => return Err(error),
            Err(error) => report.add(error.row, error.rule, error.problem),
        }
        each(&reader);
    }
    rules.check_file(&mut report);
    report.assumptions = reader.assumptions();
    if written {
        report.assumptions.push(
            "a capture that is being written: its rows are put in order of arrival, and time-order and shrink hold, \
             once it is complete"
                .into(),
        );
    }
    if rules.blocks.has_forgotten() {
        report.assumptions.push(format!(
            "more than {MOST_IDS} distinct block ids: the longest unused were forgotten, so a reuse after so many others is not checked"
        ));
    }
    report.findings.sort_by(|a, b| (&a.rule, a.row).cmp(&(&b.rule, b.row)));
    Ok(report)
}

/// Opens strictly; where the file as a whole is doubtful, says so and opens all the same.
fn open_anyway(path: &Path, options: &ReadOptions, report: &mut LintReport) -> Result<Reader, TraceError> {
    let strict = ReadOptions { strict: true, ..options.clone() };
    match open(path, &strict) {
        Err(error) if error.rule == "time-unit" || error.rule == "shrink" => {
            // A shrinking session is named again by its row.
            if error.rule == "time-unit" {
                report.add(None, error.rule, error.problem);
            }
            open(path, &ReadOptions { strict: false, ..options.clone() })
        }
        outcome => outcome,
    }
}

#[derive(Debug, Clone, Copy)]
struct Block {
    before: u64,
    is_partial: bool,
}

struct Rules {
    block_tokens: u64,
    tails_dropped: bool,
    ordered: bool,
    sessions_grow: bool,
    last_ms: f64,
    counted: (u64, u64),
    rows_with_ids: usize,
    blocks: RecentIds<Block>,
    sessions: Sessions<u64>,
}

impl Rules {
    fn new(reader: &Reader, options: &ReadOptions) -> Self {
        Self {
            block_tokens: u64::from(reader.block_tokens()),
            tails_dropped: reader.tails_dropped(),
            ordered: reader.ordered(),
            sessions_grow: matches!(reader.dialect(), Dialect::Mooncake | Dialect::MooncakeDelta),
            last_ms: 0.0,
            counted: (1, u64::MAX),
            rows_with_ids: 0,
            blocks: RecentIds::new(MOST_IDS),
            sessions: Sessions::new(options.limits.sessions),
        }
    }

    fn check(&mut self, row: u64, record: &Record, report: &mut LintReport) {
        let mut found = |rule: &str, problem: String| report.add(Some(row), rule, problem);
        let at_ms = record.timestamp_ms;
        if self.ordered && at_ms < self.last_ms {
            let what = if at_ms < 0.0 {
                "is negative".to_string()
            } else {
                format!("comes after {} ms", self.last_ms)
            };
            found("time-order", format!("the time {at_ms} ms {what}"));
        }
        self.last_ms = self.last_ms.max(at_ms);
        if record.input_length == 0 || record.output_length == 0 {
            found(
                "length",
                format!("input_length {}, output_length {}", record.input_length, record.output_length),
            );
        }
        let ids = record.hash_ids.len() as u64;
        let full = record.input_length / self.block_tokens;
        let wanted = if self.tails_dropped { full } else { record.input_length.div_ceil(self.block_tokens) };
        if ids > 0 && ids != wanted {
            found(
                "block-count",
                format!(
                    "{ids} block ids for {} tokens at {} a block; expected {wanted}",
                    record.input_length, self.block_tokens
                ),
            );
        }
        if ids > 0 {
            self.narrow(ids, record.input_length);
        }
        self.check_chain(row, record, report);
        self.check_session(row, record, report);
    }

    /// Keeps the range of block sizes that all rows so far agree on.
    fn narrow(&mut self, ids: u64, tokens: u64) {
        self.rows_with_ids += 1;
        let (counted, dropped) = implied_block(&[(ids, tokens)]);
        let (low, high) = if self.tails_dropped { dropped } else { counted }.unwrap_or((1, 0));
        self.counted = (self.counted.0.max(low), self.counted.1.min(high));
    }

    fn check_chain(&mut self, row: u64, record: &Record, report: &mut LintReport) {
        let mut before = ROOT;
        for (index, &id) in (0u64..).zip(&record.hash_ids) {
            let is_partial = (index + 1) * self.block_tokens > record.input_length;
            match self.blocks.get(id) {
                None => self.blocks.put(id, Block { before, is_partial }),
                Some(known) => {
                    if known.before != before {
                        let name =
                            |id: u64| if id == ROOT { "the start".to_string() } else { id.to_string() };
                        report.add(
                            Some(row),
                            "predecessor",
                            format!(
                                "block {id} follows {} here and {} before",
                                name(before),
                                name(known.before)
                            ),
                        );
                    }
                    if known.is_partial != is_partial {
                        report.add(
                            Some(row),
                            "partial-full",
                            format!(
                                "block {id} is {} here and was not before",
                                if is_partial { "a shorter tail" } else { "a full block" }
                            ),
                        );
                    }
                }
            }
            before = id;
        }
    }

    fn check_session(&mut self, row: u64, record: &Record, report: &mut LintReport) {
        let Some(session) = record.session_id().filter(|_| self.sessions_grow) else {
            return;
        };
        // Beyond the bound on sessions the rule is not checked; the reader refuses such files anyway.
        if let Ok(last) = self.sessions.get(session) {
            if record.input_length < *last {
                report.add(
                    Some(row),
                    "shrink",
                    format!("a turn of session {session} has {} tokens after {last}", record.input_length),
                );
            }
            *last = record.input_length;
        }
    }

    fn check_file(&self, report: &mut LintReport) {
        let (low, high) = self.counted;
        let enough = self.rows_with_ids >= FEWEST_AGREEING_ROWS;
        if !enough || (low..=high).contains(&self.block_tokens) || low > high {
            return;
        }
        let implied = if high == u64::MAX { format!("at least {low}") } else { format!("{low} to {high}") };
        report.add(
            None,
            "block-size",
            format!("read with blocks of {} tokens, but all rows agree on {implied}", self.block_tokens),
        );
    }
}
