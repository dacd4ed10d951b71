//! The transfer engine as Mooncake's package offers it: memory registered by address, peers named `host:port`,
//! pieces from an address here to an address there. Over it all is [`Mover`]: paths, failover, checksums.

pub(crate) mod ends;
mod moving;
mod note;
mod pieces;

use std::sync::Arc;
use std::time::Duration;

use baton_transfer::Priority;
use baton_transports::mover::published::{Directory, DirectoryConfig, PublishedSegments, Publisher};
use baton_transports::mover::{Batch, Direction, Grant, Mover, Notice, Op, Pages, WindowId};
use baton_transports::mover::{Location, Memory, Region};

pub use self::moving::{BatchGroup, State};
pub use self::note::Note;
pub use self::pieces::Piece;

use self::ends::Inbox;
use self::pieces::PlanError;
use crate::ranges::Ranges;
use crate::{Failure, raw};

/// Ops of one batch; more are several batches.
const BATCH_OPS: usize = 32_768;
/// Time for which a range that is being unregistered may be in use before the caller gets an error.
const USE_LIMIT: Duration = Duration::from_secs(65);

/// The engine's state of a registered range.
#[derive(Debug)]
struct RegisteredRange {
    memory: Arc<Memory>,
    window: WindowId,
}

/// The transfer engine behind the Python class.
pub struct Engine {
    mover: Arc<Mover>,
    publisher: Publisher,
    directory: Directory,
    ranges: Ranges<RegisteredRange>,
    inbox: Arc<Inbox>,
    verify: bool,
}

fn failed(text: impl Into<String>) -> Failure {
    Failure::new(Failure::FAILED, text)
}

impl Engine {
    /// An engine that peers reach at `host`. `protocol` is `tcp`, or `shm` for both: memory of
    /// [`Engine::allocate`] goes through shared memory between processes of one host either way.
    ///
    /// # Errors
    /// When the protocol is not known here, or the host's address or a port cannot be had.
    pub fn start(host: &str, protocol: &str, verify: bool) -> Result<Self, Failure> {
        if !["tcp", "shm"].contains(&protocol) {
            let text = format!("initialize: protocol {protocol:?} is not in this package; use \"tcp\"");
            return Err(failed(text));
        }
        let ends = ends::start(host).map_err(|text| failed(format!("initialize: {text}")))?;
        let directory = Directory::new(DirectoryConfig::default());
        let (mover, publisher, inbox) = (Arc::new(ends.mover), ends.publisher, ends.inbox);
        Ok(Self { mover, publisher, directory, ranges: Ranges::default(), inbox, verify })
    }

    /// The port at which peers name this engine.
    pub fn port(&self) -> u16 {
        self.publisher.port()
    }

    /// Registers memory of the process, for transfers from here and for peers to reach.
    ///
    /// # Errors
    /// When it is not memory of this process or overlaps what is registered; then nothing has changed.
    ///
    /// # Safety
    /// It stays mapped, to be read and written, until [`Engine::unregister`] has returned `Ok` for it or the engine
    /// and all that it began are dropped. Rust holds no reference into it while a transfer or a peer may touch it.
    #[allow(unsafe_code, reason = "addresses become memory; the promise is the caller's")]
    pub unsafe fn register(&self, address: u64, bytes: u64) -> Result<(), Failure> {
        // SAFETY: `unregister` revokes the window and waits for the batches that use it; the rest is the caller's
        // promise.
        let memory = unsafe { raw::lend(address, bytes) };
        self.adopt(memory.map_err(|text| failed(format!("register: {text}")))?)
    }

    /// Registers several, all or none.
    ///
    /// # Errors
    /// As [`Engine::register`], of the first that fails.
    ///
    /// # Safety
    /// As [`Engine::register`], for each.
    #[allow(unsafe_code, reason = "addresses become memory; the promise is the caller's")]
    pub unsafe fn register_all(&self, ranges: &[(u64, u64)]) -> Result<(), Failure> {
        for (at, (address, bytes)) in ranges.iter().enumerate() {
            // SAFETY: the caller's promise.
            if let Err(failure) = unsafe { self.register(*address, *bytes) } {
                for (address, _) in &ranges[..at] {
                    // Registered a moment ago; a thread that has already taken it off did what is wanted.
                    let _ = self.unregister(*address);
                }
                return Err(failure);
            }
        }
        Ok(())
    }

