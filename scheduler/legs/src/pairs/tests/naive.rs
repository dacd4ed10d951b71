//! The rules of pairs over flat lists, searched for every question: slow, and plain to see. State that can be counted
//! from the lists is not kept.

use alloc::vec::Vec;

use baton_scheduler::{Effect as Order, FailStage, Input, RejectReason, Rejection, Request};
use baton_types::{Epoch, InstanceId, RequestId};

use super::super::{Arrival, Cause, Core, Effect, Fact, FactOutcome, Failure, Phase, PrefillOrder};
use super::scripted::ScriptedCore;

/// The TBT of every answer that is complete.
pub(super) const TBT_US: u64 = 30_000;

#[derive(Clone, Copy, Debug, PartialEq)]
enum NaivePairState {
    Queued,
    Parked,
    Prefilling,
    Answered,
    HandingOff,
    Decoding,
}

/// One request, with every field that any of its states may have.
#[derive(Clone, Copy, Debug)]
struct Row {
    arrival: Arrival,
    at: NaivePairState,
    prefill: Option<InstanceId>,
    decode: Option<InstanceId>,
    attempt: u32,
    emitted: u32,
    given: u32,
    /// How many tokens of the attempt came first, and when, µs.
    first_us: Option<u64>,
    room: u32,
    landed: bool,
    moves: u32,
    foreseen_us: u64,
    failed: u32,
    failed_attempt: u32,
    refused_us: Option<u64>,
    admitted: bool,
    /// It is among those that are tried again.
    waits: bool,
    trial: bool,
    deaths: u32,
    spared: bool,
    begun: u64,
    seen: u64,
    ahead: u64,
    since_us: u64,
    deadline_us: u64,
}

impl Row {
    fn phase(&self) -> Phase {
        match self.at {
            NaivePairState::Queued | NaivePairState::Parked => Phase::Waiting,
            NaivePairState::Prefilling | NaivePairState::Answered => Phase::Prefilling,
            NaivePairState::HandingOff => Phase::HandingOff,
            NaivePairState::Decoding => Phase::Decoding,
        }
    }

    fn is_in(&self, instance: InstanceId) -> bool {
        (self.at == NaivePairState::Prefilling && self.prefill == Some(instance))
            || (self.at == NaivePairState::Decoding && self.decode == Some(instance))
    }

    fn goes_on_elsewhere(&self) -> bool {
        self.at == NaivePairState::Prefilling && self.decode.is_some() && self.decode != self.prefill
    }

    fn accepts(&self, instance: InstanceId, fact: &Fact) -> bool {
        let (prefills, decodes) = (self.prefill == Some(instance), self.decode == Some(instance));
        let before = [NaivePairState::Prefilling, NaivePairState::Answered, NaivePairState::HandingOff]
            .contains(&self.at)
            && (prefills || decodes);
        let open = [NaivePairState::Prefilling, NaivePairState::Answered].contains(&self.at) && prefills;
        let decoding = self.at == NaivePairState::Decoding && decodes;
        match fact {
            Fact::Token { index, .. } => {
                decoding || (self.at == NaivePairState::Prefilling && prefills && *index == self.given)
            }
            Fact::Prefilled { .. } | Fact::Fetched { .. } | Fact::PromptLogprobs => open,
            Fact::Ended => open || decoding,
            Fact::Offered => {
                self.at == NaivePairState::Prefilling && prefills && !decodes && self.decode.is_some()
            }
            Fact::HandedOff { ok: true } => before && decodes,
            Fact::HandedOff { ok: false } => before,
            Fact::Failed(_) => before || decoding,
        }
    }
}

/// Parameters of the limits, as numbers.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// TTFT and TBT of each class, µs.
    pub classes: Vec<(u64, u64)>,
    pub slack: u64,
    pub floor_us: u64,
}

impl Limits {
    fn of(&self, row: &Row) -> (u64, u64) {
        let class = row.arrival.class.index();
        let (ttft_us, tbt_us) = self.classes[if class < self.classes.len() { class } else { 0 }];
        (row.arrival.objectives.ttft_us.unwrap_or(ttft_us), tbt_us)
    }

    fn queue_us(&self, row: &Row) -> u64 {
        self.floor_us + 2 * self.of(row).0
    }

