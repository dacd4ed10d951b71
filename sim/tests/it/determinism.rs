//! Runs are deterministic: equal setup, seed and load give equal orders, outcomes and figures.

use baton_scheduler::PolicyName;
use baton_sim::{TraceWorkload, World};

use crate::scenario::Scenario;
use crate::stepping::{json, same_text};

fn run(scenario: &Scenario) -> (u64, String) {
    let workload = TraceWorkload::new(scenario.trace.clone(), 1.0);
    let mut world = World::new(scenario.setup.clone(), Box::new(workload)).unwrap();
    world.run().unwrap();
    (world.orders_digest(), json(&world.into_metrics()))
}

#[test]
fn a_run_repeats_itself_to_the_last_order() {
    for seed in 7_000..7_030 {
        let scenario = Scenario::with_faults(seed);
        let (first, second) = (run(&scenario), run(&scenario));
        assert_eq!(first.0, second.0, "seed {seed}: other orders");
        same_text(&first.1, &second.1).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert_ne!(first.0, 0);
    }
}

#[test]
fn another_seed_is_another_run_where_chance_decides() {
    let mut differ = 0;
    for seed in 7_100..7_110 {
        let mut scenario = Scenario::quiet(seed);
        scenario.setup.scheduler.policy = PolicyName::Random;
        let first = run(&scenario);
        scenario.setup.scheduler.seed += 1;
        differ += u32::from(run(&scenario).0 != first.0);
    }
    // On a single instance nothing is left to chance.
    assert!(differ >= 6, "only {differ} of 10 differ");
}
