//! One simulated instance: its engine model, its store, and the requests that wait for admission.

use crate::network::{LinkId, LinkSpec};
use baton_legs::{Legs, LegsConfig};
use baton_scheduler::InstanceSpec;
use baton_store::{Store, StoreConfig};
use baton_types::{Epoch, InstanceId, Rng, Role};

use crate::engine::{Engine, Mix};
use crate::setup::{Pool, Setup};

/// Rate that stands for "not shared": the per-transfer cap decides.
const AMPLE_BYTES_PER_S: u64 = 1_000_000_000_000_000;

/// The first instance's stream of the seed of faults, for the noise of its engine; those of the others follow.
const NOISE_STREAM: u64 = 1 << 32;

/// One simulated node: its engine, its store and its legs.
pub(crate) struct Node {
    pub spec: InstanceSpec,
    pub engine: Engine,
    pub store: Store,
    pub alive: bool,
    pub prefix_cache: bool,
    /// The legs of the requests that it serves.
    pub legs: Legs,
    /// Prefills whose blocks are pinned and that wait for blocks which another one computes.
    pub sharing: Vec<u32>,
    /// Its engine must plan before time goes on.
    pub dirty: bool,
    /// It may be able to admit a waiting request: room was freed, or blocks became readable.
    pub admittable: bool,
    /// Blocks became readable.
    pub stored: bool,
}

impl Node {
    /// Egress, ingress, host and SSD links.
    pub(crate) fn links(&self, setup: &Setup) -> [LinkSpec; 4] {
        let link = |bytes_per_s, latency_us| LinkSpec { bytes_per_s, latency_us };
        let permille = u64::from(setup.faults.link_speed_permille);
        let true_rate = self.spec.net_bytes_per_s.saturating_mul(permille) / 1000;
        let network = if setup.shared_links { true_rate.max(1) } else { AMPLE_BYTES_PER_S };
        [
            link(network, setup.net_latency_us),
            link(network, 0),
            link(self.spec.host_bytes_per_s.max(1), 0),
            link(self.spec.ssd_bytes_per_s.max(1), 0),
        ]
    }

    pub(crate) const fn link(&self, which: u32) -> LinkId {
        LinkId(self.spec.id.0 * 4 + which)
    }
}

pub(crate) const EGRESS: u32 = 0;
pub(crate) const INGRESS: u32 = 1;
pub(crate) const HOST: u32 = 2;
pub(crate) const SSD: u32 = 3;

/// Every instance of a setup, pool by pool.
pub(crate) fn build(setup: &Setup) -> Result<Vec<Node>, String> {
    let mut nodes = Vec::new();
    for pool in &setup.pools {
        for _ in 0..pool.count {
            let id = u32::try_from(nodes.len()).map_err(|e| e.to_string())?;
            nodes.push(node(id, pool, setup)?);
        }
    }
    Ok(nodes)
}

fn node(id: u32, pool: &Pool, setup: &Setup) -> Result<Node, String> {
    let nodes = u64::from(pool.pipeline_nodes);
    let hbm_tokens = pool.hbm_tokens.unwrap_or(pool.profile.kv_capacity_tokens) * nodes;
    let block = u64::from(setup.scheduler.block_tokens);
    let (dram_tokens, ssd_tokens) = (pool.dram_tokens * nodes, pool.ssd_tokens * nodes);
    let lends = pool.role == Role::Store;
    // Without an engine, memory is where transfers land: its fastest tier.
    let (fastest_tokens, below_tokens) = if lends { (dram_tokens, 0) } else { (hbm_tokens, dram_tokens) };
    let config = StoreConfig {
        hbm_blocks: fastest_tokens / block,
        dram_blocks: below_tokens / block,
        ssd_blocks: ssd_tokens / block,
        eviction: setup.eviction,
        offload: setup.offload,
        ssd_second_touch: setup.ssd_second_touch,
    };
    // An instance that only ever prefills need not know how to mix.
    let mixes = pool.role != Role::Prefill || pool.may_change_role;
    let chunk = match (mixes, pool.mix) {
        (false, _) | (_, Mix::PrefillFirst) => Some(0),
        (_, Mix::Fixed(tokens)) => Some(tokens),
        (_, Mix::Target(_)) => None,
    };
    let spec = InstanceSpec {
        id: InstanceId(id),
        epoch: Epoch(1),
        role: pool.role,
        profile: pool.profile.clone(),
        capacity_tokens: if lends { dram_tokens + ssd_tokens } else { hbm_tokens },
        pass_tokens: if lends { 0 } else { pool.pass_tokens },
        pipeline_nodes: pool.pipeline_nodes,
        mixed_chunk_tokens: chunk,
        max_running: pool.max_running,
        net_bytes_per_s: pool.net_bytes_per_s,
        host_bytes_per_s: pool.host_bytes_per_s,
        ssd_bytes_per_s: pool.ssd_bytes_per_s,
        may_change_role: pool.may_change_role,
        engine_moves_kv: false,
        kind: 0,
    };
    let mix = if mixes { pool.mix } else { Mix::PrefillFirst };
    let mut engine = Engine::new(pool.profile.clone(), mix, pool.pass_tokens, pool.pipeline_nodes);
    if let Some(most) = pool.max_running {
        engine.limit_requests(most);
    }
    if setup.step_once {
        engine.step_once();
    }
    if setup.faults.engine_noise_permille > 0 {
        let rng = Rng::fork(setup.faults.seed, NOISE_STREAM + u64::from(id));
        engine.add_noise(setup.faults.engine_noise_permille, rng);
    }
    let pass_tokens = u64::from(spec.pass_tokens) * u64::from(spec.pipeline_nodes);
    let legs = LegsConfig::new(setup.scheduler.block_tokens, config.hbm_blocks, pass_tokens);
    Ok(Node {
        engine,
        store: Store::new(config).map_err(|e| e.to_string())?,
        alive: true,
        prefix_cache: pool.prefix_cache,
        legs: Legs::new(legs),
        sharing: Vec::new(),
        dirty: false,
        admittable: false,
        stored: false,
        spec,
    })
}
