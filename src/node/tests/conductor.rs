//! The scripted conductor: it takes a node in and says whatever a test wants.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use baton_engine::{PoolSpec, SeededSpec};
use baton_transports::RdmaDevices;
use baton_types::{BlockKey, ChainHasher, Role, Sampling};
use baton_wire::v1;
use baton_wire::v1::control_server::{Control, ControlServer};
use baton_wire::v1::fact::Fact;
use baton_wire::v1::order::Order;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::config::Config;
use crate::node::{EngineChoice, NodeConfig, NodeError};

/// Tokens in a block of every test.
pub(super) const BLOCK: u32 = 16;
/// Blocks of the node's pool.
pub(super) const BLOCKS: u32 = 32;
/// Tokens in the vocabulary.
pub(super) const VOCABULARY: u32 = 512;
const SEED: u64 = 5;
const TIME_LIMIT: Duration = Duration::from_secs(20);

type OrderSender = mpsc::Sender<Result<v1::ToNode, Status>>;

/// A node's line, from its first message on.
pub(super) struct Line {
    pub hello: v1::Hello,
    facts: Streaming<v1::FromNode>,
    orders: OrderSender,
    received: VecDeque<v1::Fact>,
    /// The latest report.
    pub load: v1::NodeLoad,
    /// The leadership under which it gives orders.
    pub leader: u64,
    /// The step target that its orders carry.
    pub step_target_us: Option<u64>,
}

struct Door(mpsc::Sender<Line>);

#[tonic::async_trait]
impl Control for Door {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<v1::ToNode, Status>> + Send>>;

    async fn attach(
        &self,
        request: Request<Streaming<v1::FromNode>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut facts = request.into_inner();
        let Some(v1::from_node::Message::Hello(hello)) = facts.message().await?.and_then(|m| m.message)
        else {
            return Err(Status::invalid_argument("Hello comes first"));
        };
        let (orders, receiver) = mpsc::channel(256);
        let load = v1::NodeLoad { holds: u32::MAX, ..Default::default() };
        let line =
            Line { hello, facts, orders, received: VecDeque::new(), load, leader: 0, step_target_us: None };
        self.0.send(line).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver).map(|message| message))))
    }
}

/// A conductor's side, and the node that attaches to it.
pub(super) struct Stage {
    lines: mpsc::Receiver<Line>,
    pub stop: CancellationToken,
    pub node: tokio::task::JoinHandle<Result<(), NodeError>>,
    epoch: u32,
}

impl Stage {
    pub(super) async fn start() -> Self {
        let spec =
            SeededSpec { layers: 2, dim: 32, heads: 4, kv_heads: 2, ffn_dim: 64, ..SeededSpec::default() };
        let pool =
            PoolSpec { block_tokens: BLOCK, blocks: BLOCKS, pass_tokens: 48, max_running: 16, threads: None };
        Self::start_with(EngineChoice::Seeded { spec, pool }).await
    }

    /// The same with a node of another engine.
    pub(super) async fn start_with(engine: EngineChoice) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = format!("http://{}", listener.local_addr().unwrap());
        let (door, lines) = mpsc::channel(4);
        let server = tonic::transport::Server::builder().add_service(ControlServer::new(Door(door)));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let config = NodeConfig {
            name: "n0".into(),
            role: Role::Both,
            may_change_role: false,
            control,
            kv_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            rdma: RdmaDevices::default(),
            host: "here".into(),
            engine,
            tokenizer: String::new(),
            dram_blocks: 32,
            ssd_blocks: 0,
            ssd_dir: None,
            store: Config::default().store,
            guard: crate::guard::ClusterGuard::default(),
            publish: None,
        };
        let stop = CancellationToken::new();
        let node = tokio::spawn(crate::node::run(config, stop.clone()));
        Self { lines, stop, node, epoch: 0 }
    }

    /// The node's next line, before it is welcome.
    pub(super) async fn line(&mut self) -> Line {
        tokio::time::timeout(TIME_LIMIT, self.lines.recv()).await.expect("the node attaches").unwrap()
    }

    /// The node's next line, in a new epoch.
    pub(super) async fn attach(&mut self) -> Line {
        self.attach_led(0).await
    }

    /// Attaches the node to a conductor that leads as `leader`.
    pub(super) async fn attach_led(&mut self, leader: u64) -> Line {
        let line = Line { leader, ..self.line().await };
        self.epoch += 1;
        let (epoch, chain_seed) = (self.epoch, SEED);
        let welcome = v1::Welcome {
            instance: 0,
            epoch,
            heartbeat_us: 10_000,
            chain_seed,
            leader,
            ..Default::default()
        };
        line.send(v1::to_node::Message::Welcome(welcome)).await;
        line
    }

    /// Stops the node, and checks that its thread has not panicked.
    pub(super) async fn end(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(TIME_LIMIT, self.node).await.expect("it stops");
        ended.unwrap().unwrap();
    }
}

impl Line {
    pub(super) async fn send(&self, message: v1::to_node::Message) {
        self.orders.send(Ok(v1::ToNode { message: Some(message) })).await.unwrap();
    }

    /// Ends the stream as a conductor does that will not have the node.
    pub(super) async fn refuse(self, status: Status) {
        self.orders.send(Err(status)).await.unwrap();
    }

    pub(super) async fn order(&self, request: u64, attempt: u32, order: Order) {
        let order = v1::Order { request, attempt, order: Some(order) };
        let (orders, leader, step_target_us) = (vec![order], self.leader, self.step_target_us);
        self.send(v1::to_node::Message::Orders(v1::Orders { orders, leader, step_target_us })).await;
    }

