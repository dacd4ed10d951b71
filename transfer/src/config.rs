//! Settings: each with its unit, default and bounds.

use alloc::vec;
use alloc::vec::Vec;

use crate::Priority;

/// Rails at most: they are kept in the bits of one word.
pub const MAX_RAILS: usize = 64;

/// One way out of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
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

impl MoverConfig {
    /// How far a rail is from memory at a location.
    #[must_use]
    pub fn rank(&self, location: u16, rail: usize) -> u8 {
        self.ranks.get(usize::from(location)).and_then(|row| row.get(rail)).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_consistent() {
        let config = MoverConfig::default();
        assert!((1..=config.slice_bytes_max).contains(&config.slice_bytes));
        assert!(config.slices_per_batch <= config.slices_per_batch_max);
        assert!(config.max_ops_per_batch <= config.max_ops && config.max_paths_per_peer <= config.max_paths);
        assert!(config.weights.is_sorted_by(|a, b| a >= b) && config.weights[Priority::ALL.len() - 1] > 0);
        assert!(config.floor_permille <= 500);
        assert!(config.slice_tries > 0 && config.route_tries > 0);
        assert!((1..=config.backoff_max_us).contains(&config.backoff_min_us));
        assert!((1..=config.stuck_us).contains(&config.silent_us));
        let [rail] = config.rails[..] else { panic!("one rail") };
        assert!((1..=rail.path_bytes).contains(&rail.path_bytes_min) && rail.path_bytes <= rail.rail_bytes);
        assert!(rail.path_slices > 0 && rail.bytes_per_s > 0);
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
