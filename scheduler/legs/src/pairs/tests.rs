//! The rules of the module's documentation, one by one, over a conductor that does the simplest thing; then all of
//! them under noise.

mod conductor;
mod naive;
mod random;
mod rules;
mod scripted;

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use baton_scheduler::{Effect as Order, FailStage, Input, RejectReason, Rejection, Request};
use baton_types::{ClassId, Epoch, InstanceId, RequestId, RequestObjectives, Rng, SloClass};

use super::{
    Arrival, Cause, Core, Effect, Fact, FactOutcome, Failure, Pairs, PairsConfig, Phase, PrefillOrder, Stage,
    WaitingStage,
};

const P: InstanceId = InstanceId(0);
const D: InstanceId = InstanceId(1);
/// Where a hand-off goes that failed.
const E: InstanceId = InstanceId(2);
const A: RequestId = RequestId(1);
const B: RequestId = RequestId(2);
/// A class of 2 s and 100 ms, stages of 1 s at least.
const FLOOR_US: u64 = 1_000_000;
const NONE: RequestObjectives = RequestObjectives { ttft_us: None, tbt_us: None };

/// Sends every request from `P` to `D`, and refuses where a test sets so.
struct SimpleCore {
    inputs: Vec<Input>,
    known: BTreeSet<RequestId>,
    /// Their KV is complete on `P`.
    prefilled: BTreeSet<RequestId>,
    /// Handed off to `E`.
    moved: BTreeSet<RequestId>,
    refuses: Option<RejectReason>,
    serves: bool,
    prefills: usize,
    foreseen_us: Option<u64>,
    last_token_us: u64,
    handoff_us: u64,
}

impl Default for SimpleCore {
    fn default() -> Self {
        Self {
            inputs: Vec::new(),
            known: BTreeSet::new(),
            prefilled: BTreeSet::new(),
            moved: BTreeSet::new(),
            refuses: None,
            serves: true,
            prefills: 1,
            foreseen_us: None,
            last_token_us: 0,
            handoff_us: 0,
        }
    }
}

fn start(request: RequestId) -> Order {
    Order::StartPrefill { request, instance: P, decode: D, fetch: None, room_tokens: 100, order: 1 }
}

impl Core for SimpleCore {
    fn step(&mut self, _: u64, input: Input, orders: &mut Vec<Order>) {
        self.inputs.push(input.clone());
        let release = |request, instance| Order::Release { request, instance };
        match input {
            Input::RequestArrived(Request { id, .. }) => match self.refuses {
                None => {
                    self.known.insert(id);
                    self.moved.remove(&id);
                    self.prefilled.remove(&id);
                    orders.push(start(id));
                }
                Some(reason) => orders.push(Order::Reject(Rejection {
                    request: id,
                    reason,
                    retry_after_us: 500_000,
                    predicted_ttft_us: None,
                    wasted_tokens: 0,
                })),
            },
            Input::PrefillFinished { request, .. } => _ = self.prefilled.insert(request),
            Input::HandoffFinished { request } if self.known.contains(&request) => {
                let instance = if self.moved.contains(&request) { E } else { D };
                orders.push(Order::StartDecode { request, instance });
            }
            Input::HandoffFailed { request }
                if self.known.contains(&request) && self.prefilled.contains(&request) =>
            {
                self.moved.insert(request);
                orders.extend([release(request, D), release(request, E)]);
                orders.push(Order::Handoff { request, from: P, to: E, room_tokens: 100 });
            }
            Input::HandoffFailed { request }
            | Input::PrefillFailed { request }
            | Input::DecodeFailed { request, .. }
            | Input::LegRefused { request, .. }
                if self.known.contains(&request) =>
            {
                self.moved.remove(&request);
                self.prefilled.remove(&request);
                orders.extend([P, D, E].map(|instance| release(request, instance)));
                orders.push(start(request));
            }
            Input::RequestCancelled { request } if self.known.remove(&request) => {
                orders.extend([P, D, E].map(|instance| release(request, instance)));
            }
            Input::DecodeFinished { request, .. } => _ = self.known.remove(&request),
            Input::InstanceLost { instance, .. } => {
                for request in core::mem::take(&mut self.known) {
                    orders.extend([P, D, E].map(|instance| release(request, instance)));
                    let stage = if instance == P { FailStage::NoPlacement } else { FailStage::DecodeLost };
                    orders.push(Order::Fail { request, stage });
                }
            }
            _ => {}
        }
    }

