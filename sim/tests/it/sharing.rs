//! Many requests that begin alike. KV that they share takes room once, so the cluster admits them
//! together, and every admitted request meets its objectives.

use std::sync::Arc;

use baton_scheduler::SchedulerConfig;
use baton_sim::metrics::{Outcome, Status};
use baton_sim::workload::Arrival;
use baton_sim::{RunResult, Setup, World, profiles};
use baton_types::RequestObjectives;

use super::written::RecordedArrivals;

/// Tokens in a block.
const BLOCK: u64 = 512;

fn arrival(at_us: u64, ids: Vec<u64>, output_tokens: u32) -> Arrival {
    let prompt_tokens = ids.len() as u64 * BLOCK;
    Arrival {
        at_us,
        prompt_tokens,
        output_tokens,
        ids,
        class: 0,
        objectives: RequestObjectives::default(),
        tenant: 0,
        cancel_after_us: None,
    }
}

/// Questions of two blocks on one document of a hundred thousand tokens, one every `gap_us`.
fn crowd(count: u64, gap_us: u64, output_tokens: u32) -> Vec<Arrival> {
    let question = |n: u64| {
        let own = [(n + 1) << 20, (n + 1) << 20 | 1];
        let ids = (0..195).chain(own).collect();
        arrival(n * gap_us, ids, output_tokens)
    };
    (0..count).map(question).collect()
}

/// Sessions of some agents: each kind has a long prompt of its own, each turn is a few blocks longer than the last.
fn agents(sessions: u64, turns: u64) -> Vec<Arrival> {
    let mut all = Vec::new();
    for session in 0..sessions {
        let kind = session % 4;
        for turn in 0..turns {
            let mut ids: Vec<u64> = (0..120).map(|b| kind << 40 | b).collect();
            ids.extend((0..6 * (turn + 1)).map(|b| (session + 1) << 20 | b));
            all.push(arrival(session * 150_000 + turn * 12_000_000, ids, 150));
        }
    }
    all.sort_by_key(|a| a.at_us);
    all
}

/// The default configuration over so many instances, audited now and then.
fn setup(prefills: u32, decodes: u32) -> Setup {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let mut setup = Setup::disaggregated(prefills, decodes, &profile, SchedulerConfig::default());
    (setup.audit_every, setup.keep_outcomes) = (50, true);
    setup
}

fn play(setup: &Setup, arrivals: &[Arrival]) -> (Vec<Outcome>, RunResult) {
    let workload = RecordedArrivals(arrivals.iter().cloned().collect());
    let mut world = World::new(setup.clone(), Box::new(workload)).unwrap();
    world.run().unwrap();
    let run = world.into_metrics();
    let mut outcomes = run.outcomes.clone();
    outcomes.sort_by_key(|o| o.first_offer_us);
    (outcomes, run.result(("", ""), 1.0, 1))
}

/// Checks that no request is refused for lack of room, and that no node's memory overflows. Every
/// admitted request must complete within its TTFT and TBT objectives.
fn nobody_lacks_room(setup: &Setup, arrivals: &[Arrival]) -> RunResult {
    let (outcomes, run) = play(setup, arrivals);
    assert!(
        run.refusals_by_reason.iter().all(|(reason, _)| *reason != "room"),
        "{:?}",
        run.refusals_by_reason
    );
    assert_eq!((run.failed, run.cancelled, run.preemptions), (0, 0, 0));
    let done = || outcomes.iter().filter(|o| o.status == Status::Completed);
    let count = done().count();
    assert!(
        count * 2 > arrivals.len(),
        "{count} of {} were served: {:?}",
        arrivals.len(),
        run.refusals_by_reason
    );
    let class = &setup.scheduler.classes[0];
    let late = done().filter(|o| o.ttft_us > class.ttft_us).count();
    let slow = done().filter(|o| o.gaps.mean_us > class.tbt_us).count();
    assert_eq!((late, slow), (0, 0), "of {count}");
    run
}

/// Checks as [`nobody_lacks_room`] does, and that no request is refused for any reason.
fn all_served(setup: &Setup, arrivals: &[Arrival]) {
    assert_eq!(nobody_lacks_room(setup, arrivals).refusals_by_reason, []);
}

/// The crowd, with a minute between its first question about the document and the others.
fn later(mut crowd: Vec<Arrival>) -> Vec<Arrival> {
    crowd.iter_mut().skip(1).for_each(|a| a.at_us += 60_000_000);
    crowd
}

#[test]
fn a_crowd_on_one_document_has_room_where_it_fits_when_shared() {
    nobody_lacks_room(&setup(8, 8), &later(crowd(300, 20_000, 600)));
}

#[test]
fn a_small_cluster_has_room_for_a_crowd_on_one_document() {
    // Steps let in 29 of any number: the least margin keeps two out that would have been in time.
    nobody_lacks_room(&setup(2, 1), &later(crowd(56, 100_000, 600)));
}

#[test]
fn a_crowd_on_one_document_is_let_in_where_it_fits_when_shared() {
    all_served(&setup(8, 8), &crowd(200, 20_000, 200));
}

#[test]
fn a_crowd_on_one_document_is_let_in_by_a_small_cluster() {
    all_served(&setup(2, 1), &crowd(25, 250_000, 200));
}

#[test]
fn agents_with_long_prompts_in_common_are_let_in() {
    all_served(&setup(13, 3), &agents(80, 3));
}
