//! The calls over HTTP: bounded in connections, body, time and answer, JSON in and out.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use baton_http::{BodyLimits, Bounds, MemoryPool, PAGE_TYPE, reply};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::contract::{Lookup, Registration};
use crate::error::{IndexerError, Kind};
use crate::service::{Indexer, Overview, RegistrationOutcome};
use crate::snapshot;

/// Bounds of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerSettings {
    /// Connections at once; further ones wait in the kernel's queue.
    pub max_connections: usize,
    /// Bytes of a request's body at most: a prompt of a million tokens has some eight million.
    pub body_bytes: usize,
    /// Bytes of all bodies, and of answers that are yet to be read, at most.
    pub held_bytes: usize,
    /// Snapshots that are sent at once at most: each holds one or two publishers' blocks until its peer has read them.
    pub snapshots: usize,
    /// Time for a request's head, and then for its body.
    pub receive_timeout_us: u64,
    /// Time for calls under way once the server stops.
    pub drain_us: u64,
}

impl Default for ServerSettings {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            body_bytes: 16 << 20,
            held_bytes: 256 << 20,
            snapshots: 4,
            receive_timeout_us: 30_000_000,
            drain_us: 5_000_000,
        }
    }
}

/// Bytes of a request's head at most.
const HEAD_BYTES: usize = 64 << 10;
/// How long a peer may read nothing of a snapshot, or anybody else of an answer.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The header that lists the unknown fields of a request.
const IGNORED: &str = "x-baton-ignored-fields";
/// The available paths.
const PATHS: &str = "POST /register, /unregister, /query, /query_by_hash; GET /health, /services, /global_view, \
    /metrics, /snapshot";

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// The calls of one server, and the memory that they hold.
struct Port {
    indexer: Arc<Indexer>,
    settings: ServerSettings,
    held: Arc<MemoryPool>,
    snapshots: Arc<Semaphore>,
    /// What peers are yet to read of snapshots; `snapshots` is its bound.
    snapshot_bytes: Arc<MemoryPool>,
}

/// Serves the calls on `listener` until `stop`, then ends what is under way.
pub async fn serve(
    indexer: Arc<Indexer>,
    listener: TcpListener,
    settings: ServerSettings,
    stop: CancellationToken,
) {
    let bounds = Bounds {
        connections: settings.max_connections,
        head_bytes: HEAD_BYTES,
        head_timeout: Duration::from_micros(settings.receive_timeout_us),
        stall_timeout: STALL_TIMEOUT,
        drain: Duration::from_micros(settings.drain_us),
    };
    let port = Arc::new(Port {
        indexer,
        settings,
        held: MemoryPool::new(settings.held_bytes),
        snapshots: Arc::new(Semaphore::new(settings.snapshots)),
        snapshot_bytes: MemoryPool::new(usize::MAX),
    });
    baton_http::serve("indexer", listener, bounds, stop, move |request| {
        let port = Arc::clone(&port);
        async move { port.call(request).await }
    })
    .await;
}

impl Port {
    async fn call<B>(&self, request: Request<B>) -> Answer
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        let known = ["/register", "/unregister", "/query", "/query_by_hash"];
        if known.contains(&path) && parts.method == Method::POST {
            let within = Duration::from_micros(self.settings.receive_timeout_us);
            let limits = BodyLimits { bytes: self.settings.body_bytes, within, pool: &self.held };
            let body = match baton_http::receive(&parts.headers, body, limits).await {
                Ok(body) => body,
                Err(e) => return self.refuse(e.status(), &e.to_string()),
            };
            return match post(&self.indexer, path, &body) {
                Ok((answer, unknown)) => noting(self.held_answer(&answer), path, &unknown),
                Err(e) => {
                    self.refuse(StatusCode::from_u16(e.status()).expect("these are statuses"), &e.message)
                }
            };
        }
        match (&parts.method, path) {
            (&Method::GET, "/health") => json_answer(StatusCode::OK, &json!({ "status": "ok" })),
            (&Method::GET, "/services") => self.held_answer(&self.indexer.services()),
            (&Method::GET, "/global_view") => self.held_answer(&self.indexer.global_view()),
            (&Method::GET, "/metrics") => {
                let page = self.indexer.metrics.page(&self.overview());
                reply(StatusCode::OK, PAGE_TYPE, Full::from(page).boxed_unsync())
            }
            (&Method::GET, "/snapshot") => match resume_after(parts.uri.query()) {
                Ok(after) => self.snapshot(after),
                Err(e) => self.refuse(StatusCode::BAD_REQUEST, &e.message),
            },
            (_, "/health" | "/services" | "/global_view" | "/metrics" | "/snapshot") => {
                self.refuse(StatusCode::METHOD_NOT_ALLOWED, &format!("{path} is asked with GET"))
            }
            _ if known.contains(&path) => {
                self.refuse(StatusCode::METHOD_NOT_ALLOWED, &format!("{path} is asked with POST"))
            }
            _ => self.refuse(StatusCode::NOT_FOUND, &format!("there is no {path}; there are {PATHS}")),
        }
    }

    fn overview(&self) -> Overview {
        Overview {
            held_bytes: (self.held.taken_bytes() + self.snapshot_bytes.taken_bytes()) as u64,
            no_room: self.held.refused(),
            ..self.indexer.overview()
        }
    }

    fn refuse(&self, status: StatusCode, why: &str) -> Answer {
        self.indexer.metrics.refused();
        json_answer(status, &json!({ "error": why }))
    }

    /// An answer that may be long: it has its room until it is read.
    fn held_answer(&self, value: &Value) -> Answer {
        let (text, mut room) = (value.to_string(), self.held.room());
        match room.grow(text.len()) {
            Ok(()) => json_reply(StatusCode::OK, room.hold(text.into())),
            Err(full) => self.refuse(StatusCode::SERVICE_UNAVAILABLE, &full.to_string()),
        }
    }

    /// A snapshot as it is read: one stream at a time, so that nothing else waits for longer than one takes.
    fn snapshot(&self, after: Option<String>) -> Answer {
        let Ok(turn) = Arc::clone(&self.snapshots).try_acquire_owned() else {
            let why = "as many snapshots are sent as may be at a time; try again shortly";
            return self.refuse(StatusCode::SERVICE_UNAVAILABLE, why);
        };
        self.indexer.metrics.snapshot_given();
        let (indexer, memory) = (Arc::clone(&self.indexer), Arc::clone(&self.snapshot_bytes));
        let begin = ((indexer, memory, turn), SnapshotRest::Header, after);
        let frames = futures_util::stream::unfold(begin, |(of, left, after)| async move {
            let (bytes, left) = match left {
                SnapshotRest::Header => (of.0.header(), SnapshotRest::Streams(after.clone(), 0)),
                SnapshotRest::Nothing => return None,
                SnapshotRest::Streams(after, count) => {
                    let asked = Arc::clone(&of.0);
                    let next =
                        tokio::task::spawn_blocking(move || asked.section_after(after.as_deref())).await;
                    match next {
                        Ok(Some((key, section))) => (section, SnapshotRest::Streams(Some(key), count + 1)),
                        Ok(None) => (snapshot::footer(count), SnapshotRest::Nothing),
                        // Breaking off is how the peer learns that it is not whole.
                        Err(_) => return None,
                    }
                }
            };
            let mut room = of.1.room();
            room.add(bytes.len());
            Some((Ok(Frame::data(room.hold(bytes))), (of, left, after)))
        });
        reply(StatusCode::OK, "application/octet-stream", StreamBody::new(frames).boxed_unsync())
    }
}

