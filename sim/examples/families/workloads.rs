//! Workloads that the scheduler was not built on: the published traces shuffled, bursting and with other lengths, and
//! synthetic ones. Each is the same on every run.

use std::path::Path;

use baton_traces::{Dialect, Extra, ReadOptions, Record, Trace, TraceError, load, locate};
use baton_types::Rng;

/// Tokens in a block of the published traces.
const BLOCK: u64 = 512;

/// The trace of such rows.
pub(crate) fn trace(records: Vec<Record>) -> Trace {
    let block_tokens = u32::try_from(BLOCK).expect("small");
    Trace { block_tokens, records, assumptions: Vec::new(), dialect: Dialect::Mooncake }
}

/// A generator of rows.
pub(crate) struct Source {
    pub rng: Rng,
    pub now_ms: f64,
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "lengths and times of a workload"
)]
impl Source {
    /// Moves on by an exponential gap.
    pub(crate) fn after(&mut self, mean_ms: f64) -> f64 {
        self.now_ms -= mean_ms * (1.0 - self.rng.unit()).ln();
        self.now_ms
    }

    /// A log-normal length within bounds.
    pub(crate) fn length(&mut self, median: f64, sigma: f64, (least, most): (u64, u64)) -> u64 {
        let (radius, angle) = (1.0 - self.rng.unit(), self.rng.unit());
        let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
        ((median * (sigma * normal).exp()) as u64).clamp(least, most)
    }

    /// Ids that no other prompt has.
    pub(crate) fn own(&mut self, blocks: u64) -> Vec<u64> {
        let base = self.rng.below(1 << 40) << 12;
        (0..blocks).map(|at| base + at).collect()
    }

    /// A prompt of shared blocks and a tail of its own.
    pub(crate) fn prompt(&mut self, shared: &[u64], own_tokens: u64) -> (u64, Vec<u64>) {
        let tokens = shared.len() as u64 * BLOCK + own_tokens;
        let mut ids = shared.to_vec();
        ids.extend(self.own(own_tokens.div_ceil(BLOCK)));
        (tokens, ids)
    }

    pub(crate) fn row(&self, (input_length, hash_ids): (u64, Vec<u64>), output_length: u64) -> Record {
        Record { timestamp_ms: self.now_ms, input_length, output_length, hash_ids, extra: None }
    }
}

/// The names, in the order of reports.
pub(crate) const NAMES: [&str; 18] = [
    "conversation",
    "toolagent",
    "code",
    "unique",
    "shuffled",
    "burst10",
    "heavyout",
    "long1pct",
    "chat",
    "reasoning",
    "bimodal",
    "doctree",
    "flash",
    "agents",
    "classes2",
    "classes2few",
    "classes3",
    "flood",
];

/// The rows of a workload, by arrival.
///
/// # Errors
/// Where a published trace is missing or cannot be read.
pub(crate) fn rows(name: &str) -> Result<Vec<Record>, TraceError> {
    let mut source = Source { rng: Rng::fork(7, 11), now_ms: 0.0 };
    let mut rows = match name {
        "toolagent" => published("synthetic_trace.jsonl")?,
        "code" => published("azure_llm_inference_code.csv")?,
        "chat" => short_chats(&mut source),
        "reasoning" => long_answers(&mut source),
        "bimodal" => two_lengths(&mut source),
        "doctree" => document_tree(&mut source),
        "agents" => agent_sessions(&mut source),
        _ => published("conversation_trace.jsonl")?,
    };
    change(name, &mut rows, &mut source);
    rows.sort_by(|a, b| a.timestamp_ms.total_cmp(&b.timestamp_ms));
    Ok(rows)
}

fn published(name: &str) -> Result<Vec<Record>, TraceError> {
    let path = locate(name).unwrap_or_else(|| Path::new(name).to_path_buf());
    Ok(load(&path, &ReadOptions::default())?.records)
}

/// What some families make of the conversation trace.
fn change(name: &str, rows: &mut Vec<Record>, source: &mut Source) {
    match name {
        "unique" => {
            rows.iter_mut().for_each(|row| row.hash_ids = source.own(row.input_length.div_ceil(BLOCK)))
        }
        "shuffled" => {
            for at in (1..rows.len()).rev() {
                let other = usize::try_from(source.rng.below(at as u64 + 1)).expect("an index");
                let (one, two) = (rows[at].timestamp_ms, rows[other].timestamp_ms);
                (rows[at].timestamp_ms, rows[other].timestamp_ms) = (two, one);
            }
        }
        // Of each ten minutes the first half has a tenth of the requests.
        "burst10" => rows.iter_mut().for_each(|row| {
            let (start_ms, part) =
                (row.timestamp_ms.div_euclid(6e5) * 6e5, row.timestamp_ms.rem_euclid(6e5) / 6e5);
            let part = if part < 0.5 { part / 5.0 } else { 0.1 + (part - 0.5) * 1.8 };
            row.timestamp_ms = start_ms + part * 6e5;
        }),
        "heavyout" => {
            rows.iter_mut().for_each(|row| row.output_length = source.length(200.0, 1.3, (1, 8_000)))
        }
        "long1pct" => rows.iter_mut().filter(|_| source.rng.chance_permille(10)).for_each(|row| {
            row.input_length = 110_000;
            row.hash_ids =
                (0..110_000u64.div_ceil(BLOCK)).map(|at| (row.timestamp_ms.to_bits() << 12) + at).collect();
        }),
        // 1,500 requests about one document of 100,000 tokens within five minutes.
        "flash" => {
            let document = source.own(195);
            for _ in 0..1_500 {
                source.now_ms = 1.5e6 + source.rng.unit() * 3e5;
                let prompt = source.prompt(&document, 300);
                rows.push(source.row(prompt, 200));
            }
        }
        "classes2" => classed(rows, source, &["interactive", "batch"]),
        // One of five is of the higher class.
        "classes2few" => classed(rows, source, &["interactive", "batch", "batch", "batch", "batch"]),
        "classes3" => classed(rows, source, &["standard", "interactive", "batch"]),
        // Twenty tenants; for a third of the time one sends ten times its share.
        "flood" => flood(rows, source),
        _ => {}
    }
}

