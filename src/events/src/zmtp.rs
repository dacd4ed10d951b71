//! ZMTP 3.0 with the NULL mechanism: the four socket types that KV events use, over TCP.
//!
//! Written here rather than taken from a crate because a node must not be brought down by what it listens to:
//! no frame is believed longer than the limit, connecting ends, a connection that is lost is seen (it may have
//! been a restart), and every queue is ours to bound. We announce 3.0, so peers subscribe by plain messages.

mod connection;
mod frame;
mod handshake;

#[cfg(test)]
pub(crate) use connection::take_all;
pub(crate) use connection::{Connection, ConnectionWriter, PeerInput};
pub(crate) use handshake::{Endpoint, Role, subscription};

/// The limits of a peer's messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WireLimits {
    /// Bytes of all frames of one message.
    pub(crate) message_bytes: usize,
    /// Frames of one message.
    pub(crate) frames: usize,
}

impl WireLimits {
    /// Room for a batch with its topic and number.
    pub(crate) const fn for_batches(batch_bytes: usize) -> Self {
        Self { message_bytes: batch_bytes.saturating_add(4096), frames: 8 }
    }

    /// Room for what subscribers and askers send.
    pub(crate) const fn for_requests() -> Self {
        Self { message_bytes: 4096, frames: 8 }
    }
}
