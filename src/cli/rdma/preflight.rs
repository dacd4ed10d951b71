//! Whether this node's devices reach another node's, by opening a path from each.

use std::fmt::Write as _;
use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use baton_transports::mover::rdma::{RdmaConfig, RdmaNode, RdmaTransport};
use baton_transports::mover::{
    Completion, CompletionQueue, Exposure, Fault, Notice, NoticeReceiver, PathId, PeerId, Transport as _,
};

use crate::cli::out;

/// The life of every doctor: they have nothing to confuse.
const EPOCH: u64 = 0xd0c;
/// Answers that are timed on each path.
const ANSWERS: u64 = 100;
/// How long one answer may take.
const LIMIT: Duration = Duration::from_secs(5);

/// A doctor keeps no notices.
struct NullReceiver;

impl NoticeReceiver for NullReceiver {
    fn notice(&self, _from: &PeerId, _notice: Notice) {}
}

fn start(address: &str, devices: &[String]) -> Result<Arc<RdmaTransport>> {
    let failed = || format!("rdma doctor: listening at {address}");
    let listener = TcpListener::bind(address).with_context(failed)?;
    let address = listener.local_addr().with_context(failed)?.to_string();
    let id = PeerId { address, epoch: EPOCH };
    let config = RdmaConfig { devices: devices.to_vec(), ..RdmaConfig::default() };
    let node = RdmaNode { id, exposure: Exposure::new(), inbound: Arc::new(NullReceiver) };
    RdmaTransport::start(config, listener, node).map_err(|fault| anyhow!("rdma doctor: {fault:?}"))
}

/// Is the peer of another node's doctor, until interrupted.
pub(super) fn listen(address: &str, devices: &[String]) -> Result<ExitCode> {
    let transport = start(address, devices)?;
    out::print(&format!("waiting for `baton rdma doctor --peer` at {address}; interrupt to end\n"))?;
    let runtime = crate::cli::runtime(Some(1))?;
    let ended = runtime.block_on(tokio::signal::ctrl_c());
    transport.shutdown();
    ended.map(|()| ExitCode::SUCCESS).context("rdma doctor")
}

/// Opens a path from every device to a doctor that listens, and times answers over RDMA.
pub(super) fn preflight(peer: &str, devices: &[String]) -> Result<ExitCode> {
    let transport = start("0.0.0.0:0", devices)?;
    let peer = PeerId { address: peer.to_owned(), epoch: EPOCH };
    let (mut text, mut reached) = (String::new(), true);
    for (number, device) in (0..).zip(transport.devices()) {
        let line = match time(&transport, PathId(number), &peer, &device) {
            Ok(each) => format!("ok      {device}: {ANSWERS} answers over RDMA, {each:?} each"),
            Err(fault) => {
                reached = false;
                format!("PROBLEM {device}: {fault:?}")
            }
        };
        let _ = writeln!(text, "{line}");
    }
    transport.shutdown();
    out::print(&text)?;
    Ok(if reached { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn time(transport: &RdmaTransport, id: PathId, peer: &PeerId, device: &str) -> Result<Duration, Fault> {
    let queue = Arc::new(CompletionQueue::default());
    let path = transport.open(id, peer, device, queue.clone())?;
    let started = Instant::now();
    let mut seen = Vec::new();
    for ticket in 0..ANSWERS {
        path.probe(ticket);
        let until = Instant::now() + LIMIT;
        while seen.is_empty() {
            if Instant::now() >= until {
                return Err(Fault::Silent(format!("no answer within {LIMIT:?}")));
            }
            queue.wait(&mut seen, LIMIT);
        }
        match seen.drain(..).next() {
            Some(Completion::Notified { .. }) => {}
            other => return Err(Fault::Path(format!("the path failed: {other:?}"))),
        }
    }
    Ok(started.elapsed() / u32::try_from(ANSWERS).unwrap_or(1))
}
