//! Calls to one engine: a bounded pool of connections, bounded answers, and time limits that are the caller's.

use std::sync::Arc;
use std::time::Duration;

use baton_http::{Client, Error, Incoming, Options, Url, bearer, by, whole};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Method, Request, Response, StatusCode};
use http_body::Body as _;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::error::{Kind, RemoteError, Side, Stage};
use crate::fields::WrittenBody;
use crate::settings::RemoteSettings;

/// A connection that has been idle for longer is not used again: the engines' servers close theirs after five
/// seconds, and a request that meets the close is lost.
const IDLE_TIME: Duration = Duration::from_secs(2);
/// How long an engine that answers 429 or 503 takes nothing new if it does not say, and the longest that is believed, s.
const BUSY_S: u64 = 1;
const BUSY_MOST_S: u64 = 60;
/// Most of an engine's words that an error repeats.
const QUOTED_CHARS: usize = 400;

/// A call's name, time limit and extra headers.
pub(crate) struct Call<'a> {
    pub(crate) stage: Stage,
    pub(crate) path: &'a str,
    /// Another server than the engine, such as a bootstrap server. It does not get the engine's key.
    pub(crate) elsewhere: Option<&'a str>,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    /// When the answer's head has to be there, and the whole answer where it comes in one piece.
    pub(crate) until: Instant,
}

/// An answer whose head is there. It keeps its place among the calls in flight until it is dropped.
pub(crate) struct Answer {
    pub(crate) body: Incoming,
    pub(crate) place: OwnedSemaphorePermit,
}

/// The way to one engine.
pub(crate) struct Wire {
    client: Client<WrittenBody>,
    /// For pages, a connection each: one that was kept may have been closed by the engine, and that is not bad health.
    page_client: Client<WrittenBody>,
    base: String,
    host: String,
    authorization: Option<HeaderValue>,
    places: Arc<Semaphore>,
    page_bytes: usize,
    answer_bytes: usize,
}

impl Wire {
    pub(crate) fn new(settings: &RemoteSettings) -> Result<Self, RemoteError> {
        let (base, host) = base_of(&settings.url)?;
        let authorization = settings.api_key.as_ref().map(|key| bearer(key.expose())).transpose();
        let authorization = authorization.map_err(|_| {
            RemoteError::ours(Stage::Settings, "the API key holds characters that no header may")
                .remedy("give the key as the engine was given it")
        })?;
        let options = Options::new(Duration::from_micros(settings.timeouts.connect_us));
        let page_client = Client::new(options.clone());
        let client = Client::new(Options {
            idle_connections: settings.bounds.idle_connections,
            idle_time: IDLE_TIME,
            ..options
        });
        Ok(Self {
            client,
            page_client,
            base,
            host,
            authorization,
            places: Arc::new(Semaphore::new(settings.bounds.calls)),
            page_bytes: settings.bounds.page_bytes,
            answer_bytes: settings.bounds.answer_bytes,
        })
    }

    /// The engine's host, without a port.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// The engine's address as `http://host:port`.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// A page in one piece, whatever its status. Pages have no place among the calls: health is asked of a full engine too.
    pub(crate) async fn page(&self, call: Call<'_>) -> Result<(StatusCode, Bytes), RemoteError> {
        let stage = call.stage;
        let until = call.until;
        let response = self.send(&self.page_client, Method::GET, WrittenBody::default(), call).await?;
        let status = response.status();
        Ok((status, collect(response.into_body(), self.page_bytes, until, stage).await?))
    }

    /// Posts without waiting for more than the answer's head; for aborts.
    pub(crate) async fn post_only_head(&self, body: Bytes, call: Call<'_>) -> Result<(), RemoteError> {
        self.send(&self.client, Method::POST, body.into(), call).await.map(drop)
    }

