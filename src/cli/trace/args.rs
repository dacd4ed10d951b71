//! Arguments of `baton trace`.

use std::path::PathBuf;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use baton_traces::scale::Scale;
use baton_traces::synth::{Kind, PublishedTrace, Workload};
use baton_traces::write::Output;
use baton_traces::{Columns, Context, Dialect, ReadOptions, TimeUnit};

const EXAMPLES: &str = "Examples:
  baton trace lint conversation_trace.jsonl
  baton trace stats conversation_trace.jsonl --capacity 1e6,3e6 --json
  baton trace convert azure.csv -o azure.jsonl
  baton trace scale conversation_trace.jsonl --speed 2 --until-s 600 -o busy.jsonl
  baton trace synth --like conversation --seed 7 -o look_alike.jsonl
  baton trace synth --kind agents --requests 50000 --rate 20 -o agents.jsonl.gz";

/// Arguments of `baton trace`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct TraceArgs {
    #[command(subcommand)]
    pub(super) action: Action,
}

#[derive(clap::Subcommand)]
pub(super) enum Action {
    /// Name every row that breaks a rule; exit with 1 if there is any
    Lint(LintArgs),
    /// Print rows, span, rate, lengths, hit ratios, top prefixes and sessions
    Stats(StatsArgs),
    /// Write a trace of any dialect as Mooncake JSON lines (or as CSV)
    Convert(ConvertArgs),
    /// Speed up, cut, repeat or multiply a trace
    Scale(ScaleArgs),
    /// Make a trace: like a published one, or to given statistics
    Synth(SynthArgs),
}

/// How to read a trace. Options that are not given are detected and reported on standard error.
#[derive(clap::Args)]
pub(super) struct Input {
    /// Trace file: JSON lines or CSV, also gzipped
    pub(super) file: PathBuf,
    /// Dialect: mooncake, mooncake-delta, agentic-mooncake, dynamo, applied-compute-agentic, weka,
    /// otel, bailian, multi-turn, tracelab, sagemaker, azure-csv, burstgpt-csv, splitwise-csv or
    /// vidur-csv [default: detected from the first rows]
    #[arg(long)]
    pub(super) dialect: Option<Dialect>,
    /// Tokens a block id stands for [default: the dialect's, or what ids and lengths imply]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) block_tokens: Option<u32>,
    /// Unit of the times: ns, us, ms or s [default: the dialect's]
    #[arg(long)]
    pub(super) time_unit: Option<TimeUnit>,
    /// Whether later turns of a session are whole prompts (full) or only what is new (delta)
    #[arg(long)]
    pub(super) context: Option<Context>,
    /// The file's own name of a column, for example --column timestamp=arrival; repeatable; columns
    /// are timestamp, input_length, output_length and hash_ids
    #[arg(long, value_name = "COLUMN=NAME", value_parser = column)]
    pub(super) column: Vec<(String, String)>,
    /// Fix or leave out faulty rows, and report how many, instead of rejecting the file
    #[arg(long)]
    pub(super) lenient: bool,
}

#[derive(clap::Args)]
pub(super) struct LintArgs {
    #[command(flatten)]
    pub(super) input: Input,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(clap::Args)]
pub(super) struct StatsArgs {
    #[command(flatten)]
    pub(super) input: Input,
    /// Cache sizes to try, in tokens
    #[arg(long, value_delimiter = ',', value_parser = tokens, default_value = "1e6,3e6,10e6,50e6")]
    pub(super) capacity: Vec<u64>,
    /// Prefixes to name
    #[arg(long, default_value_t = 5)]
    pub(super) top: usize,
    /// Stop after this many rows
    #[arg(long)]
    pub(super) max_rows: Option<u64>,
    /// Print JSON instead of tables
    #[arg(long)]
    pub(super) json: bool,
}

/// Where to write, and what.
#[derive(clap::Args)]
pub(super) struct Target {
    /// File to write (gzipped if it ends in .gz), or - for standard output
    #[arg(short, long)]
    pub(super) output: PathBuf,
    /// Format to write: mooncake, vidur-csv, splitwise-csv or burstgpt-csv
    #[arg(long, default_value = "mooncake")]
    pub(super) to: Output,
    /// Number block ids 0, 1, 2, ... (for readers that hold them in 32 bits)
    #[arg(long)]
    pub(super) renumber: bool,
}

#[derive(clap::Args)]
pub(super) struct ConvertArgs {
    #[command(flatten)]
    pub(super) input: Input,
    #[command(flatten)]
    pub(super) target: Target,
    /// Read the whole file into memory first, to sort it however disordered it is
    #[arg(long)]
    pub(super) whole: bool,
    /// Stop after this many rows
    #[arg(long)]
    pub(super) max_rows: Option<u64>,
}

#[derive(clap::Args)]
pub(super) struct ScaleArgs {
    #[command(flatten)]
    pub(super) input: Input,
    #[command(flatten)]
    pub(super) target: Target,
    /// Divide times and delays by this
    #[arg(long, default_value_t = 1.0)]
    pub(super) speed: f64,
    /// Keep rows from this second on
    #[arg(long, default_value_t = 0.0)]
    pub(super) from_s: f64,
    /// Keep rows before this second [default: to the end]
    #[arg(long)]
    pub(super) until_s: Option<f64>,
    /// Multiply prompt lengths by this; hit ratios stay
    #[arg(long, default_value_t = 1)]
    pub(super) prompt_factor: u32,
    /// Turn every row into this many, each copy with a prefix tree of its own
    #[arg(long, default_value_t = 1)]
    pub(super) copies: u32,
    /// Replace arrivals by a Poisson process of this many requests a second
    #[arg(long, value_name = "PER_S")]
    pub(super) poisson: Option<f64>,
    /// Play the trace this many times in a row
    #[arg(long, default_value_t = 1)]
    pub(super) repeat: u32,
    /// Let later rounds share nothing with earlier ones
    #[arg(long)]
    pub(super) fresh: bool,
    /// Stop after this many rows
    #[arg(long)]
    pub(super) max_rows: Option<u64>,
    /// Seed of the Poisson process
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
}

