//! The paths of the front door, and what each answers.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_types::{BlockKey, Tokens};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, header};
use tokio::time::Instant;

use crate::backend::{Backend, Model};
use crate::body::{Body, Reply};
use crate::call::{self, Call, Desk};
use crate::caller;
use crate::choices::Choices;
use crate::config::RouterConfig;
use crate::error::ApiError;
use crate::fields::{self, Fields, PromptField};
use crate::json;
use crate::receive;
use crate::sampling::Endpoint;
use crate::stats::{Counters, RouterStats};
use crate::stream::{EventStream, StreamTimes};
use crate::tokenize::{Lineage, Tokenization};
use crate::write;

/// What is behind the router may take this much longer than the client gives to say so.
const TIMEOUT_GRACE: Duration = Duration::from_millis(250);

/// What a client is told to wait when nothing predicts it, µs.
const NOT_READY_RETRY_US: u64 = 2_000_000;

/// OpenAI's API in front of a [`Backend`].
pub struct Router {
    pub(crate) config: RouterConfig,
    tokenization: Arc<Tokenization>,
    backend: Arc<dyn Backend>,
    pub(crate) counters: Arc<Counters>,
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
        Self { config, tokenization, backend, counters: Arc::default(), started_s }
    }

    /// What was done since the start.
    #[must_use]
    pub fn stats(&self) -> RouterStats {
        self.counters.read(self.tokenization.cache_counts())
    }

    /// Whose a request is by its headers, or why it is not let in.
    pub fn tenant_of(&self, headers: &HeaderMap) -> Result<Option<Arc<str>>, ApiError> {
        caller::tenant(headers, &self.config.api_keys)
    }

    /// Answers a request. Dropping the future, or the response's body, cancels what it started.
    pub async fn call<B>(&self, request: Request<B>) -> Reply
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::fmt::Display,
    {
        self.counters.received();
        let (parts, body) = request.into_parts();
        let request_id = caller::request_id(&parts.headers);
        let mut reply = match self.answer(&parts, body, &request_id).await {
            Ok(reply) => reply,
            Err(error) => {
                tracing::debug!(status = error.status, path = parts.uri.path(), "{}", error.message);
                error.reply()
            }
        };
        self.counters.replied(reply.status().as_u16());
        if let Ok(value) = HeaderValue::from_str(&request_id) {
            reply.headers_mut().insert(HeaderName::from_static("x-request-id"), value);
        }
        reply
    }

    async fn answer<B>(&self, parts: &Parts, body: B, request_id: &Arc<str>) -> Result<Reply, ApiError>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::fmt::Display,
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
        self.tenant_of(&parts.headers)?;
        match path {
            Path::Models => return Ok(self.models()),
            Path::Model(name) => return self.model_named(name),
            Path::NoEngine => return Err(no_engine(parts.uri.path())),
            Path::Responses => return Err(no_responses()),
            _ => receive::check_type(&parts.headers)?,
        }
        let body = receive::body(&parts.headers, body, &self.config).await?;
        match path {
            Path::Tokenize => self.tokenize(&body).await,
            Path::Detokenize => self.detokenize(&body),
            Path::Generate(endpoint) => self.generate(endpoint, &parts.headers, body, request_id).await,
            _ => Err(unknown_path(parts)),
        }
    }

    async fn other<B>(&self, parts: &Parts, body: B) -> Result<Reply, ApiError>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::fmt::Display,
    {
        if let Some(extra) = &self.config.extra {
            let body = receive::body(&parts.headers, body, &self.config).await?;
            if let Some(reply) = extra.call(parts, body).await {
                return Ok(reply);
            }
        }
        Err(unknown_path(parts))
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

    async fn tokenize(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let fields = fields::read(body)?;
        let model = self.backend.model();
        let tokens = match (&fields.prompt, &fields.messages) {
            (Some(PromptField::Text(text)), None) => {
                self.tokens(text.to_string(), fields.add_special_tokens.unwrap_or(true)).await?
            }
            (None, Some(_)) => {
                let text = call::render_chat(&self.tokenization, &fields)?;
                self.tokens(text, fields.add_special_tokens.unwrap_or(false)).await?
            }
            _ => return Err(ApiError::invalid("prompt", "send either prompt, as a string, or messages")),
        };
        let mut out = b"{\"count\":".to_vec();
        json::integer(&mut out, tokens.len() as u64);
        out.extend_from_slice(b",\"max_model_len\":");
        match model {
            Some(model) => json::integer(&mut out, u64::from(model.max_model_tokens)),
            None => out.extend_from_slice(b"null"),
        }
        out.extend_from_slice(b",\"tokens\":[");
        for (at, token) in tokens.iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            json::integer(&mut out, u64::from(token));
        }
        out.extend_from_slice(b"]}");
        Ok(json_reply(out))
    }

    async fn tokens(&self, text: String, dressed: bool) -> Result<Tokens, ApiError> {
        // Blocks as long as can be: only the tokens are wanted.
        let lineage = Lineage { seed: 0, root: BlockKey(0), block_tokens: u32::MAX };
        let prompt = self.tokenization.prompt(text, dressed, lineage).await;
        prompt.map(|prompt| prompt.tokens).map_err(|message| ApiError::invalid("prompt", message))
    }

    fn detokenize(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let fields = fields::read(body)?;
        let Fields { tokens: Some(tokens), .. } = &fields else {
            return Err(ApiError::invalid("tokens", "tokens is missing; send a list of token ids"));
        };
        let text = self.tokenization.decode(tokens, fields.skip_special_tokens.unwrap_or(false));
        let mut out = b"{\"prompt\":".to_vec();
        json::string(&mut out, &text);
        out.push(b'}');
        Ok(json_reply(out))
    }

    async fn generate(
        &self,
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Bytes,
        request_id: &Arc<str>,
    ) -> Result<Reply, ApiError> {
        let model = self.model()?;
        let desk = Desk { config: &self.config, tokenization: &self.tokenization, model: &model, endpoint };
        let received = Instant::now();
        let call = desk.read(headers, body, request_id).await?;
        // What is behind knows the time, too, and names the stage that it ran out in: it goes first.
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
            let body = Body::events(EventStream::new(choices, times, Arc::clone(&self.counters)));
            stream_reply(body)
        } else {
            choices.finish().await?;
            let plan = Arc::clone(&choices.plan);
            json_reply(write::whole(&plan, &mut choices.answers))
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
    // What stands in between is asked not to gather the events up.
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
fn percent_decoded(text: &str) -> String {
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
