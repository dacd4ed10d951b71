//! Tables: runs side by side with the best of each column marked, and bars with their figures.

use crate::metrics::RunResult;

use super::names::key;
use super::text::{count, escape, fixed, percent, share};

/// Which end of a column is the good one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BetterDirection {
    High,
    Low,
    /// Neither: the figure describes the run.
    Neutral,
}

/// One column of figures.
struct Column {
    head: &'static str,
    /// The meaning of the head.
    hint: &'static str,
    better: BetterDirection,
    value: fn(&RunResult) -> Option<f64>,
    show: fn(f64) -> String,
}

const fn column(
    head: &'static str,
    hint: &'static str,
    better: BetterDirection,
    value: fn(&RunResult) -> Option<f64>,
    show: fn(f64) -> String,
) -> Column {
    Column { head, hint, better, value, show }
}

fn whole(value: f64) -> String {
    fixed(value, 0)
}

fn tenths(value: f64) -> String {
    fixed(value, 1)
}

fn hundredths(value: f64) -> String {
    fixed(value, 2)
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
const fn number(n: u64) -> Option<f64> {
    Some(n as f64)
}

const COLUMNS: [Column; 20] = [
    column(
        "in SLO",
        "requests in SLO over requests offered",
        BetterDirection::High,
        |r| Some(r.goodput),
        percent,
    ),
    column("requests", "requests offered", BetterDirection::Neutral, |r| number(r.requests), whole),
    column(
        "completed",
        "requests that got all their tokens",
        BetterDirection::High,
        |r| number(r.completed),
        whole,
    ),
    column("refused", "requests refused for good", BetterDirection::Low, |r| number(r.rejected), whole),
    column(
        "failed",
        "requests admitted that could not be served, or not within the time of a stage",
        BetterDirection::Low,
        |r| number(r.failed),
        whole,
    ),
    column(
        "tokens in SLO",
        "prompt tokens of requests in SLO over those offered",
        BetterDirection::High,
        |r| share(r.input_tokens_in_slo, r.input_tokens),
        percent,
    ),
    column("TTFT p50, s", "median time to first token", BetterDirection::Low, |r| r.ttft_s.p50, hundredths),
    column("TTFT p90, s", "90th percentile", BetterDirection::Low, |r| r.ttft_s.p90, hundredths),
    column("TTFT p99, s", "99th percentile", BetterDirection::Low, |r| r.ttft_s.p99, hundredths),
    column(
        "TBT p50, ms",
        "median of each request's longest tenth of gaps",
        BetterDirection::Low,
        |r| r.tbt_ms.p50,
        tenths,
    ),
    column("TBT p99, ms", "99th percentile", BetterDirection::Low, |r| r.tbt_ms.p99, tenths),
    column("gap mean, ms", "mean of all token gaps", BetterDirection::Low, |r| Some(r.itl_ms_mean), tenths),
    column("hit ratio", "prompt blocks reused", BetterDirection::High, |r| Some(r.block_hit_ratio), percent),
    column(
        "prefill busy, s",
        "engine time spent on prefills",
        BetterDirection::Neutral,
        |r| Some(r.prefill_busy_s),
        whole,
    ),
    column(
        "wasted prefill, tokens",
        "prompt tokens computed for requests refused afterwards",
        BetterDirection::Low,
        |r| number(r.wasted_prefill_tokens),
        whole,
    ),
    column("oscillation", "see Oscillation", BetterDirection::Low, |r| Some(r.oscillation_index), hundredths),
    column(
        "copies made",
        "copies of hot blocks made ahead of demand",
        BetterDirection::Neutral,
        |r| number(r.replications),
        whole,
    ),
    column(
        "roles changed",
        "roles of instances that the conductor changed",
        BetterDirection::Neutral,
        |r| number(r.role_changes),
        whole,
    ),
    column(
        "prediction error",
        "of the conductor's prefill times, mean",
        BetterDirection::Low,
        |r| Some(r.prefill_prediction_error),
        percent,
    ),
    column(
        "CPU, s",
        "processor time of the simulation",
        BetterDirection::Neutral,
        |r| Some(r.cpu_s),
        hundredths,
    ),
];

/// All runs side by side.
#[must_use]
pub(super) fn summary(runs: &[RunResult], labels: &[String]) -> String {
    let mut html = String::from(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Summary\"><table \
         class=\"summary\"><thead><tr><th scope=\"col\">run</th>\
         <th scope=\"col\">admission</th><th scope=\"col\">speed</th>",
    );
    for column in &COLUMNS {
        put!(html, "<th scope=\"col\" class=\"n\" title=\"{}\">{}</th>", column.hint, column.head);
    }
    html += "</tr></thead><tbody>";
    let best: Vec<Option<f64>> = COLUMNS.iter().map(|c| best_of(c, runs)).collect();
    for (at, (run, label)) in runs.iter().zip(labels).enumerate() {
        put!(
            html,
            "<tr class=\"r{at}\"><th scope=\"row\">{}</th><td>{}</td><td>×{}</td>",
            key(at, label),
            escape(&run.admission),
            run.speed
        );
        for (column, best) in COLUMNS.iter().zip(&best) {
            html += &cell(column, run, *best);
        }
        html += "</tr>";
    }
    html + "</tbody></table></div>"
}

fn cell(column: &Column, run: &RunResult, best: Option<f64>) -> String {
    let Some(value) = (column.value)(run).filter(|v| v.is_finite()) else {
        return "<td class=\"n\">–</td>".into();
    };
    let text = (column.show)(value);
    if best.is_some_and(|b| (column.show)(b) == text) {
        return format!("<td class=\"n best\"><abbr title=\"best\">★</abbr> {text}</td>");
    }
    format!("<td class=\"n\">{text}</td>")
}

/// The best figure of a column, if runs differ in it as far as it is shown.
fn best_of(column: &Column, runs: &[RunResult]) -> Option<f64> {
    let values: Vec<f64> = runs.iter().filter_map(column.value).filter(|v| v.is_finite()).collect();
    let differ = values.windows(2).any(|w| (column.show)(w[0]) != (column.show)(w[1]));
    if !differ {
        return None;
    }
    match column.better {
        BetterDirection::High => values.into_iter().max_by(f64::total_cmp),
        BetterDirection::Low => values.into_iter().min_by(f64::total_cmp),
        BetterDirection::Neutral => None,
    }
}

/// A table with a stacked bar per run: each part has its colour in the head and its figure in the row.
#[derive(Clone, Debug)]
pub(super) struct Bars {
    /// The quantity that the bars divide.
    pub(super) title: String,
    /// How to read it.
    pub(super) note: String,
    /// Names of the parts, each with its colour in the style sheet.
    pub(super) parts: Vec<(String, &'static str)>,
    /// Amounts by run and part.
    pub(super) rows: Vec<Vec<u64>>,
    /// Whether each bar fills the width (shares), or the longest does (amounts).
    pub(super) shares: bool,
}

impl Bars {
    /// The table as a figure.
    #[must_use]
    pub(super) fn figure(&self, labels: &[String]) -> String {
        let title = escape(&self.title);
        let mut html = format!(
            "<figure class=\"wide\"><figcaption><h3>{title}</h3>{}</figcaption><div class=\"scroll\" \
             tabindex=\"0\" role=\"region\" \
             aria-label=\"{title}\"><table class=\"bars\"><thead><tr><th scope=\"col\">run</th><td></td>",
            super::lines::paragraph(&self.note)
        );
        for (name, colour) in &self.parts {
            put!(
                html,
                "<th scope=\"col\" class=\"n\"><svg class=\"swatch\" viewBox=\"0 0 10 10\" \
                 aria-hidden=\"true\">\
                 <path class=\"{colour}\" d=\"M0,0H10V10H0Z\"/></svg>{}</th>",
                escape(name)
            );
        }
        html += "</tr></thead><tbody>";
        let longest = self.rows.iter().map(|row| row.iter().sum::<u64>()).max().unwrap_or(0);
        for (at, (row, label)) in self.rows.iter().zip(labels).enumerate() {
            let full = if self.shares { row.iter().sum() } else { longest };
            put!(
                html,
                "<tr class=\"r{at}\"><th scope=\"row\">{}</th><td class=\"bar\">{}</td>",
                key(at, label),
                self.bar(row, full)
            );
            html.extend(row.iter().map(|n| self.figure_of(*n, full)));
            html += "</tr>";
        }
        html + "</tbody></table></div></figure>"
    }

    fn bar(&self, row: &[u64], full: u64) -> String {
        let mut svg =
            String::from("<svg viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" aria-hidden=\"true\">");
        let mut from = 0.0;
        for ((_, colour), amount) in self.parts.iter().zip(row) {
            let width = share(*amount, full).unwrap_or(0.0) * 1000.0;
            if width > 0.0 {
                let (start, end) = (fixed(from, 0).replace(',', ""), fixed(from + width, 0).replace(',', ""));
                put!(svg, "<path class=\"{colour}\" d=\"M{start},0H{end}V10H{start}Z\"/>");
            }
            from += width;
        }
        svg + "</svg>"
    }

    fn figure_of(&self, amount: u64, full: u64) -> String {
        let part = if self.shares { share(amount, full).map(percent) } else { None };
        match part {
            Some(part) if amount > 0 => {
                format!("<td class=\"n\">{} <small>{part}</small></td>", count(amount))
            }
            _ => format!("<td class=\"n\">{}</td>", count(amount)),
        }
    }
}
