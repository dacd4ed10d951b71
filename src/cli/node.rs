//! `baton node`: one instance, attached to a conductor.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use tokio_util::sync::CancellationToken;

use crate::cli::engines::Engines;
use crate::cli::remote::RemoteArgs;
use crate::node::NodeConfig;

/// Arguments of `baton node`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton node --name p0 --role prefill --conductor http://10.0.0.5:9090 --kv-listen 10.0.0.6:0\n  \
    baton node --name v0 --role both --conductor http://10.0.0.5:9090 --engine vllm --url http://127.0.0.1:8000\n  \
    baton node --name vp --role prefill --conductor http://10.0.0.5:9090 --engine vllm --url http://127.0.0.1:8200 --handoff nixl\n  \
    baton node --name sp --role prefill --conductor http://10.0.0.5:9090 --engine sglang --url http://10.0.0.7:30000 --bootstrap-port 8998")]
pub struct NodeArgs {
    /// Configuration file; its `store` section says how blocks are kept
    #[arg(short, long)]
    config: Option<PathBuf>,
    /// Its name: the same name is the same instance after a restart
    #[arg(long)]
    pub(super) name: String,
    /// prefill, decode, both or store
    #[arg(long)]
    role: String,
    /// The conductor's control address, as http://ADDRESS:PORT
    #[arg(long)]
    pub(super) conductor: String,
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
    pub(super) engines: Engines,
    /// A server that computes
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    /// Stop when standard input ends, as it does when the process that holds its other end is gone
    #[arg(long, hide = true)]
    until_stdin_ends: bool,
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
    let config = match &args.config {
        Some(path) => crate::config::load(path)?,
        None => crate::config::Config::default(),
    };
    let role = crate::conductor::parse_role(&args.role)?;
    if let Some(dialect) = args.engines.dialect() {
        let node = args.remote.node(&args, dialect, role)?;
        return keep(args.until_stdin_ends, |stop| crate::node::run_remote(node, stop));
    }
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
    keep(args.until_stdin_ends, |stop| crate::node::run(node, stop))
}

/// Runs a node until it is told to stop.
fn keep<F: Future<Output = Result<(), String>>>(
    until_stdin_ends: bool,
    node: impl FnOnce(CancellationToken) -> F,
) -> Result<ExitCode, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| format!("runtime: {e}"))?;
    runtime.block_on(async {
        let stop = crate::shutdown::on_signal()?;
        if until_stdin_ends {
            follow_stdin(stop.clone())?;
        }
        node(stop).await
    })?;
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    Ok(ExitCode::SUCCESS)
}

/// Cancels `stop` at the end of standard input. The pipe is the one thing that the kernel closes
/// however the process at its other end came to its end.
fn follow_stdin(stop: tokio_util::sync::CancellationToken) -> Result<(), String> {
    let follow = move || {
        // What is said does not matter; an input that cannot be read has ended.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        stop.cancel();
    };
    let thread = std::thread::Builder::new().name("baton-stdin".into()).spawn(follow);
    thread.map(|_| ()).map_err(|e| format!("standard input cannot be followed: {e}"))
}
