//! The paths of the front door, and what each answers.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_http::{BodyLimits, MemoryPool};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, header};
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::aside::{LARGE_BYTES, LargeBodyPool};
use crate::backend::{Backend, Model};
use crate::body::{Body, Reply};
use crate::call::{self, Call, RequestReader};
use crate::caller;
use crate::choices::Choices;
use crate::config::{Mount, RouterConfig};
use crate::convert;
use crate::error::ApiError;
use crate::json;
use crate::plan::Plan;
use crate::receive;
use crate::sampling::Endpoint;
use crate::stats::{Counters, ErrorCount, RouterStats};
use crate::stream::{EventStream, StreamTimes};
use crate::tokenize::Tokenization;
use crate::write;

/// Time that the backend gets beyond the client's time limit to report the timeout itself.
const TIMEOUT_GRACE: Duration = Duration::from_millis(250);

/// The retry delay for clients where no prediction exists, µs.
const NOT_READY_RETRY_US: u64 = 2_000_000;

/// Room for operators and those that watch for them, beside that for clients: however much clients hold, a probe of
/// `/health` is answered.
const OPERATORS_BYTES: usize = 16 << 20;

/// OpenAI's API in front of a [`Backend`].
pub struct Router {
    pub(crate) config: Arc<RouterConfig>,
    tokenization: Arc<Tokenization>,
    backend: Arc<dyn Backend>,
    pub(crate) counters: Arc<Counters>,
    /// When answers that are under way after a shutdown are broken off, if that was said.
    pub(crate) closes_at: OnceLock<Instant>,
    pub(crate) bodies: Arc<MemoryPool>,
    /// Of requests to the operators' paths.
    pub(crate) operators_bodies: Arc<MemoryPool>,
    aside: LargeBodyPool,
    started_s: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path<'p> {
    Generate(Endpoint),
    Models,
    Model(&'p str),
    Tokenize,
    Detokenize,
    NoEngine,
    Responses,
    Health,
    Ready,
    Other,
}

impl<'p> Path<'p> {
    fn of(path: &'p str) -> Self {
        match path {
            "/v1/chat/completions" => Self::Generate(Endpoint::Chat),
            "/v1/completions" => Self::Generate(Endpoint::Completions),
            "/v1/models" | "/v1/models/" => Self::Models,
            "/tokenize" | "/v1/tokenize" => Self::Tokenize,
            "/detokenize" | "/v1/detokenize" => Self::Detokenize,
            "/v1/embeddings" | "/v1/rerank" | "/rerank" | "/v2/rerank" | "/score" | "/v1/score" => {
                Self::NoEngine
            }
            "/v1/responses" => Self::Responses,
            "/health" => Self::Health,
            "/ready" => Self::Ready,
            _ => path.strip_prefix("/v1/models/").map_or(Self::Other, Self::Model),
        }
    }

    /// The methods that it answers; `None` where the router does not say.
    fn allow(self) -> Option<&'static str> {
        match self {
            Self::Models | Self::Model(_) | Self::Health | Self::Ready => Some("GET, HEAD"),
            Self::Other => None,
            _ => Some("POST"),
        }
    }
}

impl Router {
    /// A front door to `backend`, whose tokens `tokenization` must read as its engines do.
    #[must_use]
    pub fn new(config: RouterConfig, tokenization: Tokenization, backend: Arc<dyn Backend>) -> Self {
        let started_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let tokenization = Arc::new(tokenization);
        Self {
            bodies: MemoryPool::new(config.bodies_limit_bytes),
            operators_bodies: MemoryPool::new(OPERATORS_BYTES),
            config: Arc::new(config),
            tokenization,
            backend,
            counters: Arc::default(),
            closes_at: OnceLock::new(),
            aside: LargeBodyPool::new(),
            started_s,
        }
    }

    /// The counters since the start.
    #[must_use]
    pub fn stats(&self) -> RouterStats {
        let body_bytes = self.bodies.taken_bytes() + self.operators_bodies.taken_bytes();
        self.counters.read(self.tokenization.cache_counts(), body_bytes)
    }

    /// Errors that were answered since the start, by kind.
    #[must_use]
    pub fn errors(&self) -> Vec<ErrorCount> {
        self.counters.errors()
    }

