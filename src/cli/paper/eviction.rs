//! `baton paper eviction`: hit ratios of the eviction policies beside the optimum.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Error, Result};
use baton_sim::paper::eviction::{Line, OPTIMUM, RUNS, compare};
use baton_traces::ReadOptions;
use indicatif::{ProgressBar, ProgressDrawTarget};

use super::out;

/// Arguments of `baton paper eviction`.
#[derive(clap::Args)]
pub struct EvictionArgs {
    /// Traces to run, each through one cache
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Sizes of the cache, in tokens
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_values_t = [500_000, 1_000_000, 3_000_000, 10_000_000])]
    tokens: Vec<u64>,
    /// Write every line to this file as JSON
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
}

/// Runs `baton paper eviction`.
pub fn run(args: &EvictionArgs) -> Result<ExitCode> {
    let bar = ProgressBar::new((args.traces.len() * args.tokens.len() * RUNS) as u64);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let mut lines = Vec::new();
    for path in &args.traces {
        let trace = baton_traces::load(path, &ReadOptions::default())?;
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
        let ours = compare(&name, &trace, &args.tokens, &|| bar.inc(1)).map_err(Error::msg)?;
        if bar.is_hidden() {
            note!("{name}: {} runs done", args.tokens.len() * RUNS);
        }
        lines.extend(ours);
    }
    bar.finish_and_clear();
    out::print(&table(&lines))?;
    if let Some(path) = &args.json {
        out::save(path, &serde_json::to_string_pretty(&lines)?)?;
        note!("written: {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::cast_precision_loss, reason = "a label")]
fn table(lines: &[Line]) -> String {
    let mut table = crate::cli::table::with_header(
        &["trace", "cache", "policy", "block hit ratio", "of the gap to the optimum", "prefill time saved"],
        3..,
    );
    for line in lines {
        let ends = line.policy == "lru" || line.policy == OPTIMUM;
        table.add_row([
            line.trace.clone(),
            format!("{} M", line.cache_tokens as f64 / 1e6),
            line.policy.clone(),
            format!("{:.4}", line.block_hit_ratio),
            if ends { "–".into() } else { format!("{:.1} %", 100.0 * line.gap_closed) },
            format!("{:.2} %", 100.0 * line.prefill_saved),
        ]);
    }
    format!("{table}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_the_gap_have_no_share_of_it() {
        let line = |policy: &str, gap_closed| Line {
            trace: "t".into(),
            cache_tokens: 500_000,
            policy: policy.into(),
            block_hit_ratio: 0.25,
            gap_closed,
            prefill_saved: 0.125,
        };
        let text = table(&[line("lru", 0.0), line("reuse", 0.5), line(OPTIMUM, 1.0)]);
        assert!(text.contains("0.5 M") && text.contains("50.0 %") && text.contains("12.50 %"), "{text}");
        assert_eq!(text.matches('–').count(), 2, "{text}");
    }
}
