//! The states of a request. Each is a type of its own that only the state before it makes: a step consumes the old
//! state, and what belongs to an attempt ends with it.

use baton_types::{ClassId, InstanceId, RequestObjectives};

use super::Arrival;
use super::progress::StageProgress;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Sent nowhere.
    Waiting,
    /// Sent to its prefill instance.
    Prefilling,
    /// Prefilled; KV is on the way to its decode instance.
    HandingOff,
    /// The decode instance generates tokens.
    Decoding,
}

impl Phase {
    /// The word in errors, metrics and on the admin page.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "queue",
            Self::Prefilling => "prefill",
            Self::HandingOff => "handoff",
            Self::Decoding => "decode",
        }
    }

    /// The word where its time was over.
    #[must_use]
    pub const fn timeout(self) -> &'static str {
        match self {
            Self::Waiting => "queue_timeout",
            Self::Prefilling => "prefill_timeout",
            Self::HandingOff => "handoff_timeout",
            Self::Decoding => "decode_timeout",
        }
    }
}

/// The state of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Sent nowhere.
    Waiting(WaitingStage),
    /// Sent to its prefill instance.
    Prefilling(PrefillStage),
    /// The client has all of its answer, and the prefill is not over yet: both legs are let go then.
    Answered(AnsweredStage),
    /// Prefilled; KV is on the way.
    HandingOff(HandoffStage),
    /// The decode instance generates tokens.
    Decoding(DecodeStage),
}

/// A request that no instance has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitingStage {
    /// Its client was promised nothing: it has just come, or nothing could take it so far.
    Unpromised,
    /// The conductor holds it back.
    Queued,
    /// Nothing can take it right now. The conductor does not know it, or was asked again and holds it back.
    Parked,
}

/// The legs of an attempt that were not let go: one at least. The decode leg is missing, too, where the prefill draws
/// all that is left of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttemptLegs {
    Prefill(InstanceId),
    Decode(InstanceId),
    Both { prefill: InstanceId, decode: InstanceId },
}

/// The answer's tokens, as an attempt counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttemptTokens {
    /// Tokens that the client had when the attempt began: part of its prompt.
    pub given: u32,
    /// When the first token of this attempt came, µs; 0 before.
    pub first_us: u64,
    /// Tokens for which there is room where it is decoded.
    pub room: u32,
}

/// See [`Stage::Prefilling`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillStage {
    legs: AttemptLegs,
    tokens: AttemptTokens,
    turn: StageProgress,
    /// The hand-off was acknowledged before the prefill's own report came.
    landed: bool,
}

/// See [`Stage::Answered`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnsweredStage {
    legs: Option<AttemptLegs>,
    tokens: AttemptTokens,
}

/// See [`Stage::HandingOff`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandoffStage {
    legs: AttemptLegs,
    tokens: AttemptTokens,
    turn: StageProgress,
    /// When it began, µs.
    since_us: u64,
}

/// See [`Stage::Decoding`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeStage {
    decode: InstanceId,
    /// The instance that prefilled it, until that leg is let go.
    prefill: Option<InstanceId>,
    tokens: AttemptTokens,
    /// When it was ordered, µs.
    since_us: u64,
}

impl AttemptLegs {
    fn new(prefill: Option<InstanceId>, decode: Option<InstanceId>) -> Option<Self> {
        match (prefill, decode) {
            (Some(prefill), Some(decode)) => Some(Self::Both { prefill, decode }),
            (Some(prefill), None) => Some(Self::Prefill(prefill)),
            (None, Some(decode)) => Some(Self::Decode(decode)),
            (None, None) => None,
        }
    }

    pub(super) const fn instances(self) -> [Option<InstanceId>; 2] {
        match self {
            Self::Prefill(prefill) => [Some(prefill), None],
            Self::Decode(decode) => [None, Some(decode)],
            Self::Both { prefill, decode } => [Some(prefill), Some(decode)],
        }
    }