    /// Says until when answers may be under way after a shutdown; the first word counts. Without one they have the drain
    /// limit of the configuration.
    pub fn close_by(&self, deadline: Instant) {
        let _ = self.closes_at.set(deadline);
    }

    /// Answers a request. Dropping the future, or the response's body, cancels what it started.
    pub async fn call<B>(&self, request: Request<B>) -> Reply
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::error::Error,
    {
        self.counters.received();
        let (parts, body) = request.into_parts();
        let request_id = caller::request_id(&parts.headers);
        let mut reply = match self.answer(&parts, body, &request_id).await {
            Ok(reply) => reply,
            Err(error) => {
                tracing::debug!(status = error.status, path = parts.uri.path(), "{}", error.message);
                self.counters.erred(&error);
                error.reply()
            }
        };
        self.counters.replied(reply.status().as_u16());
        if let Ok(value) = HeaderValue::from_str(&request_id) {
            reply.headers_mut().insert(HeaderName::from_static("x-request-id"), value);
        }
        reply
    }

    /// The response on a connection beyond the limit, to all but operators.
    pub(crate) fn refuse_connection(&self) -> Reply {
        let message =
            "as many connections are open as may be, here or from this address; close some, or try again";
        let error =
            ApiError::new(503, message).code("too_many_connections").retry_after_us(NOT_READY_RETRY_US);
        self.refuse(&error)
    }

    /// The answer to a request that is not looked at.
    pub(crate) fn refuse(&self, error: &ApiError) -> Reply {
        self.counters.received();
        self.counters.erred(error);
        self.counters.replied(error.status);
        error.reply()
    }

    async fn answer<B>(&self, parts: &Parts, body: B, request_id: &Arc<str>) -> Result<Reply, ApiError>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::error::Error,
    {
        let path = Path::of(parts.uri.path());
        if let Some(allow) = path.allow() {
            let allowed = allow.split(", ").any(|method| parts.method == method);
            if !allowed {
                return Err(wrong_method(&parts.method, parts.uri.path(), allow));
            }
        }
        match path {
            Path::Health => return Ok(json_reply(b"{\"status\":\"ok\"}".to_vec())),
            Path::Ready => return Ok(self.ready()),
            Path::Other => return self.other(parts, body).await,
            _ => {}
        }
        // Before the body is read: who is not let in costs nothing.
        caller::admit(&parts.headers, &self.config.api_keys.now())?;
        match path {
            Path::Models => return Ok(self.models()),
            Path::Model(name) => return self.model_named(name),
            Path::NoEngine => return Err(no_engine(parts.uri.path())),
            Path::Responses => return Err(no_responses()),
            _ => receive::check_type(&parts.headers)?,
        }
        let limits = self.limits(self.config.body_limit_bytes, &self.bodies);
        let body = receive::body(&parts.headers, body, limits).await?;
        match path {
            Path::Tokenize => self.tokenize(body).await,
            Path::Detokenize => self.detokenize(body).await,
            Path::Generate(endpoint) => self.generate(endpoint, &parts.headers, body, request_id).await,
            _ => Err(unknown_path(parts)),
        }
    }

    async fn other<B>(&self, parts: &Parts, body: B) -> Result<Reply, ApiError>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::error::Error,
    {
        let Some(extra) = &self.config.extra else { return Err(unknown_path(parts)) };
        let body = match extra.mount(parts) {
            Mount::Unknown => return Err(unknown_path(parts)),
            Mount::Refused(reply) => {
                self.counters.erred(&ApiError::new(reply.status().as_u16(), "").code("operators_only"));
                return Ok(*reply);
            }
            Mount::Bodyless => Bytes::new(),
            Mount::Body(limit_bytes) => {
                let limits = self.limits(limit_bytes, &self.operators_bodies);
                receive::body(&parts.headers, body, limits).await?
            }
        };
        extra.call(parts, body).await.ok_or_else(|| unknown_path(parts))
    }

