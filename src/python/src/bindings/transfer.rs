//! `TransferEngine`.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use baton_transports::mover::Direction;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::log;
use super::notices::TransferNotify;
use crate::Failure;
use crate::engine::{Engine, Moving, Piece, State};

/// Transfers begun and not yet asked about.
const MOVING_MAX: usize = 65_536;
const LOGGER: &str = "mooncake.engine";

/// Which way bytes go.
#[pyclass(eq, eq_int, module = "mooncake.engine", from_py_object)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferOpcode {
    /// From the peer.
    Read,
    /// To the peer.
    Write,
}

impl From<TransferOpcode> for Direction {
    fn from(opcode: TransferOpcode) -> Self {
        match opcode {
            TransferOpcode::Read => Self::Read,
            TransferOpcode::Write => Self::Write,
        }
    }
}

#[derive(Default)]
struct Begun {
    next: u64,
    moving: BTreeMap<u64, Moving>,
}

/// Moves bytes between registered memory of this process and of others.
#[pyclass(frozen, module = "mooncake.engine")]
pub(super) struct TransferEngine {
    engine: OnceLock<Engine>,
    begun: Mutex<Begun>,
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

    fn begin(
        &self,
        py: Python<'_>,
        target: &str,
        way: Direction,
        pieces: Result<Vec<Piece>, Failure>,
    ) -> Result<u64, Failure> {
        self.run(py, |engine| {
            let moving = engine.start_moving(target, way, &pieces?, None)?;
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
        })
    }

    fn begun(&self) -> std::sync::MutexGuard<'_, Begun> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pieces out of three lists.
fn pieces(locals: &[u64], remotes: &[u64], lengths: &[u64]) -> Result<Vec<Piece>, Failure> {
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

    /// Starts the engine at `local_hostname`. 0, or below 0 with the reason in the log.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name = ""))]
    fn initialize(
        &self,
        py: Python<'_>,
        local_hostname: &str,
        metadata_server: &str,
        protocol: &str,
        device_name: &str,
    ) -> i32 {
        // Devices are those of the protocol; sockets have none to choose.
        let _ = device_name;
        let started = py.detach(|| {
            if metadata_server != "P2PHANDSHAKE" {
                let text = format!("initialize: metadata {metadata_server:?}; give \"P2PHANDSHAKE\"");
                return Err(Failure::new(Failure::FAILED, text));
            }
            let verify = std::env::var_os("BATON_TRANSFER_VERIFY").is_none_or(|set| set != "0");
            let engine = Engine::start(local_hostname, protocol, verify)?;
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

    /// The port by which peers name this engine: `local_hostname:port`.
    fn get_rpc_port(&self, py: Python<'_>) -> i32 {
        self.run(py, |engine| Ok(engine.port())).map_or_else(|failure| failure.code, i32::from)
    }

    /// Registers memory at an address.
    #[pyo3(signature = (buffer_addr, capacity, location = "*"))]
    fn register_memory(&self, py: Python<'_>, buffer_addr: u64, capacity: u64, location: &str) -> i32 {
        // Where it is matters to devices only.
        let _ = location;
        self.code(py, |engine| engine.register(buffer_addr, capacity))
    }

    /// Takes memory off; when it returns 0 nobody touches it any more.
    fn unregister_memory(&self, py: Python<'_>, buffer_addr: u64) -> i32 {
        self.code(py, |engine| engine.unregister(buffer_addr))
    }

    /// Registers several, all or none.
    #[pyo3(signature = (buffer_addresses, capacities, location = "*"))]
    fn batch_register_memory(
        &self,
        py: Python<'_>,
        buffer_addresses: Vec<u64>,
        capacities: Vec<u64>,
        location: &str,
    ) -> i32 {
        // As above.
        let _ = location;
        self.code(py, |engine| {
            if buffer_addresses.len() != capacities.len() {
                let text = "batch_register_memory: lists of different lengths; give one capacity each";
                return Err(Failure::new(Failure::FAILED, text));
            }
            let ranges: Vec<(u64, u64)> = buffer_addresses.into_iter().zip(capacities).collect();
            engine.register_all(&ranges)
        })
    }

    /// Takes several off; the first failure is returned, the others are taken off all the same.
    fn batch_unregister_memory(&self, py: Python<'_>, buffer_addresses: Vec<u64>) -> i32 {
        self.code(py, |engine| {
            let ends = buffer_addresses.into_iter().map(|address| engine.unregister(address));
            ends.fold(Ok(()), |first, end| first.and(end))
        })
    }

    /// Writes to a peer, and waits until all is there.
    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = ""))]
    fn transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffer: u64,
        peer_buffer_address: u64,
        length: u64,
        transport_hint: &str,
    ) -> i32 {
        // The mover chooses among its paths.
        let _ = transport_hint;
        let piece = Piece { local: buffer, remote: peer_buffer_address, bytes: length };
        self.code(py, |engine| engine.run(target_hostname, Direction::Write, &[piece]))
    }

