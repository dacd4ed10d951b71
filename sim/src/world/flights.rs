//! Bytes on links: fetches, hand-offs, copies between tiers, replicas.

use crate::network::{
    Effect, Input as NetworkInput, LinkId, PathLinks, Priority, ProducerPace, TransferId, TransferRequest,
};
use baton_legs::{Input as LegInput, Leg};
use baton_scheduler::Input;
use baton_store::Input as StoreInput;
use baton_types::{BlockHash, BlockKey, InstanceId, RequestId, Role, Tier};

use super::World;
use super::node::{EGRESS, HOST, INGRESS, SSD};
use super::requests::READER;

/// The purpose of a flight.
#[derive(Clone, Debug)]
pub(crate) enum Purpose {
    Fetch { slot: u32, id: RequestId, from: u32 },
    Onboard { slot: u32, id: RequestId, at: u32 },
    Handoff { slot: u32, id: RequestId },
    Offload { at: u32, ticket: u64 },
    Replicate { from: u32, to: u32, owner: RequestId },
}

impl World {
    fn block_bytes(&self, at: u32, blocks: u32) -> u64 {
        let spec = &self.nodes[at as usize].spec;
        u64::from(blocks) * u64::from(self.setup.scheduler.block_tokens) * spec.profile.kv_bytes_per_token
    }

    fn kv_bytes(&self, at: u32, tokens: u64) -> u64 {
        tokens * self.nodes[at as usize].spec.profile.kv_bytes_per_token
    }

    /// Starts a flight. Returns its number; it may have ended already.
    fn fly(
        &mut self,
        purpose: Purpose,
        links: &[LinkId],
        bytes: u64,
        rest: (Priority, Option<ProducerPace>, Option<u64>),
    ) -> u64 {
        self.next_flight += 1;
        let number = self.next_flight;
        self.flights.insert(number, purpose);
        let Ok(path) = PathLinks::new(links) else { return number };
        let (priority, paced, cap) = rest;
        self.step_network(NetworkInput::Start(TransferRequest {
            transfer: TransferId(number),
            links: path,
            bytes,
            priority,
            paced,
            deadline_us: None,
            rate_cap_bytes_per_s: cap,
        }));
        number
    }

    /// A single flight's own bound, where links are not shared.
    fn cap(&self, at: u32) -> Option<u64> {
        (!self.setup.shared_links).then(|| self.nodes[at as usize].spec.net_bytes_per_s)
    }

    fn path(&self, from: u32, to: u32) -> [LinkId; 2] {
        [self.nodes[from as usize].link(EGRESS), self.nodes[to as usize].link(INGRESS)]
    }

    /// Brings blocks from another instance; `flash` when some of them rest on the flash of one that lends.
    pub(crate) fn fly_fetch(&mut self, slot: u32, route: (u32, u32), tokens: u64, flash: bool) {
        let (from, to) = route;
        let bytes = self.kv_bytes(to, tokens);
        let lent = self.nodes[from as usize].spec.role == Role::Store;
        self.metrics.fetched(bytes, lent);
        let ([out, into], cap) = (self.path(from, to), self.cap(from));
        let disk = self.nodes[from as usize].link(SSD);
        let links = if flash && lent { vec![out, into, disk] } else { vec![out, into] };
        let id = self.live[slot as usize].id;
        self.fly(Purpose::Fetch { slot, id, from }, &links, bytes, (Priority::Fetch, None, cap));
    }

    /// Brings blocks of slower tiers up, if there are any.
    pub(crate) fn begin_onboard(&mut self, slot: u32, at: u32, blocks: (u32, u32)) {
        let (dram, ssd) = blocks;
        if dram + ssd == 0 {
            return;
        }
        let id = self.live[slot as usize].id;
        self.live[slot as usize].loads += 1;
        let node = &self.nodes[at as usize];
        let links = [node.link(HOST), node.link(SSD)];
        let links = if ssd > 0 { &links[..] } else { &links[..1] };
        let bytes = self.block_bytes(at, dram + ssd);
        let purpose = Purpose::Onboard { slot, id, at };
        self.fly(purpose, links, bytes, (Priority::Fetch, None, None));
    }

