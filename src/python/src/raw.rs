//! Memory of the engine, known by address: the one place where numbers become memory.
//!
//! Whoever registers a range promises that it stays mapped until it has been unregistered, as Mooncake's package
//! asks too. The range is looked up in the kernel's own list when it is registered, so that an address that was
//! never memory is refused and not touched.
#![allow(unsafe_code, reason = "turns registered addresses into memory; each block is argued")]

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ptr::with_exposed_provenance_mut;
use std::sync::{Arc, PoisonError, RwLock};

use baton_transports::mover::{Location, Memory};

use crate::maps;

/// Ranges that may be registered at once.
const RANGES_MAX: usize = 65_536;

/// Registered memory of the engine as the transfer engine holds it.
///
/// # Errors
/// When it is not memory of this process that can be read and written.
pub fn lend(address: u64, bytes: u64) -> Result<Arc<Memory>, String> {
    maps::check(address, bytes)?;
    let bytes = usize::try_from(bytes).map_err(|e| e.to_string())?;
    // SAFETY: it is mapped to be read and written (just looked up), and whoever registers promises that it stays
    // so until it is unregistered, which waits until nothing uses it. It is memory of another language's objects:
    // there is no Rust reference into it.
    unsafe { Memory::lent(address, bytes, Location::Anywhere) }.map_err(|e| e.to_string())
}

/// Ranges that values are taken from and put into.
#[derive(Debug, Default)]
pub struct Buffers {
    ranges: RwLock<BTreeMap<u64, u64>>,
}

/// A piece of a registered range, for the time of one call.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    address: u64,
    bytes: usize,
    /// The ranges cannot be dropped meanwhile.
    _of: std::marker::PhantomData<&'a Buffers>,
}

impl Buffers {
    /// Registers a range. The same one twice is once.
    ///
    /// # Errors
    /// When it is not memory of this process, overlaps another range, or there are too many.
    pub fn register(&self, address: u64, bytes: u64) -> Result<(), String> {
        maps::check(address, bytes)?;
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        if ranges.get(&address) == Some(&bytes) {
            return Ok(());
        }
        let before = ranges.range(..address + bytes).next_back();
        if let Some((start, length)) = before.filter(|(start, length)| *start + *length > address) {
            return Err(format!("{bytes} bytes at {address:#x} overlap the {length} at {start:#x}"));
        }
        if ranges.len() >= RANGES_MAX {
            return Err(format!("{RANGES_MAX} ranges are registered already"));
        }
        ranges.insert(address, bytes);
        Ok(())
    }

    /// Forgets the range that starts there; false where there is none. Nothing may be using it.
    pub fn unregister(&self, address: u64) -> bool {
        self.ranges.write().unwrap_or_else(PoisonError::into_inner).remove(&address).is_some()
    }

    /// A piece of what is registered.
    ///
    /// # Errors
    /// When it is not inside one range.
    pub fn span(&self, address: u64, bytes: u64) -> Result<Span<'_>, String> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let within = ranges.range(..=address).next_back().is_some_and(|(start, length)| {
            address.checked_add(bytes).is_some_and(|end| end <= *start + *length)
        });
        if !within {
            return Err(format!(
                "{bytes} bytes at {address:#x} are not registered; call register_buffer first"
            ));
        }
        let bytes = usize::try_from(bytes).map_err(|e| e.to_string())?;
        Ok(Span { address, bytes, _of: std::marker::PhantomData })
    }
}

impl Span<'_> {
    /// How many bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes, to be sent or summed. Not to be kept while something is received into them.
    #[must_use]
    pub fn held(&self) -> &[u8] {
        // SAFETY: inside a range that was mapped when it was registered and stays so until it is unregistered,
        // which the caller of the store does not do during a call. The engine does not write to blocks that it is
        // storing; if it did, the bytes would be torn and the checksum kept with the value would say so.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance_mut::<u8>(self.start()), self.bytes) }
    }

    /// Receives once, into the bytes from `at` on, and says how many came.
    ///
    /// # Errors
    /// As what is read from.
    pub fn fill(&self, at: usize, from: &mut impl Read) -> io::Result<usize> {
        let (start, bytes) = (self.start(), self.bytes);
        // SAFETY: as in `held`. The slice lives for this one read, and nothing here holds another into the same
        // memory meanwhile; the engine does not touch blocks that it has asked to be loaded until the call is over.
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
        assert!(buffers.span(address, 1).is_err());
        buffers.register(address, 10_000).unwrap();
        buffers.register(address, 10_000).unwrap();
        assert!(buffers.register(address + 5, 10).unwrap_err().contains("overlap"));
        assert!(buffers.register(8, 8).unwrap_err().contains("not mapped"));
        let span = buffers.span(address + 9_000, 1_000).unwrap();
        assert_eq!(span.held(), &[7; 1_000]);
        assert_eq!(span.fill(999, &mut [8_u8, 9].as_slice()).unwrap(), 1);
        assert!(buffers.span(address + 9_000, 1_001).is_err());
        assert!(buffers.span(address, u64::MAX).is_err());
        assert!(buffers.unregister(address) && !buffers.unregister(address));
        assert!(buffers.span(address, 1).is_err());
        assert_eq!(held[9_999], 8);
    }
}
