//! The command line: what can be asked for, and who answers.

mod bench;
mod bound;
mod check;
pub(crate) mod cluster;
mod completions;
mod config;
mod cpu;
pub(crate) mod engines;
mod etcd;
mod events;
mod guard;
mod indexer;
mod journal;
mod live;
mod loadgen;
#[cfg(feature = "mooncake")]
mod mooncake;
mod node;
mod nodes;
mod out;
mod paper;
mod policy;
mod profile;
mod rdma;
pub(crate) mod reference;
mod remote;
mod replay;
mod require;
mod schema;
mod serve;
mod servers;
#[cfg(test)]
mod shipped;
mod store;
mod table;
mod top;
mod trace;
mod tune;
mod up;
mod verdict;

use std::process::ExitCode;

use anyhow::{Context as _, Result};

/// KVCache-centric conductor for disaggregated LLM serving.
#[derive(clap::Parser)]
#[command(name = "baton", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Run the whole service on this machine: front door, conductor, prefill and decode nodes
    Up(Box<up::UpArgs>),
    /// Run front door and conductor; nodes attach from elsewhere
    Serve(Box<serve::ServeArgs>),
    /// Run one instance and attach it to a conductor
    Node(Box<node::NodeArgs>),
    /// Watch a running service in the terminal
    Top(top::TopArgs),
    /// Show, change, compare and take back the policy of a running service
    Policy(policy::PolicyArgs),
    /// Replay a trace through the scheduler in the simulator, or against a live endpoint
    Replay(Box<replay::ReplayArgs>),
    /// Find the ratio, admission and other settings that serve a trace best, and judge them on a part held out
    Tune(Box<tune::TuneArgs>),
    /// Lint, describe, convert, scale and make traces
    Trace(trace::TraceArgs),
    /// Show cost profiles, or fit one to measurements
    Profile(profile::ProfileArgs),
    /// Repeat the published experiments and print paper beside ours
    Paper(paper::PaperArgs),
    /// Watch what an engine announces about its KV cache
    Events(events::EventsArgs),
    /// Tell other routers which instance holds how much of a prompt (Mooncake's indexer calls)
    Indexer(indexer::IndexerArgs),
    /// Measure a router beside a plain proxy, or transfers beside what the machine can do
    Bench(bench::BenchArgs),
    /// Check and explain a configuration file
    Config(config::ConfigArgs),
    /// Try a configuration against the engines and places that it names, and say what is wrong
    Check(Box<check::CheckArgs>),
    /// Show what RDMA there is, and what is wrong with it
    Rdma(rdma::RdmaArgs),
    /// Keep objects in memory for connectors that speak Redis' protocol, and look into such a store
    Store(Box<store::StoreArgs>),
    /// Work with Mooncake: its engines, its master, its objects
    #[cfg(feature = "mooncake")]
    Mooncake(mooncake::MooncakeArgs),
    /// Print what a shell needs to complete this program's commands
    Completions(completions::CompletionsArgs),
    /// Print the manual page, or write one for each command
    Man(completions::ManArgs),
}

/// A number of threads.
fn threads(text: &str) -> Result<usize> {
    let threads = text.parse().ok().filter(|threads| (1..=1024).contains(threads));
    threads.context("give a number from 1 to 1024")
}

/// The runtime that serves: one thread that never wakes another, or several.
fn runtime(threads: Option<usize>) -> Result<tokio::runtime::Runtime> {
    let mut builder = match threads {
        Some(1) => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if let Some(threads) = threads.filter(|threads| *threads > 1) {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().context("runtime")
}

/// Runs a command; an error is one line that names the stage and the remedy.
pub fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Up(args) => up::run(*args),
        Command::Serve(args) => serve::run(*args),
        Command::Node(args) => node::run(*args),
        Command::Top(args) => top::run(&args),
        Command::Policy(args) => policy::run(&args),
        Command::Replay(args) => replay::run(*args),
        Command::Tune(args) => tune::run(*args),
        Command::Trace(args) => trace::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Paper(args) => paper::run(&args),
        Command::Events(args) => events::run(&args),
        Command::Indexer(args) => indexer::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Config(args) => config::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Rdma(args) => rdma::run(&args),
        Command::Store(args) => store::run(&args),
        #[cfg(feature = "mooncake")]
        Command::Mooncake(args) => mooncake::run(args),
        Command::Completions(args) => completions::completions(&args),
        Command::Man(args) => completions::man(&args),
    }
}
