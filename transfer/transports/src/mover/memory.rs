//! Memory that transports reach: mapped pages with a fixed place, shared by reference count.
//!
//! Devices, peers and I/O threads write into it while others hold it, so Rust never has references into it. Bytes go
//! in and out by copies through raw pointers. Two owners decide which thread may touch a range: windows
//! ([`super::Exposure`]), and batches, which own their ranges until they have ended.
#![allow(unsafe_code, reason = "maps memory and copies through raw pointers; each block is argued")]

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::frame::Checksum;

/// Where bytes are, for the choice of paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Location {
    /// Main memory, wherever the kernel puts it.
    #[default]
    Anywhere,
    /// Main memory of one NUMA node.
    Cpu(u16),
    /// Memory of one accelerator.
    Device(u16),
}

/// Which pages back a memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// The system's ordinary ones, huge ones where it gives them by itself.
    #[default]
    Ordinary,
    /// Reserved huge ones where there are enough, else ordinary ones.
    Huge,
}

/// A mapped range of bytes.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    /// The file that another process can map; none for memory that only this process sees.
    file: Option<OwnedFd>,
    location: Location,
    huge: bool,
    /// Whether the mapping belongs to a lender, who unmaps it.
    lent: bool,
}

// SAFETY: `base` points to a mapping that this struct owns and unmaps only when dropped, or that its lender keeps
// until then. The mapping has no affinity to a thread.
unsafe impl Send for Memory {}
// SAFETY: shared use is by copies through raw pointers only. Ranges are handed from one user to the next by
// windows and batches, which order the accesses (locks and channels); a range written while it is read gives
// torn bytes, which the checksum of the block refuses, and never a Rust reference to changing memory.
unsafe impl Sync for Memory {}

