//! A cluster for a test, and one engine alone as its reference.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::{
    Engine, Event as EngineEvent, KvPool, KvSink, PoolSpec, SeededSpec, Sequence, SequenceId,
};
use baton_router::{Backend as _, Event, Submission, SubmissionStream, TraceParent, Usage};
use baton_transports::RdmaDevices;
use baton_types::{BlockKey, ChainHasher, Finish, Role, Sampling, Secret, TokenLogprob};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::conductor::{ControlService, Door, Driver, DriverConfig, Inbox, Question, Status};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::node::{EngineChoice, NodeConfig, NodeError, Place, Prompts, RemoteNode};
use crate::spans::{ExportTask, Spans};
use crate::up::Layout;

/// Stands in every body; it is to be found nowhere else.
pub(super) const SECRET: &str = "what nobody else may read";

/// The content of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answer {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<Option<TokenLogprob>>,
    pub finish: Option<Finish>,
    pub usage: Usage,
    pub trouble: Option<String>,
}

/// A small model that is quick to run.
pub(super) fn small_model(pool: PoolSpec) -> EngineChoice {
    let spec = SeededSpec { layers: 2, dim: 32, heads: 4, kv_heads: 2, ffn_dim: 64, ..SeededSpec::default() };
    EngineChoice::Seeded { spec, pool }
}

/// Conductor, control plane and nodes.
pub(super) struct Cluster {
    pub door: Door,
    pub inbox: Inbox,
    prompts: Prompts,
    pub config: Config,
    pub metrics: Metrics,
    /// Of every request.
    pub body: bytes::Bytes,
    exporting: Option<ExportTask>,
    control: SocketAddr,
    stop: CancellationToken,
    nodes: BTreeMap<String, (CancellationToken, tokio::task::JoinHandle<Result<(), NodeError>>)>,
}

impl Cluster {
    /// Starts all of it and waits until it is ready.
    pub(super) async fn start(layout: &str, engine: &EngineChoice, tune: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::default();
        config.scheduler.block_tokens = 16;
        config.service.chain_seed = Secret::new(77);
        tune(&mut config);
        let (spans, exporting) = Spans::start(&config.service, "cluster").unwrap();
        let metrics = Metrics::new().unwrap();
        let with = DriverConfig { config: config.clone(), metrics: metrics.clone(), spans };
        let (driver, inbox, door) = Driver::new(with).unwrap();
        tokio::spawn(driver.run());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let lead = crate::conductor::Lead::alone();
        tokio::spawn(crate::up::control::serve(
            listener,
            (ControlService::new(inbox.clone(), lead), None),
            (64, metrics.clone()),
            stop.clone(),
        ));
        let (body, nodes) = (SECRET.into(), BTreeMap::new());
        let prompts = Prompts::default();
        let mut cluster =
            Self { door, inbox, prompts, config, metrics, body, exporting, control, stop, nodes };
        let nodes = layout.parse::<Layout>().map(|layout| layout.nodes()).unwrap_or_default();
        for (name, role) in nodes {
            cluster.add(&name, role, engine);
        }
        if !layout.is_empty() {
            cluster.ready().await;
        }
        cluster
    }

    /// Starts a node over a server.
    pub(super) fn add_remote(&mut self, name: &str, role: Role, engine: baton_remote::RemoteSettings) {
        self.add_announced(name, role, engine, None);
    }

    /// Starts a node over a server that announces its cache content.
    pub(super) fn add_announced(
        &mut self,
        name: &str,
        role: Role,
        engine: baton_remote::RemoteSettings,
        events: Option<crate::node::EventSource>,
    ) {
        let node = self.remote(name, role, engine, events);
        let stop = CancellationToken::new();
        // Every other one hands over what the others send.
        let place = match name.ends_with('1') {
            true => Place::Within(self.inbox.clone(), crate::conductor::Lead::alone(), self.prompts.clone()),
            false => Place::Elsewhere(None),
        };
        let task = tokio::spawn(crate::node::run_remote(node, place, stop.clone()));
        self.nodes.insert(name.into(), (stop, task));
    }

