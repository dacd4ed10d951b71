//! A client of etcd: keys, leases and watches, each call bounded in time, over several endpoints.

mod client;
mod config;
mod fault;
mod follow;
mod keys;
mod lease;
mod watch;

pub use client::Etcd;
pub use config::EtcdConfig;
pub(crate) use follow::{Follower, follow};
pub use keys::{Act, Condition, Entry, Keys, Listing, Outcome};
pub use lease::Lease;
pub use watch::{Batch, Event, Watching};
