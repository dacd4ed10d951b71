//! A node: one engine with its KV cache, its transfer endpoint, and its line to the conductor.

mod attach;
mod decode;
mod engine;
mod error;
mod job;
mod leader_locator;
mod links;
mod memory_only;
mod pool;
mod prefill;
mod publish;
mod pulse;
mod remote;
mod replica;
mod sink;
#[cfg(test)]
mod tests;
mod within;
mod worker;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use baton_engine::Engine;
use baton_events::Speaker;
use baton_store::StoreConfig;
use baton_tiers::{CacheConfig, KvCache};
use baton_transports::{DataPlaneConfig, Endpoint, EndpointConfig, RdmaDevices, Receiver};
use baton_types::Role;
use baton_wire::v1;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use attach::{NodeRuntime, WorkerGoneError};
pub use engine::EngineChoice;
#[cfg(test)]
pub(crate) use engine::build as build_engine;
pub use error::NodeError;
pub(crate) use leader_locator::LEADER_METADATA;
pub use leader_locator::Leaders;
use links::{Links, ToWorker};
use pool::KvMap;
pub use publish::PublishAddress;
pub use remote::{EventSource, Place, Prompts, RemoteNode, run as run_remote};
use worker::{Parts, Worker};

use crate::config::StoreSection;
use crate::guard::{ClusterGuard, open_port};

/// How long peers may take to finish what they send or fetch when this node stops.
const DRAIN: std::time::Duration = std::time::Duration::from_millis(500);

/// The settings a node starts with.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Its name: the same name is the same instance after a restart.
    pub name: String,
    /// Its part.
    pub role: Role,
    /// Whether the conductor may change that between prefill and decode.
    pub may_change_role: bool,
    /// The conductor's control address, as `http://ADDRESS:PORT`.
    pub control: String,
    /// Where peers reach its KV; port 0 takes a free one.
    pub kv_listen: SocketAddr,
    /// By which RDMA devices its KV may go.
    pub rdma: RdmaDevices,
    /// Names the machine: peers on the same one share memory.
    pub host: String,
    /// The engine that computes.
    pub engine: EngineChoice,
    /// Names its model's tokens, for the conductor to compare with the front door's; empty where the model has none.
    pub tokenizer: String,
    /// Blocks in DRAM and on SSD; the first are all the memory of a node that only lends.
    pub dram_blocks: u64,
    /// See `dram_blocks`.
    pub ssd_blocks: u64,
    /// Where the SSD tier's file goes; a temporary folder if none.
    pub ssd_dir: Option<PathBuf>,
    /// How blocks are kept.
    pub store: StoreSection,
    /// The cluster's credentials, which the node checks on its conductor and peers and presents to them.
    pub guard: ClusterGuard,
    /// Where it announces what its cache holds, if anywhere.
    pub publish: Option<PublishAddress>,
}

impl NodeConfig {
    /// Blocks of memory that it lends instead of computing; none where it computes.
    fn lent_blocks(&self) -> Result<Option<u32>, NodeError> {
        if self.role != Role::Store {
            return Ok(None);
        }
        match u32::try_from(self.dram_blocks) {
            Ok(blocks) if blocks >= 2 => Ok(Some(blocks)),
            _ => Err(NodeError::LentBlocks { name: self.name.clone(), blocks: self.dram_blocks }),
        }
    }
}

/// The engine of this process, on its thread.
struct LocalNode {
    links: Arc<Links>,
    worker: Sender<ToWorker>,
    report: Arc<Mutex<v1::NodeLoad>>,
    endpoint: Arc<Endpoint>,
    turns: Arc<AtomicU64>,
}

impl LocalNode {
    fn send(&self, message: ToWorker) -> Result<(), WorkerGoneError> {
        self.worker.send(message).map_err(|_| WorkerGoneError)
    }
}

impl NodeRuntime for LocalNode {
    fn turns(&self) -> Option<u64> {
        Some(self.turns.load(Ordering::Relaxed))
    }

    fn attached(
        &self,
        welcome: &v1::Welcome,
        facts: mpsc::Sender<v1::FromNode>,
    ) -> Result<(), WorkerGoneError> {
        self.links.begin(welcome.epoch, facts.clone());
        self.send(ToWorker::Attached { chain_seed: welcome.chain_seed, facts })
    }

    fn detached(&self) -> Result<(), WorkerGoneError> {
        self.send(ToWorker::Detached)
    }

    fn ordered(&self, orders: v1::Orders) -> Result<(), WorkerGoneError> {
        self.send(ToWorker::Orders(orders))
    }

