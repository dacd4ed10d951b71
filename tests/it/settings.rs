//! Settings are strict: what is not known is refused, with what was probably meant.

use crate::program::{Outcome, Place};
use crate::rows;

fn replay_with(settings: &str) -> Outcome {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::easy()));
    place.write("baton.toml", settings);
    place.baton(&["replay", "t.jsonl", "--config", "baton.toml"])
}

#[test]
fn a_misspelt_key_is_answered_with_the_right_one() {
    replay_with("[scheduler]\nadmision = \"slo\"\n").refused(1, &["baton.toml", "admision", "admission"]);
    replay_with("[schedular]\nadmission = \"slo\"\n").refused(1, &["baton.toml", "schedular", "scheduler"]);
}

#[test]
fn a_known_key_with_a_wrong_value_is_refused_by_name() {
    replay_with("[scheduler]\nadmission = \"slow\"\n").refused(1, &["baton.toml", "admission"]);
    replay_with("[scheduler]\nblock_tokens = 0\n").refused(1, &["block_tokens"]);
    replay_with("[scheduler\n").refused(1, &["baton.toml"]);
}

#[test]
fn settings_take_effect_and_the_command_line_wins_over_them() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::easy()));
    let admission = |settings: &str, more: &[&str]| {
        place.write("baton.toml", settings);
        let args = ["replay", "t.jsonl", "--policy", "baton", "--config", "baton.toml", "--json", "out.json"];
        place.baton(&[&args[..], more].concat()).succeeded();
        place.json("out.json")["runs"][0]["admission"].clone()
    };
    assert_eq!(admission("[scheduler]\nadmission = \"none\"\n", &[]), "none");
    assert_eq!(admission("[scheduler]\nadmission = \"none\"\n", &["--admission", "early"]), "early");
    assert_ne!(admission("", &[]), "none");
}

#[test]
fn an_unknown_policy_or_admission_is_answered_with_the_known_ones() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::easy()));
    place.baton(&["replay", "t.jsonl", "--policy", "baton,mooncak"]).refused(2, &["mooncak", "mooncake"]);
    place.baton(&["replay", "t.jsonl", "--policy", "foresight"]).refused(2, &["foresight", "baton_informed"]);
    place.baton(&["replay", "t.jsonl", "--admission", "erly"]).refused(2, &["erly", "early"]);
    for speed in ["0", "-1", "nan", "fast"] {
        place.baton(&["replay", "t.jsonl", &format!("--speed={speed}")]).refused(2, &["--speed"]);
    }
}