    /// Reads from a peer, and waits until all is here.
    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = ""))]
    fn transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffer: u64,
        peer_buffer_address: u64,
        length: u64,
        transport_hint: &str,
    ) -> i32 {
        let _ = transport_hint;
        let piece = Piece { local: buffer, remote: peer_buffer_address, bytes: length };
        self.code(py, |engine| engine.run(target_hostname, Direction::Read, &[piece]))
    }

    /// Either way, and leaves the peer a notice when all is in place.
    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, opcode, notify = None, transport_hint = ""))]
    #[expect(clippy::too_many_arguments, reason = "Mooncake's signature")]
    fn transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffer: u64,
        peer_buffer_address: u64,
        length: u64,
        opcode: TransferOpcode,
        notify: Option<PyRef<'_, TransferNotify>>,
        transport_hint: &str,
    ) -> i32 {
        let _ = transport_hint;
        let notice = notify.map(|notify| notify.note());
        let pieces = [Piece { local: buffer, remote: peer_buffer_address, bytes: length }];
        self.code(py, |engine| match notice {
            None => engine.run(target_hostname, opcode.into(), &pieces),
            Some(notice) => engine.run_and_tell(target_hostname, opcode.into(), &pieces, notice),
        })
    }

    /// Writes several pieces to a peer, and waits until all are there.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""))]
    fn batch_transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Vec<u64>,
        peer_buffer_addresses: Vec<u64>,
        lengths: Vec<u64>,
        transport_hint: &str,
    ) -> i32 {
        let _ = transport_hint;
        let pieces = || pieces(&buffers, &peer_buffer_addresses, &lengths);
        self.code(py, |engine| engine.run(target_hostname, Direction::Write, &pieces()?))
    }

    /// Reads several pieces from a peer, and waits until all are here.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""))]
    fn batch_transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Vec<u64>,
        peer_buffer_addresses: Vec<u64>,
        lengths: Vec<u64>,
        transport_hint: &str,
    ) -> i32 {
        let _ = transport_hint;
        let pieces = || pieces(&buffers, &peer_buffer_addresses, &lengths);
        self.code(py, |engine| engine.run(target_hostname, Direction::Read, &pieces()?))
    }

    /// Either way, several pieces.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify = None, transport_hint = ""))]
    #[expect(clippy::too_many_arguments, reason = "Mooncake's signature")]
    fn batch_transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Vec<u64>,
        peer_buffer_addresses: Vec<u64>,
        lengths: Vec<u64>,
        opcode: TransferOpcode,
        notify: Option<PyRef<'_, TransferNotify>>,
        transport_hint: &str,
    ) -> i32 {
        let _ = transport_hint;
        let notice = notify.map(|notify| notify.note());
        self.code(py, |engine| {
            let pieces = pieces(&buffers, &peer_buffer_addresses, &lengths)?;
            match notice {
                None => engine.run(target_hostname, opcode.into(), &pieces),
                Some(notice) => engine.run_and_tell(target_hostname, opcode.into(), &pieces, notice),
            }
        })
    }

    /// Begins to write several pieces; a number to ask by, or 0 with the reason in the log.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""))]
    fn batch_transfer_async_write(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Vec<u64>,
        peer_buffer_addresses: Vec<u64>,
        lengths: Vec<u64>,
        transport_hint: &str,
    ) -> u64 {
        let _ = transport_hint;
        let pieces = pieces(&buffers, &peer_buffer_addresses, &lengths);
        self.begin(py, target_hostname, Direction::Write, pieces).unwrap_or(0)
    }

    /// Begins to read several pieces; as above.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""))]
    fn batch_transfer_async_read(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Vec<u64>,
        peer_buffer_addresses: Vec<u64>,
        lengths: Vec<u64>,
        transport_hint: &str,
    ) -> u64 {
        let _ = transport_hint;
        let pieces = pieces(&buffers, &peer_buffer_addresses, &lengths);
        self.begin(py, target_hostname, Direction::Read, pieces).unwrap_or(0)
    }

    /// Waits for the end of what was begun: 0 when all is in place, else below 0. Each can be asked about once.
    fn get_batch_transfer_status(&self, py: Python<'_>, batch_ids: Vec<u64>) -> i32 {
        self.code(py, |_| {
            let mut first = Ok(());
            for id in batch_ids {
                let moving = self.begun().moving.remove(&id);
                let unknown = || Failure::new(Failure::FAILED, format!("no transfer {id} is under way"));
                first = first.and(moving.ok_or_else(unknown).and_then(Moving::wait));
            }
            first
        })
    }

    /// Begins to write one piece; a number to ask by, or below 0.
    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = ""))]
    fn transfer_submit_write(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffer: u64,
        peer_buffer_address: u64,
        length: u64,
        transport_hint: &str,
    ) -> i64 {
        let _ = transport_hint;
        let piece = Piece { local: buffer, remote: peer_buffer_address, bytes: length };
        let begun = self.begin(py, target_hostname, Direction::Write, Ok(vec![piece]));
        begun.map_or_else(|failure| failure.code.into(), |id| i64::try_from(id).unwrap_or(i64::MAX))
    }

    /// 1 when all is in place, 0 when it is still under way, below 0 when it has failed or is not known.
    fn transfer_check_status(&self, py: Python<'_>, batch_id: u64) -> i32 {
        let looked = self.run(py, |_| {
            let mut begun = self.begun();
            let unknown = || Failure::new(Failure::FAILED, format!("no transfer {batch_id} is under way"));
            let state = begun.moving.get_mut(&batch_id).ok_or_else(unknown)?.state();
            if state != State::Running {
                begun.moving.remove(&batch_id);
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

    /// Gives it back.
    fn free_managed_buffer(&self, py: Python<'_>, buffer_addr: u64, length: u64) -> i32 {
        let _ = length;
        self.code(py, |engine| engine.unregister(buffer_addr))
    }

    /// Copies bytes into registered memory.
    #[pyo3(signature = (dest_address, data, length = None))]
    fn write_bytes_to_buffer(
        &self,
        py: Python<'_>,
        dest_address: u64,
        data: &[u8],
        length: Option<usize>,
    ) -> i32 {
        let data = &data[..length.unwrap_or(data.len()).min(data.len())];
        self.code(py, |engine| engine.fill(dest_address, data))
    }

    /// Bytes of registered memory.
    fn read_bytes_from_buffer<'py>(
        &self,
        py: Python<'py>,
        source_address: u64,
        length: u64,
    ) -> Bound<'py, PyBytes> {
        let bytes = self.run(py, |engine| engine.copy(source_address, length)).unwrap_or_default();
        PyBytes::new(py, &bytes)
    }

    /// The first address that a peer has registered, or 0.
    fn get_first_buffer_address(&self, py: Python<'_>, segment_name: &str) -> u64 {
        self.run(py, |engine| engine.first_address(segment_name)).unwrap_or(0)
    }

    /// Notices that peers have left.
    fn get_notifies(&self, py: Python<'_>) -> Vec<TransferNotify> {
        let notes = self.run(py, |engine| Ok(engine.notes())).unwrap_or_default();
        notes.into_iter().map(Into::into).collect()
    }
}
