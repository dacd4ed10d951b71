//! Asking Kubernetes' API server: one connection a question, every wait and every answer bounded.

use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_http::{Client, Error, Incoming, Options, Trust, Url, bearer, by, next_piece, whole};
use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION, USER_AGENT};
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use serde::Deserialize;
use tokio::time::Instant;

use crate::error::{Kind, MembershipError, Result, Stage};

/// How long an answer's beginning, with the connection for it, and a listed page may take, each.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Longest page that is read, bytes.
const PAGE_BYTES_MAX: usize = 32 << 20;
/// Longest line of a watch: one slice, which holds at most a thousand endpoints.
const LINE_BYTES_MAX: usize = 4 << 20;
/// Longest token.
const TOKEN_BYTES_MAX: usize = 64 << 10;

/// An API server and how it is asked.
pub(super) struct Api {
    server: String,
    base: String,
    token: Option<PathBuf>,
    client: Client,
}

/// The server's response when it rejects a request.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Refusal {
    message: String,
}

impl Api {
    /// The server at `server`.
    pub(super) fn new(server: &str, token: Option<PathBuf>, ca: Option<&Path>) -> Result<Self> {
        let wrong = |why: &str| MembershipError::invalid(format!("Kubernetes at {server}: {why}"));
        let url = Url::parse(server).map_err(|why| wrong(&format!("{why}; write https://HOST:PORT")))?;
        let trust = match (url.is_secure(), ca) {
            (false, _) => Trust::nobody(),
            (true, None) => return Err(wrong("TLS needs the certificates to trust; give their PEM file")),
            (true, Some(ca)) => Trust::of_file(ca).map_err(|why| {
                let text = format!("{}: {why}; give a PEM file of certificates", ca.display());
                MembershipError::invalid(text)
            })?,
        };
        let client = Client::new(Options { trust, ..Options::new(TIME_LIMIT) });
        Ok(Self { server: server.to_owned(), base: url.base(), token, client })
    }

    /// The whole answer to one question.
    pub(super) async fn get(&self, path: &str) -> Result<Bytes> {
        let answer = self.ask(path, Stage::Read).await?;
        by(Instant::now() + TIME_LIMIT, whole(answer, PAGE_BYTES_MAX)).await.map_err(|e| match e {
            Error::Late => self.late(Stage::Read),
            e => self.failed(Kind::Unavailable, Stage::Read, &e.to_string()),
        })
    }

    /// An answer that comes line by line.
    pub(super) async fn watch(&self, path: &str) -> Result<Lines> {
        let body = self.ask(path, Stage::Watch).await?;
        Ok(Lines { body, waiting: BytesMut::new(), searched: 0, server: self.server.clone() })
    }

    /// Asks; the answer's body once the server has said yes.
    async fn ask(&self, path: &str, stage: Stage) -> Result<Incoming> {
        let request = self.request(path).await?;
        let answer =
            by(Instant::now() + TIME_LIMIT, self.client.send(request)).await.map_err(|e| match e {
                Error::Late => self.late(stage),
                e => {
                    let why = format!("{e}; see whether it can be reached from here");
                    self.failed(Kind::Unavailable, Stage::Connect, &why)
                }
            })?;
        if answer.status() == StatusCode::OK {
            return Ok(answer.into_body());
        }
        Err(self.refused(stage, answer).await)
    }

    async fn request(&self, path: &str) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::get(format!("{}{path}", self.base))
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, concat!("baton/", env!("CARGO_PKG_VERSION")));
        if let Some(file) = &self.token {
            let wrong = |why: String| {
                let text = format!("{}: {why}; mount the service account's token", file.display());
                MembershipError::new(Kind::Unavailable, Stage::Authenticate, text)
            };
            let token = tokio::fs::read_to_string(file).await.map_err(|e| wrong(e.to_string()))?;
            if token.len() > TOKEN_BYTES_MAX {
                return Err(wrong(format!("{} bytes are no token", token.len())));
            }
            let value = bearer(token.trim()).map_err(|_| wrong("no token".to_owned()))?;
            request = request.header(AUTHORIZATION, value);
        }
        request.body(Full::default()).map_err(|e| self.failed(Kind::Invalid, Stage::Read, &e.to_string()))
    }

    async fn refused(&self, stage: Stage, answer: Response<Incoming>) -> MembershipError {
        let status = answer.status();
        let body = by(Instant::now() + TIME_LIMIT, whole(answer.into_body(), PAGE_BYTES_MAX)).await;
        let refusal: Refusal =
            body.ok().and_then(|body| serde_json::from_slice(&body).ok()).unwrap_or_default();
        let (kind, remedy) = match status {
            StatusCode::GONE => (Kind::Compacted, "list anew"),
            StatusCode::UNAUTHORIZED => (Kind::Denied, "give a valid token"),
            StatusCode::FORBIDDEN => (Kind::Denied, "let the account get, list and watch endpointslices"),
            StatusCode::TOO_MANY_REQUESTS => (Kind::Unavailable, "trying again later"),
            status if status.is_server_error() => (Kind::Unavailable, "see whether it is well"),
            _ => (Kind::Invalid, "see whether it serves discovery.k8s.io/v1"),
        };
        self.failed(kind, stage, &format!("{status}: {}; {remedy}", refusal.message))
    }

    fn failed(&self, kind: Kind, stage: Stage, why: &str) -> MembershipError {
        MembershipError::new(kind, stage, format!("Kubernetes at {}: {why}", self.server))
    }

    fn late(&self, stage: Stage) -> MembershipError {
        self.failed(Kind::TimedOut, stage, "no answer in time; see whether it is overloaded")
    }
}

/// A body, line by line.
pub(super) struct Lines {
    body: Incoming,
    waiting: BytesMut,
    /// Bytes at the front of `waiting` that hold no line end.
    searched: usize,
    server: String,
}

impl Lines {
    /// The next line, without its end; `None` when the server has ended the answer. Nothing is lost when the caller
    /// stops waiting.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(at) = self.waiting[self.searched..].iter().position(|byte| *byte == b'\n') {
                let line = self.waiting.split_to(self.searched + at).freeze();
                self.waiting.advance(1);
                self.searched = 0;
                return Ok(Some(line));
            }
            self.searched = self.waiting.len();
            if self.searched > LINE_BYTES_MAX {
                return Err(self.broken(&format!("a line of more than {LINE_BYTES_MAX} bytes")));
            }
            match next_piece(&mut self.body).await {
                Ok(Some(piece)) => self.waiting.extend_from_slice(&piece),
                Ok(None) if self.waiting.is_empty() => return Ok(None),
                Ok(None) => return Err(self.broken("it ended within a line")),
                Err(e) => return Err(self.broken(&e.to_string())),
            }
        }
    }

    fn broken(&self, why: &str) -> MembershipError {
        let text = format!("Kubernetes at {}: {why}; watch anew", self.server);
        MembershipError::new(Kind::Unavailable, Stage::Watch, text)
    }
}
