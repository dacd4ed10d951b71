//! The crate against scripted peers.

mod data;
mod master;
mod metadata;
mod peers;
