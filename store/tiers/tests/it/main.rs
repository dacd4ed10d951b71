//! The crate from outside: one conformance suite for every tier, and a cache on a real file.

mod conformance;
mod damage;
mod killed;
mod real_file;
