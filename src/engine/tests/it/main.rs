//! The engines through their port.

#![expect(clippy::unwrap_used, reason = "a test that unwraps names its line")]

mod checkpoint;
mod exactness;
mod play;
mod reference;
mod running;
mod starts;
mod timed;
mod transformers;
