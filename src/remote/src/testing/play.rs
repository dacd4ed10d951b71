//! Plays an answer as a stream of events, with what goes wrong on the way.

use std::io;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::mpsc;

use super::fault::Fault;
use super::server::event;
use super::steps::Pace;

const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// A stream about to be played.
pub(super) struct Play<'a> {
    pub(super) events: &'a mpsc::Sender<io::Result<Bytes>>,
    pub(super) fault: Option<&'a Fault>,
    pub(super) tokens: usize,
    pub(super) pace: Pace,
    /// The error object of a stream that fails.
    pub(super) error: Value,
}

impl Play<'_> {
    /// Plays one event a token, then `last`, then the end.
    pub(super) async fn run(mut self, token: impl Fn(usize) -> Bytes, last: Option<Value>) {
        for at in 0..=self.tokens {
            if self.goes_wrong(at).await {
                return;
            }
            if at == self.tokens {
                break;
            }
            self.pace.next().await;
            if !self.send(token(at)).await {
                return;
            }
        }
        if let Some(last) = last {
            self.send(event(&last)).await;
        }
        self.send(DONE).await;
    }

    /// Whether the client is still there.
    async fn send(&self, bytes: Bytes) -> bool {
        self.events.send(Ok(bytes)).await.is_ok()
    }

    /// Plays the fault when it is due; whether that was the end.
    async fn goes_wrong(&self, at: usize) -> bool {
        match self.fault {
            Some(Fault::DieAfter(count)) if *count == at => {
                // The client may have gone before.
                let _ = self.events.send(Err(io::Error::other("broken on purpose"))).await;
            }
            Some(Fault::FallSilentAfter(count)) if *count == at => return std::future::pending().await,
            Some(Fault::ErrorAfter(count)) if *count == at => {
                let _ = self.send(event(&self.error)).await && self.send(DONE).await;
            }
            Some(Fault::DoneAfter(count)) if *count == at => {
                self.send(DONE).await;
            }
            Some(Fault::Garbage) => {
                self.send(Bytes::from_static(b"data: {nothing\n\n")).await;
            }
            Some(Fault::Endless) => while self.send(Bytes::from(vec![b'x'; 65_536])).await {},
            _ => return false,
        }
        true
    }
}