    fn load(&self) -> v1::NodeLoad {
        let wire = self.endpoint.stats();
        let serving_reads = u32::try_from(wire.serving_fetches).unwrap_or(u32::MAX);
        v1::NodeLoad {
            serving_reads,
            received_bytes: wire.kv.received_bytes,
            refused_peers: wire.refused_peers,
            sent: Some(v1::SentBytes {
                rdma: wire.sent.rdma,
                shared_memory: wire.sent.shared_memory,
                tcp: wire.sent.tcp,
            }),
            ..self.report.lock().clone()
        }
    }
}

/// Runs a node until `stop` is cancelled.
///
/// # Errors
/// The engine cannot be built, the port is taken, the disk has no room, or the conductor will not have this node.
pub async fn run(config: NodeConfig, stop: CancellationToken) -> Result<(), NodeError> {
    run_led(config, None, Handle::current(), stop).await
}

/// Like [`run`], but attached to the leader that `leaders` reports, if given, instead of to `config.control`. The
/// threads of `movers` move KV. Where these are not this runtime's own threads, copies of megabytes delay no order.
///
/// # Errors
/// As [`run`].
pub async fn run_led(
    config: NodeConfig,
    leaders: Option<Leaders>,
    movers: Handle,
    stop: CancellationToken,
) -> Result<(), NodeError> {
    let (choice, lent_blocks) = (config.engine.clone(), config.lent_blocks()?);
    let built = tokio::task::spawn_blocking(move || match lent_blocks {
        Some(blocks) => memory_only::build(&choice, blocks),
        None => engine::build_and_calibrate(&choice),
    });
    let (mut engine, profile) =
        built.await.map_err(|error| NodeError::Panicked { part: "engine", error })??;
    let kv = KvMap::place(engine.as_mut()).map_err(|(bytes, error)| {
        let name = config.name.clone();
        NodeError::Memory { name, bytes, error }
    })?;
    let (to_worker, inbox) = std::sync::mpsc::channel();
    let links = Arc::new(Links::new(to_worker.clone(), movers.clone(), kv));
    let profile = Arc::new(profile);
    let fingerprint = engine::fingerprint(engine.as_ref());
    let bound = movers.spawn(bind(config.clone(), engine::digest(&fingerprint), Arc::clone(&links)));
    let endpoint =
        Arc::new(bound.await.map_err(|error| NodeError::Panicked { part: "KV endpoint", error })??);
    let cache = cache(&config, engine.as_ref())?;
    let hello = v1::Hello {
        ssd_bytes_per_s: ssd_bytes_per_s(&cache),
        ..hello(&config, engine.as_ref(), &endpoint, (fingerprint, &profile))
    };
    let report = Arc::new(Mutex::new(v1::NodeLoad::default()));
    let (lends, pass_tokens) = (config.role == Role::Store, hello.pass_tokens);
    let speaker = speaker(&config, engine.as_ref());
    let announcer = match &config.publish {
        Some(at) => Some(publish::Announcer::bind(at, speaker).await.map_err(NodeError::Publish)?),
        None => None,
    };
    let turns = Arc::new(AtomicU64::new(0));
    let parts = Parts {
        engine,
        profile,
        cache,
        links: Arc::clone(&links),
        report: Arc::clone(&report),
        lends,
        pass_tokens,
        announcer,
        turns: Arc::clone(&turns),
    };
    let thread = std::thread::Builder::new()
        .name(format!("baton-{}", config.name))
        .spawn(move || Worker::new(parts).run(&inbox))
        .map_err(|error| NodeError::Thread { name: config.name.clone(), error })?;
    let (worker, served) = (to_worker.clone(), Arc::clone(&endpoint));
    let runtime = LocalNode { links, worker, report, endpoint: served, turns };
    let leader = Arc::new(leader_locator::LeaderLocator::new(config.control.clone(), leaders));
    let (guard, welcome_within) = (config.guard.clone(), attach::WELCOME_WITHIN);
    let line =
        attach::GrpcSession { leader, guard, hello, runtime, welcome_within, pulse: pulse::Pulse::default() };
    let outcome = line.keep(&stop).await;
    // A worker that is gone already has nothing left to stop.
    let _ = to_worker.send(ToWorker::Stop);
    endpoint.shutdown(DRAIN).await;
    let ended = tokio::task::spawn_blocking(move || thread.join()).await;
    match (outcome, ended) {
        (Err(why), _) => Err(why),
        (Ok(()), Ok(Ok(()))) => Ok(()),
        (Ok(()), _) => Err(NodeError::Gone { name: config.name, what: "thread panicked" }),
    }
}

fn speaker(config: &NodeConfig, engine: &dyn Engine) -> Speaker {
    Speaker {
        model: engine.model().name.clone(),
        block_tokens: engine.shape().block_tokens,
        backend: config.name.clone(),
        ..Speaker::default()
    }
}