    fn request(&mut self, request: RequestId, emitted_tokens: u32) -> Option<Request> {
        Some(Request { id: request, emitted_tokens, ..Request::default() })
    }

    fn handoff_us(&self, _: RequestId) -> u64 {
        self.handoff_us
    }

    fn decodes_at_us(&self, _: RequestId) -> Option<u64> {
        self.foreseen_us
    }

    fn last_token_us(&self, _: RequestId) -> u64 {
        self.last_token_us
    }

    fn moves_kv(&self, _: InstanceId) -> bool {
        false
    }

    fn can_serve(&self) -> bool {
        self.serves
    }

    fn prefills(&self) -> usize {
        self.prefills
    }
}

/// Pairs, their conductor, and what came of the last thing that was done.
struct Bench {
    pairs: Pairs,
    core: SimpleCore,
    now_us: u64,
}

impl Bench {
    fn new() -> Self {
        let class = SloClass { ttft_us: 2_000_000, tbt_us: 20_000, ..SloClass::default() };
        let config = PairsConfig::new(&[class], 4, 1_000_000);
        Self { pairs: Pairs::new(config), core: SimpleCore::default(), now_us: 1 }
    }

    fn act(&mut self, act: impl FnOnce(&mut Pairs, u64, &mut SimpleCore, &mut Vec<Effect>)) -> Vec<Effect> {
        let mut effects = Vec::new();
        act(&mut self.pairs, self.now_us, &mut self.core, &mut effects);
        let known = &self.core.known;
        self.pairs.check(|request| known.contains(&request)).expect("the books agree");
        effects.retain(|effect| !matches!(effect, Effect::Entered { .. }));
        effects
    }

    fn arrive(&mut self, request: RequestId, asked_tokens: u32) -> Vec<Effect> {
        let (class, time_limit_us) = (ClassId(0), u64::MAX);
        let arrival = Arrival { request, class, objectives: NONE, time_limit_us, asked_tokens };
        self.act(|pairs, now_us, core, effects| pairs.arrive(now_us, arrival, core, effects))
    }

    /// Passes a report of an instance about the present attempt.
    fn on_fact(&mut self, request: RequestId, instance: InstanceId, fact: Fact) -> Vec<Effect> {
        let attempt = self.pairs.get(request).map_or(0, |pair| pair.attempt());
        let (heard, effects) = self.on_fact_of((request, attempt, instance), fact);
        assert_eq!(heard, FactOutcome::Yes, "{fact:?}");
        effects
    }

    fn on_fact_of(&mut self, about: (RequestId, u32, InstanceId), fact: Fact) -> (FactOutcome, Vec<Effect>) {
        let mut heard = FactOutcome::Stale;
        let effects = self.act(|pairs, now_us, core, effects| {
            heard = pairs.on_fact(now_us, (about, fact), core, effects);
        });
        (heard, effects)
    }

    fn wait(&mut self, us: u64) -> Vec<Effect> {
        self.now_us += us;
        self.act(|pairs, now_us, core, effects| {
            pairs.expire(now_us, core, effects);
            pairs.try_parked(now_us, core, effects);
        })
    }

    fn lose(&mut self, instance: InstanceId) -> Vec<Effect> {
        self.act(|pairs, now_us, core, effects| {
            pairs.lost(now_us, (instance, Epoch(1), true), core, effects);
        })
    }

    fn phase(&self, request: RequestId) -> Option<Phase> {
        self.pairs.get(request).map(|pair| pair.phase())
    }

    /// A request that decodes.
    fn decoding(&mut self, request: RequestId) {
        self.arrive(request, 10);
        self.on_fact(request, P, TOKEN);
        self.on_fact(request, P, PREFILLED);
        self.on_fact(request, D, LANDED);
        assert_eq!(self.phase(request), Some(Phase::Decoding));
    }

    fn inputs(&mut self) -> Vec<Input> {
        core::mem::take(&mut self.core.inputs)
    }
}

const TOKEN: Fact = Fact::Token { index: 0, last: false };
const PREFILLED: Fact = Fact::Prefilled { compute_us: 7, cached_tokens: 0 };
const LANDED: Fact = Fact::HandedOff { ok: true };
const NOT_LANDED: Fact = Fact::HandedOff { ok: false };
const FAILED: Fact = Fact::Failed(Failure::Other);

