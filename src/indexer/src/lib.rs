//! The open indexer: who holds how much of a prompt, for routers that are not ours.
//!
//! Engines and stores announce what their caches hold; an [`Indexer`] follows them, one subscription per instance,
//! tenant and rank, and answers over HTTP how many leading tokens of a prompt each instance holds, by medium and by
//! rank. The calls are those of Mooncake's conductor ([`serve`]), so routers written for it can ask this one.
//!
//! [`Index`] is the pure part: events in, answers out, with no clock, socket or thread. Its content can be written as a
//! [`snapshot`], per stream and with checksums. A peer that joins, or the next life of the process, reads it. Following
//! continues from there where the engine is still the one that was followed.

mod config;
mod contract;
mod error;
mod follow;
mod http_server;
mod index;
mod join;
mod metrics;
mod service;
pub mod snapshot;

pub use config::{FixedConfig, read_config};
pub use contract::{Lookup, Publisher, Registration};
pub use error::{IndexerError, Kind};
pub use http_server::{ServerSettings, serve};
pub use index::{Context, Counts, Index, IndexLimits, Position, PrefixMatch, StreamId};
pub use join::join;
pub use service::{Indexer, IndexerSettings, RegistrationOutcome};
