//! The functions of `transfer_engine_c.h` that programs in C and C++ link (NIXL's plug-in for Mooncake among them),
//! over [`Engine`]: the library that this crate builds without its feature is a stand-in for `libtransfer_engine.so`.
//!
//! Structures are laid out as in Mooncake's header. Each function returns what is said there: 0 or below 0, an id
//! or a value that is none. Why a call failed goes to standard error, one line each.
#![allow(unsafe_code, reason = "the border to C: pointers come in and go out; each block is argued")]

mod batches;
mod strings;

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use baton_transports::mover::Direction;

use self::batches::{Batches, Status, TransferOrder};
use self::strings::text;
use crate::Failure;
use crate::engine::{Engine, Note, ends};

/// No batch.
const INVALID_BATCH: u64 = u64::MAX;
/// Segments that an engine may have opened.
const SEGMENTS_MAX: usize = 1 << 16;

/// An engine as C holds it.
pub struct CEngine {
    engine: Engine,
    name: String,
    segments: Mutex<Vec<String>>,
    batches: Batches,
}

/// Mooncake's `transfer_request_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TransferRequest {
    /// 0 reads, 1 writes.
    pub opcode: c_int,
    /// The local address.
    pub source: *mut c_void,
    /// The id of the remote segment.
    pub target_id: i32,
    /// For files, of which there are none here.
    pub file_id: u32,
    /// The address there.
    pub target_offset: u64,
    /// Number of bytes.
    pub length: u64,
}

/// Mooncake's `transfer_status_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TransferStatus {
    /// 0 waiting, 4 completed, 6 failed.
    pub status: c_int,
    /// All or nothing.
    pub transferred_bytes: u64,
}

/// Mooncake's `notify_msg_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NotifyMsg {
    /// The sender.
    pub name: *mut c_char,
    /// The content.
    pub msg: *mut c_char,
}

/// 0, or the code after a line that says why.
fn code(done: Result<(), Failure>) -> c_int {
    done.map_or_else(|failure| said(&failure).code, |()| 0)
}

fn said(failure: &Failure) -> &Failure {
    eprintln!("mooncake.engine: {failure}");
    failure
}

fn missing() -> Failure {
    Failure::new(Failure::FAILED, "no such engine, segment or batch")
}

/// The engine behind a handle.
fn of<'a>(engine: *mut c_void) -> Option<&'a CEngine> {
    // SAFETY: a handle is null or came from `createTransferEngine`, and is not used after
    // `destroyTransferEngine`: the header's contract. All functions only share it.
    unsafe { engine.cast::<CEngine>().as_ref() }
}

impl CEngine {
    fn segment(&self, id: i32) -> Option<String> {
        let at = usize::try_from(id).ok()?.checked_sub(1)?;
        self.segments.lock().unwrap_or_else(PoisonError::into_inner).get(at).cloned()
    }

    fn open(&self, name: String) -> Result<i32, Failure> {
        self.engine.first_address(&name)?;
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        let known = segments.iter().position(|known| *known == name);
        if known.is_none() && segments.len() >= SEGMENTS_MAX {
            return Err(Failure::new(Failure::FAILED, "too many segments are open"));
        }
        let at = known.unwrap_or_else(|| {
            segments.push(name);
            segments.len() - 1
        });
        Ok(i32::try_from(at + 1).expect("bounded"))
    }

    fn submit(&self, batch: u64, requests: &[TransferRequest], note: Option<Note>) -> Result<(), Failure> {
        let wanted = |request: &TransferRequest| {
            let way = if request.opcode == 0 { Direction::Read } else { Direction::Write };
            let target = self.segment(request.target_id).ok_or_else(missing)?;
            let local = request.source.expose_provenance() as u64;
            Ok(TransferOrder { target, way, local, remote: request.target_offset, bytes: request.length })
        };
        let wanted = requests.iter().map(wanted).collect::<Result<Vec<_>, Failure>>()?;
        self.batches.submit(&self.engine, batch, &wanted, note)
    }
}

