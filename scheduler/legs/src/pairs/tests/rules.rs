//! Rules of the module's documentation, each at its edge: the limit, one step before it and one behind it.

use alloc::vec;
use alloc::vec::Vec;

use baton_scheduler::{FailStage, Input, RejectReason, Rejection};
use baton_types::{ClassId, RequestId, RequestObjectives, SloClass};

use super::super::progress::StageProgress;
use super::super::stage::{AttemptLegs, AttemptTokens};
use super::super::{
    Arrival, Cause, Effect, EmittedTokens, Fact, FactOutcome, Failure, Pairs, PairsConfig, Phase,
    PrefillOrder, Stage, WaitingStage,
};
use super::{A, B, Bench, D, E, FAILED, FLOOR_US, LANDED, NONE, NOT_LANDED, P, PREFILLED, TOKEN, release};

const REFUSED: Fact = Fact::Failed(Failure::Engine { cut_off: false, gone: false });
const CUT_OFF: Fact = Fact::Failed(Failure::Engine { cut_off: true, gone: false });
const LAST: Fact = Fact::Token { index: 0, last: true };

const fn token(index: u32) -> Fact {
    Fact::Token { index, last: false }
}

impl Bench {
    fn complete(&mut self, request: RequestId) -> Vec<Effect> {
        self.act(|pairs, now_us, core, effects| pairs.complete(now_us, (request, 0), core, effects))
    }

    fn cancel(&mut self, request: RequestId) -> Vec<Effect> {
        self.act(|pairs, now_us, core, effects| pairs.cancel(now_us, request, core, effects))
    }

    fn arrive_until(&mut self, request: RequestId, time_limit_us: u64) -> Vec<Effect> {
        let arrival =
            Arrival { request, class: ClassId(0), objectives: NONE, time_limit_us, asked_tokens: 10 };
        self.act(|pairs, now_us, core, effects| pairs.arrive(now_us, arrival, core, effects))
    }

    /// A request whose KV is on the way.
    fn handing_off(&mut self, request: RequestId) {
        self.arrive(request, 10);
        self.on_fact(request, P, TOKEN);
        self.on_fact(request, P, PREFILLED);
        assert_eq!(self.phase(request), Some(Phase::HandingOff));
    }

    /// Waits without a wake of the driver.
    fn sleep(&mut self, us: u64) {
        self.now_us += us;
    }
}

#[test]
fn a_pause_between_hand_offs_doubles_five_times_and_no_more() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    bench.on_fact(A, P, PREFILLED);
    bench.on_fact(A, P, NOT_LANDED);
    for pause_us in [100_000, 200_000, 400_000, 800_000, 1_600_000, 1_600_000, 1_600_000] {
        // Its time would be over before.
        bench.pairs.configure(PairsConfig::new(&[SloClass::default()], 4, 9_000_000));
        let attempt = bench.pairs.get(A).unwrap().attempt();
        bench.on_fact(A, E, NOT_LANDED);
        assert!(bench.pairs.get(A).unwrap().retries_handoff());
        let at_us = bench.now_us + pause_us;
        assert!(bench.pairs.next_deadline().is_some_and(|next_us| next_us <= at_us));
        bench.sleep(pause_us - 1);
        bench.pairs.excuse(bench.now_us, 5);
        bench.sleep(5);
        assert_eq!(bench.wait(0), [], "a pause of the driver is not one of the hand-off");
        bench.wait(1);
        assert_eq!(bench.pairs.get(A).unwrap().attempt(), attempt + 1, "{pause_us}");
        assert!(!bench.pairs.get(A).unwrap().retries_handoff());
    }
}

#[test]
fn a_hand_off_that_is_there_after_all_is_not_tried_again() {
    let mut bench = Bench::new();
    bench.handing_off(A);
    bench.on_fact(A, P, NOT_LANDED);
    bench.on_fact(A, P, NOT_LANDED);
    bench.on_fact(A, E, LANDED);
    assert_eq!(bench.phase(A), Some(Phase::Decoding));
    bench.inputs();
    assert_eq!(bench.wait(100_000), []);
    assert_eq!(bench.inputs(), []);
}