    fn prefill_us(&self, row: &Row) -> u64 {
        let ttft_us = self.of(row).0;
        let objective_us = if row.foreseen_us < ttft_us { row.foreseen_us } else { ttft_us };
        [self.floor_us, 2 * row.foreseen_us, self.slack * objective_us].into_iter().max().unwrap()
    }

    fn handoff_us(&self, row: &Row) -> u64 {
        let ttft_us = self.of(row).0;
        let objective_us = if row.foreseen_us < ttft_us { row.foreseen_us } else { ttft_us };
        if objective_us > self.floor_us { objective_us } else { self.floor_us }
    }

    fn token_us(&self, row: &Row) -> u64 {
        let gaps_us = 10 * self.slack * self.of(row).1;
        if gaps_us > self.floor_us { gaps_us } else { self.floor_us }
    }
}

/// The visible state of a request: phase, attempt, legs, moves, answered, hand-off tried again later, deadline.
pub(super) type View = (RequestId, Phase, u32, [Option<InstanceId>; 2], u32, bool, bool);

/// All requests, in order of arrival.
#[derive(Debug)]
pub(super) struct Naive {
    limits: Limits,
    rows: Vec<Row>,
    again: Vec<(u64, RequestId, u32)>,
    /// Instances that completed a prefill (false), or a hand-off or an answer (true).
    done: Vec<(InstanceId, bool)>,
    try_at_us: u64,
    unserved_us: Option<u64>,
    lost_us: Option<u64>,
    back_us: u64,
    pub now_us: u64,
    pub core: ScriptedCore,
    /// Requests that the conductor forgets next.
    forget: Vec<RequestId>,
    pub effects: Vec<Effect>,
}

impl Naive {
    pub(super) fn new(limits: Limits, core: ScriptedCore) -> Self {
        Self {
            limits,
            rows: Vec::new(),
            again: Vec::new(),
            done: Vec::new(),
            try_at_us: 0,
            unserved_us: None,
            lost_us: None,
            back_us: 0,
            now_us: 0,
            core,
            forget: Vec::new(),
            effects: Vec::new(),
        }
    }

    fn find(&mut self, request: RequestId) -> Option<&mut Row> {
        self.rows.iter_mut().find(|row| row.arrival.request == request)
    }

    fn copy(&self, request: RequestId) -> Option<Row> {
        self.rows.iter().find(|row| row.arrival.request == request).copied()
    }

    /// All requests of which something holds, the oldest first.
    fn all(&self, which: impl Fn(&Row) -> bool) -> Vec<RequestId> {
        let mut all: Vec<_> =
            self.rows.iter().filter(|row| which(row)).map(|row| row.arrival.request).collect();
        all.sort_unstable();
        all
    }

    pub(super) fn view(&self) -> Vec<View> {
        let mut all: Vec<View> = self
            .rows
            .iter()
            .map(|row| {
                let handing = [NaivePairState::Prefilling, NaivePairState::HandingOff].contains(&row.at);
                let later = row.failed > 1 && row.failed_attempt == row.attempt && handing;
                let legs = [row.prefill, row.decode];
                (
                    row.arrival.request,
                    row.phase(),
                    row.attempt,
                    legs,
                    row.moves,
                    row.at == NaivePairState::Answered,
                    later,
                )
            })
            .collect();
        all.sort_unstable_by_key(|view| view.0);
        all
    }

    pub(super) fn parked(&self) -> usize {
        self.all(|row| row.waits).len()
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        let mut all: Vec<u64> = self.rows.iter().map(|row| row.deadline_us).collect();
        all.extend(self.again.iter().map(|again| again.0));
        all.extend(self.rows.iter().filter(|row| row.waits).map(|_| self.try_at_us));
        all.into_iter().min()
    }

    fn count(&self, row: &Row, handed: bool) -> u64 {
        let legs = [row.prefill, row.decode];
        let of = |leg: InstanceId| self.done.iter().filter(|done| **done == (leg, handed)).count() as u64;
        legs.into_iter().flatten().map(of).sum()
    }

    fn give(&mut self, request: RequestId, us: u64) {
        let at_us = self.now_us + us;
        let row = self.find(request).unwrap();
        row.deadline_us = if at_us < row.arrival.time_limit_us { at_us } else { row.arrival.time_limit_us };
    }

    fn enter(&mut self, request: RequestId) {
        let row = self.copy(request).unwrap();
        let next = if row.phase() == Phase::Waiting { 1 } else { 0 };
        let (phase, attempt, legs) = (row.phase(), row.attempt + next, [row.prefill, row.decode]);
        self.effects.push(Effect::Entered { request, phase, attempt, legs });
    }

