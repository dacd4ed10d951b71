//! Memory that the devices know: arenas, for this side's requests, and windows, for those of peers.
//!
//! An arena's registration lets no peer in. Each window has registrations of its own, with keys that nobody
//! had before, and only the rights that it grants. To revoke it is to end them, which the device confirms:
//! no request with those keys is served after that, and other windows and paths go on. (The alternatives:
//! memory windows need a bound queue pair for each; resetting queue pairs would cut every transfer of the
//! peers for one window.) Its price is that opening a window pins its pages once more: see `docs/rdma.md`.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use super::verbs::{Domain, Mr, Remote};
use crate::mover::{Direction, Exposure, Fault, Memory, WindowId};

/// Threads that register a large memory.
const THREADS_MAX: usize = 8;
/// Below this a second thread costs more than it saves.
const THREAD_BYTES: u64 = 64 << 20;
const ACCESS_VERSION: u8 = 1;
const ACCESS_HEAD_BYTES: usize = 24;

/// Registrations by device, each a row of pieces of equal size (the last may be shorter).
type Pieces = Vec<Vec<Mr>>;

/// Rights of a window, as its access encodes them; the devices enforce them against peers.
const READ: u8 = 1;
const WRITE: u8 = 2;

struct Arena {
    memory: Weak<Memory>,
    pieces: Pieces,
}

/// The memory that is registered with the devices.
pub(super) struct Regions {
    domains: Vec<Arc<Domain>>,
    piece_bytes: u64,
    exposure: Arc<Exposure>,
    arenas: RwLock<BTreeMap<usize, Arena>>,
    windows: Mutex<BTreeMap<WindowId, Pieces>>,
}

/// Where a range of local memory is for one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalRange {
    pub address: u64,
    pub key: u32,
    /// How far the registration reaches from there.
    pub bytes: u64,
}

impl Regions {
    pub(super) fn new(domains: Vec<Arc<Domain>>, piece_bytes: u64, exposure: Arc<Exposure>) -> Self {
        let (arenas, windows) = (RwLock::default(), Mutex::default());
        Self { domains, piece_bytes, exposure, arenas, windows }
    }

    /// Registers a memory with every device. Drops the registrations of memories that have gone.
    pub(super) fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault> {
        let name = Arc::as_ptr(memory) as usize;
        if self.known(memory) {
            return Ok(());
        }
        let pieces = self.pieces(memory, 0, memory.bytes() as u64, Remote::default())?;
        let mut arenas = self.arenas.write().unwrap_or_else(PoisonError::into_inner);
        // A weak count keeps the address from being used again, so a dead entry belongs to no other memory.
        let dead = arenas.extract_if(.., |_, arena| arena.memory.strong_count() == 0);
        let dead: Vec<Arena> = dead.map(|(_, arena)| arena).collect();
        arenas.entry(name).or_insert_with(|| Arena { memory: Arc::downgrade(memory), pieces });
        drop(arenas);
        drop(dead);
        Ok(())
    }

    fn known(&self, memory: &Arc<Memory>) -> bool {
        let arenas = self.arenas.read().unwrap_or_else(PoisonError::into_inner);
        arenas.get(&(Arc::as_ptr(memory) as usize)).is_some_and(|arena| arena.memory.strong_count() > 0)
    }

    /// Where byte `at` of a registered memory is for a device.
    pub(super) fn local(&self, memory: &Arc<Memory>, device: usize, at: u64) -> Result<LocalRange, Fault> {
        let arenas = self.arenas.read().unwrap_or_else(PoisonError::into_inner);
        let arena = arenas.get(&(Arc::as_ptr(memory) as usize)).ok_or_else(unregistered)?;
        let piece = usize::try_from(at / self.piece_bytes).unwrap_or(usize::MAX);
        let region = arena.pieces[device].get(piece).ok_or_else(unregistered)?;
        let end = (memory.bytes() as u64).min((at / self.piece_bytes + 1) * self.piece_bytes);
        let bytes = end - at;
        Ok(LocalRange { address: memory.address(at, bytes) as u64, key: region.local_key(), bytes })
    }

