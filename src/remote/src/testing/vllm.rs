//! A stand-in for vLLM: `/v1/completions`, its pages, and both of its connectors.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_types::Finish;
use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::FakeRole;
use super::body::{Asks, bad_request, completion, server_error};
use super::book::{Book, Received};
use super::fabric::{Fabric, Transfer};
use super::fault::{Fault, Faults};
use super::nixl::{Failed, Reading};
use super::pool::{Held, Pool};
use super::server::{Asked, Life, Reply, Site, event, never, serve};
use super::toy::{VOCAB_TOKENS, toy_answer, toy_logprob};
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

/// What a stand-in for vLLM is like.
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
        }
    }
}

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
    book: Book,
    faults: Faults,
    life: Life,
    count: AtomicU64,
    running: Arc<AtomicU64>,
    /// Prompts whose cached KV is another prompt's.
    poisoned: Mutex<BTreeMap<Vec<u32>, Vec<u32>>>,
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
            spec,
            fabric: fabric.clone(),
            engine_id,
            pool,
            book: Book::default(),
            faults: Faults::default(),
            life: life.clone(),
            count: AtomicU64::new(0),
            running: Arc::default(),
            poisoned: Mutex::default(),
        });
        let address = serve(Arc::clone(&site), life).await?;
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

    /// What it was sent and should not have been.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.site.book.violations()
    }

    /// The requests that it was sent, in order.
    #[must_use]
    pub fn received(&self) -> Vec<Received> {
        self.site.book.received()
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

    /// The next `times` requests meet this fault, after those that were ordered before.
    pub fn fault(&self, fault: Fault, times: usize) {
        self.site.faults.push(fault, times);
    }

    /// No more faults.
    pub fn heal(&self) {
        self.site.faults.clear();
    }

    /// The server and all its connections are gone.
    pub fn kill(&self) {
        self.site.exit();
    }

    /// Whether it is gone.
    #[must_use]
    pub fn exited(&self) -> bool {
        self.site.life.exited()
    }
}

impl Drop for FakeVllm {
    fn drop(&mut self) {
        self.site.exit();
    }
}

/// A request that is worked on, until it is dropped.
struct Running(Arc<AtomicU64>);

