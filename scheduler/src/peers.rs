//! Several routers: what each says of its requests, and how the others count them.
//!
//! Every router keeps every router's requests in its ledgers: those that wait to be sent, those that are sent, and the
//! decodes that are planned for them. So all of them predict with the same queues. A router sends its own requests
//! only: when the next one in a queue is another router's, it leaves the turn to that router for a while.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cmp::Reverse;

use baton_types::{InstanceId, RequestId};
use serde::{Deserialize, Serialize};

use crate::conductor::{Conductor, LATEST_US};
use crate::placement::TURN_US;
use crate::queue::{NewWork, WaitingPrefill};
use crate::request::{Entry, Stage};
use crate::{Effect, FetchPlan, Input, InstanceState, Request};

/// The shape of what routers say to each other. A router ignores what has another version.
pub const PEER_VERSION: u32 = 3;

/// Most work that another router's request counts for, µs: more than any prefill takes.
const MOST_PEER_WORK_US: u64 = 3_600_000_000;

/// Where a router has placed one of its requests, as it says to the other routers. A later one about the same request
/// replaces it. Times are of a clock that the routers share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerPlacement {
    /// [`PEER_VERSION`] of the router that says it.
    pub version: u32,
    /// The router that says it.
    pub router: u32,
    /// The request as it was placed.
    pub request: Request,
    /// Where it prefills.
    pub prefill: InstanceId,
    /// Where it decodes.
    pub decode: InstanceId,
    /// What its prefill fetches.
    pub fetch: Option<FetchPlan>,
    /// Prefill work that is predicted, µs.
    pub work_us: u64,
    /// The same if no other prompt shared its passes, µs.
    pub alone_us: u64,
    /// Prompt tokens that the prefill computes.
    pub new_tokens: u64,
    /// When it arrived, µs.
    pub arrived_us: u64,
    /// When its first token is due by the promise made at placement, µs.
    pub promised_us: u64,
    /// When its decode is predicted to start, µs.
    pub decode_at_us: u64,
    /// Whether it was placed before, and lost what it had there.
    pub again: bool,
    /// How far it is.
    pub stage: PeerStage,
}

/// How far another router's request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PeerStage {
    /// Its prefill waits to be sent.
    Waiting {
        /// Until then, µs, there is no room to decode it; 0 if there is.
        held_until_us: u64,
        /// Its place by deadline, µs: its own deadline, or the place of what it follows.
        order_us: u64,
        /// The request that it follows in the same queue.
        after: Option<RequestId>,
    },
    /// Its prefill was sent.
    Sent {
        /// The key of the prefill in the engine's order.
        order: u64,
    },
    /// It is prefilled, and its KV is on its way.
    Prefilled,
}

/// Whether the other routers need an input about a request of this one: it shows how long its load lasts.
const fn is_shared(input: &Input) -> Option<RequestId> {
    match input {
        Input::PrefillFinished { request, .. }
        | Input::PrefillFailed { request }
        | Input::LegRefused { request, .. }
        | Input::FetchFinished { request, .. }
        | Input::HandoffFinished { request }
        | Input::HandoffFailed { request }
        | Input::TokensEmitted { request, .. }
        | Input::DecodeFailed { request, .. }
        | Input::Preempted { request, .. }
        | Input::RoomOutgrown { request, .. }
        | Input::DecodeFinished { request, .. }
        | Input::RequestCancelled { request } => Some(*request),
        _ => None,
    }
}

/// How often a request makes way for those of other routers. Routers that hear of each other's placements in different
/// orders could send one to and fro without end.
const MOST_WAYS: u32 = 8;

impl Conductor {
    /// From now on every step also returns what the other routers must be given, as [`Effect::Share`]. This one is known to
    /// them by that number.
    pub fn share_as(&mut self, router: u32) {
        self.router = Some(router);
    }

