//! A whole service on one machine: front door, conductor and nodes in one process or in several.

mod admin;
mod control;
mod error;
mod front;
mod limits;
mod nodes;
mod page;
mod policy_watch;
mod servers;
mod shared_policy;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use baton_http::Identity;
use baton_membership::{Directory, Policies};
use baton_router::{Router, RouterConfig, Tokenization};
use baton_types::Role;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use error::UpError;
use front::FrontThreads;
use limits::{Connections, closed_admin, open_door};
pub use servers::NodeFactory;
use shared_policy::SharedPolicy;

use crate::conductor::{ControlService, Door, Driver, DriverConfig, Inbox, Lead, Question, under_way};
use crate::config::Config;
use crate::guard::{ClusterGuard, open_port, seen_from_outside, to_attach};
use crate::keys::AccessKeys;
use crate::metrics::Metrics;
use crate::node::EngineChoice;
use crate::spans::{ExportTask, Spans};

/// How long what is asked to end may take to do so, where no drain went before.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often a drain says how many answers it waits for.
const COUNT_DOWN_EVERY: Duration = Duration::from_secs(5);

/// How many nodes of each part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Prefill instances.
    pub prefill: u32,
    /// Decode instances.
    pub decode: u32,
    /// Instances that run both phases.
    pub both: u32,
    /// Instances that lend room and compute nothing.
    pub store: u32,
}

impl std::str::FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no layout; write 2p2d, 3b or 2p2d1s");
        let (mut layout, mut digits) = (Self::default(), String::new());
        for letter in text.chars() {
            if letter.is_ascii_digit() {
                digits.push(letter);
                continue;
            }
            let count: u32 = digits.parse().map_err(|_| wrong())?;
            digits.clear();
            match letter {
                'p' => layout.prefill = count,
                'd' => layout.decode = count,
                'b' => layout.both = count,
                's' => layout.store = count,
                _ => return Err(wrong()),
            }
        }
        if !digits.is_empty() {
            return Err(wrong());
        }
        if layout.both == 0 && (layout.prefill == 0 || layout.decode == 0) {
            let remedy =
                "it takes a prefill and a decode node to serve, such as 2p2d, or one of both parts, 1b";
            return Err(format!("'{text}': {remedy}"));
        }
        let counts = [layout.prefill, layout.decode, layout.both, layout.store];
        if counts.into_iter().fold(0, u32::saturating_add) > 256 {
            return Err(format!("'{text}': 256 nodes on one machine at most"));
        }
        Ok(layout)
    }
}

impl Layout {
    /// Names and parts of the nodes.
    #[must_use]
    pub fn nodes(&self) -> Vec<(String, Role)> {
        let group =
            |letter: char, count: u32, role| (0..count).map(move |at| (format!("{letter}{at}"), role));
        group('p', self.prefill, Role::Prefill)
            .chain(group('d', self.decode, Role::Decode))
            .chain(group('b', self.both, Role::Both))
            .chain(group('s', self.store, Role::Store))
            .collect()
    }
}

/// The parts to start.
pub struct Plan {
    /// The configuration in force.
    pub config: Config,
    /// The file that it came from: watched for changes.
    pub config_path: Option<PathBuf>,
    /// The nodes.
    pub layout: Layout,
    /// Whether each is a process of its own.
    pub processes: bool,
    /// The engine of each node.
    pub engine: EngineChoice,
    /// The same in a few words, for a person.
    pub engine_words: String,
    /// The same as arguments of `baton node`, for processes that are started.
    pub engine_arguments: Vec<String>,
    /// KV blocks of each node's DRAM tier.
    pub dram_blocks: u64,
    /// KV blocks of each node's SSD tier; 0 for none.
    pub ssd_blocks: u64,
    /// Folder of their SSD tiers.
    pub data: Option<PathBuf>,
    /// Log filter, for processes that are started.
    pub log: String,
    /// Threads of the front door; one a core if `None`.
    pub threads: Option<usize>,
}

/// The machine's name: nodes that share it share memory.
#[must_use]
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // Two containers may have one name; only one kernel has this boot id.
    format!("{}-{}", name.trim(), boot.trim().get(..8).unwrap_or("0"))
}

/// The name of a conductor that is given none: what other members and spans call it.
#[must_use]
pub fn conductor_name(control: SocketAddr) -> String {
    format!("{}-{}", host_name(), control.port())
}

