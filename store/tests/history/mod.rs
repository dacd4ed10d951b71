//! Random inputs for a small store, and the chains that they speak of.

use baton_store::{Eviction, Offload, StoreConfig};
use baton_types::{BlockKey, ChainHasher};
use proptest::prelude::*;

/// One input, chosen before it is known what it will meet. A `path` is a walk from the root of the tree.
#[derive(Clone, Debug)]
pub enum Op {
    /// A whole request: close, open, seal and close; a patient one waits for its load before it seals.
    Serve { owner: u64, path: Vec<u64>, patient: bool },
    /// As the store's input.
    Open { owner: u64, path: Vec<u64>, room: u32 },
    /// As the store's input.
    Read { owner: u64, path: Vec<u64> },
    /// As the store's input.
    Seal { owner: u64, upto: u32 },
    /// As the store's input.
    Grow { owner: u64, room: u32 },
    /// As the store's input.
    Close { owner: u64 },
    /// The end of one of the loads under way, if there is any.
    Onboarded { pick: usize, ok: bool },
    /// The end of one of the copies under way, if there is any.
    Offloaded { pick: usize, ok: bool },
    /// As the store's input; every block of the path.
    /// As the store's input.
    Clear,
}

/// The chain that a path through a small tree stands for.
pub fn chain(path: &[u64]) -> Vec<BlockKey> {
    let mut hasher = ChainHasher::new(1, b"history");
    path.iter().map(|&branch| hasher.push_id(branch)).collect()
}

fn path() -> impl Strategy<Value = Vec<u64>> {
    let later = proptest::collection::vec(prop_oneof![5 => Just(0u64), 1 => Just(1)], 0..5);
    (0u64..4, later).prop_map(|(first, mut later)| {
        later.insert(0, first);
        later
    })
}

fn op() -> impl Strategy<Value = Op> {
    let owner = || 0u64..4;
    prop_oneof![
        25 => (5u64..6, path(), any::<bool>()).prop_map(|(owner, path, patient)| Op::Serve { owner, path, patient }),
        10 => (owner(), path(), 0u32..2).prop_map(|(owner, path, room)| Op::Open { owner, path, room }),
        4 => (owner(), path()).prop_map(|(owner, path)| Op::Read { owner, path }),
        7 => (owner(), 0u32..9).prop_map(|(owner, upto)| Op::Seal { owner, upto }),
        2 => (owner(), 0u32..9).prop_map(|(owner, room)| Op::Grow { owner, room }),
        15 => owner().prop_map(|owner| Op::Close { owner }),
        25 => (0usize..9, proptest::bool::weighted(0.6)).prop_map(|(pick, ok)| Op::Onboarded { pick, ok }),
        25 => (0usize..9, proptest::bool::weighted(0.9)).prop_map(|(pick, ok)| Op::Offloaded { pick, ok }),
    ]
}

/// Up to `longest` inputs; now and then everything is lost.
pub fn ops(longest: usize) -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(prop_oneof![200 => op(), 1 => Just(Op::Clear)], 1..longest)
}

/// Sizes at which everything is scarce, and every policy.
pub fn config() -> impl Strategy<Value = StoreConfig> {
    let eviction = prop_oneof![
        Just(Eviction::Lru),
        Just(Eviction::Lfu),
        Just(Eviction::S3Fifo),
        Just(Eviction::LengthAware),
        Just(Eviction::Reuse)
    ];
    let offload = prop_oneof![Just(Offload::Off), Just(Offload::WriteThrough), Just(Offload::OnEvict)];
    let slower = || prop_oneof![1 => Just(0u64), 4 => 1u64..24];
    (6u64..18, slower(), slower(), eviction, offload, any::<bool>()).prop_map(
        |(hbm_blocks, dram_blocks, ssd_blocks, eviction, offload, ssd_second_touch)| StoreConfig {
            hbm_blocks,
            dram_blocks,
            ssd_blocks,
            eviction,
            offload,
            ssd_second_touch,
        },
    )
}
