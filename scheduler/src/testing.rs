//! Fixtures for this crate's tests: round numbers, short constructors, and a play in which engines obey the conductor
//! while an oracle keeps its own account.

mod exact;
mod oracle;
mod play;

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use baton_types::{
    BlockHash, CacheChange, CacheEvent, ClassId, CostProfile, DecodeCost, Epoch, FitReport, InstanceId,
    PrefillCost, RequestId, Role, TenantId, Tier, ValidRange,
};

use crate::{
    AdmissionMode, Conductor, Effect, FailStage, FetchPlan, Input, InstanceSpec, PEER_VERSION, PeerPlacement,
    PeerStage, PolicyName, Rejection, Request, SchedulerConfig, Snapshot,
};

pub(crate) use exact::{Run, run, run_in_passes};
pub(crate) use oracle::Oracle;
pub(crate) use play::{Act, Play, scripts};

/// Time of a prompt token under [`profile`], µs.
pub(crate) const TOKEN_US: u64 = 100;
/// Fixed time of a prefill pass, µs.
pub(crate) const PASS_US: u64 = 1000;
/// Tokens in a block of every test.
pub(crate) const BLOCK: u64 = 512;

/// A profile with round numbers: 100 µs a token, 10 ms a decode step.
pub(crate) fn profile() -> Arc<CostProfile> {
    Arc::new(CostProfile {
        name: String::from("round"),
        source: String::from("made up for tests"),
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
    })
}

/// An instance whose passes have no fixed time, so that prompts gain nothing from sharing one.
pub(crate) fn linear(spec: InstanceSpec) -> InstanceSpec {
    let mut linear = (*profile()).clone();
    linear.prefill.knots_us = vec![0.0, 100_000.0];
    InstanceSpec { profile: Arc::new(linear), ..spec }
}

/// A profile whose decode step grows by 1 µs for each token of context.
pub(crate) fn heavy_decode() -> Arc<CostProfile> {
    let mut heavy = (*profile()).clone();
    heavy.decode.context_ps_per_token = vec![1_000_000.0, 1_000_000.0];
    Arc::new(heavy)
}