#[test]
fn a_request_is_parked_so_often_and_then_it_is_over() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    let fails = |bench: &mut Bench| {
        bench.act(|pairs, _, core, effects| {
            core.known.clear();
            [P, D].iter().for_each(|instance| pairs.release(A, *instance, effects));
            effects.clear();
            pairs.failed(A, FailStage::NoPlacement, core, effects);
        })
    };
    for attempt in 1..32 {
        assert_eq!(bench.pairs.get(A).unwrap().attempt(), attempt);
        assert_eq!((fails(&mut bench), bench.pairs.parked()), (vec![], 1), "attempt {attempt}");
        bench.wait(50_000);
    }
    let effects = fails(&mut bench);
    assert_eq!(effects, [Effect::Fail { request: A, stage: FailStage::NoPlacement, attempts: 32 }]);
    assert!(bench.pairs.is_empty());
}

#[test]
fn an_engine_that_takes_nothing_is_asked_so_often_and_no_more() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    let mut asked = 1;
    let effects = loop {
        let effects = bench.on_fact(A, P, REFUSED);
        if bench.pairs.is_empty() {
            break effects;
        }
        bench.wait(0);
        asked += 1;
        assert!(asked <= 32, "for ever");
    };
    let fail = Effect::Fail { request: A, stage: FailStage::PrefillFailed, attempts: 32 };
    assert_eq!((asked, effects.last()), (32, Some(&fail)));
}

#[test]
fn a_request_in_two_engines_that_die_is_over_and_others_there_are_spared_once() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    assert!(bench.on_fact(A, P, CUT_OFF).contains(&Effect::Blame { request: A, cause: Cause::Lost }));
    bench.wait(0);
    // A is on trial with B and C there: both are spared.
    let c = RequestId(3);
    bench.arrive(B, 10);
    bench.arrive(c, 10);
    let effects = bench.lose(P);
    assert!(effects.contains(&Effect::Condemn { request: A }), "{effects:?}");
    assert_eq!(
        [B, c].map(|request| bench.pairs.get(request).map(|pair| (pair.deaths, pair.spared))),
        [Some((0, true)), Some((0, true))]
    );
    // No request is on trial: either may have been the cause now.
    bench.wait(50_000);
    bench.lose(P);
    assert_eq!([B, c].map(|request| bench.pairs.get(request).map(|pair| pair.deaths)), [Some(1); 2]);
    // One at a time: B lives to draw a token, C is in the second death.
    bench.wait(0);
    bench.on_fact(B, P, TOKEN);
    bench.wait(0);
    assert_eq!(bench.phase(c), Some(Phase::Prefilling));
    // B was spared before, and it is not again.
    let effects = bench.lose(P);
    for request in [B, c] {
        assert!(effects.contains(&Effect::Condemn { request }), "{effects:?}");
    }
}

#[test]
fn an_instance_that_leaves_is_held_against_nobody() {
    let mut bench = Bench::new();
    bench.decoding(A);
    bench.arrive(B, 10);
    let leaves = |pairs: &mut Pairs, now_us, core: &mut super::SimpleCore, effects: &mut Vec<Effect>| {
        pairs.lost(now_us, (D, baton_types::Epoch(1), false), core, effects);
    };
    let effects = bench.act(leaves);
    let blamed = [A, B].map(|request| Effect::Blame { request, cause: Cause::Lost });
    assert_eq!(effects[..2], blamed);
    assert!(bench.inputs().contains(&Input::TokensEmitted { request: A, emitted_tokens: 1 }));
    // The conductor of these tests gives every request up.
    assert!(bench.pairs.is_empty());
    bench.decoding(A);
    let effects = bench.act(|pairs, now_us, core, effects| {
        core.known.clear();
        pairs.lost(now_us, (E, baton_types::Epoch(1), true), core, effects);
        core.known.insert(A);
    });
    assert_eq!(effects, [], "it has nothing there");
    assert_eq!(bench.pairs.get(A).unwrap().deaths, 0);
}

#[test]
fn an_engine_that_is_gone_is_judged_with_its_instance() {
    let mut bench = Bench::new();
    bench.decoding(A);
    let gone = Fact::Failed(Failure::Engine { cut_off: true, gone: true });
    bench.inputs();
    assert_eq!((bench.on_fact(A, D, gone), bench.inputs()), (vec![], vec![]));
    let effects = bench.lose(D);
    assert_eq!(
        effects.iter().filter(|effect| matches!(effect, Effect::Blame { .. })).count(),
        1,
        "{effects:?}"
    );
    assert_eq!(bench.pairs.get(A).unwrap().deaths, 1);
}

