//! Asking Kubernetes' API server: one connection a question, every wait and every answer bounded.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue, USER_AGENT};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use crate::error::{Kind, MembershipError, Result, Stage};

/// How long a connection, an answer's beginning and a listed page may take, each.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest page that is read, bytes.
const PAGE_BYTES_MAX: usize = 32 << 20;
/// Longest line of a watch: one slice, which holds at most a thousand endpoints.
const LINE_BYTES_MAX: usize = 4 << 20;
/// Longest token.
const TOKEN_BYTES_MAX: usize = 64 << 10;

trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// An API server and how it is asked.
pub(super) struct Api {
    server: String,
    host: String,
    port: u16,
    authority: HeaderValue,
    token: Option<PathBuf>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// What the server says when it refuses.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Refusal {
    message: String,
}

impl Api {
    /// The server at `server`.
    pub(super) fn new(server: &str, token: Option<PathBuf>, ca: Option<&Path>) -> Result<Self> {
        let wrong = |why: &str| MembershipError::invalid(format!("Kubernetes at {server}: {why}"));
        let uri: Uri = server.parse().map_err(|_| wrong("no URL; write https://HOST:PORT"))?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| wrong("it names no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let secure = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong("no URL; write https://HOST:PORT")),
        };
        let tls = match (secure, ca) {
            (false, _) => None,
            (true, None) => return Err(wrong("TLS needs the certificates to trust; give their PEM file")),
            (true, Some(ca)) => {
                let name = ServerName::try_from(host.clone()).map_err(|e| wrong(&e.to_string()))?;
                Some((connector(ca)?, name))
            }
        };
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let authority = HeaderValue::from_str(authority).map_err(|_| wrong("its host is no header"))?;
        Ok(Self { server: server.to_owned(), host, port, authority, token, tls })
    }

    /// The whole answer to one question.
    pub(super) async fn get(&self, path: &str) -> Result<Bytes> {
        let (answer, _connection) = self.ask(path, Stage::Read).await?;
        let body = tokio::time::timeout(PATIENCE, Limited::new(answer, PAGE_BYTES_MAX).collect());
        let body = body.await.map_err(|_| self.late(Stage::Read))?;
        let body = body.map_err(|e| self.failed(Kind::Unavailable, Stage::Read, &e.to_string()))?;
        Ok(body.to_bytes())
    }

    /// An answer that comes line by line.
    pub(super) async fn watch(&self, path: &str) -> Result<Lines> {
        let (body, connection) = self.ask(path, Stage::Watch).await?;
        Ok(Lines {
            body,
            waiting: BytesMut::new(),
            searched: 0,
            server: self.server.clone(),
            _connection: connection,
        })
    }

    /// Asks; the answer's body once the server has said yes.
    async fn ask(&self, path: &str, stage: Stage) -> Result<(Incoming, AbortOnDropHandle<()>)> {
        let request = self.request(path).await?;
        let unreached = |why: &dyn std::fmt::Display| {
            let text =
                format!("Kubernetes at {}: {why}; see whether it can be reached from here", self.server);
            MembershipError::new(Kind::Unavailable, Stage::Connect, text)
        };
        let connecting = async {
            let stream =
                TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|e| unreached(&e))?;
            let stream: Box<dyn Wire> = match &self.tls {
                None => Box::new(stream),
                Some((tls, name)) => {
                    Box::new(tls.connect(name.clone(), stream).await.map_err(|e| unreached(&e))?)
                }
            };
            http1::handshake(TokioIo::new(stream)).await.map_err(|e| unreached(&e))
        };
        let (mut sender, connection) =
            tokio::time::timeout(PATIENCE, connecting).await.map_err(|_| self.late(Stage::Connect))??;
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            // What breaks the connection shows in the answer.
            let _ = connection.await;
        }));
        let answer = tokio::time::timeout(PATIENCE, sender.send_request(request));
        let answer = answer.await.map_err(|_| self.late(stage))?.map_err(|e| unreached(&e))?;
        if answer.status() == StatusCode::OK {
            return Ok((answer.into_body(), connection));
        }
        Err(self.refused(stage, answer).await)
    }

    async fn request(&self, path: &str) -> Result<Request<Empty<Bytes>>> {
        let mut request = Request::get(path)
            .header(HOST, self.authority.clone())
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
            let value = HeaderValue::from_str(&format!("Bearer {}", token.trim()));
            let mut value = value.map_err(|_| wrong("no token".to_owned()))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        request.body(Empty::new()).map_err(|e| self.failed(Kind::Invalid, Stage::Read, &e.to_string()))
    }

    async fn refused(&self, stage: Stage, answer: Response<Incoming>) -> MembershipError {
        let status = answer.status();
        let body = tokio::time::timeout(PATIENCE, Limited::new(answer.into_body(), PAGE_BYTES_MAX).collect());
        let refusal: Refusal = match body.await {
            Ok(Ok(body)) => serde_json::from_slice(&body.to_bytes()).unwrap_or_default(),
            _ => Refusal::default(),
        };
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

/// A client's side of TLS that trusts the certificates in `ca`.
fn connector(ca: &Path) -> Result<TlsConnector> {
    let wrong = |why: &dyn std::fmt::Display| {
        MembershipError::invalid(format!("{}: {why}; give a PEM file of certificates", ca.display()))
    };
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca).map_err(|e| wrong(&e))? {
        roots.add(certificate.map_err(|e| wrong(&e))?).map_err(|e| wrong(&e))?;
    }
    if roots.is_empty() {
        return Err(wrong(&"no certificate in it"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong(&e))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// A body, line by line.
pub(super) struct Lines {
    body: Incoming,
    waiting: BytesMut,
    /// Bytes at the front of `waiting` that hold no line end.
    searched: usize,
    server: String,
    _connection: AbortOnDropHandle<()>,
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
            match self.body.frame().await {
                None if self.waiting.is_empty() => return Ok(None),
                None => return Err(self.broken("it ended within a line")),
                Some(Err(e)) => return Err(self.broken(&e.to_string())),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.waiting.extend_from_slice(&data);
                    }
                }
            }
        }
    }

    fn broken(&self, why: &str) -> MembershipError {
        let text = format!("Kubernetes at {}: {why}; watch anew", self.server);
        MembershipError::new(Kind::Unavailable, Stage::Watch, text)
    }
}
