//! Answers are longer than predicted and KV runs short: no admitted request is lost.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{ClassId, InstanceId, RequestId, Role, SloClass};

use crate::placement::MIN_RETRY_AFTER_US;
use crate::testing::{
    burden, conductor_of, failure, finished, foretold, offer, plain, rejection, releases, request, spec,
    starts, step,
};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, RejectReason, Request, SchedulerConfig,
};

/// Tokens in a block, and blocks that the only decode instance has.
const BLOCK: u32 = 16;
const BLOCKS: u64 = 64;

fn config(prior_output_tokens: u32) -> SchedulerConfig {
    let plain = plain(PolicyName::Baton, AdmissionMode::Slo);
    SchedulerConfig { block_tokens: BLOCK, prior_output_tokens, ..plain }
}

fn small_pair(prior_output_tokens: u32) -> Conductor {
    let decode = InstanceSpec { capacity_tokens: BLOCKS * u64::from(BLOCK), ..spec(1, Role::Decode) };
    conductor_of(config(prior_output_tokens), &[spec(0, Role::Prefill), decode])
}

fn reserved(conductor: &Conductor, instance: usize) -> u64 {
    conductor.snapshot().instances[instance].reserved_tokens
}

/// An answer in progress: the client's tokens, and its instance.
#[derive(Clone, Copy, Debug, Default)]
struct Answer {
    emitted: u32,
    room: u32,
    given: u32,
    decodes: bool,
    prefills: bool,
}

/// One decode instance that behaves as Baton's nodes: each decoding answer grows by a token a step and takes blocks as
/// it grows. When there is none left, the youngest is preempted.
struct Stage {
    conductor: Conductor,
    now_us: u64,
    answers: BTreeMap<u64, Answer>,
    prompt_tokens: u32,
    failed: Vec<u64>,
    /// Refused at their turn.
    refused: u64,
    preempted: u64,
    done: u64,
}

impl Stage {
    fn feed(&mut self, input: Input) {
        let effects = step(&mut self.conductor, self.now_us, input);
        self.failed.extend(failure(&effects).map(|(id, _)| id));
        for started in starts(&effects) {
            let answer = self.answers.get_mut(&started.request).expect("an answer that is asked for");
            (answer.prefills, answer.room, answer.given) = (true, started.room_tokens, answer.emitted);
        }
        for effect in effects {
            match effect {
                Effect::StartDecode { request, .. } => {
                    self.answers.get_mut(&request.0).expect("it was started").decodes = true;
                }
                Effect::Reject(refused) if refused.reason == RejectReason::Costly => {
                    let answer = self.answers.remove(&refused.request.0).expect("it was let in");
                    let untouched = !answer.prefills && !answer.decodes && answer.emitted == 0;
                    assert!(
                        untouched && refused.wasted_tokens == 0,
                        "{refused:?} after work was done for it"
                    );
                    assert!(refused.retry_after_us >= MIN_RETRY_AFTER_US, "{refused:?}");
                    self.refused += 1;
                }
                _ => {}
            }
        }
    }

    fn blocks(&self, answer: &Answer) -> u64 {
        u64::from((self.prompt_tokens + answer.emitted).div_ceil(BLOCK))
    }

    fn used(&self) -> u64 {
        self.answers.values().filter(|a| a.decodes).map(|a| self.blocks(a)).sum()
    }

    /// Every sent prefill ends, and its KV lands if there is room for it and for the promised output.
    fn land(&mut self) {
        let sent: Vec<u64> = self.answers.iter().filter(|(_, a)| a.prefills).map(|(id, _)| *id).collect();
        for id in sent {
            let answer = self.answers[&id];
            let needs = self.prompt_tokens + answer.emitted + answer.room;
            if self.used() + u64::from(needs.div_ceil(BLOCK)) > BLOCKS {
                continue;
            }
            self.answers.get_mut(&id).expect("looked up").prefills = false;
            self.feed(finished(id));
            self.feed(Input::HandoffFinished { request: RequestId(id) });
        }
    }

