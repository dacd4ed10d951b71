//! Clock of the store: microseconds since its creation, from the machine or from a test.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A clock that never goes back.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's monotonic clock, from this moment on.
    Machine(Instant),
    /// A clock that stands until it is moved; for tests.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's clock, from now on.
    #[must_use]
    pub fn machine() -> Self {
        Self::Machine(Instant::now())
    }

    /// A clock at zero and what moves it, in microseconds.
    #[must_use]
    pub fn manual() -> (Self, Arc<AtomicU64>) {
        let hand = Arc::new(AtomicU64::new(0));
        (Self::Manual(Arc::clone(&hand)), hand)
    }

    /// Microseconds since the start.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        match self {
            Self::Machine(start) => u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX),
            Self::Manual(hand) => hand.load(Ordering::SeqCst),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_stands_until_moved_and_the_machine_s_goes_on() {
        let (clock, hand) = Clock::manual();
        assert_eq!((clock.now_us(), clock.clone().now_us()), (0, 0));
        hand.store(7, Ordering::SeqCst);
        assert_eq!(clock.now_us(), 7);
        let machine = Clock::machine();
        let first = machine.now_us();
        while machine.now_us() == first {
            std::thread::yield_now();
        }
        assert!(machine.now_us() > first);
    }
}
