//! The bounds: how many, how large, how long.

use std::time::Duration;

use crate::error::{Kind, Stage, TransportError};
use crate::frame::CONTROL_BYTES_MAX;
use crate::message::HELD_BYTES;

/// The longest a connect may be allowed to take.
const CONNECT_TIMEOUT_MAX_MS: u64 = 30_000;

/// Bounds of one endpoint or dialer, in size and time. Each side checks with its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections accepted at a time, and (counted apart) connections in use outward.
    pub connections: usize,
    /// Connections kept open outward with nothing to do.
    pub idle_connections: usize,
    /// Flights, and (counted apart) fetches served, at a time.
    pub flights: usize,
    /// Slices of one flight: blocks times layers.
    pub flight_slices: u64,
    /// Size of one slice.
    pub slice_bytes: u32,
    /// Size of the note that a flight may carry besides its slices.
    pub note_bytes: u32,
    /// Bytes of registered memory that are lent for one flight, and for one fetch: what is sent but not confirmed.
    pub window_bytes: u32,
    /// Keys of one fetch.
    pub fetch_keys: usize,
    /// Size of one block fetched.
    pub block_bytes: u32,
    /// Size of all blocks of one fetch; what is over is left off the answer.
    pub fetch_bytes: u64,
    /// To reach a peer, and then again to agree with it.
    pub connect_timeout_ms: u64,
    /// To be accepted by the receiver, retries and their pauses included.
    pub offer_timeout_ms: u64,
    /// Without a byte where bytes are due.
    pub progress_timeout_ms: u64,
    /// Without a slice in an accepted flight, for its prefill may be slow; and of an idle connection.
    pub idle_timeout_ms: u64,
    /// From accepting a flight to its end.
    pub flight_timeout_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            idle_connections: 32,
            flights: 128,
            flight_slices: 1 << 20,
            slice_bytes: 8 << 20,
            note_bytes: 32 << 20,
            window_bytes: 4 << 20,
            fetch_keys: 1024,
            block_bytes: 64 << 20,
            fetch_bytes: 256 << 20,
            connect_timeout_ms: 1_000,
            offer_timeout_ms: 5_000,
            progress_timeout_ms: 5_000,
            idle_timeout_ms: 60_000,
            flight_timeout_ms: 300_000,
        }
    }
}

impl Limits {
    /// Checks that no limit is zero, and that the content of one frame fits the frame.
    ///
    /// # Errors
    /// [`Kind::Invalid`] at [`Stage::Bind`], naming the field.
    pub fn check(&self) -> Result<(), TransportError> {
        let positive = [
            ("connections", self.connections == 0),
            ("flights", self.flights == 0),
            ("flight_slices", self.flight_slices == 0),
            ("slice_bytes", self.slice_bytes == 0),
            ("window_bytes", self.window_bytes == 0),
            ("fetch_keys", self.fetch_keys == 0),
            ("block_bytes", self.block_bytes == 0),
            ("fetch_bytes", self.fetch_bytes == 0),
            ("connect_timeout_ms", self.connect_timeout_ms == 0),
            ("offer_timeout_ms", self.offer_timeout_ms == 0),
            ("progress_timeout_ms", self.progress_timeout_ms == 0),
            ("idle_timeout_ms", self.idle_timeout_ms == 0),
            ("flight_timeout_ms", self.flight_timeout_ms == 0),
        ];
        let wrong = |text: String| Err(TransportError::new(Kind::Invalid, Stage::Bind, text));
        if let Some((name, _)) = positive.iter().find(|(_, zero)| *zero) {
            return wrong(format!("limit {name} is 0; set at least 1"));
        }
        let keys_max = usize::try_from(CONTROL_BYTES_MAX).expect("fits") / HELD_BYTES;
        if self.fetch_keys > keys_max {
            return wrong(format!("limit fetch_keys {} is over {keys_max}; lower it", self.fetch_keys));
        }
        if self.connect_timeout_ms > CONNECT_TIMEOUT_MAX_MS {
            return wrong(format!("limit connect_timeout_ms is over {CONNECT_TIMEOUT_MAX_MS}; lower it"));
        }
        Ok(())
    }

    pub(crate) fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub(crate) fn offer_timeout(&self) -> Duration {
        Duration::from_millis(self.offer_timeout_ms)
    }

    pub(crate) fn progress_timeout(&self) -> Duration {
        Duration::from_millis(self.progress_timeout_ms)
    }

    pub(crate) fn idle_timeout(&self) -> Duration {
        Duration::from_millis(self.idle_timeout_ms)
    }

    pub(crate) fn flight_timeout(&self) -> Duration {
        Duration::from_millis(self.flight_timeout_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_sound() {
        assert_eq!(Limits::default().check(), Ok(()));
    }

    #[test]
    fn each_unsound_field_is_named() {
        let none = Limits { flights: 0, ..Limits::default() };
        assert!(none.check().unwrap_err().text.contains("flights"));
        let many = Limits { fetch_keys: 1 << 20, ..Limits::default() };
        assert!(many.check().unwrap_err().text.contains("fetch_keys 1048576"));
        let slow = Limits { connect_timeout_ms: 30_001, ..Limits::default() };
        assert!(slow.check().unwrap_err().text.contains("connect_timeout_ms"));
    }
}