#[test]
fn time_limit_ends_each_stage_and_is_never_stretched() {
    let give_up = |phase, impatient| Effect::GiveUp { request: A, phase, impatient };
    for phase in [Phase::Prefilling, Phase::HandingOff, Phase::Decoding] {
        let mut bench = Bench::new();
        let until_us = bench.now_us + 600_000;
        bench.arrive_until(A, until_us);
        if phase != Phase::Prefilling {
            bench.on_fact(A, P, PREFILLED);
        }
        if phase == Phase::Decoding {
            bench.on_fact(A, D, LANDED);
            bench.core.last_token_us = until_us;
        }
        assert_eq!(bench.pairs.next_deadline(), Some(until_us));
        // The client does not know that the driver was away.
        bench.pairs.excuse(bench.now_us, 500_000);
        assert_eq!(bench.pairs.next_deadline(), Some(until_us));
        assert_eq!(bench.wait(599_999), []);
        assert_eq!(bench.wait(1).last(), Some(&give_up(phase, true)), "{phase:?}");
        assert!(bench.core.known.is_empty() && bench.pairs.is_empty());
    }
}

#[test]
fn what_is_parked_and_promised_is_given_up_when_its_time_is_over() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    bench.on_fact(A, P, REFUSED);
    bench.core.refuses = Some(RejectReason::Ttft);
    // Its objective and the floor: 3 s.
    assert_eq!(bench.wait(2_999_999), []);
    let late = Effect::Late { request: A, attempt: 1, phase: Phase::Waiting };
    let give_up = Effect::GiveUp { request: A, phase: Phase::Waiting, impatient: false };
    assert_eq!(bench.wait(1), [late, give_up]);
    assert_eq!((bench.pairs.parked(), bench.pairs.next_deadline()), (0, None));
}

#[test]
fn a_pair_whose_instance_went_is_waited_for_and_one_that_was_drained_is_not() {
    let mut bench = Bench::new();
    bench.core.refuses = Some(RejectReason::NoInstance);
    bench.core.serves = false;
    // No instance went: an operator drained one.
    assert!(matches!(bench.arrive(A, 10)[..], [Effect::Refuse(_)]));
    bench.lose(P);
    assert_eq!((bench.arrive(A, 10), bench.pairs.parked()), (Vec::new(), 1));
    // What is lost after that was no part of a pair: the five seconds go on.
    bench.sleep(3_000_000);
    bench.lose(D);
    bench.sleep(1_999_999);
    assert_eq!((bench.arrive(B, 10), bench.pairs.parked()), (Vec::new(), 2));
    bench.sleep(1);
    assert!(matches!(bench.arrive(RequestId(3), 10)[..], [Effect::Refuse(_)]));
    // There was a pair meanwhile, so the next loss begins anew.
    bench.core.serves = true;
    bench.act(|pairs, now_us, core, effects| pairs.step(now_us, Input::TimerFired, core, effects));
    bench.core.serves = false;
    bench.lose(P);
    assert_eq!(bench.arrive(RequestId(4), 10), []);
}

#[test]
fn a_refusal_after_the_first_token_cuts_an_answer_short() {
    // A policy looks again once the prefill is over.
    let refused = Rejection {
        request: A,
        reason: RejectReason::Room,
        retry_after_us: 1,
        predicted_ttft_us: None,
        wasted_tokens: 7,
    };
    for (facts, cut) in [(&[PREFILLED][..], false), (&[TOKEN, PREFILLED], true)] {
        let mut bench = Bench::new();
        bench.arrive(A, 10);
        facts.iter().for_each(|fact| _ = bench.on_fact(A, P, *fact));
        let refusal = refused.clone();
        let effects = bench.act(|pairs, _, core, effects| {
            core.known.clear();
            pairs.rejected(refusal, core, effects);
        });
        let refused = refused.clone();
        assert_eq!(effects, [if cut { Effect::CutShort(refused) } else { Effect::Refuse(refused) }]);
        assert!(bench.pairs.is_empty());
    }
}

