//! KV cache events: what vLLM, SGLang and Mooncake's store announce, read, mirrored in Baton's names, and published.
//!
//! To follow an engine, a [`Subscriber`] turns its sockets into a row of epochs without holes, and a [`Mirror`]
//! turns their batches into [`CacheChange`](baton_types::CacheChange)s for the conductor's index:
//! [`Feed::Batch`] goes to [`Mirror::apply`], [`Feed::Cleared`] to [`Mirror::forget`].
//!
//! To be followed, a [`Publisher`] announces [`Change`]s in either [`Form`] and repeats missed batches. It sends a
//! snapshot to a subscriber that comes too late for that.
//!
//! [`decode`] and [`encode`] are the formats alone, [`hash`] the standard's names for blocks.

mod codec;
mod error;
#[cfg(test)]
mod fuzz;
pub mod hash;
mod mirror;
mod model;
mod msgpack;
mod publisher;
mod subscriber;
mod zmtp;

pub use codec::{Form, Limits, Speaker, decode, encode, sequence_of};
pub use error::{EventError, Kind, Stage};
pub use mirror::{Lineage, Mirror, MirrorConfig, Roots};
pub use model::{
    Batch, BlockExtra, Change, EngineHash, Event, ExtraKey, Medium, RemovedBlocks, Source, StoredBlocks,
};
pub use publisher::{Publisher, PublisherConfig};
pub use subscriber::{EpochReason, Feed, Subscriber, SubscriberConfig, SubscriberStatus};
