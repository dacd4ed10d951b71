//! The table of tenants.

use crate::metrics::{RunResult, TenantResult};

use super::rows::{row, table};
use super::text::{count, fixed, percent};

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
    let rows = runs.iter().zip(labels).enumerate().flat_map(|(at, (run, label))| {
        let tenants = TenantResult::rows(&run.tenants, TenantResult::SHOWN).into_iter();
        tenants.map(move |(title, tenant)| row((at, label), &[&title], &cells(&tenant)))
    });
    table("Tenants", NOTE, (&["tenant"], &heads), &rows.collect::<String>())
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
