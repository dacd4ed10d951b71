//! Joining a peer: its snapshot over HTTP, resumed where it broke off.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::error::{IndexerError, Kind};
use crate::service::Indexer;
use crate::snapshot::Reader;

/// Times that a peer is asked without anything new coming of it.
const ATTEMPTS: u32 = 5;
/// Wait between two of them.
const PAUSE: Duration = Duration::from_millis(500);
/// Silence after which a peer is asked anew.
const PATIENCE: Duration = Duration::from_secs(30);

/// Takes over what a peer knows, and follows its publishers; gives streams and blocks.
///
/// A connection that breaks off costs the stream that was under way: the next one goes on after the last whole one.
///
/// # Errors
/// `Invalid` for a URL that is none or a snapshot that is not for us, `Unavailable` where the peer cannot be reached
/// after several attempts, `Corrupt` where what it sends is. What came before is kept.
pub async fn join(indexer: &Arc<Indexer>, url: &str) -> Result<(u64, u64), IndexerError> {
    let host = authority(url)?;
    let mut joined = Joined::default();
    let mut failures = 0;
    loop {
        let before = joined.streams;
        match fetch(indexer, &host, &mut joined).await {
            Ok(()) => return Ok((joined.streams, joined.blocks)),
            Err(e) if e.kind != Kind::Unavailable => return Err(e),
            Err(e) => {
                failures = if joined.streams > before { 1 } else { failures + 1 };
                if failures >= ATTEMPTS {
                    return Err(IndexerError::new(e.kind, format!("join {url}: {e}; start the peer first")));
                }
                tracing::warn!("indexer: join {url}: {e}; asking again");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[derive(Default)]
struct Joined {
    streams: u64,
    blocks: u64,
    /// Key of the last stream that came whole.
    last: Option<String>,
}

fn authority(url: &str) -> Result<String, IndexerError> {
    let wrong = || IndexerError::invalid(format!("join: '{url}' is no URL of a peer; say http://HOST:PORT"));
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/" | "/snapshot") {
        return Err(wrong());
    }
    let authority = uri.authority().ok_or_else(wrong)?;
    Ok(format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(13333)))
}

fn unavailable(what: &str, e: &dyn std::fmt::Display) -> IndexerError {
    IndexerError::new(Kind::Unavailable, format!("{what}: {e}"))
}

async fn fetch(indexer: &Arc<Indexer>, host: &str, joined: &mut Joined) -> Result<(), IndexerError> {
    let late = |what: &'static str| move |_| unavailable(what, &"nothing came for too long");
    let stream = timeout(PATIENCE, TcpStream::connect(host)).await.map_err(late("connect"))?;
    let stream = TokioIo::new(stream.map_err(|e| unavailable("connect", &e))?);
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(stream).await.map_err(|e| unavailable("handshake", &e))?;
    let driving = tokio::spawn(async move {
        if let Err(e) = connection.await {
            tracing::debug!("indexer: join: connection: {e}");
        }
    });
    let after = joined.last.as_ref().map(|key| format!("?after={}", hex(key.as_bytes()))).unwrap_or_default();
    let request = Request::get(format!("/snapshot{after}")).header(header::HOST, host);
    let request =
        request.body(Empty::<Bytes>::new()).map_err(|e| IndexerError::invalid(format!("join: {e}")))?;
    let answer = timeout(PATIENCE, sender.send_request(request)).await.map_err(late("ask"))?;
    let mut answer = answer.map_err(|e| unavailable("ask", &e))?;
    if answer.status() != StatusCode::OK {
        let message = format!("join: the peer answers {}; is it an indexer?", answer.status());
        return Err(IndexerError::invalid(message));
    }
    let mut reader = Reader::new(indexer.seed());
    while let Some(frame) = timeout(PATIENCE, answer.frame()).await.map_err(late("receive"))? {
        let frame = frame.map_err(|e| unavailable("receive", &e))?;
        let Ok(data) = frame.into_data() else { continue };
        reader.push(&data);
        while let Some(section) = reader.next_section()? {
            let (key, blocks) = (section.registration.key(), section.blocks() as u64);
            if indexer.adopt(section)? {
                (joined.streams, joined.blocks) = (joined.streams + 1, joined.blocks + blocks);
            }
            joined.last = Some(key);
        }
    }
    driving.abort();
    // An answer that ends early is a connection that broke off, whatever its framing says.
    if reader.is_whole() { reader.finish() } else { Err(unavailable("receive", &"the snapshot stops early")) }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_named_by_its_url() {
        assert_eq!(authority("http://10.0.0.1:9000").unwrap(), "10.0.0.1:9000");
        assert_eq!(authority("http://peer/snapshot").unwrap(), "peer:13333");
        for bad in ["peer:1", "https://peer:1", "http://peer:1/query", ""] {
            assert!(authority(bad).is_err(), "{bad}");
        }
        assert_eq!(hex(b"a|"), "617c");
    }
}