/// Carries a call out; gives its answer and the fields that nobody knows.
fn post(indexer: &Arc<Indexer>, path: &str, body: &[u8]) -> Result<(Value, Vec<String>), IndexerError> {
    match path {
        "/register" => {
            let (registration, unknown) = Registration::parse(body)?;
            let instance = registration.instance.clone();
            let status = match indexer.register(registration)? {
                RegistrationOutcome::New => "registered successfully",
                RegistrationOutcome::Already => "already registered",
            };
            Ok((json!({ "status": status, "instance_id": instance }), unknown))
        }
        "/unregister" => {
            let (removed, unknown) = indexer.leave(body)?;
            let status = if removed.is_empty() { "not registered" } else { "unregistered successfully" };
            Ok((json!({ "status": status, "removed_instances": removed }), unknown))
        }
        "/query" => {
            let (lookup, tokens, unknown) = Lookup::by_tokens(body)?;
            Ok((indexer.query_tokens(&lookup, &tokens), unknown))
        }
        _ => {
            let (lookup, hashes, unknown) = Lookup::by_hashes(body)?;
            Ok((indexer.query_hashes(&lookup, &hashes), unknown))
        }
    }
}

fn json_answer(status: StatusCode, value: &Value) -> Answer {
    json_reply(status, value.to_string().into())
}

fn json_reply(status: StatusCode, body: Bytes) -> Answer {
    reply(status, "application/json", Full::new(body).boxed_unsync())
}

/// Adds the caller's unknown fields to the answer.
fn noting(mut answer: Answer, path: &str, unknown: &[String]) -> Answer {
    if unknown.is_empty() {
        return answer;
    }
    let fields = unknown.join(",");
    tracing::debug!("indexer: {path}: fields that are not known: {fields}");
    if let Ok(value) = HeaderValue::from_str(&fields) {
        answer.headers_mut().insert(IGNORED, value);
    }
    answer
}

/// The key after which a snapshot goes on, as `after=` and hex.
fn resume_after(query: Option<&str>) -> Result<Option<String>, IndexerError> {
    let Some(query) = query.filter(|query| !query.is_empty()) else { return Ok(None) };
    let hex = query.strip_prefix("after=").unwrap_or_default();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = hex.as_bytes().chunks(2).map(byte).collect();
    let whole = hex.len().is_multiple_of(2) && !hex.is_empty();
    let key = bytes.filter(|_| whole).and_then(|bytes| String::from_utf8(bytes).ok());
    key.map(Some).ok_or_else(|| {
        IndexerError::new(
            Kind::Invalid,
            "say /snapshot, or /snapshot?after=HEX of the last instance|tenant|rank",
        )
    })
}

/// The part of a snapshot that is still to be sent.
enum SnapshotRest {
    Header,
    Streams(Option<String>, u64),
    Nothing,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_goes_on_after_a_key_in_hex() {
        assert_eq!(resume_after(None).unwrap(), None);
        assert_eq!(resume_after(Some("after=617c62")).unwrap().as_deref(), Some("a|b"));
        for bad in ["after=", "after=6", "after=zz", "from=61", "after=ff"] {
            assert!(resume_after(Some(bad)).is_err(), "{bad}");
        }
    }
}
