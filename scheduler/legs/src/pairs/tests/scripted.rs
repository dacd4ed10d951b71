//! A conductor that draws lots: what it orders follows from its seed and from what it has heard so far, so that two of
//! them that hear the same order the same.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use baton_scheduler::{
    Decision, Effect as Order, FailStage, FetchPlan, Input, InstanceSpec, RejectReason, Rejection, Request,
};
use baton_types::{
    BlockHash, CostProfile, DecodeCost, Epoch, FitReport, InstanceId, PrefillCost, RequestId, Rng, Role,
    ValidRange,
};

use super::super::Core;

/// Two that prefill, two that decode, one that does both.
pub(super) const ROLES: [Role; 5] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode, Role::Both];

/// An instance as it joins.
pub(super) fn spec(id: u32, role: Role, epoch: u32) -> InstanceSpec {
    let profile = CostProfile {
        name: "round".into(),
        source: "made up for tests".into(),
        kv_bytes_per_token: 1000,
        kv_capacity_tokens: 100_000,
        layers: 10,
        shared_us: 1000.0,
        fit: FitReport::default(),
        valid: ValidRange::default(),
        prefill: PrefillCost {
            knots_tokens: vec![0, 1000],
            knots_us: vec![1000.0, 101_000.0],
            attention_ps_per_pair: 0.0,
        },
        decode: DecodeCost {
            batches: vec![1, 64],
            base_us: vec![10_000.0, 20_000.0],
            context_ps_per_token: vec![100.0, 100.0],
        },
    };
    InstanceSpec {
        id: InstanceId(id),
        epoch: Epoch(epoch),
        role,
        profile: Arc::new(profile),
        capacity_tokens: 100_000,
        pass_tokens: 8192,
        pipeline_nodes: 1,
        mixed_chunk_tokens: None,
        max_running: None,
        net_bytes_per_s: 1_000_000_000,
        host_bytes_per_s: 1_000_000_000,
        ssd_bytes_per_s: 100_000_000,
        may_change_role: false,
        engine_moves_kv: false,
        kind: 0,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ScriptState {
    Held,
    Sent,
    HandingOff,
    Decoding,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: ScriptState,
    prefill: InstanceId,
    decode: InstanceId,
}

impl Entry {
    const HELD: Self = Self { at: ScriptState::Held, prefill: InstanceId(0), decode: InstanceId(0) };

    /// The instances that it holds, to be released.
    fn legs(&self) -> Vec<InstanceId> {
        match self.at {
            ScriptState::Held => vec![],
            ScriptState::Decoding => vec![self.decode],
            _ if self.prefill == self.decode => vec![self.prefill],
            _ => vec![self.prefill, self.decode],
        }
    }
}

/// The conductor, and what its driver knows.
#[derive(Clone, Debug)]
pub(super) struct ScriptedCore {
    seed: u64,
    known: BTreeMap<RequestId, Entry>,
    pub alive: [bool; 5],
    /// All that it has heard.
    pub inputs: Vec<Input>,
    /// When each request's latest token came, µs.
    pub tokens_us: BTreeMap<RequestId, u64>,
}

impl ScriptedCore {
    pub(super) fn new(seed: u64) -> Self {
        let (known, tokens_us) = (BTreeMap::new(), BTreeMap::new());
        Self { seed, known, alive: [true; 5], inputs: Vec::new(), tokens_us }
    }

    pub(super) fn knows(&self, request: RequestId) -> bool {
        self.known.contains_key(&request)
    }

    pub(super) fn live(&self) -> usize {
        self.known.len()
    }

    fn lot(&self, purpose: u64) -> Rng {
        Rng::fork(self.seed ^ (self.inputs.len() as u64) << 20, purpose)
    }

    fn serving(&self, wanted: fn(Role) -> bool) -> Vec<InstanceId> {
        let serves = |at: &u32| self.alive[*at as usize] && wanted(ROLES[*at as usize]);
        (0..5).filter(serves).map(InstanceId).collect()
    }

    /// Sends a request to an instance, or keeps it where there is none.
    fn place(&mut self, request: RequestId, rng: &mut Rng, orders: &mut Vec<Order>) {
        let (prefills, decodes) = (self.serving(Role::prefills), self.serving(Role::decodes));
        let Some((instance, decode)) = drawn(&prefills, rng).zip(drawn(&decodes, rng)) else {
            self.known.insert(request, Entry::HELD);
            return;
        };
        self.known.insert(request, Entry { at: ScriptState::Sent, prefill: instance, decode });
        let fetch = rng.chance_permille(100).then_some(FetchPlan { from: decode, blocks: 3 });
        let room_tokens = 1 + u32::try_from(rng.below(4)).unwrap();
        let order = rng.below(9);
        orders.push(Order::StartPrefill { request, instance, decode, fetch, room_tokens, order });
    }

    fn reject(&mut self, request: RequestId, wasted_tokens: u64, rng: &mut Rng, orders: &mut Vec<Order>) {
        self.known.remove(&request);
        let lots = usize::try_from(rng.below(RejectReason::ALL.len() as u64)).unwrap();
        let reason = if self.can_serve() { RejectReason::ALL[lots] } else { RejectReason::NoInstance };
        orders.push(Order::Reject(Rejection {
            request,
            reason,
            retry_after_us: rng.below(3) * 400_000,
            predicted_ttft_us: rng.chance_permille(500).then_some(7),
            wasted_tokens,
        }));
    }

    fn release(&mut self, request: RequestId, orders: &mut Vec<Order>) {
        let legs = self.known.remove(&request).map_or_else(Vec::new, |entry| entry.legs());
        orders.extend(legs.into_iter().map(|instance| Order::Release { request, instance }));
    }

    /// Releases it, and places it again, keeps it, or gives it up.
    fn start_over(&mut self, request: RequestId, rng: &mut Rng, orders: &mut Vec<Order>) {
        self.release(request, orders);
        let stage = FailStage::ALL[usize::try_from(rng.below(6)).unwrap()];
        match rng.below(10) {
            0..7 if self.can_serve() => self.place(request, rng, orders),
            7 => _ = self.known.insert(request, Entry::HELD),
            8 => orders.push(Order::Fail { request, stage }),
            _ => orders.push(Order::Fail { request, stage: FailStage::NoPlacement }),
        }
    }

    fn arrived(&mut self, request: RequestId, rng: &mut Rng, orders: &mut Vec<Order>) {
        assert!(!self.knows(request), "{request} is known already");
        match rng.below(10) {
            0 => self.reject(request, 0, rng, orders),
            1 => _ = self.known.insert(request, Entry::HELD),
            _ if !self.can_serve() => self.reject(request, 0, rng, orders),
            _ => self.place(request, rng, orders),
        }
    }

    fn handed_off(&mut self, request: RequestId, orders: &mut Vec<Order>) {
        if let Some(entry) = self.known.get_mut(&request).filter(|entry| entry.at == ScriptState::HandingOff)
        {
            entry.at = ScriptState::Decoding;
            orders.push(Order::StartDecode { request, instance: entry.decode });
        }
    }

    fn prefilled(&mut self, request: RequestId, rng: &mut Rng, orders: &mut Vec<Order>) {
        let Some(entry) = self.known.get_mut(&request).filter(|entry| entry.at == ScriptState::Sent) else {
            return;
        };
        entry.at = ScriptState::HandingOff;
        let local = entry.prefill == entry.decode;
        if rng.chance_permille(50) {
            self.release(request, orders);
            self.reject(request, 12, rng, orders);
        } else if local {
            self.handed_off(request, orders);
        }
    }

    fn handoff_failed(&mut self, request: RequestId, rng: &mut Rng, orders: &mut Vec<Order>) {
        let Some(entry) = self.known.get(&request).copied() else { return };
        let decodes = self.serving(Role::decodes);
        let others: Vec<_> =
            decodes.into_iter().filter(|to| ![entry.prefill, entry.decode].contains(to)).collect();
        match (entry.at, drawn(&others, rng)) {
            (ScriptState::Sent, _) => self.start_over(request, rng, orders),
            (ScriptState::HandingOff, Some(to))
                if rng.chance_permille(900) && entry.prefill != entry.decode =>
            {
                self.known.insert(request, Entry { decode: to, ..entry });
                orders.push(Order::Release { request, instance: entry.decode });
                orders.push(Order::Handoff { request, from: entry.prefill, to, room_tokens: 2 });
            }
            (ScriptState::HandingOff, _) => {
                self.release(request, orders);
                orders.push(Order::Fail { request, stage: FailStage::HandoffFailed });
            }
            (ScriptState::Held | ScriptState::Decoding, _) => {}
        }
    }

    fn lost(&mut self, instance: InstanceId, rng: &mut Rng, orders: &mut Vec<Order>) {
        self.alive[instance.index()] = false;
        let here =
            |(request, entry): (&RequestId, &Entry)| entry.legs().contains(&instance).then_some(*request);
        let touched: Vec<RequestId> = self.known.iter().filter_map(here).collect();
        touched.into_iter().for_each(|request| self.start_over(request, rng, orders));
    }

    /// Spontaneous actions: places or rejects held requests, moves one, copies and explains.
    fn whims(&mut self, rng: &mut Rng, orders: &mut Vec<Order>) {
        let all: Vec<(RequestId, ScriptState)> =
            self.known.iter().map(|(request, entry)| (*request, entry.at)).collect();
        for (request, at) in all {
            match (at, rng.below(400)) {
                (ScriptState::Held, 0..40) if self.can_serve() => self.place(request, rng, orders),
                (ScriptState::Held, 40..44) => self.reject(request, 0, rng, orders),
                (ScriptState::Sent, 0) => self.start_over(request, rng, orders),
                (ScriptState::HandingOff, 0) => {
                    self.release(request, orders);
                    self.reject(request, 0, rng, orders);
                }
                _ => {}
            }
        }
        let (from, to) = (InstanceId(0), InstanceId(1));
        match rng.below(100) {
            0 => orders.push(Order::Replicate { from, to, chain: vec![BlockHash(7)] }),
            1 => {
                let request = RequestId(rng.below(9));
                orders.push(Order::Explain(Decision { request, at_us: 1, chosen: None, candidates: vec![] }));
            }
            2 => orders.push(Order::Release { request: RequestId(999), instance: to }),
            3 => orders.push(Order::Fail { request: RequestId(999), stage: FailStage::DecodeLost }),
            _ => {}
        }
    }
}

fn drawn(from: &[InstanceId], rng: &mut Rng) -> Option<InstanceId> {
    from.get(usize::try_from(rng.below(from.len() as u64)).unwrap()).copied()
}

impl Core for ScriptedCore {
    fn step(&mut self, _: u64, input: Input, orders: &mut Vec<Order>) {
        let mut rng = self.lot(1);
        self.inputs.push(input.clone());
        let sent = |core: &Self, request| {
            core.known.get(&request).is_some_and(|entry| entry.at != ScriptState::Held)
        };
        match input {
            Input::InstanceJoined(spec) => self.alive[spec.id.index()] = true,
            Input::InstanceLost { instance, .. } => self.lost(instance, &mut rng, orders),
            Input::RequestArrived(asked) => self.arrived(asked.id, &mut rng, orders),
            Input::RequestCancelled { request } => self.release(request, orders),
            Input::DecodeFinished { request, .. } => _ = self.known.remove(&request),
            Input::PrefillFinished { request, .. } => self.prefilled(request, &mut rng, orders),
            Input::HandoffFinished { request } => self.handed_off(request, orders),
            Input::HandoffFailed { request } => self.handoff_failed(request, &mut rng, orders),
            Input::PrefillFailed { request }
            | Input::DecodeFailed { request, .. }
            | Input::LegRefused { request, .. }
            | Input::Preempted { request, .. }
                if sent(self, request) =>
            {
                self.start_over(request, &mut rng, orders);
            }
            _ => {}
        }
        self.whims(&mut rng, orders);
    }

    fn request(&mut self, request: RequestId, emitted_tokens: u32) -> Option<Request> {
        Some(Request { id: request, emitted_tokens, ..Request::default() })
    }

    fn handoff_us(&self, request: RequestId) -> u64 {
        let mut rng = self.lot(6 + request.0);
        // Most links are quick, some take longer than any limit.
        if rng.chance_permille(700) { rng.below(1_000) } else { rng.below(2_000_000) }
    }

    fn decodes_at_us(&self, request: RequestId) -> Option<u64> {
        let mut rng = self.lot(2 + request.0);
        // Some foresee the past, some the far future.
        (!rng.chance_permille(300)).then(|| rng.below(8_000_000))
    }

    fn last_token_us(&self, request: RequestId) -> u64 {
        self.tokens_us.get(&request).copied().unwrap_or(0)
    }

    fn moves_kv(&self, instance: InstanceId) -> bool {
        instance == InstanceId(3)
    }

    fn can_serve(&self) -> bool {
        !self.serving(Role::prefills).is_empty() && !self.serving(Role::decodes).is_empty()
    }

    fn prefills(&self) -> usize {
        self.serving(Role::prefills).len()
    }
}
