//! Settings of a simulation, as the configuration file has them and the simulator reads them. They are here because the
//! service reads the same file and knows no simulator.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// When KV travels to the decode instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Handoff {
    /// Layer by layer while the prefill runs.
    Layerwise,
    /// When the prefill has ended.
    AfterPrefill,
}

/// How simulated transfers share links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
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
    /// The weight of one flight, the most urgent kind first.
    #[must_use]
    pub const fn weights(&self) -> [u32; 4] {
        [self.handoff_weight, self.fetch_weight, self.replicate_weight, self.offload_weight]
    }
}

/// How simulated clients behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Clients {
    /// Retries of a refused client, each after the Retry-After that it was given.
    pub retries: u32,
    /// Spread of that wait, per mille.
    pub jitter_permille: u32,
    /// Share of clients that leave while waiting, per mille.
    pub leave_permille: u32,
}

impl Default for Clients {
    fn default() -> Self {
        Self { retries: 0, jitter_permille: 100, leave_permille: 0 }
    }
}

/// Faults that a simulation injects; the times and places follow from its seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FaultPlan {
    /// Instances that die and restart empty.
    pub deaths: u32,
    /// Instances that turn slow for a while: to a fifth up to four fifths of their speed. The scheduler does not know it.
    pub slow_nodes: u32,
    /// Whether slow nodes are slow for the whole run.
    pub slow_nodes_last: bool,
    /// Links that go down for a while.
    pub lost_links: u32,
    /// Cache news that never arrive, per mille.
    pub lost_news_permille: u32,
    /// How late cache news arrive, µs.
    pub news_delay_us: u64,
    /// Speed of every engine over the speed in its cost profile, per mille, 100–4000, for the whole run. The scheduler
    /// keeps predicting with the cost profile, so any value but 1000 makes the profile wrong by this factor.
    pub engine_speed_permille: u32,
    /// Noise of engines' times, per mille, 0–900: each prefill pass, mixed step or run of decode steps of one batch takes up
    /// to this much less or more time, evenly distributed.
    pub engine_noise_permille: u32,
    /// Rate of every network link over `net_gbps` of its pool, per mille, 10–10000, for the whole run. The scheduler starts
    /// with `net_gbps`, so any value but 1000 makes that wrong by this factor.
    pub link_speed_permille: u32,
    /// Seed of when and where; the run's.
    #[serde(skip)]
    pub seed: u64,
}

impl Default for FaultPlan {
    fn default() -> Self {
        Self {
            deaths: 0,
            slow_nodes: 0,
            slow_nodes_last: false,
            lost_links: 0,
            lost_news_permille: 0,
            news_delay_us: 0,
            engine_speed_permille: 1000,
            engine_noise_permille: 0,
            link_speed_permille: 1000,
            seed: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_urgent_flights_weigh_more_and_no_class_is_starved() {
        let network = NetworkConfig::default();
        assert!(network.weights().is_sorted_by(|urgent, next| urgent > next), "{network:?}");
        assert!(network.weights().iter().all(|weight| (1..=10_000).contains(weight)), "{network:?}");
        assert!((1..=500).contains(&network.floor_permille), "{network:?}");
    }

    #[test]
    fn the_seed_of_faults_is_not_a_setting() {
        let plan = FaultPlan { seed: 7, ..FaultPlan::default() };
        let written = serde_json::to_value(plan).unwrap();
        assert_eq!(written.get("seed"), None);
        assert_eq!(serde_json::from_value::<FaultPlan>(written).unwrap(), FaultPlan::default());
        let seeded = serde_json::json!({ "seed": 7 });
        assert!(serde_json::from_value::<FaultPlan>(seeded).is_err());
    }
}
