//! The table of runs beside the bound and the best run known.

use crate::metrics::RunResult;

use super::rows::{row, table};
use super::text::{count, percent, share};

const NOTE: &str = "No scheduler serves more in SLO on this cluster than the upper bound, whatever it knows beforehand; \
                    nor need any reach it. The best run is that of all policies with all admission modes which has \
                    most requests in SLO.";

/// A row for each run that has a bound; nothing where none has.
#[must_use]
pub(super) fn figure(runs: &[RunResult], labels: &[String]) -> String {
    if runs.iter().all(|run| run.bound.is_none()) {
        return String::new();
    }
    let heads =
        ["in SLO", "upper bound", "gap", "best run", "gap", "tokens in SLO", "upper bound", "best run"];
    let mut rows = String::new();
    for (at, (run, label)) in runs.iter().zip(labels).enumerate() {
        let Some(bound) = &run.bound else { continue };
        let best = &bound.witness;
        let tokens = |tokens: u64| share(tokens, run.input_tokens).map_or_else(|| "–".into(), percent);
        let cells = [
            count(run.in_slo),
            count(bound.in_slo),
            count(bound.gap_to_bound),
            count(best.in_slo),
            count(bound.gap_to_witness),
            tokens(run.input_tokens_in_slo),
            tokens(bound.input_tokens_in_slo),
            tokens(best.input_tokens_in_slo),
        ];
        rows += &row((at, label), &[&format!("{}, {}", best.policy, best.admission)], &cells);
    }
    table("Upper bound and best run", NOTE, (&["best run of"], &heads), &rows)
}
