//! The two listeners' connections, one task each.

use std::sync::Arc;
use std::time::Duration;

use baton_http::{Acceptor, ConnectionSlots};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Shared;
use super::history::Answer;
use crate::codec::sequence_of;
use crate::error::{EventError, Kind, Stage};
use crate::zmtp::{Connection, ConnectionWriter, PeerInput, Role, WireLimits};

/// Number of the message that ends a replay.
const END: u64 = u64::MAX;
/// Subscriptions of one subscriber.
const MAX_TOPICS: usize = 64;

/// The service that a listener provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Service {
    Live,
    Replay,
}

/// Accepts connections until it is aborted, which ends them as well.
pub(super) async fn accept(
    listener: TcpListener,
    shared: Arc<Shared>,
    room: Arc<ConnectionSlots>,
    service: Service,
) {
    let (mut acceptor, mut peers) = (Acceptor::new("KV events", listener), JoinSet::new());
    loop {
        while peers.try_join_next().is_some() {}
        let Ok((stream, _, place)) = acceptor.accept(|peer| room.take(peer)).await else { continue };
        let shared = shared.clone();
        peers.spawn(async move {
            // A peer that goes, or speaks another tongue, is nobody's loss.
            let _ = match service {
                Service::Live => live(stream, &shared).await,
                Service::Replay => replay(stream, &shared).await,
            };
            drop(place);
        });
    }
}

fn time_limit(shared: &Shared) -> Duration {
    Duration::from_micros(shared.config.peer_timeout_us)
}

fn late() -> EventError {
    EventError::new(Kind::Unavailable, Stage::Send, "the peer takes nothing")
}

async fn negotiate(stream: TcpStream, role: Role, shared: &Shared) -> Result<Connection, EventError> {
    let shaking = Connection::negotiate(stream, role, WireLimits::for_requests());
    timeout(time_limit(shared), shaking).await.map_err(|_| late())?
}

async fn send(outgoing: &mut ConnectionWriter, frames: &[&[u8]], shared: &Shared) -> Result<(), EventError> {
    timeout(time_limit(shared), outgoing.send(frames)).await.map_err(|_| late())?
}

/// Sends every batch from now on, once the peer has subscribed.
async fn live(stream: TcpStream, shared: &Shared) -> Result<(), EventError> {
    let Connection { mut incoming, mut outgoing } = negotiate(stream, Role::Pub, shared).await?;
    let mut batches = shared.live.subscribe();
    let topic = shared.config.topic.as_bytes();
    let mut topics: Vec<Vec<u8>> = Vec::new();
    loop {
        tokio::select! {
            received = incoming.next() => match received? {
                PeerInput::Ping(context) => outgoing.pong(&context).await?,
                PeerInput::Subscribe(wanted, prefix) => subscribe(&mut topics, wanted, &prefix),
                PeerInput::Message(frames) => {
                    if let Some((mark @ 0..=1, prefix)) = frames.first().and_then(|frame| frame.split_first()) {
                        subscribe(&mut topics, *mark == 1, prefix);
                    }
                }
            },
            batch = batches.recv() => match batch {
                Ok(batch) if topics.iter().any(|prefix| topic.starts_with(prefix)) => {
                    let frames = [topic, &batch.sequence.to_be_bytes(), &batch.payload];
                    send(&mut outgoing, &frames, shared).await?;
                }
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            },
        }
    }
}

fn subscribe(topics: &mut Vec<Vec<u8>>, wanted: bool, prefix: &[u8]) {
    if !wanted {
        if let Some(at) = topics.iter().position(|known| known == prefix) {
            topics.swap_remove(at);
        }
    } else if topics.len() < MAX_TOPICS {
        topics.push(prefix.to_vec());
    }
}

/// Answers requests for replay, one after another.
async fn replay(stream: TcpStream, shared: &Shared) -> Result<(), EventError> {
    let Connection { mut incoming, mut outgoing } = negotiate(stream, Role::Router, shared).await?;
    loop {
        match incoming.next().await? {
            PeerInput::Ping(context) => outgoing.pong(&context).await?,
            PeerInput::Subscribe(..) => {}
            // As vLLM: no answer without the empty frame.
            PeerInput::Message(frames) => {
                if let [delimiter, number] = frames.as_slice()
                    && delimiter.is_empty()
                    && let Ok(number) = sequence_of(number)
                {
                    repeat(&mut outgoing, number, shared).await?;
                }
            }
        }
    }
}

async fn repeat(outgoing: &mut ConnectionWriter, number: u64, shared: &Shared) -> Result<(), EventError> {
    let topic = shared.config.topic.as_bytes();
    let answer = shared.history.lock().from(number);
    match answer {
        Answer::Kept(kept) => {
            for batch in kept {
                let frames = [b"", topic, &batch.sequence.to_be_bytes(), &batch.payload];
                send(outgoing, &frames, shared).await?;
            }
        }
        Answer::Snapshot(sequence, events) => {
            let payload = shared.encode(sequence, events);
            send(outgoing, &[b"", topic, &sequence.to_be_bytes(), &payload], shared).await?;
        }
    }
    send(outgoing, &[b"", b"", &END.to_be_bytes(), b""], shared).await
}
