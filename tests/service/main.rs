//! The live service as its users meet it: real processes, real sockets, real signals.
//!
//! Every test starts a `baton up` of its own on free ports, with its files in a folder of its own, and
//! sees to it that nothing is left of it. Clients are written on plain sockets: what they do wrong on
//! purpose, such as leaving in the middle of a stream, no HTTP library would let them do.

#![expect(
    clippy::unwrap_used,
    reason = "all of this is test code; the lint only sees that inside test functions"
)]

mod actors;
mod answers;
mod attainment;
mod bucket;
mod chaos;
mod clients;
mod crowd;
mod edge;
mod guarded;
mod http;
mod lenders;
mod lifecycle;
mod measure;
mod memory;
mod objectives;
mod objects;
mod operators;
mod ordeal;
mod overload;
mod page;
mod pauses;
mod policy;
mod publish;
mod records;
mod schedule;
mod secrets;
mod servers;
mod service;
mod several;
mod start;
mod stores;
