//! The prefill side of a request: pin, bring what is missing, compute, seal.

use baton_scheduler::{FirstToken, Input};
use baton_store::{Effect as StoreEffect, Input as StoreInput};
use baton_types::{CacheChange, RequestId, Tier};

use super::World;
use super::requests::{Phase, READER};
use crate::engine::Job;
use crate::setup::Handoff;

impl World {
    /// A prefill was sent to its node.
    pub(crate) fn enter_prefill(&mut self, slot: u32) {
        let live = &mut self.live[slot as usize];
        live.phase = Phase::Incoming;
        (live.prefilled, live.landed, live.cached_tokens, live.hit_blocks) = (false, false, 0, 0);
        let (at, order) = (live.prefill, live.order);
        let node = &mut self.nodes[at as usize];
        if !node.alive {
            return;
        }
        let place = node.incoming.partition_point(|(o, _)| *o <= order);
        node.incoming.insert(place, (order, slot));
        self.unlatch(at);
    }

    /// Lets in whoever waits at a node, as far as there is room.
    pub(crate) fn door(&mut self, at: u32) {
        self.let_decodes_in(at);
        loop {
            let node = &self.nodes[at as usize];
            let ahead = 2 * u64::from(node.spec.pass_tokens) * u64::from(node.spec.pipeline_nodes);
            if !node.alive || node.opened_tokens >= ahead {
                return;
            }
            let Some((_, slot)) = node.incoming.first().copied() else { return };
            if !self.open_prefill(at, slot) {
                return;
            }
        }
    }

    /// Blocks to reserve for a request's answer on a node: what was promised, as far as the node
    /// can hold it at all.
    pub(crate) fn room_blocks(&self, slot: u32, at: u32) -> u32 {
        let live = &self.live[slot as usize];
        let wanted = live.room_tokens.div_ceil(self.setup.scheduler.block_tokens);
        let most = self.nodes[at as usize].store.config().hbm_blocks.saturating_sub(live.keys.len() as u64);
        wanted.min(u32::try_from(most).unwrap_or(u32::MAX))
    }

    /// Pins a prefill's blocks; false when there is no room for them yet.
    fn open_prefill(&mut self, at: u32, slot: u32) -> bool {
        let live = &self.live[slot as usize];
        let (id, local) = (live.id, live.prefill == live.decode);
        let room_blocks = if local { self.room_blocks(slot, at) } else { 0 };
        let keys = std::mem::take(&mut self.live[slot as usize].keys);
        let opened = self.open_store(at, id, &keys, room_blocks);
        let live = &mut self.live[slot as usize];
        live.keys = keys;
        let Some(opened) = opened else { return false };
        live.prefill_open = true;
        live.decode_open = local;
        live.phase = Phase::Loading;
        live.hit_blocks = opened.hits;
        live.shares = opened.pending > 0;
        live.shared_blocks = opened.hits;
        let cached = self.tokens_of(slot, opened.hits);
        let live = &mut self.live[slot as usize];
        live.cached_tokens = cached;
        let left = live.prompt_tokens - cached;
        let node = &mut self.nodes[at as usize];
        node.incoming.remove(0);
        node.opened_tokens += left;
        if opened.pending > 0 {
            node.sharing.push(slot);
        }
        self.begin_onboard(slot, at, opened.onboard);
        self.begin_fetch(slot, at);
        self.maybe_ready(slot);
        true
    }

    /// Prompt tokens in `blocks` leading blocks; the last token is always computed.
    pub(crate) fn tokens_of(&self, slot: u32, blocks: u32) -> u64 {
        let prompt = self.live[slot as usize].prompt_tokens;
        (u64::from(blocks) * u64::from(self.setup.scheduler.block_tokens)).min(prompt - 1)
    }

