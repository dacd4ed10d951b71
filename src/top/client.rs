//! Asking a service: one connection a look, every wait and every answer bounded.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST, HeaderValue};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::scrape::Scrape;
use super::{Objectives, Sample};
use crate::conductor::Status;

/// A look that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer that is read, bytes: that of 4,096 nodes has room in it.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Where a service is, and how it is asked.
#[derive(Clone)]
pub struct Client {
    base: String,
    host: String,
    port: u16,
    authority: HeaderValue,
    key: Option<HeaderValue>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// Something to speak over.
trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

impl Client {
    /// A client of the service at `url`, showing `key`, trusting the certificate in `ca`.
    ///
    /// # Errors
    /// Names what is wrong with the address, the key or the file.
    pub fn new(url: &str, key: Option<&str>, ca: Option<&Path>) -> Result<Self, String> {
        let wrong = |why: &str| format!("top: {url}: {why}; give an address like http://127.0.0.1:8080");
        let uri: Uri = url.parse().map_err(|e| wrong(&format!("no URL: {e}")))?;
        let host = uri.host().filter(|h| !h.is_empty()).ok_or_else(|| wrong("it names no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("no URL that begins with http:// or https://")),
        };
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let authority = uri.authority().map_or("", |a| a.as_str());
        let authority = HeaderValue::from_str(authority).map_err(|_| wrong("its host is no header"))?;
        let key = key.map(|key| HeaderValue::from_str(&format!("Bearer {key}"))).transpose();
        let mut key =
            key.map_err(|_| "top: --key holds characters that no header may; check it".to_owned())?;
        key.iter_mut().for_each(|value| value.set_sensitive(true));
        let tls = match (secure, ca) {
            (true, Some(ca)) => Some((connector(ca)?, server_name(&host).map_err(|e| wrong(&e))?)),
            (true, None) => {
                return Err(format!("top: {url}: give the certificate to trust with --ca FILE, in PEM"));
            }
            (false, _) => None,
        };
        let base = format!(
            "{}://{}",
            if secure { "https" } else { "http" },
            uri.authority().map_or("", |a| a.as_str())
        );
        Ok(Self { base, host, port, authority, key, tls })
    }

    /// The service's address.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// What `/admin/status` answers, as it is.
    ///
    /// # Errors
    /// In words: nothing answers, or it refuses.
    pub async fn status_text(&self) -> Result<String, String> {
        self.within(async {
            let body = self.get(&mut self.connect().await?, "/admin/status").await?;
            Ok(String::from_utf8_lossy(&body).into_owned())
        })
        .await
    }

    /// One look.
    ///
    /// # Errors
    /// In words: nothing answers, or not as a service of this version does.
    pub(super) async fn sample(&self) -> Result<Sample, String> {
        self.within(async {
            let mut connection = self.connect().await?;
            let body = self.get(&mut connection, "/admin/status").await?;
            let status: Status = serde_json::from_slice(&body).map_err(|e| self.stranger(&e))?;
            let metrics = self.get(&mut connection, "/metrics").await?;
            let config = self.get(&mut connection, "/admin/config").await?;
            let config = serde_json::from_slice(&config).map_err(|e| self.stranger(&e))?;
            let scrape = Scrape::read(&String::from_utf8_lossy(&metrics));
            Ok(Sample { at: Instant::now(), status, scrape, objectives: objectives(&config) })
        })
        .await
    }

    fn stranger(&self, error: &dyn std::fmt::Display) -> String {
        format!(
            "top: {} answers, but not as this version of baton does ({error}); use the same baton on both ends",
            self.base
        )
    }

    async fn within<T>(&self, asked: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| {
            Err(format!(
                "top: {}: no answer within {} s; see whether it is overloaded or a firewall is between",
                self.base,
                PATIENCE.as_secs()
            ))
        })
    }

