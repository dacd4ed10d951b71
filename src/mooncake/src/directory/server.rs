//! The directory over HTTP: bounded in connections, bodies and time.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{Directory, Unput};
use crate::listen::accept_each;

/// Headers of a request at most.
const MAX_HEADERS: usize = 64;
/// Bytes of a request's head at most.
const HEAD_BYTES: usize = 16 << 10;

type Answer = Response<Full<Bytes>>;

/// Serves `directory` on `listener` until `stop`.
pub async fn serve_directory(directory: Arc<Directory>, listener: TcpListener, stop: CancellationToken) {
    let settings = *directory.settings();
    accept_each("metadata", listener, settings.max_connections, stop, move |stream, peer| {
        let directory = Arc::clone(&directory);
        async move {
            if let Err(e) = stream.set_nodelay(true) {
                tracing::debug!("mooncake: metadata: nodelay: {e}");
            }
            let service = service_fn(move |request| {
                let directory = Arc::clone(&directory);
                async move { Ok::<_, Infallible>(answer(&directory, request).await) }
            });
            let served = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(Duration::from_micros(settings.receive_timeout_us))
                .max_headers(MAX_HEADERS)
                .max_buf_size(HEAD_BYTES)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(e) = served.await {
                tracing::debug!("mooncake: metadata connection of {peer}: {e}");
            }
        }
    })
    .await;
}

async fn answer<B>(directory: &Directory, request: Request<B>) -> Answer
where
    B: Body + Send + 'static,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let (parts, body) = request.into_parts();
    if parts.uri.path() != "/metadata" {
        return say(StatusCode::NOT_FOUND, "there is only /metadata?key=...");
    }
    let Some(key) = key_of(parts.uri.query().unwrap_or_default()) else {
        return say(StatusCode::BAD_REQUEST, "metadata key is required: /metadata?key=...");
    };
    match parts.method {
        Method::GET => match directory.get(&key) {
            Some(value) => with_body(StatusCode::OK, value),
            None => say(StatusCode::NOT_FOUND, "metadata not found"),
        },
        Method::PUT => match receive(body, directory).await {
            Ok(value) => put(directory, &key, value),
            Err((status, why)) => say(status, why),
        },
        Method::DELETE if directory.remove(&key) => say(StatusCode::OK, "metadata deleted"),
        Method::DELETE => say(StatusCode::NOT_FOUND, "metadata not found"),
        _ => say(StatusCode::METHOD_NOT_ALLOWED, "/metadata takes GET, PUT and DELETE"),
    }
}

fn put(directory: &Directory, key: &str, value: Bytes) -> Answer {
    match directory.put(key, value) {
        Ok(()) => say(StatusCode::OK, "metadata updated"),
        Err(Unput::Taken) => say(
            StatusCode::BAD_REQUEST,
            "this rpc_meta key is another engine's: choose another name, or delete it",
        ),
        Err(Unput::Long) => say(StatusCode::PAYLOAD_TOO_LARGE, "the key or the value is too long"),
        Err(Unput::Full) => {
            say(StatusCode::INSUFFICIENT_STORAGE, "the directory is full: delete what engines left behind")
        }
    }
}

async fn receive<B>(body: B, directory: &Directory) -> Result<Bytes, (StatusCode, &'static str)>
where
    B: Body + Send + 'static,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let settings = directory.settings();
    let within = Duration::from_micros(settings.receive_timeout_us);
    match tokio::time::timeout(within, Limited::new(body, settings.value_bytes).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) if e.is::<LengthLimitError>() => {
            Err((StatusCode::PAYLOAD_TOO_LARGE, "the value is too long"))
        }
        Ok(Err(_)) => Err((StatusCode::BAD_REQUEST, "the body broke off")),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the body took too long; send it faster")),
    }
}

fn say(status: StatusCode, text: &'static str) -> Answer {
    with_body(status, Bytes::from_static(text.as_bytes()))
}

/// Engines want this content type of every answer.
fn with_body(status: StatusCode, body: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// The key that a query names, if any.
fn key_of(query: &str) -> Option<String> {
    let raw = query.split('&').find_map(|field| field.strip_prefix("key="))?;
    let key = decoded(raw)?;
    let key = key.trim();
    (!key.is_empty()).then(|| key.to_owned())
}

/// Text of a query, its escapes undone; nothing where they are none.
fn decoded(raw: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(raw.len());
    let mut left = raw.bytes();
    while let Some(byte) = left.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(left.next()?).to_digit(16);
                (digit()? * 16 + digit()?) as u8
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_come_out_of_queries() {
        let long = "a=b&key=mooncake%2Fram%2F127.0.0.1%3A12%2b";
        assert_eq!(key_of(long).as_deref(), Some("mooncake/ram/127.0.0.1:12+"));
        assert_eq!(key_of("key=+a+b+").as_deref(), Some("a b"));
        for none in ["", "key=", "key=%20", "kay=1", "key=%", "key=%4", "key=%zz", "key=%ff"] {
            assert_eq!(key_of(none), None, "{none}");
        }
    }

    proptest! {
        #[test]
        fn any_query_is_read_or_refused(query in "\\PC*") {
            let _ = key_of(&query);
        }

        #[test]
        fn escaped_keys_come_back(key in "[a-z/:+ %é]{1,20}") {
            let escaped: String = key.bytes().map(|byte| format!("%{byte:02X}")).collect();
            let trimmed = key.trim();
            let expected = (!trimmed.is_empty()).then(|| trimmed.to_owned());
            prop_assert_eq!(key_of(&format!("key={escaped}")), expected);
        }
    }
}