/// A conductor with its front door, being served.
pub struct Service {
    /// The address that serves clients.
    pub clients: SocketAddr,
    /// The address that nodes attach to.
    pub control: SocketAddr,
    /// The way to the conductor.
    pub inbox: Inbox,
    /// The credentials that nodes have to present.
    pub guard: ClusterGuard,
    tasks: TaskTracker,
    front: FrontThreads,
    /// Ends the clients' side, and the rest.
    stops: (CancellationToken, CancellationToken),
    /// The front door, and what ends with its last connection.
    stopping: (Arc<Router>, JoinHandle<()>),
    drain: Duration,
    exporting: Option<ExportTask>,
}

impl Service {
    /// The only conductor, with a thread a core for clients.
    ///
    /// # Errors
    /// As [`Service::start_led`].
    #[cfg(test)]
    pub async fn start(
        config: &Config,
        tokenization: Tokenization,
        config_path: Option<PathBuf>,
    ) -> Result<Self, UpError> {
        Self::start_led(config, tokenization, config_path, (Lead::alone(), None), None).await
    }

    /// Binds both ports and starts serving, taking nodes only as long as `lead` lets it, following the policy that a
    /// cluster shares, with so many threads for clients. All else runs where this is called: nothing that is computed
    /// for a client delays it.
    ///
    /// # Errors
    /// A port is taken, a certificate cannot be read, a setting is out of bounds.
    pub async fn start_led(
        config: &Config,
        tokenization: Tokenization,
        config_path: Option<PathBuf>,
        (lead, policies): (Lead, Option<Policies>),
        threads: Option<usize>,
    ) -> Result<Self, UpError> {
        let service = &config.service;
        let front = FrontThreads::start(threads)?;
        let listen = service.listen.clone();
        let clients = front.run(async move { bind("service.listen", &listen).await }).await??;
        let control = bind("service.control", &service.control).await?;
        let (client_address, control_address) = (local(&clients)?, local(&control)?);
        let guard = ClusterGuard::read(service, None)?;
        let port = open_port("the control port", control_address, &guard);
        let closed = closed_admin(service).map(str::to_owned);
        for why in [port, open_door(service, client_address), closed].into_iter().flatten() {
            tracing::warn!("{why}");
        }
        let connections = Connections::fit();
        let metrics = Metrics::new().map_err(UpError::Metrics)?;
        let (spans, exporting) = Spans::start(service, &conductor_name(control_address))?;
        let with = DriverConfig { config: config.clone(), metrics: metrics.clone(), spans };
        let (driver, inbox, door) = Driver::new(with)?;
        let sample = tokenization.sample().map_err(UpError::Sample)?;
        let tokenizer = crate::conductor::tokenizer_name(&sample.tokens, sample.chat_tokens.as_deref());
        let (keys, driver) = (driver.keys(), driver.led_by(lead.clone(), tokenizer));
        let tasks = TaskTracker::new();
        let (stop_clients, stop_all) = (CancellationToken::new(), CancellationToken::new());
        let stopping = stop_all.clone();
        tasks.spawn(async move {
            // Dropped at the end, it closes its journal and its capture.
            tokio::select! {
                () = driver.run() => {}
                () = stopping.cancelled() => {}
            }
        });
        let shared = policies.map(|policies| SharedPolicy::new(policies, lead.clone()));
        let nodes = ControlService::new(inbox.clone(), lead.clone()).guarded(guard.clone(), metrics.clone());
        if let Some(shared) = &shared {
            let own = (config.clone(), config_path.clone());
            tasks.spawn(shared.clone().follow(own, (inbox.clone(), metrics.clone()), stop_all.clone()));
        }
        let policy = (config_path.clone(), shared.clone());
        let admin = admin::Admin::new(inbox.clone(), metrics.clone(), policy, keys.clone());
        let router = router((config, &keys), tokenization, (door, connections.clients), admin)?;
        metrics.reads(Arc::downgrade(&router), move || lead.token().is_some());
        let serving = Arc::clone(&router).serve(clients, stop_clients.clone());
        let serving = front.handle().spawn(serving);
        let within = (connections.nodes, metrics.clone());
        tasks.spawn(control::serve(control, (nodes, guard.server_tls()), within, stop_all.clone()));
        tasks.spawn(keep_up(metrics, stop_all.clone()));
        if let Some(path) = config_path {
            tasks.spawn(policy_watch::watch(path, inbox.clone(), shared, stop_all.clone()));
        }
        let drain = Duration::from_micros(service.drain_us);
        let stops = (stop_clients, stop_all);
        let (clients, control) = (client_address, control_address);
        let stopping = (router, serving);
        Ok(Self { clients, control, inbox, guard, tasks, front, stops, stopping, drain, exporting })
    }

    /// Drives the servers of a list, each by a node of this process, until the service stops.
    pub fn drive(&self, directory: Directory, making: NodeFactory, lead: Lead) {
        let servers = servers::Servers::new(directory, making, (self.inbox.clone(), lead), self.drain);
        self.tasks.spawn(servers.follow(self.stops.1.clone()));
    }

