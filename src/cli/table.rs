//! Tables of runs for the terminal.

use baton_sim::RunResult;
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};

/// An empty table; the columns of `figures` are aligned to the right.
pub fn with_header(header: &[&str], figures: impl std::ops::RangeBounds<usize>) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_BORDERS_ONLY).set_header(header.to_vec());
    for (_, column) in table.column_iter_mut().enumerate().filter(|(at, _)| figures.contains(at)) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Runs side by side.
pub fn runs(runs: &[RunResult]) -> String {
    let mut table = with_header(
        &[
            "policy",
            "admission",
            "speed",
            "done",
            "refused",
            "failed",
            "in SLO",
            "tokens in SLO",
            "TTFT mean",
            "p50",
            "p90",
            "p99",
            "TBT mean",
            "p99",
            "hit",
            "CPU",
        ],
        2..,
    );
    for run in runs {
        table.add_row(row(run));
    }
    table.to_string()
}

#[expect(clippy::cast_precision_loss, reason = "shares for a table")]
fn row(run: &RunResult) -> Vec<String> {
    let seconds = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{v:.2} s"));
    let millis = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{v:.1} ms"));
    let share = |a: u64, b: u64| format!("{:.1} %", 100.0 * a as f64 / b.max(1) as f64);
    vec![
        run.policy.clone(),
        run.admission.clone(),
        format!("×{}", run.speed),
        run.completed.to_string(),
        run.rejected.to_string(),
        run.failed.to_string(),
        format!("{} ({})", run.in_slo, share(run.in_slo, run.requests)),
        share(run.input_tokens_in_slo, run.input_tokens),
        seconds(run.ttft_s.mean),
        seconds(run.ttft_s.p50),
        seconds(run.ttft_s.p90),
        seconds(run.ttft_s.p99),
        millis(run.tbt_ms.mean),
        millis(run.tbt_ms.p99),
        format!("{:.1} %", 100.0 * run.block_hit_ratio),
        format!("{:.2} s", run.cpu_s),
    ]
}
