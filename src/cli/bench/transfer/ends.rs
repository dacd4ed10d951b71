//! The two processes: this one, and its peer, which it starts and which ends with it.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, anyhow, bail};
use baton_transports::mover::{
    Exposure, Fault, Grant, Location, Memory, Notice, NoticeReceiver, Pages, PeerId, RemoteSegment,
    ShmConfig, ShmTransport, TcpConfig, TcpTransport, Transport, WindowId,
};

use super::ceiling;
use crate::cli::out;

/// Transports that can be measured between two processes of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Sockets
    Tcp,
    /// Shared memory
    Shm,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }
}

/// Nobody sends notices here.
struct NoNotices;

impl NoticeReceiver for NoNotices {
    fn notice(&self, _: &PeerId, _: Notice) {}
}

/// An endpoint of this process, with memory.
pub struct LocalEndpoint {
    pub transport: Arc<dyn Transport>,
    pub exposure: Arc<Exposure>,
    pub id: PeerId,
    pub memory: Arc<Memory>,
}

impl LocalEndpoint {
    pub fn start(kind: Kind, memory_bytes: u64, lanes: u32, poll: bool) -> Result<Self> {
        let failed = || format!("bench: start {}", kind.name());
        let epoch = u64::from(std::process::id());
        let (exposure, inbound) = (Exposure::new(), Arc::new(NoNotices));
        let (transport, id): (Arc<dyn Transport>, PeerId) = match kind {
            Kind::Tcp => {
                let mut config = TcpConfig::new(([127, 0, 0, 1], 0).into(), epoch);
                config.lanes = usize::try_from(lanes).expect("at most 16");
                let tcp = TcpTransport::start(config, exposure.clone(), inbound);
                let tcp = tcp.with_context(failed)?;
                (tcp.clone(), tcp.peer_id())
            }
            Kind::Shm => {
                static STARTED: AtomicU32 = AtomicU32::new(0);
                let number = STARTED.fetch_add(1, Ordering::Relaxed);
                let mut config = ShmConfig::new(format!("bench-{epoch}:{number}"), epoch);
                config.poll = poll;
                let shm = ShmTransport::start(config, exposure.clone(), inbound);
                let shm = shm.with_context(failed)?;
                (shm.clone(), shm.peer_id())
            }
        };
        let memory = filled(memory_bytes).context("memory").with_context(failed)?;
        transport.register(&memory).map_err(|fault| anyhow!("{}: {fault:?}", failed()))?;
        Ok(Self { transport, exposure, id, memory })
    }
}

impl Drop for LocalEndpoint {
    fn drop(&mut self) {
        self.transport.shutdown();
    }
}

/// Memory whose pages are all there.
pub fn filled(bytes: u64) -> std::io::Result<Arc<Memory>> {
    let bytes = usize::try_from(bytes).map_err(std::io::Error::other)?;
    let memory = Memory::shared(bytes, Pages::Ordinary, Location::Anywhere)?;
    let piece: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
    for at in (0..bytes).step_by(piece.len()) {
        memory.write(at as u64, &piece[..piece.len().min(bytes - at)]);
    }
    Ok(memory)
}

/// The other process.
pub struct Peer {
    child: Child,
    pub id: PeerId,
    pub window: Arc<RemoteSegment>,
    /// Port of its plain socket.
    pub port: u16,
}

impl Peer {
    pub fn start(kind: Kind, memory_mib: u32, poll: bool) -> Result<Self> {
        let failed = "bench: start the peer's process";
        let program = std::env::current_exe().context(failed)?;
        let mut command = Command::new(program);
        command.args(["bench", "transfer-peer", "--transport", kind.name()]);
        command.args(["--memory-mib", &memory_mib.to_string()]);
        if poll {
            command.arg("--poll");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context(failed)?;
        let mut line = String::new();
        let read = child.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
        match (read, parse(&line, u64::from(memory_mib) << 20)) {
            (Some(Ok(_)), Some((id, window, port))) => Ok(Self { child, id, window: Arc::new(window), port }),
            _ => {
                // Its own error is on the terminal.
                let _ = child.kill();
                let _ = child.wait();
                bail!("{failed}: it did not start")
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parse(line: &str, bytes: u64) -> Option<(PeerId, RemoteSegment, u16)> {
    let mut words = line.strip_prefix("peer ")?.split_whitespace();
    let id = PeerId { address: words.next()?.into(), epoch: words.next()?.parse().ok()? };
    let window = WindowId(words.next()?.parse().ok()?);
    let port = words.next()?.parse().ok()?;
    let transport = words.next()?.to_owned();
    let access = words.next().unwrap_or_default();
    let byte = |at: usize| u8::from_str_radix(access.get(at..at + 2)?, 16).ok();
    let access = (0..access.len()).step_by(2).map(byte).collect::<Option<Vec<u8>>>()?;
    Some((id, RemoteSegment { window, bytes, access: vec![(transport, access)] }, port))
}

/// The body of the peer's process.
pub fn serve(kind: Kind, memory_bytes: u64, poll: bool) -> Result<()> {
    let failed = |fault: Fault| anyhow!("bench: the peer's process: {fault:?}");
    let near = LocalEndpoint::start(kind, memory_bytes, 1, poll)?;
    let opened = near.exposure.open(near.memory.clone(), 0, memory_bytes, Grant::ReadWrite);
    let window = opened.map_err(failed)?;
    let access = near.transport.access(window, &near.memory, 0, memory_bytes);
    let access = access.map_err(failed)?;
    let access: String = access.iter().map(|byte| format!("{byte:02x}")).collect();
    let port = ceiling::serve(memory_bytes).context("bench: the peer's process")?;
    let (id, name) = (&near.id, kind.name());
    out::print(&format!("peer {} {} {} {port} {name} {access}\n", id.address, id.epoch, window.0))?;
    // Runs until the parent process ends. A read that fails is an end too.
    let _ = std::io::stdin().read(&mut [0]);
    Ok(())
}