    fn pass(&mut self, output_tokens: u32) {
        self.now_us += 10_000;
        self.feed(Input::TimerFired);
        self.land();
        let decoding: Vec<u64> = self.answers.iter().filter(|(_, a)| a.decodes).map(|(id, _)| *id).collect();
        for id in decoding {
            let Some(answer) = self.answers.get_mut(&id).filter(|a| a.decodes) else { continue };
            answer.emitted += 1;
            let (emitted_tokens, outgrown) = (answer.emitted, answer.emitted - answer.given >= answer.room);
            if emitted_tokens == output_tokens {
                self.answers.remove(&id);
                self.done += 1;
                self.feed(Input::DecodeFinished {
                    request: RequestId(id),
                    output_tokens,
                    first_us: 0,
                    tbt_us: 0,
                });
                continue;
            }
            if outgrown {
                answer.room += answer.room / 4 + 1;
                self.feed(Input::RoomOutgrown { request: RequestId(id), emitted_tokens });
            }
            while self.used() > BLOCKS {
                let youngest = *self.answers.iter().rfind(|(_, a)| a.decodes).expect("somebody uses it").0;
                let answer = self.answers.get_mut(&youngest).expect("just found");
                answer.decodes = false;
                let emitted_tokens = answer.emitted;
                self.preempted += 1;
                self.feed(Input::Preempted { request: RequestId(youngest), emitted_tokens });
            }
        }
    }
}

/// `count` answers that are far longer than predicted, all at once.
fn crowd(count: u64, output_tokens: u32) -> Stage {
    let mut stage = Stage {
        conductor: small_pair(8),
        now_us: 0,
        answers: BTreeMap::new(),
        prompt_tokens: 20,
        failed: Vec::new(),
        refused: 0,
        preempted: 0,
        done: 0,
    };
    for id in 0..count {
        stage.answers.insert(id, Answer::default());
        let request = Request { max_output_tokens: Some(output_tokens), ..request(id, 20, 0) };
        stage.feed(Input::RequestArrived(request));
    }
    let live = |stage: &Stage| stage.conductor.live_requests() as u64;
    let let_in = live(&stage);
    stage.answers.retain(|id, _| stage.conductor.knows(RequestId(*id)));
    assert!(let_in * 3 > count, "{let_in} of {count} were let in");
    for _ in 0..200_000 {
        if stage.answers.is_empty() {
            break;
        }
        stage.pass(output_tokens);
    }
    assert_eq!(stage.failed, Vec::<u64>::new(), "nobody who was let in is lost");
    assert_eq!((stage.done + stage.refused, live(&stage)), (let_in, 0), "{:?}", stage.answers);
    assert!(stage.done * 2 > let_in, "{} of {let_in} were served", stage.done);
    stage
}

#[test]
fn long_answers_on_a_small_instance_all_come_to_their_end() {
    let stage = crowd(40, 400);
    assert!(stage.preempted > 0, "this is no crowd");
    // Two at a time fit to the end.
    assert!(stage.now_us < 40 * 400 * 10_000, "{} us, {} gave way", stage.now_us, stage.preempted);
    assert_eq!(stage.conductor.stats().preempted, stage.preempted);
    // A request that fills the instance alone is served too.
    crowd(6, 1_000);
}

/// Lets requests 1 to `count` reach their decodes.
fn all_decode(conductor: &mut Conductor, count: u64) {
    for id in 1..=count {
        assert_eq!(starts(&offer(conductor, 0, request(id, 100, 0))).len(), 1, "request {id}");
        decode_on(conductor, id);
    }
}

fn decode_on(conductor: &mut Conductor, id: u64) {
    step(conductor, 100_000, finished(id));
    step(conductor, 100_000, Input::HandoffFinished { request: RequestId(id) });
}

#[test]
fn giving_way_spends_no_try() {
    let mut conductor = small_pair(32);
    all_decode(&mut conductor, 1);
    for time in 1..=10 {
        let gone = Input::Preempted { request: RequestId(1), emitted_tokens: 10 * time };
        let effects = step(&mut conductor, 100_000, gone);
        assert_eq!(releases(&effects), [(1, 1)], "only what it holds is given back");
        assert_eq!(failure(&effects), None, "time {time}");
        assert_eq!(starts(&effects).len(), 1, "the instance is empty");
        decode_on(&mut conductor, 1);
    }
}

