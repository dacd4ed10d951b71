//! `baton store`: objects by key in this machine's memory, served over Redis' protocol; and what is in such a store.

mod ask;
mod bench;
mod load;
mod serve;

use std::process::ExitCode;

use anyhow::Result;

/// Arguments of `baton store`.
#[derive(clap::Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    what: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Keep objects in memory and serve them over Redis' protocol
    Serve(Box<serve::ServeArgs>),
    /// List keys
    Ls(ask::LsArgs),
    /// Show what is known of a key
    Stat(ask::KeyArgs),
    /// Read a value
    Get(ask::GetArgs),
    /// Write a value
    Put(ask::PutArgs),
    /// Read a value and compare it with its checksum, there and here
    Verify(ask::KeyArgs),
    /// Remove keys
    Del(ask::DelArgs),
    /// Move what one of several stores holds to the others
    Drain(ask::DrainArgs),
    /// Measure a store in this process and over a socket, beside what the machine can do
    Bench(bench::BenchArgs),
}

/// Runs `baton store`.
pub fn run(args: &StoreArgs) -> Result<ExitCode> {
    match &args.what {
        Command::Serve(args) => serve::run(args),
        Command::Ls(args) => ask::ls(args),
        Command::Stat(args) => ask::stat(args),
        Command::Get(args) => ask::get(args),
        Command::Put(args) => ask::put(args),
        Command::Verify(args) => ask::verify(args),
        Command::Del(args) => ask::del(args),
        Command::Drain(args) => ask::drain(args),
        Command::Bench(args) => bench::run(args),
    }
}
