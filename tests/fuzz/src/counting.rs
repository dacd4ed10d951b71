//! An allocator that counts, thread by thread, what is allocated.
#![expect(unsafe_code, reason = "an allocator is made of unsafe functions")]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;

thread_local! {
    /// Bytes allocated less bytes freed on this thread since the measure began.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The most that `LIVE` has been.
    static PEAK: Cell<isize> = const { Cell::new(0) };
    /// The maximum of `LIVE`; beyond it the process ends. 0 while nothing is measured.
    static LIMIT: Cell<isize> = const { Cell::new(0) };
}

/// Hands everything on to `A`, and counts it. A test binary makes it its global allocator.
pub struct AllocationCounter<A>(pub A);

fn add(bytes: isize) {
    // A thread that is ending has lost its counters.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        PEAK.with(|peak| peak.set(peak.get().max(live.get())));
        let limit = LIMIT.get();
        if limit > 0 && live.get() > limit {
            LIMIT.set(0);
            eprintln!("fuzz: {} bytes are allocated at once; the input is in target/fuzz", live.get());
            std::process::abort();
        }
    });
}

// SAFETY: every call is handed on unchanged to an allocator that keeps the contract.
unsafe impl<A: GlobalAlloc> GlobalAlloc for AllocationCounter<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.0.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as isize - layout.size() as isize);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.0.realloc(at, layout, size) }
    }
}

/// Runs `work`, and returns its result and the most bytes that it had allocated at once on this thread. Where that
/// would exceed `limit`, the process ends before the allocation.
pub(crate) fn measured<T>(limit: usize, work: impl FnOnce() -> T) -> (T, usize) {
    LIVE.set(0);
    PEAK.set(0);
    LIMIT.set(isize::try_from(limit).unwrap_or(isize::MAX));
    let made = work();
    LIMIT.set(0);
    (made, usize::try_from(PEAK.get()).unwrap_or(0))
}

/// Whether this process counts what it allocates.
pub(crate) fn counts() -> bool {
    measured(1 << 30, || std::hint::black_box(vec![1_u8; 1_000])).1 >= 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static COUNTING: AllocationCounter<std::alloc::System> = AllocationCounter(std::alloc::System);

    #[test]
    fn the_most_at_once_is_counted() {
        let (_, peak) = measured(1 << 30, || {
            drop(vec![1_u8; 50_000]);
            let mut grows = vec![1_u8; 10_000];
            grows.reserve_exact(60_000);
            drop(vec![0_u8; 20_000]);
        });
        assert!((90_000..100_000).contains(&peak), "{peak}");
        assert!(counts());
    }

    #[test]
    fn another_thread_does_not_count() {
        let (_, peak) = measured(1 << 30, || {
            std::thread::spawn(|| drop(std::hint::black_box(vec![1_u8; 500_000]))).join().expect("it ends");
        });
        assert!(peak < 400_000, "{peak}");
    }
}