    /// The limits of a body, and whether an operator can set its most bytes.
    fn limits<'a>(&self, bytes: usize, pool: &'a Arc<MemoryPool>) -> (BodyLimits<'a>, bool) {
        let within = Duration::from_millis(self.config.receive_limit_ms.max(1));
        let most = self.config.body_limit_bytes;
        (BodyLimits { bytes: bytes.min(most), within, pool }, bytes >= most)
    }

    /// Whether requests are served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.backend.readiness().ready
    }

    fn ready(&self) -> Reply {
        let readiness = self.backend.readiness();
        let mut out = format!("{{\"ready\":{},\"detail\":", readiness.ready).into_bytes();
        json::string(&mut out, &readiness.detail);
        out.push(b'}');
        let mut reply = json_reply(out);
        if !readiness.ready {
            *reply.status_mut() = http::StatusCode::SERVICE_UNAVAILABLE;
            reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
        }
        reply
    }

    fn model(&self) -> Result<Arc<Model>, ApiError> {
        self.backend.model().ok_or_else(|| {
            let message = format!("no engine serves a model yet: {}", self.backend.readiness().detail);
            ApiError::new(503, message).code("no_model").retry_after_us(NOT_READY_RETRY_US)
        })
    }

    fn models(&self) -> Reply {
        let mut out = b"{\"object\":\"list\",\"data\":[".to_vec();
        if let Some(model) = self.backend.model() {
            for (at, name) in std::iter::once(&model.name).chain(&model.aliases).enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                self.write_model(&mut out, name, &model);
            }
        }
        out.extend_from_slice(b"]}");
        json_reply(out)
    }

    fn model_named(&self, encoded: &str) -> Result<Reply, ApiError> {
        let name = percent_decoded(encoded);
        let model = self.model()?;
        call::check_model(Some(&name), &model)?;
        let mut out = Vec::new();
        self.write_model(&mut out, &name, &model);
        Ok(json_reply(out))
    }

    fn write_model(&self, out: &mut Vec<u8>, name: &str, model: &Model) {
        out.extend_from_slice(b"{\"id\":");
        json::string(out, name);
        out.extend_from_slice(b",\"object\":\"model\",\"created\":");
        json::integer(out, self.started_s);
        out.extend_from_slice(b",\"owned_by\":\"baton\",\"root\":");
        json::string(out, &model.name);
        out.extend_from_slice(b",\"parent\":null,\"revision\":");
        json::string(out, &model.revision);
        out.extend_from_slice(b",\"max_model_len\":");
        json::integer(out, u64::from(model.max_model_tokens));
        out.push(b'}');
    }

    async fn tokenize(&self, body: Bytes) -> Result<Reply, ApiError> {
        let (tokenization, model) = (Arc::clone(&self.tokenization), self.backend.model());
        let out = if body.len() <= LARGE_BYTES {
            convert::tokenize(&tokenization, model.as_deref(), &body).await?
        } else {
            let here = Handle::current();
            let work = move || here.block_on(convert::tokenize(&tokenization, model.as_deref(), &body));
            self.aside.run(work).await?
        };
        self.whole_reply(out)
    }

    async fn detokenize(&self, body: Bytes) -> Result<Reply, ApiError> {
        let tokenization = Arc::clone(&self.tokenization);
        let out = if body.len() <= LARGE_BYTES {
            convert::detokenize(&tokenization, &body)?
        } else {
            self.aside.run(move || convert::detokenize(&tokenization, &body)).await?
        };
        self.whole_reply(out)
    }

    /// An answer that may be long. It has its room until it is read, and there is none where that is full.
    fn whole_reply(&self, body: Vec<u8>) -> Result<Reply, ApiError> {
        let mut room = self.bodies.room();
        room.grow(body.len())?;
        Ok(json_reply(body).map(|body| body.holding(room)))
    }

    async fn generate(
        &self,
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Bytes,
        request_id: &Arc<str>,
    ) -> Result<Reply, ApiError> {
        let model = self.model()?;
        let received = Instant::now();
        let call = if body.len() <= LARGE_BYTES {
            let reader = RequestReader {
                config: &self.config,
                tokenization: &self.tokenization,
                model: &model,
                endpoint,
            };
            reader.read(headers, body, request_id).await?
        } else {
            let (config, tokenization) = (Arc::clone(&self.config), Arc::clone(&self.tokenization));
            let (headers, request_id, here) = (headers.clone(), Arc::clone(request_id), Handle::current());
            let work = move || {
                let reader =
                    RequestReader { config: &config, tokenization: &tokenization, model: &model, endpoint };
                here.block_on(reader.read(&headers, body, &request_id))
            };
            self.aside.run(work).await?
        };
        // Its body is let go of when it is submitted; its prompts stay until the answer is there.
        let mut prompts = self.bodies.room();
        prompts.grow(call.held_bytes())?;
        let call = Call { plan: Plan { _room: Some(prompts), ..call.plan }, ..call };
        // The backend knows the time limit, too, and names the stage in which it ran out. Its error therefore goes
        // first.
        let deadline =
            call.timeout_us.map(|timeout_us| received + Duration::from_micros(timeout_us) + TIMEOUT_GRACE);
        let work = self.carry_out(call, deadline);
        match deadline {
            None => work.await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline, work).await.unwrap_or_else(|_| Err(call::timed_out()))
            }
        }
    }

    async fn carry_out(&self, call: Call, deadline: Option<Instant>) -> Result<Reply, ApiError> {
        let Call { plan, submissions, stream, explain, .. } = call;
        let tickets = submissions.into_iter().map(|submission| self.backend.submit(submission)).collect();
        let mut choices = Choices::new(Arc::new(plan), tickets);
        let decisions = choices.admitted().await?;
        let mut reply = if stream {
            let times = StreamTimes {
                keep_alive: Duration::from_millis(self.config.keep_alive_ms.max(1)),
                stall_limit: Duration::from_millis(self.config.stall_limit_ms.max(1)),
                deadline,
            };
            // Until then a refusal or a fault is a status, by which clients try again.
            choices.begun(times.keep_alive).await?;
            let body = Body::events(EventStream::new(choices, times, Arc::clone(&self.counters)));
            stream_reply(body)
        } else {
            let mut grown = self.bodies.room();
            choices.finish(&mut grown).await?;
            let plan = Arc::clone(&choices.plan);
            self.whole_reply(write::whole(&plan, &mut choices.answers))?
        };
        if explain && !decisions.is_empty() {
            let text: String =
                decisions.join("; ").chars().map(|c| if c.is_ascii_control() { ' ' } else { c }).collect();
            if let Ok(value) = HeaderValue::from_bytes(text.as_bytes()) {
                reply.headers_mut().insert(HeaderName::from_static("x-baton-decision"), value);
            }
        }
        Ok(reply)
    }
}

