//! The promises of the `baton` binary, tested on the binary itself.
//!
//! One test binary with a module per topic: each further one would link the whole program again.

#![expect(
    clippy::unwrap_used,
    reason = "all of this is test code; the lint only sees that inside test functions"
)]

mod cli;
mod live;
mod program;
mod replay;
mod requirements;
mod rows;
mod settings;
mod top;
mod trace_faults;
mod trace_stats;
mod tune;
