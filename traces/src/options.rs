//! Settings that a caller may give a reader, which else detects them.

use std::fmt;
use std::str::FromStr;

use crate::dialect::Dialect;

/// Unit of the numbers in a timestamp column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeUnit {
    /// Timestamps are in nanoseconds.
    Nanoseconds,
    /// Timestamps are in microseconds.
    Microseconds,
    /// Timestamps are in milliseconds.
    Milliseconds,
    /// Timestamps are in seconds.
    Seconds,
}

impl TimeUnit {
    /// Milliseconds in one of this unit.
    #[must_use]
    pub fn in_ms(self) -> f64 {
        match self {
            Self::Nanoseconds => 1e-6,
            Self::Microseconds => 1e-3,
            Self::Milliseconds => 1.0,
            Self::Seconds => 1e3,
        }
    }

    /// The short name: `ns`, `us`, `ms`, `s`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Microseconds => "us",
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
        }
    }
}

impl fmt::Display for TimeUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TimeUnit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "ns" => Ok(Self::Nanoseconds),
            "us" => Ok(Self::Microseconds),
            "ms" => Ok(Self::Milliseconds),
            "s" => Ok(Self::Seconds),
            _ => Err(format!("no time unit is called {text:?}; choose one of ns, us, ms, s")),
        }
    }
}

/// Whether a later turn of a session repeats the conversation so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// Every row is the whole prompt.
    Full,
    /// Later turns hold only what is new; the reader rebuilds the prompt.
    Delta,
}

impl FromStr for Context {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "full" => Ok(Self::Full),
            "delta" => Ok(Self::Delta),
            _ => Err(format!("no context is called {text:?}; choose full or delta")),
        }
    }
}

/// Names of the four main columns where a file uses its own (as vLLM's and GuideLLM's column
/// options do). `None` keeps the usual names and their aliases.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Columns {
    /// Column of the arrival time.
    pub timestamp: Option<String>,
    /// Column of the prompt length.
    pub input_length: Option<String>,
    /// Column of the output length.
    pub output_length: Option<String>,
    /// Column of the block ids.
    pub hash_ids: Option<String>,
}

/// Sizes beyond which a file is refused rather than allowed to exhaust memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest line.
    pub row_bytes: u64,
    /// Longest prompt or output.
    pub tokens: u64,
    /// Most block ids in one prompt.
    pub ids: u64,
    /// Most sessions (or chats) whose state is kept at a time.
    pub sessions: usize,
    /// Most rows held back to put a dialect's rows into time order while streaming.
    pub reorder_rows: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            row_bytes: 64 << 20,
            tokens: 100_000_000,
            ids: 4_000_000,
            sessions: 1_000_000,
            reorder_rows: 262_144,
        }
    }
}

/// How to read a file. The default finds everything out, and refuses what it cannot be sure of.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadOptions {
    /// The dialect; found out from the first rows where `None`.
    pub dialect: Option<Dialect>,
    /// Tokens a block id stands for; the dialect's own (Mooncake 512) where `None`.
    pub block_tokens: Option<u32>,
    /// The same for files that have no ids to tell it by.
    pub block_tokens_without_ids: Option<u32>,
    /// Unit of the timestamps; the dialect's own where `None`.
    pub time_unit: Option<TimeUnit>,
    /// Whether session rows are whole prompts; the dialect's own where `None`.
    pub context: Option<Context>,
    /// Own names for the main columns.
    pub columns: Columns,
    /// Refuse rows that break a rule. When false they are corrected, and the corrections are counted in
    /// the assumptions.
    pub strict: bool,
    /// Stop after this many rows.
    pub max_rows: Option<u64>,
    /// Bounds on size.
    pub limits: Limits,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            dialect: None,
            block_tokens: None,
            block_tokens_without_ids: None,
            time_unit: None,
            context: None,
            columns: Columns::default(),
            strict: true,
            max_rows: None,
            limits: Limits::default(),
        }
    }
}
