//! The prefill side of a request: pin, bring what is missing, compute, seal.

use baton_legs::pairs::{EmittedTokens, Fact};
use baton_legs::{Input as LegInput, Leg, Work};
use baton_scheduler::FetchPlan;
use baton_store::{Effect as StoreEffect, Input as StoreInput};
use baton_types::{CacheChange, RequestId, Tier};

use super::World;
use super::inbox::ConductorInput;
use super::requests::READER;

impl World {
    /// A prefill was sent to its node.
    pub(crate) fn enter_prefill(&mut self, slot: u32) {
        let live = &mut self.live[slot as usize];
        (live.landed, live.cached_tokens, live.hit_blocks) = (false, 0, 0);
        let (at, order, request) = (live.prefill, live.order, live.id);
        let (stays, fetch) = (live.prefill == live.decode, live.fetch);
        if !self.nodes[at as usize].alive {
            return;
        }
        let work = self.work(slot);
        self.leg(at, LegInput::Prefill { request, work, stays, fetch, order });
        self.mark_admittable(at);
    }

    /// The work that a leg of a request needs from its node.
    pub(crate) fn work(&self, slot: u32) -> Work {
        let live = &self.live[slot as usize];
        Work {
            prompt_tokens: live.prompt_tokens,
            named_blocks: u32::try_from(live.keys.len()).unwrap_or(u32::MAX),
            room_tokens: live.room_tokens,
        }
    }

    /// Admits the requests that wait at a node, as long as there is room.
    pub(crate) fn admit_waiting(&mut self, at: u32) {
        self.leg(at, LegInput::RoomFreed);
        while self.nodes[at as usize].alive {
            let queued = self.nodes[at as usize].legs.queued();
            self.leg(at, LegInput::OpenNext);
            if self.nodes[at as usize].legs.queued() == queued {
                return;
            }
        }
    }

    /// Prompt tokens in `blocks` leading blocks; the last token is always computed.
    pub(crate) fn tokens_of(&self, slot: u32, blocks: u32) -> u64 {
        let prompt = self.live[slot as usize].prompt_tokens;
        (u64::from(blocks) * u64::from(self.setup.scheduler.block_tokens)).min(prompt - 1)
    }

    /// Brings blocks from the holder that the conductor named, if it has more than is here.
    pub(crate) fn begin_fetch(&mut self, slot: u32, at: u32, plan: FetchPlan) {
        let live = &self.live[slot as usize];
        let (request, cached_blocks, from) = (live.id, live.hit_blocks, plan.from.0);
        let source_alive = self.nodes.get(plan.from.index()).is_some_and(|n| n.alive);
        if !source_alive || from == at {
            return self.leg(at, LegInput::FetchEnded { request, cached_blocks });
        }
        let owner = RequestId(request.0 | READER);
        let keys = std::mem::take(&mut self.live[slot as usize].keys);
        let (readable, on_flash) = self.read_store(from, owner, &keys[..plan.blocks as usize]);
        self.live[slot as usize].keys = keys;
        if readable <= cached_blocks {
            self.step_store(from, StoreInput::Close { owner });
            return self.leg(at, LegInput::FetchEnded { request, cached_blocks });
        }
        let missing = self.tokens_of(slot, readable) - self.tokens_of(slot, cached_blocks);
        let live = &mut self.live[slot as usize];
        (live.reading_from, live.hit_blocks) = (Some(from), readable);
        self.fly_fetch(slot, (from, at), missing, on_flash > 0);
    }

    /// Prefills that waited for blocks of another look again, if blocks came.
    pub(crate) fn look_at_shared(&mut self, at: u32) {
        if !std::mem::take(&mut self.nodes[at as usize].stored) {
            return;
        }
        let mut waiting = std::mem::take(&mut self.nodes[at as usize].sharing);
        waiting.retain(|slot| {
            let live = &self.live[*slot as usize];
            let here = self.nodes[at as usize].store.lookup(&live.keys).hbm >= live.shared_blocks;
            if here {
                self.live[*slot as usize].shares = false;
                self.cached(*slot, at);
            }
            !here
        });
        self.nodes[at as usize].sharing = waiting;
    }