    /// Brings blocks from the holder that the conductor named, if that still saves work.
    fn begin_fetch(&mut self, slot: u32, at: u32) {
        let live = &self.live[slot as usize];
        let Some(fetch) = live.fetch else { return };
        let (id, hits, from) = (live.id, live.hit_blocks, fetch.from.0);
        let blocks = (fetch.blocks as usize).min(live.keys.len());
        let source_alive = self.nodes.get(fetch.from.index()).is_some_and(|n| n.alive);
        if fetch.blocks <= hits || !source_alive || from == at {
            self.tell_fetch(slot, true);
            return;
        }
        let owner = RequestId(id.0 | READER);
        let keys = std::mem::take(&mut self.live[slot as usize].keys);
        let (readable, on_flash) = self.read_store(from, owner, &keys[..blocks]);
        self.live[slot as usize].keys = keys;
        if readable <= hits {
            self.step_store(from, StoreInput::Close { owner });
            self.tell_fetch(slot, false);
            return;
        }
        let far = self.tokens_of(slot, readable);
        let live = &mut self.live[slot as usize];
        let missing = far - live.cached_tokens;
        live.reading_from = Some(from);
        live.hit_blocks = readable;
        live.cached_tokens = far;
        live.loads += 1;
        let node = &mut self.nodes[at as usize];
        node.opened_tokens = node.opened_tokens.saturating_sub(missing);
        self.fly_fetch(slot, (from, at), missing, on_flash > 0);
    }

    pub(crate) fn tell_fetch(&mut self, slot: u32, ok: bool) {
        let request = self.live[slot as usize].id;
        self.report(slot, Input::FetchFinished { request, ok });
    }

    /// A fetch or an onboard ended; on failure `lost_blocks` says what must be computed after all.
    pub(crate) fn load_ended(&mut self, slot: u32, cached_blocks: Option<u32>) {
        if let Some(blocks) = cached_blocks {
            let cached = self.tokens_of(slot, blocks);
            let live = &mut self.live[slot as usize];
            let more = live.cached_tokens.saturating_sub(cached);
            live.cached_tokens -= more;
            live.hit_blocks = live.hit_blocks.min(blocks);
            let at = live.prefill as usize;
            self.nodes[at].opened_tokens += more;
        }
        let live = &mut self.live[slot as usize];
        live.loads = live.loads.saturating_sub(1);
        self.maybe_ready(slot);
    }

