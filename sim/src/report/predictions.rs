//! The table of how well predictions held.

use baton_scheduler::{PathFigures, PredictionFigures, PredictionTarget};

use crate::metrics::RunResult;

use super::rows::{row, table};
use super::text::{count, percent};

const NOTE: &str = "Of completed requests that were served where they were first placed, by their class and the way to \
                    their first token. An error is measured less predicted, over predicted: below 0, less than predicted \
                    was measured. Within: requests that did not exceed the most that was predicted, beside the share that should not.";

/// A row for each class, path and prediction of each run; nothing where nothing was predicted.
#[must_use]
pub(super) fn figure(runs: &[RunResult], labels: &[String]) -> String {
    let mut rows = String::new();
    for (at, (run, label)) in runs.iter().zip(labels).enumerate() {
        for class in &run.classes {
            for path in &class.predictions {
                rows += &path_rows(path, (at, label), &class.name);
            }
        }
    }
    if rows.is_empty() {
        return rows;
    }
    let heads = ["requests", "median error", "bias", "nine of ten at most", "within", "target"];
    table("Predictions", NOTE, (&["class", "path", "prediction"], &heads), &rows)
}

fn path_rows(path: &PathFigures, run: (usize, &str), class: &str) -> String {
    let of = |(target, figures): (PredictionTarget, &PredictionFigures)| {
        row(run, &[class, path.path.name(), target.words()], &cells(figures))
    };
    path.all().into_iter().map(of).collect()
}

fn cells(figures: &PredictionFigures) -> [String; 6] {
    let share = |value: Option<f64>| value.map_or_else(|| "–".into(), percent);
    [
        count(figures.requests),
        share(figures.median_error),
        share(figures.bias),
        share(figures.p90),
        share(figures.covered),
        percent(figures.target),
    ]
}
