//! Paths for operators beside the clients' own: `/metrics` and `/admin/…`.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use baton_http::PAGE_TYPE;
use baton_router::{ApiError, Body, Extra, Mount, Reply, ReplyFuture, percent_decoded, same_key};
use bytes::Bytes;
use http::request::Parts;
use http::{Method, StatusCode};
use serde_json::json;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::page;
use super::shared_policy::SharedPolicy;
use crate::conductor::{
    Inbox, NodeChangeError, PolicyChange, PolicyOutcome, PolicyRefusal, Question, Status, parse_role,
};
use crate::config::Config;
use crate::keys::AccessKeys;
use crate::metrics::Metrics;
use crate::policy::PolicyError;

const JSON: &str = "application/json";
/// TOML has no registered type of its own.
const TOML: &str = "application/toml; charset=utf-8";
/// All viewers of the page share one status of this age at most.
const SHARED_STATUS_AGE: Duration = Duration::from_secs(1);
/// Bytes of a policy at most.
const POLICY_BYTES: usize = 1 << 20;

/// Answers operators.
pub(super) struct Admin {
    inbox: Inbox,
    metrics: Metrics,
    config_path: Option<PathBuf>,
    /// Where several conductors follow one policy.
    shared: Option<SharedPolicy>,
    keys: AccessKeys,
    /// The latest status that the page was sent, as JSON.
    page_status: Mutex<Option<(Instant, Bytes)>>,
}

/// An answer in the making: its status, and JSON.
type Answer = (StatusCode, serde_json::Value);

impl Admin {
    pub(super) fn new(
        inbox: Inbox,
        metrics: Metrics,
        (config_path, shared): (Option<PathBuf>, Option<SharedPolicy>),
        keys: AccessKeys,
    ) -> Self {
        Self { inbox, metrics, config_path, shared, keys, page_status: Mutex::default() }
    }

    /// Why a request is not let in; none where it is.
    fn refusal(&self, parts: &Parts) -> Option<Answer> {
        let Some(key) = self.keys.operator() else {
            let why = "a web page may not do this: set service.admin_key, or open Baton's own page by an IP address or as \
                       localhost";
            return page::is_of_another_site(parts).then(|| wrong(StatusCode::FORBIDDEN, why));
        };
        let shown = parts.headers.get(http::header::AUTHORIZATION).and_then(|v| v.to_str().ok());
        let shown = shown.and_then(|v| v.strip_prefix("Bearer ")).unwrap_or_default();
        let why = "operators show service.admin_key as 'Authorization: Bearer KEY'";
        let lets_in = same_key(shown.as_bytes(), key.expose().as_bytes());
        (!lets_in).then(|| wrong(StatusCode::UNAUTHORIZED, why))
    }

    async fn answer(&self, parts: &Parts, body: &Bytes) -> Answer {
        let path = parts.uri.path().trim_start_matches("/admin/");
        let words: Vec<&str> = path.split('/').collect();
        match (&parts.method, words.as_slice()) {
            (&Method::GET, ["status"]) => match self.status().await {
                Some(status) => (StatusCode::OK, serde_json::to_value(*status).unwrap_or_default()),
                None => gone(),
            },
            (&Method::GET, ["explain", request_id]) => self.explain(&percent_decoded(request_id)).await,
            (&Method::GET, ["config"]) => match self.inbox.ask(Question::Config).await {
                Some(config) => (StatusCode::OK, serde_json::to_value(&*config).unwrap_or_default()),
                None => gone(),
            },
            (&Method::POST, ["policy"]) => self.policy(body, basis_of(parts)).await,
            (&Method::POST, ["policy", "check"]) => self.check(body).await,
            (&Method::POST, ["policy", "diff"]) => self.diff(body).await,
            (&Method::POST, ["policy", "rollback"]) => self.rollback(basis_of(parts)).await,
            (&Method::POST, ["nodes", node, "drain"]) => self.drain(node, true).await,
            (&Method::POST, ["nodes", node, "resume"]) => self.drain(node, false).await,
            (&Method::POST, ["nodes", node, "role", role]) => self.role(node, role).await,
            _ => (
                StatusCode::NOT_FOUND,
                json!({"error": {"type": "invalid_request_error", "code": "unknown_path", "param": null, "message":
                    "operators' paths: GET /admin/status, /admin/explain/REQUEST_ID, /admin/config, /admin/policy; POST \
                     /admin/policy (TOML, or empty to read the file again), /admin/policy/check, /admin/policy/diff (likewise), /admin/policy/rollback, \
                     /admin/nodes/NAME/drain, /admin/nodes/NAME/resume, /admin/nodes/NAME/role/ROLE"}}),
            ),
        }
    }

