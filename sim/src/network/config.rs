//! How the modelled network shares links.

use crate::network::Priority;

/// Largest weight allowed.
const MAX_WEIGHT: u32 = 10_000;
/// Largest floor allowed, per mille.
const MAX_FLOOR_PERMILLE: u32 = 500;
/// Most flights allowed: keeps weight sums far inside 64 bits.
const MAX_FLIGHTS: u32 = 1_000_000;

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

    /// Checks every bound.
    ///
    /// # Errors
    /// Names the setting and what it may be.
    pub fn validate(&self) -> Result<(), String> {
        let weights = self.weights();
        let rules = [
            (
                self.max_flights >= 1 && self.max_flights <= MAX_FLIGHTS,
                format!("max_flights must be 1 to {MAX_FLIGHTS}"),
            ),
            (self.max_flights_per_link >= 1, String::from("max_flights_per_link must be at least 1")),
            (
                weights.iter().all(|w| (1..=MAX_WEIGHT).contains(w)),
                format!("weights must be 1 to {MAX_WEIGHT}"),
            ),
            (
                weights.is_sorted_by(|a, b| a >= b),
                String::from("weights must not grow from handoff to fetch, replicate and offload"),
            ),
            (
                self.floor_permille <= MAX_FLOOR_PERMILLE,
                format!("floor_permille must be 0 to {MAX_FLOOR_PERMILLE}"),
            ),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(format!("network.{rule}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(change: impl Fn(&mut NetworkConfig)) -> String {
        let mut config = NetworkConfig::default();
        change(&mut config);
        config.validate().unwrap_err()
    }

    #[test]
    fn the_default_is_valid() {
        assert_eq!(NetworkConfig::default().validate(), Ok(()));
    }

    #[test]
    fn every_bound_is_named() {
        assert!(broken(|c| c.max_flights = 0).contains("max_flights"));
        assert!(broken(|c| c.max_flights = 1_000_001).contains("max_flights"));
        assert!(broken(|c| c.max_flights_per_link = 0).contains("max_flights_per_link"));
        assert!(broken(|c| c.offload_weight = 0).contains("weights must be"));
        assert!(broken(|c| c.handoff_weight = 10_001).contains("weights must be"));
        assert!(broken(|c| c.fetch_weight = 17).contains("must not grow"));
        assert!(broken(|c| c.floor_permille = 501).contains("floor_permille"));
    }
}