    fn adopt(&self, memory: Arc<Memory>) -> Result<(), Failure> {
        let (address, bytes) = (memory.start(), memory.bytes() as u64);
        let overlaps = |text| Failure::new(Failure::OVERLAPS, format!("register: {text}"));
        self.ranges.claim(address, bytes).map_err(overlaps)?;
        let opened = self.mover.register(&memory).and_then(|()| {
            let segment = self.mover.open_window(&memory, 0, bytes, Grant::ReadWrite)?;
            let window = segment.window;
            self.publisher.publish(address, segment).inspect_err(|_| self.mover.revoke(window))?;
            Ok(window)
        });
        match opened {
            Ok(window) => {
                self.ranges.fill(address, RegisteredRange { memory, window });
                Ok(())
            }
            Err(fault) => {
                self.ranges.drop(address);
                Err(failed(format!("register: {fault:?}")))
            }
        }
    }

    /// Unregisters a range. When it returns `Ok`, no transfer reads or writes it, those of peers included.
    ///
    /// Peers reach it through its window, which is closed first: [`Mover::revoke`] waits for the copy under way.
    /// Transfers from here hold a `Use` of it until their batches have ended.
    ///
    /// # Errors
    /// When nothing is registered there, or transfers from here use it for longer than they may. After the latter
    /// no new transfer finds it, but its memory is not free: it has to be unregistered again.
    pub fn unregister(&self, address: u64) -> Result<(), Failure> {
        self.unregister_within(address, USE_LIMIT)
    }

    /// Like [`Engine::unregister`], with a limit on how long it waits for transfers from here.
    ///
    /// # Errors
    /// As [`Engine::unregister`].
    pub fn unregister_within(&self, address: u64, limit: Duration) -> Result<(), Failure> {
        let none = || {
            let text = format!("unregister: nothing is registered at {address:#x}");
            Failure::new(Failure::NOT_REGISTERED, text)
        };
        let range = self.ranges.retire(address).ok_or_else(none)?;
        // Both do nothing where an earlier try has done it.
        self.publisher.withdraw(address);
        self.mover.revoke(range.window);
        if !range.wait_unused(limit) {
            let text =
                format!("unregister: transfers still use {address:#x}; keep it and unregister it again");
            return Err(Failure::new(Failure::IN_USE, text));
        }
        self.ranges.forget(address, &range);
        Ok(())
    }

    /// Memory of the engine's own, registered, which peers of this host reach without the network.
    ///
    /// # Errors
    /// When the system has none left.
    pub fn allocate(&self, bytes: u64) -> Result<u64, Failure> {
        let bytes = usize::try_from(bytes).map_err(|e| failed(e.to_string()))?;
        let memory = Memory::shared(bytes, Pages::Ordinary, Location::Anywhere);
        let memory = memory.map_err(|e| failed(format!("allocate {bytes} bytes: {e}")))?;
        let address = memory.start();
        self.adopt(memory).map(|()| address)
    }

    /// Copies bytes into registered memory.
    ///
    /// # Errors
    /// When they are not inside one range.
    pub fn fill(&self, address: u64, bytes: &[u8]) -> Result<(), Failure> {
        let (range, at, held) = self.ranges.find(address).ok_or_else(|| pieces::unregistered(address))?;
        if held < bytes.len() as u64 {
            return Err(pieces::unregistered(address + held));
        }
        range.memory.write(at, bytes);
        Ok(())
    }

    /// Copies bytes out of registered memory.
    ///
    /// # Errors
    /// When they are not inside one range.
    pub fn copy(&self, address: u64, bytes: u64) -> Result<Vec<u8>, Failure> {
        let (range, at, held) = self.ranges.find(address).ok_or_else(|| pieces::unregistered(address))?;
        if held < bytes {
            return Err(pieces::unregistered(address + held));
        }
        let mut into = vec![0; usize::try_from(bytes).expect("it is in memory")];
        range.memory.read(at, &mut into);
        Ok(into)
    }

