//! The table of runs beside the bound and the best run known.

use crate::metrics::RunResult;

use super::lines::paragraph;
use super::names::key;
use super::text::{count, escape, percent, share};

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
    let mut html = format!(
        "<figure class=\"wide\"><figcaption><h3>Upper bound and best run</h3>{}</figcaption><div class=\"scroll\" \
         tabindex=\"0\" role=\"region\" aria-label=\"Upper bound and best run\"><table><thead><tr>\
         <th scope=\"col\">run</th><th scope=\"col\">best run of</th>",
        paragraph(NOTE)
    );
    html.extend(heads.map(|head| format!("<th scope=\"col\" class=\"n\">{head}</th>")));
    html += "</tr></thead><tbody>";
    for (at, (run, label)) in runs.iter().zip(labels).enumerate() {
        let Some(bound) = &run.bound else { continue };
        let best = &bound.witness;
        let tokens = |tokens: u64| share(tokens, run.input_tokens).map_or_else(|| "–".into(), percent);
        put!(
            html,
            "<tr class=\"r{at}\"><th scope=\"row\">{}</th><td>{}, {}</td>",
            key(at, label),
            escape(&best.policy),
            escape(&best.admission)
        );
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
        html.extend(cells.map(|cell| format!("<td class=\"n\">{cell}</td>")));
        html += "</tr>";
    }
    html + "</tbody></table></div></figure>"
}
