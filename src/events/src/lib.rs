//! KV cache events: what vLLM, SGLang and Mooncake's store announce, read, mirrored in Baton's names, and published.

mod codec;
mod error;
pub mod hash;
mod mirror;
mod model;
mod msgpack;
mod publisher;
mod subscriber;
mod zmtp;

pub use codec::{Form, Limits, Speaker, decode, encode, sequence_of};
pub use error::{EventError, Kind, Stage};
pub use mirror::{Lineage, Mirror, MirrorConfig, MirrorStats, Roots};
pub use model::{Batch, BlockExtra, Change, EngineHash, Event, ExtraKey, Medium, Removed, Source, Stored};
pub use publisher::{Publisher, PublisherConfig, PublisherStats};
pub use subscriber::{Feed, Subscriber, SubscriberConfig, SubscriberStatus, Why};
