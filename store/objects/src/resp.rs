//! Redis' protocol, versions 2 and 3: a server over the store, so that clients of Redis use it as it is, and a
//! small client.
//!
//! Values go from the socket straight into the arena and from the arena straight into the socket. Only strings
//! are known; `MSET` is a put for each key, one after the other, not one step for all.

mod admin;
mod below;
mod budget;
pub mod client;
mod command;
mod connection;
mod counts;
#[cfg(test)]
mod fuzz;
mod glob;
mod incoming;
mod outgoing;
mod places;
mod server;
mod strings;
mod trust;

pub use counts::ServerStats;
pub use server::{BUFFERS_MAX_BYTES, Login, RespConfig, Server};