async fn bind(config: NodeConfig, fingerprint: u64, links: Arc<Links>) -> Result<Endpoint, NodeError> {
    let plain = EndpointConfig::new(config.kv_listen, config.host.clone(), fingerprint);
    let (sources, rdma) = (vec![links.kv_memory()], config.rdma.clone());
    let data = DataPlaneConfig { sources, rdma, ..plain.data.clone() };
    let settings = EndpointConfig { data, guard: config.guard.links(), ..plain };
    let endpoint =
        Endpoint::bind(settings, Arc::clone(&links) as Arc<dyn Receiver>).await.map_err(|error| {
            NodeError::Endpoint { name: config.name.clone(), address: config.kv_listen, error }
        })?;
    links.set_dialer(endpoint.dialer());
    if let Some(why) = open_port("the KV port", endpoint.address(), &config.guard) {
        tracing::warn!(node = config.name, "{why}");
    }
    Ok(endpoint)
}

fn cache(config: &NodeConfig, engine: &dyn Engine) -> Result<KvCache, NodeError> {
    let shape = engine.shape();
    let store = StoreConfig {
        hbm_blocks: shape.blocks.into(),
        dram_blocks: if config.role == Role::Store { 0 } else { config.dram_blocks },
        ssd_blocks: config.ssd_blocks,
        eviction: config.store.eviction,
        offload: config.store.offload.of(config.ssd_dir.is_some() && config.ssd_blocks > 0),
        ssd_second_touch: config.store.ssd_second_touch,
    };
    let fingerprint = engine::digest(&engine::fingerprint(engine));
    let ssd_dir = config.ssd_dir.clone();
    let (block_bytes, ssd_io) = (shape.block_bytes(), config.store.ssd_io);
    let cache = KvCache::new(CacheConfig { store, block_bytes, ssd_dir, ssd_io, fingerprint })
        .map_err(|error| NodeError::Cache { name: config.name.clone(), error })?;
    let flash = cache.flash();
    if flash.is_off {
        tracing::error!(node = config.name, "the SSD tier is {}", flash.words);
    } else if !flash.words.is_empty() {
        let (recovered, dropped) = (flash.recovered_blocks, flash.dropped_blocks);
        tracing::info!(node = config.name, recovered, dropped, "SSD tier: {}", flash.words);
    }
    Ok(cache)
}

/// How fast blocks come from SSD, as it was seen at the start; 0 without one. A disk whose every
/// slot is in use could not be tried: then a modest figure stands for it.
fn ssd_bytes_per_s(cache: &KvCache) -> u64 {
    let has_tier = cache.stats().store.tiers[baton_types::Tier::Ssd.index()].capacity_blocks > 0;
    let untried = if has_tier { 500_000_000 } else { 0 };
    cache.flash().speed.map_or(untried, |speed| speed.read_bytes_per_s)
}

fn hello(
    config: &NodeConfig,
    engine: &dyn Engine,
    endpoint: &Endpoint,
    known: (v1::Fingerprint, &baton_types::CostProfile),
) -> v1::Hello {
    let (shape, model) = (engine.shape(), engine.model());
    let (fingerprint, profile) = known;
    // Rounding to blocks costs each request less than one; the cache's own slack absorbs it.
    let own_blocks = u64::from(shape.blocks.saturating_sub(shape.blocks / 16));
    let lends = config.role == Role::Store;
    // A lender reports all that it lends: no request has to fit in it.
    let blocks = if lends { config.dram_blocks + config.ssd_blocks } else { own_blocks };
    let capacity_tokens = blocks * u64::from(shape.block_tokens);
    let pass_tokens = if lends { 0 } else { config.engine.pass_tokens() };
    v1::Hello {
        protocol_version: baton_wire::PROTOCOL_VERSION,
        name: config.name.clone(),
        role: v1::Role::from(config.role).into(),
        // Of the tokens KV knows nothing, so they are no part of what nodes compare among themselves.
        fingerprint: Some(v1::Fingerprint { tokenizer: config.tokenizer.clone(), ..fingerprint }),
        capacity_tokens,
        pass_tokens,
        // Its engine cuts prompts by the step target.
        mixed_chunk_tokens: None,
        max_running: (!lends).then(|| config.engine.max_running()),
        net_bytes_per_s: config.engine.net_bytes_per_s(),
        host_bytes_per_s: config.engine.host_bytes_per_s(),
        // The cache knows, once it has tried its disk out.
        ssd_bytes_per_s: 0,
        kv_address: endpoint.address().to_string(),
        host: config.host.clone(),
        profile: Some(profile.into()),
        max_model_tokens: model.max_model_tokens,
        end_tokens: model.end_tokens.clone(),
        wants_body: false,
        engine_moves_kv: false,
        proof: Vec::new().into(),
        process: attach::process_mark(),
        may_change_role: config.may_change_role,
    }
}
