//! The published traces give the published figures.

use std::path::PathBuf;

use baton_traces::summary::{Summary, SummaryOptions, Summariser};
use baton_traces::{ReadOptions, locate, open};

/// The two traces, or `None` (said aloud) where this machine does not have them.
fn real(name: &str) -> Option<PathBuf> {
    let found = locate(name);
    if found.is_none() {
        eprintln!("{name} is not on this machine (BATON_TRACES): only the look-alike was checked");
    }
    found
}

fn summary_of(path: &std::path::Path) -> Summary {
    let mut reader = open(path, &ReadOptions::default()).unwrap();
    let mut summariser = Summariser::new(reader.block_tokens(), &SummaryOptions::default());
    for record in &mut reader {
        summariser.add(&record.unwrap());
    }
    summariser.finish()
}

/// Block and token hit ratios at 1 M, 3 M, 10 M, 50 M tokens and unbounded.
const CONVERSATION: [(f64, f64); 5] = [(0.0533, 0.0543), (0.1361, 0.1387), (0.2852, 0.2908), (0.3635, 0.3707), (0.3664, 0.3736)];
const SYNTHETIC: [(f64, f64); 5] = [(0.1424, 0.1451), (0.3094, 0.3151), (0.5666, 0.5770), (0.6396, 0.6512), (0.6396, 0.6512)];

fn assert_table(name: &str, requests: u64, table: &[(f64, f64); 5]) {
    let Some(path) = real(name) else { return };
    let summary = summary_of(&path);
    assert_eq!(summary.requests, requests);
    let measured = summary.capacity.iter().map(|c| c.hit).chain([summary.unbounded]);
    for (hit, wanted) in measured.zip(table) {
        let four = |x: f64| (x * 1e4).round() / 1e4;
        assert_eq!((four(hit.block_hit_ratio), four(hit.token_hit_ratio)), *wanted, "{name}");
    }
    eprintln!("checked against the real {name}");
}

#[test]
fn conversation_hit_ratios_are_the_published_table() {
    assert_table("conversation_trace.jsonl", 12_031, &CONVERSATION);
}

#[test]
fn synthetic_hit_ratios_are_the_published_table() {
    assert_table("synthetic_trace.jsonl", 3_993, &SYNTHETIC);
}
