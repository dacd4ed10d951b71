//! The one way that KV takes between nodes. The receiving side lends a window of registered memory, the sending side
//! writes into it through the transfer engine ([`crate::mover`]), over shared memory, RDMA or TCP, and says on their
//! connection how far it is. The window is a ring: the receiver takes bytes out and acknowledges them, so that a
//! window of any size carries a hand-off of any size.
//!
//! Nothing lands in KV itself. The receiver copies bytes out of the window after the sender's batch has ended, and it
//! revokes the window (which is the fence) before it lends the memory again. A late write of a slow or frozen sender
//! then finds no window.

mod receive;
mod transports;
mod write;

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use crate::arena::{Arena, Loan};
use crate::error::{Kind, Stage, TransportError};
use crate::mover::{
    BatchId, Exposure, Grant, Location, Memory, Mover, MoverSettings, Notice, NoticeReceiver, Pages, PeerId,
    RemoteSegment, TcpTls,
};
pub use receive::{ArrivedPieces, Piece};
pub(crate) use receive::{ReceiveWindow, Stretch};
use transports::Transports;
pub(crate) use write::WindowWriter;

/// The smallest window that is lent. Less would cost more in messages than in copies.
const WINDOW_BYTES_MIN: u64 = 64 << 10;
/// One window takes this part of what is free at most.
const FREE_SHARE: u64 = 32;

/// Settings of a node's data plane.
#[derive(Clone, Debug)]
pub struct DataPlaneConfig {
    /// Where its TCP listens; the port is any that is free.
    pub listen: IpAddr,
    /// Registered memory for windows, and as much for blocks that peers fetch. Where many share it, windows get
    /// smaller; where there is no room for the smallest, an offer is put off.
    pub arena_bytes: usize,
    /// Memories that hand-offs leave from: an engine's pool.
    pub sources: Vec<Arc<Memory>>,
    /// Whether peers of the same host ([`crate::EndpointConfig::host`]) are reached through shared memory.
    pub shared_memory: bool,
    /// Which RDMA devices it uses.
    pub rdma: RdmaDevices,
}

/// Which RDMA devices a node uses. In words: `all`, `none`, or names with commas between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RdmaDevices {
    /// All whose port is active, where there are any and RDMA is built in.
    #[default]
    All,
    /// None: KV goes without RDMA.
    None,
    /// These, in this order. The node does not start without them.
    Named(Vec<String>),
}

impl FromStr for RdmaDevices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        match names.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["all"] => Ok(Self::All),
            ["none"] => Ok(Self::None),
            _ => {
                let wrong = |name: &&String| matches!(name.as_str(), "" | "all" | "none");
                if let Some(name) = names.iter().find(wrong) {
                    return Err(format!(
                        "'{name}' is no device; give all, none, or names like mlx5_0,mlx5_1"
                    ));
                }
                let twice = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name));
                match twice {
                    Some((_, name)) => Err(format!("{name} stands there twice")),
                    None => Ok(Self::Named(names)),
                }
            }
        }
    }
}

impl DataPlaneConfig {
    /// Over every transport that there is, with 64 MiB for windows.
    pub fn new(listen: IpAddr) -> Self {
        let (arena_bytes, rdma) = (64 << 20, RdmaDevices::All);
        Self { listen, arena_bytes, sources: Vec::new(), shared_memory: true, rdma }
    }
}

/// This node's part in the transfer engine.
pub(crate) struct DataPlane {
    mover: Mover,
    me: PeerId,
    /// The transports that it has, and what it has not and why.
    transports: Vec<String>,
    incoming: Arc<Arena>,
    outgoing: Arc<Arena>,
}

impl std::fmt::Debug for DataPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lent = self.lent_bytes();
        f.debug_struct("DataPlane").field("me", &self.me).field("lent_bytes", &lent).finish_non_exhaustive()
    }
}

/// Nodes need no notices: their own connection says what is there.
struct NoNotices;

impl NoticeReceiver for NoNotices {
    fn notice(&self, _from: &PeerId, _notice: Notice) {}
}

/// A window in the words of the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LentWindow {
    pub(crate) peer: PeerId,
    pub(crate) segment: RemoteSegment,
}

