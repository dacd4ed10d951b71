//! A trace that is not what it should be is refused by the row that is to blame.

use crate::program::Place;
use crate::rows::{self, Row};

/// Both readers of traces must refuse `text`, naming `row` and `words`.
#[track_caller]
fn refused(text: &str, words: &[&str]) {
    let place = Place::new();
    place.write("bad.jsonl", text);
    let words: Vec<&str> = words.iter().copied().chain(["bad.jsonl"]).collect();
    place.baton(&["replay", "bad.jsonl", "--json", "out.json"]).refused(1, &words);
    assert!(!place.path("out.json").exists(), "a report was written for a trace that was refused");
    place.baton(&["trace", "stats", "bad.jsonl"]).refused(1, &words);
}

#[test]
fn a_truncated_trace_names_its_last_row() {
    let whole = rows::text(&rows::easy()[..3]);
    refused(&whole[..whole.len() - 9], &["row 3"]);
}

#[test]
fn a_mixed_trace_names_the_first_row_of_the_other_sort() {
    let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n";
    refused(&format!("{}{csv}", rows::text(&rows::easy()[..2])), &["row 3"]);
}

#[test]
fn time_that_goes_back_names_its_row() {
    let rows = [Row::full(2_000, 5, 1..3), Row::full(3_000, 5, 3..5), Row::full(1_000, 5, 5..7)];
    refused(&rows::text(&rows), &["row 3"]);
}

#[test]
fn a_prompt_that_does_not_match_its_blocks_names_its_row() {
    let mut rows = rows::easy();
    rows[1].input_tokens += 1;
    refused(&rows::text(&rows), &["row 2"]);
}

#[test]
fn a_field_that_is_missing_or_negative_names_its_row() {
    let good = rows::text(&rows::easy()[..1]);
    refused(&format!("{good}{{\"timestamp\": 20000, \"input_length\": 5}}\n"), &["row 2"]);
    let negative = r#"{"timestamp": 20000, "input_length": -5, "output_length": 1, "hash_ids": [7]}"#;
    refused(&format!("{good}{negative}\n"), &["row 2"]);
}

#[test]
fn an_empty_trace_is_refused() {
    refused("", &[]);
}
