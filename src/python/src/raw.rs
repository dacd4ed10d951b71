//! Memory of the engine, known by address: the one place where numbers become memory.
//!
//! The caller that registers a range promises that it stays mapped until it has been unregistered, as Mooncake's
//! package asks too: the contract of [`lend`] and [`Buffers::register`]. The range is looked up in the kernel's own
//! list when it is registered, so that an address that was never memory is refused and not touched. Unregistering
//! waits for every call that uses the range, so that a caller that keeps the promise can free the memory then.
#![allow(unsafe_code, reason = "turns registered addresses into memory; each block is argued")]

use std::io::{self, Read};
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;
use std::time::Duration;

use baton_transports::mover::{Location, Memory};

use crate::ranges::{Ranges, Use};
use crate::{Failure, maps};

/// Ranges that may be registered at once.
const RANGES_MAX: usize = 65_536;

/// Registered memory of the engine as the transfer engine holds it.
///
/// # Errors
/// When it is not memory of this process that can be read and written.
///
/// # Safety
/// It stays mapped until its windows are revoked and the batches that use it have ended, and Rust holds no reference
/// into it until then.
pub unsafe fn lend(address: u64, bytes: u64) -> Result<Arc<Memory>, String> {
    maps::check(address, bytes)?;
    let bytes = usize::try_from(bytes).map_err(|e| e.to_string())?;
    // SAFETY: it is mapped to be read and written (just looked up); that it stays so is the caller's promise.
    unsafe { Memory::lent(address, bytes, Location::Anywhere) }.map_err(|e| e.to_string())
}

/// Ranges that values are taken from and put into.
#[derive(Default)]
pub struct Buffers {
    ranges: Ranges<()>,
}

/// A piece of a registered range. The range is not unregistered while there is one.
#[derive(Debug)]
pub struct Span {
    address: u64,
    bytes: usize,
    /// [`Buffers::unregister`] waits for it.
    _use: Use<()>,
}

impl Buffers {
    /// Registers a range. Registering the same range twice counts once.
    ///
    /// # Errors
    /// When it is not memory of this process, overlaps another range, or there are too many.
    ///
    /// # Safety
    /// It stays mapped, to be read and written, until [`Buffers::unregister`] has returned `Ok` for it or all spans
    /// and `self` are dropped. While a call puts a piece of it nothing writes there, and while a call gets into a
    /// piece nothing else reads or writes there.
    pub unsafe fn register(&self, address: u64, bytes: u64) -> Result<(), String> {
        maps::check(address, bytes)?;
        if self.ranges.bytes_at(address) == Some(bytes) {
            return Ok(());
        }
        if self.ranges.count() >= RANGES_MAX {
            return Err(format!("{RANGES_MAX} ranges are registered already"));
        }
        self.ranges.claim(address, bytes)?;
        self.ranges.fill(address, ());
        Ok(())
    }

    /// Unregisters the range that starts there. When it returns `Ok`, no call uses the range.
    ///
    /// # Errors
    /// When nothing is registered there, or a call still uses it after `limit`: no new call finds it then, but its
    /// memory is not free, and it has to be unregistered again.
    pub fn unregister(&self, address: u64, limit: Duration) -> Result<(), Failure> {
        let none = || format!("unregister_buffer: nothing is registered at {address:#x}");
        let range = self.ranges.retire(address).ok_or_else(|| Failure::new(Failure::ARGUMENT, none()))?;
        if !range.wait_unused(limit) {
            let text = format!(
                "unregister_buffer: a put or get still uses {address:#x} after {} s; keep the memory and \
                 unregister it again",
                limit.as_secs()
            );
            return Err(Failure::new(Failure::IN_USE, text));
        }
        self.ranges.forget(address, &range);
        Ok(())
    }

    /// A piece of what is registered.
    ///
    /// # Errors
    /// When it is not inside one range.
    pub fn span(&self, address: u64, bytes: u64) -> Result<Span, String> {
        let found = self.ranges.find(address).filter(|(_, _, held)| bytes <= *held);
        let Some((used, _, _)) = found else {
            return Err(format!(
                "{bytes} bytes at {address:#x} are not registered; call register_buffer first"
            ));
        };
        let bytes = usize::try_from(bytes).map_err(|e| e.to_string())?;
        Ok(Span { address, bytes, _use: used })
    }
}

impl Span {
    /// Number of bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes, to be sent or summed. Not to be kept while something is received into them.
    #[must_use]
    pub fn held(&self) -> &[u8] {
        // SAFETY: inside a range that is mapped until it is unregistered, which waits for this span: the caller of
        // `register` promises it. It promises too that nothing writes to what a call puts. An engine that breaks
        // that makes this a data race; the checksum, taken before the bytes are sent, refuses a torn value.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance_mut::<u8>(self.start()), self.bytes) }
    }

    /// Receives once, into the bytes from `at` on, and says how many came.
    ///
    /// # Errors
    /// As what is read from.
    pub fn fill(&self, at: usize, from: &mut impl Read) -> io::Result<usize> {
        let (start, bytes) = (self.start(), self.bytes);
        // SAFETY: mapped, as in `held`. The slice lives for this one read; the caller of `register` promises that
        // nothing else touches what a call gets into, other calls included.
        let room = unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut::<u8>(start), bytes) };
        from.read(&mut room[at..])
    }

    fn start(&self) -> usize {
        usize::try_from(self.address).expect("it was mapped, so it is an address")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pieces_of_what_is_registered_are_memory() {
        let mut held = vec![7_u8; 10_000];
        let address = held.as_mut_ptr().expose_provenance() as u64;
        let buffers = Buffers::default();
        // SAFETY: the vector outlives the buffers and is not touched while a span is used.
        let register = |address, bytes| unsafe { buffers.register(address, bytes) };
        assert!(buffers.span(address, 1).is_err());
        register(address, 10_000).unwrap();
        register(address, 10_000).unwrap();
        assert!(register(address + 5, 10).unwrap_err().contains("overlap"));
        assert!(register(8, 8).unwrap_err().contains("not mapped"));
        let span = buffers.span(address + 9_000, 1_000).unwrap();
        assert_eq!(span.held(), &[7; 1_000]);
        assert_eq!(span.fill(999, &mut [8_u8, 9].as_slice()).unwrap(), 1);
        assert!(buffers.span(address + 9_000, 1_001).is_err());
        assert!(buffers.span(address, u64::MAX).is_err());
        let unregister = || buffers.unregister(address, Duration::ZERO).map_err(|failure| failure.code);
        assert_eq!(unregister(), Err(Failure::IN_USE), "a span is out");
        assert!(buffers.span(address, 1).is_err(), "none is given any more");
        assert!(register(address, 10_000).unwrap_err().contains("not unregistered yet"));
        drop(span);
        assert_eq!((unregister(), unregister()), (Ok(()), Err(Failure::ARGUMENT)));
        assert_eq!(held[9_999], 8);
    }
}
