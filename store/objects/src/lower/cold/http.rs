//! HTTP and HTTPS to a bucket, over the client and the TLS library that the rest of the program uses.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{HOST, HeaderValue};
use http::uri::{Authority, PathAndQuery, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Connections that wait for the next request.
const IDLE_MAX: usize = 16;
/// Where systems keep the certificates that they trust.
const TRUSTED: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Makes the client of a bucket. How long it may take is not its concern: whoever asks gives up.
#[derive(Debug)]
pub(super) struct Connector {
    /// Longest answer.
    pub(super) answer_max_bytes: usize,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let (tls, answer_max_bytes) = (trusting(), self.answer_max_bytes);
        Ok(HttpClient::new(Service { tls, answer_max_bytes, idle: Mutex::default() }))
    }
}

/// TLS that trusts what the system trusts, or the file in `SSL_CERT_FILE`.
fn trusting() -> Option<TlsConnector> {
    let mut roots = rustls::RootCertStore::empty();
    let given = std::env::var("SSL_CERT_FILE").ok();
    let file =
        given.as_deref().into_iter().chain(TRUSTED).find(|file| std::path::Path::new(file).exists())?;
    for certificate in CertificateDer::pem_file_iter(file).ok()?.flatten() {
        // One that cannot be read trusts nobody; the others may do.
        let _ = roots.add(certificate);
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().ok()?;
    Some(TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth())))
}

/// Idle connections, with the authority that each is to.
type Idle = Vec<(Authority, SendRequest<Full<Bytes>>)>;

struct Service {
    tls: Option<TlsConnector>,
    answer_max_bytes: usize,
    idle: Mutex<Idle>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").finish_non_exhaustive()
    }
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Service {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> Answer<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.answer(request))
    }
}

impl Service {
    async fn answer(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut head, body) = request.into_parts();
        let body = Full::new(body.collect().await?.to_bytes());
        let uri = std::mem::take(&mut head.uri);
        let authority = uri.authority().cloned().ok_or_else(|| failed(wrong(&uri, "no host")))?;
        let path = uri.path_and_query().map_or("/", PathAndQuery::as_str);
        head.uri = path.parse().map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
        let host = HeaderValue::from_str(authority.as_str());
        head.headers.entry(HOST).or_insert(host.map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?);
        let mut connection = match self.take_idle(&authority) {
            Some(connection) => connection,
            None => self.dial(&uri).await.map_err(failed)?,
        };
        let broken = |e: hyper::Error| HttpError::new(HttpErrorKind::Request, e);
        connection.ready().await.map_err(broken)?;
        let answer = connection.send_request(http::Request::from_parts(head, body)).await.map_err(broken)?;
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, self.answer_max_bytes).collect().await;
        let body = body.map_err(|e| HttpError::new_boxed(HttpErrorKind::Interrupted, e))?.to_bytes();
        let mut idle = self.idle.lock();
        if !connection.is_closed() && idle.len() < IDLE_MAX {
            idle.push((authority, connection));
        }
        Ok(HttpResponse::from_parts(head, HttpResponseBody::from(body)))
    }

    fn take_idle(&self, authority: &Authority) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self.idle.lock();
        idle.retain(|(_, connection)| connection.is_ready());
        let at = idle.iter().rposition(|(other, _)| other == authority)?;
        Some(idle.swap_remove(at).1)
    }

    async fn dial(&self, uri: &Uri) -> io::Result<SendRequest<Full<Bytes>>> {
        let host = uri.host().ok_or_else(|| wrong(uri, "no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let secure = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        if !secure {
            return shake(stream).await;
        }
        let untrusting = || wrong(uri, "no trusted certificates; name a file in SSL_CERT_FILE");
        let tls = self.tls.as_ref().ok_or_else(untrusting)?;
        let name = ServerName::try_from(host.to_owned()).map_err(|_| wrong(uri, "no name for TLS"))?;
        shake(tls.connect(name, stream).await?).await
    }
}

fn wrong(uri: &Uri, what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{uri}: {what}"))
}

fn failed(error: io::Error) -> HttpError {
    HttpError::new(HttpErrorKind::Connect, error)
}

async fn shake<S>(stream: S) -> io::Result<SendRequest<Full<Bytes>>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (requests, connection) = shaken.map_err(io::Error::other)?;
    // It ends when the server closes it, or when nobody holds its other side.
    tokio::spawn(connection);
    Ok(requests)
}