impl Memory {
    /// Private memory of this process, zeroed.
    ///
    /// # Errors
    /// When the system has none left, or `bytes` is 0.
    pub fn private(bytes: usize, location: Location) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self::of(anonymous(bytes)?, bytes, None, location, false)))
    }

    /// Memory that other processes can map through [`Memory::file`], zeroed. Its size is sealed: a peer
    /// cannot cut it short under us.
    ///
    /// # Errors
    /// When the system has none left, or `bytes` is 0.
    pub fn shared(bytes: usize, pages: Pages, location: Location) -> io::Result<Arc<Self>> {
        if pages == Pages::Huge
            && let Ok(memory) = Self::memfd(bytes, MemfdFlags::HUGETLB, location)
        {
            return Ok(memory);
        }
        Self::memfd(bytes, MemfdFlags::empty(), location)
    }

    /// Memory that this program has from elsewhere, another language's allocator say. Only this process sees it,
    /// and it is not unmapped here.
    ///
    /// # Errors
    /// When there is none: an address or a length of 0, or an end beyond the last address.
    ///
    /// # Safety
    /// All of it must stay mapped, to be read and written, until the last reference is dropped, or until every window
    /// on it has been revoked, every batch that names it has ended and no method of the caller's uses it: nothing else
    /// touches a memory. Rust must hold no reference into it while a transport may touch it.
    pub unsafe fn lent(address: u64, bytes: usize, location: Location) -> io::Result<Arc<Self>> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "lent memory has an address and a length");
        let start = usize::try_from(address).map_err(|_| wrong())?;
        let inside = start.checked_add(bytes).is_some_and(|end| isize::try_from(end).is_ok());
        let base = NonNull::new(std::ptr::with_exposed_provenance_mut(start)).filter(|_| inside && bytes > 0);
        let base = base.ok_or_else(wrong)?;
        Ok(Arc::new(Self { base, bytes, file: None, location, huge: false, lent: true }))
    }

    fn memfd(bytes: usize, extra: MemfdFlags, location: Location) -> io::Result<Arc<Self>> {
        if cfg!(miri) {
            return Self::private(bytes, location);
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra;
        let file = rustix::fs::memfd_create("baton-segment", flags)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Self::map(file, bytes, location, !extra.is_empty())
    }

    /// Maps the memory of another process of this host, whose `file` has come over a local socket.
    ///
    /// # Errors
    /// When the file is not sealed at `bytes` or more, so that its owner could cut it short under us.
    pub fn foreign(file: OwnedFd, bytes: usize, location: Location) -> io::Result<Arc<Self>> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let held = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        if !seals.contains(SealFlags::SHRINK) || held < bytes as u64 {
            return Err(io::Error::other("the peer's segment is not sealed at the size that it told"));
        }
        // The mapping outlives the file descriptor. A node may map a thousand memories of each peer, so the file is
        // closed.
        let mut memory = Self::map(file, bytes, location, false)?;
        if let Some(only) = Arc::get_mut(&mut memory) {
            only.file = None;
        }
        Ok(memory)
    }

    fn map(file: OwnedFd, bytes: usize, location: Location, huge: bool) -> io::Result<Arc<Self>> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses; the file cannot shrink below
        // `bytes` (sealed), so no access inside the range faults.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }?;
        Ok(Arc::new(Self::of(base, bytes, Some(file), location, huge)))
    }

    fn of(base: *mut c_void, bytes: usize, file: Option<OwnedFd>, location: Location, huge: bool) -> Self {
        // SAFETY: the range is ours and mapped. Advice that the kernel does not take changes nothing.
        #[cfg(not(miri))]
        let _ = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
        Self { base, bytes, file, location, huge, lent: false }
    }

    /// Where it is in this process, as a number.
    pub fn start(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where they are.
    pub fn location(&self) -> Location {
        self.location
    }

    /// Whether reserved huge pages back it.
    pub fn huge(&self) -> bool {
        self.huge
    }

    /// The file to pass to another process of this host.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Whether `bytes` from `at` on are inside.
    pub fn holds(&self, at: u64, bytes: u64) -> bool {
        at.checked_add(bytes).is_some_and(|end| end <= self.bytes as u64)
    }

    /// The address of byte `at`, for system calls and devices.
    ///
    /// # Panics
    /// When `bytes` from `at` on are not inside: callers have checked with [`Memory::holds`].
    pub(crate) fn address(&self, at: u64, bytes: u64) -> *mut u8 {
        assert!(self.holds(at, bytes), "{bytes} bytes at {at} of a memory of {}", self.bytes);
        // SAFETY: `at` is inside the mapping, or one past its end when `bytes` is 0.
        unsafe { self.base.as_ptr().add(usize::try_from(at).expect("checked against a usize")) }
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// When they do not fit at `at`.
    pub fn write(&self, at: u64, from: &[u8]) {
        let to = self.address(at, from.len() as u64);
        // SAFETY: `to` has room for them (checked) and `from` is a reference of Rust's, so not of this
        // memory, into which there are none.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    /// Copies bytes out.
    ///
    /// # Panics
    /// When there are not so many at `at`.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        let from = self.address(at, into.len() as u64);
        // SAFETY: as in `write`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies `bytes` from one memory to another (or the same).
    ///
    /// # Panics
    /// When either range is not inside.
    pub fn copy(from: &Self, from_at: u64, to: &Self, to_at: u64, bytes: u64) {
        let (source, target) = (from.address(from_at, bytes), to.address(to_at, bytes));
        // SAFETY: both ranges are inside their mappings (checked); they may overlap, which `copy` allows.
        unsafe { std::ptr::copy(source, target, usize::try_from(bytes).expect("checked against a usize")) }
    }

    /// [`crate::checksum`] of a range.
    ///
    /// # Panics
    /// When it is not inside.
    pub fn checksum(&self, at: u64, bytes: u64) -> u64 {
        let from = self.address(at, bytes);
        let bytes = usize::try_from(bytes).expect("checked against a usize");
        // SAFETY: inside the mapping (checked). The caller owns the range for the time of the call, as a batch or a
        // permit does, so nothing of this process writes to it meanwhile. Another process or a device may, where it
        // breaks the protocol: by the letter that is a data race. Its effect is bounded: the bytes go into a sum and
        // nowhere else, no length, address or branch depends on them, and a sum over torn bytes is refused.
        crate::checksum(unsafe { std::slice::from_raw_parts(from, bytes) })
    }

    /// Adds a range to a checksum, as [`Memory::checksum`] reads it.
    ///
    /// # Panics
    /// When it is not inside.
    pub fn add_to(&self, sum: &mut Checksum, at: u64, bytes: u64) {
        let from = self.address(at, bytes);
        let bytes = usize::try_from(bytes).expect("checked against a usize");
        // SAFETY: as in `checksum`.
        sum.add(unsafe { std::slice::from_raw_parts(from, bytes) });
    }
}

/// A memory that this program works in, beside the transports: references to ranges of it.
#[derive(Debug)]
pub struct OwnedMemory(Arc<Memory>);

impl OwnedMemory {
    /// The one view of a memory through which this program reads and writes it by reference.
    ///
    /// # Safety
    /// The caller keeps ranges apart. While a reference is held, nothing writes to its range. While a mutable one is
    /// held, neither a transport nor another thread reads its range. A transport that still reads a range for an
    /// abandoned batch breaks this by the letter. As with [`Memory::checksum`], its bytes decide nothing.
    pub unsafe fn new(memory: Arc<Memory>) -> Self {
        Self(memory)
    }

    /// How many bytes there are.
    pub fn size(&self) -> usize {
        self.0.bytes
    }

    /// A range.
    ///
    /// # Panics
    /// When it is not inside.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        let from = self.0.address(range.start as u64, range.len() as u64);
        // SAFETY: inside the mapping (checked), which lives as long as `self`; nothing writes to it, as the caller of
        // `new` has promised.
        unsafe { std::slice::from_raw_parts(from, range.len()) }
    }

    /// A range, to be written.
    ///
    /// # Panics
    /// When it is not inside.
    pub fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let from = self.0.address(range.start as u64, range.len() as u64);
        // SAFETY: as in `bytes`; `self` is borrowed alone, and nothing else touches the range, as promised.
        unsafe { std::slice::from_raw_parts_mut(from, range.len()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.lent {
            return;
        }
        // SAFETY: the mapping is ours, and no reference to this struct is left. The call fails only for a range that
        // is not a mapping.
        #[cfg(not(miri))]
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        // SAFETY: it came from `anonymous`, for as many bytes, and no reference to this struct is left.
        #[cfg(miri)]
        unsafe {
            std::alloc::dealloc(self.base.as_ptr(), under_miri(self.bytes).expect("checked when made"));
        }
    }
}

/// Fresh memory of zeroes at an address that the kernel chooses.
#[cfg(not(miri))]
fn anonymous(bytes: usize) -> io::Result<*mut c_void> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh anonymous mapping touches no other memory.
    Ok(unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }?)
}

