//! Settings: each with its unit, default and bounds.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::Priority;

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
    /// Target time that bytes wait on a path. The core keeps at most the bytes outstanding that the path carries in
    /// this time plus two latencies, within the two bounds above. An urgent slice then does not wait long behind
    /// those already posted.
    pub queue_us: u64,
    /// Bytes outstanding on all paths of the rail; one slice always goes.
    pub rail_bytes: u64,
    /// Assumed speed of the rail until the core has measured it.
    pub bytes_per_s: u64,
    /// Assumed latency of the rail until the core has measured it.
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
    /// Slices that a batch should have at most; at least 1. The core makes slices larger to stay below it.
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
    /// How long a route rests after its first failure, give or take a quarter by chance.
    pub backoff_min_us: u64,
    /// How long it rests at most, but for that quarter.
    pub backoff_max_us: u64,
    /// How long a path may take to open before others are tried as well.
    pub open_time_limit_us: u64,
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
            open_time_limit_us: 200_000,
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

/// A setting out of its bounds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("transfer config: {0}")]
pub struct ConfigError(pub String);

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
        if let Some((_, name)) = self.counts().into_iter().chain(self.times()).find(|&(value, _)| value == 0)
        {
            return Err(ConfigError(format!("{name} must be at least 1")));
        }
        match self.rules().into_iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(ConfigError(String::from(rule))),
            None => self.validate_rails(),
        }
    }

    /// Settings that must be at least 1, without the times.
    fn counts(&self) -> [(u64, &'static str); 11] {
        let counts = [
            (self.slices_per_batch, "slices_per_batch"),
            (self.slices_per_batch_max, "slices_per_batch_max"),
            (self.max_batches, "max_batches"),
            (self.max_ops_per_batch, "max_ops_per_batch"),
            (self.max_ops, "max_ops"),
            (self.max_slices, "max_slices"),
            (self.max_peers, "max_peers"),
            (self.max_paths, "max_paths"),
            (self.max_paths_per_peer, "max_paths_per_peer"),
            (u32::from(self.slice_tries), "slice_tries"),
            (self.route_tries, "route_tries"),
        ];
        counts.map(|(value, name)| (u64::from(value), name))
    }

    /// Times that may not be 0.
    fn times(&self) -> [(u64, &'static str); 7] {
        [
            (self.backoff_min_us, "backoff_min_us"),
            (self.open_time_limit_us, "open_time_limit_us"),
            (self.silent_us, "silent_us"),
            (self.probe_us, "probe_us"),
            (self.grace_us, "grace_us"),
            (self.batch_limit_us, "batch_limit_us"),
            (self.turn_us, "turn_us"),
        ]
    }

    fn rules(&self) -> [(bool, &'static str); 8] {
        [
            ((4_096..=1 << 30).contains(&self.slice_bytes), "slice_bytes must be 4096 to 1 GiB"),
            (self.slice_bytes_max >= self.slice_bytes, "slice_bytes_max must be at least slice_bytes"),
            (self.slice_bytes_max <= 1 << 30, "slice_bytes_max must be at most 1 GiB"),
            (self.max_slices <= 1 << 24, "max_slices must be at most 16,777,216"),
            (
                self.weights.iter().all(|w| (1..=10_000).contains(w))
                    && self.weights.is_sorted_by(|a, b| a >= b),
                "weights must be 1 to 10,000 and not grow towards the lowest priority",
            ),
            (self.floor_permille <= 500, "floor_permille must be 0 to 500"),
            (self.backoff_min_us <= self.backoff_max_us, "backoff_max_us must be at least backoff_min_us"),
            (self.stuck_us >= self.silent_us, "stuck_us must be at least silent_us"),
        ]
    }

    fn validate_rails(&self) -> Result<(), ConfigError> {
        if self.rails.is_empty() || self.rails.len() > MAX_RAILS {
            return Err(ConfigError(format!("rails must be 1 to {MAX_RAILS}")));
        }
        for (rail, spec) in self.rails.iter().enumerate() {
            if let Some((_, rule)) = spec.rules().into_iter().find(|(holds, _)| !holds) {
                return Err(ConfigError(format!("rails[{rail}].{rule}")));
            }
        }
        Ok(())
    }
}

impl RailSpec {
    fn rules(&self) -> [(bool, &'static str); 5] {
        [
            ((1..=65_536).contains(&self.path_slices), "path_slices must be 1 to 65,536"),
            (self.path_bytes >= 1, "path_bytes must be at least 1"),
            ((1..=self.path_bytes).contains(&self.path_bytes_min), "path_bytes_min must be 1 to path_bytes"),
            (self.rail_bytes >= 1, "rail_bytes must be at least 1"),
            (self.bytes_per_s >= 1, "bytes_per_s must be at least 1"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use serde::de::value::{Error, MapDeserializer};

    type Change = fn(&mut MoverConfig, u64);

    /// Validates the default config with one setting changed.
    fn with(change: Change, value: u64) -> Result<(), String> {
        let mut config = MoverConfig::default();
        change(&mut config, value);
        config.validate().map_err(|error| error.to_string())
    }

    /// A setting with the least and the most that is allowed where the others stand at their defaults.
    /// Names as in the struct, so that one that is renamed or loses its bound does not go unseen.
    macro_rules! bounds {
        ($config:ident => $place:expr; $($name:ident: $least:expr, $most:expr;)*) => {
            [$((
                stringify!($name),
                (|$config: &mut MoverConfig, value: u64| $place.$name = value as _) as Change,
                $least,
                $most,
            )),*]
        };
    }

    const U32: u64 = u32::MAX as u64;
    const ANY: u64 = u64::MAX;

    #[test]
    fn every_setting_is_taken_at_its_bounds_and_named_beyond_them() {
        #[rustfmt::skip]
        let table = bounds! { config => config;
            slice_bytes: 4_096, 1 << 20;
            slice_bytes_max: 64 << 10, 1 << 30;
            slices_per_batch: 1, U32;
            slices_per_batch_max: 1, U32;
            max_batches: 1, U32;
            max_ops_per_batch: 1, U32;
            max_ops: 1, U32;
            max_slices: 1, 1 << 24;
            max_bytes: 0, ANY;
            max_peers: 1, U32;
            max_paths: 1, U32;
            max_paths_per_peer: 1, U32;
            spread_bytes: 0, ANY;
            floor_permille: 0, 500;
            rank_penalty_permille: 0, U32;
            slice_tries: 1, 255;
            route_tries: 1, U32;
            backoff_min_us: 1, 5_000_000;
            backoff_max_us: 20_000, ANY;
            open_time_limit_us: 1, ANY;
            silent_us: 1, 5_000_000;
            probe_us: 1, ANY;
            stuck_us: 500_000, ANY;
            grace_us: 1, ANY;
            batch_limit_us: 1, ANY;
            turn_us: 1, ANY;
            seed: 0, ANY;
        };
        #[rustfmt::skip]
        let of_a_rail = bounds! { config => config.rails[0];
            path_slices: 1, 65_536;
            path_bytes: 1 << 20, ANY;
            path_bytes_min: 1, 8 << 20;
            queue_us: 0, ANY;
            rail_bytes: 1, ANY;
            bytes_per_s: 1, ANY;
            latency_us: 0, ANY;
        };
        for (name, change, least, most) in table.into_iter().chain(of_a_rail) {
            for value in [least, least + 1, most - 1, most] {
                assert_eq!(with(change, value), Ok(()), "{name} = {value}");
            }
            let beyond =
                [least.checked_sub(1), (most != ANY && most != U32 && most != 255).then(|| most + 1)];
            for value in beyond.into_iter().flatten() {
                let error = with(change, value).expect_err(name);
                assert!(error.starts_with("transfer config: "), "{error}");
                assert!(error.contains(name) && error.contains(" must be "), "{name} = {value}: {error}");
            }
        }
    }

    #[test]
    fn weights_are_bounded_and_do_not_grow_towards_the_lowest() {
        let weights = |weights| MoverConfig { weights, ..MoverConfig::default() }.validate();
        for good in [[1; 4], [10_000; 4], [10_000, 9_999, 2, 2], [2, 1, 1, 1]] {
            assert_eq!(weights(good), Ok(()), "{good:?}");
        }
        for bad in [[10_001, 1, 1, 1], [1, 1, 1, 0], [0; 4], [1, 2, 1, 1], [2, 2, 1, 2], [3, 2, 3, 1]] {
            assert!(weights(bad).unwrap_err().0.starts_with("weights must be 1 to 10,000"), "{bad:?}");
        }
    }

    #[test]
    fn there_are_one_to_so_many_rails_and_the_bad_one_is_named() {
        for count in [0, 1, MAX_RAILS, MAX_RAILS + 1] {
            let mut config =
                MoverConfig { rails: vec![RailSpec::default(); count], ..MoverConfig::default() };
            let good = (1..=MAX_RAILS).contains(&count);
            assert_eq!(config.validate().is_ok(), good, "{count}");
            if !good {
                assert_eq!(config.validate().unwrap_err().0, "rails must be 1 to 64");
                continue;
            }
            config.rails[count - 1].bytes_per_s = 0;
            let named = format!("rails[{}].bytes_per_s must be at least 1", count - 1);
            assert_eq!(config.validate().unwrap_err().0, named);
        }
    }

    #[test]
    fn a_setting_that_does_not_exist_is_named_and_one_that_is_left_out_is_as_by_default() {
        let read = |name: &'static str| {
            MoverConfig::deserialize(MapDeserializer::<_, Error>::new([(name, 7u32)].into_iter()))
        };
        let config = read("max_peers").unwrap();
        assert_eq!(config, MoverConfig { max_peers: 7, ..MoverConfig::default() });
        assert!(read("max_pears").unwrap_err().to_string().contains("max_pears"));
        let rail = |name: &'static str| {
            RailSpec::deserialize(MapDeserializer::<_, Error>::new([(name, 7u32)].into_iter()))
        };
        assert_eq!(rail("latency_us").unwrap(), RailSpec { latency_us: 7, ..RailSpec::default() });
        assert!(rail("latency_ms").unwrap_err().to_string().contains("latency_ms"));
    }

    #[test]
    fn ranks_that_are_not_listed_are_nearest() {
        let ranks = vec![vec![0, 3], vec![], vec![9]];
        let config = MoverConfig { ranks, ..MoverConfig::default() };
        let table =
            [(0, 0, 0), (0, 1, 3), (0, 2, 0), (1, 0, 0), (2, 0, 9), (2, 1, 0), (9, 1, 0), (u16::MAX, 63, 0)];
        for (location, rail, rank) in table {
            assert_eq!(config.rank(location, rail), rank, "rail {rail} from {location}");
        }
    }
}
