//! The table of how well predictions held.

use baton_scheduler::{PathFigures, PredictionFigures};

use crate::metrics::RunResult;

use super::lines::paragraph;
use super::names::key;
use super::text::{count, escape, percent};

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
    let mut html = format!(
        "<figure class=\"wide\"><figcaption><h3>Predictions</h3>{}</figcaption><div class=\"scroll\" tabindex=\"0\" \
         role=\"region\" aria-label=\"Predictions\"><table><thead><tr>",
        paragraph(NOTE)
    );
    html.extend(["run", "class", "path", "prediction"].map(|head| format!("<th scope=\"col\">{head}</th>")));
    let heads = ["requests", "median error", "bias", "nine of ten at most", "within", "target"];
    html.extend(heads.map(|head| format!("<th scope=\"col\" class=\"n\">{head}</th>")));
    html + "</tr></thead><tbody>" + &rows + "</tbody></table></div></figure>"
}

fn path_rows(path: &PathFigures, (at, label): (usize, &str), class: &str) -> String {
    let mut rows = String::new();
    for (target, figures) in path.all() {
        put!(
            rows,
            "<tr class=\"r{at}\"><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td>",
            key(at, label),
            escape(class),
            path.path.name(),
            target.words()
        );
        rows.extend(cells(figures).map(|cell| format!("<td class=\"n\">{cell}</td>")));
        rows += "</tr>";
    }
    rows
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
