//! Asking a service: one connection a look, every wait and every answer bounded.

use std::path::Path;
use std::time::{Duration, Instant};

use baton_http::{Error, Options, Trust, Url, bearer};
use bytes::Bytes;
use http::header::{AUTHORIZATION, HeaderValue};
use http::{Request, StatusCode};
use http_body_util::Full;

use super::scrape::Scrape;
use super::{Objectives, Sample};
use crate::conductor::Status;

/// A look that takes longer has failed.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// Longest answer that is read, bytes: that of 4,096 nodes has room in it.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Where a service is, and how it is asked.
#[derive(Clone)]
pub struct Client {
    base: String,
    key: Option<HeaderValue>,
    http: baton_http::Client,
}

impl Client {
    /// A client of the service at `url`, showing `key`, trusting the certificate in `ca`.
    ///
    /// # Errors
    /// Names what is wrong with the address, the key or the file.
    pub fn new(url: &str, key: Option<&str>, ca: Option<&Path>) -> Result<Self, String> {
        let wrong = |why| format!("top: {url}: {why}; give an address like http://127.0.0.1:8080");
        let parsed = Url::parse(url).map_err(wrong)?;
        let key = key.map(bearer).transpose();
        let key = key.map_err(|_| "top: --key holds characters that no header may; check it".to_owned())?;
        let trust = match (parsed.is_secure(), ca) {
            (true, Some(ca)) => {
                let wrong =
                    |e| format!("top: --ca {}: {e}; give a PEM file with a certificate", ca.display());
                Trust::of_file(ca).map_err(wrong)?
            }
            (true, None) => {
                return Err(format!("top: {url}: give the certificate to trust with --ca FILE, in PEM"));
            }
            (false, _) => Trust::nobody(),
        };
        let options = Options { idle_connections: 1, trust, ..Options::new(TIME_LIMIT) };
        Ok(Self { base: parsed.base(), key, http: baton_http::Client::new(options) })
    }

    /// The service's address.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The response of `/admin/status`, unchanged.
    ///
    /// # Errors
    /// In words: nothing answers, or it refuses.
    pub async fn status_text(&self) -> Result<String, String> {
        self.within(async {
            let body = self.get("/admin/status").await?;
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
            let body = self.get("/admin/status").await?;
            let status: Status = serde_json::from_slice(&body).map_err(|e| self.version_mismatch(&e))?;
            let metrics = self.get("/metrics").await?;
            let config = self.get("/admin/config").await?;
            let config = serde_json::from_slice(&config).map_err(|e| self.version_mismatch(&e))?;
            let scrape = Scrape::read(&String::from_utf8_lossy(&metrics));
            Ok(Sample { at: Instant::now(), status, scrape, objectives: objectives(&config) })
        })
        .await
    }

    fn version_mismatch(&self, error: &dyn std::fmt::Display) -> String {
        format!(
            "top: {} answers, but not as this version of baton does ({error}); use the same baton on both ends",
            self.base
        )
    }

    async fn within<T>(&self, asked: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        tokio::time::timeout(TIME_LIMIT, asked).await.unwrap_or_else(|_| {
            Err(format!(
                "top: {}: no answer within {} s; see whether it is overloaded or a firewall is between",
                self.base,
                TIME_LIMIT.as_secs()
            ))
        })
    }

    async fn get(&self, path: &str) -> Result<Bytes, String> {
        let base = &self.base;
        let failed = |e: Error| match e {
            Error::Connect(_) => {
                format!(
                    "top: {base}: {e}; start 'baton up' or 'baton serve' there, or say where it is with --url"
                )
            }
            Error::Tls(_) => {
                format!("top: {base}: {e}; check that --ca is what this server's certificate is signed with")
            }
            _ => format!("top: {base}{path}: {e}; look again"),
        };
        let mut request = Request::get(format!("{base}{path}"));
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        let request = request.body(Full::default()).expect("a checked URL and a path of our own are a URL");
        let (status, body) = self.http.send_and_collect(request, MAX_ANSWER_BYTES).await.map_err(failed)?;
        match status {
            StatusCode::OK => Ok(body),
            StatusCode::UNAUTHORIZED => Err(format!(
                "top: {}: operators only; give the configuration's service.admin_key with --key or BATON_ADMIN_KEY",
                self.base
            )),
            other => Err(self.version_mismatch(&format!("{path}: {other}"))),
        }
    }
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
