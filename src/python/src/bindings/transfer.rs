//! `Engine`, which `mooncake.engine` gives Mooncake's signatures.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use baton_transports::mover::Direction;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::log;
use super::notices::TransferNotify;
use crate::Failure;
use crate::engine::{BatchGroup, Engine, Piece, State};

/// Transfers begun and not yet asked about.
const MOVING_MAX: usize = 65_536;
const LOGGER: &str = "mooncake.engine";

/// Buffers here, addresses there, lengths.
type Lists = (Vec<u64>, Vec<u64>, Vec<u64>);

#[derive(Default)]
struct TransferTable {
    next: u64,
    moving: BTreeMap<u64, BatchGroup>,
}

/// Moves bytes between registered memory of this process and of others.
#[pyclass(frozen, subclass, name = "Engine", module = "mooncake.engine")]
pub(super) struct TransferEngine {
    engine: OnceLock<Engine>,
    begun: Mutex<TransferTable>,
}

impl TransferEngine {
    fn engine(&self) -> Result<&Engine, Failure> {
        let none = || Failure::new(Failure::FAILED, "the engine is not initialized; call initialize first");
        self.engine.get().ok_or_else(none)
    }

    /// Does something without the interpreter's lock; a failure is logged.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        does: impl FnOnce(&Engine) -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        let done = py.detach(|| self.engine().and_then(does));
        done.inspect_err(|failure| log(py, LOGGER, "error", &failure.to_string()))
    }

    fn code(&self, py: Python<'_>, does: impl FnOnce(&Engine) -> Result<(), Failure> + Send) -> i32 {
        self.run(py, does).map_or_else(|failure| failure.code, |()| 0)
    }

    fn begun(&self) -> std::sync::MutexGuard<'_, TransferTable> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn way(writes: bool) -> Direction {
    if writes { Direction::Write } else { Direction::Read }
}

/// Pieces out of three lists.
fn pieces((locals, remotes, lengths): &Lists) -> Result<Vec<Piece>, Failure> {
    if locals.len() != remotes.len() || locals.len() != lengths.len() {
        let (here, there, long) = (locals.len(), remotes.len(), lengths.len());
        let text = format!(
            "lists of {here} buffers, {there} addresses of the peer, {long} lengths; give equal ones"
        );
        return Err(Failure::new(Failure::FAILED, text));
    }
    let all = locals.iter().zip(remotes).zip(lengths);
    Ok(all.map(|((local, remote), bytes)| Piece { local: *local, remote: *remote, bytes: *bytes }).collect())
}

#[pymethods]
impl TransferEngine {
    #[new]
    fn new() -> Self {
        Self { engine: OnceLock::new(), begun: Mutex::default() }
    }

    /// Starts the engine at a host of this machine.
    fn start(&self, py: Python<'_>, host: &str, metadata: &str, protocol: &str) -> i32 {
        let started = py.detach(|| {
            if metadata != "P2PHANDSHAKE" {
                let text = format!("initialize: metadata {metadata:?}; give \"P2PHANDSHAKE\"");
                return Err(Failure::new(Failure::FAILED, text));
            }
            let verify = std::env::var_os("BATON_TRANSFER_VERIFY").is_none_or(|set| set != "0");
            let engine = Engine::start(host, protocol, verify)?;
            let twice = |_| Failure::new(Failure::FAILED, "initialize: it is initialized already");
            self.engine.set(engine).map_err(twice)
        });
        match started {
            Ok(()) => 0,
            Err(failure) => {
                log(py, LOGGER, "error", &failure.to_string());
                failure.code
            }
        }
    }

    /// The port by which peers name it.
    fn get_rpc_port(&self, py: Python<'_>) -> i32 {
        self.run(py, |engine| Ok(engine.port())).map_or_else(|failure| failure.code, i32::from)
    }

    /// Registers memory, all ranges or none.
    #[allow(unsafe_code, reason = "addresses become memory; the promise is the engine's")]
    fn register(&self, py: Python<'_>, addresses: Vec<u64>, lengths: Vec<u64>) -> i32 {
        self.code(py, |engine| {
            if addresses.len() != lengths.len() {
                let text = "register: lists of different lengths; give each buffer its length";
                return Err(Failure::new(Failure::FAILED, text));
            }
            let ranges: Vec<(u64, u64)> = addresses.into_iter().zip(lengths).collect();
            // SAFETY: docs/python.md requires of the engine that memory stays mapped until it has been unregistered.
            // Memory of Python, or of a tensor, is no reference of Rust's.
            unsafe { engine.register_all(&ranges) }
        })
    }

