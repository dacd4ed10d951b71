//! Settings: each with its unit, default and bounds.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::Priority;
use crate::config::ConfigError;

/// Rails at most: they are kept in the bits of one word.
pub const MAX_RAILS: usize = 64;

/// One way out of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RailSpec {
    /// Slices outstanding on one path, 1 to 65,536; at most what the transport takes.
    pub path_slices: u32,
    /// Bytes outstanding on one path at most; one slice always goes.
    pub path_bytes: u64,
    /// Bytes outstanding on one path that are allowed however slow it is; at most `path_bytes`.
    pub path_bytes_min: u64,
    /// Between the two, no more than the path carries in this time and two latencies: what is more urgent
    /// waits no longer behind what is on its way.
    pub queue_us: u64,
    /// Bytes outstanding on all paths of the rail; one slice always goes.
    pub rail_bytes: u64,
    /// What is believed of its speed until it has been measured.
    pub bytes_per_s: u64,
    /// What is believed of its latency until it has been measured.
    pub latency_us: u64,
}

impl Default for RailSpec {
    fn default() -> Self {
        Self {
            path_slices: 64,
            path_bytes: 8 << 20,
            path_bytes_min: 1 << 20,
            queue_us: 5_000,
            rail_bytes: 64 << 20,
            bytes_per_s: 3_000_000_000,
            latency_us: 30,
        }
    }
}

/// How batches are cut, sent, repeated and given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MoverConfig {
    /// The smallest slice that an op is cut into, 4 KiB to 1 GiB.
    pub slice_bytes: u32,
    /// The largest slice, at least `slice_bytes`; at most what every transport takes.
    pub slice_bytes_max: u32,
    /// Slices are made larger until a batch has no more of them than this, at least 1.
    pub slices_per_batch: u32,
    /// Slices of the largest size that a batch may have.
    pub slices_per_batch_max: u32,
    /// Batches at once (I9).
    pub max_batches: u32,
    /// Ops in one batch (I9).
    pub max_ops_per_batch: u32,
    /// Ops of all batches at once (I9).
    pub max_ops: u32,
    /// Slices outstanding at once (I9).
    pub max_slices: u32,
    /// Bytes outstanding at once (I9); one slice always goes.
    pub max_bytes: u64,
    /// Peers known at once (I9).
    pub max_peers: u32,
    /// Paths at once, those being opened and closed included (I9).
    pub max_paths: u32,
    /// Paths to one peer at once.
    pub max_paths_per_peer: u32,
    /// Bytes waiting for a peer, for each path to it, that make another path worth opening.
    pub spread_bytes: u64,
    /// Weights of the priorities, most urgent first, 1 to 10,000 and not growing.
    pub weights: [u32; Priority::ALL.len()],
    /// Least share of the lowest priority, per mille, however much more urgent work there is; 0 to 500.
    pub floor_permille: u32,
    /// How much longer a path is taken to need for each step of rank, per mille.
    pub rank_penalty_permille: u32,
    /// Times that a slice is posted before its batch fails, at least 1.
    pub slice_tries: u8,
    /// Times in a row that every route to a peer fails before its batches do, at least 1.
    pub route_tries: u32,
    /// How long a route rests after its first failure.
    pub backoff_min_us: u64,
    /// How long it rests at most.
    pub backoff_max_us: u64,
    /// How long a path may take to open before others are tried as well.
    pub open_patience_us: u64,
    /// A path with slices outstanding and no completion for so long is probed.
    pub silent_us: u64,
    /// A probe is answered in this time, or the path is broken.
    pub probe_us: u64,
    /// A path whose slices do not end for so long is broken, even if probes are answered.
    pub stuck_us: u64,
    /// How long a batch that is to end waits for its slices before their paths are closed.
    pub grace_us: u64,
    /// The longest that a batch may take.
    pub batch_limit_us: u64,
    /// How long a peer keeps its path while others wait for one.
    pub turn_us: u64,
    /// The rails, 1 to 64.
    pub rails: Vec<RailSpec>,
    /// By location, then by rail: how far the rail is from memory there; 0 is nearest, and what is not
    /// listed is 0.
    pub ranks: Vec<Vec<u8>>,
    /// Where the randomness of rests comes from.
    pub seed: u64,
}

impl Default for MoverConfig {
    fn default() -> Self {
        Self {
            slice_bytes: 64 << 10,
            slice_bytes_max: 1 << 20,
            slices_per_batch: 256,
            slices_per_batch_max: 262_144,
            max_batches: 65_536,
            max_ops_per_batch: 65_536,
            max_ops: 1_048_576,
            max_slices: 16_384,
            max_bytes: 1 << 30,
            max_peers: 16_384,
            max_paths: 256,
            max_paths_per_peer: 8,
            spread_bytes: 1 << 20,
            weights: [16, 8, 2, 1],
            floor_permille: 50,
            rank_penalty_permille: 250,
            slice_tries: 8,
            route_tries: 6,
            backoff_min_us: 20_000,
            backoff_max_us: 5_000_000,
            open_patience_us: 200_000,
            silent_us: 500_000,
            probe_us: 500_000,
            stuck_us: 5_000_000,
            grace_us: 1_000_000,
            batch_limit_us: 60_000_000,
            turn_us: 50_000,
            rails: vec![RailSpec::default()],
            ranks: Vec::new(),
            seed: 1,
        }
    }
}

