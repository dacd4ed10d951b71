//! Pairs and the naive reference under any script. After each step both have given their conductors the same inputs,
//! have done the same and have the same state.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use baton_scheduler::Input;
use baton_types::{ClassId, Epoch, InstanceId, RequestId, RequestObjectives, Rng, SloClass};

use super::super::{
    Arrival, Effect, EmittedTokens, Fact, FactOutcome, Failure, Pairs, PairsConfig, PrefillOrder,
};
use super::naive::{Limits, Naive, TBT_US, View};
use super::scripted::{ROLES, ScriptedCore, spec};

/// How often each kind of thing came up.
type Counts = BTreeMap<String, u32>;

#[derive(Clone, Debug)]
enum Step {
    Arrive(Arrival),
    Hear((RequestId, u32, InstanceId), Fact),
    Cancel(RequestId),
    Complete(RequestId),
    Emitted(RequestId, u32),
    Expire,
    TryParked,
    Lost(InstanceId, bool),
    Told(Input),
    Excuse(u64),
    Configure(Limits),
}

fn config_of(limits: &Limits) -> PairsConfig {
    let class = |(ttft_us, tbt_us): &(u64, u64)| SloClass {
        ttft_us: *ttft_us,
        tbt_us: *tbt_us,
        ..SloClass::default()
    };
    let classes: Vec<SloClass> = limits.classes.iter().map(class).collect();
    PairsConfig::new(&classes, u32::try_from(limits.slack).unwrap(), limits.floor_us)
}

fn limits(rng: &mut Rng) -> Limits {
    let mut class = || (1_000_000 + rng.below(3_000_000), 10_000 + rng.below(40_000));
    let classes = (0..3).map(|_| class()).collect();
    let floor_us = 200_000 + rng.below(1_000_000);
    Limits { classes, slack: 1 + rng.below(4), floor_us }
}

/// The first word of what is printed of it.
/// When the first of so many tokens came, some time ago.
fn first_us(now_us: u64, tokens: u32) -> u64 {
    now_us.saturating_sub(1_000 * u64::from(tokens))
}

fn name(what: &impl core::fmt::Debug) -> String {
    format!("{what:?}").split([' ', '(']).next().unwrap_or_default().to_string()
}

/// Both, and the script that they follow.
struct Script {
    rng: Rng,
    now_us: u64,
    pairs: Pairs,
    core: ScriptedCore,
    naive: Naive,
    arrived: u64,
    epoch: u32,
    /// Everything that was said, to be said again.
    said: Vec<Step>,
}

