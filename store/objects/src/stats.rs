//! Plain integers about the store.

/// Counters of one shard.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) incomplete: u64,
    pub(crate) puts: u64,
    pub(crate) unchanged: u64,
    pub(crate) removed: u64,
    pub(crate) evicted: u64,
    pub(crate) expired: u64,
    pub(crate) taken_over: u64,
    pub(crate) abandoned: u64,
}

/// The state of a store and what happened since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Keys that can be read.
    pub keys: u64,
    /// Memory for values, bytes.
    pub capacity_bytes: u64,
    /// Slots in use, bytes: values, reservations, and what is read though removed.
    pub used_bytes: u64,
    /// Reads that found something.
    pub hits: u64,
    /// Reads that did not.
    pub misses: u64,
    /// Among those: the key was there, but not every part of its object.
    pub incomplete: u64,
    /// Values sealed.
    pub puts: u64,
    /// Puts of what was there already.
    pub unchanged: u64,
    /// Values removed by request.
    pub removed: u64,
    /// Values evicted for room.
    pub evicted: u64,
    /// Values gone at the end of their time to live.
    pub expired: u64,
    /// Reservations that ran out and went to another writer.
    pub taken_over: u64,
    /// Reservations that ran out and were dropped.
    pub abandoned: u64,
}

impl StoreStats {
    pub(crate) fn add(&mut self, counters: &Counters, keys: usize) {
        self.keys += keys as u64;
        self.hits += counters.hits;
        self.misses += counters.misses;
        self.incomplete += counters.incomplete;
        self.puts += counters.puts;
        self.unchanged += counters.unchanged;
        self.removed += counters.removed;
        self.evicted += counters.evicted;
        self.expired += counters.expired;
        self.taken_over += counters.taken_over;
        self.abandoned += counters.abandoned;
    }
}
