//! The package `mooncake` that vLLM and others import, over Baton: `mooncake.engine.TransferEngine` moves bytes
//! with [`baton_transports::mover`], `mooncake.store.MooncakeDistributedStore` keeps values in `baton store serve`.
//!
//! [`engine`] and [`store`] know nothing of Python and are tested without one; the module `bindings`, behind the
//! feature `extension`, is the thin layer that engines see. All addresses of memory come in through [`raw`].

#[cfg(feature = "extension")]
mod bindings;
pub mod c;
pub mod engine;
mod failure;
mod maps;
mod ranges;
pub mod raw;
pub mod store;

pub use failure::Failure;
