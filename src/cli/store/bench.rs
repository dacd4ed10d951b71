//! `baton store bench`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Error, Result, ensure};
use baton_objects::measure::{self, Bar, Effort, Figure};
use serde_json::json;

use crate::cli::out;

/// Arguments of `baton store bench`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  baton store bench\n  baton store bench socket --seconds 5 --json out.json"
)]
pub(super) struct BenchArgs {
    /// Parts to measure [default: everything]
    #[arg(value_enum)]
    what: Vec<Group>,
    /// Seconds for each figure
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Memory of each store; two are there at a time
    #[arg(long, default_value = "1GiB", value_parser = crate::config::size)]
    memory: u64,
    /// Write the figures to this file
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Fail when a figure misses its bar
    #[arg(long)]
    strict: bool,
    /// Measure running stores instead, named as for the other commands
    #[arg(long, value_name = "URL", conflicts_with = "what")]
    url: Option<String>,
    /// Of several running stores, how many hold each key
    #[arg(long, value_name = "N", default_value_t = 1, requires = "url", value_parser = clap::value_parser!(u16).range(1..=64))]
    replicas: u16,
    /// Size of the values put into running stores
    #[arg(long, default_value = "64KiB", requires = "url", value_parser = crate::config::size)]
    value: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Group {
    /// Large values beside plain copies
    Copies,
    /// Small operations in a full store
    Metadata,
    /// Cost of eviction
    Pressure,
    /// Over a socket
    Socket,
}

impl Group {
    fn run(self, effort: Effort) -> Result<Vec<Figure>> {
        let mut report = |what: &str| note!("measuring: {what}");
        let figures = match self {
            Self::Copies => measure::copies(effort, &mut report),
            Self::Metadata => measure::metadata(effort, &mut report),
            Self::Pressure => measure::pressure(effort, &mut report),
            Self::Socket => measure::socket(effort, &mut report),
        };
        figures.map_err(Error::msg)
    }
}

/// Runs `baton store bench`.
pub(super) fn run(args: &BenchArgs) -> Result<ExitCode> {
    ensure!((256 << 20..=1 << 40).contains(&args.memory), "bench: --memory: give from 256MiB to 1TiB");
    if let Some(url) = &args.url {
        let load = super::load::Load {
            url,
            replicas: usize::from(args.replicas),
            value_bytes: args.value,
            each: Duration::from_secs(args.seconds),
        };
        return report(args, load.run()?);
    }
    let effort = Effort { memory_bytes: args.memory, each: Duration::from_secs(args.seconds) };
    let all = [Group::Copies, Group::Metadata, Group::Pressure, Group::Socket];
    let mut figures = Vec::new();
    for group in all.into_iter().filter(|group| args.what.is_empty() || args.what.contains(group)) {
        figures.extend(group.run(effort)?);
    }
    report(args, figures)
}

fn report(args: &BenchArgs, figures: Vec<Figure>) -> Result<ExitCode> {
    out::print(&format!("{}\n", table(&figures)))?;
    if let Some(path) = &args.json {
        let rows: Vec<_> = figures.iter().map(row).collect();
        let text = serde_json::to_string_pretty(&json!({ "figures": rows }));
        out::save(path, &text.context("bench: report")?)?;
        note!("written: {}", path.display());
    }
    let missed = args.strict && figures.iter().any(|figure| !figure.holds());
    Ok(if missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn row(figure: &Figure) -> serde_json::Value {
    let (least, most) = match figure.bar {
        Some(Bar::Least(bar)) => (Some(bar), None),
        Some(Bar::Most(bar)) => (None, Some(bar)),
        None => (None, None),
    };
    json!({
        "what": figure.what, "unit": figure.unit, "value": figure.value,
        "at_least": least, "at_most": most, "holds": figure.holds(),
    })
}

fn table(figures: &[Figure]) -> String {
    let mut table = crate::cli::table::with_header(&["what", "measured", "unit", "bar", ""], 1..2);
    for figure in figures {
        let bar = match figure.bar {
            Some(Bar::Least(bar)) => format!("≥ {bar}"),
            Some(Bar::Most(bar)) => format!("≤ {bar}"),
            None => String::new(),
        };
        let value = if figure.value < 100.0 { 2 } else { 0 };
        let verdict = if figure.holds() { "" } else { "missed" };
        table.add_row([
            figure.what.clone(),
            format!("{:.value$}", figure.value),
            figure.unit.to_owned(),
            bar,
            verdict.to_owned(),
        ]);
    }
    table.to_string()
}