    fn without(self, instance: InstanceId) -> Option<Self> {
        let [prefill, decode] = self.instances().map(|leg| leg.filter(|at| *at != instance));
        Self::new(prefill, decode)
    }
}

impl WaitingStage {
    /// The conductor took it on.
    pub(super) const fn admitted(self) -> Self {
        match self {
            Self::Unpromised => Self::Queued,
            Self::Queued | Self::Parked => self,
        }
    }

    /// Nothing can take it right now.
    pub(super) const fn parked(self) -> Self {
        match self {
            Self::Unpromised => self,
            Self::Queued | Self::Parked => Self::Parked,
        }
    }

    /// It is sent, with the tokens that its client has.
    pub(super) const fn sent(
        self,
        legs: AttemptLegs,
        tokens: AttemptTokens,
        turn: StageProgress,
    ) -> PrefillStage {
        PrefillStage { legs, tokens, turn, landed: false }
    }
}

impl PrefillStage {
    /// The KV is on the decode instance, or can be fetched from there.
    pub(super) const fn landed(self) -> Self {
        debug_assert!(self.legs.instances()[1].is_some(), "KV lands where there is a decode leg");
        Self { landed: true, ..self }
    }

    /// Tokens that the client had when the attempt began.
    pub(super) const fn given_tokens(&self) -> u32 {
        self.tokens.given
    }

    /// The client has all of its answer.
    pub(super) const fn answered(self) -> AnsweredStage {
        AnsweredStage { legs: Some(self.legs), tokens: self.tokens }
    }

    /// The prefill is over; its KV may be on the way still.
    pub(super) const fn prefilled(self, turn: StageProgress, now_us: u64) -> HandoffStage {
        HandoffStage { legs: self.legs, tokens: self.tokens, turn, since_us: now_us }
    }
}

impl HandoffStage {
    /// The KV that its prefill instance alone has goes from there to another instance.
    pub(super) fn handed_off(
        self,
        (from, to): (InstanceId, InstanceId),
        room: u32,
        turn: StageProgress,
        now_us: u64,
    ) -> Self {
        debug_assert_eq!(self.legs, AttemptLegs::Prefill(from), "handed off without KV, or twice");
        debug_assert!(from != to, "KV is handed off to where it is");
        debug_assert!(now_us >= self.since_us, "a later attempt begins later");
        let legs = AttemptLegs::Both { prefill: from, decode: to };
        let tokens = AttemptTokens { room, ..self.tokens };
        Self { legs, tokens, turn, since_us: now_us }
    }

    /// The KV is on its decode instance.
    pub(super) fn landed(self, on: InstanceId, now_us: u64) -> DecodeStage {
        let [prefill, decode] = self.legs.instances();
        debug_assert_eq!(decode, Some(on), "KV lands where there is no decode leg");
        debug_assert!(now_us >= self.since_us, "KV lands after it was sent");
        DecodeStage { decode: on, prefill, tokens: self.tokens, since_us: now_us }
    }

    /// When it began, µs.
    pub(super) const fn since_us(&self) -> u64 {
        self.since_us
    }
}

impl DecodeStage {
    /// Its decode instance.
    pub(super) const fn decode(&self) -> InstanceId {
        self.decode
    }

    /// When it was ordered, µs.
    pub(super) const fn since_us(&self) -> u64 {
        self.since_us
    }
}

