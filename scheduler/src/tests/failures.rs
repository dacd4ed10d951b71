//! Failures at every stage: the pair is one object, and the end of one leg ends the other (I13). A lost request is
//! placed again up to a limit and then failed by name.

use alloc::vec::Vec;
use baton_types::{CacheChange, CacheEvent, Epoch, InstanceId, RequestId, Role, Tier};

use crate::testing::{
    BLOCK, Play, PrefillStart, assert_idle, burden, conductor, failure, finished, hold, offer, plain,
    releases, request, shared_chain, spec, started, starts, step,
};
use crate::{AdmissionMode, Conductor, Effect, FailStage, Input, InstanceSpec, PolicyName, SchedulerConfig};

const ONE: RequestId = RequestId(1);

/// Where the request is when something breaks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stop {
    Prefilling,
    HandingOff,
    Decoding,
}

const STOPS: [Stop; 3] = [Stop::Prefilling, Stop::HandingOff, Stop::Decoding];

fn config(max_retries: u32) -> SchedulerConfig {
    SchedulerConfig { max_retries, ..plain(PolicyName::Baton, AdmissionMode::Slo) }
}

/// Brings request 1 to a stop.
fn bring(conductor: &mut Conductor, stop: Stop) -> PrefillStart {
    let start = started(&offer(conductor, 0, request(1, 1000, 0)));
    if stop != Stop::Prefilling {
        assert!(step(conductor, 100_000, finished(1)).is_empty());
    }
    if stop == Stop::Decoding {
        let effects = step(conductor, 110_000, Input::HandoffFinished { request: ONE });
        assert_eq!(effects, [Effect::StartDecode { request: ONE, instance: InstanceId(start.decode) }]);
    }
    start
}

fn lose(conductor: &mut Conductor, instance: u32) -> Vec<Effect> {
    step(conductor, 120_000, Input::InstanceLost { instance: InstanceId(instance), epoch: Epoch(1) })
}

/// The legs that a request has at a stop.
fn legs(stop: Stop, start: PrefillStart) -> Vec<(u64, u32)> {
    match stop {
        Stop::Decoding => Vec::from([(1, start.decode)]),
        _ => Vec::from([(1, start.prefill), (1, start.decode)]),
    }
}

#[test]
fn a_lost_leg_ends_the_other_and_the_request_goes_elsewhere() {
    for stop in STOPS {
        for decode_side in [false, true] {
            if stop == Stop::Decoding && !decode_side {
                continue;
            }
            let mut conductor = conductor(config(2), 2, 2);
            let start = bring(&mut conductor, stop);
            let lost = if decode_side { start.decode } else { start.prefill };
            let effects = lose(&mut conductor, lost);
            let mut given_back = releases(&effects);
            given_back.sort_unstable();
            assert_eq!(given_back, legs(stop, start), "{stop:?}, decode side {decode_side}");
            let again = started(&effects);
            assert!(again.prefill != lost && again.decode != lost, "{stop:?} {again:?}");
            assert_eq!((conductor.stats().retried, conductor.stats().failed), (1, 0));
        }
    }
}

#[test]
fn a_decode_does_not_mind_the_loss_of_its_prefill_instance() {
    let mut conductor = conductor(config(2), 2, 2);
    let start = bring(&mut conductor, Stop::Decoding);
    assert!(lose(&mut conductor, start.prefill).is_empty(), "the KV has moved");
    let end = Input::DecodeFinished { request: ONE, output_tokens: 5, first_us: 0, tbt_us: 0 };
    assert!(step(&mut conductor, 900_000, end).is_empty());
    assert_eq!(conductor.stats().finished, 1);
}

#[test]
fn retries_are_bounded_and_the_failure_names_its_stage() {
    for most in 0..4 {
        // Each loss takes one of many prefill instances.
        let mut conductor = conductor(config(most), 6, 1);
        let mut start = bring(&mut conductor, Stop::Prefilling);
        for turn in 0..=most {
            let effects = lose(&mut conductor, start.prefill);
            if turn < most {
                start = started(&effects);
                continue;
            }
            let (id, stage) = failure(&effects).expect("one loss too many");
            assert_eq!((id, stage), (1, FailStage::PrefillLost));
            assert!(starts(&effects).is_empty());
        }
        assert!(!conductor.knows(ONE));
        assert_eq!((conductor.stats().retried, conductor.stats().failed), (u64::from(most), 1));
    }
}