    async fn status(&self) -> Option<Box<Status>> {
        let mut status = self.inbox.ask(Question::Status).await?;
        status.outside = self.inbox.outside();
        status.counters.extend(self.metrics.totals());
        status.refused = self.metrics.refusals();
        Some(status)
    }

    /// The status as JSON, made once a second at most however many ask: several people may watch the page.
    async fn page_status(&self) -> Option<Bytes> {
        let mut shared = self.page_status.lock().await;
        if let Some((_, json)) = shared.as_ref().filter(|(made, _)| made.elapsed() < SHARED_STATUS_AGE) {
            return Some(json.clone());
        }
        let json = Bytes::from(serde_json::to_vec(&*self.status().await?).unwrap_or_default());
        *shared = Some((Instant::now(), json.clone()));
        Some(json)
    }

    /// The number of the policy in force, and the configuration with it.
    async fn in_force(&self) -> Option<(u64, Config)> {
        let version = match &self.shared {
            Some(shared) => Some(shared.in_force().await),
            None => None,
        };
        let (number, config) = *self.inbox.ask(Question::PolicyInForce).await?;
        Some((version.map_or(number, |version| *version), config))
    }

    /// The policy in force, in TOML that can be edited and sent back with its tag.
    async fn policy_text(&self) -> Option<Reply> {
        let (number, config) = self.in_force().await?;
        let mut text = reply(StatusCode::OK, TOML, crate::policy::text(&config));
        let tag = http::HeaderValue::from_str(&crate::policy::tag(number, &config)).ok();
        text.headers_mut().extend(tag.map(|tag| (http::header::ETAG, tag)));
        Some(text)
    }

    async fn explain(&self, request_id: &str) -> Answer {
        let request_id = request_id.to_owned();
        match self.inbox.ask(|reply| Question::Explain(request_id, reply)).await {
            Some(Some(words)) => (StatusCode::OK, serde_json::from_str(&words).unwrap_or_default()),
            Some(None) => wrong(
                StatusCode::NOT_FOUND,
                "no decision about this request id is remembered (the latest 1,024 are)",
            ),
            None => gone(),
        }
    }

    async fn policy(&self, body: &Bytes, basis: Option<String>) -> Answer {
        let text = String::from_utf8_lossy(body);
        if let Some(shared) = &self.shared {
            return made(Some(self.share(shared, &text, basis).await));
        }
        match self.read_policy(text.into_owned()).await {
            Ok(config) => {
                let change = Box::new(PolicyChange { config, basis, confirmed: true });
                made(self.inbox.ask(|reply| Question::Policy(change, reply)).await)
            }
            Err(answer) => answer,
        }
    }

    async fn rollback(&self, basis: Option<String>) -> Answer {
        let Some(shared) = &self.shared else {
            return made(self.inbox.ask(|reply| Question::Rollback(basis, reply)).await);
        };
        let Some((version, now)) = self.in_force().await else { return gone() };
        let rolled_back = match in_place_of(basis, version, &now) {
            Ok(version) => shared.rollback(version).await,
            Err(refusal) => Err(refusal),
        };
        made(Some(rolled_back))
    }

    /// What differs between the policy in force and a text, or the file where the text is empty, whether or not a service
    /// can take it on while it serves.
    async fn diff(&self, body: &Bytes) -> Answer {
        let Some(now) = self.inbox.ask(Question::Config).await else { return gone() };
        match self.read_policy(String::from_utf8_lossy(body).into_owned()).await {
            Ok(mut config) => {
                crate::policy::keep_what_is_fixed(&now, &mut config);
                let changes = crate::policy::changes(&now, &config);
                let cold = crate::policy::cold(&now, &config, &changes);
                let line = |change: &crate::policy::Change| {
                    format!("{change}{}", if cold.contains(&change) { " (takes a restart)" } else { "" })
                };
                to_answer(Some(Ok::<_, PolicyError>(changes.iter().map(line).collect())))
            }
            Err(answer) => answer,
        }
    }

