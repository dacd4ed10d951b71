//! `baton node`: one instance, attached to a conductor.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use baton_membership::Leaders;
use baton_membership::etcd::Etcd;
use baton_transports::RdmaDevices;
use baton_types::Role;
use tokio_util::sync::CancellationToken;

use crate::cli::engines::Engines;
use crate::cli::etcd::EtcdArgs;
use crate::cli::guard::GuardArgs;
use crate::cli::remote::RemoteArgs;
use crate::guard::ClusterGuard;
use crate::node::{NodeConfig, NodeError, Place, PublishAddress, RemoteNode};

/// Arguments of `baton node`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton node --name p0 --role prefill --conductor http://10.0.0.5:9090 --kv-listen 10.0.0.6:0\n  \
    baton node --name s0 --role store --conductor http://10.0.0.5:9090 --kv-listen 10.0.0.8:0 --dram-blocks 65536 --data /ssd/s0\n  \
    baton node --name v0 --role both --conductor http://10.0.0.5:9090 --engine vllm --url http://127.0.0.1:8000 --model /models/llama\n  \
    baton node --name vp --role prefill --conductor http://10.0.0.5:9090 --engine vllm --url http://127.0.0.1:8200 --handoff nixl --model /models/llama\n  \
    baton node --name sp --role prefill --conductor http://10.0.0.5:9090 --engine sglang --url http://10.0.0.7:30000 --bootstrap-port 8998 --model /models/llama")]
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
    /// Let the conductor change its role between prefill and decode, as the demand of the last minutes asks
    #[arg(long)]
    pub(super) may_change_role: bool,
    /// The conductor's control address, as http://ADDRESS:PORT
    #[arg(long, required_unless_present = "etcd", conflicts_with = "etcd")]
    pub(super) conductor: Option<String>,
    /// How it finds the conductor that leads, where there are several
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Protection of its ports, and its own credentials
    #[command(flatten)]
    guard: GuardArgs,
    /// Name that the certificates of conductors and peers are for [default: the host of their address]
    #[arg(long, value_name = "NAME")]
    cluster_tls_name: Option<String>,
    /// Where peers reach its KV; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    kv_listen: SocketAddr,
    /// RDMA devices for its KV, like mlx5_0,mlx5_1 in this order; all: whatever is active; none
    #[arg(long, value_name = "DEVICES", default_value = "all")]
    rdma_devices: RdmaDevices,
    /// Names the machine: nodes of the same one share memory [default: this machine's name]
    #[arg(long)]
    host: Option<String>,
    /// Folder of its SSD tier [default: a temporary one]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Publish its KV cache events here, in vLLM's format
    #[arg(long, value_name = "tcp://HOST:PORT")]
    publish: Option<String>,
    /// Repeat here what a subscriber missed
    #[arg(long, value_name = "tcp://HOST:PORT", requires = "publish")]
    publish_replay: Option<String>,
    /// Engine of the node; for a node of role store, the engine whose KV it keeps
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

/// How long what still runs at the end is waited for.
const LINGER: Duration = Duration::from_secs(2);

/// Runs `baton node` until Ctrl-C or SIGTERM.
///
/// # Errors
/// With one line for the user: what failed, and the remedy.
pub fn run(args: NodeArgs) -> Result<ExitCode> {
    crate::log::start(&args.log)?;
    let mut config = crate::config::load_or_default(args.config.as_deref())?;
    args.guard.put(&mut config.service);
    config.validate()?;
    let guard = ClusterGuard::read(&config.service, args.cluster_tls_name.clone())?;
    if let Some(address) = &args.conductor {
        // Before the engine is loaded, which may take minutes.
        guard.line(address).map_err(|status| anyhow!("--conductor {}", status.message()))?;
    }
    let role = crate::conductor::parse_role(&args.role)?;
    if args.may_change_role && !matches!(role, Role::Prefill | Role::Decode) {
        bail!(
            "--may-change-role is for the roles prefill and decode: a node of role {} does both parts or none",
            role.name()
        );
    }
    let etcd = args.etcd.client()?;
    let led =
        LeaderSource { etcd, cluster: args.etcd.cluster.clone(), until_stdin_ends: args.until_stdin_ends };
    if let Some(dialect) = args.engines.dialect() {
        ensure!(
            args.publish.is_none(),
            "--publish is for this program's engines: a server publishes its own KV events"
        );
        let vocabulary = args.engines.vocabulary(dialect)?;
        let node = RemoteNode { guard, ..args.remote.node(&args, (dialect, role), vocabulary)? };
        return led.keep(|latest, stop| crate::node::run_remote(node, Place::Elsewhere(latest), stop));
    }
    let node = NodeConfig {
        name: args.name,
        role,
        may_change_role: args.may_change_role,
        control: args.conductor.unwrap_or_default(),
        kv_listen: args.kv_listen,
        rdma: args.rdma_devices,
        host: args.host.unwrap_or_else(crate::up::host_name),
        engine: args.engines.choice()?,
        tokenizer: args.engines.tokenizer_name()?,
        dram_blocks: args.engines.dram_blocks,
        ssd_blocks: args.engines.ssd_blocks,
        ssd_dir: args.data,
        store: config.store,
        guard,
        publish: args.publish.map(|endpoint| PublishAddress { endpoint, replay: args.publish_replay }),
    };
    let movers = super::runtime(Some(2))?;
    let handle = movers.handle().clone();
    let ended = led.keep(|latest, stop| crate::node::run_led(node, latest, handle, stop));
    movers.shutdown_timeout(LINGER);
    ended
}

/// The conditions of a node's process: the leader to follow, and the parent whose end stops it.
struct LeaderSource {
    etcd: Option<Etcd>,
    cluster: String,
    until_stdin_ends: bool,
}

impl LeaderSource {
    /// Runs a node until it is stopped. It uses one thread, so that a message of its conductor wakes no other.
    fn keep<F: Future<Output = Result<(), NodeError>>>(
        self,
        node: impl FnOnce(Option<crate::node::Leaders>, CancellationToken) -> F,
    ) -> Result<ExitCode> {
        let runtime = super::runtime(Some(1))?;
        runtime.block_on(async {
            let stop = crate::shutdown::on_signal()?;
            if self.until_stdin_ends {
                follow_stdin(stop.clone())?;
            }
            let leaders = self.etcd.map(|etcd| Leaders::follow(&etcd, &self.cluster)).transpose()?;
            // Held until the node has ended: it is followed as long as this lives.
            let latest = leaders.as_ref().map(Leaders::latest);
            node(latest, stop).await.map_err(Error::from)
        })?;
        runtime.shutdown_timeout(LINGER);
        Ok(ExitCode::SUCCESS)
    }
}

/// Cancels `stop` at the end of standard input. The pipe is the one thing that the kernel closes
/// however the process at its other end came to its end.
fn follow_stdin(stop: tokio_util::sync::CancellationToken) -> Result<()> {
    let follow = move || {
        // The input's content does not matter, and an input that cannot be read has ended.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        stop.cancel();
    };
    let thread = std::thread::Builder::new().name("baton-stdin".into()).spawn(follow);
    thread.map(|_| ()).context("standard input cannot be followed")
}
