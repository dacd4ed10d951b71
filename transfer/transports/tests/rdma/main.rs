//! The RDMA transport on real verbs devices: two rails between two ends in one virtual machine, as
//! `scripts/rdma/test.sh` sets them up. `make test-rdma` runs it; it changes the network, so never elsewhere.
#![cfg(any(feature = "rdma", feature = "rdma-dlopen"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod basics;
mod conformance;
mod cuts;
mod ends;
mod failover;
mod handoffs;
mod killed;
mod memory;
mod rails;
mod scene;
mod speed;
mod windows;

// The suite of every transport, and what it stands on; the guest skips what it says of the others.
#[path = "../it/scene.rs"]
#[expect(dead_code, reason = "the other tests use the rest")]
mod flights;
#[path = "../it/loopback.rs"]
mod loopback;
#[path = "../it/promises.rs"]
mod promises;
#[path = "../it/rigs.rs"]
mod rigs;