fn release(instance: InstanceId, attempt: u32) -> Effect {
    Effect::Release { request: A, attempt, instance }
}

#[test]
fn a_leg_says_what_belongs_to_its_stage_and_attempt_and_nothing_else() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    let about = |attempt, instance| (A, attempt, instance);
    for (attempt, instance, fact) in [
        (0, P, TOKEN),
        (2, P, PREFILLED),
        (1, D, TOKEN),
        (1, D, PREFILLED),
        (1, P, LANDED),
        (1, E, NOT_LANDED),
        (1, D, Fact::Offered),
        (1, P, Fact::Token { index: 1, last: false }),
    ] {
        assert_eq!(
            bench.on_fact_of(about(attempt, instance), fact),
            (FactOutcome::Stale, Vec::new()),
            "{fact:?}"
        );
    }
    // The KV may be there before the prefill has said that it is over.
    assert_eq!(bench.on_fact(A, D, LANDED), []);
    bench.on_fact(A, P, TOKEN);
    let decode = Effect::Decode { request: A, attempt: 1, instance: D };
    assert_eq!(bench.on_fact(A, P, PREFILLED), [decode]);
    for (instance, fact) in [(P, Fact::Token { index: 1, last: false }), (P, FAILED), (D, LANDED)] {
        assert_eq!(bench.on_fact_of(about(1, instance), fact).0, FactOutcome::Stale, "{fact:?}");
    }
    assert_eq!(bench.on_fact_of(about(1, D), TOKEN).0, FactOutcome::Repeated);
    bench.now_us += 5_000;
    bench.on_fact(A, D, Fact::Token { index: 1, last: true });
    // The client has the first token with the second.
    let first_us = bench.now_us;
    let ended = bench.act(|pairs, now_us, core, effects| pairs.complete(now_us, (A, 0), core, effects));
    assert_eq!(ended, [Effect::Ended { request: A }]);
    assert!(bench.inputs().contains(&Input::DecodeFinished {
        request: A,
        output_tokens: 2,
        first_us,
        tbt_us: 0
    }));
    assert!(bench.pairs.is_empty());
}

#[test]
fn what_was_parked_or_promised_is_not_refused_and_what_comes_new_is() {
    let mut bench = Bench::new();
    bench.core.refuses = Some(RejectReason::Ttft);
    assert!(matches!(bench.arrive(A, 10)[..], [Effect::Refuse(_)]));
    bench.core.refuses = None;
    bench.arrive(A, 10);
    bench.core.serves = false;
    bench.lose(P);
    assert_eq!(
        (bench.pairs.parked(), bench.pairs.get(A).unwrap().stage()),
        (1, &Stage::Waiting(WaitingStage::Parked))
    );
    // It is asked for every 50 ms, and waits as long as it is refused.
    bench.core.refuses = Some(RejectReason::NoInstance);
    bench.inputs();
    for _ in 0..3 {
        assert_eq!(bench.wait(50_000), []);
        assert_eq!(bench.wait(1_000), []);
    }
    let let_in = |input: &Input| matches!(input, Input::RequestArrived(r) if r.let_in);
    let asked = bench.inputs();
    assert!(asked.len() == 3 && asked.iter().all(let_in), "{asked:?}");
    // One that comes new waits alike, and is promised nothing.
    assert_eq!(bench.arrive(B, 10), []);
    assert!(!bench.inputs().iter().any(let_in), "nothing was promised to it");
    (bench.core.refuses, bench.core.serves) = (None, true);
    let effects = bench.wait(50_000);
    assert!(
        effects.contains(&Effect::Admitted { request: B })
            && !effects.contains(&Effect::Admitted { request: A })
    );
    assert_eq!((bench.pairs.parked(), bench.phase(A)), (0, Some(Phase::Prefilling)));
}

#[test]
fn nothing_waits_for_a_pair_of_instances_for_ever() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    bench.core.serves = false;
    bench.core.refuses = Some(RejectReason::NoInstance);
    bench.lose(P);
    bench.wait(2_900_000);
    assert_eq!(bench.pairs.parked(), 1);
    let effects = bench.wait(100_000);
    assert!(
        matches!(&effects[..], [Effect::Late { .. }, Effect::Refuse(r)] if r.reason == RejectReason::NoInstance)
    );
    // Five seconds after the loss none is expected back.
    bench.now_us += 3_000_000;
    assert!(matches!(bench.arrive(B, 10)[..], [Effect::Refuse(_)]));
}

