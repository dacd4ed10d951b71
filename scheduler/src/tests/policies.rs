//! The other policies, each by its own published rule.

use alloc::vec::Vec;
use baton_types::{Role, Tier};
use proptest::prelude::*;

use crate::testing::{
    BLOCK, burden, conductor, conductor_of, decoding, finished, foretold, hold, offer, plain, rejection,
    request, shared_chain, spec, started, starts, step,
};
use crate::{AdmissionMode, Conductor, InstanceSpec, PolicyName, Request, SchedulerConfig};

fn under(policy: PolicyName, prefills: u32) -> Conductor {
    conductor(plain(policy, AdmissionMode::None), prefills, 1)
}

/// Where each of `count` requests prefills.
fn placements(conductor: &mut Conductor, count: u64) -> Vec<u32> {
    (0..count).map(|id| started(&offer(conductor, 0, request(id, 10, 0))).prefill).collect()
}

#[test]
fn round_robin_takes_turns() {
    assert_eq!(placements(&mut under(PolicyName::RoundRobin, 3), 7), [0, 1, 2, 0, 1, 2, 0]);
}

#[test]
fn round_robin_goes_on_with_the_instances_that_are_left() {
    let mut conductor = under(PolicyName::RoundRobin, 3);
    placements(&mut conductor, 1);
    let drained = crate::Input::InstanceDrained { instance: baton_types::InstanceId(1) };
    step(&mut conductor, 0, drained);
    let next: Vec<u32> =
        (10..14).map(|id| started(&offer(&mut conductor, 0, request(id, 10, 0))).prefill).collect();
    assert!(next.iter().all(|at| *at != 1) && next[0] != next[1] && next[1] != next[2], "{next:?}");
}

#[test]
fn random_is_even_and_repeats_with_its_seed() {
    let draw = |seed| {
        let config = SchedulerConfig { seed, ..plain(PolicyName::Random, AdmissionMode::None) };
        placements(&mut conductor(config, 4, 1), 2_000)
    };
    let one = draw(7);
    assert_eq!(one, draw(7));
    assert_ne!(one, draw(8));
    for instance in 0..4 {
        let share = one.iter().filter(|at| **at == instance).count();
        // 500 expected, the standard deviation is 19.
        assert!((400..600).contains(&share), "instance {instance}: {share}");
    }
}

/// The load that the router has sent to one instance, by the published formulas.
#[derive(Clone, Copy, Debug, Default)]
struct SentLoad {
    blocks_held: u64,
    active_tokens: u64,
    batch: u64,
}