    async fn connect(&self) -> Result<SendRequest<Empty<Bytes>>, String> {
        let nobody = |e: &dyn std::fmt::Display| {
            format!(
                "top: {}: {e}; start 'baton up' or 'baton serve' there, or say where it is with --url",
                self.base
            )
        };
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|e| nobody(&e))?;
        let stream: Box<dyn Wire> = match &self.tls {
            None => Box::new(stream),
            Some((tls, name)) => Box::new(tls.connect(name.clone(), stream).await.map_err(|e| {
                format!(
                    "top: {}: TLS: {e}; check that --ca is what this server's certificate is signed with",
                    self.base
                )
            })?),
        };
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| nobody(&e))?;
        // It ends with its sender; what went wrong, the sender tells.
        tokio::spawn(connection);
        Ok(sender)
    }

    async fn get(&self, connection: &mut SendRequest<Empty<Bytes>>, path: &str) -> Result<Bytes, String> {
        let failed = |e: &dyn std::fmt::Display| format!("top: {}{path}: {e}; look again", self.base);
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = Uri::try_from(path).expect("a path of our own is one");
        request.headers_mut().insert(HOST, self.authority.clone());
        if let Some(key) = &self.key {
            request.headers_mut().insert(AUTHORIZATION, key.clone());
        }
        connection.ready().await.map_err(|e| failed(&e))?;
        let reply = connection.send_request(request).await.map_err(|e| failed(&e))?;
        let status = reply.status();
        let body = Limited::new(reply.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|e| failed(&e))?.to_bytes();
        match status {
            StatusCode::OK => Ok(body),
            StatusCode::UNAUTHORIZED => Err(format!(
                "top: {}: operators only; give the configuration's service.admin_key with --key or BATON_ADMIN_KEY",
                self.base
            )),
            other => Err(self.stranger(&format!("{path}: {other}"))),
        }
    }
}

fn connector(ca: &Path) -> Result<TlsConnector, String> {
    let wrong = |e: &dyn std::fmt::Display| {
        format!("top: --ca {}: {e}; give a PEM file with a certificate", ca.display())
    };
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca).map_err(|e| wrong(&e))? {
        roots.add(certificate.map_err(|e| wrong(&e))?).map_err(|e| wrong(&e))?;
    }
    if roots.is_empty() {
        return Err(wrong(&"it holds no certificate"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong(&e))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

fn server_name(host: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(host.to_owned()).map_err(|e| format!("'{host}' is no name of a server: {e}"))
}

/// The objectives of the classes, if all of them promise the same.
fn objectives(config: &serde_json::Value) -> Option<Objectives> {
    let classes = config.pointer("/scheduler/classes")?.as_array()?;
    let mut promises = classes.iter().map(|class| {
        let seconds = |name: &str| Some(class.get(name)?.as_u64()? as f64 / 1e6);
        Some(Objectives { ttft_s: seconds("ttft_us")?, tbt_s: seconds("tbt_us")? })
    });
    let first = promises.next()??;
    promises.all(|other| other == Some(first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn error(url: &str) -> String {
        Client::new(url, None, None).err().unwrap_or_else(|| panic!("{url} was taken"))
    }

    #[test]
    fn wrong_addresses_are_explained() {
        for url in ["", "127.0.0.1:8080", "ftp://x", "/admin", "http://"] {
            let error = error(url);
            assert!(error.contains("http://127.0.0.1:8080"), "{url}: {error}");
        }
        assert!(error("https://x").contains("--ca"));
        let missing = Client::new("https://x", None, Some(Path::new("/no/such.pem"))).err();
        assert!(missing.is_some_and(|e| e.contains("/no/such.pem") && e.contains("PEM")));
        let key = Client::new("http://x", Some("a\nb"), None).err();
        assert!(key.is_some_and(|e| e.contains("--key")));
    }

    #[test]
    fn ports_and_bracketed_addresses_are_understood() {
        let at = |url: &str| Client::new(url, None, None).map(|c| (c.host, c.port));
        assert_eq!(at("http://h"), Ok(("h".into(), 80)));
        assert_eq!(at("http://[::1]:81/x"), Ok(("::1".into(), 81)));
    }

    #[test]
    fn an_objective_is_known_only_if_all_classes_share_it() {
        let class = |ttft: u64| json!({"ttft_us": ttft, "tbt_us": 100_000});
        let of = |list: &[serde_json::Value]| objectives(&json!({"scheduler": {"classes": list}}));
        let one = Some(Objectives { ttft_s: 30.0, tbt_s: 0.1 });
        assert_eq!(of(&[class(30_000_000)]), one);
        assert_eq!(of(&[class(30_000_000), class(30_000_000)]), one);
        assert_eq!(of(&[class(30_000_000), class(1)]), None);
        assert_eq!((of(&[]), objectives(&json!({}))), (None, None));
    }
}
