//! The canonical row that every dialect is turned into, and the trace that holds rows.

use serde_json::{Map, Value};

use crate::dialect::Dialect;

/// First id of the range from which ids are drawn for blocks that the source gave no id.
/// Kept under 2^53 so that every JSON reader can hold such an id exactly.
pub const SYNTHETIC_ID_BASE: u64 = 1 << 52;

/// One request as it arrives: when, how long, and which prefix it shares.
///
/// Every reader of this crate guarantees (unless it was opened with `strict: false`) that
/// `hash_ids.len() == input_length.div_ceil(block_tokens)` and that `hash_ids` describes the whole
/// prompt: delta rows have been rebuilt and tails without an id were given one of their own.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Record {
    /// Arrival after the start of the trace. For a closed-loop turn it is the earliest moment the
    /// turn could start (the session's start plus the delays so far); see [`Extra::delay_ms`].
    pub timestamp_ms: f64,
    /// Tokens of the whole prompt, shared prefix included.
    pub input_length: u64,
    /// Tokens generated.
    pub output_length: u64,
    /// One id per block of the prompt; equal leading ids mean an equal prefix.
    pub hash_ids: Vec<u64>,
    /// The row's further fields; boxed because most traces have none.
    pub extra: Option<Box<Extra>>,
}

/// Everything a row may say beyond arrival, lengths and ids. A field is `None` or empty when the
/// source was silent.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Extra {
    /// The source's name for the request.
    pub request_id: Option<String>,
    /// Rows that share it are turns of one conversation, in row order.
    pub session_id: Option<String>,
    /// Closed loop: wait this long after the previous turn (or every `wait_for`) has finished.
    /// With `session_id` present and no delay, the timestamp is the arrival.
    pub delay_ms: Option<f64>,
    /// Scheduling priority; larger is more urgent.
    pub priority: Option<i64>,
    /// Strict band above `priority`.
    pub strict_priority: Option<u64>,
    /// Service class, for example `interactive` or `batch`.
    pub class: Option<String>,
    /// Tenant that sent the request.
    pub tenant: Option<String>,
    /// LoRA adapter asked for.
    pub lora: Option<String>,
    /// Cache salt: blocks of different salts are never shared.
    pub salt: Option<String>,
    /// Time-to-first-token objective.
    pub slo_ttft_ms: Option<f64>,
    /// Time-between-tokens objective.
    pub slo_tbt_ms: Option<f64>,
    /// The client goes away this long after it sent the request.
    pub cancel_after_ms: Option<f64>,
    /// Name of the request or turn this one continues.
    pub parent: Option<String>,
    /// Names of requests that must have finished before this one starts.
    pub wait_for: Vec<String>,
    /// Every other field of the row, passed on untouched.
    pub unknown: Map<String, Value>,
}

impl Record {
    /// The session this row belongs to, if it says so.
    #[must_use]
    pub fn session_id(&self) -> Option<&str> {
        self.extra.as_ref()?.session_id.as_deref()
    }

    /// The closed-loop delay, if the row waits for an earlier one.
    #[must_use]
    pub fn delay_ms(&self) -> Option<f64> {
        self.extra.as_ref()?.delay_ms
    }
}

/// A whole trace in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Tokens that one id of `hash_ids` stands for.
    pub block_tokens: u32,
    /// The rows, by arrival.
    pub records: Vec<Record>,
    /// The reader's assumptions, one sentence each; print them.
    pub assumptions: Vec<String>,
    /// The dialect the rows were read from.
    pub dialect: Dialect,
}

impl Trace {
    /// Time from the first arrival to the last.
    #[must_use]
    pub fn span_ms(&self) -> f64 {
        match (self.records.first(), self.records.last()) {
            (Some(first), Some(last)) => last.timestamp_ms - first.timestamp_ms,
            _ => 0.0,
        }
    }
}
