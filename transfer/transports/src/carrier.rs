//! Hand-offs and fetches by the transfer engine. In a hand-off the receiver lends a window of registered memory,
//! the sender writes each layer's slices into it as they are ready, over whatever paths the engine finds, and the
//! receiver verifies all of it when the sender says that all is there. In a fetch the asker lends the window, for
//! as many blocks at a time as it has room for, and the holder writes them (`haul`).
//!
//! Nothing lands in KV itself: the window is closed (which is the fence) before a byte is looked at, so what
//! a slow or frozen sender still does later finds a window that is no more.

mod haul;
mod ways;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::arena::{Arena, Loan};
use crate::error::{Kind, Stage, TransportError};
use crate::mover::{
    Batch, BatchId, Direction, Exposure, Failure, Grant, Inbound, Location, Memory, Mover, MoverSettings,
    Notice, Op, Outcome, Pages, PeerId, Progress, Reason, Region, RemoteSegment, TcpTls,
};
use crate::receiver::Plan;
use baton_transfer::Fault;
use baton_transfer::Priority;
use ways::Ways;

/// Slices that wait to be posted together at most.
const BATCH_SLICES: usize = 64;
/// Batches under way for one flight; the next one waits for the oldest.
const BATCHES_MOST: usize = 32;
/// How long one batch may take.
const BATCH_WITHIN: Duration = Duration::from_secs(10);
/// Of the memory for KV on its way in, what one fetch may have lent at a time: an eighth, so that hand-offs, which
/// clients wait for, find room beside many fetches.
const FETCH_SHARE: u64 = 8;
/// How long a peer's engine is left alone after a batch to it failed.
const SHUN_FOR: Duration = Duration::from_secs(30);

/// What a carrier needs.
#[derive(Clone, Debug)]
pub struct CarrierConfig {
    /// Where its TCP listens; the port is any that is free.
    pub listen: IpAddr,
    /// Registered memory for KV on its way in, and as much for KV on its way out. A flight that finds no
    /// room in it goes over the flight's own connection.
    pub arena_bytes: usize,
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

/// This node's part in the transfer engine.
pub(crate) struct Carrier {
    mover: Mover,
    me: PeerId,
    /// The transports, in words.
    ways: Vec<String>,
    incoming: Arc<Arena>,
    outgoing: Arc<Arena>,
    /// What one fetch may have lent at a time.
    fetch_bytes: u64,
    /// Peers whose engine could not be reached, and since when: a port that is closed to us, perhaps.
    shunned: Mutex<BTreeMap<PeerId, Instant>>,
}

impl std::fmt::Debug for Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lent = self.lent_bytes();
        f.debug_struct("Carrier").field("me", &self.me).field("lent_bytes", &lent).finish_non_exhaustive()
    }
}

/// Hand-offs need no notices: their own connection says when all is there.
struct Deaf;

impl Inbound for Deaf {
    fn notice(&self, _from: &PeerId, _notice: Notice) {}
}

impl Carrier {
    /// Listens, and registers the memory. Shared memory is for peers that give the machine the same name.
    ///
    /// # Errors
    /// At [`Stage::Bind`]: [`Kind::Unavailable`] for no port, memory or threads to be had, [`Kind::Invalid`] for RDMA
    /// devices that were named and cannot be used.
    pub(crate) fn start(
        config: &CarrierConfig,
        (machine, epoch): (&str, u64),
        tls: Option<TcpTls>,
    ) -> Result<Arc<Self>, TransportError> {
        let of_kind = |kind, what: &str, why: String| {
            TransportError::new(kind, Stage::Bind, format!("transfer engine: {what}: {why}"))
        };
        let failed = |what: &str, why: String| of_kind(Kind::Unavailable, what, why);
        // Who greets the engine's port learns the epoch, not the windows: their numbers go to those alone who have
        // been let in.
        let exposure = Exposure::new();
        let mut ways = Ways::find(config, (machine, epoch), tls, &exposure)
            .map_err(|(kind, why)| of_kind(kind, "starting", why))?;
        let arena = || {
            let memory = Memory::shared(config.arena_bytes, Pages::Ordinary, Location::Anywhere);
            memory.map_err(|error| failed("memory", error.to_string()))
        };
        let memories = [arena()?, arena()?];
        ways.keep_reaching(&memories);
        let Ways { transports, me, words: ways } = ways;
        let settings = MoverSettings { openers: 2, ..MoverSettings::default() };
        let mover = Mover::new(settings, exposure, transports)
            .map_err(|fault| failed("starting", format!("{fault:?}")))?;
        for memory in &memories {
            mover.register(memory).map_err(|fault| failed("registering", format!("{fault:?}")))?;
        }
        let [incoming, outgoing] = memories.map(Arena::new);
        let fetch_bytes = config.arena_bytes as u64 / FETCH_SHARE;
        let shunned = Mutex::default();
        Ok(Arc::new(Self { mover, me, ways, incoming, outgoing, fetch_bytes, shunned }))
    }

