//! A remote engine: whole requests and decode legs. Prefill legs are in `prefill.rs`, what it is in `probe.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_types::Sampling;
use http::header::{HeaderName, HeaderValue};
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::Instant;

use crate::completions;
use crate::error::{Kind, RemoteError, Side, Stage};
use crate::fields::{Body, Client};
use crate::generation::{Abort, Generation, Reader, Terms};
use crate::handoff::{Handoff, Way, now_us};
use crate::http::{Call, Wire};
use crate::ids::leg_id;
use crate::prefill::{set_room, vllm_headers};
use crate::probe::Probe;
use crate::request::Request;
use crate::settings::{Dialect, EngineRole, RemoteSettings};
use crate::sglang;
use crate::spent::{SpendRefusal, SpentNames};
use crate::vllm::{self, Leg};

/// A token id in JSON, with what separates it from the next, at most.
const TOKEN_BYTES: usize = 12;

/// An engine somewhere else. Clones are the same engine.
#[derive(Clone)]
pub struct RemoteEngine {
    inner: Arc<Inner>,
}

struct Inner {
    settings: RemoteSettings,
    wire: Arc<Wire>,
    probe: Mutex<Option<Arc<Probe>>>,
    spent: Mutex<SpentNames>,
    /// Whether it has reported cached tokens since it was probed.
    counts_cached: Arc<AtomicBool>,
}

impl std::fmt::Debug for RemoteEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteEngine").field("settings", &self.inner.settings).finish_non_exhaustive()
    }
}