    /// Waits until a canary has passed through a pair.
    pub async fn ready(&self) {
        while !self.inbox.ask(Question::Status).await.is_none_or(|status| status.ready) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Rejects new requests and waits for the open answers. Clients that are still reading then have the rest of the
    /// drain's time.
    pub async fn drain(&self) {
        self.stopping.0.close_by(Instant::now() + self.drain);
        let quiet = async {
            let mut quiet = pin!(self.inbox.ask(Question::Quiesce));
            // The front door rejects new requests by the time this is logged.
            let left = tokio::select! {
                biased;
                _ = &mut quiet => return,
                left = self.under_way() => left,
            };
            let limit_s = self.drain.as_secs_f64();
            note!("baton: draining: {left}, {limit_s} s at most (a second Ctrl-C stops at once)");
            tokio::select! {
                _ = quiet => {}
                () = self.count_down() => {}
            }
        };
        if tokio::time::timeout(self.drain, quiet).await.is_err() {
            let left = self.under_way().await;
            tracing::warn!(left, "answers were still under way when the drain's time was over");
        }
    }

    /// Says now and then how many answers a drain waits for, for as long as it is polled.
    async fn count_down(&self) {
        loop {
            tokio::time::sleep(COUNT_DOWN_EVERY).await;
            note!("baton: draining: {}", self.under_way().await);
        }
    }

    /// How many requests the conductor serves, in words.
    async fn under_way(&self) -> String {
        let status = tokio::time::timeout(LAST_WORDS, self.inbox.ask(Question::Status)).await;
        let live = status.ok().flatten().map(|status| status.live_requests);
        live.map_or_else(
            || "the conductor does not say how many requests are under way".to_owned(),
            under_way,
        )
    }

    /// Stops every part of the service.
    pub async fn stop(self) {
        // Unless there was a drain, which says so first.
        self.stopping.0.close_by(Instant::now() + LAST_WORDS);
        self.stops.0.cancel();
        // It ends in bounded time by itself, and says what it broke off.
        let _ = self.stopping.1.await;
        self.stops.1.cancel();
        drop(self.inbox);
        self.tasks.close();
        let exporting = self.exporting;
        let sent = async {
            if let Some(exporting) = exporting {
                exporting.stop().await;
            }
        };
        let _ = tokio::join!(tokio::time::timeout(LAST_WORDS, self.tasks.wait()), sent);
        drop(self.front);
    }
}

async fn bind(setting: &'static str, address: &str) -> Result<TcpListener, UpError> {
    TcpListener::bind(address).await.map_err(|error| UpError::Port {
        setting,
        address: address.to_owned(),
        error,
    })
}

fn local(listener: &TcpListener) -> Result<SocketAddr, UpError> {
    listener.local_addr().map_err(UpError::Listener)
}

fn router(
    (config, keys): (&Config, &AccessKeys),
    tokenization: Tokenization,
    (door, connections_limit): (Door, usize),
    admin: admin::Admin,
) -> Result<Arc<Router>, UpError> {
    let service = &config.service;
    let (tool_parser, reasoning_parser) = config.router.parsers()?;
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let (body_bytes, held_bytes) = (bytes(service.max_body_bytes), bytes(service.max_held_bytes));
    let files = (Path::new(&service.tls_cert), Path::new(&service.tls_key));
    let tls = (!service.tls_cert.is_empty())
        .then(|| Identity::of_files(files.0, files.1))
        .transpose()
        .map_err(UpError::Identity)?;
    let config = RouterConfig {
        hash_seed: service.chain_seed.clone(),
        keep_alive_ms: service.keep_alive_us / 1000,
        drain_limit_ms: service.drain_us / 1000,
        body_limit_bytes: body_bytes,
        bodies_limit_bytes: held_bytes,
        connections_limit,
        api_keys: keys.clients(),
        class_rules: keys.class_rules(),
        tls,
        tool_parser,
        reasoning_parser,
        extra: Some(Arc::new(admin)),
        ..RouterConfig::default()
    };
    Ok(Arc::new(Router::new(config, tokenization, Arc::new(door))))
}

async fn keep_up(metrics: Metrics, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(5)) => metrics.upkeep(),
            () = stop.cancelled() => return,
        }
    }
}