    /// Forgets it. False: it is not there.
    fn drop_row(&mut self, request: RequestId) -> bool {
        let Some(row) = self.copy(request) else { return false };
        self.rows.retain(|row| row.arrival.request != request);
        if row.trial {
            self.try_at_us = self.now_us;
        }
        true
    }

    fn drop_ended(&mut self, request: RequestId) {
        if self.drop_row(request) {
            self.effects.push(Effect::Ended { request });
        }
    }

    pub(super) fn feed(&mut self, input: Input) {
        let mut orders = Vec::new();
        let lost = matches!(input, Input::InstanceLost { .. });
        self.core.step(self.now_us, input, &mut orders);
        if lost {
            self.lost_us = Some(self.now_us);
        }
        self.unserved_us = match self.unserved_us {
            _ if self.core.can_serve() => None,
            None if lost => Some(self.now_us),
            before => before,
        };
        orders.into_iter().for_each(|order| self.ordered(order));
        while !self.forget.is_empty() {
            let request = self.forget.remove(0);
            self.feed(Input::RequestCancelled { request });
        }
    }

    fn ordered(&mut self, order: Order) {
        match order {
            Order::StartPrefill { request, .. } if self.copy(request).is_some() => self.sent(request, &order),
            Order::StartDecode { request, instance } => {
                let now_us = self.now_us;
                if let Some(row) = self.find(request).filter(|row| row.at != NaivePairState::Answered) {
                    (row.at, row.since_us) = (NaivePairState::Decoding, now_us);
                    let row = *row;
                    self.give(request, self.limits.token_us(&row));
                    self.enter(request);
                    self.effects.push(Effect::Decode { request, attempt: row.attempt, instance });
                }
            }
            Order::Handoff { request, from, to, room_tokens } => {
                let Some(row) = self.find(request) else { return };
                (row.decode, row.room) = (Some(to), room_tokens);
                row.attempt += 1;
                let (attempt, given_tokens) = (row.attempt, row.given);
                self.hands_off(request);
                self.effects.push(Effect::Expect {
                    request,
                    attempt,
                    instance: to,
                    room_tokens,
                    given_tokens,
                });
                self.effects.push(Effect::Handoff { request, attempt, from, to });
            }
            Order::Release { request, instance } => self.released(request, instance),
            Order::Reject(rejection) => self.rejected(rejection),
            Order::Fail { request, stage } => self.failed(request, stage),
            Order::Replicate { .. } | Order::Explain(_) | Order::Share(_) | Order::ChangeRole { .. } => {
                self.effects.push(Effect::Order(order))
            }
            Order::StartPrefill { .. } => {}
        }
    }

    fn sent(&mut self, request: RequestId, order: &Order) {
        let Order::StartPrefill { instance, decode, fetch, room_tokens, order, .. } = *order else { return };
        if self.find(request).unwrap().at == NaivePairState::Answered {
            self.drop_ended(request);
            return self.forget.push(request);
        }
        let (at_us, now_us) = (self.core.decodes_at_us(request), self.now_us);
        let asked = self.core.moves_kv(decode);
        let row = self.find(request).unwrap();
        row.attempt += 1;
        if row.attempt > 1 && row.emitted > 0 {
            row.moves += 1;
        }
        if let Some(at_us) = at_us {
            row.foreseen_us = at_us.max(now_us) - now_us;
        }
        (row.given, row.room, row.landed, row.admitted) = (row.emitted, room_tokens, false, true);
        row.first_us = None;
        let alone = row.emitted + 1 >= row.arrival.asked_tokens && instance != decode && !asked;
        let to = if alone { None } else { Some(decode) };
        (row.at, row.prefill, row.decode) = (NaivePairState::Prefilling, Some(instance), to);
        let copy = *row;
        let done = self.count(&copy, false);
        let row = self.find(request).unwrap();
        (row.begun, row.seen, row.ahead) = (done, done, 0);
        self.give(request, self.limits.prefill_us(&copy));
        self.enter(request);
        self.effects.push(Effect::Prefill(PrefillOrder {
            request,
            attempt: copy.attempt,
            instance,
            decode: if alone { instance } else { decode },
            fetch,
            room_tokens: if alone { 0 } else { room_tokens },
            order,
            given_tokens: copy.given,
        }));
        if !alone && decode != instance {
            let (attempt, given_tokens) = (copy.attempt, copy.given);
            self.effects.push(Effect::Expect {
                request,
                attempt,
                instance: decode,
                room_tokens,
                given_tokens,
            });
        }
    }

