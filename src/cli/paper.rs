//! `baton paper`: the published experiments, repeated, paper beside ours.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Error, Result};
use baton_sim::paper::{self, Section, Traces, number};
use baton_traces::synth::PublishedTrace;
use baton_traces::{ReadOptions, Trace};
use indicatif::{ProgressBar, ProgressDrawTarget};

use super::out;

mod eviction;

/// Arguments of `baton paper`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct PaperArgs {
    #[command(subcommand)]
    experiment: Option<Experiment>,
    /// Write the page that the repository keeps as docs/paper.md
    #[arg(long, value_name = "OUT")]
    write: Option<PathBuf>,
    /// Write every figure to this file as JSON
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Fail unless every claim holds
    #[arg(long)]
    strict: bool,
}

/// Experiments of our own.
#[derive(clap::Subcommand)]
enum Experiment {
    /// Hit ratios of the eviction policies beside the optimum
    Eviction(eviction::EvictionArgs),
}

/// Runs `baton paper`.
pub fn run(args: &PaperArgs) -> Result<ExitCode> {
    if let Some(Experiment::Eviction(args)) = &args.experiment {
        return eviction::run(args);
    }
    let (conversation, real) = trace("conversation_trace.jsonl", PublishedTrace::Conversation)?;
    let (synthetic, also_real) = trace("synthetic_trace.jsonl", PublishedTrace::Synthetic)?;
    let traces = Traces { conversation: Arc::new(conversation), synthetic: Arc::new(synthetic) };
    let bar = ProgressBar::new(paper::experiments() as u64);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let sections = paper::run(&traces, &|| bar.inc(1)).map_err(Error::msg)?;
    bar.finish_and_clear();
    out::print(&terminal(&sections))?;
    let source = if real && also_real {
        "the published conversation and synthetic traces"
    } else {
        "seeded look-alikes of the published traces"
    };
    if let Some(path) = &args.write {
        save(path, &paper::markdown(&sections, source))?;
    }
    if let Some(path) = &args.json {
        save(path, &serde_json::to_string_pretty(&sections)?)?;
    }
    let holds = sections.iter().flat_map(|s| &s.checks).all(|c| c.holds);
    Ok(if args.strict && !holds { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn save(path: &Path, text: &str) -> Result<()> {
    out::save(path, text)?;
    note!("written: {}", path.display());
    Ok(())
}

/// A published trace where it is, else its look-alike; whether it is the real one.
fn trace(name: &str, like: PublishedTrace) -> Result<(Trace, bool)> {
    if let Some(path) = baton_traces::locate(name) {
        note!("trace: {}", path.display());
        return Ok((baton_traces::load(&path, &ReadOptions::default())?, true));
    }
    note!("trace: {name} is not here; a seeded look-alike takes its place (see README)");
    Ok((baton_traces::synth::like(like, 1), false))
}

fn terminal(sections: &[Section]) -> String {
    let mut text = String::new();
    for section in sections {
        let mut table = crate::cli::table::with_header(&["what", "paper", "ours", "ours / paper"], 1..);
        for row in &section.rows {
            let paper = row.paper.map_or_else(|| "–".into(), |p| format!("{} {}", number(p), row.unit));
            let ratio = row.paper.map_or_else(|| "–".into(), |p| format!("{:.2}", row.ours / p));
            table.add_row([row.what.clone(), paper, format!("{} {}", number(row.ours), row.unit), ratio]);
        }
        text.push_str(&format!("\n{}: {}\n{}\n{table}\n", section.figure, section.title, section.setup));
        for check in &section.checks {
            text.push_str(&format!("  {} {}\n", if check.holds { "✓" } else { "✗" }, check.claim));
        }
    }
    text
}