    /// Opens a window to peers: what they need to reach it, for [`Remote::decode`] at their side.
    pub(super) fn access(
        &self,
        window: WindowId,
        memory: &Arc<Memory>,
        at: u64,
        bytes: u64,
    ) -> Result<Vec<u8>, Fault> {
        if !self.known(memory) {
            return Err(unregistered());
        }
        if !memory.holds(at, bytes) || bytes == 0 {
            return Err(Fault::Invalid(format!("{bytes} bytes at {at} of a memory of {}", memory.bytes())));
        }
        let closed = || Fault::Stale(format!("window {} is closed", window.0));
        let grant = self.exposure.grant(window).ok_or_else(closed)?;
        let remote = Remote { read: grant.allows(Direction::Read), write: grant.allows(Direction::Write) };
        let pieces = self.pieces(memory, at, bytes, remote)?;
        let address = memory.address(at, bytes) as u64;
        let mut windows = self.windows();
        if let Some(known) = windows.get(&window) {
            return Ok(self.encode(address, known, remote));
        }
        // A revoking thread marks the window first and then comes here. Either this check sees the mark, or that
        // thread finds the registrations.
        if self.exposure.grant(window).is_none() {
            return Err(closed());
        }
        let access = self.encode(address, &pieces, remote);
        windows.insert(window, pieces);
        Ok(access)
    }

    /// Ends a window's registrations.
    ///
    /// # Errors
    /// When a device does not confirm it: then its queue pairs must go.
    pub(super) fn revoke(&self, window: WindowId) -> io::Result<()> {
        let Some(pieces) = self.windows().remove(&window) else { return Ok(()) };
        let mut outcome = Ok(());
        // All are released, even after an error.
        for region in pieces.into_iter().flatten() {
            outcome = outcome.and(region.release());
        }
        outcome
    }

    /// Windows that peers can reach now.
    pub(super) fn windows_open(&self) -> usize {
        self.windows().len()
    }

    fn windows(&self) -> MutexGuard<'_, BTreeMap<WindowId, Pieces>> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a range with every device, several pieces at a time where it is large.
    fn pieces(&self, memory: &Memory, at: u64, bytes: u64, remote: Remote) -> Result<Pieces, Fault> {
        let each = usize::try_from(bytes.div_ceil(self.piece_bytes)).map_err(|_| too_large())?;
        let total = each * self.domains.len();
        let one = |index: usize| {
            let (device, piece) = (index / each, (index % each) as u64);
            let from = piece * self.piece_bytes;
            let bytes = self.piece_bytes.min(bytes - from);
            Mr::register(&self.domains[device], memory, at + from, bytes, remote)
        };
        let work = bytes.saturating_mul(self.domains.len() as u64) / THREAD_BYTES;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads =
            usize::try_from(work).unwrap_or(THREADS_MAX).clamp(1, THREADS_MAX.min(cores)).min(total);
        let made = side_by_side(total, threads, one).map_err(|error| refused(&error, bytes))?;
        let mut made = made.into_iter();
        Ok(self.domains.iter().map(|_| made.by_ref().take(each).collect()).collect())
    }

    fn encode(&self, address: u64, pieces: &Pieces, remote: Remote) -> Vec<u8> {
        let count = pieces.first().map_or(0, Vec::len);
        let grant = (u8::from(remote.read) * READ) | (u8::from(remote.write) * WRITE);
        let mut bytes = vec![ACCESS_VERSION, grant];
        bytes.extend(u16::try_from(pieces.len()).expect("a node has few devices").to_le_bytes());
        bytes.extend(u32::try_from(count).expect("pieces are large").to_le_bytes());
        bytes.extend(self.piece_bytes.to_le_bytes());
        bytes.extend(address.to_le_bytes());
        debug_assert_eq!(bytes.len(), ACCESS_HEAD_BYTES);
        bytes.extend(pieces.iter().flatten().flat_map(|region| region.remote_key().to_le_bytes()));
        bytes
    }
}

/// Whether a peer's window grants a direction, as the peer said of it.
pub(super) fn grants(access: &[u8], direction: Direction) -> bool {
    let right = if direction == Direction::Read { READ } else { WRITE };
    access.get(1).is_some_and(|grant| grant & right != 0)
}

