//! A whole world, stepped token by token, gives exactly what the fast one gives.

use crate::scenario::Scenario;
use crate::seeds::verdict;

fn compare(scenario: &Scenario) -> Result<(), String> {
    let fast = verdict(scenario)?;
    let mut stepped = scenario.clone();
    stepped.setup.step_once = true;
    let slow = verdict(&stepped)?;
    let pairs = fast.outcomes.iter().zip(&slow.outcomes);
    if let Some((f, s)) = pairs.clone().find(|(f, s)| f != s) {
        return Err(format!("fast {f:?}\n    slow {s:?}"));
    }
    let json = |run: &baton_sim::metrics::Collector| serde_json::to_string(&run.result(("", ""), 1.0, 1)).unwrap();
    if json(&fast) == json(&slow) { Ok(()) } else { Err("their results differ beyond outcomes".into()) }
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
    std::env::var("BATON_SEEDS").map_or(25, |v| v.parse().expect("a number"))
}

#[test]
fn stepping_equals_fast_forwarding() {
    sweep(Scenario::quiet, 5_000..5_000 + seeds());
}

#[test]
fn stepping_equals_fast_forwarding_under_faults() {
    sweep(Scenario::with_faults, 6_000..6_000 + seeds());
}
