//! The functions for C, called as C calls them.
//!
//! Strings and pointers are C's here, hence the unsafe blocks.
#![allow(unsafe_code, reason = "calls functions as C does; each block is argued")]

use std::ffi::{CStr, CString, c_void};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use baton_python::c::*;

use crate::scene::ForeignMemory;

const TIME_LIMIT: Duration = Duration::from_secs(60);
const DONE: i32 = 4;
const FAILED: i32 = 6;

struct End(*mut c_void);

impl End {
    fn start() -> Self {
        Self::start_at(c"127.0.0.1", c"", 0)
    }

    fn start_at(name: &CStr, host: &CStr, port: u64) -> Self {
        // SAFETY: strings that live during the call.
        let engine =
            unsafe { createTransferEngine(c"P2PHANDSHAKE".as_ptr(), name.as_ptr(), host.as_ptr(), port, 1) };
        assert!(!engine.is_null());
        Self(engine)
    }

    fn name(&self) -> CString {
        let mut name = [0; 64];
        // SAFETY: 64 bytes.
        unsafe {
            assert!(getLocalIpAndPort(self.0, name.as_mut_ptr(), 3) < 0, "too small");
            assert_eq!(getLocalIpAndPort(self.0, name.as_mut_ptr(), name.len()), 0);
            CStr::from_ptr(name.as_ptr()).to_owned()
        }
    }

    fn register(&self, held: &mut ForeignMemory) -> u64 {
        let address = held.address();
        let (at, bytes) =
            (std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap()), held.len());
        // SAFETY: the memory outlives the engine in these tests.
        assert_eq!(
            unsafe { registerLocalMemory(self.0, at, usize::try_from(bytes).unwrap(), c"*".as_ptr(), 1) },
            0
        );
        address
    }

    /// Waits for the end of one request.
    fn status(&self, batch: u64, task: usize) -> TransferStatus {
        let limit = Instant::now() + TIME_LIMIT;
        loop {
            let mut status = TransferStatus::default();
            // SAFETY: it can be written.
            assert_eq!(unsafe { getTransferStatus(self.0, batch, task, &raw mut status) }, 0);
            if status.status >= DONE {
                return status;
            }
            assert!(Instant::now() < limit);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: ours, and no longer in use.
        unsafe { destroyTransferEngine(self.0) };
    }
}

fn request(opcode: i32, source: u64, target_id: i32, target_offset: u64, length: u64) -> TransferRequest {
    let source = std::ptr::with_exposed_provenance_mut(usize::try_from(source).unwrap());
    TransferRequest { opcode, source, target_id, file_id: 0, target_offset, length }
}

#[test]
fn a_batch_of_c_moves_bytes_and_leaves_notices() {
    let (mut ours, mut theirs) = (ForeignMemory::new(100_000, 1), ForeignMemory::new(100_000, 2));
    let (here, there) = (End::start(), End::start());
    let (from, to) = (here.register(&mut ours), there.register(&mut theirs));
    // SAFETY: strings and lists that live during the calls.
    unsafe {
        let id = openSegment(here.0, there.name().as_ptr());
        assert!(id > 0);
        assert_eq!(openSegment(here.0, there.name().as_ptr()), id);
        assert!(openSegment(here.0, c"127.0.0.1:1".as_ptr()) < 0);
        let batch = allocateBatchID(here.0, 3);
        let mut wanted =
            [request(1, from, id, to, 60_000), request(1, from + 60_000, id, to + 60_000, 40_000)];
        let notify = NotifyMsg { name: c"who".as_ptr().cast_mut(), msg: c"what".as_ptr().cast_mut() };
        assert_eq!(submitTransferWithNotify(here.0, batch, wanted.as_mut_ptr(), 2, notify), 0);
        assert!(submitTransfer(here.0, batch, wanted.as_mut_ptr(), 2) < 0, "no room for two more");
        let mut foreign = [request(1, from, id, 8, 8)];
        assert_eq!(submitTransfer(here.0, batch, foreign.as_mut_ptr(), 1), 0);
        let ends: Vec<_> = (0..3).map(|task| here.status(batch, task)).collect();
        assert_eq!((ends[0].status, ends[0].transferred_bytes), (DONE, 60_000));
        assert_eq!((ends[1].status, ends[1].transferred_bytes), (DONE, 40_000));
        assert_eq!(ends[2].status, FAILED, "a foreign address");
        let mut status = TransferStatus::default();
        assert!(getTransferStatus(here.0, batch, 3, &raw mut status) < 0);
        assert_eq!(ours.bytes(), theirs.bytes());
        assert_eq!((freeBatchID(here.0, batch), freeBatchID(here.0, batch)), (0, -1));
        assert_eq!(genNotifyInEngine(here.0, u64::try_from(id).unwrap(), notify), 0);
        let mut size = 0;
        let list = getNotifsFromEngine(there.0, &raw mut size);
        assert_eq!(size, 2);
        let first = *list;
        assert_eq!((CStr::from_ptr(first.name), CStr::from_ptr(first.msg)), (c"who", c"what"));
        assert_eq!(freeNotifsMsgBuf(list, size), 0);
        assert!(getNotifsFromEngine(there.0, &raw mut size).is_null());
        assert_eq!(
            (closeSegment(here.0, id), closeSegment(here.0, 99), syncSegmentCache(here.0)),
            (0, -1, 0)
        );
    }
}

#[test]
fn an_engine_at_an_ipv6_address_has_a_name_that_peers_can_use() {
    if TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    let port = TcpListener::bind("[::1]:0").unwrap().local_addr().unwrap().port();
    let mut held = ForeignMemory::new(64, 1);
    let here = End::start();
    for (host, rpc_port) in [
        ("::1".to_owned(), 0),
        ("[::1]".to_owned(), 0),
        ("::1".to_owned(), port),
        (format!("[::1]:{port}"), 0),
    ] {
        let named = CString::new(host.as_str()).unwrap();
        let there = End::start_at(&named, &named, rpc_port.into());
        there.register(&mut held);
        let name = there.name().into_string().unwrap();
        let port = name.strip_prefix("[::1]:").and_then(|port| port.parse::<u16>().ok());
        assert!(port.is_some_and(|port| rpc_port == 0 || port == rpc_port), "{host}: {name}");
        // SAFETY: a string that lives during the call.
        assert!(unsafe { openSegment(here.0, there.name().as_ptr()) } > 0, "{name}");
    }
}

#[test]
fn what_c_must_not_ask_is_refused() {
    let none = std::ptr::null_mut();
    // SAFETY: null is allowed everywhere.
    unsafe {
        assert!(
            createTransferEngine(c"etcd://a:1".as_ptr(), c"127.0.0.1".as_ptr(), c"".as_ptr(), 0, 1).is_null()
        );
        destroyTransferEngine(none);
        assert!(openSegment(none, c"a:1".as_ptr()) < 0);
        assert_eq!(allocateBatchID(none, 1), u64::MAX);
        assert!(submitTransfer(none, 1, std::ptr::null_mut(), 0) < 0);
    }
    let here = End::start();
    assert_eq!(unregisterLocalMemory(here.0, none), -3);
    assert_eq!(allocateBatchID(here.0, usize::MAX), u64::MAX);
    // SAFETY: no requests.
    assert!(unsafe { submitTransfer(here.0, 7, std::ptr::null_mut(), 0) } < 0, "no such batch");
}
