//! Receiving a body of the API: JSON, and what is wrong with one in the API's words.

use baton_http::{BodyError, BodyLimits};
use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::Body;

use crate::error::ApiError;

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

/// Reads the whole body. An operator can set its most bytes, or not.
pub(crate) async fn body<B>(
    headers: &HeaderMap,
    body: B,
    (limits, is_setting): (BodyLimits<'_>, bool),
) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error,
{
    baton_http::receive(headers, body, limits).await.map_err(|error| match error {
        BodyError::TooLong(bytes) => {
            let setting = if is_setting { " (service.max_body_bytes)" } else { "" };
            let message = format!("the body has more than {bytes} bytes{setting}; send less");
            ApiError::new(413, message).code("body_too_large")
        }
        BodyError::NoRoom(full) => full.into(),
        BodyError::Late => {
            let within_ms = limits.within.as_millis();
            let message = format!("the body did not arrive within {within_ms} ms; send it faster");
            ApiError::new(408, message).code("body_timeout")
        }
        BodyError::Broken(_) => ApiError::new(400, format!("{error}; send it again")).code("body_broken_off"),
    })
}