/// Runs everything until a signal comes; `read` reads the tokenizer of the engines' model.
///
/// # Errors
/// What could not be started, or ended too early.
pub async fn run(plan: Plan, read: impl FnOnce() -> Result<Tokenization, String>) -> Result<(), UpError> {
    let stop = crate::shutdown::on_signal()?;
    let started = std::time::Instant::now();
    let tokenization = read().map_err(UpError::Tokenization)?;
    let (path, alone) = (plan.config_path.clone(), (Lead::alone(), None));
    let service = Service::start_led(&plan.config, tokenization, path, alone, plan.threads).await?;
    let mut nodes = nodes::Nodes::start(&plan, (service.control, &service.guard)).await?;
    let greeting = async {
        service.ready().await;
        greet(&plan, (service.clients, service.control), started.elapsed());
        std::future::pending::<()>().await
    };
    let outcome = tokio::select! {
        () = greeting => Ok(()),
        () = stop.cancelled() => Ok(()),
        failed = nodes.first_failure() => Err(failed),
    };
    service.drain().await;
    nodes.stop().await;
    service.stop().await;
    outcome
}

fn greet(plan: &Plan, at: (SocketAddr, SocketAddr), after: Duration) {
    let (address, control) = at;
    let scheme = if plan.config.service.tls_cert.is_empty() { "http" } else { "https" };
    let service = &plan.config.service;
    let key = if service.api_keys.is_empty() { "" } else { " -H 'Authorization: Bearer KEY'" };
    let admin_key = if service.admin_key.expose().is_empty() { "" } else { " --key ADMIN_KEY" };
    let url = format!("{scheme}://{}", seen_from_outside(address));
    announce!(
        "baton: {} node(s) of {}, front door on {scheme}://{address} after {:.2} s; Ctrl-C drains and stops",
        plan.layout.nodes().len(),
        plan.engine_words,
        after.as_secs_f64()
    );
    announce!(
        "try:   curl -N{key} {scheme}://{address}/v1/chat/completions -H 'Content-Type: application/json' \\\n         -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}],\"max_tokens\":32,\"stream\":true}}'"
    );
    announce!("watch: the page {url}/, or baton top --url {url}{admin_key}   metrics: {url}/metrics");
    announce!("shows: {}", shown_by(&plan.engine, plan.layout, plan.config.scheduler.local_prefill));
    let shown = to_attach(&plan.config.service, control);
    announce!("more:  baton node --name NAME --role prefill {shown}");
}

/// What there is to see: how good the answers are, and whether KV moves between nodes.
fn shown_by(engine: &EngineChoice, layout: Layout, local_prefill: bool) -> String {
    let answers = match engine {
        EngineChoice::Seeded { .. } => "answers are noise, for the weights are random; ",
        EngineChoice::Checkpoint { .. } | EngineChoice::Timed { .. } => "",
    };
    let moves = if layout.prefill == 0 || layout.decode == 0 {
        "every node does both phases, so no KV is handed over (--nodes 2p2d hands over)"
    } else if local_prefill {
        "KV goes from prefill to decode nodes (\"handed off\" in baton top), except for prompts that a decode node starts sooner by itself"
    } else {
        "KV of every request goes from a prefill to a decode node (\"handed off\" in baton top)"
    };
    format!("{answers}{moves}")
}

#[cfg(test)]
mod layouts {
    use super::*;

    #[test]
    fn layouts_are_read_and_wrong_ones_explained() {
        let layout: Layout = "4p2d".parse().unwrap();
        assert_eq!((layout.prefill, layout.decode, layout.both), (4, 2, 0));
        let names: Vec<String> = layout.nodes().into_iter().map(|n| n.0).collect();
        assert_eq!(names, ["p0", "p1", "p2", "p3", "d0", "d1"]);
        assert_eq!("3b".parse::<Layout>().unwrap().both, 3);
        let lent: Layout = "1p1d2s".parse().unwrap();
        assert_eq!(lent.nodes()[2..], [("s0".into(), Role::Store), ("s1".into(), Role::Store)]);
        for wrong in ["", "p", "2p", "2d", "0b", "2x", "2p2", "1s", "2p1s", "200p100d", "1b4294967295s"] {
            let error = wrong.parse::<Layout>().unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }
    #[test]
    fn a_greeting_says_whether_kv_moves_and_whether_answers_mean_anything() {
        use baton_engine::{PoolSpec, SeededSpec};
        let seeded = EngineChoice::Seeded { spec: SeededSpec::default(), pool: PoolSpec::default() };
        let said = |layout: &str, local| shown_by(&seeded, layout.parse().unwrap(), local);
        assert!(said("2p2d", true).contains("weights are random"));
        assert!(said("2p2d", true).contains("except for prompts"));
        assert!(said("2p2d", false).contains("of every request"));
        assert!(said("3b", true).contains("no KV is handed over"));
        let loaded = EngineChoice::Checkpoint { folder: "/models/llama".into(), pool: PoolSpec::default() };
        assert!(!shown_by(&loaded, "2p2d".parse().unwrap(), true).contains("random"));
    }
}