impl Script {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let limits = limits(&mut rng);
        let core = ScriptedCore::new(seed);
        Self {
            rng,
            now_us: 1,
            pairs: Pairs::new(config_of(&limits)),
            naive: Naive::new(limits, core.clone()),
            core,
            arrived: 0,
            epoch: 1,
            said: Vec::new(),
        }
    }

    fn act(&mut self, step: &Step) -> (FactOutcome, Vec<Effect>) {
        let (now_us, pairs, core) = (self.now_us, &mut self.pairs, &mut self.core);
        let mut all = Vec::new();
        let effects = &mut all;
        match step.clone() {
            Step::Arrive(arrival) => pairs.arrive(now_us, arrival, core, effects),
            Step::Hear(about, fact) => return (pairs.on_fact(now_us, (about, fact), core, effects), all),
            Step::Cancel(request) => pairs.cancel(now_us, request, core, effects),
            Step::Complete(request) => pairs.complete(now_us, (request, TBT_US), core, effects),
            Step::Emitted(request, tokens) => {
                let first_us = first_us(now_us, tokens);
                let emitted = EmittedTokens { request, tokens, first_us, last: false };
                pairs.emitted(now_us, emitted, core, effects);
            }
            Step::Expire => pairs.expire(now_us, core, effects),
            Step::TryParked => pairs.try_parked(now_us, core, effects),
            Step::Lost(instance, died) => pairs.lost(now_us, (instance, Epoch(1), died), core, effects),
            Step::Told(input) => pairs.step(now_us, input, core, effects),
            Step::Excuse(pause_us) => pairs.excuse(now_us, pause_us),
            Step::Configure(limits) => pairs.configure(config_of(&limits)),
        }
        (FactOutcome::Stale, all)
    }

    fn predict(&mut self, step: &Step) -> (FactOutcome, Vec<Effect>) {
        let naive = &mut self.naive;
        naive.now_us = self.now_us;
        let mut heard = FactOutcome::Stale;
        match step.clone() {
            Step::Arrive(arrival) => naive.arrive(arrival),
            Step::Hear(about, fact) => heard = naive.on_fact(about, fact),
            Step::Cancel(request) => naive.cancel(request),
            Step::Complete(request) => naive.complete(request),
            Step::Emitted(request, tokens) => {
                naive.emitted(request, tokens, first_us(self.now_us, tokens));
            }
            Step::Expire => naive.expire(),
            Step::TryParked => naive.try_parked(),
            Step::Lost(instance, died) => naive.lost(instance, Epoch(1), died),
            Step::Told(input) => naive.feed(input),
            Step::Excuse(pause_us) => naive.excuse(pause_us),
            Step::Configure(limits) => naive.configure(limits),
        }
        (heard, core::mem::take(&mut naive.effects))
    }

    /// Does a step on both sides and compares them.
    fn step(&mut self, step: &Step, counts: &mut Counts) {
        let (heard, effects) = self.act(step);
        let predicted = self.predict(step);
        assert_eq!((heard, &effects), (predicted.0, &predicted.1), "{step:?}");
        let told = self.core.inputs.len();
        assert_eq!(self.core.inputs.last(), self.naive.core.inputs.last(), "{step:?}");
        assert_eq!(told, self.naive.core.inputs.len(), "{step:?}");
        let view = |(request, pair): (RequestId, &super::super::Pair)| -> View {
            let (phase, attempt, legs, moves) = (pair.phase(), pair.attempt(), pair.legs(), pair.moves());
            (request, phase, attempt, legs, moves, pair.is_answered(), pair.retries_handoff())
        };
        let views: Vec<View> = self.pairs.iter().map(view).collect();
        assert_eq!(views, self.naive.view(), "{step:?}");
        assert_eq!(self.pairs.next_deadline(), self.naive.next_deadline(), "{step:?}");
        assert_eq!(self.pairs.parked(), self.naive.parked(), "{step:?}");
        self.pairs.check(|request| self.core.knows(request)).expect("the books agree");
        assert_eq!(self.core.live(), self.pairs.len() - self.pairs.parked(), "{step:?}");
        *counts.entry(name(step)).or_default() += 1;
        if let Step::Hear(about, fact) = step {
            *counts.entry(name(&heard)).or_default() += 1;
            if heard == FactOutcome::Yes {
                *counts.entry(format!("heard {}", name(fact))).or_default() += 1;
                self.heard(about.0, *fact);
            }
        }
        effects.iter().for_each(|effect| count(effect, counts));
        counts
            .entry("answered".into())
            .and_modify(|n| *n += u32::from(views.iter().any(|v| v.5)))
            .or_default();
        counts.entry("again".into()).and_modify(|n| *n += u32::from(views.iter().any(|v| v.6))).or_default();
    }

    /// Records the driver's knowledge of tokens.
    fn heard(&mut self, request: RequestId, fact: Fact) {
        if matches!(fact, Fact::Token { .. }) {
            self.core.tokens_us.insert(request, self.now_us);
            self.naive.core.tokens_us.insert(request, self.now_us);
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.rng.below(bound as u64)).unwrap()
    }

    /// One of the requests under way, mostly.
    fn someone(&mut self) -> RequestId {
        let live: Vec<RequestId> = self.pairs.iter().map(|(request, _)| request).collect();
        if live.is_empty() || self.rng.chance_permille(30) {
            return RequestId(self.rng.below(self.arrived + 1));
        }
        live[self.below(live.len())]
    }

    fn arrival(&mut self) -> Step {
        self.arrived += 1;
        let patient = self.rng.chance_permille(800);
        let time_limit_us = if patient { 1 << 60 } else { self.now_us + self.rng.below(6_000_000) };
        let mut own = |most_us| self.rng.chance_permille(300).then(|| 1 + self.rng.below(most_us));
        let objectives = RequestObjectives { ttft_us: own(6_000_000), tbt_us: own(100_000) };
        Step::Arrive(Arrival {
            request: RequestId(self.arrived),
            class: ClassId(u16::try_from(self.rng.below(4)).unwrap()),
            objectives,
            time_limit_us,
            asked_tokens: 1 + u32::try_from(self.rng.below(12)).unwrap(),
        })
    }

    /// A leg's report: mostly a fitting one, of the present attempt.
    fn saying(&mut self) -> Step {
        let request = self.someone();
        let pair = self.pairs.get(request);
        let (attempt, legs) = pair.map_or((1, [None, None]), |pair| (pair.attempt(), pair.legs()));
        let (given, emitted) =
            pair.map_or((0, 0), |pair| (pair.given_tokens().unwrap_or(0), pair.emitted_tokens));
        let any = InstanceId(u32::try_from(self.rng.below(5)).unwrap());
        let leg = legs[self.below(2)].filter(|_| self.rng.chance_permille(950)).unwrap_or(any);
        let attempt = match self.rng.below(20) {
            0 => attempt.saturating_sub(1),
            1 => attempt + 1,
            _ => attempt,
        };
        let index = [emitted, emitted, given, given + 1][self.below(4)];
        let last = emitted + 1 >= pair_asked(&self.pairs, request) || self.rng.chance_permille(60);
        let ok = self.rng.chance_permille(600);
        let (cut_off, gone) = (self.rng.chance_permille(400), self.rng.chance_permille(400));
        let fact = match self.rng.below(40) {
            0..14 => Fact::Token { index, last },
            14..22 => Fact::Prefilled { compute_us: index.into(), cached_tokens: 3 },
            22..31 => Fact::HandedOff { ok },
            31 | 32 => Fact::Ended,
            33 => Fact::Offered,
            34 | 35 => Fact::Fetched { ok },
            36 => Fact::PromptLogprobs,
            37 if ok => Fact::Failed(Failure::Busy { us: 1_000_000 }),
            37 => Fact::Failed(Failure::Other),
            38 => Fact::Failed(Failure::Engine { cut_off, gone }),
            _ => Fact::Failed(if ok { Failure::Preempted } else { Failure::OfRequest }),
        };
        Step::Hear((request, attempt, leg), fact)
    }

    /// An instance leaves or comes back.
    fn fleet(&mut self, counts: &mut Counts) {
        let at = self.below(5);
        let instance = InstanceId(u32::try_from(at).unwrap());
        if !self.core.alive[at] {
            self.epoch += 1;
            let joined = Input::InstanceJoined(spec(instance.0, ROLES[at], self.epoch));
            self.step(&Step::Told(joined), counts);
        } else if self.rng.chance_permille(400) {
            self.core.alive[at] = false;
            self.naive.core.alive[at] = false;
            let died = self.rng.chance_permille(600);
            self.step(&Step::Lost(instance, died), counts);
        }
    }

    fn time(&mut self, counts: &mut Counts) {
        self.now_us += match self.rng.below(40) {
            0..20 => self.rng.below(20_000),
            20..39 => self.rng.below(400_000),
            _ => self.rng.below(6_000_000),
        };
        self.step(&Step::Expire, counts);
        if self.rng.chance_permille(800) {
            self.step(&Step::TryParked, counts);
        }
    }

    /// Plays one random event.
    fn next(&mut self, counts: &mut Counts) {
        let request = self.someone();
        let step = match self.rng.below(1000) {
            0..80 => self.arrival(),
            80..90 => Step::Cancel(request),
            90..93 => Step::Complete(request),
            93..95 => {
                Step::Emitted(request, self.pairs.get(request).map_or(0, |pair| pair.emitted_tokens + 1))
            }
            95..120 => return self.fleet(counts),
            120..220 => return self.time(counts),
            220..223 => {
                let pause_us = self.rng.below(3_000_000);
                self.now_us += pause_us;
                Step::Excuse(pause_us)
            }
            223..225 => Step::Configure(limits(&mut self.rng)),
            225..235 => Step::Told(Input::TimerFired),
            235..265 if !self.said.is_empty() => {
                let at = self.below(self.said.len());
                self.said[at].clone()
            }
            _ => self.saying(),
        };
        self.step(&step, counts);
        if let Step::Hear(about, fact) = &step {
            self.said.push(step.clone());
            // A client whose answer is over gets nothing further of it.
            let had = self.pairs.get(about.0).map(|pair| pair.emitted_tokens);
            if let Fact::Token { index, last: true } = fact
                && had == Some(index + 1)
            {
                self.step(&Step::Complete(about.0), counts);
            }
        }
    }

    /// No request arrives, and time passes: all requests come to an end, and leave nothing.
    fn finish(&mut self, counts: &mut Counts) {
        for _ in 0..400 {
            self.now_us += 3_000_000;
            self.step(&Step::Expire, counts);
            self.step(&Step::TryParked, counts);
        }
        assert!(self.pairs.len() < 3, "{:?}", self.pairs);
        let left: Vec<RequestId> = self.pairs.iter().map(|(request, _)| request).collect();
        for request in left {
            self.step(&Step::Cancel(request), counts);
        }
        assert_eq!((self.pairs.len(), self.core.live(), self.pairs.parked()), (0, 0, 0));
        self.step(&Step::Expire, counts);
        assert_eq!(self.pairs.next_deadline(), None);
    }
}

