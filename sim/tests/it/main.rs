//! The simulator against its own oracle, against stepping, and against published figures.

#![expect(clippy::unwrap_used, reason = "a test that unwraps names its line")]

mod beyond;
mod bound;
mod calibration;
mod coupled;
mod determinism;
mod directed;
mod liveness;
mod pinned;
mod predictions;
mod routers;
mod scenario;
mod seeds;
mod sharing;
mod slow_links;
mod small_kv;
mod stepping;
mod written;