#[test]
fn with_nowhere_left_to_go_a_request_fails_at_once() {
    for (prefills, decodes, decode_side) in [(1, 2, false), (2, 1, true)] {
        let mut conductor = conductor(config(5), prefills, decodes);
        let start = bring(&mut conductor, Stop::Prefilling);
        let effects = lose(&mut conductor, if decode_side { start.decode } else { start.prefill });
        assert!(failure(&effects).is_some() && starts(&effects).is_empty(), "{effects:?}");
        assert_eq!(releases(&effects).len(), 2);
        assert_idle(&conductor.snapshot());
    }
}

#[test]
fn what_only_waited_here_is_placed_again_without_a_word() {
    let mut conductor = conductor(config(0), 2, 1);
    burden(&mut conductor, request(900, 1, 0), (1, 2), 5_000_000);
    let held: Vec<PrefillStart> =
        (1..4).flat_map(|id| starts(&offer(&mut conductor, 0, request(id, 20_000, 0)))).collect();
    assert_eq!(held.len(), 1, "the others wait");
    let effects = lose(&mut conductor, 0);
    assert_eq!(failure(&effects).map(|(id, _)| id), Some(1), "only what was sent has used up its one try");
    assert_eq!(conductor.snapshot().instances[1].waiting, 2);
}

#[test]
fn a_failed_hand_off_goes_to_another_decode_and_then_fails() {
    let mut conductor = conductor(config(1), 1, 3);
    let start = bring(&mut conductor, Stop::HandingOff);
    let effects = step(&mut conductor, 120_000, Input::HandoffFailed { request: ONE });
    assert_eq!(releases(&effects), [(1, start.decode)], "the prefill side keeps the KV");
    let Some(&Effect::Handoff { request, from, to, room_tokens }) =
        effects.iter().find(|e| matches!(e, Effect::Handoff { .. }))
    else {
        panic!("{effects:?}")
    };
    assert_eq!((request, from.0), (ONE, start.prefill));
    assert!(to.0 != start.decode, "the one that failed has just proved itself unfit");
    assert!(room_tokens > 0);
    let effects = step(&mut conductor, 130_000, Input::HandoffFailed { request: ONE });
    let mut given_back = releases(&effects);
    given_back.sort_unstable();
    assert_eq!(given_back, [(1, start.prefill), (1, to.0)]);
    assert_eq!(failure(&effects), Some((1, FailStage::HandoffFailed)));
    assert_idle(&conductor.snapshot());
}

#[test]
fn a_second_hand_off_can_succeed() {
    let mut conductor = conductor(config(1), 1, 2);
    bring(&mut conductor, Stop::HandingOff);
    step(&mut conductor, 120_000, Input::HandoffFailed { request: ONE });
    let effects = step(&mut conductor, 130_000, Input::HandoffFinished { request: ONE });
    assert!(matches!(effects.as_slice(), [Effect::StartDecode { .. }]), "{effects:?}");
    step(
        &mut conductor,
        140_000,
        Input::DecodeFinished { request: ONE, output_tokens: 3, first_us: 0, tbt_us: 0 },
    );
    assert_idle(&conductor.snapshot());
}

#[test]
fn the_only_decode_is_tried_again() {
    let mut conductor = conductor(config(1), 1, 1);
    let start = bring(&mut conductor, Stop::HandingOff);
    let effects = step(&mut conductor, 120_000, Input::HandoffFailed { request: ONE });
    let to = effects.iter().find_map(|e| if let Effect::Handoff { to, .. } = e { Some(to.0) } else { None });
    assert_eq!(to, Some(start.decode), "rather than giving up what is computed");
}

#[test]
fn a_hand_off_that_fails_while_layers_are_computed_starts_over() {
    let mut conductor = conductor(config(1), 2, 2);
    let start = bring(&mut conductor, Stop::Prefilling);
    let effects = step(&mut conductor, 50_000, Input::HandoffFailed { request: ONE });
    assert_eq!(releases(&effects), [(1, start.prefill), (1, start.decode)]);
    started(&effects);
}

#[test]
fn a_cancel_frees_both_sides_at_every_stop() {
    for stop in STOPS {
        let mut conductor = conductor(config(2), 2, 2);
        let start = bring(&mut conductor, stop);
        let mut given_back =
            releases(&step(&mut conductor, 120_000, Input::RequestCancelled { request: ONE }));
        given_back.sort_unstable();
        assert_eq!(given_back, legs(stop, start), "{stop:?}");
        assert_idle(&conductor.snapshot());
        let again = step(&mut conductor, 130_000, Input::RequestCancelled { request: ONE });
        assert!(again.is_empty() && conductor.stats().cancelled == 1, "a second cancel is stale");
    }
}

