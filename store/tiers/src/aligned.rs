//! Memory that a disk can be written from and read into without a copy by the kernel.

use std::ops::{Deref, DerefMut};

/// Alignment of everything in the file, and of the memory for it.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Bytes that start at a page boundary. Their place in memory never changes.
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    /// Not a `Box`: its memory may be the kernel's for a while, and a `Vec` claims less.
    bytes: Vec<u8>,
    from: usize,
    len: usize,
}

impl AlignedBuffer {
    /// `len` zero bytes.
    pub(crate) fn new(len: usize) -> Self {
        if len == 0 {
            return Self { bytes: Vec::new(), from: 0, len };
        }
        let bytes = vec![0; len + PAGE_BYTES - 1];
        let from = bytes.as_ptr().align_offset(PAGE_BYTES);
        assert!(from < PAGE_BYTES, "a byte pointer can be aligned");
        Self { bytes, from, len }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.from..self.from + self.len]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_starts_at_a_page_boundary() {
        for len in [0, 1, 100, 4096, 5000, 1 << 20] {
            let mut memory = AlignedBuffer::new(len);
            assert_eq!(memory.len(), len);
            assert!(len == 0 || (memory.as_ptr() as usize).is_multiple_of(PAGE_BYTES));
            memory.fill(7);
            let moved = memory;
            assert!(moved.iter().all(|&byte| byte == 7));
        }
    }
}
