//! Which branches a run has taken, where the compiler was asked to count them (`make fuzz`).
#![expect(unsafe_code, reason = "the compiler hands its counters over as pointers")]

use std::sync::atomic::{AtomicUsize, Ordering};

static FIRST: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Called by every instrumented object file at the start of the process, with all counters of the program.
///
/// # Safety
/// Between the pointers are bytes that live as long as the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(first: *mut u8, end: *mut u8) {
    FIRST.store(first as usize, Ordering::Relaxed);
    END.store(end as usize, Ordering::Relaxed);
}

/// The branches taken so far: per counter a bit for each order of magnitude.
pub(crate) struct Coverage(Vec<u8>);

impl Coverage {
    /// Nothing was taken yet. Without instrumentation there are no counters, and nothing is ever new.
    pub(crate) fn new() -> Self {
        Self(vec![0; END.load(Ordering::Relaxed) - FIRST.load(Ordering::Relaxed)])
    }

    /// Whether there are any counters.
    pub(crate) fn counts(&self) -> bool {
        !self.0.is_empty()
    }

    /// How many counters have ever moved.
    pub(crate) fn taken(&self) -> usize {
        self.0.iter().filter(|bits| **bits > 0).count()
    }

    /// Sets all counters to nothing.
    pub(crate) fn clear(&self) {
        if self.counts() {
            let first = FIRST.load(Ordering::Relaxed) as *mut u8;
            // SAFETY: the bytes are the compiler's counters; a count that another thread loses is only a count.
            unsafe { first.write_bytes(0, self.0.len()) };
        }
    }

    /// Takes in what was counted since the last [`Coverage::clear`]; whether any of it is new.
    pub(crate) fn take_in(&mut self) -> bool {
        if !self.counts() {
            return false;
        }
        let first = FIRST.load(Ordering::Relaxed) as *const u8;
        let mut new = false;
        for (at, known) in self.0.iter_mut().enumerate() {
            // SAFETY: `at` is within the counters.
            let count = unsafe { first.add(at).read_volatile() };
            if count > 0 {
                let bit = magnitude(count);
                new |= *known & bit == 0;
                *known |= bit;
            }
        }
        new
    }
}

/// Eight classes of counts, as American Fuzzy Lop has them: more often is news, once more of many is none.
const fn magnitude(count: u8) -> u8 {
    match count {
        0 => 0,
        1 => 1,
        2 => 2,
        3 => 4,
        4..=7 => 8,
        8..=15 => 16,
        16..=31 => 32,
        32..=127 => 64,
        128..=255 => 128,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_branches_are_news_once() {
        let counters = Box::leak(Box::new([0_u8; 4]));
        let first = counters.as_mut_ptr();
        // SAFETY: leaked, so they live as long as the process.
        unsafe { __sanitizer_cov_8bit_counters_init(first, first.add(4)) };
        let mut coverage = Coverage::new();
        let mut count = |at: usize, times: u8| {
            coverage.clear();
            // SAFETY: `at` is one of the four.
            unsafe { first.add(at).write_volatile(times) };
            (coverage.take_in(), coverage.taken())
        };
        assert_eq!(count(1, 1), (true, 1));
        assert_eq!(count(1, 1), (false, 1));
        assert_eq!(count(1, 5), (true, 1));
        assert_eq!(count(1, 7), (false, 1));
        assert_eq!(count(2, 200), (true, 2));
        assert_eq!(count(2, 0), (false, 2));
    }
}
