//! Joining a peer: its snapshot over HTTP, resumed where it broke off.

use std::sync::Arc;
use std::time::Duration;

use baton_http::{Client, Error, Options, Url, by, next_piece};
use http::{Request, StatusCode};
use http_body_util::Full;
use tokio::time::Instant;

use crate::error::{IndexerError, Kind};
use crate::service::Indexer;
use crate::snapshot::Reader;

/// Times that a peer is asked without anything new coming of it.
const ATTEMPTS: u32 = 5;
/// Wait between two of them.
const PAUSE: Duration = Duration::from_millis(500);
/// Silence after which a peer is asked anew.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// Takes over what a peer knows, and follows its publishers; gives streams and blocks.
///
/// A connection that breaks off costs the stream that was under way: the next one goes on after the last whole one.
///
/// # Errors
/// `Invalid` for a malformed URL or a snapshot that is not for us. `Unavailable` where the peer cannot be reached after
/// several attempts. `Corrupt` where the peer's data is. The streams before the error are kept.
pub async fn join(indexer: &Arc<Indexer>, url: &str) -> Result<(u64, u64), IndexerError> {
    let base = base_of(url)?;
    let client = Client::new(Options::new(TIME_LIMIT));
    let mut joined = JoinProgress::default();
    let mut failures = 0;
    loop {
        let before = joined.streams;
        match fetch(indexer, (&client, &base), &mut joined).await {
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
struct JoinProgress {
    streams: u64,
    blocks: u64,
    /// Key of the last stream that came whole.
    last: Option<String>,
}

/// Scheme, host and port of a peer.
fn base_of(url: &str) -> Result<String, IndexerError> {
    let peer = Url::parse(url).ok().filter(|peer| !peer.is_secure());
    let peer = peer.filter(|peer| matches!(peer.uri().path(), "" | "/" | "/snapshot"));
    let wrong = || IndexerError::invalid(format!("join: '{url}' is no URL of a peer; say http://HOST:PORT"));
    Ok(peer.ok_or_else(wrong)?.base_at(13333))
}

fn unavailable(what: &str, e: &dyn std::fmt::Display) -> IndexerError {
    IndexerError::new(Kind::Unavailable, format!("{what}: {e}"))
}

/// Waits for a part of a peer's answer, within the time limit.
async fn part<T>(what: &str, work: impl Future<Output = Result<T, Error>>) -> Result<T, IndexerError> {
    by(Instant::now() + TIME_LIMIT, work).await.map_err(|e| match e {
        Error::Late => unavailable(what, &"nothing came for too long"),
        Error::Connect(_) => unavailable("connect", &e),
        e => unavailable(what, &e),
    })
}

async fn fetch(
    indexer: &Arc<Indexer>,
    (client, base): (&Client, &str),
    joined: &mut JoinProgress,
) -> Result<(), IndexerError> {
    let after = joined.last.as_ref().map(|key| format!("?after={}", hex(key.as_bytes()))).unwrap_or_default();
    let request = Request::get(format!("{base}/snapshot{after}")).body(Full::default());
    let request = request.map_err(|e| IndexerError::invalid(format!("join: {e}")))?;
    let answer = part("ask", client.send(request)).await?;
    if answer.status() == StatusCode::SERVICE_UNAVAILABLE {
        return Err(unavailable("ask", &"the peer sends as many snapshots as it may at a time"));
    }
    if answer.status() != StatusCode::OK {
        let message = format!("join: the peer answers {}; is it an indexer?", answer.status());
        return Err(IndexerError::invalid(message));
    }
    let (mut body, mut reader) = (answer.into_body(), Reader::new(indexer.seed()));
    while let Some(piece) = part("receive", next_piece(&mut body)).await? {
        reader.push(&piece);
        while let Some(section) = reader.next_section()? {
            let (key, blocks) = (section.registration.key(), section.blocks() as u64);
            if indexer.adopt(section)? {
                (joined.streams, joined.blocks) = (joined.streams + 1, joined.blocks + blocks);
            }
            joined.last = Some(key);
        }
    }
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
        assert_eq!(base_of("http://10.0.0.1:9000").unwrap(), "http://10.0.0.1:9000");
        assert_eq!(base_of("http://peer/snapshot").unwrap(), "http://peer:13333");
        for bad in ["peer:1", "https://peer:1", "http://peer:1/query", ""] {
            assert!(base_of(bad).is_err(), "{bad}");
        }
        assert_eq!(hex(b"a|"), "617c");
    }
}
