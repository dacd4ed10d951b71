//! Asks a metadata server for a value.

use std::time::Duration;

use baton_http::{Client, Error, Options, Url, by};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Full;
use tokio::time::Instant;

use crate::error::{Kind, MooncakeError, Result};

/// Bytes of a value at most.
const VALUE_BYTES: usize = 1 << 20;
/// The stage in error texts.
const STAGE: &str = "metadata lookup";

/// The value of `key` at the metadata server `url`, `http://HOST:PORT/metadata`.
///
/// # Errors
/// When nobody answers within `within_us`, there is no such key, or the value is too long.
pub async fn lookup(url: &str, key: &str, within_us: u64) -> Result<Bytes> {
    let within = Duration::from_micros(within_us);
    let fail = |kind, message: String| MooncakeError::new(kind, STAGE, url, message);
    let server = Url::parse(url).ok().filter(|server| !server.is_secure());
    let server = server.ok_or_else(|| fail(Kind::Invalid, "say http://HOST:PORT/metadata".into()))?;
    let uri = format!("{}{}?key={}", server.base(), server.uri().path(), escaped(key));
    let request = Request::get(uri).body(Full::<Bytes>::default());
    let request = request.map_err(|e| fail(Kind::Invalid, e.to_string()))?;
    let client = Client::new(Options::new(within));
    let answered = by(Instant::now() + within, client.send_and_collect(request, VALUE_BYTES)).await.map_err(
        |e| match e {
            Error::Late => {
                fail(Kind::Unavailable, format!("no answer within {} ms; try again", within.as_millis()))
            }
            Error::Connect(_) => fail(Kind::Unavailable, format!("{e}; is the metadata server running?")),
            Error::TooLong(_) => fail(Kind::Corrupt, e.to_string()),
            e => fail(Kind::Unavailable, e.to_string()),
        },
    );
    match answered? {
        (StatusCode::OK, body) => Ok(body),
        (StatusCode::NOT_FOUND, _) => {
            let message = format!("there is no {key}: its engine is not up, or uses another metadata server");
            Err(fail(Kind::Absent, message))
        }
        (status, _) => Err(fail(Kind::Unavailable, format!("it answers {status}; see its log"))),
    }
}

fn escaped(key: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    key.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
