//! The `baton` binary: one command a job; see `baton --help`.
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

// First, for its macros.
#[macro_use]
mod log;

mod audit;
mod capture;
mod cli;
mod conductor;
mod config;
mod guard;
mod keys;
mod metrics;
mod node;
mod operator;
mod policy;
mod shutdown;
mod spans;
mod top;
mod up;

use clap::Parser as _;

#[cfg(not(test))]
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[cfg(test)]
#[global_allocator]
static GLOBAL: baton_fuzz::AllocationCounter<mimalloc::MiMalloc> =
    baton_fuzz::AllocationCounter(mimalloc::MiMalloc);

fn main() -> std::process::ExitCode {
    match cli::run(cli::Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            note!("baton: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
