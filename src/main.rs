//! The `baton` binary: one command a job; see `baton --help`.

#[cfg_attr(not(test), expect(dead_code, reason = "the service calls it; only its tests do so far"))]
mod capture;
mod cli;
mod config;
mod loadgen;

use clap::Parser as _;

#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    match cli::run(cli::Cli::parse()) {
        Ok(code) => code,
        Err(message) => {
            eprintln!("baton: {message}");
            std::process::ExitCode::FAILURE
        }
    }
}