    /// Posts a request once there is a place for it; a status other than 2xx is an error.
    pub(crate) async fn post(&self, body: WrittenBody, call: Call<'_>) -> Result<Answer, RemoteError> {
        let stage = call.stage;
        let until = call.until;
        let place = self.place(stage, until).await?;
        let response = self.send(&self.client, Method::POST, body, call).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(Answer { body: response.into_body(), place });
        }
        let after_s = retry_after_s(response.headers());
        let words = collect(response.into_body(), self.page_bytes, until, stage).await.unwrap_or_default();
        let error = refused(status, &words, stage);
        let busy_us = error.busy_us.map(|least_us| after_s.map_or(least_us, |after_s| after_s * 1_000_000));
        Err(RemoteError { busy_us, ..error })
    }

    /// A place among the calls in flight, in turn: a refusal would only bring the request back at once.
    async fn place(&self, stage: Stage, until: Instant) -> Result<OwnedSemaphorePermit, RemoteError> {
        let place = timeout_at(until, Arc::clone(&self.places).acquire_owned()).await;
        place.ok().and_then(Result::ok).ok_or_else(|| {
            let text = "as many requests were in flight all the time as the settings allow";
            RemoteError::new(Kind::Retry, Side::Us, stage, text)
                .remedy("send it when one has ended, or elsewhere")
        })
    }

    /// The whole of an answer that comes in one piece.
    pub(crate) async fn whole(
        &self,
        answer: Answer,
        until: Instant,
        stage: Stage,
    ) -> Result<Bytes, RemoteError> {
        collect(answer.body, self.answer_bytes, until, stage).await
    }

    async fn send(
        &self,
        client: &Client<WrittenBody>,
        method: Method,
        body: WrittenBody,
        call: Call<'_>,
    ) -> Result<Response<Incoming>, RemoteError> {
        let stage = call.stage;
        let base = call.elsewhere.map_or(self.base.as_str(), |base| base.trim_end_matches('/'));
        let uri = format!("{base}{}", call.path);
        let mut request = Request::builder().method(method).uri(&uri);
        if !body.is_end_stream() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.authorization
            && call.elsewhere.is_none()
        {
            request = request.header(AUTHORIZATION, key);
        }
        for (name, value) in call.headers {
            request = request.header(name, value);
        }
        let request = request.body(body).map_err(|error| {
            RemoteError::ours(stage, format!("{uri} cannot be called: {error}"))
                .remedy("give a URL like http://host:8000")
        })?;
        by(call.until, client.send(request)).await.map_err(|error| match error {
            Error::Late => RemoteError::retry(stage, format!("{uri} did not answer in time"))
                .remedy("see whether the engine is stuck, or give it more time"),
            error if error.is_connect() => {
                RemoteError::new(Kind::Unavailable, Side::Engine, Stage::Connect, format!("{uri}: {error}"))
            }
            error => {
                let text = format!("{uri}: the connection broke before an answer: {error}");
                RemoteError::retry(stage, text).cut_off()
            }
        })
    }
}

/// `http://host:port` of a URL, and its host.
pub(crate) fn base_of(url: &str) -> Result<(String, String), RemoteError> {
    let wrong = |why: &dyn std::fmt::Display| {
        RemoteError::ours(Stage::Settings, format!("{url:?}: {why}"))
            .remedy("give a URL like http://host:8000")
    };
    let parsed = Url::parse(url).map_err(|why| wrong(&why))?;
    if parsed.is_secure() {
        return Err(wrong(&"engines are spoken to in plain http"));
    }
    if parsed.uri().query().is_some() {
        return Err(wrong(&"it has a query"));
    }
    Ok((parsed.api_base(), parsed.host().to_owned()))
}

async fn collect(body: Incoming, most: usize, until: Instant, stage: Stage) -> Result<Bytes, RemoteError> {
    by(until, whole(body, most)).await.map_err(|error| match error {
        Error::TooLong(_) => {
            RemoteError::bug(stage, format!("the engine's answer is longer than {most} bytes"))
                .remedy("raise the bound if answers of that length are meant")
        }
        Error::Late => RemoteError::retry(stage, "the answer did not end in time")
            .remedy("see whether the engine is stuck, or give it more time"),
        error => {
            RemoteError::retry(stage, format!("the connection broke within the answer: {error}")).cut_off()
        }
    })
}

/// The error for a status other than 2xx.
pub(crate) fn refused(status: StatusCode, body: &[u8], stage: Stage) -> RemoteError {
    let words = quoted(body);
    let text = format!("the engine answered {}: {words}", status.as_u16());
    let error = match status.as_u16() {
        401 | 403 => RemoteError::ours(stage, text).remedy("give the engine's API key in the settings"),
        // The path and the model's name are ours, not the client's.
        404 | 405 => RemoteError::ours(stage, text)
            .remedy("check that the URL, the engine's kind and its model belong together"),
        408 | 425 | 429 => {
            RemoteError::retry(stage, text).remedy("send it when the engine has less to do, or elsewhere")
        }
        400..=499 => RemoteError::invalid(stage, text),
        503 => RemoteError::new(Kind::Unavailable, Side::Engine, stage, text),
        _ => RemoteError::retry(stage, text),
    };
    let error = error.status(status.as_u16());
    if matches!(status.as_u16(), 429 | 503) { error.busy(BUSY_S * 1_000_000) } else { error }
}

