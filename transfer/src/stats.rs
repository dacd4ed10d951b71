//! Counters, as plain integers.

/// Counters of the core since its creation. `submitted = done + failed + cancelled + live_batches`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoverStats {
    /// Batches that live.
    pub live_batches: u64,
    /// Slices and notices outstanding.
    pub outstanding_slices: u64,
    /// Bytes outstanding.
    pub outstanding_bytes: u64,
    /// Paths, those being opened and closed included.
    pub paths: u64,
    /// Peers known.
    pub peers: u64,
    /// Peers that wait for a path.
    pub waiting_peers: u64,
    /// Batches taken.
    pub submitted: u64,
    /// Batches that ended with every byte in place.
    pub done: u64,
    /// Batches that ended short.
    pub failed: u64,
    /// Batches that were cancelled.
    pub cancelled: u64,
    /// Batches not taken.
    pub refused: u64,
    /// Batches that ended without certainty at the peer's side.
    pub unfenced: u64,
    /// Bytes of slices that ended well.
    pub moved_bytes: u64,
    /// Slices that ended well.
    pub moved_slices: u64,
    /// Slices posted again, after a fault.
    pub repeated_slices: u64,
    /// Slices that came damaged.
    pub damaged_slices: u64,
    /// Slices that a full path gave back.
    pub refused_slices: u64,
    /// Completions for what had ended before, and inputs that named nothing known.
    pub ignored_inputs: u64,
    /// Paths opened.
    pub paths_opened: u64,
    /// Paths that could not be opened.
    pub opens_failed: u64,
    /// Paths that broke.
    pub paths_broken: u64,
    /// Paths closed to make room for other peers.
    pub paths_evicted: u64,
    /// Paths asked for a sign of life.
    pub probes: u64,
    /// Notices sent.
    pub notices: u64,
    /// Inputs stamped earlier than one before; taken as simultaneous with it (I11).
    pub clock_regressions: u64,
}