#[test]
fn requests_that_gave_way_wait_for_room_and_the_oldest_goes_first() {
    let mut conductor = small_pair(32);
    all_decode(&mut conductor, 3);
    step(&mut conductor, 200_000, Input::RoomOutgrown { request: RequestId(1), emitted_tokens: 600 });
    for id in [3, 2] {
        let gone = Input::Preempted { request: RequestId(id), emitted_tokens: 50 };
        let effects = step(&mut conductor, 200_000, gone);
        assert_eq!((failure(&effects), starts(&effects)), (None, Vec::new()), "there is no room for {id}");
    }
    assert_eq!(starts(&step(&mut conductor, 900_000_000, Input::TimerFired)), Vec::new(), "nor later");
    // The estimator knows answers as long as the first by now: there is room for one more of them.
    for (ends, goes) in [(1, 2), (2, 3)] {
        let ended =
            Input::DecodeFinished { request: RequestId(ends), output_tokens: 700, first_us: 0, tbt_us: 0 };
        let next = starts(&step(&mut conductor, 900_000_000, ended));
        assert_eq!(next.iter().map(|s| s.request).collect::<Vec<_>>(), [goes]);
        decode_on(&mut conductor, goes);
    }
}

#[test]
fn room_is_kept_for_no_more_than_the_client_takes_and_follows_the_answer() {
    let mut conductor = small_pair(256);
    let short = Request { max_output_tokens: Some(40), ..request(1, 32, 0) };
    assert_eq!(starts(&offer(&mut conductor, 0, short))[0].room_tokens, 40);
    assert_eq!(reserved(&conductor, 1), 32 + 48);
    let long = Request { max_output_tokens: Some(10_000), ..request(2, 32, 0) };
    let room_tokens = starts(&offer(&mut conductor, 0, long))[0].room_tokens;
    assert!(room_tokens > 200, "what is learnt of its kind, not what its client allows: {room_tokens}");
    step(&mut conductor, 10_000, finished(2));
    step(&mut conductor, 10_000, Input::HandoffFinished { request: RequestId(2) });
    let before = reserved(&conductor, 1);
    step(&mut conductor, 20_000, Input::RoomOutgrown { request: RequestId(2), emitted_tokens: 5 });
    assert_eq!(reserved(&conductor, 1), before, "it has room for that");
    let outgrown = Input::RoomOutgrown { request: RequestId(2), emitted_tokens: room_tokens };
    step(&mut conductor, 20_000, outgrown);
    assert!(reserved(&conductor, 1) > before + 100, "{} after {before}", reserved(&conductor, 1));
    step(&mut conductor, 20_000, Input::RequestCancelled { request: RequestId(2) });
    step(&mut conductor, 20_000, Input::RequestCancelled { request: RequestId(1) });
    assert_eq!(reserved(&conductor, 1), 0);
}

#[test]
fn a_request_that_gives_way_before_its_decode_starts_again_as_well() {
    let mut conductor = small_pair(64);
    assert_eq!(starts(&offer(&mut conductor, 0, request(1, 100, 0))).len(), 1);
    let effects = step(&mut conductor, 5_000, Input::Preempted { request: RequestId(1), emitted_tokens: 0 });
    assert_eq!(releases(&effects), [(1, 0), (1, 1)]);
    assert_eq!(starts(&effects).len(), 1, "the instance is empty: {effects:?}");
    let stale = conductor.stats().stale_inputs;
    let instance = InstanceId(1);
    step(&mut conductor, 6_000, Input::InstanceDrained { instance });
    step(&mut conductor, 6_000, Input::Preempted { request: RequestId(7), emitted_tokens: 0 });
    step(&mut conductor, 6_000, Input::RoomOutgrown { request: RequestId(1), emitted_tokens: 9 });
    assert_eq!(conductor.stats().stale_inputs, stale + 2);
}

/// A pair whose decode instance has room for one of these at a time, and a class that allows that much to the first
/// token.
fn pair_for_one(ttft_us: u64) -> Conductor {
    let mut config = config(64);
    config.classes[0].ttft_us = ttft_us;
    let decode = InstanceSpec { capacity_tokens: 1_024, ..spec(1, Role::Decode) };
    conductor_of(config, &[spec(0, Role::Prefill), decode])
}

fn for_one(id: u64) -> Request {
    Request { known_output_tokens: Some(100), ..request(id, 600, 0) }
}

