//! How engines name blocks, computed here: to check what they announce, and to announce what they understand.
//!
//! Baton itself needs none of it to follow an engine ([`Mirror`](crate::Mirror) goes by tokens and parents);
//! these are for indexers that compare hashes of several engines, and for publishing under the names of one.

mod cbor;
mod engine;
mod pickle;
mod rolling;

pub use engine::{Algorithm, EngineChain, Tagged};
pub use rolling::Rolling;
