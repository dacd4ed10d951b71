//! Tests of the store from outside.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[cfg(feature = "resp")]
mod bounds;
mod cold;
mod faulty;
mod leases;
#[cfg(feature = "resp")]
mod listing;
mod lower;
mod model;
mod parts;
#[cfg(feature = "resp")]
mod resp;
mod room;
mod ssd;
mod threads;
mod tiers;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_objects::{Clock, Key, ObjectStore, StoreConfig};

/// A store of so many MiB with one shard, and the hand of its clock.
fn small(mib: u64) -> (ObjectStore, Arc<AtomicU64>) {
    let config = StoreConfig {
        capacity_bytes: mib << 20,
        value_max_bytes: (mib << 20) / 2,
        shards: 1,
        room_wait_us: 0,
        high_percent: 100,
        ..StoreConfig::default()
    };
    with(&config)
}

fn with(config: &StoreConfig) -> (ObjectStore, Arc<AtomicU64>) {
    let (clock, hand) = Clock::manual();
    (ObjectStore::new(config, clock).unwrap(), hand)
}

fn pass(hand: &AtomicU64, us: u64) {
    hand.fetch_add(us, Ordering::SeqCst);
}

fn key(name: &str) -> Key<'_> {
    Key::anonymous(name.as_bytes())
}

/// Bytes that follow from a seed and tell where they are.
fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mut rng = baton_types::Rng::new(seed);
    let mut made = Vec::with_capacity(bytes + 8);
    while made.len() < bytes {
        made.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    made.truncate(bytes);
    made
}
