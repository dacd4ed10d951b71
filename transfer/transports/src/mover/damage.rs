//! A fault to inject: bytes that change between their arrival and their verification.

use std::sync::atomic::{AtomicU32, Ordering};

use super::memory::Memory;

/// Damages what lands, to show that verification finds it. Harmless until armed.
#[derive(Debug, Default)]
pub struct Damage {
    left: AtomicU32,
}

impl Damage {
    /// Flips one bit in each of the next `chunks` that land.
    pub fn arm(&self, chunks: u32) {
        self.left.store(chunks, Ordering::Relaxed);
    }

    /// A chunk has landed at `at`.
    pub(super) fn strike(&self, memory: &Memory, at: u64) {
        if self.left.load(Ordering::Relaxed) == 0 {
            return;
        }
        let less = |left: u32| left.checked_sub(1);
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            let mut byte = [0];
            memory.read(at, &mut byte);
            memory.write(at, &[byte[0] ^ 0x10]);
        }
    }
}
