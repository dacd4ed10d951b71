//! Copies between the memory of a GPU and pinned host memory, so that HBM can be a tier where there is one.
//!
//! Nothing of CUDA is needed to build: [`Driver::load`] looks for the driver's library when it is called, and
//! says by name what is missing. A [`Device`] hands out [`DeviceMemory`] and pins host [`super::Memory`]; a
//! [`Copier`] takes batches of [`Transfer`]s, cuts them into pieces, spreads these over streams and tells when
//! each batch has ended.
//!
//! **What is promised.** The ranges of a batch belong to it from [`Copier::submit`] until its [`Ended`] has been
//! told: after that nothing of it touches them, whether it was done, failed or was cancelled. The one exception
//! says so (`certain: false`): a device that failed and cannot be asked. What it may still touch is then never
//! given back, neither unpinned nor freed, and the copier refuses further work.
//!
//! **What is bounded.** Batches that have not been told of, pieces waiting, and copies under way on each stream:
//! see [`CopierConfig`]. What is full refuses with [`Declined::Full`].
//!
//! Calls make the device's context the current one of the calling thread and leave it so.

mod copier;
mod driver_api;
mod fault;
mod lane;
mod ledger;
mod transfer;

pub use copier::{Copier, CopierConfig, Watch};
pub use driver_api::{Device, DeviceMemory, Driver, Pinned};
pub use fault::DeviceFault;
pub use ledger::{CopierStats, CopyId, CopyOutcome, Declined, Ended};
pub use transfer::{Place, Transfer};