/// A regression: where the next was shorter it was sent with the one before it, which would begin to decode a little later.
#[test]
fn who_finds_no_room_waits_for_it_within_the_objective() {
    for shorter in [0, 10] {
        let of = |id: u64| Request { known_output_tokens: Some(100), ..request(id, 600 - shorter * id, 0) };
        let mut conductor = pair_for_one(60_000_000);
        assert_eq!(starts(&offer(&mut conductor, 0, of(1))).len(), 1);
        decode_on(&mut conductor, 1);
        for id in 2..=4 {
            let effects = offer(&mut conductor, 200_000, of(id));
            assert_eq!((rejection(&effects), starts(&effects)), (None, Vec::new()), "request {id} waits");
        }
        // When one ends the next is sent, in order, and no other before it.
        for id in 1..=3 {
            let now_us = 1_000_000 * id;
            let before = step(&mut conductor, now_us, Input::TimerFired);
            assert_eq!(starts(&before), Vec::new(), "there is no room for {}", id + 1);
            let ended =
                Input::DecodeFinished { request: RequestId(id), output_tokens: 100, first_us: 0, tbt_us: 0 };
            let next = starts(&step(&mut conductor, now_us, ended));
            assert_eq!(next.iter().map(|s| s.request).collect::<Vec<_>>(), [id + 1]);
            decode_on(&mut conductor, id + 1);
        }
    }
}

#[test]
fn who_would_find_room_too_late_is_refused_at_once_and_told_when() {
    // A decode takes about a second, and a third of the time may be spent waiting for room: enough for one or two.
    let mut conductor = pair_for_one(5_000_000);
    let refusals: Vec<_> =
        (1..=10).filter_map(|id| rejection(&offer(&mut conductor, 0, for_one(id)))).collect();
    assert!((7..=8).contains(&refusals.len()), "{refusals:?}");
    for refused in &refusals {
        assert_eq!(refused.reason, RejectReason::Room, "{refused:?}");
        assert!((MIN_RETRY_AFTER_US..15_000_000).contains(&refused.retry_after_us), "{refused:?}");
    }
    // Each decode takes the whole room, so each of them has to wait for the one before.
    let waits_us: Vec<u64> = refusals.iter().map(|refused| refused.retry_after_us).collect();
    assert!(waits_us.windows(2).skip(1).all(|pair| pair[1] > pair[0] + 500_000), "{waits_us:?}");
}

#[test]
fn who_waited_for_room_as_long_as_its_objective_allows_goes_anyway() {
    let mut conductor = pair_for_one(5_000_000);
    assert_eq!(starts(&offer(&mut conductor, 0, for_one(1))).len(), 1);
    decode_on(&mut conductor, 1);
    assert_eq!(starts(&offer(&mut conductor, 200_000, for_one(2))), Vec::new());
    // The decode before it takes far longer than was predicted.
    let wake_us = conductor.next_deadline().expect("it will be looked at");
    assert!((3_000_000..5_200_000).contains(&wake_us), "{wake_us}");
    assert_eq!(starts(&step(&mut conductor, wake_us, Input::TimerFired)).len(), 1);
}

/// One request in five is ten times as large as the others.
#[test]
fn what_is_left_goes_to_the_small() {
    let refused = |promised_tokens: u64, prompt_tokens| {
        let mut config = config(64);
        config.classes[0].ttft_us = 3_000_000;
        let mut conductor = conductor_of(config, &[spec(0, Role::Prefill), spec(1, Role::Decode)]);
        for at in 0..600 {
            let tokens = if at % 5 == 0 { 50_000 } else { 5_000 };
            conductor.margins.note_need(core::iter::once(0), (tokens, tokens));
        }
        burden(&mut conductor, foretold(900, promised_tokens - 10_000, 10_000), (0, 1), 0);
        rejection(&offer(&mut conductor, 0, foretold(1, prompt_tokens, 10))).map(|refusal| refusal.reason)
    };
    assert_eq!(refused(65_000, 20_000), Some(RejectReason::Room), "of 35,000 it must leave most");
    assert_eq!(refused(65_000, 10_000), None);
    assert_eq!(refused(45_000, 20_000), None, "not half is promised");
    assert_eq!(refused(45_000, 60_000), Some(RejectReason::Unreachable), "its prefill takes six seconds");
}

