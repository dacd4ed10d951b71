//! A whole world, stepped token by token, gives exactly what the fast one gives.

use baton_sim::metrics::Collector;

use crate::scenario::Scenario;
use crate::seeds::{number, verdict};

fn compare(scenario: &Scenario) -> Result<(), String> {
    let fast = verdict(scenario)?;
    let mut stepped = scenario.clone();
    stepped.setup.step_once = true;
    let slow = verdict(&stepped)?;
    let pairs = fast.outcomes.iter().zip(&slow.outcomes);
    if let Some((f, s)) = pairs.clone().find(|(f, s)| f != s) {
        return Err(format!("fast {f:?}\n    slow {s:?}"));
    }
    same_text(&json(&fast), &json(&slow))
}

/// The whole result as scripts read it.
pub fn json(run: &Collector) -> String {
    serde_json::to_string(&run.result(("", ""), 1.0, 1)).unwrap()
}

/// Says where two texts part.
pub fn same_text(left: &str, right: &str) -> Result<(), String> {
    let same = left.bytes().zip(right.bytes()).take_while(|(a, b)| a == b).count();
    if left == right {
        return Ok(());
    }
    let around = |text: &str| text[same.saturating_sub(120)..(same + 60).min(text.len())].to_owned();
    Err(format!("their results part:\n    {}\n    {}", around(left), around(right)))
}

fn sweep(make: fn(u64) -> Scenario, seeds: std::ops::Range<u64>) {
    let mut failures = Vec::new();
    for seed in seeds {
        let scenario = make(seed);
        if let Err(e) = compare(&scenario) {
            failures.push(format!("seed {seed}: {e}\n    {}", scenario.describe()));
        }
        if failures.len() >= 5 {
            break;
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn seeds() -> u64 {
    number("BATON_SEEDS", 25)
}

#[test]
fn stepping_equals_fast_forwarding() {
    sweep(Scenario::quiet, 5_000..5_000 + seeds());
}

#[test]
fn stepping_equals_fast_forwarding_under_faults() {
    sweep(Scenario::with_faults, 6_000..6_000 + seeds());
}