#[test]
fn what_fits_nowhere_any_more_is_over_unless_a_larger_instance_may_come_back() {
    // Its answer has outgrown all instances that are there.
    let outgrown = |lost: bool| {
        let mut bench = Bench::new();
        bench.pairs.configure(PairsConfig::new(&[SloClass::default()], 4, 9_000_000));
        if lost {
            bench.lose(E);
        }
        bench.arrive(A, 10);
        bench.on_fact(A, P, TOKEN);
        bench.core.refuses = Some(RejectReason::TooLong);
        bench.on_fact(A, P, REFUSED);
        bench
    };
    let mut bench = outgrown(false);
    assert!(matches!(bench.wait(0)[..], [Effect::CutShort(_)]));
    assert!(bench.pairs.is_empty());

    let mut bench = outgrown(true);
    for _ in 0..99 {
        assert_eq!((bench.wait(50_000), bench.pairs.parked()), (vec![], 1));
    }
    // Five seconds after the loss.
    assert!(matches!(bench.wait(50_000)[..], [Effect::CutShort(_)]));
}

#[test]
fn what_the_conductor_holds_back_is_taken_from_it_when_it_is_refused() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    // It lets the request go, and keeps it.
    for instance in [P, D] {
        bench.act(|pairs, _, _, effects| pairs.release(A, instance, effects));
    }
    assert_eq!(*bench.pairs.get(A).unwrap().stage(), Stage::Waiting(WaitingStage::Queued));
    bench.core.serves = false;
    bench.inputs();
    // Twice its objective, and the floor: 5 s.
    assert_eq!(bench.wait(4_999_999), []);
    let effects = bench.wait(1);
    assert!(matches!(effects.last(), Some(Effect::Refuse(r)) if r.reason == RejectReason::NoInstance));
    assert_eq!(bench.inputs(), [Input::RequestCancelled { request: A }]);
    assert!(bench.core.known.is_empty(), "it would be sent to the next instances that come");
}

#[test]
fn who_waits_in_the_conductor_has_until_it_has_aged() {
    let mut bench = Bench::new();
    let class = SloClass { ttft_us: 2_000_000, ..SloClass::default() };
    bench.pairs.configure(PairsConfig::new(&[class], 4, 1_000_000));
    bench.arrive(A, 10);
    for instance in [P, D] {
        bench.act(|pairs, _, _, effects| pairs.release(A, instance, effects));
    }
    assert_eq!(bench.pairs.next_deadline(), Some(bench.now_us + 5_000_000));
    assert_eq!(bench.wait(4_999_999), []);
    let give_up = Effect::GiveUp { request: A, phase: Phase::Waiting, impatient: false };
    assert_eq!(bench.wait(1).last(), Some(&give_up));
}

#[test]
fn limits_follow_from_the_class_and_from_what_is_foreseen() {
    let class = |ttft_us, tbt_us| SloClass { ttft_us, tbt_us, ..SloClass::default() };
    let config = PairsConfig::new(&[class(2_000_000, 20_000), class(9_000_000, 300_000)], 3, 1_000_000);
    let mut bench = Bench::new();
    bench.pairs.configure(config);
    // Expected time and class, and the limits of the prefill, the hand-off and a token. An unknown class counts as
    // the first.
    let own = |ttft_us, tbt_us| RequestObjectives { ttft_us: Some(ttft_us), tbt_us: Some(tbt_us) };
    for (foreseen_us, class, objectives, limits_us) in [
        (0, 0, NONE, [1_000_000, 1_000_000, 1_000_000]),
        (1_500_000, 0, NONE, [4_500_000, 1_500_000, 1_000_000]),
        (4_000_000, 0, NONE, [8_000_000, 2_000_000, 1_000_000]),
        (4_000_000, 1, NONE, [12_000_000, 4_000_000, 9_000_000]),
        (4_000_000, 7, NONE, [8_000_000, 2_000_000, 1_000_000]),
        // An own TTFT counts in place of its class's, and the time of a token is its class's.
        (4_000_000, 0, own(9_000_000, 900_000), [12_000_000, 4_000_000, 1_000_000]),
        (4_000_000, 1, own(2_000_000, 1_000), [8_000_000, 2_000_000, 9_000_000]),
    ] {
        bench.core.foreseen_us = Some(bench.now_us + foreseen_us);
        let class = ClassId(class);
        let arrival = Arrival { request: A, class, objectives, time_limit_us: u64::MAX, asked_tokens: 9 };
        bench.act(|pairs, now_us, core, effects| pairs.arrive(now_us, arrival, core, effects));
        let mut seen_us = vec![bench.pairs.next_deadline().unwrap() - bench.now_us];
        for (instance, fact) in [(P, PREFILLED), (D, LANDED)] {
            bench.on_fact(A, instance, fact);
            seen_us.push(bench.pairs.next_deadline().unwrap() - bench.now_us);
        }
        assert_eq!(seen_us, limits_us, "{foreseen_us} of class {class}");
        bench.cancel(A);
    }
}

