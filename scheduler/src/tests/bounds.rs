//! Settings outside their bounds, and absurd numbers in messages.

use alloc::boxed::Box;
use alloc::vec::Vec;
use baton_types::{
    BlockHash, CacheChange, CacheEvent, ClassId, Epoch, InstanceId, RequestId, RequestObjectives, Role,
    SloClass, TenantId, Tier,
};
use proptest::prelude::*;

use crate::index::PrefixIndex;
use crate::testing::{burden, conductor, finished, hold, offer, peer_sent, plain, request, spec, step};
use crate::{
    AdmissionMode, Conductor, FetchPlan, Input, InstanceSpec, PeerPlacement, PeerStage, PolicyName, Request,
    SchedulerConfig,
};

/// Asserts that every value of the setting but those in `good` is refused by its name.
fn only(name: &str, good: &[u64], bad: &[u64], set: impl Fn(&mut SchedulerConfig, u64)) {
    let with = |value| {
        let mut config = SchedulerConfig::default();
        set(&mut config, value);
        config.validate()
    };
    for value in good {
        assert_eq!(with(*value), Ok(()), "{name} = {value}");
        let mut config = SchedulerConfig::default();
        set(&mut config, *value);
        assert!(Conductor::new(config).is_ok(), "{name} = {value}");
    }
    for value in bad {
        let error = with(*value).expect_err(name);
        assert!(error.0.contains(name) && error.0.contains(".."), "{error}");
    }
}

fn narrow(value: u64) -> u32 {
    u32::try_from(value).expect("a test value")
}

#[test]
fn every_setting_has_its_bounds_and_is_named_when_it_breaks_them() {
    only("block_tokens", &[1, 65_536], &[0, 65_537], |c, v| c.block_tokens = narrow(v));
    only("balancing_threshold_permille", &[1000, 1_000_000], &[0, 999, 1_000_001], |c, v| {
        c.balancing_threshold_permille = narrow(v);
    });
    only("mixed_step_permille", &[100, 1000], &[99, 1001], |c, v| c.mixed_step_permille = narrow(v));
    only("max_waiting_requests", &[1, 10_000_000], &[0, 10_000_001], |c, v| {
        c.max_waiting_requests = narrow(v)
    });
    only("decode_duration_us", &[0, 86_400_000_000], &[u64::MAX], |c, v| c.decode_duration_us = v);
    only("prior_output_tokens", &[1, 1_000_000], &[0, 1_000_001], |c, v| c.prior_output_tokens = narrow(v));
    only("queue_threshold_permille", &[1, 1_000_000], &[0, 1_000_001], |c, v| {
        c.queue_threshold_permille = narrow(v)
    });
    only("max_retries", &[0, 16], &[17], |c, v| c.max_retries = narrow(v));
}

#[test]
fn every_setting_of_a_class_has_its_bounds() {
    only("classes[default].ttft_us", &[1000, 86_400_000_000], &[0, u64::MAX], |c, v| {
        c.classes[0].ttft_us = v
    });
    only("classes[default].tbt_us", &[100, 3_600_000_000], &[99, u64::MAX], |c, v| c.classes[0].tbt_us = v);
    only("classes[default].weight", &[1, 1_000_000], &[0, 1_000_001], |c, v| c.classes[0].weight = narrow(v));
    only("classes[default].target_permille", &[500, 999], &[499, 1000], |c, v| {
        c.classes[0].target_permille = narrow(v)
    });
    only("classes[default].headroom_permille", &[0, 999], &[1000], |c, v| {
        c.classes[0].headroom_permille = narrow(v)
    });
    only("classes (count)", &[1, 1024], &[0, 1025], |c, v| {
        c.classes = (0..v).map(|_| SloClass::default()).collect();
    });
}