    /// Lets a request's KV flow to its decode node, `here` tokens being there already.
    pub(crate) fn fly_handoff(&mut self, slot: u32, here: u64) {
        let live = &self.live[slot as usize];
        let (from, to, id) = (live.prefill, live.decode, live.id);
        let bytes = self.kv_bytes(from, live.prompt_tokens.saturating_sub(here));
        let spec = &self.nodes[from as usize].spec;
        let paced = (!self.is_prefilled(slot)).then(|| {
            let new = live.prompt_tokens - live.cached_tokens;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive time")]
            let left_us =
                spec.profile.chunked_prefill_us(new, live.cached_tokens, spec.pass_tokens.into()) as u64;
            let last_bytes = bytes / u64::from(spec.profile.layers.max(1));
            ProducerPace { produced_until_us: self.now_us + left_us, last_bytes }
        });
        let (links, cap) = (self.path(from, to), self.cap(from));
        self.metrics.handed_off(bytes);
        let number = self.next_flight + 1;
        self.live[slot as usize].handoff = Some(number);
        self.fly(Purpose::Handoff { slot, id }, &links, bytes, (Priority::Handoff, paced, cap));
    }

    /// The prefill ended: the rest of its KV may leave, or all of it if none could before.
    pub(crate) fn handoff_produced(&mut self, slot: u32) {
        match self.live[slot as usize].handoff {
            Some(number) => {
                let paced = ProducerPace { produced_until_us: self.now_us, last_bytes: 0 };
                self.step_network(NetworkInput::Repace { transfer: TransferId(number), paced });
            }
            None => self.begin_handoff(slot),
        }
    }

    pub(crate) fn fly_offload(&mut self, at: u32, ticket: u64, route: (Tier, Tier), blocks: u32) {
        let bytes = self.block_bytes(at, blocks);
        let node = &self.nodes[at as usize];
        let which = if route.1 == Tier::Ssd { SSD } else { HOST };
        let links = [node.link(which)];
        self.fly(Purpose::Offload { at, ticket }, &links, bytes, (Priority::Offload, None, None));
    }

    /// Copies a popular chain, if both ends can.
    pub(crate) fn replicate(&mut self, from: u32, to: u32, chain: &[BlockHash]) {
        self.next_flight += 1;
        let owner = RequestId(READER | (1 << 62) | self.next_flight);
        let done = Input::ReplicateFinished { to: InstanceId(to) };
        let Some(keys) = self.keys_of(from, chain) else { return self.send_to_all(&done) };
        let (readable, _) = self.read_store(from, owner, &keys);
        let keys: &[BlockKey] = &keys[..readable as usize];
        let opened = if keys.is_empty() || !self.nodes[to as usize].alive {
            None
        } else {
            self.open_store(to, owner, keys, 0)
        };
        let Some(opened) = opened else {
            self.step_store(from, StoreInput::Close { owner });
            return self.send_to_all(&done);
        };
        let bytes = self.block_bytes(from, readable.saturating_sub(opened.hits));
        let (links, cap) = (self.path(from, to), self.cap(from));
        self.fly(Purpose::Replicate { from, to, owner }, &links, bytes, (Priority::Replicate, None, cap));
    }

    /// Full names of a chain, as the request that made it popular carries them, or as its holder knows them.
    fn keys_of(&self, from: u32, chain: &[BlockHash]) -> Option<Vec<BlockKey>> {
        if !self.nodes[from as usize].alive {
            return None;
        }
        let last = chain.last()?;
        let holds = |l: &&super::LiveRequest| {
            l.used && l.keys.get(chain.len() - 1).is_some_and(|k| k.short() == *last)
        };
        let live = self.live.iter().find(holds).map(|l| l.keys[..chain.len()].to_vec());
        let store = &self.nodes[from as usize].store;
        live.or_else(|| Some(chain.iter().map_while(|hash| store.named(*hash)).collect()))
    }

    pub(crate) fn step_network(&mut self, input: NetworkInput) {
        let mut effects = std::mem::take(&mut self.network_effects);
        self.network.step(self.now_us, input, &mut effects);
        for effect in effects.drain(..) {
            let (transfer, ok) = match effect {
                Effect::Finished { transfer, .. } => (transfer, true),
                Effect::Failed { transfer, .. } => (transfer, false),
            };
            if let Some(purpose) = self.flights.remove(&transfer.0) {
                self.flight_ended(purpose, ok);
            }
        }
        self.network_effects = effects;
    }