impl Running {
    fn new(count: &Arc<AtomicU64>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An answer to be told.
struct Told {
    asks: Asks,
    id: String,
    answer: Vec<u32>,
    finish: Finish,
    params: Value,
    fault: Option<Fault>,
}

impl Site for Vllm {
    async fn answer(self: Arc<Self>, asked: Asked) -> Reply {
        match asked.path.as_str() {
            "/health" => Reply::Page(200, "text/plain", Bytes::new()),
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
            "/v1/completions" => self.complete(asked).await,
            _ => Reply::json(404, &json!({"detail": "Not Found"})),
        }
    }
}

impl Vllm {
    fn exit(&self) {
        self.life.exit();
        self.fabric.change(|state| {
            state.pools.remove(&self.engine_id);
            state.engines.remove(&self.engine_id);
        });
    }

    fn metrics(&self) -> String {
        let labels = "{engine=\"0\",model_name=\"tiny\"}";
        let nixl = if self.spec.connector == FakeConnector::Nixl {
            format!("vllm:nixl_num_kv_expired_reqs_total{labels} {}\n", self.pool.expired())
        } else {
            String::new()
        };
        format!(
            "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {}.0\n\
             vllm:num_requests_waiting{labels} 0.0\nvllm:kv_cache_usage_perc{labels} {}\n{nixl}\
             vllm:prefix_cache_queries_total{labels} 0.0\nvllm:prefix_cache_hits_total{labels} 0.0\n\
             vllm:cache_config_info{{block_size=\"{}\",num_gpu_blocks=\"{}\"}} 1.0\n",
            self.running.load(Ordering::SeqCst),
            self.pool.share(),
            self.spec.block_tokens,
            self.spec.blocks
        )
    }

    async fn complete(self: Arc<Self>, asked: Asked) -> Reply {
        let header =
            |name: &str| asked.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let read = serde_json::from_slice::<Value>(&asked.body);
        let body = read.as_ref().cloned().unwrap_or_default();
        self.book.receive(Received {
            path: asked.path,
            request_id: header("x-request-id"),
            authorization: header("authorization"),
            body: body.clone(),
        });
        let running = Running::new(&self.running);
        let fault = match self.faults.take() {
            Some(Fault::Delay(time)) => {
                tokio::time::sleep(time).await;
                None
            }
            Some(Fault::Status(status)) => {
                return Reply::json(status, &json!({"error": {"message": "as ordered", "code": status}}));
            }
            Some(Fault::NeverAnswer) => return never().await,
            Some(Fault::Hangup) => return Reply::Hangup,
            Some(Fault::Exit) => {
                self.exit();
                return Reply::Hangup;
            }
            other => other,
        };
        let asks = match completion(&body, self.spec.max_model_tokens) {
            Ok(asks) if read.is_ok() => asks,
            Ok(_) => return bad_request("the body is no JSON"),
            Err(wrong) => return bad_request(&wrong),
        };
        let id = header("x-request-id").unwrap_or_default();
        let id = format!("cmpl-{id}-{}", self.count.fetch_add(1, Ordering::SeqCst));
        match asks.params.clone() {
            None => self.whole(asks, (id, fault, running)).await,
            Some(params) => self.leg(asks, params, (id, fault, running)).await,
        }
    }

    async fn whole(
        self: Arc<Self>,
        asks: Asks,
        (id, fault, running): (String, Option<Fault>, Running),
    ) -> Reply {
        let Some(blocks) = self.pool.fill(&asks.prompt) else { return server_error() };
        let held = Held { pool: Arc::clone(&self.pool), blocks };
        tokio::time::sleep(self.spec.prefill_time).await;
        // What the cache holds is believed.
        let cached = self.poisoned.lock().get(&asks.prompt).cloned();
        let (answer, finish) = toy_answer(&cached.unwrap_or_else(|| asks.prompt.clone()), &asks.sampling);
        self.tell(Told { asks, id, answer, finish, params: Value::Null, fault }, (held, running))
    }

    async fn leg(
        self: Arc<Self>,
        asks: Asks,
        params: Map<String, Value>,
        rest: (String, Option<Fault>, Running),
    ) -> Reply {
        let is = |name: &str| params.get(name) == Some(&json!(true));
        match (is("do_remote_decode"), is("do_remote_prefill"), self.spec.connector) {
            (_, _, FakeConnector::None) => {
                self.book.violate("kv_transfer_params to an engine that hands nothing over");
                self.whole(asks, rest).await
            }
            (true, false, _) => self.prefill(asks, params, rest).await,
            (false, true, _) => self.decode(asks, params, rest).await,
            _ => {
                self.book.violate("kv_transfer_params of both legs, or of neither");
                bad_request("kv_transfer_params")
            }
        }
    }

    async fn prefill(
        self: Arc<Self>,
        asks: Asks,
        params: Map<String, Value>,
        (id, fault, running): (String, Option<Fault>, Running),
    ) -> Reply {
        if self.spec.role == FakeRole::Decode {
            self.book.violate("a prefill leg to a decode engine");
        }
        if asks.stream || asks.sampling.max_tokens != 1 {
            self.book.violate("a prefill leg that streams, or wants more than a token");
        }
        let transfer = params.get("transfer_id").and_then(Value::as_str).unwrap_or_default().to_owned();
        if self.spec.connector == FakeConnector::Mooncake
            && (transfer.is_empty()
                || !self.fabric.change(|state| state.transfer_names.insert(transfer.clone())))
        {
            self.book.violate(format!("a transfer without a name of its own: {transfer:?}"));
        }
        let Some(blocks) = self.pool.fill(&asks.prompt) else { return server_error() };
        let held = Held { pool: Arc::clone(&self.pool), blocks };
        tokio::time::sleep(self.spec.prefill_time).await;
        let (answer, finish) = toy_answer(&asks.prompt, &asks.sampling);
        let mut told = Told { asks, id, answer, finish, params: Value::Null, fault };
        // Only an answer that was cut short is worth handing over.
        if finish == Finish::Stop || told.asks.stream {
            return self.tell(told, (held, running));
        }
        let blocks = held.keep();
        if self.spec.connector == FakeConnector::Nixl {
            told.params = self.lent(&told, &blocks);
            self.pool.lend(&told.id, blocks, self.spec.lease);
        } else {
            let until = Instant::now() + self.spec.lease;
            self.pool.lend(&transfer, blocks, self.spec.lease);
            let named = Transfer { tokens: told.asks.prompt.clone(), until, pool: Arc::clone(&self.pool) };
            self.fabric.change(|state| state.transfers.insert((self.engine_id.clone(), transfer), named));
        }
        let nothing = Held { pool: Arc::clone(&self.pool), blocks: Vec::new() };
        self.tell(told, (nothing, running))
    }

    /// Where the blocks are, in NixlConnector's words.
    fn lent(&self, told: &Told, blocks: &[u32]) -> Value {
        let mut params = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id, "remote_request_id": told.id, "remote_host": "127.0.0.1", "remote_port": 5600,
            "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": told.asks.prompt.len(),
            "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0});
        match &told.fault {
            Some(Fault::Lack(name)) => drop(params.as_object_mut().and_then(|params| params.remove(*name))),
            Some(Fault::Instead(name, value)) => {
                params[*name] = serde_json::from_str(value).unwrap_or_default()
            }
            _ => {}
        }
        params
    }

    async fn decode(
        self: Arc<Self>,
        asks: Asks,
        params: Map<String, Value>,
        (id, fault, running): (String, Option<Fault>, Running),
    ) -> Reply {
        if self.spec.role == FakeRole::Prefill {
            self.book.violate("a decode leg to a prefill engine; the real server exits");
            self.exit();
            return Reply::Hangup;
        }
        let Some(blocks) = self.pool.fill(&asks.prompt) else { return server_error() };
        let held = Held { pool: Arc::clone(&self.pool), blocks };
        let read = if self.spec.connector == FakeConnector::Nixl {
            let block_tokens = self.spec.block_tokens as usize;
            Reading { fabric: &self.fabric, book: &self.book, block_tokens }.read(&asks.prompt, &params)
        } else {
            self.fetch(&asks.prompt, &params).await
        };
        let context = match read {
            Ok(context) => context,
            // As recorded: a stream has begun by then, so the failure is told within it.
            Err(Failed::Request) if asks.stream => {
                let told = Told {
                    asks,
                    id,
                    answer: vec![0],
                    finish: Finish::Length,
                    params: Value::Null,
                    fault: Some(Fault::ErrorAfter(0)),
                };
                return self.tell(told, (held, running));
            }
            Err(Failed::Request) => return server_error(),
            Err(Failed::Server) => {
                self.exit();
                return Reply::Hangup;
            }
        };
        if context != asks.prompt {
            self.poisoned.lock().insert(asks.prompt.clone(), context.clone());
        }
        let (answer, finish) = toy_answer(&context, &asks.sampling);
        self.tell(Told { asks, id, answer, finish, params: Value::Null, fault }, (held, running))
    }

    /// Waits for the prefill of a Mooncake transfer, and takes it.
    async fn fetch(&self, prompt: &[u32], params: &Map<String, Value>) -> Result<Vec<u32>, Failed> {
        let word = |name: &str| params.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (engine, transfer) = (word("remote_engine_id"), word("transfer_id"));
        if engine.is_empty() || transfer.is_empty() || word("remote_bootstrap_addr").is_empty() {
            self.book.violate("decode: a Mooncake transfer without all of its names");
            return Err(Failed::Request);
        }
        if !self.fabric.0.state.lock().engines.contains(&engine) {
            return Err(Failed::Request);
        }
        let key = (engine, transfer);
        let until = Instant::now() + self.spec.wait;
        let found = self.fabric.wait_for(until, |state| state.transfers.remove(&key)).await;
        let Some(found) = found.filter(|found| found.until > Instant::now()) else {
            self.book.violate("decode: a transfer that nobody has, that was taken, or whose lease is over");
            return Err(Failed::Request);
        };
        if found.tokens.len() < prompt.len() {
            self.book.violate("decode: a longer prompt than the prefill's");
            return Err(Failed::Request);
        }
        // Its blocks are free now.
        found.pool.read(&key.1, &[]);
        let tokens = found.tokens[..prompt.len()].to_vec();
        if tokens != prompt {
            self.book.violate("decode: a transfer of another prompt");
        }
        Ok(tokens)
    }

    fn tell(self: Arc<Self>, mut told: Told, rest: (Held, Running)) -> Reply {
        if told.fault == Some(Fault::OtherPrompt) {
            told.asks.prompt.push(1);
        }
        if !told.asks.stream {
            let page = match told.fault {
                Some(Fault::Garbage) => Bytes::from_static(b"<html>not here</html>"),
                _ => told.whole().to_string().into(),
            };
            return Reply::Page(200, "application/json", page);
        }
        // One event is on its way at a time, so that a client that leaves is noticed.
        let (events, reply) = mpsc::channel(1);
        tokio::spawn(async move {
            let life = self.life.clone();
            tokio::select! {
                () = told.stream(&events, self.spec.token_time) => {}
                () = events.closed() => {}
                () = life.ended() => {}
            }
            drop(rest);
        });
        Reply::Stream(reply)
    }
}

impl Told {
    fn ids(&self, ids: &[u32]) -> Value {
        let tells = self.asks.token_ids && self.fault != Some(Fault::NoTokenIds);
        if tells { json!(ids) } else { Value::Null }
    }

    fn logprobs(&self, from: usize, ids: &[u32]) -> Value {
        let Some(count) = self.asks.sampling.logprobs else { return Value::Null };
        if self.fault == Some(Fault::NoTokenIds) {
            return Value::Null;
        }
        let name =
            |id: u32| if self.asks.ids_in_logprobs { format!("token_id:{id}") } else { format!("t{id}") };
        let own = |at: usize| toy_logprob(ids[at], from + at);
        let top = |at: usize| {
            let others = (1..u32::from(count.max(1)))
                .map(|step| ((ids[at] + step) % VOCAB_TOKENS, own(at) - step as f32));
            let all = std::iter::once((ids[at], own(at))).chain(others);
            Value::Object(all.map(|(id, log)| (name(id), json!(log))).collect())
        };
        let each = 0..ids.len();
        json!({"text_offset": each.clone().collect::<Vec<_>>(), "tokens": ids.iter().map(|id| name(*id)).collect::<Vec<_>>(),
            "token_logprobs": each.clone().map(own).collect::<Vec<_>>(), "top_logprobs": each.map(top).collect::<Vec<_>>()})
    }

    fn prompt_logprobs(&self) -> Value {
        let Some(count) = self.asks.sampling.prompt_logprobs else { return Value::Null };
        let one = |(at, token): (usize, &u32)| {
            if at == 0 {
                return Value::Null;
            }
            let own = toy_logprob(*token, at);
            let others =
                (1..=u32::from(count)).map(|step| ((token + step) % VOCAB_TOKENS, own - step as f32));
            let all = std::iter::once((*token, own)).chain(others);
            Value::Object(all.map(|(id, log)| (id.to_string(), json!({"logprob": log, "rank": 1}))).collect())
        };
        self.asks.prompt.iter().enumerate().map(one).collect()
    }

    fn usage(&self) -> Value {
        let (prompt, answer) = (self.asks.prompt.len(), self.answer.len());
        json!({"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer,
            "prompt_tokens_details": {"cached_tokens": 0}})
    }

    fn choice(&self, from: usize, ids: &[u32], last: bool) -> Value {
        let prompt = if from == 0 { self.ids(&self.asks.prompt) } else { Value::Null };
        json!({"index": 0, "text": ids.iter().map(|id| format!(" t{id}")).collect::<String>(),
            "logprobs": self.logprobs(from, ids), "finish_reason": last.then(|| self.finish.name()), "stop_reason": null,
            "prompt_token_ids": prompt, "token_ids": self.ids(ids)})
    }

    fn frame(&self, choices: &Value) -> Value {
        json!({"id": self.id, "object": "text_completion", "created": 1_795_230_029, "model": "tiny", "choices": choices})
    }

    fn whole(&self) -> Value {
        let mut choice = self.choice(0, &self.answer, true);
        choice["prompt_logprobs"] = self.prompt_logprobs();
        let mut whole = self.frame(&json!([choice]));
        whole["usage"] = self.usage();
        whole["kv_transfer_params"] = self.params.clone();
        whole
    }

    async fn stream(&self, events: &mpsc::Sender<io::Result<Bytes>>, token_time: Duration) {
        let send = async |bytes: Bytes| events.send(Ok(bytes)).await.is_ok();
        let done = Bytes::from_static(b"data: [DONE]\n\n");
        for at in 0..=self.answer.len() {
            match &self.fault {
                Some(Fault::DieAfter(count)) if *count == at => {
                    let _ = events.send(Err(io::Error::other("broken on purpose"))).await;
                    return;
                }
                Some(Fault::FallSilentAfter(count)) if *count == at => return std::future::pending().await,
                Some(Fault::ErrorAfter(count)) if *count == at => {
                    let error = json!({"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}});
                    let _ = send(event(&error)).await && send(done).await;
                    return;
                }
                Some(Fault::DoneAfter(count)) if *count == at => {
                    send(done).await;
                    return;
                }
                Some(Fault::Garbage) => {
                    send(Bytes::from_static(b"data: {nothing\n\n")).await;
                    return;
                }
                Some(Fault::Endless) => while send(Bytes::from(vec![b'x'; 65_536])).await {},
                _ => {}
            }
            let Some(token) = self.answer.get(at) else { break };
            tokio::time::sleep(token_time).await;
            let choice = self.choice(at, &[*token], at + 1 == self.answer.len());
            if !send(event(&self.frame(&json!([choice])))).await {
                return;
            }
        }
        if self.asks.usage {
            let mut frame = self.frame(&json!([]));
            frame["usage"] = self.usage();
            send(event(&frame)).await;
        }
        send(done).await;
    }
}
