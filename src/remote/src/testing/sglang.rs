//! A stand-in for SGLang: `/generate`, its rooms, and its pages.

mod requests;
mod responses;
mod rooms;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use self::requests::{GenerateRequest, refused_late, uncompiled};
use self::responses::Answer;
use super::FakeRole;
use super::body::ReadRequest;
use super::compute::{Cost, Prompts};
use super::fabric::Fabric;
use super::fault::{Fault, FaultOutcome};
use super::pool::{HeldBlocks, Pool};
use super::request_log::ReceivedRequest;
use super::server::{Life, Reply, Site, WholeRequest, event, pass, serve};
use super::stand::Stand;
use super::text::FakeTokenizer;
use super::toy::answer_in;
use crate::{Dialect, HandoffWay, RemoteSettings};

/// The properties of a stand-in for SGLang.
#[derive(Clone, Debug)]
pub struct SglangSpec {
    /// Which leg it is for.
    pub role: FakeRole,
    /// Port of the bootstrap server of a prefill; only its number counts here, nothing listens there.
    pub bootstrap_port: u16,
    /// How long a leg waits for the other one.
    pub wait: Duration,
    /// Each event repeats the answer so far, as is SGLang's default.
    pub repeats: bool,
    /// Tokens of the KV pool.
    pub pool_tokens: u32,
    /// Tokens of a block of it.
    pub page_tokens: u32,
    /// Prompt tokens of a pass; −1 for prompts that are computed whole.
    pub chunk_tokens: i32,
    /// Longest prompt and answer together.
    pub max_model_tokens: u32,
    /// Data-parallel ranks.
    pub ranks: u32,
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
}

impl SglangSpec {
    /// Waits of 500 ms, events that repeat, blocks of a token, as in the recordings; fast.
    #[must_use]
    pub const fn new(role: FakeRole) -> Self {
        Self {
            role,
            bootstrap_port: 8_998,
            wait: Duration::from_millis(500),
            repeats: true,
            pool_tokens: 8_192,
            page_tokens: 1,
            chunk_tokens: 4_096,
            max_model_tokens: 4_096,
            ranks: 1,
            prefill_time: Duration::ZERO,
            token_time: Duration::ZERO,
            cost: Cost::NONE,
            port: 0,
            letters: false,
            remembers: true,
            tokenizer: FakeTokenizer::BYTES,
        }
    }
}

/// A stand-in for SGLang on a port of its own. It goes when it is dropped.
pub struct FakeSglang {
    site: Arc<Sglang>,
    address: SocketAddr,
}

struct Sglang {
    spec: SglangSpec,
    fabric: Fabric,
    pool: Arc<Pool>,
    prompts: Prompts,
    stand: Stand,
    running: Mutex<BTreeMap<String, watch::Sender<bool>>>,
    aborted: AtomicU64,
}

