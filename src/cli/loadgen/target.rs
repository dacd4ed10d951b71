//! The endpoint that load is offered to.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use baton_http::{Client, Error, Options, Url, bearer, by};
use baton_types::Secret;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::Value;
use tokio::time::Instant;

/// Longest error or model list that is read, bytes.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// A connection that takes longer has failed.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the list of models.
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);

/// An idle connection is kept for this long.
const IDLE_TIME: Duration = Duration::from_secs(90);

/// As many connections are kept as there were requests in flight.
pub fn client_options() -> Options {
    Options { idle_connections: usize::MAX, idle_time: IDLE_TIME, ..Options::new(CONNECT_TIMEOUT) }
}

/// The `authorization` of requests by the name of their class.
pub type ClassKeys = BTreeMap<String, HeaderValue>;

/// The header with a key.
pub fn authorization(key: &Secret<String>) -> Result<HeaderValue> {
    bearer(key.expose()).ok().context("the API key holds characters that no header may")
}

/// Where an endpoint is and how it is addressed.
#[derive(Clone, Debug)]
pub struct Target {
    base: String,
    authorization: Option<HeaderValue>,
}

/// An endpoint's description of a model that it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// Its name.
    pub name: String,
    /// Tokens in its vocabulary, if given.
    pub vocab_tokens: Option<u32>,
    /// Longest prompt and answer together, if given.
    pub max_model_tokens: Option<u64>,
}

impl Target {
    /// The endpoint at `url`, with or without a trailing `/v1`; requests carry `api_key` when given.
    pub fn new(url: &str, api_key: Option<&Secret<String>>) -> Result<Self> {
        let parsed = Url::parse(url).map_err(|e| anyhow!("{url}: {e}; give one like http://host:8000"))?;
        ensure!(!parsed.is_secure(), "{url}: only plain http is spoken here; offer the load behind TLS");
        let authorization = api_key.map(authorization).transpose()?;
        Ok(Self { base: parsed.api_base(), authorization })
    }

    /// The endpoint's address without a path.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// A JSON request to `path`.
    pub fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() =
            format!("{}{path}", self.base).parse().expect("a checked URL and a path of our own are a URL");
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(value) = &self.authorization {
            request.headers_mut().insert(AUTHORIZATION, value.clone());
        }
        request
    }

    /// The models that the endpoint lists.
    pub async fn models(&self, client: &Client) -> Result<Vec<ModelCard>> {
        let failed = |why: String| anyhow!("{}/v1/models: {why}", self.base);
        let check = "check the URL and that the server is up";
        let request = self.request(Method::GET, "/v1/models", Bytes::new());
        let asked = client.send_and_collect(request, MAX_BODY_BYTES);
        let (status, body) = by(Instant::now() + MODELS_TIMEOUT, asked).await.map_err(|e| match e {
            Error::Late => failed(format!("no answer within 10 s; {check}")),
            e => failed(format!("{e}; {check}")),
        })?;
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let remedy = match &self.authorization {
                Some(_) => "the key that was given is not one of its keys, or may not list models",
                None => "give --api-key, or set BATON_API_KEY",
            };
            return Err(failed(format!("answered {status}; {remedy}")));
        }
        if !status.is_success() {
            return Err(failed(format!("answered {status}; {check}")));
        }
        let list = serde_json::from_slice::<Value>(&body)
            .map_err(|e| failed(format!("the list of models is no JSON: {e}; {check}")))?;
        Ok(list["data"].as_array().into_iter().flatten().filter_map(card).collect())
    }
}

/// A model's entry: the names under which servers tell the sizes differ.
fn card(entry: &Value) -> Option<ModelCard> {
    let first = |paths: &[&str]| paths.iter().find_map(|path| entry.pointer(path)?.as_u64());
    let vocab =
        first(&["/vocab_tokens", "/vocab_size", "/meta/vocab_tokens", "/meta/vocab_size", "/meta/n_vocab"]);
    Some(ModelCard {
        name: entry["id"].as_str()?.to_owned(),
        vocab_tokens: vocab.and_then(|n| u32::try_from(n).ok()),
        max_model_tokens: first(&["/max_model_len", "/max_model_tokens", "/meta/max_model_len"]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_version_in_the_url_is_not_doubled() {
        for url in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            let target = Target::new(url, Some(&"k".into())).unwrap();
            let request = target.request(Method::POST, "/v1/completions", Bytes::new());
            assert_eq!(request.uri(), "http://h:1/v1/completions");
            assert_eq!(request.headers()[AUTHORIZATION], "Bearer k");
        }
    }

    #[test]
    fn what_is_no_plain_http_url_is_refused_with_a_remedy() {
        for (url, word) in [("h:1", "http://host"), ("https://h", "plain http"), ("/x", "http://host")] {
            let error = Target::new(url, None).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(
            Target::new("http://h", Some(&"a\nb".into())).is_err_and(|e| e.to_string().contains("API key"))
        );
    }

    #[test]
    fn a_model_says_its_sizes_in_one_of_several_ways() {
        let told = card(&json!({"id": "m", "max_model_len": 4096, "meta": {"n_vocab": 512}})).unwrap();
        assert_eq!((told.vocab_tokens, told.max_model_tokens), (Some(512), Some(4096)));
        assert_eq!(card(&json!({"id": "m"})).unwrap().vocab_tokens, None);
        assert_eq!(card(&json!({"object": "model"})), None);
    }
}
