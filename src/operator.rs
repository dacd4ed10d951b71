//! Asking a running service as its operator does: `/metrics` and `/admin`, with the key, every wait and answer bounded.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Error, Result, anyhow, bail};
use baton_http::{Options, Trust, Url, bearer};
use baton_types::Secret;
use bytes::Bytes;
use http::header::{AUTHORIZATION, ETAG, HeaderValue, IF_MATCH};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};

/// A call that takes longer has failed.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// Longest answer that is read, bytes: that of 4,096 nodes has room in it.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Where a service is, and how an operator is let in.
#[derive(clap::Args)]
pub struct OperatorArgs {
    /// The front door of `baton up` or `baton serve`
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// The configuration's service.admin_key
    #[arg(long, env = "BATON_ADMIN_KEY", hide_env_values = true)]
    key: Option<Secret<String>>,
    /// Certificate to trust, PEM: for https
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

impl OperatorArgs {
    /// The client of a command, whose errors begin with its name.
    ///
    /// # Errors
    /// As [`OperatorClient::new`].
    pub fn client(&self, command: &'static str) -> Result<OperatorClient> {
        let key = self.key.as_ref().map(|key| key.expose().as_str());
        OperatorClient::new((command, &self.url), key, self.ca.as_deref())
    }
}

/// An operator's client of one service.
#[derive(Clone)]
pub struct OperatorClient {
    command: &'static str,
    base: String,
    key: Option<HeaderValue>,
    http: baton_http::Client,
}

/// What a service answers.
pub struct OperatorAnswer {
    /// What distinguishes it from later answers, if the service says.
    pub tag: Option<HeaderValue>,
    /// Its content.
    pub body: Bytes,
}

impl OperatorClient {
    /// A client of the service at an address, showing `key`, trusting the certificate in `ca`.
    ///
    /// # Errors
    /// Names what is wrong with the address, the key or the file.
    pub fn new((command, url): (&'static str, &str), key: Option<&str>, ca: Option<&Path>) -> Result<Self> {
        let wrong = |why| anyhow!("{command}: {url}: {why}; give an address like http://127.0.0.1:8080");
        let parsed = Url::parse(url).map_err(wrong)?;
        let key = key.map(bearer).transpose().ok();
        let key =
            key.with_context(|| format!("{command}: --key holds characters that no header may; check it"))?;
        let trust = match (parsed.is_secure(), ca) {
            (true, Some(ca)) => {
                let wrong =
                    |e| anyhow!("{command}: --ca {}: {e}; give a PEM file with a certificate", ca.display());
                Trust::of_file(ca).map_err(wrong)?
            }
            (true, None) => {
                bail!("{command}: {url}: give the certificate to trust with --ca FILE, in PEM");
            }
            (false, _) => Trust::nobody(),
        };
        let options = Options { idle_connections: 1, trust, ..Options::new(TIME_LIMIT) };
        Ok(Self { command, base: parsed.base(), key, http: baton_http::Client::new(options) })
    }

    /// The service's address.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The error for an answer that another version gives.
    pub fn version_mismatch(&self, error: &dyn std::fmt::Display) -> Error {
        anyhow!(
            "{}: {} answers, but not as this version of baton does ({error}); use the same baton on both ends",
            self.command,
            self.base
        )
    }

    /// The result of several calls, which take no longer than one may.
    ///
    /// # Errors
    /// Those of the calls, or that there was no answer in time.
    pub async fn within<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::time::timeout(TIME_LIMIT, asked).await.unwrap_or_else(|_| {
            bail!(
                "{}: {}: no answer within {} s; see whether it is overloaded or a firewall is between",
                self.command,
                self.base,
                TIME_LIMIT.as_secs()
            )
        })
    }

    /// Reads a path.
    ///
    /// # Errors
    /// In words: nothing answers, or it refuses.
    pub async fn get(&self, path: &str) -> Result<OperatorAnswer> {
        self.call(Request::get(format!("{}{path}", self.base)), path, Bytes::new()).await
    }

    /// Posts to a path; with a tag only if what it is about still has that tag.
    ///
    /// # Errors
    /// In words: nothing answers, or why the service refuses.
    pub async fn post(&self, path: &str, body: &str, basis: Option<&HeaderValue>) -> Result<OperatorAnswer> {
        let mut request = Request::builder().method(Method::POST).uri(format!("{}{path}", self.base));
        if let Some(tag) = basis {
            request = request.header(IF_MATCH, tag);
        }
        self.call(request, path, Bytes::copy_from_slice(body.as_bytes())).await
    }

    async fn call(&self, request: http::request::Builder, path: &str, body: Bytes) -> Result<OperatorAnswer> {
        let (command, base) = (self.command, &self.base);
        let failed = |e: baton_http::Error| match e {
            baton_http::Error::Connect(_) => {
                anyhow!(
                    "{command}: {base}: {e}; start 'baton up' or 'baton serve' there, or say where it is with --url"
                )
            }
            baton_http::Error::Tls(_) => {
                anyhow!(
                    "{command}: {base}: {e}; check that --ca is what this server's certificate is signed with"
                )
            }
            _ => anyhow!("{command}: {base}{path}: {e}; look again"),
        };
        let request = match &self.key {
            Some(key) => request.header(AUTHORIZATION, key),
            None => request,
        };
        let request = request.body(Full::new(body)).expect("a checked URL and a path of our own are a URL");
        let answer = self.http.send(request).await.map_err(failed)?;
        let (status, tag) = (answer.status(), answer.headers().get(ETAG).cloned());
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|e| anyhow!("{command}: {base}{path}: {e}; look again"))?.to_bytes();
        match status {
            StatusCode::OK => Ok(OperatorAnswer { tag, body }),
            StatusCode::UNAUTHORIZED => bail!(
                "{command}: {base}: operators only; give the configuration's service.admin_key with --key or BATON_ADMIN_KEY{}",
                if self.key.is_some() { " (it is not the key that was given)" } else { "" }
            ),
            other => match reason(&body) {
                Some(why) if other != StatusCode::NOT_FOUND => bail!("{command}: {base}: {why}"),
                _ => Err(self.version_mismatch(&format!("{path}: {other}"))),
            },
        }
    }
}

/// Why a service refuses, as it says itself.
fn reason(body: &[u8]) -> Option<String> {
    let error: serde_json::Value = serde_json::from_slice(body).ok()?;
    error.pointer("/error/message")?.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(url: &str) -> String {
        let error = OperatorClient::new(("top", url), None, None).err();
        error.unwrap_or_else(|| panic!("{url} was taken")).to_string()
    }

    #[test]
    fn wrong_addresses_are_explained() {
        for url in ["", "127.0.0.1:8080", "ftp://x", "/admin", "http://"] {
            let error = error(url);
            assert!(error.contains("http://127.0.0.1:8080"), "{url}: {error}");
        }
        assert!(error("https://x").contains("--ca"));
        let missing = OperatorClient::new(("top", "https://x"), None, Some(Path::new("/no/such.pem"))).err();
        assert!(
            missing.is_some_and(|e| e.to_string().contains("/no/such.pem") && e.to_string().contains("PEM"))
        );
        let key = OperatorClient::new(("top", "http://x"), Some("a\nb"), None).err();
        assert!(key.is_some_and(|e| e.to_string().contains("--key")));
    }

    #[test]
    fn a_refusal_is_repeated_in_the_words_of_the_service() {
        assert_eq!(
            reason(br#"{"error": {"message": "so it is", "code": null}}"#).as_deref(),
            Some("so it is")
        );
        assert_eq!((reason(b"{}"), reason(b"<html>")), (None, None));
    }
}
