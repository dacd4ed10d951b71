//! `baton up`: everything on one machine, nothing else installed.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use crate::cli::engines::Engines;
use crate::up::{Layout, Plan};

/// Arguments of `baton up`.
#[derive(clap::Args)]
pub struct UpArgs {
    /// Configuration file; its `service` section is what this command reads first
    #[arg(short, long)]
    config: Option<PathBuf>,
    /// Where clients are served [default: the configuration's service.listen]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// How many nodes of each part, like 4p4d, 3b (b runs both phases) or 2p2d1s (s lends room and computes nothing)
    #[arg(long, default_value = "2p2d")]
    nodes: Layout,
    /// Start every node as a process of its own
    #[arg(long)]
    processes: bool,
    /// Engines of the nodes
    #[command(flatten)]
    engines: Engines,
    /// Threads that serve clients, and as many that decide and listen to nodes; 1 spends the least processor time a
    /// call [default: one a core]
    #[arg(long, value_parser = super::threads)]
    threads: Option<usize>,
    /// Folder of the nodes' SSD tiers [default: a temporary one, removed at the end]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Log filter, like info or baton=debug
    #[arg(long, env = "BATON_LOG", default_value = "warn")]
    log: String,
}

/// Runs `baton up` until Ctrl-C or SIGTERM.
///
/// # Errors
/// With one line for the user: what failed, and the remedy.
pub fn run(mut args: UpArgs) -> Result<ExitCode> {
    crate::log::start(&args.log)?;
    let mut config = crate::policy::at_start(args.config.as_deref())?;
    // The nodes started here belong to this conductor: what one of the two is given, both have.
    if let Some(block_tokens) = args.engines.block_tokens {
        config.scheduler.block_tokens = block_tokens;
    }
    args.engines.block_tokens = Some(config.scheduler.block_tokens);
    if let Some(listen) = args.listen {
        config.service.listen = listen;
    }
    config.validate()?;
    let plan = Plan {
        config,
        config_path: args.config,
        layout: args.nodes,
        processes: args.processes,
        engine: args.engines.choice()?,
        engine_words: args.engines.words(),
        engine_arguments: args.engines.arguments(),
        dram_blocks: args.engines.dram_blocks,
        ssd_blocks: args.engines.ssd_blocks,
        data: args.data,
        log: args.log,
        threads: args.threads,
    };
    let runtime = super::runtime(args.threads)?;
    let read = || args.engines.tokenization().map_err(|e| format!("{e:#}"));
    runtime.block_on(crate::up::run(plan, read))?;
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    Ok(ExitCode::SUCCESS)
}