    /// The owner that was to bring shared blocks is gone: this request computes what is missing.
    pub(crate) fn inherited(&mut self, slot: u32, at: u32) {
        if !self.loads(slot, at) {
            return;
        }
        let found = self.nodes[at as usize].store.lookup(&self.live[slot as usize].keys);
        let live = &mut self.live[slot as usize];
        live.hit_blocks = live.hit_blocks.min(found.total);
        live.shared_blocks = live.shared_blocks.min(found.total);
        live.shares &= found.hbm < live.shared_blocks;
        if !live.shares {
            self.nodes[at as usize].sharing.retain(|s| *s != slot);
        }
        self.cached(slot, at);
    }

    /// Whether a request's prefill has blocks brought at a node.
    fn loads(&self, slot: u32, at: u32) -> bool {
        self.live[slot as usize].prefill == at && matches!(self.leg_at(at, slot), Some(Leg::Loading(_)))
    }

    /// The first pass of a prefill begins: its KV may flow from now on.
    pub(crate) fn prefill_started(&mut self, slot: u32) {
        if self.live[slot as usize].used {
            self.begin_handoff(slot);
        }
    }

    /// A prefill ended.
    pub(crate) fn prefilled(&mut self, at: u32, slot: u32, compute_us: u64) {
        let live = &self.live[slot as usize];
        let expected =
            live.used && live.prefill == at && matches!(self.leg_at(at, slot), Some(Leg::Computing(_)));
        self.oracle.witness(expected, || format!("instance {at} prefilled {} for nobody", live.id));
        if !expected {
            return;
        }
        let local = live.prefill == live.decode;
        let (id, cached) = (live.id, live.cached_tokens);
        let new = live.prompt_tokens - cached;
        self.metrics.prefilled(self.now_us, at, new, compute_us);
        self.leg(at, LegInput::Computed { request: id });
        self.stop_reading(slot);
        let live = &mut self.live[slot as usize];
        let last = local && live.streamed_tokens + 1 == live.output_tokens;
        if last {
            // No token is left to decode.
            live.streamed_tokens += 1;
            self.first_token(slot, self.now_us);
            self.leave_decode(slot);
            self.gaps_us.clear();
            self.finish_request(at, slot);
        } else if local {
            self.decode(slot, at);
            let live = &self.live[slot as usize];
            let tokens = live.tokens(live.streamed_tokens + 1);
            let drawn = ConductorInput::Emitted(EmittedTokens { first_us: self.now_us, ..tokens });
            self.send(live.router, drawn);
        }
        self.report(slot, at, Fact::Prefilled { compute_us, cached_tokens: cached });
        if last {
            return;
        }
        match (local, self.live[slot as usize].landed) {
            (true, _) => {}
            (false, true) => self.handoff_done(slot),
            (false, false) => self.handoff_produced(slot),
        }
    }

    /// Steps a node's store, publishes its news and carries its orders out.
    pub(crate) fn step_store(&mut self, at: u32, input: StoreInput<'_>) {
        self.ask_store(at, input, |_| false);
        // Room may have come back, or blocks that others wait for.
        self.mark_admittable(at);
    }

    /// Steps a node's store and carries out what it wants, but for the effects that are an `answer`.
    fn ask_store(&mut self, at: u32, input: StoreInput<'_>, mut answer: impl FnMut(&StoreEffect) -> bool) {
        let mut effects = std::mem::take(&mut self.store_effects);
        self.nodes[at as usize].store.step(self.now_us, input, &mut effects);
        for effect in effects.drain(..) {
            if !answer(&effect) {
                self.on_store_effect(at, effect);
            }
        }
        self.store_effects = effects;
    }