impl DataPlane {
    /// Listens, and registers the memory. Shared memory is for peers that give the machine the same name.
    ///
    /// # Errors
    /// At [`Stage::Bind`]: [`Kind::Unavailable`] for no port, memory or threads to be had, [`Kind::Invalid`] for RDMA
    /// devices that were named and cannot be used, and for too little memory.
    pub(crate) fn start(
        config: &DataPlaneConfig,
        (machine, epoch): (&str, u64),
        tls: Option<TcpTls>,
    ) -> Result<Arc<Self>, TransportError> {
        let of_kind = |kind, what: &str, why: String| {
            TransportError::new(kind, Stage::Bind, format!("transfer engine: {what}: {why}"))
        };
        let failed = |what: &str, why: String| of_kind(Kind::Unavailable, what, why);
        if (config.arena_bytes as u64) < WINDOW_BYTES_MIN {
            let why = format!("arena_bytes {} is below {WINDOW_BYTES_MIN}", config.arena_bytes);
            return Err(of_kind(Kind::Invalid, "memory", why));
        }
        // A caller of the engine's port learns the epoch, not the windows: their numbers go to those alone who have
        // been let in.
        let exposure = Exposure::new();
        let mut found = Transports::find(config, (machine, epoch), tls, &exposure)
            .map_err(|(kind, why)| of_kind(kind, "starting", why))?;
        let arena = || {
            let memory = Memory::shared(config.arena_bytes, Pages::Ordinary, Location::Anywhere);
            memory.map_err(|error| failed("memory", error.to_string()))
        };
        let arenas = [arena()?, arena()?];
        let memories: Vec<Arc<Memory>> = arenas.iter().chain(&config.sources).cloned().collect();
        found.keep_reaching(&memories);
        let Transports { transports, me, words } = found;
        let settings = MoverSettings { openers: 2, ..MoverSettings::default() };
        let mover = Mover::new(settings, exposure, transports)
            .map_err(|fault| failed("starting", format!("{fault:?}")))?;
        for memory in &memories {
            mover.register(memory).map_err(|fault| failed("registering", format!("{fault:?}")))?;
        }
        let [incoming, outgoing] = arenas.map(Arena::new);
        Ok(Arc::new(Self { mover, me, transports: words, incoming, outgoing }))
    }

    /// Room for a window of `bytes`, or of less where there is less: down to the smallest that is of use.
    pub(crate) fn lend(&self, bytes: u64) -> Option<Loan> {
        lend_from(&self.incoming, bytes)
    }

    /// Opens a window over the room.
    pub(crate) fn open(self: &Arc<Self>, loan: Loan) -> Result<ReceiveWindow, TransportError> {
        let opened = self.mover.open_window(loan.memory(), loan.at(), loan.bytes(), Grant::Write);
        let segment = opened.map_err(|fault| {
            TransportError::new(Kind::Bug, Stage::Serve, format!("opening a window: {fault:?}"))
        })?;
        Ok(ReceiveWindow::new(self.clone(), loan, segment))
    }

    /// Room for a copy of what leaves, as [`DataPlane::lend`] has it for what comes.
    pub(crate) fn stage(&self, bytes: u64) -> Option<Loan> {
        lend_from(&self.outgoing, bytes)
    }

    /// The transports that it has, the preferred first, and what it has not and why.
    pub(crate) fn transports(&self) -> &[String] {
        &self.transports
    }

    /// See [`Mover::check`].
    pub(crate) fn check(&self) -> Result<(), String> {
        self.mover.check()
    }

    /// Bytes that have left here, by transport and device.
    pub(crate) fn moved_bytes(&self) -> Vec<(&'static str, u64)> {
        self.mover.moved_bytes()
    }

    /// Bytes of either memory that are lent now.
    pub(crate) fn lent_bytes(&self) -> u64 {
        self.incoming.lent_bytes() + self.outgoing.lent_bytes()
    }

    /// Ends the engine: it waits for what is under way, so not on a thread of the runtime.
    pub(crate) async fn shutdown(self: &Arc<Self>) {
        let plane = self.clone();
        // It fails only by a panic, which the runtime has reported.
        let _ = tokio::task::spawn_blocking(move || plane.mover.shutdown()).await;
    }

    /// Cancels batches that read from a loan. The engine may still do so: the loan is kept until all have ended.
    fn settle_unwanted(self: &Arc<Self>, batches: Vec<BatchId>, loan: Option<Arc<Loan>>) {
        batches.iter().for_each(|batch| self.mover.cancel(*batch));
        let plane = self.clone();
        let wait = async move {
            for batch in batches {
                plane.mover.finished(batch).await;
            }
            drop(loan);
        };
        // Without a runtime the process is about to end and lends no further window.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(wait);
        }
    }
}

/// A share of what is free, so that many who come at once all find room: 141 windows fit 64 MiB, more than an endpoint
/// takes flights by default.
fn lend_from(arena: &Arc<Arena>, bytes: u64) -> Option<Loan> {
    let share = (arena.free_bytes() / FREE_SHARE).max(WINDOW_BYTES_MIN);
    let mut bytes = bytes.clamp(1, share);
    loop {
        if let Some(loan) = arena.lend(bytes) {
            return Some(loan);
        }
        if bytes <= WINDOW_BYTES_MIN {
            return None;
        }
        // The free memory may be fragmented.
        bytes = (bytes / 2).max(WINDOW_BYTES_MIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_windows_as_an_endpoint_takes_flights_find_room() {
        let config = DataPlaneConfig::new([127, 0, 0, 1].into());
        let memory = Memory::private(config.arena_bytes, Location::Anywhere).unwrap();
        let (arena, limits) = (Arena::new(memory), crate::Limits::default());
        let mut windows: Vec<Loan> = Vec::new();
        while let Some(window) = lend_from(&arena, limits.window_bytes.into()) {
            windows.push(window);
        }
        assert!(windows.len() >= limits.flights, "{}", windows.len());
        assert_eq!(windows[0].bytes(), 2 << 20);
        assert!(windows.iter().all(|window| window.bytes() >= WINDOW_BYTES_MIN));
        // In pieces, too.
        let mut at = 0;
        windows.retain(|_| {
            at += 1;
            at % 2 == 0
        });
        assert!(lend_from(&arena, u64::MAX).is_some());
    }
}