    fn hands_off(&mut self, request: RequestId) {
        let (row, now_us) = (self.copy(request).unwrap(), self.now_us);
        let done = self.count(&row, true);
        let row = self.find(request).unwrap();
        (row.at, row.begun, row.seen, row.ahead) = (NaivePairState::HandingOff, done, done, 0);
        row.since_us = now_us;
        let row = *row;
        self.give(request, self.limits.handoff_us(&row));
        self.enter(request);
    }

    fn released(&mut self, request: RequestId, instance: InstanceId) {
        let Some(row) = self.copy(request) else {
            return self.effects.push(Effect::Release { request, attempt: 0, instance });
        };
        if row.prefill != Some(instance) && row.decode != Some(instance) {
            return;
        }
        self.effects.push(Effect::Release { request, attempt: row.attempt, instance });
        let row = self.find(request).unwrap();
        if row.prefill == Some(instance) || row.at == NaivePairState::Decoding {
            row.prefill = None;
        }
        if row.decode == Some(instance) {
            row.decode = None;
        }
        if row.prefill.is_none() && row.decode.is_none() && row.at != NaivePairState::Answered {
            row.at = NaivePairState::Queued;
            let row = *row;
            self.give(request, self.limits.queue_us(&row));
            self.enter(request);
        }
    }

    fn park(&mut self, request: RequestId) -> bool {
        let expected = self.unserved_us.is_some_and(|at_us| at_us + 5_000_000 > self.now_us);
        let able =
            self.copy(request).is_some_and(|row| row.at != NaivePairState::Answered && row.attempt < 32);
        if able && (self.core.can_serve() || expected) {
            self.hold(request);
            return true;
        }
        false
    }

    fn hold(&mut self, request: RequestId) {
        let Some(row) = self.find(request) else { return };
        (row.trial, row.waits) = (false, true);
        if row.admitted && row.at != NaivePairState::Parked {
            (row.at, row.prefill, row.decode) = (NaivePairState::Parked, None, None);
            let row = *row;
            self.give(request, self.limits.of(&row).0 + self.limits.floor_us);
            self.enter(request);
        }
    }

    fn rejected(&mut self, rejection: Rejection) {
        let unserved = rejection.reason == RejectReason::NoInstance && !self.core.can_serve();
        let promised = self
            .copy(rejection.request)
            .is_some_and(|row| row.attempt > 0 || unserved || row.at == NaivePairState::Parked);
        let back = self.lost_us.is_some_and(|at_us| at_us + 5_000_000 > self.now_us);
        let held = rejection.reason != RejectReason::TooLong || back;
        if rejection.wasted_tokens == 0 && promised && held && self.park(rejection.request) {
            return;
        }
        self.refuse(rejection);
    }

    fn refuse(&mut self, rejection: Rejection) {
        let Some(row) = self.copy(rejection.request) else { return };
        if row.at == NaivePairState::Answered {
            return self.drop_ended(rejection.request);
        }
        self.drop_row(rejection.request);
        let begun = row.emitted > 0;
        self.effects.push(if begun { Effect::CutShort(rejection) } else { Effect::Refuse(rejection) });
    }

    fn refuse_unserved(&mut self, request: RequestId) {
        self.refuse(Rejection {
            request,
            reason: RejectReason::NoInstance,
            retry_after_us: 1_000_000,
            predicted_ttft_us: None,
            wasted_tokens: 0,
        });
    }

    fn failed(&mut self, request: RequestId, stage: FailStage) {
        let row = self.copy(request);
        if stage == FailStage::NoPlacement {
            if row.is_some_and(|row| row.admitted) && self.park(request) {
                return;
            }
            if !self.core.can_serve() {
                return self.refuse_unserved(request);
            }
        }
        if self.drop_row(request) {
            self.effects.push(Effect::Fail { request, stage, attempts: row.unwrap().attempt });
        }
    }
}

/// The inputs.
impl Naive {
    pub(super) fn configure(&mut self, limits: Limits) {
        self.limits = limits;
    }

