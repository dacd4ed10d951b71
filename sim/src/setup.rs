//! The setup of a run: the cluster, its policies, its clients and its faults.

use std::sync::Arc;

use baton_legs::pairs::{STAGE_FLOOR_US, STAGE_SLACK};
use baton_scheduler::SchedulerConfig;
use baton_store::{Eviction, Offload};
use baton_types::simulated::{Clients, FaultPlan, Handoff, NetworkConfig};
use baton_types::{CostProfile, Role};

use crate::engine::Mix;

/// A `stage_floor_us` that no stage reaches, for systems that serve every request however late, µs.
pub const NO_STAGE_LIMIT_US: u64 = 1 << 50;

/// A number of equal instances.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Their role.
    pub role: Role,
    /// How many.
    pub count: u32,
    /// Their cost profile.
    pub profile: Arc<CostProfile>,
    /// KV tokens in HBM; the profile's capacity when `None`.
    pub hbm_tokens: Option<u64>,
    /// KV tokens in DRAM.
    pub dram_tokens: u64,
    /// KV tokens on SSD.
    pub ssd_tokens: u64,
    /// Prompt tokens a pass.
    pub pass_tokens: u32,
    /// Nodes that form one instance as a chunked pipeline.
    pub pipeline_nodes: u32,
    /// Most requests that an engine works on at once; `None`: as many as its KV holds.
    pub max_running: Option<u32>,
    /// How a decoding instance mixes prefills in.
    pub mix: Mix,
    /// Whether KV of finished requests is kept as cache.
    pub prefix_cache: bool,
    /// Network rate each way, bytes/s.
    pub net_bytes_per_s: u64,
    /// DRAM–HBM rate, bytes/s.
    pub host_bytes_per_s: u64,
    /// SSD rate, bytes/s.
    pub ssd_bytes_per_s: u64,
    /// Whether the conductor may change their role between prefill and decode.
    pub may_change_role: bool,
}

impl Pool {
    /// A pool with the paper's node around it: 4×200 Gbps, 128 GB/s to the host, HBM cache only.
    #[must_use]
    pub fn new(role: Role, count: u32, profile: Arc<CostProfile>) -> Self {
        Self {
            role,
            count,
            profile,
            hbm_tokens: None,
            dram_tokens: 0,
            ssd_tokens: 0,
            pass_tokens: 8192,
            pipeline_nodes: 1,
            max_running: None,
            mix: Mix::Target(90_000),
            prefix_cache: true,
            net_bytes_per_s: 100_000_000_000,
            host_bytes_per_s: 128_000_000_000,
            ssd_bytes_per_s: 6_000_000_000,
            may_change_role: false,
        }
    }
}

/// Everything that a run needs besides its workload.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Instances, pool by pool.
    pub pools: Vec<Pool>,
    /// The conductor's settings.
    pub scheduler: SchedulerConfig,
    /// How transfers share links.
    pub network: NetworkConfig,
    /// Which block goes first when a tier is full.
    pub eviction: Eviction,
    /// When blocks are copied down.
    pub offload: Offload,
    /// Whether SSD takes only blocks that were asked for twice.
    pub ssd_second_touch: bool,
    /// When KV travels.
    pub handoff: Handoff,
    /// Latency of a transfer, µs.
    pub net_latency_us: u64,
    /// Whether transfers share links; if not, each has its instance's rate to itself.
    pub shared_links: bool,
    /// Clients.
    pub clients: Clients,
    /// Faults, by seed.
    pub faults: FaultPlan,
    /// Conductors that serve the same cluster.
    pub routers: u32,
    /// How late one router learns what another did, µs.
    pub router_sync_us: u64,
    /// Arrivals that the policy `baton_informed` knows ahead, µs.
    pub foresight_us: u64,
    /// Time limit of a stage, as a multiple of the time that its objective allows.
    pub stage_slack: u32,
    /// Lower bound on the time limit of any stage, µs.
    pub stage_floor_us: u64,
    /// Seed of everything random outside the cores.
    pub seed: u64,
    /// Loads are sampled this often, µs; 0 for never.
    pub sample_us: u64,
    /// Whether the oracle audits the run, and every how many events it audits whole cores; 0 for never.
    pub audit_every: u64,
    /// Makes every decode step an event of its own (the slow way, to check the fast one).
    pub step_once: bool,
    /// Whether every request's outcome is kept.
    pub keep_outcomes: bool,
    /// Cuts every output to this length; 0 leaves them.
    pub cut_outputs: u32,
}