#[test]
fn an_answer_that_outgrows_its_room_says_so_and_then_less_and_less_often() {
    let mut bench = Bench::new();
    bench.arrive(A, 1000);
    bench.on_fact(A, P, TOKEN);
    bench.on_fact(A, P, PREFILLED);
    bench.on_fact(A, D, LANDED);
    bench.inputs();
    let mut outgrown_inputs = Vec::new();
    for index in 1..400 {
        bench.on_fact(A, D, token(index));
        outgrown_inputs.extend(bench.inputs());
    }
    // Its room is of 100 tokens, and a quarter and one more each time.
    let outgrown = |emitted_tokens| Input::RoomOutgrown { request: A, emitted_tokens };
    assert_eq!(outgrown_inputs, [100, 126, 158, 198, 248, 311, 389].map(outgrown));
    // The last token needs no further room.
    let mut bench = Bench::new();
    bench.decoding(A);
    (1..99).for_each(|index| assert_eq!(bench.on_fact(A, D, token(index)), []));
    bench.inputs();
    bench.on_fact(A, D, Fact::Token { index: 99, last: true });
    assert_eq!(bench.inputs(), []);
}

#[test]
fn a_decode_leg_is_ordered_together_with_the_prefill_and_with_each_hand_off() {
    let mut bench = Bench::new();
    let expect = |attempt, instance| Effect::Expect {
        request: A,
        attempt,
        instance,
        room_tokens: 100,
        given_tokens: 0,
    };
    let effects = bench.arrive(A, 10);
    assert!(matches!(
        effects[0],
        Effect::Prefill(PrefillOrder { instance: P, decode: D, room_tokens: 100, .. })
    ));
    assert_eq!(effects[1], expect(1, D));
    bench.on_fact(A, P, PREFILLED);
    let effects = bench.on_fact(A, P, NOT_LANDED);
    let again = Effect::Handoff { request: A, attempt: 2, from: P, to: E };
    assert_eq!(effects[1..], [release(D, 1), expect(2, E), again]);
}

#[test]
fn a_leg_that_the_attempt_does_not_have_is_not_let_go() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    assert_eq!(bench.act(|pairs, _, _, effects| pairs.release(A, E, effects)), []);
    for instance in [P, D] {
        let effects = bench.act(|pairs, _, _, effects| pairs.release(A, instance, effects));
        assert_eq!(effects, [release(instance, 1)]);
    }
}

#[test]
fn a_prefill_that_draws_all_that_is_left_is_alone() {
    let mut bench = Bench::new();
    let alone = |effects: &[Effect]| {
        effects.iter().find_map(|effect| match effect {
            Effect::Prefill(PrefillOrder { decode, given_tokens, .. }) => Some((*decode == P, *given_tokens)),
            _ => None,
        })
    };
    let expects = |effects: &[Effect]| effects.iter().any(|effect| matches!(effect, Effect::Expect { .. }));
    // All but one of three tokens are given when it starts over.
    let first = bench.arrive(A, 3);
    assert_eq!((alone(&first), expects(&first)), (Some((false, 0)), true));
    bench.on_fact(A, P, TOKEN);
    bench.on_fact(A, P, PREFILLED);
    bench.on_fact(A, D, LANDED);
    bench.on_fact(A, D, token(1));
    let again = bench.on_fact(A, D, FAILED);
    assert_eq!((alone(&again), expects(&again)), (Some((true, 2)), false));
    let pair = bench.pairs.get(A).unwrap();
    assert_eq!((pair.moves(), pair.legs()), (1, [Some(P), None]));
    // It is let go where it was ordered, and there alone.
    let effects = bench.on_fact(A, P, FAILED);
    assert!(effects.contains(&release(P, 2)) && !effects.contains(&release(D, 2)), "{effects:?}");
}