    /// Unregisters memory. After 0 no transfer uses it. The first failure is returned, and the other ranges are
    /// unregistered all the same.
    fn unregister(&self, py: Python<'_>, addresses: Vec<u64>) -> i32 {
        self.code(py, |engine| {
            let ends: Vec<_> = addresses.into_iter().map(|address| engine.unregister(address)).collect();
            ends.into_iter().collect()
        })
    }

    /// Moves pieces and waits until all are in place.
    fn move_pieces(&self, py: Python<'_>, target: &str, writes: bool, lists: Lists) -> i32 {
        self.code(py, |engine| engine.run(target, way(writes), &pieces(&lists)?))
    }

    /// Moves pieces, and leaves the peer a notice after the bytes.
    fn move_and_tell(
        &self,
        py: Python<'_>,
        target: &str,
        how: (bool, PyRef<'_, TransferNotify>),
        lists: Lists,
    ) -> i32 {
        let (writes, note) = (how.0, how.1.note());
        drop(how);
        self.code(py, |engine| engine.run_with_notice(target, way(writes), &pieces(&lists)?, note))
    }

    /// Begins to move pieces; a number to ask by, or 0.
    fn begin(&self, py: Python<'_>, target: &str, writes: bool, lists: Lists) -> u64 {
        let begun = self.run(py, |engine| {
            let moving = engine.start_moving(target, way(writes), &pieces(&lists)?, None)?;
            let mut begun = self.begun();
            if begun.moving.len() >= MOVING_MAX {
                let text =
                    format!("{MOVING_MAX} transfers were begun and not asked about; ask for their status");
                return Err(Failure::new(Failure::FAILED, text));
            }
            begun.next += 1;
            let id = begun.next;
            begun.moving.insert(id, moving);
            Ok(id)
        });
        begun.unwrap_or(0)
    }

    /// Waits for the end of what was begun: 0 when all is in place. Each can be asked about once.
    fn wait(&self, py: Python<'_>, ids: Vec<u64>) -> i32 {
        self.code(py, |_| {
            let mut first = Ok(());
            for id in ids {
                let moving = self.begun().moving.remove(&id);
                first = first.and(moving.ok_or_else(|| unknown(id)).and_then(BatchGroup::wait));
            }
            first
        })
    }

    /// 1 when all is in place, 0 while it is under way, below 0 when it has failed or is not known.
    fn check(&self, py: Python<'_>, id: u64) -> i32 {
        let looked = self.run(py, |_| {
            let mut begun = self.begun();
            let state = begun.moving.get_mut(&id).ok_or_else(|| unknown(id))?.state();
            if state != State::Running {
                begun.moving.remove(&id);
            }
            match state {
                State::Running => Ok(0),
                State::Done => Ok(1),
                State::Failed(failure) => Err(failure),
            }
        });
        looked.unwrap_or_else(|failure| failure.code)
    }

    /// Memory of the engine's own, registered; its address, or 0.
    fn allocate_managed_buffer(&self, py: Python<'_>, length: u64) -> u64 {
        self.run(py, |engine| engine.allocate(length)).unwrap_or(0)
    }

    /// Copies bytes into registered memory.
    fn fill(&self, py: Python<'_>, address: u64, data: &[u8]) -> i32 {
        self.code(py, |engine| engine.fill(address, data))
    }

    /// Bytes of registered memory.
    fn read_bytes_from_buffer<'py>(&self, py: Python<'py>, address: u64, length: u64) -> Bound<'py, PyBytes> {
        let bytes = self.run(py, |engine| engine.copy(address, length)).unwrap_or_default();
        PyBytes::new(py, &bytes)
    }

    /// The first address that a peer has registered, or 0.
    fn get_first_buffer_address(&self, py: Python<'_>, target: &str) -> u64 {
        self.run(py, |engine| engine.first_address(target)).unwrap_or(0)
    }

    /// Notices that peers have left.
    fn get_notifies(&self, py: Python<'_>) -> Vec<TransferNotify> {
        let notes = self.run(py, |engine| Ok(engine.notes())).unwrap_or_default();
        notes.into_iter().map(Into::into).collect()
    }
}

fn unknown(id: u64) -> Failure {
    Failure::new(Failure::FAILED, format!("no transfer {id} is under way"))
}
