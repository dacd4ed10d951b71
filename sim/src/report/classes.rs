//! The table of service classes.

use crate::metrics::{ClassResult, RunResult};

use super::lines::paragraph;
use super::names::key;
use super::text::{count, escape, fixed, percent};

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
    let mut html = format!(
        "<figure class=\"wide\"><figcaption><h3>Service classes</h3>{}</figcaption><div class=\"scroll\" \
         tabindex=\"0\" role=\"region\" aria-label=\"Service classes\"><table><thead><tr>\
         <th scope=\"col\">run</th><th scope=\"col\">class</th>",
        paragraph(NOTE)
    );
    html.extend(heads.map(|head| format!("<th scope=\"col\" class=\"n\">{head}</th>")));
    html += "</tr></thead><tbody>";
    for (at, (run, label)) in runs.iter().zip(labels).enumerate() {
        for class in &run.classes {
            put!(
                html,
                "<tr class=\"r{at}\"><th scope=\"row\">{}</th><td>{}</td>",
                key(at, label),
                escape(&class.name)
            );
            html.extend(cells(class).map(|cell| format!("<td class=\"n\">{cell}</td>")));
            html += "</tr>";
        }
    }
    html + "</tbody></table></div></figure>"
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