#[test]
fn an_answer_that_is_over_is_let_go_whatever_comes_next() {
    let answered = |facts: &[Fact]| {
        let mut bench = Bench::new();
        bench.arrive(A, 10);
        facts.iter().for_each(|fact| _ = bench.on_fact(A, if *fact == LANDED { D } else { P }, *fact));
        bench.on_fact(A, P, LAST);
        assert_eq!(bench.complete(A), []);
        bench.inputs();
        bench
    };
    let ended = Effect::Ended { request: A };
    for fact in [FAILED, NOT_LANDED, CUT_OFF] {
        let mut bench = answered(&[]);
        assert_eq!(bench.on_fact(A, P, fact), [release(P, 1), release(D, 1), ended.clone()]);
        assert_eq!(bench.inputs(), [Input::RequestCancelled { request: A }]);
    }
    // Its time is over: no client waits, so nothing is late.
    let mut bench = answered(&[]);
    assert_eq!(bench.wait(FLOOR_US).last(), Some(&ended));
    let mut bench = answered(&[LANDED]);
    assert_eq!(bench.on_fact_of((A, 1, P), Fact::Ended), (FactOutcome::Stale, vec![]));
    assert_eq!(bench.on_fact(A, D, LANDED), []);
    assert_eq!(bench.on_fact(A, P, PREFILLED), [release(P, 1), release(D, 1), ended]);
    let finished =
        |input: &&Input| matches!(input, Input::DecodeFinished { request: A, output_tokens: 1, .. });
    assert_eq!(bench.inputs().iter().filter(finished).count(), 1);
}

#[test]
fn an_offer_counts_once_and_stands_for_the_hand_off() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    assert_eq!(bench.on_fact(A, P, Fact::Offered), []);
    assert_eq!(bench.on_fact_of((A, 1, P), Fact::Offered).0, FactOutcome::Stale);
    assert_eq!(bench.on_fact(A, P, PREFILLED), [Effect::Decode { request: A, attempt: 1, instance: D }]);
    // The conductor's inputs about it, in order.
    assert!(matches!(
        bench.inputs()[..],
        [_, Input::PrefillFinished { .. }, Input::HandoffFinished { request: A }]
    ));
}

#[test]
fn what_fails_is_said_to_the_conductor_by_the_leg_and_the_stage() {
    let input = |stages: &[(u32, Fact)], at, failure| {
        let mut bench = Bench::new();
        bench.arrive(A, 10);
        stages.iter().for_each(|(at, fact)| _ = bench.on_fact(A, baton_types::InstanceId(*at), *fact));
        bench.inputs();
        bench.on_fact(A, at, Fact::Failed(failure));
        bench.inputs()
    };
    let decoding = [(0, TOKEN), (0, PREFILLED), (1, LANDED)];
    let other = Failure::Other;
    assert_eq!(input(&[], P, other), [Input::PrefillFailed { request: A }]);
    assert_eq!(input(&[], D, other), [Input::HandoffFailed { request: A }]);
    assert_eq!(input(&decoding[..2], P, other), [Input::PrefillFailed { request: A }]);
    assert_eq!(input(&decoding, D, other), [Input::DecodeFailed { request: A, emitted_tokens: 1 }]);
    assert_eq!(input(&decoding, D, Failure::Preempted), [Input::Preempted { request: A, emitted_tokens: 1 }]);
    assert_eq!(input(&decoding, D, Failure::OfRequest), []);
    let refused =
        |instance, emitted_tokens| [Input::LegRefused { request: A, instance, emitted_tokens, busy_us: 7 }];
    assert_eq!(input(&[], P, Failure::Busy { us: 7 }), refused(P, 0));
    assert_eq!(input(&[], D, Failure::Busy { us: 7 }), refused(D, 0));
    assert_eq!(input(&decoding, D, Failure::Busy { us: 7 }), refused(D, 1));
}

#[test]
fn a_refusal_is_a_failure_once_engines_have_refused_for_longer_than_the_queue_may_last() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    bench.inputs();
    let refused = |bench: &mut Bench, after_us| {
        bench.now_us += after_us;
        bench.inputs();
        bench.on_fact(A, P, Fact::Failed(Failure::Busy { us: 1_000_000 }));
        matches!(bench.inputs()[..], [Input::LegRefused { .. }])
    };
    assert!(refused(&mut bench, 0) && refused(&mut bench, 5_000_000));
    assert!(!refused(&mut bench, 1), "twice 2 s and the least of 1 s are over");
    // A token is progress.
    bench.on_fact(A, P, TOKEN);
    assert!(refused(&mut bench, 9_000_000));
}

