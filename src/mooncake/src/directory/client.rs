//! Asks a metadata server for a value.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::error::{Kind, MooncakeError, Result};

/// Bytes of a value at most.
const VALUE_BYTES: usize = 1 << 20;
/// What is being done, in errors.
const STAGE: &str = "metadata lookup";

/// The value of `key` at the metadata server `url`, `http://HOST:PORT/metadata`.
///
/// # Errors
/// When nobody answers within `within_us`, there is no such key, or the value is too long.
pub async fn lookup(url: &str, key: &str, within_us: u64) -> Result<Bytes> {
    let within = Duration::from_micros(within_us);
    tokio::time::timeout(within, ask(url, key)).await.map_err(|_| {
        let message = format!("no answer within {} ms; try again", within.as_millis());
        MooncakeError::new(Kind::Unavailable, STAGE, url, message)
    })?
}

async fn ask(url: &str, key: &str) -> Result<Bytes> {
    let unavailable = |message: String| MooncakeError::new(Kind::Unavailable, STAGE, url, message);
    let parsed: http::Uri = url.parse().map_err(|_| not_a_url(url))?;
    let (Some("http"), Some(host)) = (parsed.scheme_str(), parsed.host()) else { return Err(not_a_url(url)) };
    let port = parsed.port_u16().unwrap_or(80);
    let stream = TcpStream::connect((host.trim_matches(['[', ']']), port))
        .await
        .map_err(|e| unavailable(format!("{e}; is the metadata server running?")))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| unavailable(e.to_string()))?;
    let connection = tokio::spawn(connection);
    let request = Request::get(format!("{}?key={}", parsed.path(), escaped(key)))
        .header(header::HOST, format!("{host}:{port}"))
        .body(Empty::<Bytes>::new())
        .map_err(|e| MooncakeError::new(Kind::Invalid, STAGE, url, e.to_string()))?;
    let answered = async {
        let answer = sender.send_request(request).await.map_err(|e| unavailable(e.to_string()))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), VALUE_BYTES).collect().await;
        let body = body.map_err(|e| MooncakeError::new(Kind::Corrupt, STAGE, url, e.to_string()))?;
        Ok((status, body.to_bytes()))
    }
    .await;
    connection.abort();
    match answered? {
        (StatusCode::OK, body) => Ok(body),
        (StatusCode::NOT_FOUND, _) => {
            let message = format!("there is no {key}: its engine is not up, or uses another metadata server");
            Err(MooncakeError::new(Kind::Absent, STAGE, url, message))
        }
        (status, _) => Err(unavailable(format!("it answers {status}; see its log"))),
    }
}

fn not_a_url(url: &str) -> MooncakeError {
    MooncakeError::new(Kind::Invalid, STAGE, url, "say http://HOST:PORT/metadata")
}

fn escaped(key: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    key.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
