//! Sections that the simulator alone reads.

use baton_types::Role;
use baton_types::simulated::{Clients, FaultPlan, Handoff, NetworkConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigError, within};

/// The cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterConfig {
    /// Cost profile of every pool that names none: a shipped one's name or a file's path.
    pub profile: String,
    /// When KV travels to the decode instance.
    pub handoff: Handoff,
    /// Latency of a transfer, µs.
    pub net_latency_us: u64,
    /// Whether transfers share links; if not, each has its instance's rate to itself.
    pub shared_links: bool,
    /// Routers that serve the cluster side by side, 1–64.
    pub routers: u32,
    /// How late one router learns what another did, µs.
    pub router_sync_us: u64,
    /// Groups of equal instances.
    pub pools: Vec<PoolConfig>,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        let pool = |role| PoolConfig { role, count: 8, ..PoolConfig::default() };
        Self {
            profile: "llama3-70b-8xa100".into(),
            handoff: Handoff::Layerwise,
            net_latency_us: 10,
            shared_links: true,
            routers: 1,
            router_sync_us: 0,
            pools: vec![pool(Role::Prefill), pool(Role::Decode)],
        }
    }
}

/// How a decoding instance mixes prefills in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MixMode {
    /// In chunks of one length (`mixed_chunk_tokens`), as vLLM and SGLang do.
    Fixed,
    /// As many prompt tokens a step as fit in the step target (`scheduler.mixed_step_permille`), as Baton's own engine
    /// does.
    Target,
    /// Whole prefills first; they stall the decodes.
    PrefillFirst,
}

/// A group of equal instances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// What they do.
    pub role: Role,
    /// How many.
    pub count: u32,
    /// Cost profile; the cluster's when empty.
    pub profile: String,
    /// KV tokens in HBM; 0 takes the profile's capacity.
    pub hbm_tokens: u64,
    /// KV tokens in DRAM.
    pub dram_tokens: u64,
    /// KV tokens on SSD.
    pub ssd_tokens: u64,
    /// Prompt tokens computed in one pass at most.
    pub pass_tokens: u32,
    /// Nodes that form one instance as a chunked pipeline (CPP); more than 1 only with `role = "prefill"` and without `may_change_role`.
    pub pipeline_nodes: u32,
    /// Requests that an engine works on at once at most (vLLM's `--max-num-seqs`, SGLang's `--max-running-requests`); 0: as many as its KV holds.
    pub max_running: u32,
    /// How prefills mix into decode steps.
    pub mix: MixMode,
    /// Prompt tokens a step for `mix = "fixed"`; 0 fills a whole pass, `pass_tokens`, as engines do.
    pub mixed_chunk_tokens: u32,
    /// Whether KV of finished requests is kept as cache.
    pub prefix_cache: bool,
    /// Network rate each way, Gbit/s.
    pub net_gbps: f64,
    /// DRAM to HBM rate, GB/s.
    pub host_gb_per_s: f64,
    /// SSD rate, GB/s.
    pub ssd_gb_per_s: f64,
    /// Whether the conductor may change their role between prefill and decode, as the demand of the last minutes asks.
    pub may_change_role: bool,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            role: Role::Both,
            count: 1,
            profile: String::new(),
            hbm_tokens: 0,
            dram_tokens: 0,
            ssd_tokens: 0,
            pass_tokens: 8192,
            pipeline_nodes: 1,
            max_running: 0,
            mix: MixMode::Target,
            mixed_chunk_tokens: 0,
            prefix_cache: true,
            net_gbps: 800.0,
            host_gb_per_s: 128.0,
            ssd_gb_per_s: 6.0,
            may_change_role: false,
        }
    }
}

pub(super) fn validate_network(network: &NetworkConfig) -> Result<(), ConfigError> {
    within("network.max_flights", f64::from(network.max_flights), 1.0, 1e6)?;
    within("network.max_flights_per_link", f64::from(network.max_flights_per_link), 1.0, 1e6)?;
    within("network.floor_permille", f64::from(network.floor_permille), 0.0, 500.0)?;
    let mut most = 10_000;
    for (name, weight) in [
        ("network.handoff_weight", network.handoff_weight),
        ("network.fetch_weight", network.fetch_weight),
        ("network.replicate_weight", network.replicate_weight),
        ("network.offload_weight", network.offload_weight),
    ] {
        within(name, f64::from(weight), 1.0, f64::from(most))?;
        most = weight;
    }
    Ok(())
}

impl ClusterConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        for (at, pool) in self.pools.iter().enumerate() {
            let name = |setting: &str| format!("cluster.pools[{at}].{setting}");
            within(&name("count"), f64::from(pool.count), 1.0, 65_535.0)?;
            within(&name("pass_tokens"), f64::from(pool.pass_tokens), 1.0, 1_048_576.0)?;
            within(&name("max_running"), f64::from(pool.max_running), 0.0, 1e6)?;
            within(&name("pipeline_nodes"), f64::from(pool.pipeline_nodes), 1.0, 64.0)?;
            if pool.pipeline_nodes > 1 && (pool.role.decodes() || pool.may_change_role) {
                let (setting, nodes) = (name("pipeline_nodes"), pool.pipeline_nodes);
                return Err(ConfigError::DecodingPipeline { setting, nodes });
            }
            within(&name("mixed_chunk_tokens"), f64::from(pool.mixed_chunk_tokens), 0.0, 1_048_576.0)?;
            if pool.mixed_chunk_tokens > 0 && pool.mix != MixMode::Fixed {
                let (setting, tokens) = (name("mixed_chunk_tokens"), pool.mixed_chunk_tokens);
                return Err(ConfigError::ChunkWithoutMix { setting, tokens });
            }
            if pool.may_change_role && !matches!(pool.role, Role::Prefill | Role::Decode) {
                return Err(ConfigError::RoleStays {
                    setting: name("may_change_role"),
                    role: pool.role.name(),
                });
            }
            within(&name("net_gbps"), pool.net_gbps, 0.001, 1e6)?;
            within(&name("host_gb_per_s"), pool.host_gb_per_s, 0.001, 1e6)?;
            within(&name("ssd_gb_per_s"), pool.ssd_gb_per_s, 0.001, 1e6)?;
        }
        within("cluster.routers", f64::from(self.routers), 1.0, 64.0)
    }
}

pub(super) fn validate_clients(clients: &Clients) -> Result<(), ConfigError> {
    within("clients.jitter_permille", f64::from(clients.jitter_permille), 0.0, 1000.0)?;
    within("clients.leave_permille", f64::from(clients.leave_permille), 0.0, 1000.0)
}

pub(super) fn validate_faults(faults: &FaultPlan) -> Result<(), ConfigError> {
    within("faults.lost_news_permille", f64::from(faults.lost_news_permille), 0.0, 1000.0)?;
    within("faults.engine_speed_permille", f64::from(faults.engine_speed_permille), 100.0, 4000.0)?;
    within("faults.engine_noise_permille", f64::from(faults.engine_noise_permille), 0.0, 900.0)?;
    within("faults.link_speed_permille", f64::from(faults.link_speed_permille), 10.0, 10_000.0)
}