/// The seconds in an engine's Retry-After, within bounds. A date is not read: engines send none.
fn retry_after_s(headers: &HeaderMap) -> Option<u64> {
    let after_s: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(after_s.clamp(BUSY_S, BUSY_MOST_S))
}

/// The message in an engine's error, whichever of their shapes it has.
pub(crate) fn quoted(body: &[u8]) -> String {
    let words = match serde_json::from_slice::<Value>(body) {
        Ok(value) => message_of(&value),
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    let words = words.trim();
    if words.is_empty() { "(nothing)".to_owned() } else { words.chars().take(QUOTED_CHARS).collect() }
}

/// `error.message`, `error`, `message` or `detail`, or the whole.
pub(crate) fn message_of(value: &Value) -> String {
    let error = &value["error"];
    let places = [&error["message"], error, &value["message"], &value["detail"]];
    let found = places.into_iter().find_map(Value::as_str);
    found.map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked_and_shortened() {
        for url in ["http://a:8000", "http://a:8000/", "http://a:8000/v1", "http://a:8000/v1/"] {
            assert_eq!(base_of(url).unwrap(), ("http://a:8000".into(), "a".into()));
        }
        assert_eq!(base_of("http://[::1]:80").unwrap().1, "::1");
        for url in ["", "a:8000", "https://a", "http://", "ftp://a", "http://a/?q=1", "/x"] {
            let error = base_of(url).unwrap_err();
            assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Settings), "{url}");
        }
    }

    #[test]
    fn statuses_say_who_is_to_do_what() {
        let of = |status: u16, body: &str| {
            let error = refused(StatusCode::from_u16(status).unwrap(), body.as_bytes(), Stage::Start);
            (error.kind, error.side)
        };
        assert_eq!(of(400, "{}"), (Kind::Invalid, Side::Client));
        assert_eq!(of(404, r#"{"detail":"Not Found"}"#), (Kind::Invalid, Side::Us));
        assert_eq!(
            of(404, r#"{"error":{"message":"The model `x` does not exist."}}"#),
            (Kind::Invalid, Side::Us)
        );
        assert_eq!(of(401, ""), (Kind::Invalid, Side::Us));
        assert_eq!(of(429, ""), (Kind::Retry, Side::Engine));
        assert_eq!(of(500, ""), (Kind::Retry, Side::Engine));
        assert_eq!(of(503, ""), (Kind::Unavailable, Side::Engine));
    }

    #[test]
    fn only_busy_engines_are_asked_later_and_within_bounds() {
        let busy_us = |status| refused(StatusCode::from_u16(status).unwrap(), b"", Stage::Start).busy_us;
        assert_eq!([429, 503].map(busy_us), [Some(1_000_000); 2]);
        assert_eq!([400, 404, 408, 500, 502].map(busy_us), [None; 5]);
        let after_s = |text: &'static str| {
            retry_after_s(&HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_static(text))]))
        };
        assert_eq!(["7", " 12 ", "0", "86400"].map(after_s), [7, 12, 1, 60].map(Some));
        assert_eq!(["", "-1", "1.5", "Sun, 29 Nov 2026 05:00:00 GMT"].map(after_s), [None; 4]);
        assert_eq!(retry_after_s(&HeaderMap::new()), None);
    }

    #[test]
    fn every_shape_of_error_is_quoted() {
        // Shapes as seen in faults_nixl.json, faults_sglang.json and vllm_basic.json.
        for (body, words) in [
            (r#"{"error":{"message":"Internal server error","code":500}}"#, "Internal server error"),
            (
                r#"{"object":"error","message":"Prefill bootstrap failed","code":500}"#,
                "Prefill bootstrap failed",
            ),
            (r#"{"detail":"Not Found"}"#, "Not Found"),
            (r#"{"error":"full"}"#, "full"),
            ("Internal Server Error", "Internal Server Error"),
            ("", "(nothing)"),
            (r#"{"x":1}"#, r#"{"x":1}"#),
        ] {
            assert_eq!(quoted(body.as_bytes()), words);
        }
        assert_eq!(quoted("y".repeat(9_999).as_bytes()).len(), QUOTED_CHARS);
    }
}