#[test]
fn a_cancel_of_what_waits_here_needs_no_release() {
    let mut conductor = conductor(config(2), 1, 1);
    burden(&mut conductor, request(900, 1, 0), (0, 1), 5_000_000);
    assert!(offer(&mut conductor, 0, request(1, 1000, 0)).is_empty());
    assert!(step(&mut conductor, 10, Input::RequestCancelled { request: ONE }).is_empty());
    step(&mut conductor, 10, finished(900));
    step(&mut conductor, 10, Input::HandoffFinished { request: RequestId(900) });
    step(
        &mut conductor,
        10,
        Input::DecodeFinished { request: RequestId(900), output_tokens: 1, first_us: 0, tbt_us: 0 },
    );
    assert_idle(&conductor.snapshot());
}

#[test]
fn the_cancelled_leave_the_engine_to_those_behind_them() {
    let mut conductor = conductor(config(2), 1, 1);
    started(&offer(&mut conductor, 0, request(1, 20_000, 0)));
    assert!(offer(&mut conductor, 0, request(2, 20_000, 0)).is_empty(), "two seconds are on the engine");
    let effects = step(&mut conductor, 100, Input::RequestCancelled { request: ONE });
    assert_eq!(starts(&effects).len(), 1, "{effects:?}");
}

#[test]
fn messages_of_an_older_life_are_ignored() {
    let mut conductor = conductor(config(2), 2, 1);
    let reborn = InstanceSpec { epoch: Epoch(7), ..spec(0, Role::Prefill) };
    step(&mut conductor, 0, Input::InstanceJoined(reborn.clone()));
    let stored = |epoch| {
        let change = CacheChange::Stored { parent: None, hashes: shared_chain(4), tier: Tier::Hbm };
        Input::Cache(CacheEvent { instance: InstanceId(0), epoch: Epoch(epoch), change })
    };
    for epoch in [1, 6, 8] {
        step(&mut conductor, 0, stored(epoch));
        let lost = Input::InstanceLost { instance: InstanceId(0), epoch: Epoch(epoch) };
        assert!(step(&mut conductor, 0, lost).is_empty());
        let older = InstanceSpec { epoch: Epoch(epoch.min(6)), ..reborn.clone() };
        step(&mut conductor, 0, Input::InstanceJoined(older));
    }
    assert_eq!(conductor.index().held_blocks(InstanceId(0)), 0);
    assert_eq!(conductor.stats().stale_inputs, 9);
    step(&mut conductor, 0, stored(7));
    assert_eq!(conductor.index().held_blocks(InstanceId(0)), 4);
    assert_eq!(
        started(&offer(&mut conductor, 0, request(1, 4 * BLOCK + 10, 4))).prefill,
        0,
        "it still serves"
    );
}

#[test]
fn a_newer_life_ends_the_one_before_with_all_that_it_held() {
    let mut conductor = conductor(config(2), 2, 1);
    hold(&mut conductor, 0, &shared_chain(4), Tier::Hbm);
    let start = started(&offer(&mut conductor, 0, request(1, 5 * BLOCK, 4)));
    assert_eq!(start.prefill, 0);
    let reborn = InstanceSpec { epoch: Epoch(2), ..spec(0, Role::Prefill) };
    let effects = step(&mut conductor, 10, Input::InstanceJoined(reborn));
    assert_eq!(releases(&effects).len(), 2);
    assert_eq!(starts(&effects).len(), 1, "placed again");
    assert_eq!(conductor.index().held_blocks(InstanceId(0)), 0, "its memory is gone");
}

#[test]
fn the_dead_are_not_brought_back_by_draining_them() {
    let mut conductor = conductor(config(2), 2, 1);
    lose(&mut conductor, 0);
    step(&mut conductor, 130_000, Input::InstanceDrained { instance: InstanceId(0) });
    let change = CacheChange::Stored { parent: None, hashes: shared_chain(4), tier: Tier::Hbm };
    let event = CacheEvent { instance: InstanceId(0), epoch: Epoch(1), change };
    step(&mut conductor, 130_000, Input::Cache(event));
    assert_eq!(conductor.index().held_blocks(InstanceId(0)), 0, "nobody may be sent to fetch from it");
}

#[test]
fn time_never_goes_back() {
    let config = SchedulerConfig { explain_every: 1, ..config(2) };
    let mut conductor = conductor(config, 1, 1);
    let at = |effects: &[Effect]| {
        effects.iter().find_map(|e| if let Effect::Explain(d) = e { Some(d.at_us) } else { None })
    };
    assert_eq!(at(&offer(&mut conductor, 500, request(1, 100, 0))), Some(500));
    assert_eq!(
        at(&offer(&mut conductor, 20, request(2, 100, 0))),
        Some(500),
        "an earlier clock is taken for the latest"
    );
    assert_eq!(at(&offer(&mut conductor, 600, request(3, 100, 0))), Some(600));
}