    /// A window for the slices of a flight; none where there is no room for them, or where there are none.
    pub(crate) fn berth(self: &Arc<Self>, slices: u64, layer_bytes: u32) -> Option<Berth> {
        self.berth_of(slices.checked_mul(u64::from(layer_bytes))?)
    }

    /// A window for as many of the blocks of these sizes as there is room for, and how many those are.
    pub(crate) fn berth_for(
        self: &Arc<Self>,
        sizes: impl Iterator<Item = u32> + Clone,
    ) -> Option<(usize, Berth)> {
        let mut most = self.fetch_bytes;
        loop {
            let (blocks, bytes) = leading(sizes.clone(), most);
            if let Some(berth) = self.berth_of(bytes) {
                return Some((blocks, berth));
            }
            // Half as many need half the room, down to the one that does not fit either.
            if blocks <= 1 || bytes == 0 {
                return None;
            }
            most = bytes / 2;
        }
    }

    fn berth_of(self: &Arc<Self>, bytes: u64) -> Option<Berth> {
        let loan = self.incoming.lend(Some(bytes).filter(|bytes| *bytes > 0)?)?;
        let window = self.mover.open_window(loan.memory(), loan.at(), bytes, Grant::Write).ok()?;
        Some(Berth { carrier: self.clone(), loan: Some(loan), window, closed: false })
    }

    /// The means to write into a peer's berth; none where there is no room for a copy here.
    pub(crate) fn board(self: &Arc<Self>, to: BerthTold, plan: &Plan, have_blocks: u32) -> Option<Boarding> {
        let bytes = plan.slices_after(have_blocks).checked_mul(u64::from(plan.layer_bytes))?;
        if to.segment.bytes != bytes || self.shuns(&to.peer) {
            return None;
        }
        Some(Boarding {
            carrier: self.clone(),
            loan: Arc::new(self.outgoing.lend(bytes)?),
            peer: to.peer,
            remote: Arc::new(to.segment),
            sums: vec![None; usize::try_from(plan.slices_after(have_blocks)).ok()?],
            ready: Vec::new(),
            under_way: Vec::new(),
        })
    }
}

impl Carrier {
    /// The transports that it has, the preferred first, and what it has not and why.
    pub(crate) fn ways(&self) -> &[String] {
        &self.ways
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
        let carrier = self.clone();
        // It fails only by a panic, which the runtime has reported.
        let _ = tokio::task::spawn_blocking(move || carrier.mover.shutdown()).await;
    }

    /// Cancels batches that read from a loan. The engine may still do so: it is kept until all have ended.
    fn settle_unwanted(self: &Arc<Self>, batches: Vec<BatchId>, loan: Arc<Loan>) {
        batches.iter().for_each(|batch| self.mover.cancel(*batch));
        let carrier = self.clone();
        let wait = async move {
            for batch in batches {
                carrier.mover.finished(batch).await;
            }
            drop(loan);
        };
        // Without a runtime the process is at its end, and nothing is lent any more.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(wait);
        }
    }

    /// Whether flights to a peer go over their own connections for now.
    fn shuns(&self, peer: &PeerId) -> bool {
        let mut shunned = self.shunned.lock().unwrap_or_else(PoisonError::into_inner);
        shunned.retain(|_, since| since.elapsed() < SHUN_FOR);
        shunned.contains_key(peer)
    }

    /// A batch to a peer has failed. A window that is closed is no fault of the way there, for its owner has changed
    /// its mind; nor is one that was slow, for what is less urgent waits for the rest.
    fn shun(&self, peer: &PeerId, failure: &Failure) {
        let closed = failure.reason == Reason::Fault(Fault::Stale);
        let slow = failure.reason == Reason::Deadline && failure.stage == crate::mover::Stage::Move;
        if closed || slow {
            return;
        }
        self.shunned.lock().unwrap_or_else(PoisonError::into_inner).insert(peer.clone(), Instant::now());
    }
}