/// Each row of one of these classes, by lot.
fn classed(rows: &mut [Record], source: &mut Source, classes: &[&str]) {
    for row in rows {
        let class =
            classes[usize::try_from(source.rng.below(classes.len() as u64)).expect("below their number")];
        row.extra = Some(Box::new(Extra { class: Some(class.to_owned()), ..Extra::default() }));
    }
}

/// The first bit in which blocks of a flood differ from those of the trace.
pub const FLOOD_BIT: u32 = 45;

fn flood(rows: &mut Vec<Record>, source: &mut Source) {
    let end_ms = rows.last().map_or(0.0, |row| row.timestamp_ms);
    let mut more = Vec::new();
    for row in rows.iter_mut() {
        let tenant = source.rng.below(20);
        row.extra = Some(Box::new(Extra { tenant: Some(format!("tenant-{tenant}")), ..Extra::default() }));
        if tenant == 0 && (end_ms / 3.0..end_ms * 2.0 / 3.0).contains(&row.timestamp_ms) {
            for copy in 1..10u64 {
                let mut again = row.clone();
                again.hash_ids.iter_mut().for_each(|id| *id ^= copy << FLOOD_BIT);
                more.push(again);
            }
        }
    }
    rows.append(&mut more);
}

/// Short prompts and answers, arriving independently: the lengths of Azure's conversations.
fn short_chats(source: &mut Source) -> Vec<Record> {
    let row = |source: &mut Source| {
        source.after(186.0);
        let tokens = source.length(900.0, 0.9, (10, 14_000));
        let prompt = source.prompt(&[], tokens);
        let output = source.length(150.0, 0.9, (1, 1_500));
        source.row(prompt, output)
    };
    (0..19_000).map(|_| row(source)).collect()
}

/// Short prompts, answers with a heavy tail.
fn long_answers(source: &mut Source) -> Vec<Record> {
    let row = |source: &mut Source| {
        source.after(400.0);
        let tokens = source.length(800.0, 0.8, (20, 8_000));
        let prompt = source.prompt(&[], tokens);
        let output = source.length(1_500.0, 1.1, (16, 30_000));
        source.row(prompt, output)
    };
    (0..9_000).map(|_| row(source)).collect()
}

fn two_lengths(source: &mut Source) -> Vec<Record> {
    let row = |source: &mut Source| {
        source.after(300.0);
        let long = source.rng.chance_permille(200);
        let tokens = if long { 30_000 + source.rng.below(30_000) } else { 1_000 + source.rng.below(2_000) };
        let prompt = source.prompt(&[], tokens);
        let output = 50 + source.rng.below(400);
        source.row(prompt, output)
    };
    (0..12_000).map(|_| row(source)).collect()
}

/// Twelve system prompts with forty documents each, the first asked for most.
fn document_tree(source: &mut Source) -> Vec<Record> {
    let systems: Vec<Vec<u64>> = (0..12).map(|_| source.own(8)).collect();
    let sizes: Vec<u64> = (0..480).map(|_| 10 + source.rng.below(90)).collect();
    let documents: Vec<Vec<u64>> = sizes.into_iter().map(|blocks| source.own(blocks)).collect();
    let row = |source: &mut Source| {
        source.after(300.0);
        let system = usize::try_from(source.rng.below(12)).expect("below 12");
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 40")]
        let document = (source.rng.unit().powi(2) * 40.0) as usize;
        let shared = [systems[system].clone(), documents[system * 40 + document].clone()].concat();
        let tokens = 200 + source.rng.below(1_500);
        let prompt = source.prompt(&shared, tokens);
        let output = 50 + source.rng.below(500);
        source.row(prompt, output)
    };
    (0..12_000).map(|_| row(source)).collect()
}

/// Sessions whose prompts grow turn by turn, with pauses between.
fn agent_sessions(source: &mut Source) -> Vec<Record> {
    let system = source.own(12);
    let mut rows = Vec::new();
    for _ in 0..700 {
        source.now_ms = source.rng.unit() * 3e6;
        let mut ids = system.clone();
        for _ in 0..5 + source.rng.below(30) {
            let tokens = source.length(700.0, 1.0, (60, 9_000));
            let prompt = source.prompt(&ids, tokens);
            if prompt.0 > 110_000 {
                break;
            }
            ids.clone_from(&prompt.1);
            let output = source.length(120.0, 0.8, (5, 2_000));
            rows.push(source.row(prompt, output));
            source.now_ms += 4_000.0;
            source.after(9_000.0);
        }
    }
    rows
}