#[test]
fn nobody_who_is_not_there_is_heard_ended_or_waited_for() {
    let mut bench = Bench::new();
    assert_eq!(bench.on_fact_of((A, 0, P), TOKEN), (FactOutcome::Stale, vec![]));
    assert_eq!((bench.complete(A), bench.wait(9_000_000)), (vec![], vec![]));
    assert_eq!(
        bench.act(|pairs, now_us, core, effects| {
            let emitted = EmittedTokens { request: A, tokens: 7, first_us: now_us, last: false };
            pairs.emitted(now_us, emitted, core, effects);
        }),
        []
    );
    assert_eq!(
        bench.act(|pairs, _, core, effects| pairs.failed(A, FailStage::DecodeLost, core, effects)),
        []
    );
    // A release is passed on all the same: the node may have something.
    let stray = bench.act(|pairs, _, _, effects| pairs.release(A, P, effects));
    assert_eq!(stray, [release(P, 0)]);
    assert_eq!((bench.pairs.next_deadline(), bench.pairs.len(), bench.pairs.parked()), (None, 0, 0));
    bench.cancel(A);
    assert_eq!(bench.inputs(), [Input::RequestCancelled { request: A }]);
}

#[test]
fn a_stage_whose_turn_must_have_come_is_late_however_much_its_instance_gets_done() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    // Only the request itself is ahead of it, and four are let pass.
    for other in 2..7 {
        bench.arrive(RequestId(other), 10);
        bench.on_fact(RequestId(other), P, PREFILLED);
        bench.cancel(RequestId(other));
        let effects = bench.wait(FLOOR_US);
        let late = Effect::Late { request: A, attempt: 1, phase: Phase::Prefilling };
        assert_eq!(effects.contains(&late), other == 6, "{other}: {effects:?}");
    }
}

#[test]
fn what_an_instance_got_done_is_forgotten_with_it() {
    let mut bench = Bench::new();
    bench.handing_off(A);
    bench.on_fact(A, D, LANDED);
    let paces = bench.pairs.paces.clone();
    let done = |instance| paces.get(&instance).map(|pace| (pace.prefilled, pace.handed));
    assert_eq!([P, D, E].map(done), [Some((1, 1)), Some((0, 1)), None]);
    bench.lose(D);
    assert!(bench.pairs.paces.keys().eq([&P]));
}

#[test]
fn phases_have_a_word_and_a_word_for_their_end() {
    let all = [Phase::Waiting, Phase::Prefilling, Phase::HandingOff, Phase::Decoding];
    assert_eq!(all.map(Phase::name), ["queue", "prefill", "handoff", "decode"]);
    for phase in all {
        assert_eq!(phase.timeout().strip_suffix("_timeout"), Some(phase.name()));
    }
}

#[test]
fn a_stage_has_the_legs_that_it_needs() {
    let tokens = AttemptTokens { given: 3, first_us: 0, room: 100 };
    let turn = StageProgress::new(0);
    let sent = |legs| WaitingStage::Queued.sent(legs, tokens, turn);
    let both = sent(AttemptLegs::Both { prefill: P, decode: D }).prefilled(turn, 7);
    let held = sent(AttemptLegs::Prefill(P)).prefilled(turn, 7);
    let moved = held.clone().handed_off((P, E), 9, turn, 8);
    assert_eq!(moved.since_us(), 8);
    assert_eq!(Stage::HandingOff(moved).legs(), [Some(P), Some(E)]);
    // A decode does without its prefill leg, and no stage does without both.
    let decoding = || Stage::Decoding(both.clone().landed(D, 8));
    let queued = Stage::Waiting(WaitingStage::Queued);
    assert_eq!(decoding().without(P).legs(), [None, Some(D)]);
    assert_eq!((&decoding().without(D), &decoding().without(P).without(D)), (&queued, &queued));
    assert_eq!(Stage::HandingOff(held).without(P), queued);
    // A request whose client has all of its answer does not wait again.
    let answered = Stage::Answered(sent(AttemptLegs::Prefill(P)).answered()).without(P);
    assert_eq!((answered.legs(), answered == queued), ([None; 2], false));
}