    pub(super) fn arrive(&mut self, arrival: Arrival) {
        let request = arrival.request;
        self.rows.push(Row {
            arrival,
            at: NaivePairState::Queued,
            prefill: None,
            decode: None,
            attempt: 0,
            emitted: 0,
            given: 0,
            first_us: None,
            room: 0,
            landed: false,
            moves: 0,
            foreseen_us: 0,
            failed: 0,
            failed_attempt: 0,
            refused_us: None,
            admitted: false,
            waits: false,
            trial: false,
            deaths: 0,
            spared: false,
            begun: 0,
            seen: 0,
            ahead: 0,
            since_us: 0,
            deadline_us: 0,
        });
        let row = self.copy(request).unwrap();
        self.give(request, self.limits.of(&row).0 + self.limits.floor_us);
        self.submit(request);
    }

    fn submit(&mut self, request: RequestId) {
        let Some(row) = self.copy(request) else { return };
        let asked = self.core.request(request, row.emitted).unwrap();
        self.feed(Input::RequestArrived(Request { let_in: row.admitted, ..asked }));
        let Some(now) = self.copy(request).filter(|now| !now.waits && !row.admitted) else { return };
        if !now.admitted {
            self.find(request).unwrap().admitted = true;
            self.give(request, self.limits.queue_us(&row));
        }
        self.effects.push(Effect::Admitted { request });
    }

    pub(super) fn cancel(&mut self, request: RequestId) {
        self.feed(Input::RequestCancelled { request });
        self.drop_row(request);
    }

    pub(super) fn complete(&mut self, request: RequestId) {
        match self.find(request) {
            Some(row) if row.at == NaivePairState::Prefilling => row.at = NaivePairState::Answered,
            Some(row) if row.at == NaivePairState::Decoding => self.conclude(request, TBT_US),
            _ => {}
        }
    }

    fn conclude(&mut self, request: RequestId, tbt_us: u64) {
        let Some(row) = self.copy(request) else { return };
        if let Some(decode) = row.decode.filter(|_| row.at == NaivePairState::Decoding) {
            self.done.push((decode, true));
        }
        let first_us = row.first_us.unwrap_or(0);
        self.feed(Input::DecodeFinished { request, output_tokens: row.emitted, first_us, tbt_us });
        self.drop_ended(request);
    }

    pub(super) fn emitted(&mut self, request: RequestId, emitted: u32, first_us: u64) {
        let Some(row) = self.find(request).filter(|row| emitted > row.emitted) else { return };
        row.first_us = row.first_us.or((!row.goes_on_elsewhere()).then_some(first_us));
        self.drawn(request, emitted, false);
    }

    pub(super) fn on_fact(
        &mut self,
        (request, attempt, instance): (RequestId, u32, InstanceId),
        fact: Fact,
    ) -> FactOutcome {
        let Some(row) = self.copy(request).filter(|row| row.attempt == attempt) else {
            return FactOutcome::Stale;
        };
        if !row.accepts(instance, &fact) {
            return FactOutcome::Stale;
        }
        let answered = row.at == NaivePairState::Answered;
        match fact {
            Fact::Failed(_) | Fact::HandedOff { ok: false } if answered => {
                self.feed(Input::RequestCancelled { request });
                self.drop_ended(request);
            }
            Fact::Ended if answered => return FactOutcome::Stale,
            Fact::Token { index, last } => return self.token(request, index, last),
            Fact::Prefilled { compute_us, cached_tokens } => {
                self.done.push((instance, false));
                if !answered {
                    self.hands_off(request);
                }
                self.feed(Input::PrefillFinished { request, compute_us, cached_tokens });
                if answered {
                    self.answered_and_prefilled(&row);
                } else if row.landed {
                    self.feed(Input::HandoffFinished { request });
                }
            }
            Fact::HandedOff { ok: true } => {
                self.done.extend([row.prefill, row.decode].into_iter().flatten().map(|leg| (leg, true)));
                match row.at {
                    NaivePairState::Prefilling => self.find(request).unwrap().landed = true,
                    NaivePairState::HandingOff => self.feed(Input::HandoffFinished { request }),
                    _ => {}
                }
            }
            Fact::HandedOff { ok: false } => self.not_handed_off(&row),
            Fact::Fetched { ok } => self.feed(Input::FetchFinished { request, ok }),
            Fact::Offered if row.landed => return FactOutcome::Stale,
            Fact::Offered => self.find(request).unwrap().landed = true,
            Fact::Failed(failure) => self.leg_failed(&row, instance, failure),
            Fact::Ended | Fact::PromptLogprobs => {}
        }
        FactOutcome::Yes
    }

