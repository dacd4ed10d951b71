//! Words shared by Baton's cores: ids, block hashes, tiers, roles, service classes,
//! cost profiles and a small seeded generator.
//!
//! Everything here is plain data: no clocks, threads, files or sockets (`no_std`). Time is an
//! integer count of microseconds (`_us`), sizes carry their unit last (`_tokens`, `_bytes`).
#![no_std]
extern crate alloc;

mod block;
mod event;
mod fetch;
mod hash;
mod id;
mod pass;
mod profile;
mod rng;
mod role;
mod sampling;
mod secret;
pub mod simulated;
mod slo;
mod suggest;
mod tier;
mod tokens;

pub use block::{BlockHash, BlockKey, blocks_for};
pub use event::{CacheChange, CacheEvent};
pub use fetch::FetchPlan;
pub use hash::ChainHasher;
pub use id::{ClassId, Epoch, InstanceId, RequestId, TenantId};
pub use pass::{PassLimit, PassLoad};
pub use profile::{CostProfile, DecodeCost, FitReport, PrefillCost, ProfileError, StepCost, ValidRange};
pub use rng::Rng;
pub use role::Role;
pub use sampling::{Finish, Sampling, TokenLogprob};
pub use secret::Secret;
pub use slo::{MAX_OWN_OBJECTIVE_US, RequestObjectives, SloClass};
pub use suggest::nearest;
pub use tier::Tier;
pub use tokens::{Packer, Run, Tokens};
