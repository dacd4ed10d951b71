//! The bounds: how many, how large, how long.

use std::time::Duration;

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
    /// Keys of one fetch; the answer to all of them must fit one frame.
    pub fetch_keys: usize,
    /// Size of one block fetched.
    pub block_bytes: u32,
    /// Size of all blocks of one fetch; what is over is left off the answer.
    pub fetch_bytes: u64,
    /// To reach a peer, and then again to agree with it.
    pub connect_timeout_ms: u64,
    /// To be accepted by the receiver, retries and their pauses included. A receiver puts a flight off while it has no room,
    /// for as long as the conductor has the flight wait; one that does not answer at all has `progress_timeout_ms`.
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
            offer_timeout_ms: 300_000,
            progress_timeout_ms: 5_000,
            idle_timeout_ms: 60_000,
            flight_timeout_ms: 300_000,
        }
    }
}

impl Limits {
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
    use crate::frame::CONTROL_BYTES_MAX;
    use crate::message::HELD_BYTES;

    #[test]
    fn the_default_keys_of_a_fetch_fit_its_frame() {
        let keys_max = usize::try_from(CONTROL_BYTES_MAX).unwrap() / HELD_BYTES;
        assert!((1..=keys_max).contains(&Limits::default().fetch_keys));
    }

    /// A regression: KV that waited for room at its decode node was given up after five seconds, three times, and its request
    /// failed. The conductor says how long a hand-off may wait.
    #[test]
    fn a_flight_that_is_put_off_waits_as_long_as_a_flight_may_take() {
        let limits = Limits::default();
        assert!(limits.offer_timeout() >= limits.flight_timeout());
        assert!(
            limits.progress_timeout() < limits.offer_timeout(),
            "a receiver that does not answer is found"
        );
    }
}
