//! The one error of this crate: where, what, and what to do about it.

use std::path::{Path, PathBuf};

/// Which stage refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The file could not be opened or read.
    Open,
    /// The first rows do not reveal the dialect.
    Detect,
    /// A row is not in the dialect's form.
    Parse,
    /// A row is in form but cannot be true.
    Check,
    /// A bound on size was exceeded.
    Bound,
    /// Rows could not be transformed as asked.
    Scale,
    /// Writing failed.
    Write,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Detect => "detect",
            Self::Parse => "parse",
            Self::Check => "check",
            Self::Bound => "bound",
            Self::Scale => "scale",
            Self::Write => "write",
        }
    }
}

/// A trace could not be read, changed or written.
///
/// Displays as one line: `trace STAGE: PATH row N: what is wrong; remedy: what to do`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("trace {}: {}{}: {problem}; remedy: {remedy}", .stage.name(), .path.display(), at_row(*.row))]
pub struct TraceError {
    /// The file.
    pub path: PathBuf,
    /// The line of the file, counted from 1, where one is to blame.
    pub row: Option<u64>,
    /// The stage that refused.
    pub stage: Stage,
    /// The lint rule that the row breaks, for example `time-order`; `parse` where none fits better.
    pub rule: &'static str,
    /// The problem with the row.
    pub problem: String,
    /// The remedy for the user.
    pub remedy: String,
}

fn at_row(row: Option<u64>) -> String {
    row.map_or_else(String::new, |row| format!(" row {row}"))
}

/// The fault of a row, before its file and number are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowFault {
    pub(crate) stage: Stage,
    pub(crate) rule: &'static str,
    pub(crate) problem: String,
    pub(crate) remedy: String,
}

impl RowFault {
    /// The row is not in the dialect's form.
    pub(crate) fn parse(problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Stage::Parse, "parse", problem, remedy)
    }

    /// The row breaks a rule that lint also knows.
    pub(crate) fn check(rule: &'static str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Stage::Check, rule, problem, remedy)
    }

    /// A bound on size was exceeded.
    pub(crate) fn bound(problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Stage::Bound, "bound", problem, remedy)
    }

    pub(crate) fn new(
        stage: Stage,
        rule: &'static str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { stage, rule, problem: problem.into(), remedy: remedy.into() }
    }

    pub(crate) fn at(self, path: &Path, row: Option<u64>) -> TraceError {
        TraceError {
            path: path.to_path_buf(),
            row,
            stage: self.stage,
            rule: self.rule,
            problem: self.problem,
            remedy: self.remedy,
        }
    }
}
