//! A stand-in for vLLM: `/v1/completions`, its pages, and both of its connectors.

mod legs;
mod responses;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_types::{Finish, Sampling};
use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use self::responses::Answer;
use super::FakeRole;
use super::body::{CompletionRequest, ReadRequest, bad_request, completion, server_error};
use super::compute::{Cost, Prompts};
use super::fabric::Fabric;
use super::fault::{Fault, FaultOutcome};
use super::pool::{HeldBlocks, Pool};
use super::request_log::ReceivedRequest;
use super::server::{Life, Reply, Site, WholeRequest, pass, serve};
use super::stand::Stand;
use super::text::FakeTokenizer;
use super::toy::{answer_in, toy_answer};
use crate::{Dialect, HandoffWay, RemoteSettings};

/// How a stand-in hands KV over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeConnector {
    /// Not at all.
    None,
    /// As NixlConnector does.
    Nixl,
    /// As MooncakeConnector does.
    Mooncake,
}

/// The properties of a stand-in for vLLM.
#[derive(Clone, Debug)]
pub struct VllmSpec {
    /// Which leg it is for.
    pub role: FakeRole,
    /// How it hands KV over.
    pub connector: FakeConnector,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks in its pool.
    pub blocks: u32,
    /// How long prefilled blocks are lent.
    pub lease: Duration,
    /// How long a Mooncake decode waits for its prefill.
    pub wait: Duration,
    /// Longest prompt and answer together.
    pub max_model_tokens: u32,
    /// Time of a prefill.
    pub prefill_time: Duration,
    /// Time of a token.
    pub token_time: Duration,
    /// The cost of prompts, and the size of the cache for them.
    pub cost: Cost,
    /// Where it listens; 0 takes a free port.
    pub port: u16,
    /// It answers with letters, or with words of its trained tokenizer, and never draws an end token.
    pub letters: bool,
    /// It remembers what it was sent; without, it costs less.
    pub remembers: bool,
    /// Its tokens of texts.
    pub tokenizer: FakeTokenizer,
    /// Its engine dies of a prompt that begins with this token, and the server lives on.
    pub poison: Option<u32>,
}

impl VllmSpec {
    /// Blocks of 32 tokens, 341 of them, as in the recordings; leases of 30 s and waits of 500 ms; fast.
    #[must_use]
    pub const fn new(role: FakeRole, connector: FakeConnector) -> Self {
        Self {
            role,
            connector,
            block_tokens: 32,
            blocks: 341,
            lease: Duration::from_secs(30),
            wait: Duration::from_millis(500),
            max_model_tokens: 4_096,
            prefill_time: Duration::ZERO,
            token_time: Duration::ZERO,
            cost: Cost::NONE,
            port: 0,
            letters: false,
            remembers: true,
            tokenizer: FakeTokenizer::BYTES,
            poison: None,
        }
    }
}

/// A salt and a prompt: what an engine finds again in its cache.
type CachedPrompt = (String, Vec<u32>);

/// A stand-in for vLLM on a port of its own. It goes when it is dropped.
pub struct FakeVllm {
    site: Arc<Vllm>,
    address: SocketAddr,
}

struct Vllm {
    spec: VllmSpec,
    fabric: Fabric,
    engine_id: String,
    pool: Arc<Pool>,
    prompts: Prompts,
    stand: Stand,
    count: AtomicU64,
    running: Arc<AtomicU64>,
    /// Prompts, by salt, whose cached KV is another prompt's.
    poisoned: Mutex<BTreeMap<CachedPrompt, Vec<u32>>>,
}

impl FakeVllm {
    /// Starts one on loopback.
    ///
    /// # Errors
    /// When there is no port to listen on.
    pub async fn start(spec: VllmSpec, fabric: &Fabric) -> io::Result<Self> {
        let pool = Arc::new(Pool::new(spec.blocks, spec.block_tokens));
        let engine_id = format!("engine-{:016x}", rand::random::<u64>());
        fabric.change(|state| match spec.connector {
            FakeConnector::None => {}
            FakeConnector::Nixl => drop(state.pools.insert(engine_id.clone(), Arc::clone(&pool))),
            FakeConnector::Mooncake => drop(state.engines.insert(engine_id.clone())),
        });
        let life = Life::new();
        let site = Arc::new(Vllm {
            prompts: Prompts::new(spec.cost, spec.token_time, spec.block_tokens),
            spec,
            fabric: fabric.clone(),
            engine_id,
            pool,
            stand: Stand::new(life.clone()),
            count: AtomicU64::new(0),
            running: Arc::default(),
            poisoned: Mutex::default(),
        });
        let port = site.spec.port;
        let address = serve(Arc::clone(&site), life, port).await?;
        Ok(Self { site, address })
    }