/// Under Miri, which has no such system calls, from the allocator.
#[cfg(miri)]
fn anonymous(bytes: usize) -> io::Result<*mut c_void> {
    // SAFETY: the layout is of more than zero bytes.
    Ok(unsafe { std::alloc::alloc_zeroed(under_miri(bytes)?) }.cast())
}

#[cfg(miri)]
fn under_miri(bytes: usize) -> io::Result<std::alloc::Layout> {
    if bytes == 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    std::alloc::Layout::from_size_align(bytes, 4096).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_as_they_went_in() {
        for memory in [
            Memory::private(10_000, Location::Anywhere).unwrap(),
            Memory::shared(10_000, Pages::Huge, Location::Cpu(0)).unwrap(),
        ] {
            let sent: Vec<u8> = (0..=255).collect();
            memory.write(9_744, &sent);
            let mut got = vec![0; 256];
            memory.read(9_744, &mut got);
            assert_eq!(got, sent);
            assert_eq!(memory.checksum(9_744, 256), crate::checksum(&sent));
            Memory::copy(&memory, 9_744, &memory, 9_700, 256);
            memory.read(9_700, &mut got);
            assert_eq!(got, sent, "ranges may overlap");
            assert!(!memory.holds(9_745, 256) && !memory.holds(u64::MAX, 2));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such files")]
    fn another_mapping_of_the_file_is_the_same_memory() {
        let ours = Memory::shared(8_192, Pages::Ordinary, Location::Anywhere).unwrap();
        let file = ours.file().unwrap().try_clone_to_owned().unwrap();
        let theirs = Memory::foreign(file, 8_192, Location::Anywhere).unwrap();
        theirs.write(100, b"handed over");
        let mut got = [0; 11];
        ours.read(100, &mut got);
        assert_eq!(&got, b"handed over");
    }

    #[test]
    fn an_owner_sees_what_transports_wrote_and_they_what_it_wrote() {
        let memory = Memory::private(10_000, Location::Anywhere).unwrap();
        // SAFETY: one thread, and no reference is held while the memory is copied from or to.
        let mut owned = unsafe { OwnedMemory::new(memory.clone()) };
        assert_eq!(owned.size(), 10_000);
        owned.bytes_mut(9_996..10_000).copy_from_slice(b"here");
        let mut got = [0; 4];
        memory.read(9_996, &mut got);
        assert_eq!(&got, b"here");
        memory.write(0, b"there");
        assert_eq!(owned.bytes(0..5), b"there");
    }

    #[test]
    #[should_panic(expected = "bytes at 9999")]
    fn an_owner_sees_nothing_outside() {
        let memory = Memory::private(10_000, Location::Anywhere).unwrap();
        // SAFETY: nothing else uses it.
        let owned = unsafe { OwnedMemory::new(memory) };
        owned.bytes(9_999..10_001);
    }

    #[test]
    fn lent_memory_is_used_in_place_and_left_alone() {
        let mut owned = vec![1_u8; 8_192];
        let address = owned.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the vector outlives it and is not touched meanwhile.
        let lent = unsafe { Memory::lent(address, owned.len(), Location::Anywhere) }.unwrap();
        assert_eq!((lent.start(), lent.bytes()), (address, 8_192));
        assert!(lent.file().is_none());
        lent.write(8_000, b"here");
        drop(lent);
        assert_eq!(&owned[7_999..8_005], b"\x01here\x01");
        for (address, bytes) in [(0, 1), (address, 0), (u64::MAX, 2)] {
            // SAFETY: refused, so nothing is touched.
            assert!(unsafe { Memory::lent(address, bytes, Location::Anywhere) }.is_err());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such files")]
    fn a_file_that_its_owner_can_cut_short_is_refused() {
        let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 4_096).unwrap();
        assert!(Memory::foreign(open, 4_096, Location::Anywhere).is_err());
        let sealed = Memory::shared(4_096, Pages::Ordinary, Location::Anywhere).unwrap();
        let file = sealed.file().unwrap().try_clone_to_owned().unwrap();
        assert!(Memory::foreign(file, 8_192, Location::Anywhere).is_err());
    }

    #[test]
    #[should_panic(expected = "bytes at 4000")]
    fn outside_is_a_bug_of_the_caller() {
        Memory::private(4_096, Location::Anywhere).unwrap().write(4_000, &[0; 200]);
    }
}