    pub(crate) fn on_store_effect(&mut self, at: u32, effect: StoreEffect) {
        match effect {
            StoreEffect::Stored { parent, hashes, tier } => {
                self.nodes[at as usize].stored |= tier == Tier::Hbm;
                self.publish(at, CacheChange::Stored { parent, hashes, tier });
            }
            StoreEffect::Removed { hashes, tier } => self.publish(at, CacheChange::Removed { hashes, tier }),
            StoreEffect::Cleared => self.publish(at, CacheChange::Cleared),
            StoreEffect::Offload { ticket, from, to, blocks } => {
                self.fly_offload(at, ticket, (from, to), blocks)
            }
            StoreEffect::Inherited { owner, .. } | StoreEffect::OnboardFailed { owner, .. } => {
                if let Some(slot) = self.slot_of(owner) {
                    self.inherited(slot, at);
                }
            }
            StoreEffect::Onboard { owner, dram_blocks, ssd_blocks } => {
                // Outside an `Open`: blocks that another owner gave up bringing. A hand-off brings
                // everything below HBM itself.
                if let Some(slot) = self.slot_of(owner).filter(|slot| self.loads(*slot, at)) {
                    self.begin_onboard(slot, at, (dram_blocks, ssd_blocks));
                    self.cached(slot, at);
                }
            }
            StoreEffect::Opened { .. }
            | StoreEffect::Refused { .. }
            | StoreEffect::AlreadyOpen { .. }
            | StoreEffect::Grown { .. }
            | StoreEffect::GrowRefused { .. } => {}
        }
    }

    /// Whether a node's store has more room for an answer, which then has it.
    pub(crate) fn grow_store(&mut self, at: u32, owner: RequestId, room_blocks: u32) -> bool {
        let mut grown = false;
        self.ask_store(at, StoreInput::GrowRoom { owner, room_blocks }, |effect| {
            let answers = matches!(effect, StoreEffect::Grown { .. });
            grown |= answers;
            answers
        });
        grown
    }

    /// Opens a hold; `None` when the store has no room. Orders and news are carried out.
    pub(crate) fn open_store(
        &mut self,
        at: u32,
        owner: RequestId,
        keys: &[baton_types::BlockKey],
        room_blocks: u32,
    ) -> Option<StoreGrant> {
        let mut opened = None;
        let mut onboarding = (0, 0);
        self.ask_store(at, StoreInput::Open { owner, chain: keys, room_blocks }, |effect| {
            match *effect {
                StoreEffect::Opened { hbm, dram, ssd, pending, .. } => {
                    let hits = hbm + dram + ssd + pending;
                    opened = Some(StoreGrant { hits, hbm, pending, onboard: (0, 0) });
                }
                StoreEffect::Onboard { dram_blocks, ssd_blocks, .. } => {
                    onboarding = (dram_blocks, ssd_blocks);
                }
                _ => return false,
            }
            true
        });
        opened.map(|o| StoreGrant { onboard: onboarding, ..o })
    }

    /// Pins a readable prefix as a source; returns its length in blocks, and how many of them are on flash alone.
    pub(crate) fn read_store(
        &mut self,
        at: u32,
        owner: RequestId,
        keys: &[baton_types::BlockKey],
    ) -> (u32, u32) {
        let mut readable = (0, 0);
        self.ask_store(at, StoreInput::Read { owner, chain: keys }, |effect| {
            let StoreEffect::Opened { hbm, dram, ssd, .. } = *effect else { return false };
            readable = (hbm + dram + ssd, ssd);
            true
        });
        readable
    }
}

/// The blocks that a store granted to an `Open`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreGrant {
    /// Leading blocks that need no computing here: in any tier, or being filled by another.
    pub hits: u32,
    /// Of those, in HBM already.
    pub hbm: u32,
    /// Of those, being filled by another.
    pub pending: u32,
    /// Blocks to bring up from DRAM and SSD.
    pub onboard: (u32, u32),
}