/// How many of the leading blocks of these sizes have `most` bytes together, one at least; and their bytes.
fn leading(sizes: impl Iterator<Item = u32>, most: u64) -> (usize, u64) {
    let (mut blocks, mut bytes) = (0, 0);
    for size in sizes {
        let with = bytes + u64::from(size);
        if blocks > 0 && with > most {
            break;
        }
        (blocks, bytes) = (blocks + 1, with);
    }
    (blocks, bytes)
}

/// Room for one flight, or for blocks of one fetch, on its way in.
pub(crate) struct Berth {
    carrier: Arc<Carrier>,
    /// Taken only at the end.
    loan: Option<Loan>,
    window: RemoteSegment,
    closed: bool,
}

/// A berth in the words of the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BerthTold {
    pub(crate) peer: PeerId,
    pub(crate) segment: RemoteSegment,
}

impl Berth {
    pub(crate) fn told(&self) -> BerthTold {
        BerthTold { peer: self.carrier.me.clone(), segment: self.window.clone() }
    }

    /// Closes the window: from here on the bytes are what they are. Waits for a copy under way.
    pub(crate) fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true) {
            self.carrier.mover.revoke(self.window.window);
        }
    }

    /// The checksum over the checksums of all slices in their order, and so over all of it.
    pub(crate) fn sum(&self, slices: u64, layer_bytes: u32) -> u64 {
        let size = u64::from(layer_bytes);
        let loan = self.loan();
        sum_of((0..slices).map(|slice| loan.memory().checksum(loan.at() + slice * size, size)))
    }

    /// The bytes of one slice, once the window is closed.
    pub(crate) fn read(&self, slice: u64, layer_bytes: u32) -> bytes::Bytes {
        self.read_at(slice * u64::from(layer_bytes), layer_bytes)
    }

    /// So many bytes from `at` on, once the window is closed.
    pub(crate) fn read_at(&self, at: u64, bytes: u32) -> bytes::Bytes {
        debug_assert!(self.closed, "what may still change is not read");
        let mut taken = vec![0; usize::try_from(bytes).expect("a usize has at least 32 bits")];
        self.loan().memory().read(self.loan().at() + at, &mut taken);
        taken.into()
    }

    fn loan(&self) -> &Loan {
        self.loan.as_ref().expect("taken only when dropped")
    }
}

impl Drop for Berth {
    fn drop(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        // Closing waits for a copy under way: not on a thread of the runtime, where there is one.
        let (carrier, loan, window) = (self.carrier.clone(), self.loan.take(), self.window.window);
        let close = move || {
            carrier.mover.revoke(window);
            drop(loan);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(close)),
            Err(_) => close(),
        }
    }
}

/// Checksum over checksums, each as 8 bytes little endian.
fn sum_of(sums: impl Iterator<Item = u64>) -> u64 {
    let bytes: Vec<u8> = sums.flat_map(u64::to_le_bytes).collect();
    crate::checksum(&bytes)
}

/// One flight on its way out by the engine.
pub(crate) struct Boarding {
    carrier: Arc<Carrier>,
    /// Lent until the last batch has ended: the engine reads from it.
    loan: Arc<Loan>,
    peer: PeerId,
    remote: Arc<RemoteSegment>,
    /// By slice; none for what was not sent.
    sums: Vec<Option<u64>>,
    ready: Vec<Op>,
    under_way: Vec<BatchId>,
}