/// Where byte `at` of a peer's window is, from what the peer said of it.
pub(super) fn remote(access: &[u8], device: usize, at: u64) -> Result<LocalRange, Fault> {
    let wrong =
        || Fault::Invalid("the window's RDMA access is not of this release; run the same on both".into());
    if access.len() < ACCESS_HEAD_BYTES || access[0] != ACCESS_VERSION {
        return Err(wrong());
    }
    let devices = usize::from(u16::from_le_bytes([access[2], access[3]]));
    let eight = |from: usize| u64::from_le_bytes(access[from..from + 8].try_into().expect("eight bytes"));
    let pieces = u32::from_le_bytes(access[4..8].try_into().expect("four bytes")) as usize;
    let (piece_bytes, address) = (eight(8), eight(16));
    if piece_bytes == 0 || device >= devices {
        return Err(wrong());
    }
    let piece = usize::try_from(at / piece_bytes).map_err(|_| wrong())?;
    let place = ACCESS_HEAD_BYTES + 4 * (device * pieces + piece);
    let key = access.get(place..place + 4).filter(|_| piece < pieces).ok_or_else(wrong)?;
    let key = u32::from_le_bytes(key.try_into().expect("four bytes"));
    let address = address.checked_add(at).ok_or_else(wrong)?;
    Ok(LocalRange { address, key, bytes: piece_bytes - at % piece_bytes })
}

/// Calls `one` for 0 to `total`, on some threads, and gives the results in order, or the first error.
fn side_by_side<T: Send>(
    total: usize,
    threads: usize,
    one: impl Fn(usize) -> io::Result<T> + Sync,
) -> io::Result<Vec<T>> {
    if threads <= 1 {
        return (0..total).map(one).collect();
    }
    let next = AtomicUsize::new(0);
    let worker = || -> io::Result<Vec<(usize, T)>> {
        let mut made = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= total {
                return Ok(made);
            }
            made.push((index, one(index)?));
        }
    };
    let mut all = std::thread::scope(|scope| -> io::Result<Vec<(usize, T)>> {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let mut all = Vec::with_capacity(total);
        for thread in running {
            let made = thread.join().map_err(|_| io::Error::other("a registering thread panicked"))?;
            all.extend(made?);
        }
        Ok(all)
    })?;
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, made)| made).collect())
}

fn unregistered() -> Fault {
    Fault::Invalid("the memory is not registered for RDMA; register it first".into())
}

fn too_large() -> Fault {
    Fault::Invalid("the memory is too large for this machine".into())
}

/// The fault, with a remedy, for a registration that the kernel refuses.
pub(super) fn refused(error: &io::Error, bytes: u64) -> Fault {
    let remedy = match error.kind() {
        io::ErrorKind::OutOfMemory | io::ErrorKind::PermissionDenied => {
            "raise the limit of locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity)"
        }
        io::ErrorKind::Unsupported => "the device or its driver cannot reach this kind of memory",
        _ => "see `baton rdma doctor`",
    };
    Fault::Invalid(format!("{bytes} bytes for RDMA: {error}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(devices: u16, pieces: u32) -> Vec<u8> {
        let mut bytes = vec![ACCESS_VERSION, READ];
        bytes.extend(devices.to_le_bytes());
        bytes.extend(pieces.to_le_bytes());
        bytes.extend(1_000_u64.to_le_bytes());
        bytes.extend(50_000_u64.to_le_bytes());
        bytes.extend((0..u32::from(devices) * pieces).flat_map(u32::to_le_bytes));
        bytes
    }

    #[test]
    fn a_byte_of_a_window_is_found_in_its_piece() {
        let found = remote(&access(2, 3), 1, 2_100).unwrap();
        assert_eq!((found.address, found.key, found.bytes), (52_100, 5, 900));
        assert!(grants(&access(2, 3), Direction::Read) && !grants(&access(2, 3), Direction::Write));
    }

    #[test]
    fn access_that_cannot_be_is_refused() {
        let good = access(2, 3);
        assert!(remote(&good, 2, 0).is_err(), "a device that is not there");
        assert!(remote(&good, 0, 3_000).is_err(), "behind the last piece");
        assert!(remote(&good, 0, u64::MAX).is_err());
        assert!(remote(&good[..good.len() - 1], 1, 2_999).is_err(), "cut short");
        assert!(remote(&good[..10], 0, 0).is_err());
        assert!(remote(&[], 0, 0).is_err());
    }

    #[test]
    fn work_is_spread_and_comes_back_in_order() {
        assert_eq!(side_by_side(100, 4, Ok).unwrap(), (0..100).collect::<Vec<_>>());
        let failing = |index| if index == 7 { Err(io::Error::other("seven")) } else { Ok(index) };
        assert_eq!(side_by_side(100, 4, failing).unwrap_err().to_string(), "seven");
    }
}
