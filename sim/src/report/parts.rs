//! Figures divided into parts: outcomes, refusals, hits by tier; and the retries of refused clients.

use crate::metrics::RunResult;

use super::lines::paragraph;
use super::names::key;
use super::table::Bars;
use super::text::{count, fixed};

/// Colours of parts without a meaning of their own.
const COLOURS: [&str; 7] = ["p0", "p1", "p2", "p3", "p4", "p5", "p6"];

/// The requests by outcome.
#[must_use]
pub(super) fn outcomes(runs: &[RunResult], labels: &[String]) -> String {
    let parts = [
        ("in SLO", "good"),
        ("completed late", "late"),
        ("refused", "refused"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
    ];
    let row = |r: &RunResult| {
        vec![r.in_slo, r.completed.saturating_sub(r.in_slo), r.rejected, r.failed, r.cancelled]
    };
    let bars = Bars {
        title: "What became of the requests".into(),
        note: "Of all requests offered; each counts once.".into(),
        parts: parts.map(|(name, colour)| (name.to_owned(), colour)).to_vec(),
        rows: runs.iter().map(row).collect(),
        shares: true,
    };
    bars.figure(labels)
}

/// Refusals by reason.
#[must_use]
pub(super) fn reasons(runs: &[RunResult], labels: &[String]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in runs.iter().flat_map(|r| &r.refusals_by_reason) {
        if !names.contains(name) {
            names.push(name);
        }
    }
    if names.is_empty() {
        return none("Refusals by reason", "No request was refused.");
    }
    let row = |r: &RunResult| {
        let of = |name: &&str| r.refusals_by_reason.iter().filter(|(n, _)| n == name).map(|(_, n)| n).sum();
        names.iter().map(of).collect()
    };
    let bars = Bars {
        title: "Refusals by reason".into(),
        note: "Every refusal counts, also of clients that came back. The longest bar is the run with most \
            refusals."
            .into(),
        parts: names
            .iter()
            .enumerate()
            .map(|(at, n)| {
                (
                    n.replace(
                        '_',
                        " \
            ",
                    ),
                    COLOURS[at % COLOURS.len()],
                )
            })
            .collect(),
        rows: runs.iter().map(row).collect(),
        shares: false,
    };
    bars.figure(labels)
}

/// Blocks found by tier.
#[must_use]
pub(super) fn tiers(runs: &[RunResult], labels: &[String]) -> String {
    let parts = [("HBM", "p0"), ("DRAM", "p1"), ("SSD", "p2")];
    let row = |r: &RunResult| {
        (0..parts.len()).map(|t| r.instances.iter().map(|i| i.tier_hit_blocks[t]).sum()).collect()
    };
    let bars = Bars {
        title: "Blocks found, by tier".into(),
        note: "Where a prefill instance found prompt blocks when it asked its own store; fetches from other \
            instances are not among them."
            .into(),
        parts: parts.map(|(name, colour)| (name.to_owned(), colour)).to_vec(),
        rows: runs.iter().map(row).collect(),
        shares: false,
    };
    bars.figure(labels)
}

/// Prompt tokens computed for requests that were refused afterwards.
#[must_use]
pub(super) fn wasted(runs: &[RunResult], labels: &[String]) -> String {
    let bars = Bars {
        title: "Wasted prefill".into(),
        note: "Prompt tokens computed for requests that were refused afterwards.".into(),
        parts: vec![("tokens".into(), "refused")],
        rows: runs.iter().map(|r| vec![r.wasted_prefill_tokens]).collect(),
        shares: false,
    };
    bars.figure(labels)
}

/// How strongly load oscillates, in thousandths so that it is a whole number of something.
#[must_use]
pub(super) fn oscillation(runs: &[RunResult], labels: &[String]) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the index is at least 0 and small"
    )]
    let thousandths = |r: &RunResult| (r.oscillation_index.max(0.0) * 1000.0).round() as u64;
    let bars = Bars {
        title: "Oscillation".into(),
        note:
            "How strongly prefill and decode load swing against each other: their relative amplitude times \
            their \
               anticorrelation, in thousandths. 0 is calm, or moving together."
                .into(),
        parts: vec![("index × 1000".into(), "late")],
        rows: runs.iter().map(|r| vec![thousandths(r)]).collect(),
        shares: false,
    };
    bars.figure(labels)
}

/// The retry times that refused clients received, and the success of their retries.
#[must_use]
pub(super) fn retry_after(runs: &[RunResult], labels: &[String]) -> String {
    let heads = [
        "refusals",
        "told to wait p50, s",
        "p90, s",
        "p99, s",
        "longest, s",
        "returned",
        "let in at once, %",
        "readmitted",
        "of those in SLO",
        "gave up",
    ];
    let note = match runs.iter().map(|r| r.retries).sum::<u64>() {
        0 => "No client came back after a refusal: their number of retries is 0.",
        _ => "Clients that came back waited as long as they were told; readmitted ones completed.",
    };
    let mut html = format!(
        "<figure class=\"wide\"><figcaption><h3>Retry-After</h3>{}</figcaption><div class=\"scroll\" \
         tabindex=\"0\" role=\"region\" \
         aria-label=\"Retry-After\"><table><thead><tr><th scope=\"col\">run</th>",
        paragraph(note)
    );
    html.extend(heads.map(|head| format!("<th scope=\"col\" class=\"n\">{head}</th>")));
    html += "</tr></thead><tbody>";
    for (at, (run, label)) in runs.iter().zip(labels).enumerate() {
        let seconds = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| fixed(v, 2));
        let retry_after = &run.retry_after_s;
        let cells = [
            count(run.refusals),
            seconds(retry_after.p50),
            seconds(retry_after.p90),
            seconds(retry_after.p99),
            seconds(retry_after.max),
            count(run.retries),
            match run.second_tries {
                0 => "–".into(),
                tries => fixed(100.0 * run.second_tries_admitted as f64 / tries as f64, 1),
            },
            count(run.readmitted),
            count(run.readmitted_in_slo),
            count(run.rejected),
        ];
        put!(html, "<tr class=\"r{at}\"><th scope=\"row\">{}</th>", key(at, label));
        html.extend(cells.map(|cell| format!("<td class=\"n\">{cell}</td>")));
        html += "</tr>";
    }
    html + "</tbody></table></div></figure>"
}

fn none(title: &str, what: &str) -> String {
    format!("<figure class=\"wide\"><figcaption><h3>{title}</h3>{}</figcaption></figure>", paragraph(what))
}
