//! The rows of the three lists: nodes, requests under way, decisions. And the lines of the classes.

use super::words;
use crate::conductor::{NodeStatus, RequestStatus, SloStatus, Status};

/// Headings and widths of the nodes' columns; the last one takes what is left.
pub(super) const NODES: &[(&str, u16)] = &[
    ("node", 21),
    ("role", 8),
    ("state", 9),
    ("epoch", 5),
    ("heard ago", 9),
    ("backlog", 9),
    ("wait/sent", 9),
    ("run", 4),
    ("decodes", 7),
    ("room tokens", 11),
    ("handed off", 10),
    ("bad", 4),
    ("tiers: blocks used/capacity, hits", 0),
];

/// The columns of the list of requests.
pub(super) const REQUESTS: &[(&str, u16)] = &[
    ("request", 40),
    ("stage", 8),
    ("age", 9),
    ("prompt", 8),
    ("answer", 7),
    ("tries", 5),
    ("prefill > decode", 0),
];

/// One row a node.
pub(super) fn nodes(status: &Status) -> Vec<Vec<String>> {
    status.nodes.iter().map(node).collect()
}

fn node(node: &NodeStatus) -> Vec<String> {
    let tiers = node.tiers.iter().filter(|tier| tier.3 > 0);
    let tiers = tiers.map(|(name, used, _, capacity, hits, _)| format!("{name} {used}/{capacity} h{hits}"));
    vec![
        node.name.clone(),
        node.role.clone(),
        node.state.clone(),
        node.epoch.to_string(),
        words::micros(node.heard_us_ago),
        words::micros(node.backlog_us),
        format!("{}/{}", node.waiting, node.dispatched),
        node.running.to_string(),
        node.decodes.to_string(),
        node.reserved_tokens.to_string(),
        words::bytes(node.handoff_bytes),
        node.integrity_rejects.to_string(),
        tiers.collect::<Vec<_>>().join("  "),
    ]
}

/// One row a request.
pub(super) fn requests(status: &Status) -> Vec<Vec<String>> {
    status.requests.iter().map(|request| row(request, status)).collect()
}

fn row(request: &RequestStatus, status: &Status) -> Vec<String> {
    let name = |leg: Option<u32>| {
        let Some(leg) = leg else { return "-".to_owned() };
        let node = status.nodes.iter().find(|node| node.instance == leg);
        node.map_or_else(|| format!("#{leg}"), |node| node.name.clone())
    };
    vec![
        request.request_id.clone(),
        request.stage.clone(),
        words::micros(request.age_us),
        request.prompt_tokens.to_string(),
        request.answer_tokens.to_string(),
        request.attempts.to_string(),
        format!("{} > {}", name(request.prefill), name(request.decode)),
    ]
}

/// One row a decision, as the conductor words it.
pub(super) fn decisions(status: &Status) -> Vec<Vec<String>> {
    status.decisions.iter().map(|words| vec![words.clone()]).collect()
}

/// Lines of classes that are shown at most.
const CLASS_LINES: usize = 8;

/// One line a class, the class with the lowest attained share first. None for a single class that keeps its promise.
pub(super) fn classes(status: &Status) -> Vec<String> {
    let trouble = |class: &SloStatus| {
        class.late_ttft + class.late_tbt + class.late_e2e + class.refused + class.failed > 0
    };
    if status.slo.len() < 2 && !status.slo.iter().any(trouble) {
        return Vec::new();
    }
    let mut classes: Vec<&SloStatus> = status.slo.iter().collect();
    let attained = |class: &SloStatus| class.attained_1h.unwrap_or(1.0);
    classes.sort_by(|a, b| attained(a).total_cmp(&attained(b)));
    let hidden = classes.len().saturating_sub(CLASS_LINES);
    let mut lines: Vec<String> = classes.into_iter().take(CLASS_LINES).map(class_line).collect();
    if hidden > 0 {
        lines.push(format!("SLO of {hidden} further classes: see slo in /admin/status"));
    }
    lines
}

fn class_line(class: &SloStatus) -> String {
    format!(
        "SLO {}: 5 min {}, 1 h {}; of {} requests {} in SLO, late TTFT {} TBT {} E2E {}, refused {}, failed {}, cancelled {}; \
         TTFT of admitted {}, target {}",
        class.class,
        words::share(class.attained_5m),
        words::share(class.attained_1h),
        class.requests,
        class.in_slo,
        class.late_ttft,
        class.late_tbt,
        class.late_e2e,
        class.refused,
        class.failed,
        class.cancelled,
        words::share(class.ttft_attained),
        words::share(Some(class.target))
    )
}