/// A regression: at its turn a large one took all that was free, and small ones that were let in before found nothing.
#[test]
fn at_its_turn_as_well_what_is_left_goes_to_the_small() {
    for (tokens, refused) in [(20_000, true), (10_000, false)] {
        let mut config = config(64);
        config.classes[0].ttft_us = 6_000_000;
        let decode = InstanceSpec { mixed_chunk_tokens: Some(0), ..spec(1, Role::Decode) };
        let mut conductor = conductor_of(config, &[spec(0, Role::Prefill), decode]);
        burden(&mut conductor, foretold(900, 55_000, 10_000), (0, 1), 0);
        assert_eq!(starts(&offer(&mut conductor, 0, foretold(1, 9_000, 10))).len(), 1);
        let effects = offer(&mut conductor, 0, foretold(2, tokens, 10));
        assert_eq!((rejection(&effects), starts(&effects)), (None, Vec::new()), "it waits for its turn");
        // Meanwhile small ones are asked for.
        for at in 0..600 {
            let tokens = if at % 5 == 0 { 50_000 } else { 5_000 };
            conductor.margins.note_need(core::iter::once(0), (tokens, tokens));
        }
        let effects = step(&mut conductor, 900_000, finished(1));
        let reason = rejection(&effects).map(|refusal| (refusal.request.0, refusal.reason));
        assert_eq!(reason, refused.then_some((2, RejectReason::Costly)), "{tokens}: {effects:?}");
        assert_eq!(starts(&effects).len(), usize::from(!refused));
    }
}

/// A class of long prompts above one of short ones leaves nothing to it: the short ones would take it.
#[test]
fn what_is_left_is_left_to_the_own_band_and_to_higher_ones() {
    for (priority, refused) in [(1, false), (0, true)] {
        let mut config = config(64);
        let long =
            SloClass { name: String::from("long"), ttft_us: 3_000_000, priority, ..SloClass::default() };
        config.classes = Vec::from([SloClass { ttft_us: 3_000_000, ..SloClass::default() }, long]);
        let mut conductor = conductor_of(config, &[spec(0, Role::Prefill), spec(1, Role::Decode)]);
        let of_long = |id| Request { class: ClassId(1), ..foretold(id, 20_000, 10) };
        for id in 100..500 {
            let small = id % 8 > 0;
            let asked = if small { foretold(id, 1_000, 10) } else { of_long(id) };
            offer(&mut conductor, id * 10_000_000, asked);
            step(&mut conductor, id * 10_000_000, Input::RequestCancelled { request: RequestId(id) });
        }
        burden(&mut conductor, foretold(900, 55_000, 10_000), (0, 1), 0);
        let effects = offer(&mut conductor, 5_000_000_000, of_long(1));
        assert_eq!(rejection(&effects).is_some(), refused, "band {priority}: {effects:?}");
    }
}

#[test]
fn what_no_idle_instance_could_do_in_time_is_said_so() {
    let mut conductor = pair_for_one(50_000);
    let refused = rejection(&offer(&mut conductor, 0, for_one(1))).expect("60 ms of prefill in 48");
    assert_eq!((refused.reason, refused.retry_after_us), (RejectReason::Unreachable, 0), "{refused:?}");
    assert!(refused.predicted_ttft_us.is_some_and(|us| (50_000..70_000).contains(&us)), "{refused:?}");
    // Load alone does not make an objective unreachable.
    let mut busy = pair_for_one(200_000);
    burden(&mut busy, request(900, 1, 0), (0, 1), 10_000_000);
    let refused = rejection(&offer(&mut busy, 0, for_one(1))).expect("ten seconds of queue");
    assert_eq!(refused.reason, RejectReason::Ttft, "{refused:?}");
    // No step of any decode is as short as that.
    let mut config = config(64);
    config.classes[0].tbt_us = 5_000;
    let mut slow = conductor_of(config, &[spec(0, Role::Prefill), spec(1, Role::Decode)]);
    let refused = rejection(&offer(&mut slow, 0, for_one(1))).expect("steps of 10 ms");
    assert_eq!(refused.reason, RejectReason::Unreachable, "{refused:?}");
}
