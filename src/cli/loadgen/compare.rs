//! Compares the simulator's prediction with the measurements of a live cluster.

use baton_sim::RunResult;
use baton_sim::metrics::LatencySummary;
use serde::Serialize;

/// One figure, predicted and measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedFigure {
    /// Its name, with the unit last.
    pub figure: String,
    /// By the simulator.
    pub predicted: Option<f64>,
    /// By the live run.
    pub measured: Option<f64>,
    /// (predicted − measured) / measured; none without both or of a measured zero.
    pub relative_error: Option<f64>,
}

/// TTFT and TBT side by side: mean, median, 90th and 99th percentile; then what was served.
pub fn compare(predicted: &RunResult, measured: &RunResult) -> Vec<ComparedFigure> {
    let mut rows = latency("ttft", "s", &predicted.ttft_s, &measured.ttft_s);
    rows.extend(latency("tbt", "ms", &predicted.tbt_ms, &measured.tbt_ms));
    let both =
        |name: &str, of: fn(&RunResult) -> f64| row(name.into(), Some(of(predicted)), Some(of(measured)));
    #[expect(clippy::cast_precision_loss, reason = "counts for a table")]
    rows.extend([
        both("completed", |r| r.completed as f64),
        both("rejected", |r| r.rejected as f64),
        both("goodput", |r| r.goodput),
        both("token_hit_ratio", |r| r.token_hit_ratio),
    ]);
    rows
}

fn latency(
    name: &str,
    unit: &str,
    predicted: &LatencySummary,
    measured: &LatencySummary,
) -> Vec<ComparedFigure> {
    let row_of = |which: &str, get: fn(&LatencySummary) -> Option<f64>| {
        row(format!("{name}_{which}_{unit}"), get(predicted), get(measured))
    };
    vec![
        row_of("mean", |l| l.mean),
        row_of("p50", |l| l.p50),
        row_of("p90", |l| l.p90),
        row_of("p99", |l| l.p99),
    ]
}

fn row(figure: String, predicted: Option<f64>, measured: Option<f64>) -> ComparedFigure {
    let relative_error = match (predicted, measured) {
        (Some(p), Some(m)) if m != 0.0 => Some((p - m) / m),
        _ => None,
    };
    ComparedFigure { figure, predicted, measured, relative_error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_relative_to_what_was_measured() {
        let low = LatencySummary { mean: Some(1.5), p50: Some(1.0), ..LatencySummary::default() };
        let high = LatencySummary { mean: Some(2.0), p50: Some(0.0), ..LatencySummary::default() };
        let rows = latency("ttft", "s", &low, &high);
        assert_eq!((rows[0].figure.as_str(), rows[0].relative_error), ("ttft_mean_s", Some(-0.25)));
        assert_eq!(rows[1].relative_error, None, "nothing is relative to zero");
        assert_eq!((rows[3].predicted, rows[3].relative_error), (None, None));
    }
}