    /// The first address that a peer publishes.
    ///
    /// # Errors
    /// When it cannot be asked, or publishes none.
    pub fn first_address(&self, target: &str) -> Result<u64, Failure> {
        let none = || failed(format!("{target} has registered no memory"));
        let first = self.look(target)?.first();
        first.map_or_else(|| self.look_again(target)?.first().ok_or_else(none), Ok)
    }

    /// Moves pieces and waits for their end.
    ///
    /// # Errors
    /// When not all of it is in place. The content of the written ranges is then undefined.
    pub fn run(&self, target: &str, way: Direction, pieces: &[Piece]) -> Result<(), Failure> {
        self.start_moving(target, way, pieces, None)?.wait()
    }

    /// Like [`Engine::run`], and leaves the peer a notice once all bytes are in place.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn run_with_notice(
        &self,
        target: &str,
        way: Direction,
        pieces: &[Piece],
        note: Note,
    ) -> Result<(), Failure> {
        self.start_moving(target, way, pieces, Some(note))?.wait()
    }

    /// Notices that peers have left, oldest first.
    pub fn notes(&self) -> Vec<Note> {
        self.inbox.take().iter().map(|bytes| Note::decode(bytes)).collect()
    }

    /// Begins to move pieces; dropping what is returned gives up on them.
    ///
    /// # Errors
    /// When nothing of it can be begun: an address is not registered here or not published there, or the peer
    /// does not answer.
    pub fn start_moving(
        &self,
        target: &str,
        way: Direction,
        pieces: &[Piece],
        note: Option<Note>,
    ) -> Result<BatchGroup, Failure> {
        let named = |failure: Failure| {
            let verb = if way == Direction::Write { "write to" } else { "read from" };
            Failure::new(failure.code, format!("{verb} {target}: {}", failure.text))
        };
        let mut moving = BatchGroup::new(self.mover.clone(), target, way);
        if pieces.is_empty() && note.is_none() {
            return Ok(moving);
        }
        let mut published = self.look(target).map_err(named)?;
        let mut planned = pieces::plan(pieces, way, &self.ranges, &published);
        if let Err(PlanError::There(_)) = planned {
            published = self.look_again(target).map_err(named)?;
            planned = pieces::plan(pieces, way, &self.ranges, &published);
        }
        let (mut ops, used) = planned.map_err(|error| named(error.into()))?;
        moving.hold(used);
        let mut notice = note.map(|note| Notice { bytes: note.encode() });
        while !ops.is_empty() || notice.is_some() {
            let rest = ops.split_off(ops.len().min(BATCH_OPS));
            let (ops, last) = (std::mem::replace(&mut ops, rest), ops.is_empty());
            // A notice goes with what is moved last, which one batch alone can promise.
            if last && notice.is_some() && moving.batches() > 0 {
                moving.wait_batches()?;
            }
            let batch = self.batch(&published, ops, notice.take_if(|_| last));
            let taken = self.mover.submit(batch).map_err(|refusal| named(failed(refusal.to_string())));
            moving.add(taken.inspect_err(|_| self.directory.forget(target))?);
        }
        Ok(moving)
    }

    fn batch(&self, published: &PublishedSegments, ops: Vec<Op>, notice: Option<Notice>) -> Batch {
        let (peer, priority) = (published.peer.clone(), Priority::Handoff);
        Batch { peer, priority, limit: None, verify: self.verify, notice, ops }
    }

    fn look(&self, target: &str) -> Result<Arc<PublishedSegments>, Failure> {
        let found = self.directory.look(target).map_err(|fault| failed(format!("{fault:?}")))?;
        if let Some(ended) = found.ended {
            self.mover.peer_ended(&ended);
        }
        Ok(found.published)
    }

    /// Asks the peer itself. The word that what it publishes has changed may still be on its way when the peer has
    /// already passed on the address of memory that it registered.
    fn look_again(&self, target: &str) -> Result<Arc<PublishedSegments>, Failure> {
        self.directory.forget(target);
        self.look(target)
    }
}

/// A place of local memory.
fn region(range: &RegisteredRange, at: u64) -> Region {
    Region { memory: range.memory.clone(), at }
}
