//! Once every fault is healed, the cluster serves every request that it admits.

use baton_sim::metrics::Status;
use baton_sim::setup::NO_STAGE_LIMIT_US;

use crate::scenario::Scenario;
use crate::seeds::{number, verdict};

/// The last fault is over at this time.
fn healed_us(scenario: &Scenario) -> u64 {
    let span_ms = scenario.trace.span_ms();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let span_us = (span_ms * 1000.0 * (1.0 + 1.0 / scenario.trace.records.len() as f64)) as u64;
    let faults = baton_sim::faults::draw(&scenario.setup.faults, scenario.setup.instances(), span_us);
    faults.last().map_or(0, |(at_us, _)| *at_us)
}

fn check(scenario: &Scenario, late: &mut [usize; 5]) -> Result<(), String> {
    let run = verdict(scenario)?;
    let after_us = healed_us(scenario);
    for outcome in run.outcomes.iter().filter(|o| o.first_offer_us > after_us) {
        late[outcome.status as usize] += 1;
        if outcome.status == Status::Failed {
            return Err(format!("failed after all was healed at {after_us} µs: {outcome:?}"));
        }
    }
    Ok(())
}

fn sweep(deaths: u32, lost_links: u32) {
    let mut late = [0; 5];
    for seed in 8_000..8_000 + number("BATON_SEEDS", 25) {
        let mut scenario = Scenario::with_faults(seed);
        (scenario.setup.faults.deaths, scenario.setup.faults.lost_links) = (deaths, lost_links);
        scenario.setup.clients.leave_permille = 0;
        // A stage limit would end a lost request and so hide the loss.
        scenario.setup.stage_floor_us = NO_STAGE_LIMIT_US;
        scenario.setup.network.max_flights_per_link = 4096;
        check(&scenario, &mut late).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{}", scenario.describe()));
    }
    assert!(late[Status::Completed as usize] > 0, "nothing came after the faults: {late:?}");
}

#[test]
fn after_the_last_fault_nothing_fails() {
    sweep(4, 3);
}

#[test]
fn a_cluster_that_died_many_times_over_serves_again() {
    sweep(60, 0);
}

#[test]
fn a_network_that_was_down_everywhere_serves_again() {
    sweep(0, 40);
}