/// Starts an engine; null when it cannot be. `metadata` must be `P2PHANDSHAKE`; peers name it `host:port`.
///
/// # Safety
/// Strings are null or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn createTransferEngine(
    metadata: *const c_char,
    local_server_name: *const c_char,
    ip_or_host_name: *const c_char,
    rpc_port: u64,
    _auto_discover: c_int,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let (metadata, name, host) = unsafe { (text(metadata), text(local_server_name), text(ip_or_host_name)) };
    let host = host.filter(|host| !host.is_empty()).or(name).unwrap_or_default();
    let (bare, port) = ends::split(&host);
    let listen = if rpc_port == 0 || port.is_some() { host.clone() } else { ends::join(bare, rpc_port) };
    let started = if metadata.as_deref() == Some("P2PHANDSHAKE") {
        Engine::start(&listen, "tcp", true)
    } else {
        Err(Failure::new(Failure::FAILED, "createTransferEngine: give the metadata \"P2PHANDSHAKE\""))
    };
    match started {
        Ok(engine) => {
            let name = ends::join(bare, engine.port());
            let (segments, batches) = (Mutex::default(), Batches::default());
            Box::into_raw(Box::new(CEngine { engine, name, segments, batches })).cast()
        }
        Err(failure) => {
            said(&failure);
            std::ptr::null_mut()
        }
    }
}

/// Ends an engine. Transfers under way are given up.
///
/// # Safety
/// The handle is null or of [`createTransferEngine`], and no longer in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn destroyTransferEngine(engine: *mut c_void) {
    if !engine.is_null() {
        // SAFETY: made by `Box::into_raw` in `createTransferEngine`, and given back once.
        drop(unsafe { Box::from_raw(engine.cast::<CEngine>()) });
    }
}

/// Writes `host:port` into a buffer.
///
/// # Safety
/// The buffer has so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getLocalIpAndPort(engine: *mut c_void, buffer: *mut c_char, bytes: usize) -> c_int {
    let Some(engine) = of(engine) else { return Failure::FAILED };
    // SAFETY: the caller's promise.
    if unsafe { strings::put(&engine.name, buffer, bytes) } { 0 } else { Failure::FAILED }
}

/// The id of a peer, `host:port`; below 0 where none answers.
///
/// # Safety
/// The string is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegment(engine: *mut c_void, name: *const c_char) -> i32 {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name) };
    let opened = of(engine).zip(name).ok_or_else(missing).and_then(|(engine, name)| engine.open(name));
    opened.unwrap_or_else(|failure| said(&failure).code)
}

/// Segments stay known: there is nothing to close.
#[unsafe(no_mangle)]
pub extern "C" fn closeSegment(engine: *mut c_void, segment: i32) -> c_int {
    let known = of(engine).and_then(|engine| engine.segment(segment)).is_some();
    if known { 0 } else { Failure::FAILED }
}

/// Registers memory, for transfers from here and for peers to reach.
///
/// # Safety
/// The memory stays mapped until it has been unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemory(
    engine: *mut c_void,
    address: *mut c_void,
    length: usize,
    _location: *const c_char,
    _remote_accessible: c_int,
) -> c_int {
    let address = address.expose_provenance() as u64;
    // SAFETY: the caller's promise.
    let register = |engine: &CEngine| unsafe { engine.engine.register(address, length as u64) };
    code(of(engine).ok_or_else(missing).and_then(register))
}

/// Unregisters memory; after 0 no transfer uses it.
#[unsafe(no_mangle)]
pub extern "C" fn unregisterLocalMemory(engine: *mut c_void, address: *mut c_void) -> c_int {
    let address = address.expose_provenance() as u64;
    code(of(engine).ok_or_else(missing).and_then(|engine| engine.engine.unregister(address)))
}