/// An instance of that profile.
pub(crate) fn spec(id: u32, role: Role) -> InstanceSpec {
    InstanceSpec {
        id: InstanceId(id),
        epoch: Epoch(1),
        role,
        profile: profile(),
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

/// A request whose chain starts with `shared` blocks that every request has.
pub(crate) fn request(id: u64, prompt_tokens: u64, shared: u64) -> Request {
    let blocks = baton_types::blocks_for(prompt_tokens, 512);
    let hash = |b: u64| BlockHash(if b < shared { b + 1 } else { (id + 1) * 1_000_000 + b });
    Request {
        id: RequestId(id),
        class: ClassId(0),
        tenant: TenantId(0),
        prompt_tokens,
        chain: (0..blocks).map(hash).collect(),
        ..Request::default()
    }
}

/// A request with a known output length of `output_tokens`.
pub(crate) fn foretold(id: u64, prompt_tokens: u64, output_tokens: u32) -> Request {
    Request { known_output_tokens: Some(output_tokens), ..request(id, prompt_tokens, 0) }
}

/// The first `blocks` hashes of the chain that all requests share.
pub(crate) fn shared_chain(blocks: u64) -> Vec<BlockHash> {
    (1..=blocks).map(BlockHash).collect()
}

/// Time of a prefill by the profile on one node in passes of 8192 tokens, µs, computed apart from the production
/// formula.
pub(crate) fn naive_prefill_us(new_tokens: u64) -> u64 {
    new_tokens * TOKEN_US + new_tokens.div_ceil(8192) * PASS_US
}

/// A configuration in which few things influence a decision: no local prefill, no replication.
pub(crate) fn plain(policy: PolicyName, admission: AdmissionMode) -> SchedulerConfig {
    SchedulerConfig {
        policy,
        admission,
        local_prefill: false,
        replicate: false,
        ..SchedulerConfig::default()
    }
}

/// A conductor over `prefills` + `decodes` instances.
pub(crate) fn conductor(config: SchedulerConfig, prefills: u32, decodes: u32) -> Conductor {
    let role = |id| if id < prefills { Role::Prefill } else { Role::Decode };
    let specs: Vec<InstanceSpec> = (0..prefills + decodes).map(|id| spec(id, role(id))).collect();
    conductor_of(config, &specs)
}

/// Bytes/s of links so fast that they hold nothing up, for tests that are about something else.
pub(crate) const FAST_LINK: u64 = 1 << 50;

/// A conductor over the given instances.
pub(crate) fn conductor_of(config: SchedulerConfig, specs: &[InstanceSpec]) -> Conductor {
    let mut conductor = Conductor::new(config).expect("a valid test config");
    let mut effects = Vec::new();
    for spec in specs {
        conductor.step(0, Input::InstanceJoined(spec.clone()), &mut effects);
    }
    assert!(effects.is_empty());
    conductor
}

/// Steps and returns the effects, after an audit.
pub(crate) fn step(conductor: &mut Conductor, now_us: u64, input: Input) -> Vec<Effect> {
    let mut effects = Vec::new();
    conductor.step(now_us, input, &mut effects);
    assert_eq!(conductor.check(), Ok(()));
    effects
}

/// Offers a request.
pub(crate) fn offer(conductor: &mut Conductor, now_us: u64, request: Request) -> Vec<Effect> {
    step(conductor, now_us, Input::RequestArrived(request))
}

/// Records in the index that `instance` holds `chain` from its root in `tier`.
pub(crate) fn hold(conductor: &mut Conductor, instance: u32, chain: &[BlockHash], tier: Tier) {
    let change = CacheChange::Stored { parent: None, hashes: chain.to_vec(), tier };
    let event = CacheEvent { instance: InstanceId(instance), epoch: Epoch(1), change };
    assert!(step(conductor, 0, Input::Cache(event)).is_empty());
}

/// Puts another router's prefill of `work_us` on an instance and its decode on another.
pub(crate) fn burden(conductor: &mut Conductor, request: Request, at: (u32, u32), work_us: u64) {
    let at = (InstanceId(at.0), InstanceId(at.1));
    let ahead_us = conductor.fleet.get(at.0).map_or(0, |i| i.backlog_us(conductor.now_us));
    let placed = PeerPlacement {
        decode_at_us: conductor.now_us + ahead_us + work_us,
        ..peer_sent(request, at, work_us)
    };
    assert!(step(conductor, 0, Input::PeerPlaced(Box::new(placed))).is_empty());
}

/// What another router says of a request that it has sent: one without an objective, which nothing is learnt from.
pub(crate) fn peer_sent(request: Request, at: (InstanceId, InstanceId), work_us: u64) -> PeerPlacement {
    PeerPlacement {
        version: PEER_VERSION,
        router: 1,
        prefill: at.0,
        decode: at.1,
        fetch: None,
        work_us,
        alone_us: work_us,
        new_tokens: request.prompt_tokens,
        request,
        arrived_us: u64::MAX,
        promised_us: u64::MAX,
        decode_at_us: 0,
        again: true,
        stage: PeerStage::Sent { order: 0 },
    }
}

/// Another router's request that already decodes on an instance: it emits `output_tokens`.
pub(crate) fn decoding(conductor: &mut Conductor, request: Request, decode: u32) {
    let id = request.id;
    burden(conductor, request, (0, decode), 0);
    let now_us = conductor.now_us;
    step(conductor, now_us, finished(id.0));
    step(conductor, now_us, Input::HandoffFinished { request: id });
}

/// The prefill of a request ended, as predicted.
pub(crate) fn finished(id: u64) -> Input {
    Input::PrefillFinished { request: RequestId(id), compute_us: 0, cached_tokens: 0 }
}

/// One `StartPrefill`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefillStart {
    pub request: u64,
    pub prefill: u32,
    pub decode: u32,
    pub fetch: Option<FetchPlan>,
    pub room_tokens: u32,
}

/// Every prefill that the effects start.
pub(crate) fn starts(effects: &[Effect]) -> Vec<PrefillStart> {
    let start = |effect: &Effect| match *effect {
        Effect::StartPrefill { request, instance, decode, fetch, room_tokens, .. } => Some(PrefillStart {
            request: request.0,
            prefill: instance.0,
            decode: decode.0,
            fetch,
            room_tokens,
        }),
        _ => None,
    };
    effects.iter().filter_map(start).collect()
}

/// The one prefill that the effects start.
pub(crate) fn started(effects: &[Effect]) -> PrefillStart {
    let all = starts(effects);
    assert_eq!(all.len(), 1, "{effects:?}");
    all[0]
}

/// The refusal among the effects, if any.
pub(crate) fn rejection(effects: &[Effect]) -> Option<Rejection> {
    effects.iter().find_map(|e| if let Effect::Reject(r) = e { Some(r.clone()) } else { None })
}

/// Every `Release`, as (request, instance).
pub(crate) fn releases(effects: &[Effect]) -> Vec<(u64, u32)> {
    let release = |effect: &Effect| match effect {
        Effect::Release { request, instance } => Some((request.0, instance.0)),
        _ => None,
    };
    effects.iter().filter_map(release).collect()
}

/// The failure among the effects, if any.
pub(crate) fn failure(effects: &[Effect]) -> Option<(u64, FailStage)> {
    effects
        .iter()
        .find_map(|e| if let Effect::Fail { request, stage } = e { Some((request.0, *stage)) } else { None })
}

/// Asserts that no instance owes anything to anyone.
pub(crate) fn assert_idle(snapshot: &Snapshot) {
    assert_eq!(snapshot.requests, 0, "{snapshot:?}");
    for load in &snapshot.instances {
        let counts = (load.waiting, load.dispatched, load.decodes, load.running);
        assert_eq!((load.backlog_us, counts, load.reserved_tokens), (0, (0, 0, 0, 0), 0), "{load:?}");
    }
}
