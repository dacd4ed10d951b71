//! `baton replay --require`: a replay as a gate, by exit code.

use crate::program::{Outcome, Place};
use crate::rows::{self, Row};

fn replay(rows: &[Row], requirement: &str) -> Outcome {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(rows));
    place.baton(&["replay", "t.jsonl", "--policy", "baton", "--require", requirement])
}

#[test]
fn a_requirement_that_holds_exits_0() {
    for requirement in ["goodput>=0.95", "goodput >= 1.0"] {
        let outcome = replay(&rows::easy(), requirement).succeeded();
        assert!(outcome.stdout.contains("baton"), "the report is missing: {outcome:#?}");
    }
}

#[test]
fn a_requirement_that_fails_exits_1_and_says_what_was_measured() {
    let outcome = replay(&rows::flood(), "goodput>=0.95");
    let said = format!("{}{}", outcome.stdout, outcome.stderr);
    outcome.refused(1, &["goodput", "0.95"]);
    assert!(said.contains("baton"), "the policy that failed is not named: {said}");
}

#[test]
fn the_report_is_written_although_a_requirement_fails() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::flood()));
    let args = ["replay", "t.jsonl", "--policy", "baton", "--require", "goodput>=0.95", "--json", "out.json"];
    place.baton(&args).refused(1, &["goodput"]);
    let run = &place.json("out.json")["runs"][0];
    let goodput = run["in_slo"].as_f64().unwrap() / run["requests"].as_f64().unwrap();
    assert!(goodput < 0.95, "the flood was served in time: {run:#}");
}

#[test]
fn a_requirement_that_cannot_be_read_is_not_mistaken_for_one_that_fails() {
    for broken in ["goodput", "goodput>>0.9", "goodput>=much", ">=0.9", ""] {
        replay(&rows::easy(), broken).refused(2, &["--require"]);
    }
    replay(&rows::easy(), "godput>=0.9").refused(2, &["godput", "goodput"]);
}