    pub(super) async fn release(&self, request: u64) {
        self.order(request, 0, Order::Release(v1::Release {})).await;
    }

    /// The next thing that the node says; load reports are noted.
    pub(super) async fn receive(&mut self) {
        let next = tokio::time::timeout(TIME_LIMIT, self.facts.message()).await;
        match next.expect("the node says something").unwrap().expect("the line is up").message {
            Some(v1::from_node::Message::Facts(facts)) => self.received.extend(facts.facts),
            Some(v1::from_node::Message::Heartbeat(beat)) => self.load = beat.load.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// Whether the node has said anything about a request.
    pub(super) fn was_reported(&self, request: u64) -> bool {
        self.received.iter().any(|fact| fact.request == request)
    }

    /// The next fact about a request.
    pub(super) async fn fact(&mut self, request: u64) -> (u32, Fact) {
        let until = tokio::time::Instant::now() + TIME_LIMIT;
        loop {
            if let Some(at) = self.received.iter().position(|fact| fact.request == request) {
                let fact = self.received.remove(at).unwrap();
                return (fact.attempt, fact.fact.unwrap());
            }
            assert!(tokio::time::Instant::now() < until, "no word of request {request}: {:?}", self.received);
            self.receive().await;
        }
    }

    /// The failure that a request comes to next.
    pub(super) async fn failure(&mut self, request: u64) -> v1::Failure {
        match self.fact(request).await {
            (_, Fact::Failure(failure)) => failure,
            other => panic!("request {request}: {other:?}"),
        }
    }

    /// Waits until the node reports that it holds nothing.
    pub(super) async fn idle(&mut self) {
        let until = tokio::time::Instant::now() + TIME_LIMIT;
        // Load reports from before the last order do not count, so it waits for the time of two reports first.
        let fresh = tokio::time::Instant::now() + Duration::from_millis(250);
        while tokio::time::Instant::now() < fresh || self.load.holds > 0 || self.load.running > 0 {
            assert!(tokio::time::Instant::now() < until, "it still holds something: {:?}", self.load);
            self.receive().await;
        }
        let reserved: u64 = self.load.tiers.iter().map(|tier| tier.reserved_blocks).sum();
        assert_eq!((self.load.waiting, reserved), (0, 0));
    }

    /// Names of the blocks that the node says it stores, as far as it has said.
    pub(super) fn stored(&self) -> Vec<u64> {
        let changes = self.received.iter().filter_map(|fact| match &fact.fact {
            Some(Fact::Cache(change)) if change.kind() == v1::cache_change::Kind::Stored => {
                Some(change.hashes.clone())
            }
            _ => None,
        });
        changes.flatten().collect()
    }

    /// Prefills and decodes a request alone; its answer.
    pub(super) async fn serve(&mut self, request: u64, work: v1::Work) -> Vec<u32> {
        self.order(request, 1, prefill(work)).await;
        let mut tokens = Vec::new();
        loop {
            match self.fact(request).await {
                (1, Fact::Token(token)) => {
                    assert_eq!(token.index as usize, tokens.len());
                    tokens.push(token.token);
                    if token.finish != 0 && tokens.len() > 1 {
                        return tokens;
                    }
                }
                (1, Fact::Prefilled(_)) => {
                    self.order(request, 1, Order::StartDecode(v1::StartDecode { answer: tokens.clone() }))
                        .await;
                }
                (1, Fact::Fetch(_)) => {}
                other => panic!("request {request}: {other:?}"),
            }
        }
    }
}

/// A prefill whose decode stays here.
pub(super) fn prefill(work: v1::Work) -> Order {
    Order::Prefill(v1::Prefill { work: Some(work), room_tokens: 16, ..Default::default() })
}

pub(super) fn expect(work: v1::Work) -> Order {
    Order::Expect(v1::Expect { work: Some(work), room_tokens: 16 })
}

/// A prompt of `tokens` tokens that begin alike, with an answer of 4.
pub(super) fn work(tokens: u32) -> v1::Work {
    let tokens: Vec<u32> = (0..tokens).map(|at| 1 + at * 7 % 200).collect();
    let root = ChainHasher::new(SEED, b"test");
    let mut hasher = root.clone();
    let chain: Vec<BlockKey> =
        tokens.chunks_exact(BLOCK as usize).map(|block| hasher.push_tokens(block)).collect();
    let sampling = Sampling { temperature: 0.0, max_tokens: 4, ignore_eos: true, ..Sampling::default() };
    let count = u32::try_from(tokens.len()).unwrap();
    let tokens = baton_wire::pack_tokens(&tokens.into());
    v1::Work {
        prompt_tokens: count,
        token_count: count,
        tokens,
        chain: baton_wire::pack_keys(&chain),
        sampling: Some((&sampling).into()),
        body: Default::default(),
        request_id: "test".into(),
        root: baton_wire::pack_keys(&[root.parent()]),
    }
}

/// The given work with its tokens changed.
pub(super) fn with_tokens(mut work: v1::Work, change: impl FnOnce(&mut Vec<u32>)) -> v1::Work {
    let mut tokens = baton_wire::unpack_tokens(&work.tokens).unwrap();
    change(&mut tokens);
    work.token_count = u32::try_from(tokens.len()).unwrap();
    work.tokens = baton_wire::pack_tokens(&tokens.into());
    work
}

/// A peer that nobody answers for.
pub(super) fn nobody() -> v1::Peer {
    v1::Peer { instance: 9, epoch: 1, kv_address: "127.0.0.1:1".into(), host: "elsewhere".into() }
}
