//! The crate against scripted peers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod data;
mod master;
mod metadata;
mod peers;
