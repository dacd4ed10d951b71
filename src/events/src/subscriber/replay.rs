//! Asking a publisher to repeat itself.

use bytes::Bytes;
use std::time::Duration;
use tokio::time::timeout;

use crate::codec::sequence_of;
use crate::error::{EventError, Kind, Stage};
use crate::zmtp::{Connection, Endpoint, PeerInput, Role, WireLimits};

/// Number of the message that ends a replay.
const END: u64 = u64::MAX;

/// One request under way. A fresh connection each time: what an earlier request still has to say cannot be
/// mistaken for the answer to this one.
#[derive(Debug)]
pub(super) struct Replay {
    connection: Connection,
    time_limit: Duration,
}

impl Replay {
    /// Asks for everything from number `from` on.
    pub(super) async fn ask(
        endpoint: &Endpoint,
        from: u64,
        batch_bytes: usize,
        (connect_within, time_limit): (Duration, Duration),
    ) -> Result<Self, EventError> {
        let limits = WireLimits::for_batches(batch_bytes);
        let mut connection = Connection::open(endpoint, Role::Dealer, limits, connect_within).await?;
        // Without the empty frame before it a request is not answered.
        connection.outgoing.send(&[b"", &from.to_be_bytes()]).await?;
        Ok(Self { connection, time_limit })
    }

    /// The next repeated message, or `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<(u64, Bytes)>, EventError> {
        loop {
            let late = |_| {
                let message = format!("nothing came for {} ms", self.time_limit.as_millis());
                EventError::new(Kind::Unavailable, Stage::Replay, message)
            };
            match timeout(self.time_limit, self.connection.incoming.next()).await.map_err(late)?? {
                PeerInput::Ping(context) => self.connection.outgoing.pong(&context).await?,
                PeerInput::Subscribe(..) => {}
                PeerInput::Message(frames) => {
                    // Older publishers leave the topic away, so frames count from the end.
                    let [.., sequence, payload] = frames.as_slice() else {
                        return Err(EventError::decode("an answer to a replay without a number"));
                    };
                    let sequence = sequence_of(sequence)?;
                    return Ok((sequence != END).then(|| (sequence, payload.clone())));
                }
            }
        }
    }
}
