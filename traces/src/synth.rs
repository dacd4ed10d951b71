//! Seeded workloads: look-alikes of the published traces, and made-to-measure ones.
//!
//! Equal arguments give equal traces. Nothing here holds rows of a published trace, only figures
//! about them.

mod like;
mod sample;
mod workload;

pub use like::{Bounds, PublishedFigures, PublishedTrace, bounds, like, published};
pub use workload::{Kind, Workload, workload};
