//! The `baton` binary: one command a job; see `baton --help`.

mod capture;
mod cli;
mod conductor;
mod config;
mod guard;
mod log;
mod metrics;
mod node;
mod policy;
mod shutdown;
mod spans;
mod top;
mod up;

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
