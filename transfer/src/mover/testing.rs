//! Tests of the mover: a naive world with real bytes, and random and built scenes in it.

mod counters;
mod properties;
mod scenes;
mod world;
