//! Baton's store: decides which KV block of one node rests in which tier, and for how long.
//!
//! A pure core: it takes facts ([`Input`]) and answers with orders ([`Effect`]); a driver moves
//! the bytes. Slots are counted in blocks, never addressed. The rules it keeps:
//!
//! - a block is readable only once its bytes are sealed or copied in full (I2);
//! - a pinned block is never evicted, and at rest nothing is pinned (I3);
//! - in every tier, used + reserved ≤ capacity, and both equal the sum over blocks (I4);
//! - no block outlives its parent, and tiers only get slower along a chain: the fastest tier of a
//!   block is never faster than its parent's. So the readable part of a chain is always a prefix;
//! - the same configuration and inputs give the same effects (I10).
//!
//! Costs: one hash lookup per block at [`Input::Open`], none at `Seal` and `Close`; eviction takes
//! its victim in constant time.
#![no_std]
extern crate alloc;

mod capacity;
mod config;
mod effect;
mod evict;
mod input;
mod invariants;
mod lifecycle;
mod pin;
mod recover;
#[cfg(test)]
mod scenes;
mod single_flight;
mod snapshot;
mod stats;
mod store;
mod table;
#[cfg(test)]
mod testing;
mod tiering;
mod view;

pub use config::{ConfigError, Offload, StoreConfig};
pub use effect::Effect;
pub use evict::Eviction;
pub use input::{Input, Owner};
pub use snapshot::{BlockSnapshot, OwnerSnapshot, StoreSnapshot};
pub use stats::{Hits, StoreStats, TierStats};
pub use store::Store;
pub use view::CopyState;