    fn token(&mut self, request: RequestId, index: u32, last: bool) -> FactOutcome {
        if index != self.find(request).unwrap().emitted {
            return FactOutcome::Repeated;
        }
        self.drawn(request, index + 1, last);
        FactOutcome::Yes
    }

    fn drawn(&mut self, request: RequestId, emitted_tokens: u32, last: bool) {
        let now_us = self.now_us;
        let row = self.find(request).unwrap();
        let early = !last && row.goes_on_elsewhere();
        row.first_us = row.first_us.or((!early).then_some(now_us));
        row.emitted = emitted_tokens;
        row.refused_us = None;
        let grows = !last
            && row.at == NaivePairState::Decoding
            && row.emitted - row.given.min(row.emitted) >= row.room;
        if grows {
            row.room += row.room / 4 + 1;
        }
        if core::mem::take(&mut row.trial) {
            self.try_at_us = now_us;
        }
        if grows {
            self.feed(Input::RoomOutgrown { request, emitted_tokens });
        }
    }

    /// The client has its one token, and the prefill is over.
    fn answered_and_prefilled(&mut self, row: &Row) {
        let (request, attempt) = (row.arrival.request, row.attempt);
        if self.copy(request).is_none() {
            return;
        }
        if row.prefill != row.decode {
            self.feed(Input::HandoffFinished { request });
            for instance in [row.prefill, row.decode].into_iter().flatten() {
                if row.decode.is_some() {
                    self.effects.push(Effect::Release { request, attempt, instance });
                }
            }
        }
        self.conclude(request, 0);
    }

    fn not_handed_off(&mut self, row: &Row) {
        let request = row.arrival.request;
        self.effects.push(Effect::Blame { request, cause: Cause::Handoff });
        if row.failed_attempt == row.attempt {
            return;
        }
        let now = self.find(request).unwrap();
        (now.failed, now.failed_attempt) = (row.failed + 1, row.attempt);
        match row.failed {
            0 => self.feed(Input::HandoffFailed { request }),
            before => {
                let pauses_us = [100_000, 200_000, 400_000, 800_000, 1_600_000];
                let pause_us = pauses_us.get(before as usize - 1).unwrap_or(&1_600_000);
                self.again.push((self.now_us + pause_us, request, row.attempt));
            }
        }
    }

    fn leg_failed(&mut self, row: &Row, instance: InstanceId, failure: Failure) {
        let (request, emitted_tokens) = (row.arrival.request, row.emitted);
        let expects = row.decode == Some(instance) && row.prefill != Some(instance);
        let mut refused_for_us = 0;
        if let (Failure::Busy { .. }, now_us) = (failure, self.now_us) {
            let now = self.find(request).unwrap();
            now.refused_us = now.refused_us.or(Some(now_us));
            refused_for_us = now_us - now.refused_us.unwrap();
        }
        let input = match failure {
            Failure::OfRequest => return,
            Failure::Engine { cut_off: false, .. } => {
                self.feed(Input::RequestCancelled { request });
                if row.attempt >= 32 {
                    let decodes = row.at == NaivePairState::Decoding;
                    let stage = if decodes { FailStage::DecodeFailed } else { FailStage::PrefillFailed };
                    self.drop_row(request);
                    return self.effects.push(Effect::Fail { request, stage, attempts: row.attempt });
                }
                self.hold(request);
                self.try_at_us = self.now_us;
                return;
            }
            Failure::Engine { gone: true, .. } if row.is_in(instance) => return,
            Failure::Engine { .. } => return self.suspect(request),
            Failure::Preempted => Input::Preempted { request, emitted_tokens },
            Failure::Busy { us } if refused_for_us <= self.limits.queue_us(row) => {
                Input::LegRefused { request, instance, emitted_tokens, busy_us: us }
            }
            Failure::Busy { .. } | Failure::Other if row.at == NaivePairState::Decoding => {
                Input::DecodeFailed { request, emitted_tokens }
            }
            Failure::Busy { .. } | Failure::Other if expects => Input::HandoffFailed { request },
            Failure::Busy { .. } | Failure::Other => Input::PrefillFailed { request },
        };
        self.effects.push(Effect::Blame { request, cause: Cause::Leg });
        self.feed(input);
    }

