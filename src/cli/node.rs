//! `baton node`: one instance, attached to a conductor.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::engines::Engines;
use crate::node::NodeConfig;

/// Arguments of `baton node`.
#[derive(clap::Args)]
pub struct NodeArgs {
    /// Configuration file; its `store` section says how blocks are kept
    #[arg(short, long)]
    config: Option<PathBuf>,
    /// Its name: the same name is the same instance after a restart
    #[arg(long)]
    name: String,
    /// prefill, decode, both or store
    #[arg(long)]
    role: String,
    /// The conductor's control address, as http://ADDRESS:PORT
    #[arg(long)]
    conductor: String,
    /// Where peers reach its KV; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    kv_listen: SocketAddr,
    /// Names the machine: nodes of the same one share memory [default: this machine's name]
    #[arg(long)]
    host: Option<String>,
    /// Folder of its SSD tier [default: a temporary one]
    #[arg(long)]
    data: Option<PathBuf>,
    /// What it computes with
    #[command(flatten)]
    engines: Engines,
    /// Process that started this one: the node ends with it, however it ends
    #[arg(long, hide = true, value_name = "PID")]
    parent: Option<u32>,
    /// Log filter, like info or baton=debug
    #[arg(long, env = "BATON_LOG", default_value = "info")]
    log: String,
}

/// Runs `baton node` until Ctrl-C or SIGTERM.
///
/// # Errors
/// With one line for the user: what failed, and the remedy.
pub fn run(args: NodeArgs) -> Result<ExitCode, String> {
    crate::log::start(&args.log)?;
    args.parent.map_or(Ok(()), follow)?;
    let config = match &args.config {
        Some(path) => crate::config::load(path)?,
        None => crate::config::Config::default(),
    };
    let role = crate::conductor::parse_role(&args.role)?;
    let node = NodeConfig {
        name: args.name,
        role,
        control: args.conductor,
        kv_listen: args.kv_listen,
        host: args.host.unwrap_or_else(crate::up::host_name),
        engine: args.engines.choice()?,
        dram_blocks: args.engines.dram_blocks,
        ssd_blocks: args.engines.ssd_blocks,
        ssd_dir: args.data,
        store: config.store,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| format!("runtime: {e}"))?;
    runtime.block_on(async {
        let stop = crate::shutdown::on_signal()?;
        crate::node::run(node, stop).await
    })?;
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    Ok(ExitCode::SUCCESS)
}

/// Asks for SIGTERM when the process that started this one ends, even if it is killed.
fn follow(parent: u32) -> Result<(), String> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::TERM)).map_err(|e| format!("parent {parent}: {e}"))?;
    // It may have ended before it could be followed.
    match getppid().and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok()) {
        Some(now) if now == parent => Ok(()),
        _ => Err(format!("process {parent}, which started this node, has ended")),
    }
}
