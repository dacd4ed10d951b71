//! Engines that run on the CPU: what computes, or only keeps the time of, prefill and decode.
//!
//! [`Engine`] is the port: a paged KV pool and the sequences that run over it, stepped by the node's
//! own thread. An engine neither knows requests nor caches: which slots hold what, and what is
//! shared, is the node's business, by the store core's word.
//!
//! - [`Builtin`] is a transformer of the Llama architecture. Its numbers are the same to the bit
//!   however its work is cut up: `kernel.rs` has the rules.
//! - [`TimedEngine`] takes as long as a cost profile says and moves KV bytes, but computes nothing.

mod attention;
mod builtin;
mod checkpoint;
mod compute_threads;
mod config;
mod exponential;
mod forward;
mod kernel;
mod pool;
mod port;
mod roster;
mod rotary;
mod sampler;
mod seeded;
mod timed;
mod weights;

pub use builtin::Builtin;
pub use pool::{BuildError, KvMemory, KvPool, PoolSpec};
pub use port::{Engine, Event, KvShape, KvSink, ModelCard, Sequence, SequenceId, StartError, StepTarget};
pub use seeded::{END_TOKEN, SeededSpec};
pub use timed::{TimedEngine, TimedSpec};
