//! The endpoint that load is offered to.

use std::time::Duration;

use baton_types::Secret;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;

/// Longest error or model list that is read, bytes.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// A connection that takes longer has failed.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the list of models.
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);

/// Speaks HTTP/1.1 over as many connections as there are requests in flight.
pub type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// A client whose small writes go out at once.
pub fn http_client() -> HttpClient {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector)
}

/// Where an endpoint is and how it is addressed.
#[derive(Clone, Debug)]
pub struct Target {
    base: String,
    authorization: Option<HeaderValue>,
}

/// What an endpoint says about a model that it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// Its name.
    pub name: String,
    /// Tokens in its vocabulary, when told.
    pub vocab_tokens: Option<u32>,
    /// Longest prompt and answer together, when told.
    pub max_model_tokens: Option<u64>,
}

impl Target {
    /// The endpoint at `url`, with or without a trailing `/v1`; requests carry `api_key` when given.
    pub fn new(url: &str, api_key: Option<&Secret<String>>) -> Result<Self, String> {
        let uri: Uri =
            url.parse().map_err(|e| format!("live: {url} is no URL: {e}; give one like http://host:8000"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(format!(
                    "live: {url}: only plain http is spoken here; offer the load behind TLS"
                ));
            }
            _ => return Err(format!("live: {url} is no URL; give one like http://host:8000")),
        }
        if uri.host().is_none_or(str::is_empty) {
            return Err(format!("live: {url} names no host; give one like http://host:8000"));
        }
        let authorization =
            api_key.map(|key| HeaderValue::from_str(&format!("Bearer {}", key.expose()))).transpose();
        let mut authorization =
            authorization.map_err(|_| "live: the API key holds characters that no header may".to_owned())?;
        if let Some(value) = &mut authorization {
            value.set_sensitive(true);
        }
        let base = url.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/').to_owned();
        Ok(Self { base, authorization })
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
    pub async fn models(&self, client: &HttpClient) -> Result<Vec<ModelCard>, String> {
        let failed = |why: String| {
            format!("live: {}/v1/models: {why}; check the URL and that the server is up", self.base)
        };
        let asked = async {
            let request = self.request(Method::GET, "/v1/models", Bytes::new());
            let response = client.request(request).await.map_err(|e| chain(&e))?;
            let status = response.status();
            if !status.is_success() {
                return Err(format!("answered {status}"));
            }
            let body = Limited::new(response.into_body(), MAX_BODY_BYTES)
                .collect()
                .await
                .map_err(|e| e.to_string())?;
            serde_json::from_slice::<Value>(&body.to_bytes()).map_err(|e| e.to_string())
        };
        let list = match tokio::time::timeout(MODELS_TIMEOUT, asked).await {
            Ok(list) => list.map_err(failed)?,
            Err(_) => return Err(failed("no answer within 10 s".into())),
        };
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

/// An error with its causes: the outermost alone often says only "client error".
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
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
            let error = Target::new(url, None).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        assert!(Target::new("http://h", Some(&"a\nb".into())).is_err_and(|e| e.contains("API key")));
    }

    #[test]
    fn a_model_says_its_sizes_in_one_of_several_ways() {
        let told = card(&json!({"id": "m", "max_model_len": 4096, "meta": {"n_vocab": 512}})).unwrap();
        assert_eq!((told.vocab_tokens, told.max_model_tokens), (Some(512), Some(4096)));
        assert_eq!(card(&json!({"id": "m"})).unwrap().vocab_tokens, None);
        assert_eq!(card(&json!({"object": "model"})), None);
    }
}
