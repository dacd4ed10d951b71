//! The transport from outside: one conformance suite on every medium, then hostile peers and faulty pipes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod conformance;
mod faults;
mod fetches;
mod guarded;
mod loopback;
mod mover_driver;
mod mover_faulty;
mod promises;
mod proxy;
mod published;
mod raw;
mod rigs;
mod scene;
mod segments;
mod strangers;
