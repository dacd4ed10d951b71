//! Tables of `baton trace`.

use baton_traces::Spread;
use baton_traces::lint::{LintReport, RULES};
use baton_traces::summary::Summary;

use crate::cli::table::with_header;

/// The findings of lint, as tables.
pub(super) fn lint_text(report: &LintReport) -> String {
    if report.is_clean() {
        return format!("{}, no rule broken", rows(report.records));
    }
    let mut findings = with_header(&["row", "rule", "what is wrong"], 0..0);
    for finding in &report.findings {
        let row = finding.row.map_or("file".to_string(), |row| row.to_string());
        findings.add_row([row.as_str(), &finding.rule, &finding.problem]);
    }
    let mut counts = with_header(&["rule", "findings", "meaning"], 0..0);
    for (rule, count) in &report.counts {
        let meaning = RULES.iter().find(|(name, _)| name == rule).map_or("", |(_, meaning)| meaning);
        counts.add_row([rule.as_str(), &count.to_string(), meaning]);
    }
    format!("{findings}\n\n{counts}\n\n{}", rows(report.records))
}

/// So many rows, in words.
pub(super) fn rows(count: u64) -> String {
    if count == 1 { "1 row".to_owned() } else { format!("{count} rows") }
}

/// The summary of a trace, as tables.
pub(super) fn summary_text(summary: &Summary) -> String {
    let mut about = with_header(&["", "mean", "min", "p10", "p50", "p90", "p95", "p99", "max"], 1..);
    for (name, spread) in [
        ("input tokens", &summary.input_length),
        ("output tokens", &summary.output_length),
        ("arrivals in 10 s", &summary.arrivals_per_window),
        ("turns a session", &summary.sessions.turns),
    ] {
        if spread.max > 0 {
            about.add_row(spread_row(name, spread));
        }
    }
    let mut cache = with_header(&["one LRU cache of", "block hit ratio", "token hit ratio"], 1..);
    let swept = summary.capacity.iter().map(|c| (format!("{} tokens", c.capacity_tokens), c.hit));
    for (size, hit) in swept.chain([("unbounded".to_string(), summary.unbounded)]) {
        cache.add_row([size, format!("{:.4}", hit.block_hit_ratio), format!("{:.4}", hit.token_hit_ratio)]);
    }
    let mut top = with_header(&["top prefix (tokens)", "hits", "tokens saved", "last block id"], 1..);
    for prefix in &summary.top_prefixes {
        top.add_row(
            [prefix.tokens, prefix.hits, prefix.saved_tokens, prefix.last_block_id].map(|n| n.to_string()),
        );
    }
    let sessions = &summary.sessions;
    format!(
        "{} requests in {:.1} s ({:.3} a second); {} input and {} output tokens\n\
         {} blocks of {} tokens, {} distinct (remembered in {} KiB)\n\
         {} sessions named, {} closed-loop turns, {} requests continue an earlier prompt\n\n{about}\n\n{cache}\n\n{top}",
        summary.requests,
        summary.span_ms / 1000.0,
        summary.requests_per_s,
        summary.input_tokens,
        summary.output_tokens,
        summary.blocks,
        summary.block_tokens,
        summary.distinct_blocks,
        summary.state_bytes / 1024,
        sessions.sessions,
        sessions.closed_loop_requests,
        sessions.continuing_requests,
    )
}

fn spread_row(name: &str, spread: &Spread) -> Vec<String> {
    let mut row = vec![name.to_string(), format!("{:.1}", spread.mean)];
    let ranks = [spread.min, spread.p10, spread.p50, spread.p90, spread.p95, spread.p99, spread.max];
    row.extend(ranks.map(|value| value.to_string()));
    row
}