/// Offers prompts one after the other and compares with the naive score.
fn compare(policy: PolicyName, holds: &[u64], prompts: &[u64], score: impl Fn(&SentLoad, u64, u64) -> f64) {
    let mut conductor = under(policy, u32::try_from(holds.len()).expect("few"));
    let mut sent = Vec::new();
    for (id, blocks) in (0u32..).zip(holds) {
        hold(&mut conductor, id, &shared_chain(*blocks), Tier::Hbm);
        sent.push(SentLoad { blocks_held: *blocks, ..SentLoad::default() });
    }
    for (id, prompt) in (0u64..).zip(prompts) {
        let start = started(&offer(&mut conductor, 0, request(id, *prompt, u64::MAX)));
        let cached = |s: &SentLoad| (s.blocks_held * BLOCK).min(prompt - 1);
        let naive = |s: &SentLoad| score(s, *prompt, cached(s));
        let chosen = start.prefill as usize;
        let least = sent.iter().map(naive).fold(f64::INFINITY, f64::min);
        assert!(naive(&sent[chosen]) <= least + 1e-9, "{chosen} of {sent:?} for {prompt}");
        assert_eq!(start.fetch, None, "the peer does not fetch");
        let new_tokens = prompt - cached(&sent[chosen]);
        sent[chosen].active_tokens += new_tokens;
        sent[chosen].batch += 1;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    /// Blocks to prefill, those in progress included, less those cached.
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    #[test]
    fn dynamo_minimises_blocks_to_prefill(
        holds in proptest::collection::vec(0u64..30, 1..6), prompts in proptest::collection::vec(1u64..15_000, 1..12),
    ) {
        compare(PolicyName::Dynamo, &holds, &prompts, |s, prompt, cached| {
            (s.active_tokens + prompt - cached) as f64 / BLOCK as f64
        });
    }

    /// New prefill tokens times batch size.
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    #[test]
    fn lmetric_minimises_the_product(
        holds in proptest::collection::vec(0u64..30, 1..6), prompts in proptest::collection::vec(1u64..15_000, 1..12),
    ) {
        compare(PolicyName::Lmetric, &holds, &prompts, |s, prompt, cached| {
            ((s.active_tokens + prompt - cached) * (s.batch + 1)) as f64
        });
    }
}

#[test]
fn where_an_engine_decodes_too_dynamo_counts_its_decode_blocks() {
    let both = |id| spec(id, Role::Both);
    let mut conductor = conductor_of(plain(PolicyName::Dynamo, AdmissionMode::None), &[both(0), both(1)]);
    decoding(&mut conductor, foretold(900, 20_000, 1_000), 0);
    for id in 0..3 {
        let start = started(&offer(&mut conductor, 0, foretold(id, 1_000, 10)));
        assert_eq!(start.prefill, 1, "40 blocks decode on the other");
    }
}

#[test]
fn dynamo_breaks_ties_at_random() {
    let mut seen = [0u32; 4];
    for seed in 0..200 {
        let config = SchedulerConfig { seed, ..plain(PolicyName::Dynamo, AdmissionMode::None) };
        let mut conductor = conductor(config, 4, 1);
        seen[started(&offer(&mut conductor, 0, request(1, 100, 0))).prefill as usize] += 1;
    }
    // 50 expected, the standard deviation is 6.
    assert!(seen.iter().all(|count| (25..80).contains(count)), "{seen:?}");
}

/// One prefill instance of 1,000 tokens a pass behind the router queue.
fn queued(threshold_permille: u32) -> Conductor {
    let config = SchedulerConfig {
        queue_threshold_permille: threshold_permille,
        ..plain(PolicyName::DynamoWspt, AdmissionMode::None)
    };
    conductor_of(
        config,
        &[InstanceSpec { pass_tokens: 1_000, ..spec(0, Role::Prefill) }, spec(1, Role::Decode)],
    )
}

#[test]
fn the_router_queue_gives_out_the_least_uncached_work_first() {
    let mut conductor = queued(1_000);
    hold(&mut conductor, 0, &shared_chain(20), Tier::Hbm);
    started(&offer(&mut conductor, 0, request(1, 5_000, 0)));
    for (id, tokens, shared) in [(2, 3_000, 0), (3, 900, 0), (4, 20 * BLOCK + 50, 20), (5, 1_500, 0)] {
        assert!(offer(&mut conductor, 0, request(id, tokens, shared)).is_empty(), "every instance is busy");
    }
    let order = |effects: &[crate::Effect]| starts(effects).iter().map(|s| s.request).collect::<Vec<u64>>();
    // 50, then 900, then 1,500 tokens: now more than a pass is active, and the longest still waits.
    assert_eq!(order(&step(&mut conductor, 0, finished(1))), [4, 3, 5]);
    assert_eq!(order(&step(&mut conductor, 0, finished(5))), [2]);
}

#[test]
fn the_router_queue_opens_at_its_threshold() {
    // 800 of 1,000 tokens are active: busy at a threshold of 0.5, free at 1.
    for (permille, opens) in [(500, false), (1_000, true)] {
        let mut conductor = queued(permille);
        started(&offer(&mut conductor, 0, request(1, 800, 0)));
        assert_eq!(!starts(&offer(&mut conductor, 0, request(2, 300, 0))).is_empty(), opens, "{permille}");
    }
}

#[test]
fn a_queued_request_can_be_cancelled_and_counts_against_the_bound() {
    let config =
        SchedulerConfig { max_waiting_requests: 2, ..plain(PolicyName::DynamoWspt, AdmissionMode::None) };
    let mut conductor = conductor(config, 1, 1);
    started(&offer(&mut conductor, 0, request(1, 20_000, 0)));
    assert!(offer(&mut conductor, 0, request(2, 100, 0)).is_empty());
    assert!(rejection(&offer(&mut conductor, 0, request(3, 100, 0))).is_some());
    let cancel = |id| crate::Input::RequestCancelled { request: baton_types::RequestId(id) };
    assert!(step(&mut conductor, 0, cancel(2)).is_empty());
    assert!(starts(&step(&mut conductor, 0, finished(1))).is_empty(), "nothing is left to start");
}

#[test]
fn decodes_are_spread_by_load_under_every_policy() {
    for policy in PolicyName::ALL {
        let mut conductor = conductor(plain(policy, AdmissionMode::Auto), 1, 2);
        decoding(&mut conductor, foretold(900, 30_000, 5_000), 1);
        let start = started(&offer(&mut conductor, 0, foretold(1, 100, 10)));
        assert_eq!(start.decode, 2, "{policy:?}");
    }
}

#[test]
fn a_policy_without_the_cache_in_mind_ignores_it() {
    for policy in [PolicyName::LeastLoaded, PolicyName::RoundRobin] {
        let mut conductor = under(policy, 2);
        hold(&mut conductor, 1, &shared_chain(20), Tier::Hbm);
        assert_eq!(started(&offer(&mut conductor, 0, request(1, 21 * BLOCK, 20))).prefill, 0, "{policy:?}");
    }
    for policy in [
        PolicyName::LocalCache,
        PolicyName::Mooncake,
        PolicyName::Dynamo,
        PolicyName::Lmetric,
        PolicyName::Baton,
    ] {
        let mut conductor = under(policy, 2);
        hold(&mut conductor, 1, &shared_chain(20), Tier::Hbm);
        assert_eq!(started(&offer(&mut conductor, 0, request(1, 21 * BLOCK, 20))).prefill, 1, "{policy:?}");
    }
}

#[test]
fn the_informed_policy_refuses_what_costs_more_than_it_is_worth() {
    let mut conductor = conductor(plain(PolicyName::BatonInformed, AdmissionMode::Auto), 1, 1);
    let worth = |id, bound_us| Request { known_work_bound_us: Some(bound_us), ..foretold(id, 1_000, 10) };
    let refused = rejection(&offer(&mut conductor, 0, worth(1, 50_000))).expect("100 ms of work");
    assert_eq!(refused.reason, crate::RejectReason::Costly);
    assert!(refused.retry_after_us > 0);
    assert_eq!(started(&offer(&mut conductor, 0, worth(2, 150_000))).request, 2);
}

#[test]
fn what_was_measured_corrects_what_is_predicted() {
    let mut conductor = under(PolicyName::LocalCache, 2);
    // Instance 0 turns out three times slower than its profile says.
    for id in 0..60 {
        let start = started(&offer(&mut conductor, 0, request(id, 5_000, 0)));
        let slow = if start.prefill == 0 { 3 } else { 1 };
        let compute_us = slow * crate::testing::naive_prefill_us(5_000);
        let request = baton_types::RequestId(id);
        step(&mut conductor, 0, crate::Input::PrefillFinished { request, compute_us, cached_tokens: 0 });
    }
    burden(&mut conductor, request(900, 1, 0), (1, 2), 200_000);
    // 0.5 s of work: by profile instance 0 is sooner, by experience instance 1 with 0.2 s ahead is.
    assert_eq!(started(&offer(&mut conductor, 0, request(100, 5_000, 0))).prefill, 1);
    let errors = conductor.prefill_errors();
    assert!(errors[0].1 > 0.02 && errors[1].1 < 0.01, "{errors:?}");
}
