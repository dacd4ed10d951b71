//! Two nodes with memory, and what one sees of its transfers.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_transports::mover::rdma::{RdmaConfig, RdmaNode, RdmaTransport};
use baton_transports::mover::{
    Completion, CompletionQueue, Completions, Direction, Exposure, Fault, Grant, Location, Memory, Notice,
    NoticeReceiver, Path, PathId, PeerId, Region, RemoteSegment, Slice, Transport, WindowId,
};

/// Far more than anything here takes on a machine that is busy.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Keeps the notices that come.
#[derive(Default)]
pub struct Inbox(pub Mutex<Vec<(PeerId, Vec<u8>)>>);

impl NoticeReceiver for Inbox {
    fn notice(&self, from: &PeerId, notice: Notice) {
        self.0.lock().unwrap().push((from.clone(), notice.bytes));
    }
}

pub struct Node {
    pub id: PeerId,
    pub transport: Arc<RdmaTransport>,
    pub exposure: Arc<Exposure>,
    pub inbox: Arc<Inbox>,
    pub memory: Arc<Memory>,
}

/// Settings for the guest: a loaded machine under emulation, so generous where rails are to live.
pub fn config(devices: &[&str]) -> RdmaConfig {
    RdmaConfig {
        devices: devices.iter().map(|name| (*name).to_owned()).collect(),
        open_timeout_us: 20_000_000,
        fence_timeout_us: 10_000_000,
        ..RdmaConfig::default()
    }
}

impl Node {
    pub fn with(config: RdmaConfig, epoch: u64, memory_bytes: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let id = PeerId { address: listener.local_addr().unwrap().to_string(), epoch };
        let exposure = Exposure::new();
        let inbox = Arc::new(Inbox::default());
        let node = RdmaNode { id: id.clone(), exposure: exposure.clone(), inbound: inbox.clone() };
        let transport = RdmaTransport::start(config, listener, node).unwrap();
        let memory = Memory::private(memory_bytes, Location::Anywhere).unwrap();
        transport.register(&memory).unwrap();
        Self { id, transport, exposure, inbox, memory }
    }

    /// This side, on the rails' `a` ends.
    pub fn here(memory_bytes: usize) -> Self {
        Self::with(config(&["rxe_a0", "rxe_a1"]), 1, memory_bytes)
    }

    /// The peer, on the `b` ends.
    pub fn there(memory_bytes: usize) -> Self {
        Self::with(config(&["rxe_b0", "rxe_b1"]), 2, memory_bytes)
    }

    pub fn window(&self, at: u64, bytes: u64, grant: Grant) -> (WindowId, Arc<RemoteSegment>) {
        let window = self.exposure.open(self.memory.clone(), at, bytes, grant).unwrap();
        let access = self.transport.access(window, &self.memory, at, bytes).unwrap();
        let access = vec![("rdma".to_owned(), access)];
        (window, Arc::new(RemoteSegment { window, bytes, access }))
    }

    pub fn revoke(&self, window: WindowId) {
        self.exposure.revoke(window, &[self.transport.clone() as Arc<dyn Transport>]);
    }

    pub fn open(&self, id: u32, peer: &PeerId, device: &str) -> Result<Way, Fault> {
        let queue = Arc::new(CompletionQueue::default());
        let path = self.transport.open(PathId(id), peer, device, queue.clone())?;
        Ok(Way { path, queue, seen: Vec::new() })
    }

    /// Fills the memory with bytes that depend on their place and a seed.
    pub fn fill(&self, seed: u8) {
        self.memory.write(0, &pattern(seed, self.memory.bytes()));
    }

    pub fn bytes(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.memory.read(at, &mut read);
        read
    }
}

pub fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect()
}

pub fn slice(
    ticket: u64,
    direction: Direction,
    (memory, at): (&Arc<Memory>, u64),
    (remote, remote_at): (&Arc<RemoteSegment>, u64),
    bytes: u32,
) -> Slice {
    Slice {
        ticket,
        direction,
        local: Region { memory: memory.clone(), at },
        remote: remote.clone(),
        remote_at,
        bytes,
        verify: false,
    }
}

/// A path and what has come of it.
pub struct Way {
    pub path: Box<dyn Path>,
    pub queue: Completions,
    pub seen: Vec<Completion>,
}

impl Way {
    /// Posts all, waiting for room as often as it takes.
    pub fn post_all(&mut self, slices: &[Slice]) {
        let mut rest = slices;
        let until = Instant::now() + TIME_LIMIT;
        while !rest.is_empty() {
            assert!(Instant::now() < until, "no room");
            assert!(!matches!(self.seen.last(), Some(Completion::Closed { .. })), "the path has ended");
            rest = &rest[self.path.post(rest)..];
            if !rest.is_empty() {
                let seen = self.seen.len();
                self.wait(|seen_now| {
                    seen_now[seen..].iter().any(|one| {
                        matches!(
                            one,
                            Completion::PathCapacity { .. }
                                | Completion::Broken { .. }
                                | Completion::Closed { .. }
                        )
                    })
                });
            }
        }
    }

    /// Waits until what has been seen is enough.
    pub fn wait(&mut self, enough: impl Fn(&[Completion]) -> bool) {
        let until = Instant::now() + TIME_LIMIT;
        while !enough(&self.seen) {
            assert!(Instant::now() < until, "waited in vain; seen so far: {:?}", self.seen);
            self.queue.wait(&mut self.seen, Duration::from_millis(200));
        }
    }

    /// Waits until so many slices and notices have ended.
    pub fn wait_ended(&mut self, count: usize) {
        self.wait(|seen| seen.iter().filter(|one| ticket(one).is_some()).count() >= count);
    }

    /// Waits for `Closed` and gives it.
    pub fn wait_closed(&mut self) -> Completion {
        self.wait(|seen| seen.iter().any(|one| matches!(one, Completion::Closed { .. })));
        self.seen.last().unwrap().clone()
    }

    pub fn failures(&self) -> Vec<&Completion> {
        self.seen
            .iter()
            .filter(|one| matches!(one, Completion::Failed { .. } | Completion::Broken { .. }))
            .collect()
    }
}

/// The ticket that a completion ends.
pub fn ticket(one: &Completion) -> Option<u64> {
    match one {
        Completion::Done { ticket, .. }
        | Completion::Failed { ticket, .. }
        | Completion::Notified { ticket, .. } => Some(*ticket),
        _ => None,
    }
}
