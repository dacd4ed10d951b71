//! How long to wait before the next try: longer each time, up to a bound, and never in step with others.

use std::time::Duration;

use baton_types::Rng;

const FIRST: Duration = Duration::from_millis(50);
const MOST: Duration = Duration::from_secs(3);

/// The pauses between tries of one thing.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    rng: Rng,
}

impl Backoff {
    /// Pauses that differ from those of another `name` and of another start.
    pub(crate) fn new(name: &str) -> Self {
        let seed = name.bytes().fold(crate::clock::now_us(), |seed, byte| {
            seed.wrapping_mul(0x0100_0000_01b3).wrapping_add(u64::from(byte))
        });
        Self { next: FIRST, rng: Rng::new(seed) }
    }

    /// The pause before the next try: between half and all of a step that doubles.
    pub(crate) fn pause(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(MOST);
        step / 2 + step.mul_f64(self.rng.unit() / 2.0)
    }

    /// It worked: the next failure starts from the shortest pause.
    pub(crate) fn worked(&mut self) {
        self.next = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_start_over_after_success() {
        let mut backoff = Backoff::new("a");
        let mut pauses: Vec<Duration> = (0..12).map(|_| backoff.pause()).collect();
        assert!(pauses[0] >= FIRST / 2 && pauses[0] <= FIRST);
        assert!(pauses[3] >= FIRST * 4 && pauses[11] >= MOST / 2, "{pauses:?}");
        pauses.sort();
        assert!(pauses.iter().all(|pause| *pause <= MOST));
        backoff.worked();
        assert!(backoff.pause() <= FIRST);
    }
}