/// Its hand-off has its whole time from now on: late when nothing speaks for it.
fn hands_off(bench: &mut Bench, request: RequestId) {
    bench.arrive(request, 10);
    bench.on_fact(request, P, PREFILLED);
    assert_eq!(bench.phase(request), Some(Phase::HandingOff));
}

#[test]
fn a_hand_off_over_a_slow_link_has_the_time_that_all_its_bytes_take() {
    let mut bench = Bench::new();
    // Ten seconds alone, and another beside it: with a slack of four, 80 s.
    bench.core.handoff_us = 10_000_000;
    hands_off(&mut bench, A);
    bench.arrive(B, 10);
    let late = |effects: &[Effect]| {
        effects.iter().any(|e| matches!(e, Effect::Late { request: A, phase: Phase::HandingOff, .. }))
    };
    for _ in 0..79 {
        assert!(!late(&bench.wait(1_000_000)), "{} µs", bench.now_us);
    }
    assert!(late(&bench.wait(2_000_000)));
}

#[test]
fn a_hand_off_that_waits_for_room_is_not_late_while_answers_are_drawn_there() {
    let mut bench = Bench::new();
    bench.decoding(B);
    hands_off(&mut bench, A);
    for _ in 0..20 {
        bench.core.last_token_us = bench.now_us + 1_000_000;
        assert_eq!(bench.wait(1_000_000), [], "B draws its tokens");
    }
    // B draws none now.
    let effects = bench.wait(3_000_000);
    let late = |e: &Effect| matches!(e, Effect::Late { request: A, phase: Phase::HandingOff, .. });
    assert!(effects.iter().any(late), "{effects:?}");
}

#[test]
fn hand_offs_are_tried_again_at_once_and_then_after_pauses_that_double() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    bench.on_fact(A, P, PREFILLED);
    let blame = Effect::Blame { request: A, cause: Cause::Handoff };
    assert_eq!(bench.on_fact(A, P, NOT_LANDED)[..2], [blame.clone(), release(D, 1)]);
    for (attempt, pause_us) in [(2, 100_000), (3, 200_000), (4, 400_000)] {
        assert_eq!(bench.on_fact(A, E, NOT_LANDED), core::slice::from_ref(&blame));
        // Both legs say so: it counts once.
        assert_eq!(bench.on_fact(A, P, NOT_LANDED), core::slice::from_ref(&blame));
        assert_eq!(bench.wait(pause_us - 1), []);
        let again = bench.wait(1);
        assert!(matches!(again.last(), Some(Effect::Handoff { attempt: next, .. }) if *next == attempt + 1));
    }
}

#[test]
fn each_stage_has_its_time_and_what_follows_from_its_end() {
    let late = |attempt, phase| {
        [Effect::Late { request: A, attempt, phase }, Effect::Blame { request: A, cause: Cause::Late(phase) }]
    };
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    assert_eq!(bench.wait(FLOOR_US - 1), []);
    assert_eq!(bench.wait(1)[..2], late(1, Phase::Prefilling));
    assert!(matches!(bench.inputs()[..], [_, Input::PrefillFailed { request: A }]));
    // A stage that is expected to take long gets twice as long.
    bench.core.foreseen_us = Some(bench.now_us + 5_000_000);
    bench.on_fact(A, P, FAILED);
    assert_eq!(bench.wait(9_999_999), []);
    assert_eq!(bench.wait(1)[..2], late(3, Phase::Prefilling));
    bench.on_fact(A, P, PREFILLED);
    bench.inputs();
    assert_eq!(bench.wait(2_000_000)[..2], late(4, Phase::HandingOff));
    assert_eq!(bench.inputs(), [Input::HandoffFailed { request: A }]);

    let mut bench = Bench::new();
    bench.decoding(A);
    // 40 gaps of the objective, or the floor; tokens move it.
    bench.core.last_token_us = 500_000;
    assert_eq!(bench.wait(1_200_000), []);
    assert_eq!(bench.wait(300_000)[..2], late(1, Phase::Decoding));
    let input = Input::DecodeFailed { request: A, emitted_tokens: 1 };
    assert!(bench.inputs().contains(&input));
}

