//! The front door over real sockets, before a backend that does what a script says.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

mod callers;
mod chat;
mod completions;
mod connections;
mod errors;
mod http1;
mod lifecycle;
mod scripted;
mod tools;
