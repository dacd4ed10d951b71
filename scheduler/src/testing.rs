//! Fixtures for this crate's tests.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use baton_types::{BlockHash, ClassId, CostProfile, DecodeCost, Epoch, FitReport, InstanceId, PrefillCost, RequestId, Role, TenantId, ValidRange};

use crate::{Conductor, Effect, Input, InstanceSpec, Request, SchedulerConfig};

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
        prefill: PrefillCost { knots_tokens: vec![0, 1000], knots_us: vec![1000.0, 101_000.0], attention_ps_per_pair: 0.0 },
        decode: DecodeCost { batches: vec![1, 64], base_us: vec![10_000.0, 20_000.0], context_ps_per_token: vec![100.0, 100.0] },
    })
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
        net_bytes_per_s: 1_000_000_000,
        host_bytes_per_s: 1_000_000_000,
        ssd_bytes_per_s: 100_000_000,
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

/// A conductor over `prefills` + `decodes` instances.
pub(crate) fn conductor(config: SchedulerConfig, prefills: u32, decodes: u32) -> Conductor {
    let mut conductor = Conductor::new(config).expect("a valid test config");
    let mut effects = Vec::new();
    for id in 0..prefills + decodes {
        let role = if id < prefills { Role::Prefill } else { Role::Decode };
        conductor.step(0, Input::InstanceJoined(spec(id, role)), &mut effects);
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
