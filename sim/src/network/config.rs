//! How the modelled network shares links.

use crate::network::Priority;

/// How flights share links, and how many there may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Flights in progress at once, 1 to 1,000,000 (I9).
    pub max_flights: u32,
    /// Flights in progress on one link, at least 1 (I9).
    pub max_flights_per_link: u32,
    /// Weight of one hand-off on a link, 1 to 10,000.
    pub handoff_weight: u32,
    /// Weight of one fetch, at most a hand-off's.
    pub fetch_weight: u32,
    /// Weight of one replication, at most a fetch's.
    pub replicate_weight: u32,
    /// Weight of one offload, at most a replication's.
    pub offload_weight: u32,
    /// Least share of a link, per mille, that the flights of the lowest priority present on it
    /// have together, however many more urgent ones there are; 0 to 500.
    pub floor_permille: u32,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            max_flights: 65_536,
            max_flights_per_link: 4_096,
            handoff_weight: 16,
            fetch_weight: 8,
            replicate_weight: 2,
            offload_weight: 1,
            floor_permille: 50,
        }
    }
}

impl NetworkConfig {
    /// The weight of one flight, by [`Priority::index`].
    #[must_use]
    pub const fn weights(&self) -> [u32; Priority::ALL.len()] {
        [self.handoff_weight, self.fetch_weight, self.replicate_weight, self.offload_weight]
    }
}