impl RemoteEngine {
    /// An engine as the settings say; nothing is sent yet.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for settings that cannot work.
    pub fn new(settings: RemoteSettings) -> Result<Self, RemoteError> {
        settings.check()?;
        let wire = Arc::new(Wire::new(&settings)?);
        let inner = Inner {
            settings,
            wire,
            probe: Mutex::new(None),
            spent: Mutex::new(SpentNames::default()),
            counts_cached: Arc::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Its settings.
    #[must_use]
    pub fn settings(&self) -> &RemoteSettings {
        &self.inner.settings
    }

    /// The result of the last [`Self::probe`].
    #[must_use]
    pub fn probed(&self) -> Option<Arc<Probe>> {
        self.inner.probe.lock().clone()
    }

    pub(crate) fn keep_probe(&self, probe: Probe) -> Arc<Probe> {
        let probe = Arc::new(probe);
        // It may have been started anew without the option for it.
        self.inner.counts_cached.store(false, Ordering::Relaxed);
        *self.inner.probe.lock() = Some(Arc::clone(&probe));
        probe
    }

    /// Reads the answer to a request from `/v1/completions`.
    pub(crate) fn reader(&self, request: &Request, stage: Stage) -> completions::Reader {
        completions::Reader {
            stage,
            prompt: request.tokens.clone(),
            logprobs: request.sampling.logprobs,
            prompt_logprobs: request.sampling.prompt_logprobs,
            counts_cached: Arc::clone(&self.inner.counts_cached),
        }
    }

    pub(crate) fn wire(&self) -> Arc<Wire> {
        Arc::clone(&self.inner.wire)
    }

    pub(crate) fn block_tokens(&self) -> Option<u32> {
        self.probed().and_then(|probe| probe.block_tokens)
    }

    pub(crate) fn vllm_headers(&self, leg: &str) -> Result<Vec<(HeaderName, HeaderValue)>, RemoteError> {
        vllm_headers(leg, self.inner.settings.dp_rank)
    }

    /// From now, and to when blocks are lent: what the settings say, or the engine itself when that is sooner.
    pub(crate) fn lease(&self, engine_us: Option<u64>) -> (u64, u64) {
        let now = now_us();
        let ours = now.saturating_add(self.inner.settings.lease.lease_us);
        (now, engine_us.map_or(ours, |theirs| theirs.min(ours)).max(now + 1))
    }

    pub(crate) fn name_model(&self, body: &mut Body) -> Result<(), RemoteError> {
        let name =
            self.inner.settings.model.clone().or_else(|| self.probed().map(|probe| probe.model.clone()));
        match name {
            Some(name) if self.inner.settings.dialect != Dialect::Sglang => body.set("model", &name),
            _ => Ok(()),
        }
    }

    /// Sets the data-parallel rank in a request to SGLang. For vLLM a header names it.
    pub(crate) fn name_rank(&self, body: &mut Body) -> Result<(), RemoteError> {
        match self.inner.settings.dp_rank {
            Some(rank) => body.set("routed_dp_rank", &rank),
            None => Ok(()),
        }
    }

    /// Which legs it was started for, by the settings or by its own word.
    pub(crate) fn role(&self) -> Option<EngineRole> {
        self.inner.settings.role.or_else(|| self.probed().and_then(|probe| probe.role))
    }

    /// Refuses a leg that the engine was not started for.
    pub(crate) fn check_role(&self, leg: EngineRole) -> Result<(), RemoteError> {
        match self.role() {
            Some(role) if role != EngineRole::Whole && role != leg => {
                let text = format!("a {leg:?} leg for an engine that was started for {role:?} legs");
                Err(RemoteError::ours(Stage::Handoff, text).remedy("send each leg to an engine of its role"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses whole requests where the engine serves legs only: SGLang's 400 would look like the client's mistake.
    fn check_whole(&self) -> Result<(), RemoteError> {
        match self.role() {
            Some(role) if role != EngineRole::Whole && self.inner.settings.dialect == Dialect::Sglang => {
                let text = format!("a whole request for an SGLang that was started for {role:?} legs");
                Err(RemoteError::ours(Stage::Prepare, text)
                    .remedy("send it to a pair, or to an engine without a role"))
            }
            _ => Ok(()),
        }
    }

    /// Serves a whole request on this engine.
    ///
    /// # Errors
    /// When the request cannot be served, or the engine does not take it; what fails later comes out of the generation.
    /// An SGLang that is one of a pair serves no whole requests.
    pub async fn generate(&self, request: Request) -> Result<Generation, RemoteError> {
        self.check_whole()?;
        let client = Client::of(&request)?;
        let leg = leg_id(&request.id);
        let first = self.inner.settings.timeouts.first_token_us;
        if self.inner.settings.dialect == Dialect::Sglang {
            let mut body = sglang::body(&request, client, &leg, true)?;
            self.name_rank(&mut body)?;
            return self.start(Start { request, body, leg, first_us: first, leased: false }).await;
        }
        let streams = vllm::streams(Leg::Whole, &request.sampling);
        let body = vllm::body(&request, client, Leg::Whole, self.inner.settings.dialect)?;
        let start = Start { request, body, leg, first_us: first, leased: false };
        if streams { self.start(start).await } else { self.at_once(start).await }
    }

    /// Decodes a request from what its prefill leg handed over. The hand-off is used up, whatever becomes of it.
    ///
    /// # Errors
    /// Before anything is sent: [`Kind::Invalid`] when it is not this prompt's, lacks a field, has been used, or is of
    /// another way than this engine's; [`Kind::Retry`] when its lease is, or is about to be, over. Then as [`Self::generate`].
    /// Ask the generation for its first piece at once: a first token that is looked at after the lease is not believed.
    pub async fn decode(&self, mut request: Request, handoff: Handoff) -> Result<Generation, RemoteError> {
        self.check_role(EngineRole::Decode)?;
        let settings = &self.inner.settings;
        let client = Client::of(&request)?;
        let leg = leg_id(&request.id);
        let left = self.admit(&request, &handoff)?;
        if request.sampling.prompt_logprobs.is_some() {
            // The prefill leg has reported them, and some decode engines fail on the field.
            request.sampling = Arc::new(Sampling { prompt_logprobs: None, ..(*request.sampling).clone() });
        }
        // A room is opened before its prefill has run, and nothing is read from it too late.
        let time_limit = settings.timeouts.first_token_us;
        let left = if matches!(handoff.way, Way::Room { .. }) { time_limit } else { left };
        let (first_us, leased) = (time_limit.min(left), left < time_limit);
        let body = match handoff.way {
            Way::Room { host, port, room, rank } => {
                let mut body = sglang::body(&request, client, &leg, true)?;
                set_room(&mut body, (&host, port, room), rank)?;
                self.name_rank(&mut body)?;
                body
            }
            Way::Nixl { params } => {
                let mut body = vllm::body(&request, client, Leg::Decode, settings.dialect)?;
                keep_apart(&mut body, &leg)?;
                body.set_raw("kv_transfer_params", params);
                body
            }
            Way::Mooncake { engine_id, bootstrap, transfer_id } => {
                let mut body = vllm::body(&request, client, Leg::Decode, settings.dialect)?;
                keep_apart(&mut body, &leg)?;
                body.set(
                    "kv_transfer_params",
                    &json!({"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": engine_id,
                        "remote_bootstrap_addr": bootstrap, "transfer_id": transfer_id}),
                )?;
                body
            }
        };
        self.start(Start { request, body, leg, first_us, leased }).await
    }

    /// Takes a hand-off, once; returns how long the first token may take, µs.
    fn admit(&self, request: &Request, handoff: &Handoff) -> Result<u64, RemoteError> {
        use crate::settings::HandoffWay as Set;
        let settings = &self.inner.settings;
        let fits = matches!(
            (&settings.handoff, &handoff.way),
            (Set::Nixl, Way::Nixl { .. })
                | (Set::Mooncake { .. }, Way::Mooncake { .. })
                | (Set::Rooms { .. }, Way::Room { .. })
        );
        if !fits {
            let text = format!("a hand-off of another way than this engine's ({:?})", settings.handoff);
            return Err(RemoteError::ours(Stage::Handoff, text).remedy("pair engines that hand over alike"));
        }
        let now = now_us();
        let left = handoff.admit(request, now, settings.lease.margin_us)?;
        match self.inner.spent.lock().spend(handoff.name(), handoff.until_us(), now) {
            Ok(()) => Ok(left),
            Err(SpendRefusal::Again) => Err(RemoteError::ours(Stage::Handoff, "the hand-off has been used")
                .remedy("prefill again for each decode leg: the blocks are released after the first read")),
            Err(SpendRefusal::Full) => Err(RemoteError::new(
                Kind::Retry,
                Side::Us,
                Stage::Handoff,
                "too many hand-offs within one lease",
            )
            .remedy("decode elsewhere, or shorten the lease")),
        }
    }

    async fn start(&self, start: Start) -> Result<Generation, RemoteError> {
        let stage = Stage::Start;
        let settings = &self.inner.settings;
        let Start { request, mut body, leg, first_us, leased } = start;
        self.name_model(&mut body)?;
        let first_by = Instant::now() + Duration::from_micros(first_us);
        let terms = self.terms(&request, first_by, leased);
        let (path, headers, reader, abort) = if settings.dialect == Dialect::Sglang {
            let (prompt, sampling) = (request.tokens.clone(), &request.sampling);
            let (logprobs, prompt_logprobs) = (sampling.logprobs, sampling.prompt_logprobs);
            let reader = sglang::Reader { stage, prompt, logprobs, prompt_logprobs, seen: Vec::new() };
            let abort = Abort::new(self.wire(), leg);
            ("/generate", vec![], Reader::Sglang(reader), Some(abort))
        } else {
            let reader = Reader::Completions(self.reader(&request, stage));
            ("/v1/completions", self.vllm_headers(&leg)?, reader, None)
        };
        let call = Call { stage, path, elsewhere: None, headers, until: first_by };
        // A call that is dropped here drops `abort`, which aborts the request at the engine.
        match self.inner.wire.post(body.written()?, call).await {
            Ok(answer) => Ok(Generation::streamed(answer, reader, terms, abort)),
            Err(error) => {
                if let Some(mut abort) = abort.filter(|_| error.status.is_some()) {
                    abort.disarm();
                }
                Err(error)
            }
        }
    }

    async fn at_once(&self, start: Start) -> Result<Generation, RemoteError> {
        let stage = Stage::Start;
        let Start { request, mut body, leg, .. } = start;
        self.name_model(&mut body)?;
        let until = Instant::now() + Duration::from_micros(self.inner.settings.timeouts.answer_us);
        let headers = self.vllm_headers(&leg)?;
        let call = Call { stage, path: "/v1/completions", elsewhere: None, headers, until };
        let answer = self.inner.wire.post(body.written()?, call).await?;
        let bytes = self.inner.wire.whole(answer, until, stage).await?;
        let reader = self.reader(&request, stage);
        let progress = reader.whole(&bytes)?.progress;
        let terms = self.terms(&request, until, false);
        Generation::at_once(progress, Reader::Completions(reader), terms)
    }

    fn terms(&self, request: &Request, first_by: Instant, leased: bool) -> Terms {
        let settings = &self.inner.settings;
        Terms {
            first_by,
            leased,
            silence: Duration::from_micros(settings.timeouts.silence_us),
            max_tokens: request.sampling.max_tokens,
            vocab_tokens: settings.vocab_tokens,
            // vLLM repeats the prompt in its first event.
            event_bytes: settings.bounds.event_bytes.saturating_add(request.tokens.len() * TOKEN_BYTES),
        }
    }
}

/// Gives a decode leg a cache of its own. An engine that stood still may read blocks whose lease is over, long after its call
/// was given up, and keeps what it read as this prompt's: nobody may find it there, not even the same request's next try.
fn keep_apart(body: &mut Body, leg: &str) -> Result<(), RemoteError> {
    body.set("cache_salt", leg)
}

/// A call that is about to be made.
struct Start {
    request: Request,
    body: Body,
    leg: String,
    first_us: u64,
    leased: bool,
}
