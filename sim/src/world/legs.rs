//! Carrying out what a node's legs ask for, with models in place of cache, engine and network.

use baton_legs::pairs::{Fact, Failure};
use baton_legs::{Complete, Effect, Input as LegInput, Leg, LegFailure, LegHoldings};
use baton_store::Input as StoreInput;

use super::World;
use crate::engine::Job;

impl World {
    /// Steps the legs of a node.
    pub(crate) fn leg(&mut self, at: u32, input: LegInput) {
        self.leg_after(at, input, |_| {});
    }

    /// Steps the legs of a node, and does something before what they want.
    fn leg_after(&mut self, at: u32, input: LegInput, first: impl FnOnce(&mut Self)) {
        let mut effects = std::mem::take(&mut self.leg_effects);
        self.nodes[at as usize].legs.step(input, &mut effects);
        first(self);
        for effect in effects.drain(..) {
            self.obey(at, effect);
        }
        self.leg_effects = effects;
    }

    /// A request's leg at a node.
    pub(crate) fn leg_at(&self, at: u32, slot: u32) -> Option<&Leg> {
        self.nodes[at as usize].legs.get(self.live[slot as usize].id)
    }

    /// A request's leg where it is prefilled.
    pub(crate) fn prefill_leg(&self, slot: u32) -> Option<&Leg> {
        self.leg_at(self.live[slot as usize].prefill, slot)
    }

    /// Whether a request's prompt is computed, and its KV here.
    pub(crate) fn is_prefilled(&self, slot: u32) -> bool {
        matches!(self.prefill_leg(slot), Some(Leg::Held(_) | Leg::Decoding { .. }))
    }

    fn obey(&mut self, at: u32, effect: Effect) {
        let (Effect::Open { request, .. }
        | Effect::Fetch { request, .. }
        | Effect::Fetched { request, .. }
        | Effect::Compute { request, .. }
        | Effect::Seal { request }
        | Effect::Withdraw { request, .. }
        | Effect::Admit { request }
        | Effect::Send { request }
        | Effect::Decode { request }
        | Effect::Grow { request, .. }
        | Effect::Close { request, .. }
        | Effect::Fail { request, .. }) = effect;
        let Some(slot) = self.slot_of(request) else { return };
        match effect {
            Effect::Open { room_blocks, .. } => self.open(slot, at, room_blocks),
            Effect::Fetch { plan, .. } => self.begin_fetch(slot, at, plan),
            Effect::Fetched { ok, .. } => self.report(slot, at, Fact::Fetched { ok }),
            Effect::Compute { cached_tokens, .. } => self.compute(slot, at, cached_tokens),
            Effect::Seal { .. } => {
                let all = u32::try_from(self.live[slot as usize].keys.len()).unwrap_or(u32::MAX);
                self.step_store(at, StoreInput::Seal { owner: request, upto_blocks: all });
            }
            Effect::Withdraw { to, .. } => self.withdraw_room(slot, at, to),
            Effect::Admit { .. } | Effect::Send { .. } => self.begin_handoff(slot),
            Effect::Grow { blocks, .. } => self.grow(slot, at, blocks),
            Effect::Decode { .. } => self.decode(slot, at),
            Effect::Close { held, .. } => self.close(slot, at, held),
            Effect::Fail { why, .. } => self.leg_failed(slot, at, why),
        }
    }

    /// Asks a node's store for a leg's blocks.
    fn open(&mut self, slot: u32, at: u32, room_blocks: u32) {
        let id = self.live[slot as usize].id;
        let keys = std::mem::take(&mut self.live[slot as usize].keys);
        let opened = self.open_store(at, id, &keys, room_blocks);
        self.live[slot as usize].keys = keys;
        let Some(opened) = opened else { return self.leg(at, LegInput::NoRoom { request: id }) };
        let (cached_blocks, onboard) = (opened.hits, opened.onboard);
        let live = &mut self.live[slot as usize];
        if live.decode == at {
            let blocks = live.keys.len() as u64 + u64::from(room_blocks);
            live.kv_tokens = blocks * u64::from(self.setup.scheduler.block_tokens);
        }
        if matches!(self.leg_at(at, slot), Some(Leg::WaitingForRoom(_))) {
            self.live[slot as usize].decode_blocks = opened.hbm;
            return self.leg(at, LegInput::Opened { request: id, cached_blocks, waits: false });
        }
        let live = &mut self.live[slot as usize];
        (live.hit_blocks, live.shared_blocks, live.shares) =
            (cached_blocks, cached_blocks, opened.pending > 0);
        if opened.pending > 0 {
            self.nodes[at as usize].sharing.push(slot);
        }
        let waits = opened.pending > 0 || onboard != (0, 0);
        // The copies from slower tiers begin before anything else that the leg wants now.
        let opened = LegInput::Opened { request: id, cached_blocks, waits };
        self.leg_after(at, opened, |world| world.begin_onboard(slot, at, onboard));
    }