    /// What a policy would change, without a change.
    async fn check(&self, body: &Bytes) -> Answer {
        let text = String::from_utf8_lossy(body);
        if self.shared.is_some() {
            let Some(now) = self.inbox.ask(Question::Config).await else { return gone() };
            return match self.to_share(&text, &now) {
                Ok((_, new)) => {
                    to_answer(self.inbox.ask(|reply| Question::CheckPolicy(Box::new(new), reply)).await)
                }
                Err(why) => wrong(StatusCode::BAD_REQUEST, &why.to_string()),
            };
        }
        match self.read_policy(text.into_owned()).await {
            Ok(config) => {
                to_answer(self.inbox.ask(|reply| Question::CheckPolicy(Box::new(config), reply)).await)
            }
            Err(answer) => answer,
        }
    }

    /// The configuration that a text makes of the one in force, or that of the file where the text is empty.
    async fn read_policy(&self, text: String) -> Result<Config, Answer> {
        let own = self.inbox.ask(Question::Config).await.ok_or_else(gone)?;
        let path = self.config_path.clone();
        // A long one takes its time, and others are served meanwhile.
        let config = tokio::task::spawn_blocking(move || match (text.trim().is_empty(), &path) {
            // Settings that the text leaves out stay as they are: operators send a policy, not their keys.
            (false, _) => crate::policy::over(&own, &text).and_then(|new| keeps_keys(&own, new)),
            (true, Some(path)) => crate::config::load(path).map_err(PolicyError::from),
            (true, None) => Err(PolicyError::NoFile("a file, or the body of the call in TOML")),
        });
        let refused = |why: String| wrong(StatusCode::BAD_REQUEST, &why);
        let config = config.await.map_err(|e| refused(format!("the policy could not be read: {e}")))?;
        config.map_err(|why| refused(why.to_string()))
    }

    /// Makes a policy the cluster's: every conductor follows it, this one as well.
    async fn share(
        &self,
        shared: &SharedPolicy,
        text: &str,
        basis: Option<String>,
    ) -> Result<PolicyOutcome, PolicyRefusal> {
        // A conductor that does not lead says so first, whatever it was sent.
        shared.may_write()?;
        let now = self.in_force().await;
        let ends = || PolicyRefusal::NotNow(SHUTTING_DOWN.to_owned());
        let (version, now) = now.ok_or_else(ends)?;
        let in_place_of = in_place_of(basis, version, &now)?;
        let (text, new) = self.to_share(text, &now)?;
        // What this conductor cannot apply, with the requests that are under way, nobody is to follow.
        let checked = self.inbox.ask(|reply| Question::CheckPolicy(Box::new(new), reply)).await;
        let changes = checked.ok_or_else(ends)??;
        Ok(PolicyOutcome { revision: shared.put(&text, in_place_of).await?, changes })
    }

    /// The text that all can follow, and the configuration that it makes of the one in force.
    fn to_share(&self, text: &str, now: &Config) -> Result<(String, Config), PolicyError> {
        let text = match (text.trim().is_empty(), &self.config_path) {
            (false, _) => text.to_owned(),
            (true, Some(path)) => std::fs::read_to_string(path)
                .map_err(|e| PolicyError::Unreadable { file: path.clone(), why: e.to_string() })?,
            (true, None) => return Err(PolicyError::NoFile("a file, or the body of the call in TOML")),
        };
        let text = crate::policy::to_share(&text)?;
        let new = crate::policy::under(now, &text)?;
        Ok((text, new))
    }

    async fn drain(&self, node: &str, drain: bool) -> Answer {
        let (name, now) = (node.to_owned(), if drain { "draining" } else { "serving" });
        let answer = self.inbox.ask(|reply| Question::Drain { node: name, drain, reply }).await;
        done(answer, format!("{node}: {now}"))
    }

    async fn role(&self, node: &str, role: &str) -> Answer {
        let name = node.to_owned();
        match parse_role(role) {
            Ok(new) => {
                let answer = self.inbox.ask(|reply| Question::Role { node: name, role: new, reply }).await;
                done(answer, format!("{node}: {role}"))
            }
            Err(why) => wrong(StatusCode::BAD_REQUEST, &why.to_string()),
        }
    }
}

fn wrong(status: StatusCode, why: &str) -> Answer {
    let kind = ApiError::new(status.as_u16(), "").kind();
    (status, json!({"error": {"message": why, "type": kind, "code": null, "param": null}}))
}

const SHUTTING_DOWN: &str = "the conductor is shutting down";

