//! The thin layer over libibverbs: devices, protection domains, memory regions. The queues are in
//! [`super::verbs_queue`].
//!
//! Each object owns its raw counterpart, keeps alive the objects that depend on it, and destroys it when dropped. The
//! device checks every read and write against the regions registered with it, and a region pins its pages by itself.
//! So wrong numbers give a failed request, never a stray access to unregistered memory of ours, and registered memory
//! ([`Memory`]) is never under a Rust reference.
#![allow(unsafe_code, reason = "calls libibverbs; each block is argued")]

use std::ffi::{CStr, c_int};
use std::io;
use std::mem;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

#[cfg(feature = "rdma-dlopen")]
pub(super) use rdma_mummy_sys as ffi;
#[cfg(not(feature = "rdma-dlopen"))]
pub(super) use rdma_sys as ffi;

#[cfg(not(feature = "rdma-dlopen"))]
use ffi::___ibv_query_port as ibv_query_port;
#[cfg(feature = "rdma-dlopen")]
use ffi::ibv_query_port;

use crate::mover::Memory;

/// The error that libibverbs left behind.
pub(super) fn last_error(what: &str) -> io::Error {
    named(what, io::Error::last_os_error())
}

/// The error number that a call of libibverbs returned.
pub(super) fn returned(what: &str, code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Most calls return the number; a few return -1 and leave it behind.
        code if code < 0 => Err(last_error(what)),
        code => Err(named(what, io::Error::from_raw_os_error(code))),
    }
}

fn named(what: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Names of the devices that the library sees; none where the kernel has no RDMA.
pub(super) fn device_names() -> Vec<String> {
    let mut names = Vec::new();
    each_device(|name, _| names.push(name.to_owned()));
    names
}

fn each_device(mut see: impl FnMut(&str, *mut ffi::ibv_device)) {
    let mut count: c_int = 0;
    // SAFETY: `count` outlives the call. The list is null or holds `count` devices until it is freed.
    let list = unsafe { ffi::ibv_get_device_list(&mut count) };
    if list.is_null() {
        return;
    }
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: `at` is inside the list, whose entries are devices until the list is freed below.
        let device = unsafe { *list.add(at) };
        // SAFETY: `device` is valid and its name a string that ends with a zero byte, valid as long.
        let name = unsafe { CStr::from_ptr(ffi::ibv_get_device_name(device)) };
        see(&name.to_string_lossy(), device);
    }
    // SAFETY: the list came from `ibv_get_device_list` and is not used after this.
    unsafe { ffi::ibv_free_device_list(list) };
}

/// An opened device.
pub(super) struct Context {
    raw: NonNull<ffi::ibv_context>,
}

// SAFETY: libibverbs is documented to be thread-safe; the context is freed once, by the last owner.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The limits of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub region_bytes: u64,
    pub queue_works: u32,
    pub reads_out: u8,
    pub reads_in: u8,
}

/// A port of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Port {
    pub active: bool,
    pub mtu_code: u8,
    pub mtu_code_max: u8,
    pub lid: u16,
    pub infiniband: bool,
    pub message_bytes_max: u32,
    pub gids: u32,
}

/// An asynchronous event of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A queue pair or completion queue with this token is broken.
    Queue(u64),
    /// A port is down.
    PortDown(u8),
    /// The device is lost.
    Device,
    /// Something that breaks nothing.
    Other,
}

