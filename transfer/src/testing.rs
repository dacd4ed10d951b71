//! Tests of the mover: a naive world with real bytes, random and built scenes in it, and a bench.

pub(crate) mod bench;
mod counters;
mod properties;
mod scenes;
mod snapshot;
mod world;