    /// Gives a prefill to its engine once everything that it reuses is there.
    pub(crate) fn maybe_ready(&mut self, slot: u32) {
        let live = &mut self.live[slot as usize];
        if live.phase != Phase::Loading || live.loads > 0 || live.shares {
            return;
        }
        live.phase = Phase::Prefilling;
        let job = Job {
            slot,
            order: live.order,
            left_tokens: live.prompt_tokens - live.cached_tokens,
            prefix_tokens: live.cached_tokens,
        };
        let at = live.prefill;
        self.engine(at, |engine, moment, ended| engine.add_job(moment, job, ended));
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
                self.maybe_ready(*slot);
            }
            !here
        });
        self.nodes[at as usize].sharing = waiting;
    }

    /// The owner that was to bring shared blocks is gone: this request computes what is missing.
    pub(crate) fn inherited(&mut self, slot: u32, at: u32) {
        let live = &self.live[slot as usize];
        if live.phase != Phase::Loading || live.prefill != at {
            return;
        }
        let found = self.nodes[at as usize].store.lookup(&live.keys);
        let cached = self.tokens_of(slot, found.total);
        let live = &mut self.live[slot as usize];
        let more = live.cached_tokens.saturating_sub(cached);
        live.cached_tokens -= more;
        live.hit_blocks = live.hit_blocks.min(found.total);
        live.shared_blocks = live.shared_blocks.min(found.total);
        live.shares &= found.hbm < live.shared_blocks;
        let shares = live.shares;
        let node = &mut self.nodes[at as usize];
        node.opened_tokens += more;
        if !shares {
            node.sharing.retain(|s| *s != slot);
            self.maybe_ready(slot);
        }
    }

    /// The first pass of a prefill begins: its KV may flow from now on.
    pub(crate) fn prefill_started(&mut self, slot: u32) {
        let live = &self.live[slot as usize];
        if live.used
            && live.phase == Phase::Prefilling
            && live.prefill != live.decode
            && self.setup.handoff == Handoff::Layerwise
        {
            self.begin_handoff(slot);
        }
    }

    /// A prefill ended.
    pub(crate) fn prefilled(&mut self, at: u32, slot: u32, compute_us: u64) {
        let live = &mut self.live[slot as usize];
        let expected = live.used && live.phase == Phase::Prefilling && live.prefill == at;
        self.oracle.witness(expected, || format!("instance {at} prefilled {} for nobody", live.id));
        if !expected {
            return;
        }
        live.phase = Phase::HandingOff;
        live.prefilled = true;
        let local = live.prefill == live.decode;
        let (id, cached) = (live.id, live.cached_tokens);
        live.prefill_streamed = !local && self.setup.scheduler.first_token == FirstToken::Prefill;
        let new = live.prompt_tokens - cached;
        let all = u32::try_from(live.keys.len()).unwrap_or(u32::MAX);
        self.nodes[at as usize].opened_tokens -= new;
        self.metrics.prefilled(self.now_us, at, new, compute_us);
        self.step_store(at, StoreInput::Seal { owner: id, upto_blocks: all });
        self.stop_reading(slot);
        let live = &mut self.live[slot as usize];
        // An answer whose only token was given before its KV was lost gets no second one.
        if live.prefill_streamed && live.streamed_tokens < live.output_tokens {
            live.streamed_tokens += 1;
            self.first_token(slot, self.now_us);
        }
        self.report(slot, Input::PrefillFinished { request: id, compute_us, cached_tokens: cached });
        match (local, self.live[slot as usize].landed) {
            (true, _) => {}
            (false, true) => self.handoff_done(slot),
            (false, false) => self.handoff_produced(slot),
        }
    }

    /// Steps a node's store, publishes its news and carries its orders out.
    pub(crate) fn step_store(&mut self, at: u32, input: StoreInput<'_>) {
        let mut effects = std::mem::take(&mut self.store_effects);
        self.nodes[at as usize].store.step(self.now_us, input, &mut effects);
        for effect in effects.drain(..) {
            self.store_said(at, effect);
        }
        self.store_effects = effects;
        // Room may have come back, or blocks that others wait for.
        self.unlatch(at);
    }

    pub(crate) fn store_said(&mut self, at: u32, effect: StoreEffect) {
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
                let of_prefill = |slot: &u32| {
                    let live = &self.live[*slot as usize];
                    live.phase == Phase::Loading && live.prefill == at
                };
                if let Some(slot) = self.slot_of(owner).filter(of_prefill) {
                    self.begin_onboard(slot, at, (dram_blocks, ssd_blocks));
                }
            }
            StoreEffect::GrowRefused { needed_blocks, .. } => self.metrics.overcommitted(needed_blocks),
            StoreEffect::Opened { .. }
            | StoreEffect::Refused { .. }
            | StoreEffect::AlreadyOpen { .. }
            | StoreEffect::Grown { .. } => {}
        }
    }

    /// Opens a hold; `None` when the store has no room. Orders and news are carried out.
    pub(crate) fn open_store(
        &mut self,
        at: u32,
        owner: RequestId,
        keys: &[baton_types::BlockKey],
        room_blocks: u32,
    ) -> Option<Opened> {
        let mut effects = std::mem::take(&mut self.store_effects);
        self.nodes[at as usize].store.step(
            self.now_us,
            StoreInput::Open { owner, chain: keys, room_blocks },
            &mut effects,
        );
        let mut opened = None;
        let mut onboarding = (0, 0);
        for effect in effects.drain(..) {
            match effect {
                StoreEffect::Opened { hbm, dram, ssd, pending, .. } => {
                    opened = Some(Opened { hits: hbm + dram + ssd + pending, hbm, pending, onboard: (0, 0) });
                }
                StoreEffect::Onboard { dram_blocks, ssd_blocks, .. } => {
                    onboarding = (dram_blocks, ssd_blocks)
                }
                other => self.store_said(at, other),
            }
        }
        self.store_effects = effects;
        opened.map(|o| Opened { onboard: onboarding, ..o })
    }

    /// Pins a readable prefix as a source; returns its length in blocks, and how many of them are on flash alone.
    pub(crate) fn read_store(
        &mut self,
        at: u32,
        owner: RequestId,
        keys: &[baton_types::BlockKey],
    ) -> (u32, u32) {
        let mut effects = std::mem::take(&mut self.store_effects);
        self.nodes[at as usize].store.step(
            self.now_us,
            StoreInput::Read { owner, chain: keys },
            &mut effects,
        );
        let mut readable = (0, 0);
        for effect in effects.drain(..) {
            if let StoreEffect::Opened { hbm, dram, ssd, .. } = effect {
                readable = (hbm + dram + ssd, ssd);
            } else {
                self.store_said(at, effect);
            }
        }
        self.store_effects = effects;
        readable
    }
}

/// What a store granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened {
    /// Leading blocks that need no computing here: in any tier, or being filled by another.
    pub hits: u32,
    /// Of those, in HBM already.
    pub hbm: u32,
    /// Of those, being filled by another.
    pub pending: u32,
    /// Blocks to bring up from DRAM and SSD.
    pub onboard: (u32, u32),
}
