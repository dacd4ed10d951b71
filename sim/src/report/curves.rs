//! Charts without time: latency distributions, and replicas by popularity.

use crate::metrics::{Objective, RunResult};

use super::axis::Axis;
use super::lines::{Chart, Line};
use super::text::{share, short};

/// One of a run's two latencies.
struct Latency {
    title: &'static str,
    note: &'static str,
    x_name: &'static str,
    unit: &'static str,
    quantiles: fn(&RunResult) -> &[(f32, f32)],
    bound: fn(&Objective) -> f64,
}

const LATENCIES: [Latency; 2] = [
    Latency {
        title: "TTFT: share of offered requests with a first token within …",
        note: "A curve ends below 100 % where requests were refused or failed; its height at the objective is \
            the share that met it.",
        x_name: "time to first token, seconds (logarithmic)",
        unit: "s",
        quantiles: |r| &r.ttft_quantiles_s,
        bound: |o| o.ttft_s,
    },
    Latency {
        title: "TBT: share of offered requests with gaps within …",
        note: "The mean of the longest tenth of a request's token gaps, as the objective bounds it.",
        x_name: "time between tokens, ms (logarithmic)",
        unit: "ms",
        quantiles: |r| &r.tbt_quantiles_ms,
        bound: |o| o.tbt_ms,
    },
];

/// The distributions of TTFT and TBT over all requests offered.
#[must_use]
pub(super) fn latencies(runs: &[RunResult], labels: &[String]) -> String {
    LATENCIES.iter().map(|latency| distribution(latency, runs, labels).figure()).collect()
}

fn distribution(latency: &Latency, runs: &[RunResult], labels: &[String]) -> Chart {
    let line = |(run, result): (usize, &RunResult)| {
        let reached = share(result.completed, result.requests).unwrap_or(0.0);
        let point = |(q, value): &(f32, f32)| Some((f64::from(*value), 100.0 * f64::from(*q) * reached));
        Line {
            run,
            label: labels[run].clone(),
            points: (latency.quantiles)(result).iter().map(point).collect(),
        }
    };
    let lines: Vec<Line> = runs.iter().enumerate().map(line).collect();
    let bounds = bounds(latency, runs);
    // The quickest hundredth would stretch the axis by decades and show nothing.
    let shown = lines.iter().flat_map(|l| l.points.iter().skip(1)).flatten().map(|p| p.0);
    let x = Axis::logarithmic(shown.chain(bounds.iter().map(|b| b.0)));
    Chart {
        title: latency.title.into(),
        note: latency.note.into(),
        x_name: latency.x_name.into(),
        y_unit: " %",
        x,
        y: Axis::up_to(100.0),
        ground: Vec::new(),
        bounds,
        lines,
    }
}

/// Each objective once, in order.
fn bounds(latency: &Latency, runs: &[RunResult]) -> Vec<(f64, String)> {
    let mut values: Vec<f64> = runs.iter().flat_map(|r| &r.objectives).map(latency.bound).collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    let positive = values.into_iter().filter(|v| v.is_finite() && *v > 0.0);
    positive.map(|v| (v, format!("SLO {} {}", short(v), latency.unit))).collect()
}

/// How many instances hold the popular blocks; nothing if no run counted them.
#[must_use]
pub(super) fn replicas(runs: &[RunResult], labels: &[String]) -> String {
    if runs.iter().all(|r| r.hot_blocks.is_empty()) {
        return String::new();
    }
    let line = |(run, result): (usize, &RunResult)| {
        let point = |h: &crate::metrics::HotBlocks| {
            Some(((f64::from(h.first_rank) * f64::from(h.last_rank)).sqrt(), h.replicas))
        };
        Line { run, label: labels[run].clone(), points: result.hot_blocks.iter().map(point).collect() }
    };
    let lines: Vec<Line> = runs.iter().enumerate().map(line).collect();
    let points: Vec<(f64, f64)> = lines.iter().flat_map(|l| &l.points).flatten().copied().collect();
    let chart = Chart {
        title: "Replicas of popular blocks".into(),
        note: "Instances that held a block while it was asked for, over its rank by how many requests asked \
            for it; \
               means of neighbouring ranks."
            .into(),
        x_name: "rank of the block (logarithmic)".into(),
        y_unit: " instances",
        x: Axis::logarithmic(points.iter().map(|p| p.0)),
        y: Axis::linear(points.iter().map(|p| p.1).fold(0.0, f64::max)),
        ground: Vec::new(),
        bounds: Vec::new(),
        lines,
    };
    chart.figure()
}
