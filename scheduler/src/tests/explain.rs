//! Decision records: the numbers of a placement or a refusal add up.

use alloc::vec::Vec;
use baton_types::{InstanceId, Role, Tier};
use proptest::prelude::*;

use crate::testing::{
    BLOCK, burden, conductor, hold, offer, plain, rejection, request, shared_chain, starts,
};
use crate::{AdmissionMode, Decision, Effect, PolicyName, RejectReason, SchedulerConfig};

fn decisions(effects: &[Effect]) -> Vec<Decision> {
    effects.iter().filter_map(|e| if let Effect::Explain(d) = e { Some(d.clone()) } else { None }).collect()
}

fn explaining(policy: PolicyName, every: u32) -> SchedulerConfig {
    SchedulerConfig { explain_every: every, ..plain(policy, AdmissionMode::Auto) }
}

#[test]
fn one_decision_in_so_many_is_recorded() {
    for (every, expected) in [(0, 0), (1, 12), (3, 4), (5, 2)] {
        let mut conductor = conductor(explaining(PolicyName::Baton, every), 2, 1);
        let recorded: usize =
            (0..12).map(|id| decisions(&offer(&mut conductor, 0, request(id, 100, 0))).len()).sum();
        assert_eq!(recorded, expected, "1 in {every}");
    }
}

#[test]
fn a_refusal_is_explained_with_every_candidate() {
    let mut conductor = conductor(explaining(PolicyName::Baton, 1), 3, 1);
    for id in 0..3 {
        burden(&mut conductor, request(900 + u64::from(id), 1, 0), (id, 3), 40_000_000 + u64::from(id));
    }
    let effects = offer(&mut conductor, 7, request(1, 1000, 0));
    let [decision] = decisions(&effects).try_into().expect("one record");
    assert_eq!(rejection(&effects).map(|r| r.reason), Some(RejectReason::Ttft));
    assert_eq!((decision.request.0, decision.at_us, decision.chosen), (1, 7, None));
    assert!(decision.candidates.iter().all(|c| !c.feasible && c.queue_us > 30_000_000));
    assert_eq!(decision.candidates.len(), 3);
}

#[test]
fn a_decode_that_refuses_makes_the_candidate_infeasible() {
    let mut conductor = conductor(explaining(PolicyName::Baton, 1), 1, 1);
    crate::testing::decoding(&mut conductor, crate::testing::foretold(900, 90_000, 9_000), 1);
    let effects = offer(&mut conductor, 0, request(1, 20_000, 0));
    assert_eq!(rejection(&effects).map(|r| r.reason), Some(RejectReason::Room));
    assert!(!decisions(&effects)[0].candidates[0].feasible);
}

#[test]
fn local_candidates_are_listed_too() {
    let config = SchedulerConfig { local_prefill: true, ..explaining(PolicyName::Baton, 1) };
    let mut conductor = conductor(config, 2, 2);
    let record = &decisions(&offer(&mut conductor, 0, request(1, 100, 0)))[0];
    let ids: Vec<u32> = record.candidates.iter().map(|c| c.instance.0).collect();
    assert_eq!(ids, [0, 1, 2, 3]);
}

#[test]
fn the_record_names_the_holder_that_blocks_would_come_from() {
    let mut conductor = conductor(explaining(PolicyName::Baton, 1), 2, 1);
    hold(&mut conductor, 1, &shared_chain(10), Tier::Hbm);
    let record = &decisions(&offer(&mut conductor, 0, request(1, 11 * BLOCK, 10)))[0];
    let fetching: Vec<Option<InstanceId>> = record.candidates.iter().map(|c| c.fetch_from).collect();
    assert_eq!(fetching, [Some(InstanceId(1)), None]);
    assert!(record.candidates.iter().all(|c| c.cached_tokens == 10 * BLOCK));
    assert_eq!(record.chosen, Some(InstanceId(1)));
}

#[test]
fn a_record_is_given_with_its_own_decision() {
    // A placement after a loss is a decision too; its record comes at once.
    let mut conductor = conductor(explaining(PolicyName::Baton, 2), 2, 2);
    offer(&mut conductor, 0, request(1, 1000, 0));
    offer(&mut conductor, 0, request(2, 1000, 0));
    let lost = crate::Input::InstanceLost { instance: InstanceId(0), epoch: baton_types::Epoch(1) };
    crate::testing::step(&mut conductor, 5, lost);
    let later = decisions(&offer(&mut conductor, 90, request(3, 1000, 0)));
    assert!(later.iter().all(|d| d.at_us == 90), "{later:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_terms_add_up_and_the_winner_has_the_least_score(
        loads in proptest::collection::vec((0u64..40_000_000, 0u64..20), 1..6), prompt in 1u64..12_000, policy in 0usize..5,
    ) {
        let policies =
            [PolicyName::Baton, PolicyName::Mooncake, PolicyName::Lmetric, PolicyName::LocalCache, PolicyName::Dynamo];
        let prefills = u32::try_from(loads.len()).expect("few");
        let mut conductor = conductor(explaining(policies[policy], 1), prefills, 1);
        for (id, (work_us, blocks)) in (0u32..).zip(&loads) {
            burden(&mut conductor, request(900 + u64::from(id), 1, 0), (id, prefills), *work_us);
            hold(&mut conductor, id, &shared_chain(*blocks), Tier::Hbm);
        }
        let effects = offer(&mut conductor, 0, request(1, prompt, 20));
        let record = &decisions(&effects)[0];
        let ids: Vec<u32> = record.candidates.iter().map(|c| c.instance.0).collect();
        prop_assert_eq!(ids, (0..prefills).collect::<Vec<u32>>(), "every candidate, in order");
        for (c, (work_us, _)) in record.candidates.iter().zip(&loads) {
            let parts_us = c.queue_us.max(c.load_us.unwrap()) + c.compute_us.unwrap();
            let ttft_us = c.ttft_us.unwrap();
            prop_assert!(ttft_us >= parts_us && ttft_us <= parts_us + 20_000, "and a step of the decode: {c:?}");
            prop_assert_eq!(c.queue_us, *work_us);
            prop_assert!(c.cached_tokens < prompt && c.score.is_some_and(f64::is_finite));
        }
        let baton = policies[policy] == PolicyName::Baton;
        if let Some(chosen) = record.chosen {
            let winner = record.candidates[chosen.index()];
            prop_assert!(winner.feasible || !baton);
            let rivals = record.candidates.iter().filter(|c| c.feasible || !baton);
            prop_assert!(rivals.clone().all(|c| c.score >= winner.score), "{record:?}");
            let starts = starts(&effects);
            prop_assert!(starts.iter().all(|s| s.prefill == chosen.0));
        } else {
            prop_assert!(record.candidates.iter().all(|c| !c.feasible));
            prop_assert!(rejection(&effects).is_some());
        }
    }
}

#[test]
fn roles_beside_the_pair_are_not_candidates() {
    let mut conductor = crate::testing::conductor_of(
        explaining(PolicyName::Baton, 1),
        &[
            crate::testing::spec(0, Role::Store),
            crate::testing::spec(1, Role::Prefill),
            crate::testing::spec(2, Role::Decode),
        ],
    );
    hold(&mut conductor, 0, &shared_chain(10), Tier::Dram);
    let record = &decisions(&offer(&mut conductor, 0, request(1, 11 * BLOCK, 10)))[0];
    assert_eq!(record.candidates.len(), 1);
    assert_eq!(
        record.candidates[0].fetch_from,
        Some(InstanceId(0)),
        "a store computes nothing, but it lends"
    );
}
