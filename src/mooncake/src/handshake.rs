//! The handshake socket of engines: one question and one answer a connection, JSON both, with their kind before them.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use baton_http::accept_each;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::error::{Kind, MooncakeError, Result};
use crate::segment::SegmentMeta;

/// Bytes of a message at most, its kind included.
const MESSAGE_BYTES: u64 = 1 << 20;
/// Time for a whole handshake.
const TIME: Duration = Duration::from_secs(10);
/// Handshakes at once; further ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;
/// The stage in error texts.
const STAGE: &str = "handshake";

/// The subject of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topic {
    /// A connection between network cards.
    Connection,
    /// The metadata of the other side's segment.
    Metadata,
    /// A note.
    Note,
    /// Whether anybody is there.
    Probe,
}

impl Topic {
    /// The number of the topic.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Connection => 0,
            Self::Metadata => 1,
            Self::Note => 2,
            Self::Probe => 3,
        }
    }

    /// The topic of a number, if it has one.
    #[must_use]
    pub const fn of(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Connection),
            1 => Some(Self::Metadata),
            2 => Some(Self::Note),
            3 => Some(Self::Probe),
            _ => None,
        }
    }
}

/// A message as it is sent.
#[must_use]
pub fn encode(topic: Topic, json: &Value) -> Vec<u8> {
    let text = json.to_string();
    let mut bytes = (text.len() as u64 + 1).to_le_bytes().to_vec();
    bytes.push(topic.code());
    bytes.extend(text.as_bytes());
    bytes
}

/// Receives one message.
///
/// # Errors
/// When the peer breaks off, announces too much, or says what is no message.
pub async fn receive(from: &mut (impl AsyncRead + Unpin)) -> Result<(Topic, Value)> {
    let broken = |e: std::io::Error| {
        MooncakeError::new(Kind::Unavailable, STAGE, "", format!("the connection broke: {e}; try again"))
    };
    let mut length = [0; 8];
    from.read_exact(&mut length).await.map_err(broken)?;
    let length = u64::from_le_bytes(length);
    if length == 0 || length > MESSAGE_BYTES {
        let message = format!(
            "a message of {length} bytes is announced, 1 to {MESSAGE_BYTES} are read; is this a handshake port?"
        );
        return Err(MooncakeError::corrupt(STAGE, message));
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes).await.map_err(broken)?;
    let Some(topic) = Topic::of(bytes[0]) else {
        return Err(MooncakeError::corrupt(
            STAGE,
            format!("a message of kind {}, which there is not", bytes[0]),
        ));
    };
    let json = serde_json::from_slice(&bytes[1..])
        .map_err(|e| MooncakeError::corrupt(STAGE, format!("the message is not JSON: {e}")))?;
    Ok((topic, json))
}

/// Asks the engine at `peer`, HOST:PORT, for its segment's metadata. It sends none of our own.
///
/// # Errors
/// When it is not there in time, or does not say.
pub async fn ask(peer: &str) -> Result<SegmentMeta> {
    within(peer, async {
        let connected = TcpStream::connect(peer).await;
        let mut stream = connected.map_err(|e| {
            MooncakeError::new(Kind::Unavailable, STAGE, peer, format!("{e}; is the engine running there?"))
        })?;
        let question = encode(Topic::Metadata, &serde_json::json!({}));
        stream.write_all(&question).await.map_err(|e| {
            MooncakeError::new(
                Kind::Unavailable,
                STAGE,
                peer,
                format!("the connection broke: {e}; try again"),
            )
        })?;
        match receive(&mut stream).await.map_err(|e| e.named(peer))? {
            (Topic::Metadata, json) => SegmentMeta::parse(json).map_err(|e| e.named(peer)),
            (topic, _) => {
                let message = format!("it answers with a {topic:?}, not with what its segment is");
                Err(MooncakeError::new(Kind::Corrupt, STAGE, peer, message))
            }
        }
    })
    .await
}

async fn within<T>(peer: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(TIME, work).await.unwrap_or_else(|_| {
        let message = format!("no answer within {} s; try again", TIME.as_secs());
        Err(MooncakeError::new(Kind::Unavailable, STAGE, peer, message))
    })
}

/// Answers handshakes on `listener` with what `meta` says, until `stop`.
pub async fn serve_handshakes(meta: SegmentMeta, listener: TcpListener, stop: CancellationToken) {
    let meta = Arc::new(meta.to_json());
    accept_each("mooncake: handshake", listener, MAX_CONNECTIONS, &stop, |stream, peer| {
        let (meta, stop) = (Arc::clone(&meta), stop.clone());
        async move {
            let peer = peer.to_string();
            let answered = stop.run_until_cancelled(within(&peer, answer(&meta, stream)));
            if let Some(Err(e)) = answered.await {
                tracing::debug!("{e}");
            }
        }
    })
    .await;
}

async fn answer(meta: &Value, mut stream: TcpStream) -> Result<()> {
    let (topic, _) = receive(&mut stream).await?;
    let reply = match topic {
        Topic::Metadata => encode(topic, meta),
        Topic::Connection => {
            let why = "this node moves bytes over TCP only";
            encode(topic, &serde_json::json!({ "reply_msg": why }))
        }
        Topic::Probe => encode(topic, &serde_json::json!({ "status": "success" })),
        // Nobody would read it, and an answer would say that somebody did.
        Topic::Note => return Err(MooncakeError::invalid(STAGE, "a note for a node that reads none")),
    };
    let sent = async {
        stream.write_all(&reply).await?;
        stream.shutdown().await?;
        // The asker closes first, so that it keeps no half-closed socket.
        let mut rest = [0; 16];
        stream.read(&mut rest).await
    }
    .await;
    sent.map(drop).map_err(|e| MooncakeError::new(Kind::Unavailable, STAGE, "", e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Result<(Topic, Value)> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(receive(&mut &*bytes))
    }

    proptest! {
        #[test]
        fn any_message_is_read_or_refused(length in 0u64..200, bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = read(&bytes);
            let _ = read(&[&length.to_le_bytes()[..], &bytes].concat());
        }

        #[test]
        fn what_is_sent_is_received(code in 0u8..4, text in "\\PC{0,50}") {
            let topic = Topic::of(code).expect("there are four");
            let json = serde_json::json!({ "text": text });
            let sent = encode(topic, &json);
            prop_assert_eq!(read(&sent).unwrap(), (topic, json));
            prop_assert!(read(&sent[..sent.len() - 1]).is_err());
        }
    }
}