impl Stage {
    /// One leg fewer. Without any, the request waits again, unless its client has all of its answer.
    pub(super) fn without(self, instance: InstanceId) -> Self {
        let next = match self {
            Self::Waiting(waiting) => Some(Self::Waiting(waiting)),
            Self::Answered(AnsweredStage { legs, tokens }) => {
                let legs = legs.and_then(|legs| legs.without(instance));
                Some(Self::Answered(AnsweredStage { legs, tokens }))
            }
            Self::Prefilling(stage) => {
                stage.legs.without(instance).map(|legs| Self::Prefilling(PrefillStage { legs, ..stage }))
            }
            Self::HandingOff(stage) => {
                stage.legs.without(instance).map(|legs| Self::HandingOff(HandoffStage { legs, ..stage }))
            }
            Self::Decoding(stage) => {
                (stage.decode != instance).then_some(Self::Decoding(DecodeStage { prefill: None, ..stage }))
            }
        };
        let next = next.unwrap_or(Self::Waiting(WaitingStage::Queued));
        debug_assert!(!next.legs().contains(&Some(instance)), "a leg that was let go is gone: {next:?}");
        next
    }

    /// Where it is prefilled, and where it is decoded; none for a leg that it does not have.
    pub(super) const fn legs(&self) -> [Option<InstanceId>; 2] {
        match self {
            Self::Waiting(_) | Self::Answered(AnsweredStage { legs: None, .. }) => [None; 2],
            Self::Answered(AnsweredStage { legs: Some(legs), .. })
            | Self::Prefilling(PrefillStage { legs, .. })
            | Self::HandingOff(HandoffStage { legs, .. }) => legs.instances(),
            Self::Decoding(stage) => [stage.prefill, Some(stage.decode)],
        }
    }

    /// The counts of its attempt, if it has one.
    pub(super) const fn tokens_mut(&mut self) -> Option<&mut AttemptTokens> {
        match self {
            Self::Waiting(_) => None,
            Self::Answered(AnsweredStage { tokens, .. })
            | Self::Prefilling(PrefillStage { tokens, .. })
            | Self::HandingOff(HandoffStage { tokens, .. })
            | Self::Decoding(DecodeStage { tokens, .. }) => Some(tokens),
        }
    }

    /// Its turn among others, while it waits for one.
    pub(super) const fn turn_mut(&mut self) -> Option<&mut StageProgress> {
        match self {
            Self::Prefilling(PrefillStage { turn, .. }) | Self::HandingOff(HandoffStage { turn, .. }) => {
                Some(turn)
            }
            Self::Waiting(_) | Self::Answered(_) | Self::Decoding(_) => None,
        }
    }
}

/// A request under way.
#[derive(Clone, Debug)]
pub struct Pair {
    pub(super) class: ClassId,
    pub(super) objectives: RequestObjectives,
    pub(super) time_limit_us: u64,
    pub(super) asked_tokens: u32,
    /// Tokens that the client has.
    pub(super) emitted_tokens: u32,
    /// Counts placements and hand-offs; facts about an earlier one are out of date.
    pub(super) attempt: u32,
    pub(super) moves: u32,
    /// Predicted time to its first token when it was last placed, µs.
    pub(super) foreseen_us: u64,
    /// Hand-offs that failed, and the attempt of the latest.
    pub(super) failed_handoffs: (u32, u32),
    /// Since when engines have refused it for now, µs, with no token since.
    pub(super) refused_since_us: Option<u64>,
    /// Engines that died while it was in them.
    pub(super) deaths: u32,
    /// It was once in an engine that died with another in it that was on trial: that death was the other's.
    pub(super) spared: bool,
    pub(super) stage: Stage,
    /// When the present stage is given up, µs.
    pub(super) deadline_us: u64,
}

impl Pair {
    pub(super) const fn new(arrival: &Arrival) -> Self {
        Self {
            class: arrival.class,
            objectives: arrival.objectives,
            time_limit_us: arrival.time_limit_us,
            asked_tokens: arrival.asked_tokens,
            emitted_tokens: 0,
            attempt: 0,
            moves: 0,
            foreseen_us: 0,
            failed_handoffs: (0, 0),
            refused_since_us: None,
            deaths: 0,
            spared: false,
            stage: Stage::Waiting(WaitingStage::Unpromised),
            deadline_us: 0,
        }
    }