/// Whether operators, and those that watch for them, ask for this: it is answered when all places are taken, too.
pub(crate) fn is_operators(path: &str) -> bool {
    matches!(Path::of(path), Path::Health | Path::Ready | Path::Other)
}

fn json_reply(body: Vec<u8>) -> Reply {
    let mut reply = Response::new(Body::full(body));
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

fn stream_reply(body: Body) -> Reply {
    let mut reply = Response::new(body);
    let headers = reply.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks proxies not to buffer the events.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    reply
}

fn wrong_method(method: &Method, path: &str, allow: &'static str) -> ApiError {
    let mut error = ApiError::new(405, format!("{path} does not answer {method}; it answers {allow}"));
    error.allow = Some(allow);
    error.code("method_not_allowed")
}

fn unknown_path(parts: &Parts) -> ApiError {
    let message = format!(
        "{} {} is not served here; see /v1/models, /v1/chat/completions and /v1/completions",
        parts.method,
        parts.uri.path()
    );
    ApiError::new(404, message).code("unknown_path")
}

fn no_engine(path: &str) -> ApiError {
    let message = format!("no engine behind this router serves {path}; it takes one that embeds or ranks");
    ApiError::new(501, message).code("no_engine")
}

fn no_responses() -> ApiError {
    ApiError::new(501, "/v1/responses is not served here; use /v1/chat/completions").code("not_implemented")
}

/// `%2F` and its like read back; what is no UTF-8 then is left as it was.
#[must_use]
pub fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let hex = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        if let Some(byte) = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            out.push(byte);
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_names_are_read_from_paths() {
        assert_eq!(percent_decoded("org%2Fmodel%2"), "org/model%2");
        assert_eq!(percent_decoded("%ff"), "%ff");
        assert_eq!(percent_decoded("%é"), "%é");
        assert_eq!(Path::of("/v1/models/org/m"), Path::Model("org/m"));
        assert_eq!(Path::of("/v1/nothing"), Path::Other);
    }
}