    /// A node over a server.
    pub(super) fn remote(
        &self,
        name: &str,
        role: Role,
        engine: baton_remote::RemoteSettings,
        events: Option<crate::node::EventSource>,
    ) -> RemoteNode {
        RemoteNode {
            name: name.into(),
            role,
            may_change_role: false,
            control: format!("http://{}", self.control),
            engine,
            block_tokens: 16,
            capacity_tokens: None,
            whole_prompts: false,
            pass_tokens: Some(4096),
            max_running: None,
            net_bytes_per_s: 1_000_000_000,
            max_model_tokens: None,
            vocab_tokens: baton_remote::testing::VOCAB_TOKENS,
            end_tokens: vec![baton_remote::testing::END_TOKEN],
            sample: None,
            events,
            revision: None,
            profile: baton_engine::TimedSpec::zero_work().profile,
            guard: crate::guard::ClusterGuard::default(),
        }
    }

    /// Starts a node.
    pub(super) fn add(&mut self, name: &str, role: Role, engine: &EngineChoice) {
        let (config, stop) = (self.node(name, role, engine), CancellationToken::new());
        let task = tokio::spawn(crate::node::run(config, stop.clone()));
        self.nodes.insert(name.into(), (stop, task));
    }

    /// Starts a node on a runtime that ends with it, as that of a process does: what is still to be sent then is not
    /// sent.
    pub(super) fn add_process(&mut self, name: &str, role: Role, engine: &EngineChoice) {
        let (config, stop) = (self.node(name, role, engine), CancellationToken::new());
        let (stopped, (ended, end)) = (stop.clone(), tokio::sync::oneshot::channel());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let outcome = runtime.block_on(crate::node::run(config, stopped));
            drop(runtime);
            let _ = ended.send(outcome);
        });
        let task = tokio::spawn(async { end.await.expect("the node does not panic") });
        self.nodes.insert(name.into(), (stop, task));
    }

    fn node(&self, name: &str, role: Role, engine: &EngineChoice) -> NodeConfig {
        NodeConfig {
            name: name.into(),
            role,
            may_change_role: false,
            control: format!("http://{}", self.control),
            kv_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            rdma: RdmaDevices::default(),
            host: crate::up::host_name(),
            engine: engine.clone(),
            tokenizer: String::new(),
            dram_blocks: 64,
            ssd_blocks: 64,
            ssd_dir: None,
            store: self.config.store.clone(),
            guard: crate::guard::ClusterGuard::default(),
            publish: None,
        }
    }

    /// Stops a node, whatever it has to do.
    pub(super) async fn kill(&mut self, name: &str) {
        let (stop, task) = self.nodes.remove(name).unwrap();
        stop.cancel();
        task.await.unwrap().unwrap();
    }

    pub(super) async fn ready(&self) {
        for _ in 0..600 {
            if self.door.readiness().ready {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("not ready after 30 s: {:?}", self.door.readiness());
    }

    pub(super) async fn status(&self) -> Status {
        *self.inbox.ask(Question::Status).await.unwrap()
    }

    /// Waits until nothing is under way and nothing is held anywhere.
    pub(super) async fn quiet(&self) {
        let mut last = Status::default();
        for _ in 0..200 {
            last = self.status().await;
            let held = last.nodes.iter().any(|n| n.holds > 0 || n.running > 0 || n.reserved_tokens > 0);
            if last.live_requests == 0 && !held {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("something is still held 10 s after the last answer: {last:#?}");
    }

    pub(super) fn submit(&self, tokens: &[u32], sampling: Sampling) -> SubmissionStream {
        self.submit_as("test", tokens, sampling, None)
    }

    /// Submits a request whose client names the length of its answer.
    pub(super) fn ask(&self, tokens: &[u32], sampling: Sampling) -> SubmissionStream {
        let asked_tokens = Some(sampling.max_tokens);
        self.door.submit(Submission { asked_tokens, ..self.submission("test", tokens, sampling) })
    }

    /// Submits a request with a name and a caller's trace.
    pub(super) fn submit_as(
        &self,
        request_id: &str,
        tokens: &[u32],
        sampling: Sampling,
        trace: Option<TraceParent>,
    ) -> SubmissionStream {
        self.door.submit(Submission { trace, ..self.submission(request_id, tokens, sampling) })
    }

    fn submission(&self, request_id: &str, tokens: &[u32], sampling: Sampling) -> Submission {
        let root = ChainHasher::new(*self.config.service.chain_seed.expose(), b"test");
        let mut hasher = root.clone();
        let size = self.config.scheduler.block_tokens as usize;
        let chain: Vec<BlockKey> = tokens.chunks_exact(size).map(|block| hasher.push_tokens(block)).collect();
        Submission {
            request_id: request_id.into(),
            tokens: tokens.into(),
            root: root.parent(),
            chain: chain.into(),
            sampling: Arc::new(sampling),
            class: None,
            class_param: None,
            objectives: baton_types::RequestObjectives::default(),
            tenant: Some("acme".into()),
            session: None,
            body: self.body.clone(),
            asked_tokens: None,
            explain: false,
            timeout_us: None,
            trace: None,
        }
    }

    pub(super) async fn stop(self) {
        self.stop.cancel();
        for (_, (stop, task)) in self.nodes {
            stop.cancel();
            task.await.unwrap().unwrap();
        }
        if let Some(exporting) = self.exporting {
            exporting.stop().await;
        }
    }
}

/// Reads a ticket to its end.
pub(super) async fn listen(mut ticket: SubmissionStream) -> Answer {
    let mut answer = Answer::default();
    let read = async {
        while let Some(event) = ticket.events.recv().await {
            match event {
                Event::Admitted { .. } | Event::PromptLogprobs(_) => {}
                Event::Token { token, logprob } => {
                    answer.tokens.push(token);
                    answer.logprobs.push(logprob);
                }
                Event::Finished { finish, usage } => {
                    (answer.finish, answer.usage) = (Some(finish), usage);
                    return;
                }
                Event::Refused(refusal) => return answer.trouble = Some(format!("{refusal:?}")),
                Event::Failed(fault) => return answer.trouble = Some(format!("{fault:?}")),
            }
        }
        answer.trouble = Some("the events ended without a last one".into());
    };
    if tokio::time::timeout(Duration::from_secs(120), read).await.is_err() {
        answer.trouble = Some("hung".into());
    }
    answer
}

struct NullSink;

impl KvSink for NullSink {
    fn layer_computed(&mut self, _: SequenceId, _: u32, _: std::ops::Range<u32>, _: (&[u32], &KvPool)) {}
}

/// The answer of one engine alone.
pub(super) fn alone(engine: &mut dyn Engine, tokens: &[u32], sampling: &Sampling) -> Answer {
    let blocks = (tokens.len() as u32 + sampling.max_tokens).div_ceil(engine.shape().block_tokens);
    let sequence = Sequence {
        id: SequenceId(1),
        tokens: tokens.to_vec(),
        prompt_tokens: tokens.len() as u32,
        computed_tokens: 0,
        blocks: (0..blocks).collect(),
        sampling: Arc::new(sampling.clone()),
        leaves: false,
        order: 0,
    };
    engine.start(sequence).unwrap();
    let (mut events, mut answer) = (Vec::new(), Answer::default());
    while engine.step(&mut events, &mut NullSink) {
        for event in events.drain(..) {
            if let EngineEvent::Token { token, logprob, finish, .. } = event {
                answer.tokens.push(token);
                answer.logprobs.push(logprob);
                answer.finish = finish;
            }
        }
    }
    answer
}