#[test]
fn a_config_survives_its_own_file_format_and_refuses_unknown_words() {
    let config = SchedulerConfig {
        policy: PolicyName::DynamoWspt,
        admission: AdmissionMode::EarlyPredict,
        shadow: Vec::from([AdmissionMode::Slo]),
        ..SchedulerConfig::default()
    };
    let text = serde_json::to_string(&config).expect("plain data");
    assert_eq!(serde_json::from_str::<SchedulerConfig>(&text).expect("its own text"), config);
    assert!(serde_json::from_str::<SchedulerConfig>(r#"{"polcy": "baton"}"#).is_err());
    assert!(serde_json::from_str::<SchedulerConfig>(r#"{"policy": "batton"}"#).is_err());
    let partial: SchedulerConfig =
        serde_json::from_str(r#"{"policy": "mooncake"}"#).expect("the rest has defaults");
    assert_eq!(partial, SchedulerConfig { policy: PolicyName::Mooncake, ..SchedulerConfig::default() });
    for policy in PolicyName::ALL {
        assert_eq!(serde_json::to_string(&policy).expect("a word"), alloc::format!("\"{}\"", policy.name()));
    }
}

#[test]
fn an_instance_beyond_the_dense_range_is_not_taken_in() {
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Slo), 1, 1);
    for id in [crate::index::MAX_INSTANCES, u32::MAX] {
        assert!(step(&mut conductor, 0, Input::InstanceJoined(spec(id, Role::Prefill))).is_empty());
    }
    assert_eq!(conductor.stats().stale_inputs, 2);
    assert_eq!(conductor.snapshot().instances.len(), 2);
}

#[test]
fn instances_that_say_nonsense_of_themselves_are_slow_and_not_fatal() {
    let odd = InstanceSpec {
        pass_tokens: 0,
        pipeline_nodes: 0,
        net_bytes_per_s: 0,
        host_bytes_per_s: 0,
        ssd_bytes_per_s: 0,
        ..spec(0, Role::Prefill)
    };
    let fleet =
        [odd.clone(), InstanceSpec { id: InstanceId(1), role: Role::Decode, ..odd }, spec(2, Role::Prefill)];
    for policy in PolicyName::ALL {
        let mut conductor = crate::testing::conductor_of(plain(policy, AdmissionMode::Auto), &fleet);
        for tier in Tier::LOCAL {
            crate::testing::hold(&mut conductor, 0, &crate::testing::shared_chain(6), tier);
        }
        for id in 0..5 {
            offer(&mut conductor, 0, request(id, 4_000, 7));
        }
        assert_eq!(conductor.stats().arrived, 5);
    }
}

/// Numbers at the edges.
fn edge() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(511),
        Just(512),
        Just(100_000),
        Just(u64::from(u32::MAX)),
        Just(u64::MAX),
        any::<u64>()
    ]
}

#[expect(clippy::cast_possible_truncation, reason = "any number will do")]
const fn low(value: u64) -> u32 {
    value as u32
}

/// An input made of arbitrary numbers about a few ids.
fn input(kind: u8, n: [u64; 4]) -> Input {
    let request = RequestId(n[0] % 4);
    let instance = InstanceId(low(n[1]) % 5);
    match kind {
        0 | 1 => Input::RequestArrived(Request {
            id: request,
            class: ClassId(low(n[1]) as u16),
            objectives: RequestObjectives {
                ttft_us: n[0].is_multiple_of(3).then_some(n[2]),
                tbt_us: n[0].is_multiple_of(5).then_some(n[1]),
            },
            tenant: TenantId(low(n[2])),
            prompt_tokens: n[3],
            chain: (0..n[2] % 9).map(BlockHash).collect(),
            max_output_tokens: n[3].is_multiple_of(3).then_some(low(n[1])),
            emitted_tokens: low(n[1]),
            known_output_tokens: n[2].is_multiple_of(2).then_some(low(n[3])),
            known_work_bound_us: n[1].is_multiple_of(5).then_some(n[2]),
            asked_output_tokens: n[0].is_multiple_of(2).then_some(low(n[3])),
            let_in: n[2].is_multiple_of(3),
        }),
        2 => Input::PrefillFinished { request, compute_us: n[1], cached_tokens: n[2] },
        3 => Input::HandoffFinished { request },
        4 => Input::HandoffFailed { request },
        5 => Input::FetchFinished { request, ok: n[1].is_multiple_of(2) },
        6 => Input::DecodeFinished { request, output_tokens: low(n[1]), first_us: n[1], tbt_us: 0 },
        7 => Input::TokensEmitted { request, emitted_tokens: low(n[2]) },
        8 => {
            let objectives =
                RequestObjectives { ttft_us: n[3].is_multiple_of(3).then_some(n[2]), tbt_us: None };
            let id = RequestId(2 + n[0] % 6);
            let request = Request { id, objectives, prompt_tokens: n[1], ..Request::default() };
            let at = (instance, InstanceId(low(n[2]) % 5));
            let stage = match n[3] % 5 {
                0 | 1 => PeerStage::Waiting {
                    held_until_us: n[2] / 3,
                    order_us: n[1],
                    after: Some(RequestId(2 + n[3] % 6)),
                },
                2 => PeerStage::Prefilled,
                _ => PeerStage::Sent { order: n[1] },
            };
            let fetch = n[2]
                .is_multiple_of(2)
                .then_some(FetchPlan { from: InstanceId(low(n[1]) % 6), blocks: low(n[2]) });
            let (arrived_us, promised_us, decode_at_us) = (n[1], n[2], n[0]);
            let said = peer_sent(request, at, n[3]);
            Input::PeerPlaced(Box::new(PeerPlacement {
                stage,
                fetch,
                arrived_us,
                promised_us,
                decode_at_us,
                ..said
            }))
        }
        9 => Input::InstanceLost { instance, epoch: Epoch(low(n[2]) % 3) },
        10 => Input::InstanceJoined(InstanceSpec {
            epoch: Epoch(low(n[2])),
            ..spec(instance.0, if n[3].is_multiple_of(2) { Role::Prefill } else { Role::Decode })
        }),
        11 => Input::Cache(CacheEvent {
            instance,
            epoch: Epoch(1),
            change: CacheChange::Stored {
                parent: Some(BlockHash(n[2])),
                hashes: (0..n[3] % 9).map(BlockHash).collect(),
                tier: Tier::LOCAL[(n[2] % 3) as usize],
            },
        }),
        12 => Input::ReplicateFinished { to: instance },
        13 => Input::Preempted { request, emitted_tokens: low(n[1]) },
        15 => Input::PeerDisplaced { request: RequestId(n[0] % 8) },
        14 => Input::RoomOutgrown { request, emitted_tokens: low(n[1]) },
        16 => Input::LegRefused { request, instance, emitted_tokens: low(n[1]), busy_us: n[2] },
        _ => Input::TimerFired,
    }
}

#[test]
fn blocks_beyond_the_memory_of_the_index_are_counted() {
    let mut conductor = conductor(SchedulerConfig::default(), 1, 1);
    conductor.index = PrefixIndex::with_capacity_bytes(2 << 20);
    let chain: Vec<BlockHash> = (0..500_000).map(BlockHash).collect();
    hold(&mut conductor, 0, &chain, Tier::Hbm);
    let (held, refused) =
        (conductor.index.held_blocks(InstanceId(0)) as u64, conductor.stats().index_refused_blocks);
    assert!(held > 0 && refused > 0, "{held} held, {refused} refused");
    assert_eq!(held + refused, 500_000);
    hold(&mut conductor, 0, &chain[..10], Tier::Hbm);
    assert_eq!(conductor.stats().index_refused_blocks, refused, "it has these");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// `step` is total: no number in any message stops the conductor or breaks its ledgers.
    #[test]
    fn no_number_in_any_message_stops_the_conductor(
        script in proptest::collection::vec((0u8..18, [edge(), edge(), edge(), edge()], 0u64..1 << 40), 1..60),
        policy in 0..PolicyName::ALL.len(),
    ) {
        let config = SchedulerConfig { explain_every: 1, ..plain(PolicyName::ALL[policy], AdmissionMode::Auto) };
        let mut conductor = conductor(SchedulerConfig { local_prefill: true, ..config }, 2, 2);
        burden(&mut conductor, request(900, 1, 0), (0, 2), 100_000);
        for (kind, numbers, now_us) in script {
            step(&mut conductor, now_us, input(kind, numbers));
        }
        for load in conductor.snapshot().instances {
            prop_assert!(load.running <= load.decodes);
        }
    }
}

/// A regression: a damaged journal may hold any time, and predictions added to it overflowed.
#[test]
fn a_time_that_no_clock_shows_is_bounded() {
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Slo), 1, 1);
    for id in 0..3 {
        offer(&mut conductor, u64::MAX - id, request(id, 30_000, 0));
    }
    assert_eq!(conductor.live_requests(), 3);
    step(&mut conductor, u64::MAX, finished(0));
    assert!(conductor.next_deadline().is_none_or(|at_us| at_us < u64::MAX));
    let saved = serde_json::to_string(&conductor.save()).expect("JSON");
    let beyond = saved.replacen("1152921504606846976", "1152921504606846977", 1);
    let restored = Conductor::restore(serde_json::from_str(&beyond).expect("JSON"));
    assert!(restored.is_err_and(|e| e.0.contains("no clock")));
}
