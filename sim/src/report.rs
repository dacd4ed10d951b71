//! Runs as one HTML page that needs nothing else: no network, no fonts, and no script to be read.
//!
//! Rust draws everything, as tables and inline SVG; the script only reads values off the drawings.
//! Equal runs give equal pages, byte for byte.

/// Appends formatted text to a string.
macro_rules! put {
    ($to:expr, $($text:tt)*) => {{
        use std::fmt::Write as _;
        write!($to, $($text)*).expect("a string takes all text");
    }};
}

mod axis;
mod bounds;
mod classes;
mod curves;
mod heat;
mod lines;
mod names;
mod parts;
mod predictions;
mod rows;
mod table;
mod tenants;
#[cfg(test)]
mod tests;
mod text;
mod time;

use crate::metrics::RunResult;

use text::escape;

/// Runs that are drawn; tables show all.
const MAX_DRAWN: usize = 24;
/// Nothing may be loaded from anywhere, whatever a name in the page says.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

const DEFINITIONS: [(&str, &str); 7] = [
    ("TTFT", "From the offer of the request (its last attempt) to its first token."),
    ("TBT", "The mean of the longest tenth of a request's token gaps, at least one gap."),
    ("in SLO", "Completed with TTFT, TBT and E2E within the objectives of its class."),
    ("goodput", "Requests in SLO over requests offered; refused, failed and late ones all count against it."),
    ("hit ratio", "Prompt blocks that needed no computing, over prompt blocks of completed requests."),
    (
        "busy",
        "Prefill: share of the time in which prefills ran. Decode: step time by the conductor's prediction, \
         without prefills mixed in, over the tightest TBT objective.",
    ),
    (
        "oscillation",
        "Geometric mean of the relative amplitudes of prefill and decode load, times their anticorrelation.",
    ),
];

/// The page of `runs`, side by side, under `title`. `subtitle` says what ran: pairs of a name and a
/// value, such as the trace, the cluster, the objectives and the command.
///
/// All text is escaped. The size is bounded: about 300 KB for ten runs, and charts show the first
/// 24 of more. Any result has a page, one of no runs too.
#[must_use]
pub fn html(title: &str, subtitle: &[(String, String)], runs: &[RunResult]) -> String {
    let labels = names::labels(runs);
    let fact = |(name, value): &(String, String)| {
        format!("<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value))
    };
    let facts: String = subtitle.iter().map(fact).collect();
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta \
         http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{title}</title><style>{}</style></head>\
         <body><header><h1>{title}</h1><dl class=\"facts\">{facts}</dl></header>{}<main>{}{}</main>\
         <footer>Made by baton {}. This file is complete: it loads \
         nothing.</footer><script>{}</script></body></html>\n",
        include_str!("report/page.css"),
        names::switches(&labels),
        body(runs, &labels),
        definitions(),
        env!("CARGO_PKG_VERSION"),
        include_str!("report/page.js"),
    )
}

fn body(runs: &[RunResult], labels: &[String]) -> String {
    if runs.is_empty() {
        return "<p>No run was measured.</p>".into();
    }
    let (drawn, named) = (&runs[..runs.len().min(MAX_DRAWN)], &labels[..labels.len().min(MAX_DRAWN)]);
    let first = if drawn.len() < runs.len() {
        format!("<p>Charts show the first {MAX_DRAWN} of {} runs; tables show all.</p>", runs.len())
    } else {
        String::new()
    };
    let summary = format!(
        "<figure class=\"wide\"><p>★ marks the best of a column where runs differ. Percentiles are of \
         completed requests: a run that refuses more can look quicker.</p>{}</figure>",
        table::summary(runs, labels)
    );
    let heats: String = drawn
        .iter()
        .zip(named)
        .enumerate()
        .map(|(at, (run, label))| heat::figure(at, run, label, drawn.len()))
        .collect();
    [
        first,
        section(
            "Summary",
            &(summary
                + &bounds::figure(runs, labels)
                + &parts::outcomes(runs, labels)
                + &classes::figure(runs, labels)
                + &tenants::figure(runs, labels)),
        ),
        section("Latency", &curves::latencies(drawn, named)),
        section("Over time", &(time::figures(drawn, named) + &parts::oscillation(runs, labels))),
        section("Load of each instance", &(load_note() + &heats)),
        section("Caches", &(parts::tiers(runs, labels) + &curves::replicas(drawn, named))),
        section(
            "Refusals",
            &(parts::reasons(runs, labels)
                + &parts::retry_after(runs, labels)
                + &parts::wasted(runs, labels)),
        ),
        match predictions::figure(runs, labels) {
            none if none.is_empty() => none,
            figure => section("Predictions", &figure),
        },
    ]
    .concat()
}

fn section(name: &str, content: &str) -> String {
    format!("<section><h2>{name}</h2><div class=\"grid\">{content}</div></section>")
}

fn load_note() -> String {
    format!(
        "<div class=\"wide\"><p>Prefill: share of the time in which prefills ran. Decode, in a hue of its \
         own: predicted step time, without \
         prefills mixed in, over the TBT objective. Numbers on the right are means over the run.</p>{}</div>",
        heat::scale()
    )
}

fn definitions() -> String {
    let entry = |(term, meaning): &(&str, &str)| format!("<dt>{term}</dt><dd>{meaning}</dd>");
    let entries: String = DEFINITIONS.iter().map(entry).collect();
    format!("<details><summary>Definitions</summary><dl>{entries}</dl></details>")
}