fn pair_asked(pairs: &Pairs, request: RequestId) -> u32 {
    pairs.get(request).map_or(1, |pair| pair.asked_tokens)
}

fn count(effect: &Effect, counts: &mut Counts) {
    let what = match effect {
        Effect::Entered { phase, .. } => format!("entered {phase:?}"),
        Effect::Blame { cause, .. } => format!("blame {cause:?}"),
        Effect::Late { phase, .. } => format!("late {phase:?}"),
        Effect::Refuse(rejection) => format!("refuse {:?}", rejection.reason),
        Effect::CutShort(rejection) => format!("cut short {:?}", rejection.reason),
        Effect::GiveUp { impatient, .. } => format!("give up {impatient}"),
        Effect::Fail { stage, .. } => format!("fail {stage:?}"),
        Effect::Prefill(PrefillOrder { instance, decode, .. }) => format!("prefill {}", instance == decode),
        Effect::Order(order) => format!("order {}", name(order)),
        other => name(other),
    };
    *counts.entry(what).or_default() += 1;
}

/// Events that must have come up, at least so often.
const WANTED: &[(u32, &[&str])] = &[
    (
        900,
        &[
            "Arrive",
            "Hear",
            "Cancel",
            "Complete",
            "Expire",
            "TryParked",
            "Lost",
            "Told",
            "Admitted",
            "Release",
        ],
    ),
    (
        900,
        &["Yes", "Stale", "Repeated", "heard Token", "heard Prefilled", "heard HandedOff", "heard Fetched"],
    ),
    (
        900,
        &[
            "heard Ended",
            "heard Failed",
            "Decode",
            "Handoff",
            "Ended",
            "prefill false",
            "prefill true",
            "Expect",
            "again",
        ],
    ),
    (900, &["entered Waiting", "entered Prefilling", "entered HandingOff", "entered Decoding", "answered"]),
    (900, &["late Waiting", "late Prefilling", "late HandingOff", "late Decoding"]),
    (900, &["blame Leg", "blame Handoff", "blame Lost"]),
    (900, &["blame Late(Prefilling)", "blame Late(HandingOff)", "blame Late(Decoding)"]),
    (500, &["give up false", "give up true", "order Explain", "order Replicate", "heard PromptLogprobs"]),
    (
        500,
        &[
            "fail PrefillLost",
            "fail DecodeLost",
            "fail PrefillFailed",
            "fail DecodeFailed",
            "fail HandoffFailed",
        ],
    ),
    (
        100,
        &[
            "refuse Ttft",
            "refuse Tbt",
            "refuse Room",
            "refuse QueueFull",
            "refuse NoInstance",
            "refuse TooLong",
        ],
    ),
    (100, &["refuse Costly", "refuse Unreachable", "Emitted", "Excuse", "Configure", "heard Offered"]),
    (20, &["Condemn", "blame LostBehind", "fail NoPlacement"]),
];

#[test]
fn under_any_script_pairs_do_what_the_naive_reference_does() {
    let mut counts = Counts::new();
    for seed in 0..700 {
        let mut script = Script::new(seed);
        for _ in 0..400 {
            script.next(&mut counts);
        }
        script.finish(&mut counts);
    }
    for (least, names) in WANTED {
        for name in *names {
            let count = counts.get(*name).copied().unwrap_or(0);
            assert!(count >= *least, "{name} came up {count} times of {least}: {counts:#?}");
        }
    }
}
