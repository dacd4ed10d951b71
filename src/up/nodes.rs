//! The nodes of a machine: tasks of this process, or processes of their own.

use std::net::SocketAddr;
use std::process::Stdio;

use baton_transports::RdmaDevices;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{Plan, UpError};
use crate::guard::ClusterGuard;
use crate::node::{NodeConfig, NodeError};

/// How long a node's process may take to stop.
const STOP_WITHIN: std::time::Duration = std::time::Duration::from_secs(5);

/// The nodes that were started.
pub(super) struct Nodes {
    stop: CancellationToken,
    tasks: JoinSet<Result<(), NodeError>>,
    processes: Vec<(String, Child)>,
}

impl Nodes {
    pub(super) async fn start(
        plan: &Plan,
        (control, guard): (SocketAddr, &ClusterGuard),
    ) -> Result<Self, UpError> {
        let control = format!("{}://{control}", guard.scheme());
        let mut nodes = Self { stop: CancellationToken::new(), tasks: JoinSet::new(), processes: Vec::new() };
        for (name, role) in plan.layout.nodes() {
            if plan.processes {
                nodes.processes.push((name.clone(), spawn(plan, &name, role, &control)?));
            } else {
                let config = NodeConfig {
                    ssd_dir: plan.data.as_ref().map(|folder| folder.join(&name)),
                    name,
                    role,
                    may_change_role: false,
                    control: control.clone(),
                    kv_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
                    rdma: RdmaDevices::default(),
                    host: super::host_name(),
                    engine: plan.engine.clone(),
                    // The front door's is read from the same folder.
                    tokenizer: String::new(),
                    dram_blocks: plan.dram_blocks,
                    ssd_blocks: plan.ssd_blocks,
                    store: plan.config.store.clone(),
                    guard: guard.clone(),
                    publish: None,
                };
                nodes.tasks.spawn(crate::node::run(config, nodes.stop.clone()));
            }
        }
        for (name, child) in &nodes.processes {
            note!("baton: node {name} is process {}", child.id().unwrap_or(0));
        }
        Ok(nodes)
    }

    /// Waits until a node of this process cannot go on. Node processes may come and go: an operator who kills one wants
    /// to see the effect.
    pub(super) async fn first_failure(&mut self) -> UpError {
        while let Some(ended) = self.tasks.join_next().await {
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(why)) => return UpError::Node(why),
                Err(panicked) => return UpError::NodeTask(panicked),
            }
        }
        std::future::pending().await
    }

    pub(super) async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
        for (_, child) in &mut self.processes {
            if let Some(pid) =
                child.id().and_then(|pid| rustix::process::Pid::from_raw(i32::try_from(pid).ok()?))
            {
                // A process that is gone already needs no signal.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
        for (name, mut child) in self.processes {
            if tokio::time::timeout(STOP_WITHIN, child.wait()).await.is_err() {
                note!("baton: node {name} did not stop in time and is killed");
                let _ = child.kill().await;
            }
        }
    }
}

fn spawn(plan: &Plan, name: &str, role: baton_types::Role, control: &str) -> Result<Child, UpError> {
    let program = std::env::current_exe().map_err(UpError::Program)?;
    let mut command = Command::new(program);
    command
        .args(["node", "--name", name, "--role", role.name()])
        .arg(format!("--conductor={control}"))
        .arg(format!("--log={}", plan.log))
        .arg("--until-stdin-ends")
        .args(&plan.engine_arguments)
        // The end of the pipe signals to the node that this process is gone, even if it was killed.
        .stdin(Stdio::piped())
        .kill_on_drop(true);
    if let Some(path) = &plan.config_path {
        command.arg("--config").arg(path);
    }
    if let Some(folder) = &plan.data {
        command.arg("--data").arg(folder.join(name));
    }
    // Ctrl-C at the terminal is for this process, which then stops its nodes in order.
    command.process_group(0);
    command.spawn().map_err(|error| UpError::Process { name: name.to_owned(), error })
}