    /// Says that something happened to a request of this router.
    pub(crate) fn share_input(&self, input: &Input, effects: &mut Vec<Effect>) {
        let own = |id| self.requests.get(id).is_some_and(|e| e.peer.is_none() && e.stage != Stage::Unplaced);
        if self.router.is_some() && is_shared(input).is_some_and(own) {
            self.share(input.clone(), effects);
        }
    }

    /// Gives a fact to the other routers, if there are any.
    pub(crate) fn share(&self, input: Input, effects: &mut Vec<Effect>) {
        if self.router.is_some() {
            effects.push(Effect::Share(Box::new(input)));
        }
    }

    /// Says where a request of this router waits.
    pub(crate) fn share_waiting(&self, entry: &Entry, effects: &mut Vec<Effect>) {
        if self.router.is_none() {
            return;
        }
        let found = self.fleet.known(entry.prefill).prefill.of(entry.request.id);
        let WaitingPrefill { held_until_us, order_us, after, .. } = *found.expect("it waits there");
        self.share_placement(entry, PeerStage::Waiting { held_until_us, order_us, after }, effects);
    }

    /// Says where a request of this router is placed.
    pub(crate) fn share_placement(&self, entry: &Entry, stage: PeerStage, effects: &mut Vec<Effect>) {
        let Some((decode, router)) = entry.decode.zip(self.router).filter(|_| entry.peer.is_none()) else {
            return;
        };
        let placement = PeerPlacement {
            version: PEER_VERSION,
            router,
            request: entry.request.clone(),
            prefill: entry.prefill,
            decode,
            fetch: entry.fetch,
            work_us: entry.work_us,
            alone_us: entry.alone_us,
            new_tokens: entry.new_tokens,
            arrived_us: entry.arrived_us,
            promised_us: entry.promised_us,
            decode_at_us: entry.decode_at_us,
            again: entry.retries > 0 || entry.gave_way,
            stage,
        };
        self.share(Input::PeerPlaced(Box::new(placement)), effects);
    }

    /// Takes the placement of another router's request into the ledgers.
    pub(crate) fn peer_placed(&mut self, mut placed: PeerPlacement, effects: &mut Vec<Effect>) {
        let id = placed.request.id;
        let known = self.requests.get(id).map(|e| e.peer.is_some());
        if placed.version != PEER_VERSION || placed.request.prompt_tokens == 0 || known == Some(false) {
            self.stats.stale_inputs += 1;
            return;
        }
        let before = self.requests.remove(id);
        let first = before.is_none();
        before.iter().for_each(|before| self.release_legs(before, effects));
        let alive = |id| self.fleet.get(id).is_some_and(|i| i.state != InstanceState::Lost);
        let full = self.requests.len() >= self.config.max_waiting_requests as usize;
        let (prefill, decode) = (placed.prefill, placed.decode);
        if full || !alive(prefill) || !alive(decode) || !self.holds(decode, &placed.request) {
            self.stats.stale_inputs += 1;
            return;
        }
        let stage = placed.stage;
        let fetches = !matches!(stage, PeerStage::Prefilled);
        placed.fetch = placed.fetch.filter(|fetch| fetches && fetch.from != prefill && alive(fetch.from));
        let mut entry = self.peer_entry(placed, before.and_then(|before| before.tag_us));
        if first {
            self.note_demand(&entry.request, Some(entry.new_tokens));
        }
        let at_us = entry.decode_at_us.max(self.now_us);
        self.reserve_decode(&mut entry, decode, at_us);
        let tag_us = self.tag_us(&entry);
        entry.tag_us = Some(tag_us);
        match stage {
            PeerStage::Waiting { held_until_us, order_us, after } => {
                entry.stage = Stage::Waiting;
                let own = self.waiting_of(&entry);
                let order_us = order_us.min(LATEST_US);
                let waiting = WaitingPrefill { held_until_us, order_us, after, tag_us, ..own };
                self.fleet.known_mut(decode).decode.hold(id, held_until_us > 0);
                self.fleet.known_mut(prefill).prefill.enqueue(waiting);
            }
            PeerStage::Sent { order } => {
                entry.stage = Stage::Prefilling;
                // What this router sends later also begins later.
                self.sequence = self.sequence.max(order);
                let weight = self.class(&entry.request).weight;
                self.fair.charge(entry.request.tenant, weight, entry.work_us);
                self.dispatch(&entry);
                self.begin_handoff(&entry, entry.request.prompt_tokens, false);
                self.begin_fetch(&entry, 0);
            }
            PeerStage::Prefilled => {
                entry.stage = Stage::HandingOff;
                self.begin_handoff(&entry, entry.request.prompt_tokens, true);
            }
        }
        self.timers.set(prefill, self.now_us);
        self.requests.insert(entry);
        self.make_way(id, effects);
    }