impl Setup {
    /// A disaggregated cluster of one profile with everything else at its default.
    #[must_use]
    pub fn disaggregated(
        prefills: u32,
        decodes: u32,
        profile: &Arc<CostProfile>,
        scheduler: SchedulerConfig,
    ) -> Self {
        Self {
            pools: vec![
                Pool::new(Role::Prefill, prefills, profile.clone()),
                Pool::new(Role::Decode, decodes, profile.clone()),
            ],
            scheduler,
            network: NetworkConfig::default(),
            eviction: Eviction::Lru,
            offload: Offload::OnEvict,
            ssd_second_touch: false,
            handoff: Handoff::Layerwise,
            net_latency_us: 10,
            shared_links: true,
            clients: Clients::default(),
            faults: FaultPlan::default(),
            routers: 1,
            router_sync_us: 0,
            foresight_us: 0,
            stage_slack: STAGE_SLACK,
            stage_floor_us: STAGE_FLOOR_US,
            seed: 1,
            sample_us: 1_000_000,
            audit_every: 0,
            step_once: false,
            keep_outcomes: false,
            cut_outputs: 0,
        }
    }

    /// A lender of room has some, in DRAM, where transfers land.
    fn validate_lender(&self, pool: &Pool) -> Result<(), String> {
        let blocks = pool.dram_tokens / u64::from(self.scheduler.block_tokens);
        if blocks < 2 || pool.net_bytes_per_s == 0 || pool.pipeline_nodes == 0 {
            return Err(format!(
                "cluster: an instance of role Store lends {blocks} blocks of DRAM over {} bytes/s; give dram_tokens for \
                 two blocks at least, a network and pipeline_nodes = 1",
                pool.net_bytes_per_s
            ));
        }
        Ok(())
    }

    /// Instances in all.
    #[must_use]
    pub fn instances(&self) -> u32 {
        self.pools.iter().map(|p| p.count).sum()
    }

    /// Checks what the cores do not check themselves.
    ///
    /// # Errors
    /// Names what is missing or impossible, and the bound.
    pub fn validate(&self) -> Result<(), String> {
        self.scheduler.validate().map_err(|e| e.to_string())?;
        if !self.pools.iter().any(|p| p.count > 0 && p.role.prefills()) {
            return Err("cluster: no instance prefills; add a pool with role \"prefill\" or \"both\"".into());
        }
        if !self.pools.iter().any(|p| p.count > 0 && p.role.decodes()) {
            return Err("cluster: no instance decodes; add a pool with role \"decode\" or \"both\"".into());
        }
        if self.instances() > 65_535 {
            return Err(format!("cluster: {} instances exceed the bound of 65535", self.instances()));
        }
        for pool in &self.pools {
            if pool.role == Role::Store {
                self.validate_lender(pool)?;
                continue;
            }
            let tokens = pool.hbm_tokens.unwrap_or(pool.profile.kv_capacity_tokens);
            if tokens / u64::from(self.scheduler.block_tokens) < 2 {
                return Err(format!(
                    "cluster: an instance of role {:?} holds {tokens} KV tokens in HBM, less than two blocks of {}; \
                     raise hbm_tokens or take a profile with room beside the weights",
                    pool.role, self.scheduler.block_tokens
                ));
            }
            if pool.pipeline_nodes > 1 && (pool.role.decodes() || pool.may_change_role) {
                return Err(format!(
                    "cluster: a pipeline of {} nodes only prefills; take pipeline_nodes = 1, or role \"prefill\" without \
                     may_change_role",
                    pool.pipeline_nodes
                ));
            }
            if pool.pass_tokens == 0 || pool.pipeline_nodes == 0 || pool.net_bytes_per_s == 0 {
                return Err(
                    "cluster: pass_tokens, pipeline_nodes and net_bytes_per_s must be at least 1".into()
                );
            }
        }
        if self.routers == 0 || self.routers > 64 {
            return Err(format!("routers = {} is outside 1..=64", self.routers));
        }
        Ok(())
    }
}