    fn flight_ended(&mut self, purpose: Purpose, ok: bool) {
        match purpose {
            Purpose::Fetch { slot, id, .. } => {
                self.witness_load(slot, id);
                self.fetch_ended(slot, ok);
            }
            Purpose::Onboard { slot, id, at } => {
                self.witness_load(slot, id);
                self.step_store(at, StoreInput::OnboardDone { owner: id, ok });
                let live = &mut self.live[slot as usize];
                live.loads = live.loads.saturating_sub(1);
                self.cached(slot, at);
            }
            Purpose::Handoff { slot, id } => {
                if self.slot_of(id).is_some() {
                    self.handoff_ended(slot, ok);
                }
            }
            Purpose::Offload { at, ticket } => self.step_store(at, StoreInput::OffloadDone { ticket, ok }),
            Purpose::Replicate { from, to, owner } => {
                if ok {
                    self.step_store(to, StoreInput::Seal { owner, upto_blocks: u32::MAX });
                }
                self.step_store(to, StoreInput::Close { owner });
                self.step_store(from, StoreInput::Close { owner });
                self.send_to_all(&Input::ReplicateFinished { to: InstanceId(to) });
            }
        }
    }

    /// A prefill's copy ends only while the prefill waits for it.
    fn witness_load(&mut self, slot: u32, id: RequestId) {
        let live = &self.live[slot as usize];
        let leg = self.nodes[live.prefill as usize].legs.get(live.id);
        self.oracle.witness(live.used && live.id == id && matches!(leg, Some(Leg::Loading(_))), || {
            format!("a copy for {id} ended when it was {} in {leg:?}", live.id)
        });
    }

    fn fetch_ended(&mut self, slot: u32, ok: bool) {
        self.stop_reading(slot);
        let at = self.live[slot as usize].prefill;
        let here = self.nodes[at as usize].store.lookup(&self.live[slot as usize].keys).total;
        let live = &mut self.live[slot as usize];
        if !ok {
            live.hit_blocks = live.hit_blocks.min(here);
        }
        let (request, cached_blocks) = (live.id, live.hit_blocks);
        self.leg(at, LegInput::FetchEnded { request, cached_blocks });
    }

    fn handoff_ended(&mut self, slot: u32, ok: bool) {
        self.live[slot as usize].handoff = None;
        let (computes, waits) =
            (matches!(self.prefill_leg(slot), Some(Leg::Computing(_))), self.waits_to_leave(slot));
        if !ok {
            if computes || waits {
                self.handoff_lost(slot);
            }
            return;
        }
        self.live[slot as usize].landed = true;
        if waits {
            self.handoff_done(slot);
        }
    }

    /// Drops the copies that a request's prefill waits for. The store learns of it when the hold closes.
    pub(crate) fn drop_loads(&mut self, slot: u32) {
        let id = self.live[slot as usize].id;
        let mine = |p: &Purpose| matches!(p, Purpose::Fetch { id: i, .. } | Purpose::Onboard { id: i, .. } if *i == id);
        for number in self.flights_where(mine) {
            self.drop_flight(number);
        }
    }

    /// Calls off a request's hand-off.
    pub(crate) fn cancel_handoff(&mut self, slot: u32) {
        if let Some(number) = self.live[slot as usize].handoff.take() {
            self.drop_flight(number);
        }
        self.live[slot as usize].landed = false;
    }

    /// Cancels a flight without handling its end.
    pub(crate) fn drop_flight(&mut self, number: u64) {
        self.flights.remove(&number);
        self.cancel_flight(number);
    }

    /// Makes a flight fail.
    pub(crate) fn cancel_flight(&mut self, number: u64) {
        self.step_network(NetworkInput::Cancel { transfer: TransferId(number) });
    }

    /// Flights that `which` picks, in order of number.
    pub(crate) fn flights_where(&self, which: impl Fn(&Purpose) -> bool) -> Vec<u64> {
        let mut numbers = Vec::new();
        for (number, purpose) in &self.flights {
            if which(purpose) {
                numbers.push(*number);
            }
        }
        numbers.sort_unstable();
        numbers
    }
}
