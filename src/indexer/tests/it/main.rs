//! The calls as routers make them, publishers as they come and go, and snapshots between indexers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod calls;
mod engine;
mod following;
mod fuzz;
mod snapshots;
#[path = "../../../events/tests/it/wire.rs"]
#[allow(dead_code, reason = "shared with the tests of the events themselves, which use all of it")]
mod wire;
