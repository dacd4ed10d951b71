//! Remote engines over real sockets, before stand-ins that misbehave as the real ones do.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

mod bodies;
mod cancel;
mod faults;
mod misuse;
mod pages;
mod pairs;
mod recorded;
mod scene;
mod text;
mod vocabulary;
mod whole;