    /// Reports the state of its blocks to a prefill leg.
    pub(crate) fn cached(&mut self, slot: u32, at: u32) {
        let live = &self.live[slot as usize];
        let (request, cached_blocks, waits) = (live.id, live.hit_blocks, live.loads > 0 || live.shares);
        self.leg(at, LegInput::Cached { request, cached_blocks, waits });
    }

    fn compute(&mut self, slot: u32, at: u32, cached_tokens: u64) {
        let live = &mut self.live[slot as usize];
        live.cached_tokens = cached_tokens;
        let job = Job {
            slot,
            order: live.order,
            left_tokens: live.prompt_tokens - cached_tokens,
            prefix_tokens: cached_tokens,
        };
        self.engine(at, |engine, moment, ended| engine.add_job(moment, job, ended));
    }

    /// A leg is over: its engine and its store let it go.
    fn close(&mut self, slot: u32, at: u32, held: LegHoldings) {
        if held.engine && self.nodes[at as usize].engine.holds(slot) != (false, false) {
            self.engine(at, |engine, moment, ended| engine.remove(moment, slot, ended));
        }
        if held.blocks {
            self.step_store(at, StoreInput::Close { owner: self.live[slot as usize].id });
        }
    }

    fn leg_failed(&mut self, slot: u32, at: u32, why: LegFailure) {
        let request = self.live[slot as usize].id;
        self.oracle.witness(!matches!(why, LegFailure::NotReady | LegFailure::NothingToSend), || {
            format!("{request} was ordered to go on where its KV was not: {why:?}")
        });
        let gave_way = why == LegFailure::GaveWay;
        if let Some(lost) = self.nodes[at as usize].engine.preempt(slot) {
            if gave_way {
                self.metrics.preempted();
            }
            self.interrupted(lost);
        }
        let failure = if gave_way { Failure::Preempted } else { Failure::Other };
        self.report(slot, at, Fact::Failed(failure));
    }

    /// All KV is at the decode node and the prefill is over.
    pub(crate) fn handoff_done(&mut self, slot: u32) {
        let live = &self.live[slot as usize];
        let (request, prefill, decode) = (live.id, live.prefill, live.decode);
        self.leg(decode, LegInput::Landed { request });
        self.leg(prefill, LegInput::HandedOff { request, ok: true, now_us: self.now_us });
        self.report(slot, decode, Fact::HandedOff { ok: true });
    }

    /// The KV cannot reach its decode node.
    pub(crate) fn handoff_lost(&mut self, slot: u32) {
        let live = &self.live[slot as usize];
        let (request, prefill, decode) = (live.id, live.prefill, live.decode);
        self.leg(prefill, LegInput::HandedOff { request, ok: false, now_us: self.now_us });
        self.report(slot, decode, Fact::HandedOff { ok: false });
    }

    /// Whether a request has a leg at its prefill node or at its decode node.
    pub(crate) fn has_legs(&self, slot: u32) -> bool {
        let live = &self.live[slot as usize];
        [live.prefill, live.decode].iter().any(|at| self.leg_at(*at, slot).is_some())
    }

    /// Whether KV that is complete waits at the prefill node to leave.
    pub(crate) fn waits_to_leave(&self, slot: u32) -> bool {
        matches!(self.prefill_leg(slot), Some(Leg::Held(Complete::Leaves | Complete::Stranded(_))))
    }
}
