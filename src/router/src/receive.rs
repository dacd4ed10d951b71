//! Receiving a body: within its size and in time.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use baton_http::MemoryPool;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body;

use crate::error::ApiError;

/// Bytes that the router reads of a body that is too large, so that its sender gets to read the error.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIME: Duration = Duration::from_secs(2);
/// Memory that the router reserves at once for a body with an announced length. Most bodies fit, and a false
/// announcement costs at most this much.
const RESERVED_BYTES: usize = 256 << 10;

/// Within what a body is received.
pub(crate) struct Limits<'a> {
    pub(crate) bytes: usize,
    /// An operator can set `bytes`.
    pub(crate) is_setting: bool,
    pub(crate) within: Duration,
    pub(crate) bodies: &'a Arc<MemoryPool>,
}

/// The body is JSON if it says what it is, and not compressed.
pub(crate) fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let encoding = headers.get(header::CONTENT_ENCODING).map_or(&b""[..], |value| value.as_bytes());
    if !encoding.is_empty() && !encoding.eq_ignore_ascii_case(b"identity") {
        let encoding = String::from_utf8_lossy(encoding);
        let message = format!("content encoding {encoding:?} is not read here; send the body uncompressed");
        return Err(ApiError::new(415, message).code("unsupported_encoding"));
    }
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let kind = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") || kind.to_ascii_lowercase().ends_with("+json") {
        return Ok(());
    }
    let message = format!("content type {kind:?} is not read here; send application/json");
    Err(ApiError::new(415, message).code("unsupported_media_type"))
}

fn too_large(limits: &Limits<'_>) -> ApiError {
    let setting = if limits.is_setting { " (service.max_body_bytes)" } else { "" };
    ApiError::new(413, format!("the body has more than {} bytes{setting}; send less", limits.bytes))
        .code("body_too_large")
}

/// Reads the whole body.
pub(crate) async fn body<B>(headers: &HeaderMap, body: B, limits: Limits<'_>) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    let within = limits.within;
    let read = tokio::time::timeout(within, read(headers, body, limits));
    read.await.unwrap_or_else(|_| {
        let message = format!("the body did not arrive within {} ms; send it faster", within.as_millis());
        Err(ApiError::new(408, message).code("body_timeout"))
    })
}

async fn read<B>(headers: &HeaderMap, body: B, limits: Limits<'_>) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    let (mut body, mut room, limit_bytes) = (pin!(body), limits.bodies.room(), limits.bytes);
    let length =
        headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length > limit_bytes) {
        // Polling the body would ask for it.
        if !headers.contains_key(header::EXPECT) {
            discard(body).await;
        }
        return Err(too_large(&limits));
    }
    let mut first: Option<Bytes> = None;
    let mut whole = BytesMut::new();
    while let Some(data) = next_data(&mut body).await? {
        if whole.len() + first.as_ref().map_or(0, Bytes::len) + data.len() > limit_bytes {
            discard(body).await;
            return Err(too_large(&limits));
        }
        if let Err(full) = room.grow(data.len()) {
            discard(body).await;
            return Err(full.into());
        }
        match first.take() {
            None if whole.is_empty() => first = Some(data),
            Some(before) => {
                whole.reserve(length.unwrap_or(0).min(RESERVED_BYTES).max(before.len() + data.len()));
                whole.extend_from_slice(&before);
                whole.extend_from_slice(&data);
            }
            None => whole.extend_from_slice(&data),
        }
    }
    // A body that came in one piece is not copied.
    Ok(room.hold(first.unwrap_or_else(|| whole.freeze())))
}

async fn next_data<B>(body: &mut std::pin::Pin<&mut B>) -> Result<Option<Bytes>, ApiError>
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    loop {
        match std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            None => return Ok(None),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
            Some(Err(e)) => {
                let message = format!("the body broke off: {e}; send it again");
                return Err(ApiError::new(400, message).code("body_broken_off"));
            }
        }
    }
}

async fn discard<B>(mut body: std::pin::Pin<&mut B>)
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    let rest = async {
        let mut discarded = 0;
        while let Ok(Some(data)) = next_data(&mut body).await {
            discarded += data.len();
            if discarded > DISCARD_BYTES {
                break;
            }
        }
    };
    // A slower client finds the connection closed.
    let _ = tokio::time::timeout(DISCARD_TIME, rest).await;
}