    /// Where it is.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Settings that suit it. Its bootstrap server, if it is a Mooncake prefill, has its own URL.
    #[must_use]
    pub fn settings(&self) -> RemoteSettings {
        let way = match self.site.spec.connector {
            FakeConnector::None => HandoffWay::None,
            FakeConnector::Nixl => HandoffWay::Nixl,
            FakeConnector::Mooncake => HandoffWay::Mooncake { bootstrap_url: self.url() },
        };
        RemoteSettings::new(Dialect::Vllm, self.url()).with_handoff(way)
    }

    /// KV blocks that it holds, lent ones included.
    #[must_use]
    pub fn held_blocks(&self) -> usize {
        self.site.pool.held()
    }

    /// Requests that it works on.
    #[must_use]
    pub fn running(&self) -> u64 {
        self.site.running.load(Ordering::SeqCst)
    }

    /// Leases that ran out.
    #[must_use]
    pub fn expired_leases(&self) -> u64 {
        self.site.pool.expired()
    }

    /// The server and all its connections are gone.
    pub fn kill(&self) {
        self.site.exit();
    }
}

impl Deref for FakeVllm {
    type Target = Stand;

    fn deref(&self) -> &Stand {
        &self.site.stand
    }
}

impl Drop for FakeVllm {
    fn drop(&mut self) {
        self.site.exit();
    }
}

/// A request that is worked on, until it is dropped.
struct RunningGuard(Arc<AtomicU64>);

