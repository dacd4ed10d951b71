//! `baton trace stats`: what one cache of a given size would have hit.

use crate::program::Place;
use crate::rows::{self, BLOCK_TOKENS, Row};
use serde_json::Value;

fn stats(rows: &[Row], capacity: &str) -> Value {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(rows));
    place.baton(&["trace", "stats", "t.jsonl", "--capacity", capacity, "--json"]).succeeded().json()
}

/// Block and token hit ratio of the entry at `at`.
#[track_caller]
fn ratios(stats: &Value, at: usize) -> (f64, f64) {
    let ratio = |name: &str| {
        stats["capacity"][at][name].as_f64().unwrap_or_else(|| panic!("no {name} at {at}: {stats:#}"))
    };
    (ratio("block_hit_ratio"), ratio("token_hit_ratio"))
}

#[track_caller]
fn assert_near(got: (f64, f64), wanted: (f64, f64)) {
    assert!(
        (got.0 - wanted.0).abs() < 1e-4 && (got.1 - wanted.1).abs() < 1e-4,
        "{got:?} instead of {wanted:?}"
    );
}

#[test]
fn hits_are_those_counted_by_hand() {
    // Nine blocks and 4,172 tokens. Unbounded, the second row hits 3 blocks and the third 2. With room for two
    // blocks the leaf is evicted first, so the second hits 2, and the third the same 2.
    let short = Row { at_ms: 2_000, input_tokens: 1_100, output_tokens: 5, blocks: vec![1, 2, 4] };
    let rows = [Row::full(0, 5, 1..4), Row::full(1_000, 5, 1..4), short];
    let stats = stats(&rows, "1e6,1024");
    assert_eq!(stats["requests"], 3);
    assert_eq!(stats["capacity"].as_array().map(Vec::len), Some(2), "{stats:#}");
    assert_eq!(stats["capacity"][0]["capacity_tokens"], 1_000_000);
    assert_eq!(stats["capacity"][1]["capacity_tokens"], 1_024);
    assert_near(ratios(&stats, 0), (5.0 / 9.0, 2_560.0 / 4_172.0));
    assert_near(ratios(&stats, 1), (4.0 / 9.0, 2_048.0 / 4_172.0));
}

#[test]
fn a_last_block_that_is_partial_counts_its_own_tokens() {
    let row = |at_ms| Row { at_ms, input_tokens: 600, output_tokens: 5, blocks: vec![1, 2] };
    assert_near(ratios(&stats(&[row(0), row(1)], "1e6"), 0), (0.5, 0.5));
}

#[test]
fn hits_agree_with_a_naive_cache_at_every_size() {
    let rows = rows::tree(400);
    let sizes = [1, 7, 40, 200, 100_000];
    let capacities: Vec<String> = sizes.iter().map(|blocks| (blocks * BLOCK_TOKENS).to_string()).collect();
    let stats = stats(&rows, &capacities.join(","));
    for (at, &blocks) in sizes.iter().enumerate() {
        assert_near(ratios(&stats, at), naive(&rows, blocks as usize));
    }
}

/// A list in order of use, searched from end to end: blocks and tokens matched over all.
fn naive(rows: &[Row], room: usize) -> (f64, f64) {
    let mut used: Vec<u64> = Vec::new();
    let (mut hit, mut all, mut hit_tokens, mut all_tokens) = (0, 0, 0, 0);
    for row in rows {
        let matched = row.blocks.iter().take_while(|block| used.contains(block)).count();
        hit += matched;
        all += row.blocks.len();
        hit_tokens += (matched as u64 * BLOCK_TOKENS).min(row.input_tokens);
        all_tokens += row.input_tokens;
        used.retain(|block| !row.blocks.contains(block));
        used.extend(row.blocks.iter().rev());
        used.drain(..used.len().saturating_sub(room));
    }
    (hit as f64 / all as f64, hit_tokens as f64 / all_tokens as f64)
}

#[test]
fn without_json_a_person_can_read_it() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::tree(123)));
    let stats = place.baton(&["trace", "stats", "t.jsonl"]).succeeded();
    assert!(stats.stdout.contains("123"), "the number of requests is missing: {stats:#?}");
    assert!(serde_json::from_str::<Value>(&stats.stdout).is_err(), "{stats:#?}");
}

#[test]
fn a_capacity_that_is_no_number_is_refused() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::easy()));
    for capacity in ["lots", "-1", "nan", "1e6,,2e6"] {
        let option = format!("--capacity={capacity}");
        place.baton(&["trace", "stats", "t.jsonl", &option]).refused(2, &["--capacity"]);
    }
}
