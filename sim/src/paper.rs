//! The published experiments, repeated: each figure or table of the Mooncake papers that our
//! traces and models can carry, paper beside ours. One profile, one configuration per set-up; what
//! does not match is said, not tuned away.
//!
//! Sources: "Mooncake: Trading More Storage for Less Computation" (FAST'25), figures 1–15, and the
//! technical report arXiv 2407.00079v1, table 3.

mod caches;
mod capacity;
mod cluster;
pub mod eviction;
mod overload;
mod schedulers;

use std::sync::Arc;

use baton_traces::Trace;
use rayon::prelude::*;
use serde::Serialize;

/// One line of a section: paper beside ours.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The measured quantity.
    pub what: String,
    /// The paper's figure; `None` where it gives none.
    pub paper: Option<f64>,
    /// Ours.
    pub ours: f64,
    /// Unit of both.
    pub unit: &'static str,
}

/// One figure or table.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    /// Its name in the paper.
    pub figure: &'static str,
    /// Its title: the quantity that it shows.
    pub title: &'static str,
    /// How it was run here.
    pub setup: String,
    /// The lines.
    pub rows: Vec<Row>,
    /// Claims about the rows, each with its result.
    pub checks: Vec<Check>,
    /// Why figures differ, or what could not be run.
    pub note: String,
}

/// A claim about a section's rows.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The claim.
    pub claim: String,
    /// Whether it holds.
    pub holds: bool,
}

/// The traces of the papers that are at hand.
#[derive(Clone)]
pub struct Traces {
    /// The conversation trace.
    pub conversation: Arc<Trace>,
    /// The synthetic trace.
    pub synthetic: Arc<Trace>,
}

type Experiment = fn(&Traces) -> Result<Vec<Section>, String>;

/// The experiments, in the order of the papers.
const EXPERIMENTS: [Experiment; 9] = [
    capacity::figures_1_and_7,
    schedulers::figure_5,
    capacity::figure_8,
    caches::figure_9,
    caches::figure_10,
    caches::figure_11,
    cluster::figure_13,
    cluster::figure_15,
    overload::table_3,
];

/// Runs every experiment, on all processors; `done` is called after each.
///
/// # Errors
/// The first violation that a run's oracle found, or the reason why a set-up cannot be built.
pub fn run(traces: &Traces, done: &(dyn Fn() + Sync)) -> Result<Vec<Section>, String> {
    let sections: Result<Vec<Vec<Section>>, String> = EXPERIMENTS
        .par_iter()
        .map(|experiment| {
            let sections = experiment(traces);
            done();
            sections
        })
        .collect();
    Ok(sections?.into_iter().flatten().collect())
}

/// How many experiments there are.
#[must_use]
pub const fn experiments() -> usize {
    EXPERIMENTS.len()
}

fn row(what: impl Into<String>, paper: Option<f64>, ours: f64, unit: &'static str) -> Row {
    Row { what: what.into(), paper, ours, unit }
}

fn check(claim: impl Into<String>, holds: bool) -> Check {
    Check { claim: claim.into(), holds }
}

/// The sections as a Markdown page.
#[must_use]
pub fn markdown(sections: &[Section], traces: &str) -> String {
    use std::fmt::Write as _;
    let mut text = String::from("# The published experiments, repeated\n\n");
    let _ = writeln!(
        text,
        "Made by `baton paper --write docs/paper.md` (or `make paper`) from {traces}. Paper: \"Mooncake: Trading More Storage for Less Computation\" (FAST'25) and its technical report (arXiv 2407.00079v1); a `~` in them was read off a plot. Simulated with the cost profile `llama3-70b-8xa100`, one configuration per set-up, no knob fitted per row.\n"
    );
    for section in sections {
        let _ = writeln!(text, "## {}: {}\n\n{}\n", section.figure, section.title, section.setup);
        text.push_str("| what | paper | ours | ours / paper |\n|---|---|---|---|\n");
        for row in &section.rows {
            let paper = row.paper.map_or_else(|| "–".into(), |p| format!("{} {}", number(p), row.unit));
            let ratio = row
                .paper
                .filter(|p| p.abs() > 0.0)
                .map_or_else(|| "–".into(), |p| format!("{:.2}", row.ours / p));
            let _ = writeln!(
                text,
                "| {} | {} | {} {} | {} |",
                row.what,
                paper.trim_end(),
                number(row.ours),
                row.unit,
                ratio
            );
        }
        text.push('\n');
        for check in &section.checks {
            let _ = writeln!(
                text,
                "- {}: **{}**",
                check.claim,
                if check.holds { "holds" } else { "does not hold" }
            );
        }
        if !section.note.is_empty() {
            let _ = writeln!(text, "\n{}", section.note);
        }
        text.push('\n');
    }
    while text.ends_with("\n\n") {
        text.pop();
    }
    text
}

/// A figure with as many digits as it deserves.
#[must_use]
pub fn number(x: f64) -> String {
    let size = x.abs();
    if size >= 1000.0 || (size - size.round()).abs() < 1e-9 && size >= 1.0 {
        format!("{x:.0}")
    } else if size >= 10.0 {
        format!("{x:.1}")
    } else if size >= 1.0 {
        format!("{x:.2}")
    } else {
        format!("{x:.4}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_names_what_does_not_hold() {
        let section = Section {
            figure: "Figure 0",
            title: "nothing",
            setup: "none".into(),
            rows: vec![row("a", Some(2.0), 1.0, "s"), row("b", None, 12_345.6, "")],
            checks: vec![check("one is two", false)],
            note: "Because.".into(),
        };
        let page = markdown(&[section], "thin air");
        assert!(
            page.contains("| a | 2 s | 1 s | 0.50 |") && page.contains("| b | – | 12346  | – |"),
            "{page}"
        );
        assert!(page.contains("one is two: **does not hold**") && page.ends_with("Because.\n"), "{page}");
    }
}