impl MoverConfig {
    /// How far a rail is from memory at a location.
    #[must_use]
    pub fn rank(&self, location: u16, rail: usize) -> u8 {
        self.ranks.get(usize::from(location)).and_then(|row| row.get(rail)).copied().unwrap_or(0)
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// Names the setting and what it may be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match self.sizes().into_iter().chain(self.times()).find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(ConfigError(String::from(rule))),
            None => self.validate_rails(),
        }
    }

    fn sizes(&self) -> [(bool, &'static str); 8] {
        let rows =
            [self.slices_per_batch, self.slices_per_batch_max, self.max_batches, self.max_ops_per_batch];
        let more = [self.max_ops, self.max_slices, self.max_peers, self.max_paths, self.max_paths_per_peer];
        [
            (
                (4_096..=1 << 30).contains(&self.slice_bytes) && self.slice_bytes_max >= self.slice_bytes,
                "slice_bytes must be 4096 to 1 GiB, and slice_bytes_max no less",
            ),
            (self.slice_bytes_max <= 1 << 30, "slice_bytes_max must be at most 1 GiB"),
            (rows.iter().chain(&more).all(|&bound| bound >= 1), "bounds must be at least 1"),
            (self.max_slices <= 1 << 24, "max_slices must be at most 16,777,216"),
            (self.weights.iter().all(|w| (1..=10_000).contains(w)), "weights must be 1 to 10,000"),
            (self.weights.is_sorted_by(|a, b| a >= b), "weights must not grow towards the lowest priority"),
            (self.floor_permille <= 500, "floor_permille must be 0 to 500"),
            (self.slice_tries >= 1 && self.route_tries >= 1, "tries must be at least 1"),
        ]
    }

    fn times(&self) -> [(bool, &'static str); 4] {
        let all = [self.silent_us, self.probe_us, self.grace_us, self.batch_limit_us, self.open_patience_us];
        [
            (all.iter().all(|&us| us >= 1), "times must be at least 1 µs"),
            (self.turn_us >= 1, "turn_us must be at least 1"),
            (
                self.backoff_min_us >= 1 && self.backoff_min_us <= self.backoff_max_us,
                "backoff_min_us must be 1 to backoff_max_us",
            ),
            (self.stuck_us >= self.silent_us, "stuck_us must be at least silent_us"),
        ]
    }

    fn validate_rails(&self) -> Result<(), ConfigError> {
        if self.rails.is_empty() || self.rails.len() > MAX_RAILS {
            return Err(ConfigError(format!("rails must be 1 to {MAX_RAILS}")));
        }
        let bad = self.rails.iter().position(|rail| {
            let room =
                (1..=65_536).contains(&rail.path_slices) && rail.path_bytes >= 1 && rail.rail_bytes >= 1;
            !(room && rail.bytes_per_s >= 1 && (1..=rail.path_bytes).contains(&rail.path_bytes_min))
        });
        match bad {
            Some(rail) => Err(ConfigError(format!(
                "rails[{rail}]: all but times must be at least 1, and path_bytes_min at most path_bytes"
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn broken(change: impl Fn(&mut MoverConfig)) -> String {
        let mut config = MoverConfig::default();
        change(&mut config);
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn the_default_is_valid_and_every_bound_is_named() {
        assert_eq!(MoverConfig::default().validate(), Ok(()));
        assert!(broken(|c| c.slice_bytes = 100).contains("slice_bytes"));
        assert!(broken(|c| c.slice_bytes_max = 5_000).contains("slice_bytes"));
        assert!(broken(|c| c.max_paths = 0).contains("bounds"));
        assert!(broken(|c| c.weights = [1, 2, 1, 1]).contains("grow"));
        assert!(broken(|c| c.floor_permille = 501).contains("floor_permille"));
        assert!(broken(|c| c.slice_tries = 0).contains("tries"));
        assert!(broken(|c| c.backoff_max_us = 1).contains("backoff"));
        assert!(broken(|c| c.stuck_us = 1).contains("stuck_us"));
        assert!(broken(|c| c.rails.clear()).contains("rails"));
        assert!(broken(|c| c.rails[0].path_slices = 0).contains("rails[0]"));
    }

    #[test]
    fn ranks_that_are_not_listed_are_nearest() {
        let config = MoverConfig { ranks: vec![vec![0, 3]], ..MoverConfig::default() };
        assert_eq!((config.rank(0, 1), config.rank(0, 2), config.rank(9, 1)), (3, 0, 0));
    }
}