impl Context {
    /// Opens the device of this name.
    pub(super) fn open(name: &str) -> io::Result<Arc<Self>> {
        let mut opened =
            Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no RDMA device {name}")));
        each_device(|found, device| {
            if found == name {
                // SAFETY: `device` is valid while the list is; an opened context does not need the list.
                let raw = unsafe { ffi::ibv_open_device(device) };
                opened = NonNull::new(raw).ok_or_else(|| last_error(&format!("opening {name}")));
            }
        });
        Ok(Arc::new(Self { raw: opened? }))
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_context {
        self.raw.as_ptr()
    }

    pub(super) fn limits(&self) -> io::Result<Limits> {
        // SAFETY: a struct of plain numbers, for which zero bytes are valid.
        let mut attr: ffi::ibv_device_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open and `attr` outlives the call.
        returned("asking for the device's limits", unsafe { ffi::ibv_query_device(self.raw(), &mut attr) })?;
        let small = |count: c_int| u8::try_from(count.clamp(1, 255)).expect("clamped");
        Ok(Limits {
            region_bytes: attr.max_mr_size,
            queue_works: u32::try_from(attr.max_qp_wr).unwrap_or(0),
            reads_out: small(attr.max_qp_init_rd_atom),
            reads_in: small(attr.max_qp_rd_atom),
        })
    }

    pub(super) fn port(&self, number: u8) -> io::Result<Port> {
        // SAFETY: a struct of plain numbers, for which zero bytes are valid; old providers leave some unset.
        let mut attr: ffi::ibv_port_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open and `attr` outlives the call.
        returned("asking for the port", unsafe { ibv_query_port(self.raw(), number, &mut attr) })?;
        Ok(Port {
            active: attr.state == ffi::ibv_port_state::IBV_PORT_ACTIVE,
            mtu_code: u8::try_from(attr.active_mtu).unwrap_or(0),
            mtu_code_max: u8::try_from(attr.max_mtu).unwrap_or(0),
            lid: attr.lid,
            // 1 is InfiniBand, 2 Ethernet; 0, for very old drivers, means InfiniBand.
            infiniband: attr.link_layer != 2,
            message_bytes_max: attr.max_msg_sz,
            gids: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
        })
    }

    pub(super) fn gid(&self, port: u8, index: u8) -> io::Result<[u8; 16]> {
        let mut gid = ffi::ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open and `gid` outlives the call.
        returned("asking for a GID", unsafe {
            ffi::ibv_query_gid(self.raw(), port, c_int::from(index), &mut gid)
        })?;
        // SAFETY: every bit pattern is a valid array of bytes.
        Ok(unsafe { gid.raw })
    }

    /// The descriptor that becomes readable when [`Context::next_event`] has an event.
    pub(super) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context and stays open as long as it, which `self` borrows.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    /// The next event; waits for it unless [`Context::events`] is set not to.
    pub(super) fn next_event(&self) -> io::Result<Event> {
        let mut event = mem::MaybeUninit::<ffi::ibv_async_event>::zeroed();
        // SAFETY: the context is open and `event` outlives the call, which fills it when it returns 0.
        if unsafe { ffi::ibv_get_async_event(self.raw(), event.as_mut_ptr()) } != 0 {
            return Err(last_error("asking for an event"));
        }
        // SAFETY: filled. The kind is read as a number: the library may know more kinds than its header here.
        let kind = unsafe { (&raw const (*event.as_ptr()).event_type).cast::<u32>().read() };
        // SAFETY: the union member is the one that this kind fills. A queue that an event names is not freed
        // before the event is acknowledged, which is below.
        let found = unsafe {
            let element = &raw const (*event.as_ptr()).element;
            match kind {
                0 => Event::Queue((*(*element).cq).cq_context as u64),
                1..=3 => Event::Queue((*(*element).qp).qp_context as u64),
                8 => Event::Device,
                10 => Event::PortDown(u8::try_from((*element).port_num).unwrap_or(0)),
                _ => Event::Other,
            }
        };
        // SAFETY: the event came from `ibv_get_async_event` and is acknowledged once.
        unsafe { ffi::ibv_ack_async_event(event.as_mut_ptr()) };
        Ok(found)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by us; all that depends on it holds an `Arc` to it, so is gone.
        unsafe { ffi::ibv_close_device(self.raw()) };
    }
}

/// A protection domain: what queue pairs and regions share.
pub(super) struct Domain {
    raw: NonNull<ffi::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs is thread-safe; freed once, by the last owner.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { ffi::ibv_alloc_pd(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("making a protection domain"))?;
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: made by us; all that depends on it holds an `Arc` to it, so is gone.
        unsafe { ffi::ibv_dealloc_pd(self.raw()) };
    }
}

/// The access that peers have to a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Remote {
    pub read: bool,
    pub write: bool,
}

impl Remote {
    fn flags(self) -> c_int {
        let mut flags = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        if self.read {
            flags |= ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        }
        if self.write {
            flags |= ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        }
        c_int::try_from(flags).expect("the flags are small bits")
    }
}

/// A range of memory that a device may reach: its pages stay where they are until it is dropped.
pub(super) struct Mr {
    raw: NonNull<ffi::ibv_mr>,
    _domain: Arc<Domain>,
}

// SAFETY: libibverbs is thread-safe; freed once, by the owner.
unsafe impl Send for Mr {}
// SAFETY: as above; the keys are read only.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `bytes` of a memory from `at` on, which must be inside.
    pub(super) fn register(
        domain: &Arc<Domain>,
        memory: &Memory,
        at: u64,
        bytes: u64,
        remote: Remote,
    ) -> io::Result<Self> {
        let address = memory.address(at, bytes).cast();
        let length = usize::try_from(bytes).expect("inside a mapping");
        // SAFETY: the range is mapped (checked by `address`). The device pins the pages: should the mapping go first,
        // the device writes to pages that no other mapping has.
        let raw = unsafe { ffi::ibv_reg_mr(domain.raw(), address, length, remote.flags()) };
        Self::made(domain, raw, "registering memory")
    }

    fn made(domain: &Arc<Domain>, raw: *mut ffi::ibv_mr, what: &str) -> io::Result<Self> {
        let raw = NonNull::new(raw).ok_or_else(|| last_error(what))?;
        Ok(Self { raw, _domain: domain.clone() })
    }

    /// The key for this side's work requests.
    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: valid until dropped, and constant.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// The key for peers.
    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    /// Ends it: when this returns well, no device reaches the range through it.
    pub(super) fn release(self) -> io::Result<()> {
        let raw = self.raw.as_ptr();
        // SAFETY: made by us and released once: on success `self` is forgotten below, where its domain's
        // count is given back; on failure it is still whole and `drop` tries again.
        let code = unsafe { ffi::ibv_dereg_mr(raw) };
        returned("ending a registration", code)?;
        let mut whole = mem::ManuallyDrop::new(self);
        // SAFETY: `whole` is never used again, so its domain is dropped once.
        unsafe { std::ptr::drop_in_place(&mut whole._domain) };
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by us and not released yet.
        unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}
