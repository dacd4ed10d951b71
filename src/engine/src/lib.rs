//! Engines that run on the CPU: what computes, or only keeps the time of, prefill and decode.
//!
//! [`Engine`] is the port: a paged KV pool and the sequences that run over it, stepped by the node's
//! own thread. An engine neither knows requests nor caches: which slots hold what, and what is
//! shared, is the node's business, by the store core's word.

mod port;

pub use port::{Engine, Event, KvShape, KvSink, KvView, ModelCard, Sequence, SequenceId, StartError};