    /// Another router displaced a request of this one.
    pub(crate) fn peer_displaced(&mut self, id: RequestId, effects: &mut Vec<Effect>) {
        let waits = |e: &&Entry| e.stage == Stage::Waiting && e.peer.is_none();
        let Some(at) = self.requests.get(id).filter(waits).map(|e| e.prefill) else {
            self.stats.stale_inputs += 1;
            return;
        };
        let found = self.fleet.known(at).prefill.of(id);
        let waiting = *found.expect("a request that waits is in its queue (I5)");
        self.take_off(at, waiting);
        self.place_displaced(&[id], effects);
    }

    /// Own requests that were put into the same queue before this router knew of another router's request yield to it
    /// if they are of a lower band or arrived later, and if not all are in time there. The other router does the same, so one of them stays.
    fn make_way(&mut self, for_request: RequestId, effects: &mut Vec<Effect>) {
        let Some(entry) = self.requests.get(for_request).filter(|e| e.stage == Stage::Waiting) else {
            return;
        };
        let priority = self.class(&entry.request).priority;
        let (at, rank) = (entry.prefill, (Reverse(priority), entry.arrived_us, for_request));
        let rank_of = |w: &WaitingPrefill| (Reverse(w.priority), w.arrived_us, w.request);
        let recent =
            |w: &&WaitingPrefill| w.peer.is_none() && w.since_us + TURN_US > self.now_us && rank_of(w) > rank;
        let mut later: Vec<WaitingPrefill> =
            self.fleet.known(at).prefill.waiting().iter().filter(recent).copied().collect();
        later.sort_unstable_by_key(rank_of);
        let mut displaced = Vec::new();
        for waiting in later.into_iter().rev() {
            let WaitingPrefill { work_us, alone_us, deadline_us, order_us, priority, .. } = waiting;
            let place = self.take_off(at, waiting);
            let new = NewWork { work_us, deadline_us, order_us, priority, rank_us: alone_us };
            let outlook = self.fleet.known(at).prefill.outlook(self.now_us, new, &[], &[]);
            let in_time = self.now_us + outlook.deadline_wait_us + work_us <= deadline_us;
            let entry = self.requests.get_mut(waiting.request).expect("a request that waits is live");
            if in_time && outlook.keeps_promises || entry.made_way == MOST_WAYS {
                self.put_back(place);
            } else {
                entry.made_way += 1;
                displaced.push(waiting.request);
            }
        }
        displaced.reverse();
        self.place_displaced(&displaced, effects);
    }

    fn peer_entry(&self, placed: PeerPlacement, tag_us: Option<u64>) -> Entry {
        let mut request = placed.request;
        self.settle_class(&mut request);
        let arrived_us = placed.arrived_us.min(LATEST_US);
        Entry {
            deadline_us: self.deadline_us(&request, arrived_us),
            promised_us: placed.promised_us.min(LATEST_US),
            prefill: placed.prefill,
            fetch: placed.fetch,
            work_us: placed.work_us.min(MOST_PEER_WORK_US),
            alone_us: placed.alone_us.min(MOST_PEER_WORK_US),
            new_tokens: placed.new_tokens.min(request.prompt_tokens),
            decode_at_us: placed.decode_at_us.min(LATEST_US),
            retries: u32::from(placed.again),
            tag_us,
            peer: Some(placed.router),
            ..Entry::new(request, arrived_us)
        }
    }
}