#[derive(clap::Args)]
pub(super) struct SynthArgs {
    /// Look like a published trace: conversation or synthetic
    #[arg(long, conflicts_with_all = ["kind", "requests", "rate", "input_mean", "output_mean", "turns_mean",
        "shared_tokens", "groups", "think_mean_s", "closed_loop", "block_tokens"])]
    pub(super) like: Option<PublishedTrace>,
    /// Kind of workload: chat, agents or documents
    #[arg(long, required_unless_present = "like")]
    pub(super) kind: Option<Kind>,
    /// Seed: equal seeds give equal traces
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// Rows [default: 10000]
    #[arg(long)]
    pub(super) requests: Option<u64>,
    /// Requests per second, from the first row to the last: sessions are under way as the trace begins [default: 5]
    #[arg(long)]
    pub(super) rate: Option<f64>,
    /// Mean prompt length, in tokens [default: 6000 chat, 24000 agents, 32000 documents]
    #[arg(long)]
    pub(super) input_mean: Option<f64>,
    /// Mean output length, in tokens [default: 300 chat, 180 agents, 150 documents]
    #[arg(long)]
    pub(super) output_mean: Option<f64>,
    /// Mean turns of a session [default: 5 chat, 20 agents, 3 documents]
    #[arg(long)]
    pub(super) turns_mean: Option<f64>,
    /// Tokens that begin every prompt of a group [default: 800 chat, 9000 agents, 0 documents]
    #[arg(long)]
    pub(super) shared_tokens: Option<u64>,
    /// System prompts (agents) or documents [default: 1 chat, 8 agents, 200 documents]
    #[arg(long)]
    pub(super) groups: Option<u64>,
    /// Mean pause before the next turn, in seconds [default: 60 chat, 3 agents, 40 documents]
    #[arg(long)]
    pub(super) think_mean_s: Option<f64>,
    /// Give turns a delay, so that each waits for the one before
    #[arg(long)]
    pub(super) closed_loop: bool,
    /// Tokens a block id stands for [default: 512]
    #[arg(long)]
    pub(super) block_tokens: Option<u32>,
    #[command(flatten)]
    pub(super) target: Target,
}

impl Input {
    /// The options of the library.
    pub(super) fn options(&self, max_rows: Option<u64>) -> ReadOptions {
        let named = |wanted: &str| {
            let found = self.column.iter().rev().find(|(column, _)| column == wanted);
            found.map(|(_, name)| name.clone())
        };
        ReadOptions {
            dialect: self.dialect,
            block_tokens: self.block_tokens,
            time_unit: self.time_unit,
            context: self.context,
            columns: Columns {
                timestamp: named("timestamp"),
                input_length: named("input_length"),
                output_length: named("output_length"),
                hash_ids: named("hash_ids"),
            },
            strict: !self.lenient,
            max_rows,
            ..ReadOptions::default()
        }
    }
}

impl ScaleArgs {
    /// The changes asked for.
    pub(super) fn scale(&self) -> Scale {
        let cuts = self.from_s > 0.0 || self.until_s.is_some();
        let until_ms = self.until_s.map_or(f64::INFINITY, |s| s * 1000.0);
        Scale {
            window_ms: cuts.then_some((self.from_s * 1000.0, until_ms)),
            speed: self.speed,
            prompt_factor: self.prompt_factor,
            copies: self.copies,
            poisson_per_s: self.poisson,
            repeat: self.repeat,
            fresh_rounds: self.fresh,
            max_rows: self.max_rows,
            seed: self.seed,
        }
    }
}

impl SynthArgs {
    /// The usual statistics of a kind, overridden by the given options.
    pub(super) fn workload(&self, kind: Kind) -> Workload {
        let usual = Workload::new(kind, self.seed);
        Workload {
            requests: self.requests.unwrap_or(usual.requests),
            requests_per_s: self.rate.unwrap_or(usual.requests_per_s),
            input_mean: self.input_mean.unwrap_or(usual.input_mean),
            output_mean: self.output_mean.unwrap_or(usual.output_mean),
            turns_mean: self.turns_mean.unwrap_or(usual.turns_mean),
            shared_tokens: self.shared_tokens.unwrap_or(usual.shared_tokens),
            groups: self.groups.unwrap_or(usual.groups),
            think_mean_ms: self.think_mean_s.map_or(usual.think_mean_ms, |s| s * 1000.0),
            closed_loop: self.closed_loop,
            block_tokens: self.block_tokens.unwrap_or(usual.block_tokens),
            ..usual
        }
    }
}

fn column(text: &str) -> Result<(String, String)> {
    let (column, name) = text.split_once('=').context("write COLUMN=NAME")?;
    ensure!(
        ["timestamp", "input_length", "output_length", "hash_ids"].contains(&column),
        "no column is called {column:?}"
    );
    Ok((column.to_string(), name.to_string()))
}

/// A number of tokens, also as 3e6.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "checked to be whole and in range"
)]
pub(super) fn tokens(text: &str) -> Result<u64> {
    let number: f64 = text.parse().map_err(|_| anyhow!("{text:?} is not a number"))?;
    if (1.0..9e15).contains(&number) && number.fract() == 0.0 {
        Ok(number as u64)
    } else {
        bail!("{text} is not a whole number of tokens")
    }
}
