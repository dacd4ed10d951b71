//! The table of service classes.

use crate::metrics::{ClassResult, RunResult};

use super::rows::{row, table};
use super::text::{count, fixed, percent};

const NOTE: &str = "Each request counts once, in its class, a late one by the first objective that it missed. In SLO: \
                    the share of all but the cancelled requests. The target is the share of admitted requests that \
                    should have their first token in time.";

/// A row for each class of each run; nothing where no run has more than one class.
#[must_use]
pub(super) fn figure(runs: &[RunResult], labels: &[String]) -> String {
    if runs.iter().all(|run| run.classes.len() < 2) {
        return String::new();
    }
    let heads = [
        "requests",
        "in SLO",
        "TTFT in time",
        "target",
        "late TTFT",
        "late TBT",
        "late E2E",
        "refused",
        "failed",
        "cancelled",
        "TTFT p50, s",
        "TTFT p90, s",
    ];
    let rows = runs.iter().zip(labels).enumerate().flat_map(|(at, (run, label))| {
        run.classes.iter().map(move |class| row((at, label), &[&class.name], &cells(class)))
    });
    table("Service classes", NOTE, (&["class"], &heads), &rows.collect::<String>())
}

fn cells(class: &ClassResult) -> [String; 12] {
    let seconds = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| fixed(v, 2));
    [
        count(class.requests),
        class.attained.map_or_else(|| "–".into(), percent),
        class.ttft_attained.map_or_else(|| "–".into(), percent),
        percent(class.target),
        count(class.late_ttft),
        count(class.late_tbt),
        count(class.late_e2e),
        count(class.rejected),
        count(class.failed),
        count(class.cancelled),
        seconds(class.ttft_s.p50),
        seconds(class.ttft_s.p90),
    ]
}