#[test]
fn a_stage_is_not_late_while_its_instance_gets_on_with_others_before_it() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    bench.arrive(B, 10);
    bench.now_us += 500_000;
    bench.on_fact(A, P, PREFILLED);
    assert_eq!(bench.wait(500_000), [], "it may have been behind the other");
    bench.wait(900_000);
    assert_eq!(bench.phase(B), Some(Phase::Prefilling), "its room may be held by KV that has yet to leave");
    bench.on_fact(A, E, LANDED);
    let effects = bench.wait(2 * FLOOR_US);
    assert!(
        effects.contains(&Effect::Late { request: B, attempt: 1, phase: Phase::Prefilling }),
        "{effects:?}"
    );
}

#[test]
fn a_clients_time_limit_ends_any_stage() {
    let mut bench = Bench::new();
    let (class, time_limit_us) = (ClassId(0), 400_000);
    let arrival = Arrival { request: A, class, objectives: NONE, time_limit_us, asked_tokens: 10 };
    bench.act(|pairs, now_us, core, effects| pairs.arrive(now_us, arrival, core, effects));
    let effects = bench.wait(400_000);
    let give_up = Effect::GiveUp { request: A, phase: Phase::Prefilling, impatient: true };
    assert_eq!(effects.last(), Some(&give_up));
    assert!(bench.core.known.is_empty() && bench.pairs.is_empty());
}

#[test]
fn an_answer_that_ends_with_the_first_token_lets_both_legs_go() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    bench.on_fact(A, P, Fact::Token { index: 0, last: true });
    bench.act(|pairs, now_us, core, effects| pairs.complete(now_us, (A, 0), core, effects));
    assert!(bench.pairs.get(A).unwrap().is_answered());
    let effects = bench.on_fact(A, P, PREFILLED);
    assert_eq!(effects.last(), Some(&Effect::Ended { request: A }));
    assert!(effects.contains(&release(P, 1)) && effects.contains(&release(D, 1)));

    // Where one token was asked for, the decode leg gets no order at all.
    let effects = bench.arrive(A, 1);
    assert!(matches!(
        effects[0],
        Effect::Prefill(PrefillOrder { instance: P, decode: P, room_tokens: 0, .. })
    ));
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Expect { .. })), "{effects:?}");
    bench.on_fact(A, P, Fact::Token { index: 0, last: true });
    bench.act(|pairs, now_us, core, effects| pairs.complete(now_us, (A, 0), core, effects));
    let effects = bench.on_fact(A, P, PREFILLED);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Release { .. })), "{effects:?}");
    // After any end of an answered request, its client gets nothing more.
    bench.arrive(A, 10);
    bench.on_fact(A, P, Fact::Token { index: 0, last: true });
    bench.act(|pairs, now_us, core, effects| pairs.complete(now_us, (A, 0), core, effects));
    assert_eq!(bench.lose(P).last(), Some(&Effect::Ended { request: A }));
}

#[test]
fn what_was_in_an_engine_that_died_is_tried_once_more_one_at_a_time() {
    let mut bench = Bench::new();
    bench.arrive(A, 10);
    bench.arrive(B, 10);
    bench.lose(P);
    assert_eq!(bench.pairs.parked(), 2);
    // One instance: one trial.
    bench.wait(0);
    assert_eq!((bench.phase(A), bench.phase(B)), (Some(Phase::Prefilling), Some(Phase::Waiting)));
    // It draws a token and lives: the other's turn.
    bench.on_fact(A, P, TOKEN);
    bench.wait(0);
    assert_eq!(bench.phase(B), Some(Phase::Prefilling));
    // B is on trial: the death is B's, and A is spared once.
    let effects = bench.lose(P);
    assert!(effects.contains(&Effect::Condemn { request: B }), "{effects:?}");
    assert_eq!((bench.phase(A), bench.pairs.get(B).is_none()), (Some(Phase::Waiting), true));
}

#[test]
fn an_engine_that_never_had_it_is_not_held_against_a_request() {
    let mut bench = Bench::new();
    for _ in 0..4 {
        if bench.phase(A).is_none() {
            bench.arrive(A, 10);
        }
        let refused = Fact::Failed(Failure::Engine { cut_off: false, gone: false });
        bench.on_fact(A, P, refused);
        assert_eq!(bench.pairs.parked(), 1);
        bench.wait(0);
    }
    let cut = Fact::Failed(Failure::Engine { cut_off: true, gone: false });
    bench.on_fact(A, P, cut);
    bench.wait(0);
    assert!(bench.on_fact(A, P, cut).contains(&Effect::Condemn { request: A }));
}