#[test]
fn an_end_counts_once() {
    let mut conductor = conductor(config(2), 1, 1);
    bring(&mut conductor, Stop::Decoding);
    let stale = conductor.stats().stale_inputs;
    for input in [finished(1), Input::HandoffFinished { request: ONE }, Input::HandoffFailed { request: ONE }]
    {
        assert!(step(&mut conductor, 200_000, input).is_empty());
    }
    assert!(
        step(
            &mut conductor,
            200_000,
            Input::DecodeFinished { request: ONE, output_tokens: 4, first_us: 0, tbt_us: 0 }
        )
        .is_empty()
    );
    assert!(
        step(
            &mut conductor,
            200_000,
            Input::DecodeFinished { request: ONE, output_tokens: 4, first_us: 0, tbt_us: 0 }
        )
        .is_empty()
    );
    assert_eq!((conductor.stats().finished, conductor.stats().stale_inputs), (1, stale + 4));
    assert_idle(&conductor.snapshot());
}

#[test]
fn a_fetch_whose_source_dies_is_over() {
    let mut play = Play::new(config(2), &[Role::Prefill, Role::Prefill, Role::Decode]);
    let change = CacheChange::Stored { parent: None, hashes: shared_chain(10), tier: Tier::Hbm };
    play.feed(Input::Cache(CacheEvent { instance: InstanceId(0), epoch: Epoch(1), change }));
    play.peer_places(request(900, 1, 0), (InstanceId(0), InstanceId(2)), 9_000_000);
    let start = started(&play.arrive(11 * BLOCK, 10, 0));
    assert_eq!(start.fetch.map(|f| f.from.0), Some(0));
    // The play audits the links' counts after each step, also across the source's next life.
    play.lose(0);
    play.join(0);
    play.feed(Input::FetchFinished { request: RequestId(0), ok: false });
    assert_eq!((play.conductor.stats().fetches, play.conductor.stats().fetches_failed), (1, 1));
}

#[test]
fn a_fetch_that_fails_is_counted_and_the_prefill_goes_on() {
    let mut conductor = conductor(config(2), 2, 1);
    hold(&mut conductor, 0, &shared_chain(10), Tier::Hbm);
    burden(&mut conductor, request(900, 1, 0), (0, 2), 9_000_000);
    assert!(started(&offer(&mut conductor, 0, request(1, 11 * BLOCK, 10))).fetch.is_some());
    assert!(step(&mut conductor, 10, Input::FetchFinished { request: ONE, ok: false }).is_empty());
    assert_eq!((conductor.stats().fetches, conductor.stats().fetches_failed), (1, 1));
    step(&mut conductor, 900_000, finished(1));
    assert!(conductor.knows(ONE));
}

/// Reports one leg of request 1 as failed; its instance lives on.
fn spoil(conductor: &mut Conductor, stop: Stop) -> Vec<Effect> {
    step(
        conductor,
        120_000,
        match stop {
            Stop::Decoding => Input::DecodeFailed { request: ONE, emitted_tokens: 7 },
            Stop::Prefilling | Stop::HandingOff => Input::PrefillFailed { request: ONE },
        },
    )
}

#[test]
fn a_spoilt_leg_is_tried_elsewhere_and_its_instance_goes_on_serving() {
    for stop in STOPS {
        let mut conductor = conductor(config(2), 2, 2);
        let start = bring(&mut conductor, stop);
        let effects = spoil(&mut conductor, stop);
        let mut given_back = releases(&effects);
        given_back.sort_unstable();
        assert_eq!(given_back, legs(stop, start), "{stop:?}");
        let again = started(&effects);
        match stop {
            Stop::Decoding => assert!(again.decode != start.decode, "{again:?}"),
            _ => assert!(again.prefill != start.prefill, "{stop:?} {again:?}"),
        }
        assert_eq!((conductor.stats().retried, conductor.stats().failed), (1, 0));
        // An instance that is excluded for one request still serves the others.
        let used: Vec<PrefillStart> =
            (2..8).map(|id| started(&offer(&mut conductor, 130_000, request(id, 100, 0)))).collect();
        let serves = |s: &PrefillStart| match stop {
            Stop::Decoding => s.decode == start.decode,
            _ => s.prefill == start.prefill,
        };
        assert!(used.iter().any(serves), "{stop:?} {used:?}");
    }
}

