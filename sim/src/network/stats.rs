//! Counters, as plain integers.

/// Counters since the core's creation. `started = finished + cancelled + failed_deadline +
/// failed_link_down + live`; bytes add up the same way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkStats {
    /// Flights in progress.
    pub live: u64,
    /// Transfers accepted.
    pub started: u64,
    /// Transfers whose bytes all landed.
    pub finished: u64,
    /// Transfers cancelled in flight.
    pub cancelled: u64,
    /// Transfers that missed their deadline.
    pub failed_deadline: u64,
    /// Transfers lost with a link in flight.
    pub failed_link_down: u64,
    /// Starts not accepted, for whatever reason.
    pub refused: u64,
    /// Accepted transfers of zero bytes (they count as finished too).
    pub zero_byte: u64,
    /// Inputs that named no flight in progress or no link, or changed nothing.
    pub ignored_inputs: u64,
    /// Inputs stamped earlier than one before; taken as simultaneous with it (I11).
    pub clock_regressions: u64,
    /// Bytes of the transfers accepted.
    pub started_bytes: u64,
    /// Bytes of the transfers finished.
    pub finished_bytes: u64,
    /// Bytes of the transfers that ended short.
    pub abandoned_bytes: u64,
    /// The part of `abandoned_bytes` that had left before.
    pub wasted_bytes: u64,
}