#[test]
fn a_pause_of_the_driver_is_nobodys_fault() {
    let mut bench = Bench::new();
    bench.decoding(A);
    bench.arrive(B, 10);
    bench.now_us += 3_000_000;
    let now_us = bench.now_us;
    bench.pairs.excuse(now_us, 3_000_000);
    assert_eq!(bench.wait(900_000), []);
    let late = |effect: &&Effect| matches!(effect, Effect::Late { .. });
    assert_eq!(bench.wait(100_000).iter().filter(late).count(), 2, "both are late now");
}

/// Under any sequence of events the state is consistent after each step (`Bench::act`), every request ends once, and
/// nothing is left.
#[test]
fn under_any_script_each_request_ends_once() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let mut bench = Bench::new();
        bench.core.prefills = 2;
        let mut ends = [0; 40];
        let mut arrived = 0;
        for step in 0..400 {
            bench.core.refuses = rng.chance_permille(50).then_some(RejectReason::Ttft);
            bench.core.last_token_us = bench.now_us - rng.below(1_500_000).min(bench.now_us);
            let request = RequestId(rng.below(arrived.max(1)));
            let instance = InstanceId(u32::try_from(rng.below(3)).unwrap());
            let index = u32::try_from(rng.below(3)).unwrap();
            let facts = [
                TOKEN,
                PREFILLED,
                LANDED,
                NOT_LANDED,
                FAILED,
                Fact::Offered,
                Fact::Token { index, last: false },
                Fact::Failed(Failure::Preempted),
                Fact::Failed(Failure::Engine { cut_off: rng.chance_permille(500), gone: false }),
            ];
            let effects = match rng.below(20) {
                0..4 if arrived < 40 && step < 300 => {
                    arrived += 1;
                    bench.arrive(RequestId(arrived - 1), 1 + u32::try_from(rng.below(3)).unwrap())
                }
                4 => bench.wait(rng.below(400_000)),
                5 if rng.chance_permille(300) => bench.lose(instance),
                6 if bench.phase(request).is_some() => {
                    let mut effects = bench.act(|pairs, now_us, core, effects| {
                        pairs.complete(now_us, (request, 0), core, effects)
                    });
                    effects.retain(|effect| *effect != Effect::Admitted { request });
                    effects
                }
                _ => {
                    let attempt = bench.pairs.get(request).map_or(0, |pair| pair.attempt());
                    let fact = facts[usize::try_from(rng.below(facts.len() as u64)).unwrap()];
                    bench.on_fact_of((request, attempt, instance), fact).1
                }
            };
            count_ends(&effects, &mut ends);
        }
        bench.core.refuses = None;
        for request in (0..arrived).map(RequestId) {
            if bench.phase(request).is_some() {
                bench.act(|pairs, now_us, core, effects| pairs.cancel(now_us, request, core, effects));
                ends[usize::try_from(request.0).unwrap()] += 1;
            }
        }
        let arrived = usize::try_from(arrived).unwrap();
        assert!(ends[..arrived].iter().all(|count| *count == 1), "seed {seed}: {ends:?}");
        assert!(
            bench.pairs.is_empty()
                && bench.core.known.is_empty()
                && bench.pairs.next_deadline().is_none_or(|_| bench.pairs.parked() == 0)
        );
    }
}

fn count_ends(effects: &[Effect], ends: &mut [u32]) {
    for effect in effects {
        let request = match effect {
            Effect::Refuse(Rejection { request, .. })
            | Effect::CutShort(Rejection { request, .. })
            | Effect::Fail { request, .. }
            | Effect::Condemn { request }
            | Effect::GiveUp { request, .. }
            | Effect::Ended { request } => request,
            _ => continue,
        };
        ends[usize::try_from(request.0).unwrap()] += 1;
    }
}

impl super::Pair {
    /// Tokens that the client had when the present attempt began.
    fn given_tokens(&self) -> Option<u32> {
        let mut stage = self.stage().clone();
        stage.tokens_mut().map(|tokens| tokens.given)
    }
}
