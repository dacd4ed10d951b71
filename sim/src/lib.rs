//! Baton's simulator: the real cores, driven by discrete events over traces.
//!
//! [`World`] carries the cores' effects out against models of engines, links and disks; a run is
//! repeatable bit for bit from its [`Setup`] and workload. No threads inside a run, no clock.

pub mod bound;
pub mod engine;
pub mod events;
pub mod faults;
pub mod fit;
pub mod interval;
pub mod metrics;
pub mod network;
pub mod oracle;
pub mod paper;
pub mod profiles;
pub mod report;
pub mod setup;
pub mod tune;
pub mod workload;
mod world;

pub use baton_types::simulated::{Clients, Handoff};
pub use metrics::RunResult;
pub use setup::{Pool, Setup};
pub use workload::{TraceWorkload, Workload};
pub use world::{ConductorInput, Step, World, own_blocks};
