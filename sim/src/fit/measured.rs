//! Latency measurements, and the table they are read from.

use super::FitError;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::io::Read;

/// One prefill pass of one request, timed.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefillPoint {
    /// Tokens computed in the pass.
    pub new_tokens: u32,
    /// Tokens already cached.
    pub prefix_tokens: u64,
    /// The whole pass, µs.
    pub latency_us: f64,
    /// Its attention alone, µs, where it was taken.
    pub attention_us: Option<f64>,
}

/// One decode step, timed.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodePoint {
    /// Requests in the batch.
    pub batch: u32,
    /// Context of each of them, tokens.
    pub context_tokens: u64,
    /// The step, µs.
    pub latency_us: f64,
}

impl DecodePoint {
    /// Context of the whole batch, tokens.
    #[must_use]
    pub fn context_sum_tokens(&self) -> u64 {
        u64::from(self.batch) * self.context_tokens
    }
}

/// One step that decodes a batch and computes a part of a prompt beside it, timed.
#[derive(Clone, Debug, PartialEq)]
pub struct MixedPoint {
    /// Requests that decode.
    pub batch: u32,
    /// Context of each of them, tokens.
    pub context_tokens: u64,
    /// Prompt tokens computed beside them.
    pub new_tokens: u32,
    /// Tokens of that prompt that were there before.
    pub prefix_tokens: u64,
    /// The step, µs.
    pub latency_us: f64,
}

/// All measurements of one system under one backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurements {
    /// Version of the backend that was measured.
    pub backend_version: String,
    /// Bytes of KV for one token, over all layers.
    pub kv_bytes_per_token: u64,
    /// KV tokens that fit beside the weights.
    pub kv_capacity_tokens: u64,
    /// Prefill passes.
    pub prefill: Vec<PrefillPoint>,
    /// Decode steps.
    pub decode: Vec<DecodePoint>,
    /// Steps of both; may be empty.
    pub mixed: Vec<MixedPoint>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Phase {
    Prefill,
    Decode,
    Mixed,
}

/// A line of the table. Columns not named here are ignored.
#[derive(Deserialize)]
struct Row {
    system: String,
    backend: String,
    backend_version: String,
    phase: Phase,
    batch: u32,
    input_or_context_tokens: u64,
    prefix_tokens: u64,
    new_tokens_per_request: u32,
    latency_ms: f64,
    #[serde(default)]
    attention_ms: Option<f64>,
    kv_bytes_per_token: u64,
    kv_capacity_tokens: u64,
}

/// Reads the rows of one system and backend from a CSV table with a header line.
///
/// # Errors
/// Names the line that cannot be read or does not belong with the others; if no row matches,
/// names the systems and backends that are there.
pub fn read_csv(table: impl Read, system: &str, backend: &str) -> Result<Measurements, FitError> {
    let mut found: Option<Measurements> = None;
    let mut others = BTreeSet::new();
    for (index, row) in csv::Reader::from_reader(table).into_deserialize::<Row>().enumerate() {
        let row = row.map_err(|e| FitError(format!("reading the table: {e}")))?;
        if row.system != system || row.backend != backend {
            others.insert(format!("{} with {}", row.system, row.backend));
            continue;
        }
        let measured = found.get_or_insert_with(|| row.empty());
        // The header is line 1.
        row.add_to(measured).map_err(|what| FitError(format!("line {}: {what}", index + 2)))?;
    }
    found.ok_or_else(|| {
        let others: Vec<String> = others.into_iter().collect();
        FitError(format!("no row is for {system} with {backend}; there are: {}", others.join(", ")))
    })
}

impl Row {
    fn empty(&self) -> Measurements {
        Measurements {
            backend_version: self.backend_version.clone(),
            kv_bytes_per_token: self.kv_bytes_per_token,
            kv_capacity_tokens: self.kv_capacity_tokens,
            prefill: Vec::new(),
            decode: Vec::new(),
            mixed: Vec::new(),
        }
    }

    fn add_to(self, measured: &mut Measurements) -> Result<(), &'static str> {
        if self.backend_version != measured.backend_version
            || self.kv_bytes_per_token != measured.kv_bytes_per_token
            || self.kv_capacity_tokens != measured.kv_capacity_tokens
        {
            return Err("backend version and KV columns must be the same in all rows of a fit");
        }
        let latency_us = self.latency_ms * 1e3;
        match self.phase {
            Phase::Prefill if self.batch != 1 => {
                return Err("a prefill row must have batch 1: the formula is of one request's pass");
            }
            Phase::Prefill => measured.prefill.push(PrefillPoint {
                new_tokens: self.new_tokens_per_request,
                prefix_tokens: self.prefix_tokens,
                latency_us,
                attention_us: self.attention_ms.map(|ms| ms * 1e3),
            }),
            Phase::Decode => measured.decode.push(DecodePoint {
                batch: self.batch,
                context_tokens: self.input_or_context_tokens,
                latency_us,
            }),
            Phase::Mixed => measured.mixed.push(MixedPoint {
                batch: self.batch,
                context_tokens: self.input_or_context_tokens,
                new_tokens: self.new_tokens_per_request,
                prefix_tokens: self.prefix_tokens,
                latency_us,
            }),
        }
        Ok(())
    }
}