impl RunningGuard {
    fn new(count: &Arc<AtomicU64>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Site for Vllm {
    async fn answer(self: Arc<Self>, asked: WholeRequest) -> Reply {
        match asked.path.as_str() {
            "/health" => self.stand.faults.health(),
            "/version" => Reply::json(200, &json!({"version": "0.32.0"})),
            "/v1/models" => Reply::json(
                200,
                &json!({"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm", "root": "lab/tiny",
                    "max_model_len": self.spec.max_model_tokens}]}),
            ),
            "/metrics" => Reply::Page(200, "text/plain; version=0.0.4", self.metrics().into()),
            "/query" if self.spec.connector == FakeConnector::Mooncake => Reply::json(
                200,
                &json!({"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}),
            ),
            "/v1/completions" | "/v1/chat/completions" => self.complete(asked).await,
            "/v1/completions/render" | "/v1/chat/completions/render" => self.render(&asked),
            "/tokenize" if !self.spec.tokenizer.unasked => {
                let body = serde_json::from_slice(&asked.body).unwrap_or_default();
                let told = self.spec.tokenizer.tokenize(&body, self.spec.max_model_tokens);
                told.map_or_else(|wrong| bad_request(&wrong), |told| Reply::json(200, &told))
            }
            _ => Reply::json(404, &json!({"detail": "Not Found"})),
        }
    }
}

impl Vllm {
    fn exit(&self) {
        self.stand.life.exit();
        self.fabric.change(|state| {
            state.pools.remove(&self.engine_id);
            state.engines.remove(&self.engine_id);
        });
    }

    fn metrics(&self) -> String {
        let labels = "{engine=\"0\",model_name=\"tiny\"}";
        let (asked, cached) = self.prompts.counts();
        let nixl = if self.spec.connector == FakeConnector::Nixl {
            format!("vllm:nixl_num_kv_expired_reqs_total{labels} {}\n", self.pool.expired())
        } else {
            String::new()
        };
        format!(
            "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {}.0\n\
             vllm:num_requests_waiting{labels} 0.0\nvllm:kv_cache_usage_perc{labels} {}\n{nixl}\
             vllm:prefix_cache_queries_total{labels} {asked}.0\nvllm:prefix_cache_hits_total{labels} {cached}.0\n\
             vllm:cache_config_info{{block_size=\"{}\",enable_prefix_caching=\"{}\",num_gpu_blocks=\"{}\"}} 1.0\n",
            self.running.load(Ordering::SeqCst),
            self.pool.share(),
            self.spec.block_tokens,
            if self.spec.cost.cache_blocks > 0 { "True" } else { "False" },
            self.spec.cost.announced_blocks(self.spec.blocks)
        )
    }

    /// The tokens that a request would be served with, as routers ask for them.
    fn render(&self, asked: &WholeRequest) -> Reply {
        let chat = asked.path.starts_with("/v1/chat");
        let read = ReadRequest::new(&asked.body).ok_or_else(|| "the body is no JSON object".to_owned());
        match read.and_then(|mut read| read.prompt(chat, self.spec.tokenizer)) {
            Ok((_, tokens)) => {
                let one = json!({"request_id": "render", "token_ids": tokens, "sampling_params": {}, "model": "tiny"});
                Reply::json(200, &if chat { one } else { json!([one]) })
            }
            Err(wrong) => bad_request(&wrong),
        }
    }

    async fn complete(self: Arc<Self>, asked: WholeRequest) -> Reply {
        let header =
            |name: &str| asked.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let chat = asked.path == "/v1/chat/completions";
        if self.spec.remembers {
            self.stand.log.receive(ReceivedRequest {
                path: asked.path.clone(),
                request_id: header("x-request-id"),
                dp_rank: header("x-data-parallel-rank"),
                authorization: header("authorization"),
                body: serde_json::from_slice(&asked.body).unwrap_or_default(),
            });
        }
        let running = RunningGuard::new(&self.running);
        let fault = match self.stand.faults.meet(|| self.exit()).await {
            FaultOutcome::Ended(reply) => return reply,
            FaultOutcome::GoOn(fault) => fault,
        };
        let Some(read) = ReadRequest::new(&asked.body) else {
            return bad_request("the body is no JSON object");
        };
        let smuggled = !read.fields["vllm_xargs"]["kv_transfer_params"].is_null();
        let request = match completion(read, chat, (self.spec.tokenizer, self.spec.max_model_tokens)) {
            Ok(request) => request,
            Err(wrong) => return bad_request(&wrong),
        };
        if self.spec.poison.is_some_and(|poison| request.prompt.first() == Some(&poison)) {
            return self.stand.faults.engine_dies();
        }
        let id = header("x-request-id").unwrap_or_default();
        let id = format!("cmpl-{id}-{}", self.count.fetch_add(1, Ordering::SeqCst));
        if smuggled && request.params.is_none() {
            self.stand.log.violate("kv_transfer_params of a client, within vllm_xargs");
            return server_error();
        }
        match request.params.clone() {
            None => self.whole(request, (id, fault, running)).await,
            Some(params) => self.leg(request, params, (id, fault, running)).await,
        }
    }

    async fn whole(
        self: Arc<Self>,
        request: CompletionRequest,
        (id, fault, running): (String, Option<Fault>, RunningGuard),
    ) -> Reply {
        let Some(blocks) = self.pool.fill(&request.prompt) else { return server_error() };
        let held = HeldBlocks { pool: Arc::clone(&self.pool), blocks };
        pass(self.spec.prefill_time).await;
        let cached = self.prompts.compute(&request.salt, &request.prompt).await;
        // The cached tokens replace those of the prompt, as in a real engine.
        let believed = self.cached(&request);
        let (answer, finish) = self.draw(believed.as_ref().unwrap_or(&request.prompt), &request.sampling);
        self.respond(
            Answer { request, id, answer, finish, cached, computed: true, params: Value::Null, fault },
            (held, running),
        )
    }

    fn draw(&self, context: &[u32], sampling: &Sampling) -> (Vec<u32>, Finish) {
        if !self.spec.letters {
            return toy_answer(context, sampling);
        }
        let endless = Sampling { ignore_eos: true, ..sampling.clone() };
        answer_in(context, &endless, |token| self.spec.tokenizer.answer_token(token))
    }

    /// The wrong KV that the cache holds for a prompt.
    fn cached(&self, request: &CompletionRequest) -> Option<Vec<u32>> {
        self.poisoned.lock().get(&(request.salt.clone(), request.prompt.clone())).cloned()
    }

    fn respond(self: Arc<Self>, mut told: Answer, rest: (HeldBlocks, RunningGuard)) -> Reply {
        if told.fault == Some(Fault::OtherPrompt) {
            told.request.prompt.push(1);
        }
        if !told.request.stream {
            let page = match told.fault {
                Some(Fault::Garbage) => Bytes::from_static(b"<html>not here</html>"),
                _ => told.whole().into(),
            };
            return Reply::Page(200, "application/json", page);
        }
        // One event is on its way at a time, so that a client that leaves is noticed.
        let (events, reply) = mpsc::channel(1);
        tokio::spawn(async move {
            let life = self.stand.life.clone();
            tokio::select! {
                () = told.stream(&events, self.prompts.pace(told.computed)) => {}
                () = events.closed() => {}
                () = life.ended() => {}
            }
            drop(rest);
        });
        Reply::Stream(reply)
    }
}
