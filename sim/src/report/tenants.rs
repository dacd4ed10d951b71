//! The table of tenants.

use crate::metrics::{RunResult, TenantResult};

use super::lines::paragraph;
use super::names::key;
use super::text::{count, escape, fixed, percent};

/// Rows of a run at most; the others are one row more.
const ROWS: usize = 20;

const NOTE: &str = "Each request counts once, for its tenant; the tenants with the most requests come first. In SLO: the \
                    share of all but the cancelled requests that kept their objectives.";

/// A row for each tenant of each run; nothing where no request names one.
#[must_use]
pub(super) fn figure(runs: &[RunResult], labels: &[String]) -> String {
    if runs.iter().all(|run| run.tenants.is_empty()) {
        return String::new();
    }
    let heads = [
        "requests",
        "in SLO",
        "prompt tokens in SLO",
        "refused",
        "failed",
        "cancelled",
        "TTFT p50, s",
        "TTFT p90, s",
    ];
    let mut html = format!(
        "<figure class=\"wide\"><figcaption><h3>Tenants</h3>{}</figcaption><div class=\"scroll\" tabindex=\"0\" \
         role=\"region\" aria-label=\"Tenants\"><table><thead><tr><th scope=\"col\">run</th>\
         <th scope=\"col\">tenant</th>",
        paragraph(NOTE)
    );
    html.extend(heads.map(|head| format!("<th scope=\"col\" class=\"n\">{head}</th>")));
    html += "</tr></thead><tbody>";
    for (at, (run, label)) in runs.iter().zip(labels).enumerate() {
        for (name, tenant) in TenantResult::rows(&run.tenants, ROWS) {
            put!(
                html,
                "<tr class=\"r{at}\"><th scope=\"row\">{}</th><td>{}</td>",
                key(at, label),
                escape(&name)
            );
            html.extend(cells(&tenant).map(|cell| format!("<td class=\"n\">{cell}</td>")));
            html += "</tr>";
        }
    }
    html + "</tbody></table></div></figure>"
}

fn cells(tenant: &TenantResult) -> [String; 8] {
    let seconds = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| fixed(v, 2));
    [
        count(tenant.requests),
        tenant.attained.map_or_else(|| "–".into(), percent),
        count(tenant.input_tokens_in_slo),
        count(tenant.rejected),
        count(tenant.failed),
        count(tenant.cancelled),
        seconds(tenant.ttft_s.p50),
        seconds(tenant.ttft_s.p90),
    ]
}