#[test]
fn every_policy_shuns_where_a_prefill_was_spoilt() {
    for policy in PolicyName::ALL.into_iter().filter(|p| *p != PolicyName::DynamoWspt) {
        for _ in 0..4 {
            let config = SchedulerConfig { max_retries: 5, ..plain(policy, AdmissionMode::None) };
            let mut conductor = conductor(config, 2, 2);
            let start = bring(&mut conductor, Stop::Prefilling);
            let again = started(&spoil(&mut conductor, Stop::Prefilling));
            assert!(again.prefill != start.prefill, "{policy:?}");
        }
    }
}

#[test]
fn the_only_instance_is_tried_again_after_a_spoilt_leg() {
    for stop in STOPS {
        let mut conductor = conductor(config(1), 1, 1);
        bring(&mut conductor, stop);
        let again = started(&spoil(&mut conductor, stop));
        assert_eq!((again.prefill, again.decode), (0, 1), "{stop:?}");
    }
}

#[test]
fn spoilt_legs_use_up_the_tries_and_the_failure_names_the_last() {
    for (stop, stage) in [
        (Stop::Prefilling, FailStage::PrefillFailed),
        (Stop::HandingOff, FailStage::PrefillFailed),
        (Stop::Decoding, FailStage::DecodeFailed),
    ] {
        let mut conductor = conductor(config(0), 2, 2);
        bring(&mut conductor, stop);
        let effects = spoil(&mut conductor, stop);
        assert_eq!(failure(&effects), Some((1, stage)), "{stop:?}");
        assert_idle(&conductor.snapshot());
    }
}

#[test]
fn lost_legs_are_named_by_what_was_lost() {
    for (stop, decode_side, stage) in [
        (Stop::Prefilling, false, FailStage::PrefillLost),
        (Stop::Prefilling, true, FailStage::DecodeLost),
        (Stop::HandingOff, false, FailStage::PrefillLost),
        (Stop::HandingOff, true, FailStage::DecodeLost),
        (Stop::Decoding, true, FailStage::DecodeLost),
    ] {
        let mut conductor = conductor(config(0), 2, 2);
        let start = bring(&mut conductor, stop);
        let effects = lose(&mut conductor, if decode_side { start.decode } else { start.prefill });
        assert_eq!(failure(&effects), Some((1, stage)), "{stop:?} {decode_side}");
    }
}

#[test]
fn what_a_spoilt_decode_had_emitted_is_prompt_now() {
    let mut conductor = conductor(config(2), 1, 2);
    bring(&mut conductor, Stop::Decoding);
    started(&step(&mut conductor, 120_000, Input::DecodeFailed { request: ONE, emitted_tokens: 30 }));
    let entry = conductor.requests.get(ONE).expect("it goes on");
    assert_eq!((entry.request.prompt_tokens, entry.request.emitted_tokens), (1030, 30));
    assert_eq!(entry.new_tokens, 1030);
}

#[test]
fn an_answer_that_outgrew_every_instance_fails_for_want_of_a_place() {
    let mut conductor = conductor(config(2), 1, 2);
    bring(&mut conductor, Stop::Decoding);
    let effects =
        step(&mut conductor, 120_000, Input::DecodeFailed { request: ONE, emitted_tokens: 500_000 });
    assert_eq!(failure(&effects), Some((1, FailStage::NoPlacement)));
    assert_idle(&conductor.snapshot());
}

#[test]
fn spoilt_legs_of_others_are_only_counted_off() {
    let mut conductor = conductor(config(2), 1, 1);
    burden(&mut conductor, request(900, 1, 0), (0, 1), 5_000_000);
    let input = Input::PrefillFailed { request: RequestId(900) };
    assert!(step(&mut conductor, 10, input).is_empty());
    assert_idle(&conductor.snapshot());
    crate::testing::decoding(&mut conductor, request(901, 10, 0), 1);
    let input = Input::DecodeFailed { request: RequestId(901), emitted_tokens: 3 };
    assert!(step(&mut conductor, 10, input).is_empty());
    assert_idle(&conductor.snapshot());
}

#[test]
fn news_of_a_spoilt_leg_that_does_not_fit_is_stale() {
    let mut conductor = conductor(config(2), 1, 1);
    bring(&mut conductor, Stop::Decoding);
    assert!(step(&mut conductor, 130_000, Input::PrefillFailed { request: ONE }).is_empty());
    let unknown = Input::DecodeFailed { request: RequestId(77), emitted_tokens: 1 };
    assert!(step(&mut conductor, 130_000, unknown).is_empty());
    assert_eq!(conductor.stats().stale_inputs, 2);
}
