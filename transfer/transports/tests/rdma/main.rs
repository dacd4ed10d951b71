//! The RDMA transport on real verbs devices: two rails between two ends in one virtual machine, as
//! `scripts/rdma/test.sh` sets them up. `make test-rdma` runs it; it changes the network, so never elsewhere.
#![cfg(any(feature = "rdma", feature = "rdma-dlopen"))]

mod basics;
mod cuts;
mod ends;
mod failover;
mod killed;
mod memory;
mod windows;
mod rails;
mod scene;