    fn suspect(&mut self, request: RequestId) {
        let Some(row) = self.find(request) else { return };
        row.deaths += 1;
        let deaths = row.deaths;
        self.effects.push(Effect::Blame { request, cause: Cause::Lost });
        self.feed(Input::RequestCancelled { request });
        if deaths == 1 {
            self.hold(request);
            self.try_at_us = self.now_us;
        } else if self.drop_row(request) {
            self.effects.push(Effect::Condemn { request });
        }
    }

    pub(super) fn lost(&mut self, instance: InstanceId, epoch: Epoch, died: bool) {
        self.done.retain(|done| done.0 != instance);
        let here = self.all(|row| row.prefill == Some(instance) || row.decode == Some(instance));
        for request in &here {
            if self.copy(*request).is_some_and(|row| row.at == NaivePairState::Answered) {
                self.feed(Input::RequestCancelled { request: *request });
                self.drop_ended(*request);
            }
        }
        let suspects = self.all(|row| died && here.contains(&row.arrival.request) && row.is_in(instance));
        let tried = suspects.iter().any(|request| self.copy(*request).unwrap().trial);
        let mut found = Vec::new();
        for request in suspects {
            let row = self.find(request).unwrap();
            if !tried || row.trial || row.spared {
                found.push(request);
            }
            row.spared |= tried;
        }
        found.into_iter().for_each(|request| self.suspect(request));
        let mut followed_up = Vec::new();
        for row in here.into_iter().filter_map(|request| self.copy(request)).collect::<Vec<Row>>() {
            let (request, decodes) = (row.arrival.request, row.decode == Some(instance));
            if !decodes && row.prefill != Some(instance) {
                continue;
            }
            let behind = row.at == NaivePairState::Decoding && !decodes;
            let cause = if behind { Cause::LostBehind } else { Cause::Lost };
            self.effects.push(Effect::Blame { request, cause });
            if row.at == NaivePairState::Decoding && decodes {
                followed_up.push(Input::TokensEmitted { request, emitted_tokens: row.emitted });
            }
        }
        followed_up.into_iter().for_each(|input| self.feed(input));
        self.feed(Input::InstanceLost { instance, epoch });
    }

    pub(super) fn excuse(&mut self, pause_us: u64) {
        self.back_us = self.now_us;
        for at_us in [&mut self.unserved_us, &mut self.lost_us].into_iter().flatten() {
            *at_us += pause_us;
        }
        self.again.iter_mut().for_each(|again| again.0 += pause_us);
        for row in &mut self.rows {
            let limit_us = row.arrival.time_limit_us;
            row.deadline_us =
                if row.deadline_us + pause_us < limit_us { row.deadline_us + pause_us } else { limit_us };
        }
    }

    pub(super) fn try_parked(&mut self) {
        let waiting = self.all(|row| row.waits);
        if waiting.is_empty() || self.now_us < self.try_at_us {
            return;
        }
        self.try_at_us = self.now_us + 50_000;
        self.rows.iter_mut().for_each(|row| row.waits = false);
        for request in waiting {
            let Some(row) = self.copy(request) else { continue };
            let (tried, places) = (self.all(|row| row.trial).len(), self.core.prefills());
            let full = self.core.can_serve() && tried >= if places == 0 { 1 } else { places };
            let now = self.find(request).unwrap();
            if row.deaths > 0 && full {
                now.waits = true;
            } else {
                now.trial = row.deaths > 0;
                self.submit(request);
            }
        }
    }

    pub(super) fn expire(&mut self) {
        while let Some(next) = self.again.iter().filter(|again| again.0 <= self.now_us).min().copied() {
            self.again.retain(|again| *again != next);
            let (_, request, attempt) = next;
            let open = [NaivePairState::Prefilling, NaivePairState::HandingOff];
            if self.copy(request).is_some_and(|row| row.attempt == attempt && open.contains(&row.at)) {
                self.feed(Input::HandoffFailed { request });
            }
        }
        let over = |row: &&Row| row.deadline_us <= self.now_us;
        let key = |row: &&Row| (row.deadline_us, row.arrival.request);
        if let Some(row) = self.rows.iter().filter(over).min_by_key(key).copied() {
            self.expired(&row);
            self.expire();
        }
    }