impl FakeSglang {
    /// Starts one on loopback.
    ///
    /// # Errors
    /// When there is no port to listen on.
    pub async fn start(spec: SglangSpec, fabric: &Fabric) -> io::Result<Self> {
        if spec.role == FakeRole::Prefill {
            fabric.change(|state| state.bootstraps.insert(spec.bootstrap_port));
        }
        let life = Life::new();
        let site = Arc::new(Sglang {
            pool: Arc::new(Pool::new(spec.pool_tokens / spec.page_tokens, spec.page_tokens)),
            prompts: Prompts::new(spec.cost, spec.token_time, spec.page_tokens),
            spec,
            fabric: fabric.clone(),
            stand: Stand::new(life.clone()),
            running: Mutex::default(),
            aborted: AtomicU64::new(0),
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

    /// Settings that suit it.
    #[must_use]
    pub fn settings(&self) -> RemoteSettings {
        let way = match self.site.spec.role {
            FakeRole::Whole => HandoffWay::None,
            _ => HandoffWay::Rooms { host: None, port: self.site.spec.bootstrap_port },
        };
        RemoteSettings::new(Dialect::Sglang, self.url()).with_handoff(way)
    }

    /// KV tokens that it holds, whole blocks of them.
    #[must_use]
    pub fn held_tokens(&self) -> usize {
        self.site.pool.held() * self.site.spec.page_tokens as usize
    }

    /// Requests that it works on.
    #[must_use]
    pub fn running(&self) -> usize {
        self.site.running.lock().len()
    }

    /// Aborts that found their request.
    #[must_use]
    pub fn aborted(&self) -> u64 {
        self.site.aborted.load(Ordering::SeqCst)
    }

    /// The server and all its connections are gone.
    pub fn kill(&self) {
        self.site.exit();
    }
}

impl Deref for FakeSglang {
    type Target = Stand;

    fn deref(&self) -> &Stand {
        &self.site.stand
    }
}

impl Drop for FakeSglang {
    fn drop(&mut self) {
        self.site.exit();
    }
}

/// A request that is worked on; it is nobody's when this goes.
struct RunningRequest {
    site: Arc<Sglang>,
    rid: String,
    held: Option<HeldBlocks>,
    /// The room that a prefill leg is in.
    room: Option<(String, u16, u64)>,
    abort: watch::Receiver<bool>,
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.site.running.lock().remove(&self.rid);
        self.held = None;
        if let Some(key) = &self.room {
            self.site.fabric.change(|state| {
                if let Some(room) = state.rooms.get_mut(key) {
                    room.prefills = room.prefills.saturating_sub(1);
                }
            });
        }
    }
}

impl Site for Sglang {
    async fn answer(self: Arc<Self>, asked: WholeRequest) -> Reply {
        match asked.path.as_str() {
            "/health" | "/health_generate" => self.stand.faults.health(),
            "/get_server_info" | "/server_info" => Reply::json(200, &self.told()),
            "/v1/models" => {
                let model = json!({"id": "tiny", "object": "model", "owned_by": "sglang", "root": "tiny",
                    "max_model_len": self.spec.max_model_tokens});
                Reply::json(200, &json!({"object": "list", "data": [model]}))
            }
            "/metrics" => {
                let labels = "{model_name=\"tiny\",tp_rank=\"0\"}";
                let (asked, cached) = self.prompts.counts();
                let page = format!(
                    "sglang:num_running_reqs{labels} {}.0\nsglang:num_queue_reqs{labels} 0.0\nsglang:token_usage{labels} {}\n\
                     sglang:prompt_tokens_total{labels} {asked}.0\nsglang:cached_tokens_total{labels} {cached}.0\n",
                    self.running.lock().len(),
                    self.pool.share()
                );
                Reply::Page(200, "text/plain; version=0.0.4", page.into())
            }
            "/abort_request" => {
                let body: Value = serde_json::from_slice(&asked.body).unwrap_or_default();
                let rid = body["rid"].as_str().unwrap_or_default();
                if let Some(abort) = self.running.lock().get(rid) {
                    abort.send_replace(true);
                    self.aborted.fetch_add(1, Ordering::SeqCst);
                }
                Reply::Page(200, "text/plain", Bytes::new())
            }
            "/get_model_info" | "/model_info" => Reply::json(
                200,
                &json!({"model_path": "tiny", "tokenizer_path": "tiny", "is_generation": true}),
            ),
            "/tokenize" | "/v1/tokenize" if !self.spec.tokenizer.unasked => {
                let body: Value = serde_json::from_slice(&asked.body).unwrap_or_default();
                // Texts only: a chat has no prompt, which is wanted.
                if !body["prompt"].is_string() {
                    return failure(400, "1 validation error: prompt: Field required");
                }
                let told = self.spec.tokenizer.tokenize(&body, self.spec.max_model_tokens);
                told.map_or_else(|wrong| failure(400, &wrong), |told| Reply::json(200, &told))
            }
            "/generate" | "/v1/completions" | "/v1/chat/completions" => self.generate(asked).await,
            _ => Reply::json(404, &json!({"detail": "Not Found"})),
        }
    }
}

fn failure(status: u16, message: &str) -> Reply {
    Reply::json(
        status,
        &json!({"object": "error", "message": message, "type": status.to_string(), "param": null, "code": status}),
    )
}

impl Sglang {
    fn exit(&self) {
        self.stand.life.exit();
        if self.spec.role == FakeRole::Prefill {
            self.fabric.change(|state| state.bootstraps.remove(&self.spec.bootstrap_port));
        }
    }

    fn told(&self) -> Value {
        let mode = match self.spec.role {
            FakeRole::Prefill => "prefill",
            FakeRole::Decode => "decode",
            FakeRole::Whole => "null",
        };
        let pages = self.spec.cost.announced_blocks(self.spec.pool_tokens / self.spec.page_tokens);
        json!({"page_size": self.spec.page_tokens, "chunked_prefill_size": self.spec.chunk_tokens, "max_prefill_tokens": 16_384,
            "disable_radix_cache": self.spec.cost.cache_blocks == 0, "disaggregation_mode": mode, "disaggregation_transfer_backend": "mooncake",
            "disaggregation_bootstrap_port": self.spec.bootstrap_port, "version": "0.5.23",
            "internal_states": [{"model_path": "tiny", "served_model_name": "tiny", "context_length": null, "dp_size": self.spec.ranks, "incremental_streaming_output": !self.spec.repeats,
                "max_running_requests": null, "effective_max_running_requests_per_dp": 2_048,
                "memory_usage": {"token_capacity": pages * self.spec.page_tokens}}]})
    }

    async fn generate(self: Arc<Self>, asked: WholeRequest) -> Reply {
        if self.spec.remembers {
            self.stand.log.receive(ReceivedRequest {
                path: asked.path.clone(),
                request_id: None,
                dp_rank: None,
                authorization: None,
                body: serde_json::from_slice(&asked.body).unwrap_or_default(),
            });
        }
        let fault = match self.stand.faults.meet(|| self.exit()).await {
            FaultOutcome::Ended(reply) => return reply,
            FaultOutcome::GoOn(fault) => fault,
        };
        let read = ReadRequest::new(&asked.body).unwrap_or_default();
        let refused = uncompiled(&read.fields["sampling_params"]);
        let request = match self.request(read, &asked.path) {
            Ok(request) => request,
            Err(wrong) => return Reply::json(400, &json!({"error": {"message": wrong}})),
        };
        if let Some(wrong) = refused {
            return refused_late(&request, &wrong);
        }
        let abort = watch::Sender::new(false);
        let heard = abort.subscribe();
        if self.running.lock().insert(request.rid.clone(), abort).is_some() {
            self.stand.log.violate(format!("two requests at once with the id {}", request.rid));
        }
        let mut running = RunningRequest {
            site: Arc::clone(&self),
            rid: request.rid.clone(),
            held: None,
            room: None,
            abort: heard,
        };
        let Some(blocks) = self.pool.fill(&request.prompt) else { return failure(500, "no room") };
        running.held = Some(HeldBlocks { pool: Arc::clone(&self.pool), blocks });
        pass(self.spec.prefill_time).await;
        let cached = match self.spec.role {
            FakeRole::Decode => 0,
            _ => self.prompts.compute(&request.salt, &request.prompt).await,
        };
        let context = match (self.spec.role, request.room.clone()) {
            (FakeRole::Whole, _) => request.prompt.clone(),
            (FakeRole::Prefill, Some(room)) => match self.meet_decode(&request, &room, &mut running).await {
                Ok(()) => request.prompt.clone(),
                Err(reply) => return reply,
            },
            (FakeRole::Decode, Some(room)) => match self.meet_prefill(&request, &room, &running).await {
                Ok(context) => context,
                Err(reply) => return reply,
            },
            (_, None) => {
                self.stand.log.violate("a leg without bootstrap fields");
                let text = "Invalid request: Disaggregated request received without bootstrap room id.";
                return Reply::json(400, &json!({"error": {"message": text}}));
            }
        };
        self.respond(request, (&context, cached), fault, running)
    }

    fn respond(
        self: Arc<Self>,
        request: GenerateRequest,
        (context, cached): (&[u32], usize),
        fault: Option<Fault>,
        running: RunningRequest,
    ) -> Reply {
        let mut sampling = request.sampling.clone();
        if self.spec.role == FakeRole::Prefill {
            // It draws the first token, and says that it was cut short.
            sampling.max_tokens = 1;
            sampling.min_tokens = sampling.min_tokens.min(1);
        }
        sampling.ignore_eos |= self.spec.letters;
        let told = |token| if self.spec.letters { self.spec.tokenizer.answer_token(token) } else { token };
        let (answer, finish) = answer_in(context, &sampling, told);
        let told = Answer { request, answer, finish, cached, fault, repeats: self.spec.repeats };
        if !told.request.stream {
            let page = match told.fault {
                Some(Fault::Garbage) => Bytes::from_static(b"<html>not here</html>"),
                _ => told.whole().to_string().into(),
            };
            return Reply::Page(200, "application/json", page);
        }
        let (events, reply) = mpsc::channel(1);
        tokio::spawn(async move {
            let life = self.stand.life.clone();
            let mut abort = running.abort.clone();
            tokio::select! {
                () = told.stream(&events, self.prompts.pace(self.spec.role != FakeRole::Decode)) => {}
                () = events.closed() => {}
                _ = abort.wait_for(|abort| *abort) => {
                    let end = json!({"text": "", "output_ids": [], "meta_info": {"id": told.request.rid, "completion_tokens": 0,
                        "finish_reason": {"type": "abort", "message": "Aborted by AbortReq."}}});
                    // The client may have gone.
                    let _ = events.try_send(Ok(event(&end)));
                }
                () = life.ended() => {}
            }
            drop(running);
        });
        Reply::Stream(reply)
    }
}