/// A batch of up to so many requests; [`u64::MAX`] when there are too many.
#[unsafe(no_mangle)]
pub extern "C" fn allocateBatchID(engine: *mut c_void, batch_size: usize) -> u64 {
    of(engine).and_then(|engine| engine.batches.allocate(batch_size)).unwrap_or(INVALID_BATCH)
}

/// Begins requests of a batch.
///
/// # Safety
/// There are `count` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransfer(
    engine: *mut c_void,
    batch: u64,
    entries: *mut TransferRequest,
    count: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let requests = unsafe { strings::list(entries, count) };
    code(of(engine).ok_or_else(missing).and_then(|engine| engine.submit(batch, requests, None)))
}

/// Like [`submitTransfer`], and leaves the peer of the last request a notice after its bytes.
///
/// # Safety
/// As [`submitTransfer`]; the notice's strings are null or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransferWithNotify(
    engine: *mut c_void,
    batch: u64,
    entries: *mut TransferRequest,
    count: usize,
    notify: NotifyMsg,
) -> c_int {
    // SAFETY: the caller's promise.
    let (requests, note) = unsafe { (strings::list(entries, count), strings::note(notify)) };
    code(of(engine).ok_or_else(missing).and_then(|engine| engine.submit(batch, requests, Some(note))))
}

/// How far a request of a batch is.
///
/// # Safety
/// The status is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getTransferStatus(
    engine: *mut c_void,
    batch: u64,
    task: usize,
    status: *mut TransferStatus,
) -> c_int {
    let found = of(engine).and_then(|engine| engine.batches.status(batch, task));
    // SAFETY: the caller's promise.
    let (Some(found), Some(status)) = (found, unsafe { status.as_mut() }) else { return Failure::FAILED };
    *status = match found {
        Status::Running => TransferStatus { status: 0, transferred_bytes: 0 },
        Status::Done(bytes) => TransferStatus { status: 4, transferred_bytes: bytes },
        Status::Failed => TransferStatus { status: 6, transferred_bytes: 0 },
    };
    0
}

/// Forgets a batch; what is under way is given up.
#[unsafe(no_mangle)]
pub extern "C" fn freeBatchID(engine: *mut c_void, batch: u64) -> c_int {
    if of(engine).is_some_and(|engine| engine.batches.free(batch)) { 0 } else { Failure::FAILED }
}

/// Notices that peers have left, for [`freeNotifsMsgBuf`]; null when there are none.
///
/// # Safety
/// The size is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNotifsFromEngine(engine: *mut c_void, size: *mut c_int) -> *mut NotifyMsg {
    // SAFETY: the caller's promise.
    let (Some(engine), Some(size)) = (of(engine), unsafe { size.as_mut() }) else {
        return std::ptr::null_mut();
    };
    let (list, count) = strings::give(engine.engine.notes());
    *size = count;
    list
}

/// Frees what [`getNotifsFromEngine`] gave.
///
/// # Safety
/// `list` is a list from that call, with its size, and no longer in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeNotifsMsgBuf(list: *mut NotifyMsg, size: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { strings::take_back(list, size) };
    0
}

/// Leaves a peer a notice.
///
/// # Safety
/// The notice's strings are null or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn genNotifyInEngine(engine: *mut c_void, target: u64, notify: NotifyMsg) -> c_int {
    // SAFETY: the caller's promise.
    let note = unsafe { strings::note(notify) };
    let named = of(engine).and_then(|engine| Some((engine, engine.segment(i32::try_from(target).ok()?)?)));
    let told = |(engine, target): (&CEngine, String)| {
        engine.engine.run_with_notice(&target, Direction::Write, &[], note)
    };
    code(named.ok_or_else(missing).and_then(told))
}

/// Does nothing: the engine always looks up segments anew when they have changed.
#[unsafe(no_mangle)]
pub extern "C" fn syncSegmentCache(engine: *mut c_void) -> c_int {
    if of(engine).is_some() { 0 } else { Failure::FAILED }
}