    /// How much more time a stage gets whose time is over, µs.
    fn more_us(&mut self, row: &Row) -> Option<u64> {
        let (request, live, impatient) =
            (row.arrival.request, self.rows.len() as u64, row.arrival.time_limit_us <= self.now_us);
        let done = self.count(row, row.at == NaivePairState::HandingOff);
        let stage_us = match row.at {
            _ if impatient => return None,
            NaivePairState::Queued | NaivePairState::Parked | NaivePairState::Answered => return None,
            NaivePairState::Decoding => {
                let latest_us = self.core.last_token_us(request);
                let from_us = [latest_us, row.since_us, self.back_us].into_iter().max().unwrap();
                return (from_us + self.limits.token_us(row)).checked_sub(self.now_us).filter(|us| *us > 0);
            }
            NaivePairState::Prefilling => self.limits.prefill_us(row),
            NaivePairState::HandingOff => self.limits.handoff_us(row),
        };
        if row.at == NaivePairState::HandingOff {
            let due_us = row.since_us + self.limits.slack * self.moves_us(row);
            if due_us > self.now_us {
                return Some(due_us - self.now_us);
            }
        }
        let others = match row.at {
            NaivePairState::Prefilling => {
                let leaves =
                    |other: &Row| other.at == NaivePairState::HandingOff && other.prefill == row.prefill;
                row.prefill.is_some() && (!self.all(leaves).is_empty() || self.decodes(row.prefill))
            }
            _ => self.decodes(row.decode),
        };
        let now = self.find(request).unwrap();
        let ahead = if row.ahead == 0 { live } else { row.ahead };
        (now.ahead, now.seen) = (ahead, done);
        // The progress of a lost instance does not count.
        ((done > row.seen || others) && done <= row.begun + 4 * ahead).then_some(stage_us)
    }

    /// How long all KV takes that moves over the links of a hand-off, as if all of it were as long, µs.
    fn moves_us(&self, row: &Row) -> u64 {
        let beside = |other: &Row| {
            [NaivePairState::Prefilling, NaivePairState::HandingOff].contains(&other.at)
                && (other.prefill == row.prefill || other.decode == row.decode)
                && other.decode.is_some()
        };
        self.core.handoff_us(row.arrival.request) * self.all(beside).len() as u64
    }

    /// Whether a token was drawn at an instance as lately as its decodes are asked to.
    fn decodes(&self, instance: Option<InstanceId>) -> bool {
        let draws = |row: &Row| {
            let latest_us = self.core.last_token_us(row.arrival.request);
            let from_us = if latest_us > row.since_us { latest_us } else { row.since_us };
            row.at == NaivePairState::Decoding
                && row.decode == instance
                && from_us + self.limits.token_us(row) > self.now_us
        };
        instance.is_some() && !self.all(draws).is_empty()
    }

    fn expired(&mut self, row: &Row) {
        let (request, emitted_tokens, phase) = (row.arrival.request, row.emitted, row.phase());
        if let Some(us) = self.more_us(row) {
            return self.give(request, us);
        }
        if row.at == NaivePairState::Answered {
            self.feed(Input::RequestCancelled { request });
            return self.drop_ended(request);
        }
        self.effects.push(Effect::Late { request, attempt: row.attempt, phase });
        let impatient = row.arrival.time_limit_us <= self.now_us;
        let input = match phase {
            Phase::Waiting if !row.admitted => return self.refuse_unserved(request),
            Phase::Waiting if !impatient && !self.core.can_serve() => {
                if !row.waits {
                    self.feed(Input::RequestCancelled { request });
                }
                return self.refuse_unserved(request);
            }
            Phase::Waiting => return self.give_up(request, phase, impatient),
            _ if impatient => return self.give_up(request, phase, true),
            Phase::Prefilling => Input::PrefillFailed { request },
            Phase::HandingOff => Input::HandoffFailed { request },
            Phase::Decoding => Input::DecodeFailed { request, emitted_tokens },
        };
        self.effects.push(Effect::Blame { request, cause: Cause::Late(phase) });
        self.feed(input);
        if let Some(row) = self.copy(request).filter(|row| row.deadline_us <= self.now_us) {
            self.give_up(request, row.phase(), false);
        }
    }

    fn give_up(&mut self, request: RequestId, phase: Phase, impatient: bool) {
        self.feed(Input::RequestCancelled { request });
        if self.drop_row(request) {
            self.effects.push(Effect::GiveUp { request, phase, impatient });
        }
    }
}
