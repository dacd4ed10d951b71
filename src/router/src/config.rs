//! The settings of the front door.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use baton_http::Identity;
use baton_types::Secret;
use bytes::Bytes;
use http::request::Parts;
use parking_lot::RwLock;

use crate::body::Reply;
use crate::class_rules::ClassRules;
use crate::reasoning::ReasoningParser;
use crate::tools::ToolParser;

/// Settings of the front door. Every bound has a default that suits one machine.
#[derive(Clone)]
pub struct RouterConfig {
    /// Keys that are let in; everybody is when there are none.
    pub api_keys: ApiKeys,
    /// Which class a call has that names none.
    pub class_rules: ClassRules,
    /// Certificate and key; plain text when `None`.
    pub tls: Option<Identity>,
    /// Secret that block keys are seeded with: the same on all routers and nodes of a deployment.
    pub hash_seed: Secret<u64>,
    /// Largest body, bytes.
    pub body_limit_bytes: usize,
    /// Limit for all open requests together, and for whole answers that clients have yet to read, bytes. A body counts
    /// from its arrival until no part of it is in use. Operators' requests have 16 MiB of their own.
    pub bodies_limit_bytes: usize,
    /// Answers of one call at most: prompts times `n`.
    pub choices_limit: usize,
    /// Stop strings of one call at most.
    pub stops_limit: usize,
    /// Maximum number of connections, half of them of one peer. A few more are accepted: the router rejects their
    /// calls, except for the operators' paths.
    pub connections_limit: usize,
    /// Silence after which a stream gets a comment that keeps it alive, ms.
    pub keep_alive_ms: u64,
    /// How long a client may not read what is there for it before it is cut off, ms.
    pub stall_limit_ms: u64,
    /// How long a client may take to send its headers, or its body, ms.
    pub receive_limit_ms: u64,
    /// How long calls under way may take to end after a shutdown, ms.
    pub drain_limit_ms: u64,
    /// Which tool calls are looked for in chats that offer tools.
    pub tool_parser: ToolParser,
    /// Whether a chat's reasoning is separated from its content.
    pub reasoning_parser: ReasoningParser,
    /// Headers that name a conversation, first one there counts.
    pub session_headers: Vec<String>,
    /// Paths beside the router's own.
    pub extra: Option<Arc<dyn Extra>>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        let sessions = [
            "x-session-affinity",
            "x-session-id",
            "x-correlation-id",
            "x-claude-code-session-id",
            "x-codex-session-id",
            "x-amp-thread-id",
        ];
        Self {
            api_keys: ApiKeys::default(),
            class_rules: ClassRules::default(),
            tls: None,
            hash_seed: Secret::default(),
            body_limit_bytes: 32 << 20,
            bodies_limit_bytes: 1 << 30,
            choices_limit: 128,
            stops_limit: 4,
            connections_limit: 16_384,
            keep_alive_ms: 10_000,
            stall_limit_ms: 60_000,
            receive_limit_ms: 30_000,
            drain_limit_ms: 30_000,
            tool_parser: ToolParser::default(),
            reasoning_parser: ReasoningParser::default(),
            session_headers: sessions.map(str::to_owned).to_vec(),
            extra: None,
        }
    }
}

/// A key that is let in.
#[derive(Clone, Debug)]
pub struct ApiKey {
    /// The text that the client sends after `Bearer`.
    pub key: Secret<String>,
    /// The tenant of the key. With `None`, the header `x-tenant-id` names it.
    pub tenant: Option<String>,
    /// Service classes that its requests may have, the first one by default; all where there are none.
    pub classes: Vec<Arc<str>>,
}

/// A list of keys that may change while the router serves. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys(Arc<RwLock<Arc<[ApiKey]>>>);

impl From<Vec<ApiKey>> for ApiKeys {
    fn from(keys: Vec<ApiKey>) -> Self {
        Self(Arc::new(RwLock::new(keys.into())))
    }
}

impl ApiKeys {
    /// Replaces the list. Calls that are let in already go on.
    pub fn set(&self, keys: Vec<ApiKey>) {
        *self.0.write() = keys.into();
    }

    /// The list as it is now.
    pub(crate) fn now(&self) -> Arc<[ApiKey]> {
        Arc::clone(&self.0.read())
    }
}

/// An answer on its way.
pub type ReplyFuture<'a> = Pin<Box<dyn Future<Output = Option<Reply>> + Send + 'a>>;

/// The way in which [`Extra`] serves a request.
pub enum Mount {
    /// No such path.
    Unknown,
    /// An answer that needs no body.
    Bodyless,
    /// An answer to a body of at most so many bytes.
    Body(usize),
    /// The request is not let in, and its body is not read.
    Refused(Box<Reply>),
}

/// Paths that the router does not have itself, such as `/metrics` and `/admin/...`.
///
/// It is asked before the router says that a path is unknown, without a look at API keys: who may call is its own to
/// say.
pub trait Extra: Send + Sync + 'static {
    /// The way to serve a request, determined before its body is read.
    fn mount(&self, parts: &Parts) -> Mount;

    /// The answer, or `None` when the path is unknown here, too. The body is empty but for [`Mount::Body`].
    fn call<'a>(&'a self, parts: &'a Parts, body: Bytes) -> ReplyFuture<'a>;
}