    /// Goes on from its state to the one that `next` makes of it.
    pub(super) fn advance(&mut self, next: impl FnOnce(Stage) -> Stage) {
        let stage = core::mem::replace(&mut self.stage, Stage::Waiting(WaitingStage::Queued));
        self.stage = next(stage);
    }

    /// Goes on from waiting, if it waits.
    pub(super) fn if_waiting(&mut self, next: impl FnOnce(WaitingStage) -> Stage) {
        self.advance(|stage| if let Stage::Waiting(waiting) = stage { next(waiting) } else { stage });
    }

    /// Goes on from its prefill, if it is there.
    pub(super) fn if_prefilling(&mut self, next: impl FnOnce(PrefillStage) -> Stage) {
        self.advance(
            |stage| if let Stage::Prefilling(prefilling) = stage { next(prefilling) } else { stage },
        );
    }

    /// Goes on from its hand-off, if it is there.
    pub(super) fn if_handing_off(&mut self, next: impl FnOnce(HandoffStage) -> Stage) {
        self.advance(
            |stage| if let Stage::HandingOff(handing_off) = stage { next(handing_off) } else { stage },
        );
    }

    /// Whether its KV is where it is decoded while its prefill's own report is to come.
    pub(super) const fn has_landed_early(&self) -> bool {
        matches!(self.stage, Stage::Prefilling(PrefillStage { landed: true, .. }))
    }

    /// Its KV is where it is decoded before its prefill's own report has come.
    pub(super) fn lands_early(&mut self) {
        self.if_prefilling(|prefilling| Stage::Prefilling(prefilling.landed()));
    }

    /// Its state.
    #[must_use]
    pub const fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Where it is.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        match self.stage {
            Stage::Waiting(_) => Phase::Waiting,
            Stage::Prefilling(_) | Stage::Answered(_) => Phase::Prefilling,
            Stage::HandingOff(_) => Phase::HandingOff,
            Stage::Decoding(_) => Phase::Decoding,
        }
    }

    /// Placements and hand-offs so far.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Times that it went on elsewhere in the middle of its answer.
    #[must_use]
    pub const fn moves(&self) -> u32 {
        self.moves
    }

    /// Where it is prefilled, and where it is decoded; none for a leg that it does not have.
    #[must_use]
    pub const fn legs(&self) -> [Option<InstanceId>; 2] {
        self.stage.legs()
    }

    /// Whether it is prefilled, and goes on at another instance. A client has the token that its prefill draws with the next
    /// one, from the decode leg (ADR 0004).
    #[must_use]
    pub fn decodes_elsewhere(&self) -> bool {
        let [prefill, decode] = self.legs();
        matches!(self.stage, Stage::Prefilling(_)) && decode.is_some() && decode != prefill
    }

    /// Whether its client has all of its answer, and its legs have not been let go yet.
    #[must_use]
    pub const fn is_answered(&self) -> bool {
        matches!(self.stage, Stage::Answered(_))
    }

    /// Whether its client was promised nothing yet.
    pub(super) const fn is_unpromised(&self) -> bool {
        matches!(self.stage, Stage::Waiting(WaitingStage::Unpromised))
    }

    /// Whether its hand-off failed and is tried again after a pause.
    #[must_use]
    pub const fn retries_handoff(&self) -> bool {
        let (failed, latest) = self.failed_handoffs;
        failed > 1
            && latest == self.attempt
            && matches!(self.stage, Stage::Prefilling(_) | Stage::HandingOff(_))
    }

    /// Whether an instance works on it, as far as is known here.
    pub(super) fn is_in(&self, instance: InstanceId) -> bool {
        match &self.stage {
            Stage::Prefilling(_) => self.legs()[0] == Some(instance),
            Stage::Decoding(decoding) => decoding.decode == instance,
            Stage::Waiting(_) | Stage::Answered(_) | Stage::HandingOff(_) => false,
        }
    }
}