impl Boarding {
    /// Takes slice number `slice`, counted from the first that is sent. It leaves with the next batch.
    pub(crate) async fn load(&mut self, slice: usize, bytes: &[u8]) -> Result<(), TransportError> {
        if self.sums[slice].is_some() {
            let text = format!("slice {slice} of the flight came twice");
            return Err(TransportError::new(Kind::Corrupt, Stage::Send, text));
        }
        let offset = slice as u64 * bytes.len() as u64;
        let at = self.loan.at() + offset;
        self.loan.memory().write(at, bytes);
        self.sums[slice] = Some(crate::checksum(bytes));
        let local = Region { memory: self.loan.memory().clone(), at };
        let (remote, bytes) = (self.remote.clone(), bytes.len() as u64);
        self.ready.push(Op { direction: Direction::Write, local, remote, remote_at: offset, bytes });
        if self.ready.len() < BATCH_SLICES { Ok(()) } else { self.leave().await }
    }

    /// Sends what has gathered; waits where much is under way.
    pub(crate) async fn leave(&mut self) -> Result<(), TransportError> {
        if self.ready.is_empty() {
            return Ok(());
        }
        self.look().await?;
        while self.under_way.len() >= BATCHES_MOST {
            self.arrived_first().await?;
        }
        let batch = Batch {
            peer: self.peer.clone(),
            priority: Priority::Handoff,
            limit: Some(BATCH_WITHIN),
            // All of it is verified at the end.
            verify: false,
            notice: None,
            ops: merged(std::mem::take(&mut self.ready)),
        };
        let taken = self
            .carrier
            .mover
            .submit(batch)
            .map_err(|refusal| TransportError::new(Kind::Retry, Stage::Send, refusal.to_string()))?;
        self.under_way.push(taken);
        Ok(())
    }

    /// Takes note of what has arrived: how a batch ended is not remembered for ever.
    pub(crate) async fn look(&mut self) -> Result<(), TransportError> {
        while let Some(&first) = self.under_way.first()
            && !matches!(self.carrier.mover.poll(first), Progress::Running { .. })
        {
            self.arrived_first().await?;
        }
        Ok(())
    }

    /// Waits until everything is in place; the checksum over it.
    pub(crate) async fn arrived(&mut self) -> Result<u64, TransportError> {
        self.leave().await?;
        while !self.under_way.is_empty() {
            self.arrived_first().await?;
        }
        let (sent, all) = (self.sums.iter().flatten().count(), self.sums.len());
        if sent < all {
            let text = format!("{sent} of {all} slices were sent");
            return Err(TransportError::new(Kind::Corrupt, Stage::Finish, text));
        }
        Ok(sum_of(self.sums.iter().flatten().copied()))
    }

    async fn arrived_first(&mut self) -> Result<(), TransportError> {
        let ended = self.carrier.mover.finished(self.under_way[0]).await;
        self.under_way.remove(0);
        let text = match ended {
            Some(Outcome::Done { .. }) => return Ok(()),
            Some(Outcome::Failed { failure, cause, .. }) => {
                // The next try goes by the flight's own connection, whatever ails the engine's.
                self.carrier.shun(&self.peer, &failure);
                format!("{failure} ({cause})")
            }
            Some(Outcome::Cancelled { .. }) => "cancelled".to_owned(),
            None => "its end is not known any more".to_owned(),
        };
        Err(TransportError::new(
            Kind::Unavailable,
            Stage::Send,
            format!("transfer to {}: {text}", self.peer.address),
        ))
    }
}

/// Slices that follow each other at both ends go as one.
fn merged(ops: Vec<Op>) -> Vec<Op> {
    let mut whole: Vec<Op> = Vec::with_capacity(ops.len());
    for op in ops {
        match whole.last_mut() {
            Some(last)
                if last.local.at + last.bytes == op.local.at
                    && last.remote_at + last.bytes == op.remote_at =>
            {
                last.bytes += op.bytes;
            }
            _ => whole.push(op),
        }
    }
    whole
}

impl Drop for Boarding {
    fn drop(&mut self) {
        let under_way = std::mem::take(&mut self.under_way);
        if under_way.is_empty() {
            return;
        }
        self.carrier.settle_unwanted(under_way, self.loan.clone());
    }
}