fn gone() -> Answer {
    wrong(StatusCode::SERVICE_UNAVAILABLE, SHUTTING_DOWN)
}

/// Whether a text that an operator sends leaves the keys as they are: a text may leave them out, and the next start reads
/// the file.
fn keeps_keys(own: &Config, new: Config) -> Result<Config, PolicyError> {
    let (before, after) = (&own.service, &new.service);
    if before.admin_key == after.admin_key && before.api_keys == after.api_keys {
        return Ok(new);
    }
    Err(PolicyError::Keys)
}

/// The tag of the policy that a change was made from, if the client names it.
fn basis_of(parts: &Parts) -> Option<String> {
    let tag = parts.headers.get(http::header::IF_MATCH)?;
    // A tag that is no text is none that was given out.
    let tag = String::from_utf8_lossy(tag.as_bytes()).trim().to_owned();
    (tag != "*").then_some(tag)
}

/// The version of a shared policy that a change replaces; any where the client does not name one.
fn in_place_of(basis: Option<String>, version: u64, now: &Config) -> Result<Option<u64>, PolicyRefusal> {
    match basis {
        Some(basis) if basis != crate::policy::tag(version, now) => Err(PolicyRefusal::stale(version)),
        basis => Ok(basis.map(|_| version)),
    }
}

/// The answer for a change of the policy.
fn made(answer: Option<Result<PolicyOutcome, PolicyRefusal>>) -> Answer {
    let refusal = match answer {
        Some(Ok(PolicyOutcome { revision, changes })) => {
            return (StatusCode::OK, json!({ "changed": changes, "revision": revision }));
        }
        Some(Err(refusal)) => refusal,
        None => return gone(),
    };
    let status = match refusal {
        PolicyRefusal::Wrong(_) => StatusCode::BAD_REQUEST,
        PolicyRefusal::Stale(_) => StatusCode::PRECONDITION_FAILED,
        PolicyRefusal::Conflict(_) => StatusCode::CONFLICT,
        PolicyRefusal::NotNow(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    wrong(status, &refusal.to_string())
}

fn to_answer(answer: Option<Result<Vec<String>, impl Display>>) -> Answer {
    match answer {
        Some(Ok(changes)) => (StatusCode::OK, json!({ "changed": changes })),
        Some(Err(why)) => wrong(StatusCode::BAD_REQUEST, &why.to_string()),
        None => gone(),
    }
}

/// The answer to an order about one node, with its new state in words.
fn done(answer: Option<Result<(), NodeChangeError>>, change: String) -> Answer {
    to_answer(answer.map(|answer| answer.map(|()| vec![change])))
}

fn reply(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Reply {
    let mut reply = Reply::new(Body::full(text));
    *reply.status_mut() = status;
    reply.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static(kind));
    reply
}

impl Extra for Admin {
    fn mount(&self, parts: &Parts) -> Mount {
        let path = parts.uri.path();
        let reads = matches!(parts.method, Method::GET | Method::HEAD);
        if reads && (path == "/metrics" || page::file_at(path).is_some()) {
            return Mount::Bodyless;
        }
        if !path.starts_with("/admin/") {
            return Mount::Unknown;
        }
        match self.refusal(parts) {
            Some((status, json)) => Mount::Refused(Box::new(reply(status, JSON, json.to_string()))),
            None if matches!(path, "/admin/policy" | "/admin/policy/check" | "/admin/policy/diff") => {
                Mount::Body(POLICY_BYTES)
            }
            None => Mount::Bodyless,
        }
    }

    fn call<'a>(&'a self, parts: &'a Parts, body: Bytes) -> ReplyFuture<'a> {
        Box::pin(async move {
            let path = parts.uri.path();
            if let Some(file) = page::file_at(path) {
                return Some(file.reply(&parts.headers));
            }
            let own = match (&parts.method, path) {
                (_, "/metrics") => Some(reply(StatusCode::OK, PAGE_TYPE, self.metrics.page())),
                (&Method::GET, "/admin/page") => {
                    self.page_status().await.map(|json| reply(StatusCode::OK, JSON, json))
                }
                (&Method::GET, "/admin/policy") => self.policy_text().await,
                _ => None,
            };
            if own.is_some() {
                return own;
            }
            let (status, json) = self.answer(parts, &body).await;
            Some(reply(status, JSON, json.to_string()))
        })
    }
}
