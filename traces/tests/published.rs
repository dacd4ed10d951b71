//! The published traces give the published figures. Where this machine does not have them, the same
//! code is checked against a naive cache on the look-alike; which of the two happened is printed.
#![allow(clippy::unwrap_used, reason = "a test may fail by unwrapping")]

use std::collections::HashSet;
use std::path::Path;

use baton_traces::summary::{HitRatio, Summariser, Summary, SummaryOptions, summarise};
use baton_traces::synth::{PublishedTrace, like};
use baton_traces::{ReadOptions, Record, Trace, locate, open};

/// Block and token hit ratios at 1 M, 3 M, 10 M, 50 M tokens and unbounded.
type Ratios = [(f64, f64); 5];

const CONVERSATION: Ratios =
    [(0.0533, 0.0543), (0.1361, 0.1387), (0.2852, 0.2908), (0.3635, 0.3707), (0.3664, 0.3736)];
const SYNTHETIC: Ratios =
    [(0.1424, 0.1451), (0.3094, 0.3151), (0.5666, 0.5770), (0.6396, 0.6512), (0.6396, 0.6512)];

fn summary_of(path: &Path) -> Summary {
    let mut reader = open(path, &ReadOptions::default()).unwrap();
    let mut summariser = Summariser::new(reader.block_tokens(), &SummaryOptions::default());
    for record in &mut reader {
        summariser.add(&record.unwrap());
    }
    summariser.finish()
}

fn assert_published(name: &str, kind: PublishedTrace, requests: u64, wanted: &Ratios) {
    let Some(path) = locate(name) else {
        eprintln!(
            "{name} is not on this machine (BATON_TRACES): checked the look-alike against a naive cache"
        );
        return assert_naive(kind);
    };
    let summary = summary_of(&path);
    assert_eq!(summary.requests, requests);
    let measured = summary.capacity.iter().map(|c| c.hit).chain([summary.unbounded]);
    for (hit, wanted) in measured.zip(wanted) {
        let four = |x: f64| (x * 1e4).round() / 1e4;
        assert_eq!((four(hit.block_hit_ratio), four(hit.token_hit_ratio)), *wanted, "{name}");
    }
    eprintln!("checked against the real {name}");
}

/// Hit ratios by a list that is searched from its start, most recent first.
fn naive(records: &[Record], capacity_blocks: usize) -> HitRatio {
    let mut list: Vec<u64> = Vec::new();
    let (mut hits, mut blocks, mut hit_tokens, mut tokens) = (0, 0, 0, 0);
    for record in records {
        let held: HashSet<u64> = list.iter().copied().collect();
        let matched = record.hash_ids.iter().take_while(|id| held.contains(id)).count() as u64;
        hits += matched;
        blocks += record.hash_ids.len() as u64;
        hit_tokens += (matched * 512).min(record.input_length);
        tokens += record.input_length;
        let touched: HashSet<u64> = record.hash_ids.iter().copied().collect();
        list.retain(|id| !touched.contains(id));
        list.splice(0..0, record.hash_ids.iter().copied());
        list.truncate(capacity_blocks);
    }
    HitRatio {
        block_hit_ratio: hits as f64 / blocks as f64,
        token_hit_ratio: hit_tokens as f64 / tokens as f64,
    }
}

fn assert_naive(kind: PublishedTrace) {
    let mut trace: Trace = like(kind, 5);
    trace.records.truncate(1000);
    let summary = summarise(&trace, &SummaryOptions::default());
    for capacity in &summary.capacity {
        let wanted = naive(&trace.records, (capacity.capacity_tokens / 512) as usize);
        assert!((capacity.hit.block_hit_ratio - wanted.block_hit_ratio).abs() < 1e-12);
        assert!((capacity.hit.token_hit_ratio - wanted.token_hit_ratio).abs() < 1e-12);
    }
    assert!(summary.unbounded.block_hit_ratio > 0.1);
}

#[test]
fn conversation_hit_ratios_are_the_published_table() {
    assert_published("conversation_trace.jsonl", PublishedTrace::Conversation, 12_031, &CONVERSATION);
}

#[test]
fn synthetic_hit_ratios_are_the_published_table() {
    assert_published("synthetic_trace.jsonl", PublishedTrace::Synthetic, 3_993, &SYNTHETIC);
}

#[test]
fn the_look_alikes_agree_with_a_naive_cache() {
    assert_naive(PublishedTrace::Conversation);
    assert_naive(PublishedTrace::Synthetic);
}
