//! A path: what is on its way over it, how fast it is, and how far it is to be trusted.

use alloc::vec::Vec;

use super::rail::Rail;
use super::{PathNumber, RailNumber, RailSpec};

/// A sample of speed is taken over at least so many bytes.
const SAMPLE_BYTES: u64 = 256 << 10;
/// A new sample counts for one part in so many.
const EWMA_PARTS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathState {
    Opening,
    /// Open after a failure: must answer a probe before it is given slices.
    Trial,
    Open,
    /// Told to close, or broken. What was on its way may still land until it has closed.
    Closing,
}

#[derive(Clone, Debug)]
pub(crate) struct Path {
    pub(crate) number: PathNumber,
    pub(crate) peer: u32,
    pub(crate) rail: RailNumber,
    pub(crate) tier: u8,
    pub(crate) state: PathState,
    /// Takes no more slices, and closes when it is empty: another peer waits for its place.
    pub(crate) draining: bool,
    /// Refused a slice, and has not said that it takes some again.
    pub(crate) full: bool,
    /// Used since the hand of the pool passed.
    pub(crate) visited: bool,
    pub(crate) opened_us: u64,
    /// The last sign of life, or when slices were posted on it while it was empty.
    pub(crate) alive_us: u64,
    /// The last end of a slice, or the same.
    pub(crate) moved_us: u64,
    /// The slot of the probe on its way, and when it must be answered.
    pub(crate) probe: Option<(u32, u64)>,
    /// Slots of the slices and notices on their way.
    pub(crate) outstanding: Vec<u32>,
    pub(crate) bytes: u64,
    /// Bytes that may be outstanding.
    credit_bytes: u64,
    pub(crate) ns_per_mib: u64,
    pub(crate) latency_us: u64,
    sample: (u64, u64),
    /// Whether a slice has ended well on it.
    pub(crate) proved: bool,
    /// Slots of the batches that had slices on it when it broke; some twice never.
    pub(crate) doubtful: Vec<u32>,
    pub(crate) timer_us: Option<u64>,
}

impl Path {
    pub(crate) fn new(number: PathNumber, peer: u32, route: super::Route, rail: &Rail, now_us: u64) -> Self {
        Self {
            number,
            peer,
            rail: route.rail,
            tier: route.tier,
            state: PathState::Opening,
            draining: false,
            full: false,
            visited: false,
            opened_us: now_us,
            alive_us: now_us,
            moved_us: now_us,
            probe: None,
            outstanding: Vec::new(),
            bytes: 0,
            credit_bytes: credit_bytes(&rail.spec, rail.ns_per_mib, rail.latency_us),
            ns_per_mib: rail.ns_per_mib,
            latency_us: rail.latency_us,
            sample: (0, 0),
            proved: false,
            doubtful: Vec::new(),
            timer_us: None,
        }
    }

    /// Whether it is given slices at all.
    pub(crate) fn serves(&self) -> bool {
        self.state == PathState::Open && !self.draining
    }

    /// Whether it takes one more slice now.
    pub(crate) fn has_room(&self, rail: &Rail) -> bool {
        !self.full
            && self.outstanding.len() < rail.spec.path_slices as usize
            && (self.bytes < self.credit_bytes || self.outstanding.is_empty())
    }

    /// Nanoseconds until `bytes` more would be there: what is ahead of them, themselves, the latency, and
    /// how late the path is with what it has.
    pub(crate) fn predicted_ns(&self, bytes: u64, now_us: u64) -> u64 {
        let ahead_ns = wire_ns(self.bytes, self.ns_per_mib);
        let mut late_ns = 0;
        if !self.outstanding.is_empty() {
            let waited_ns = (now_us - self.moved_us).saturating_mul(1_000);
            late_ns =
                waited_ns.saturating_sub(ahead_ns).saturating_sub(self.latency_us.saturating_mul(1_000));
        }
        wire_ns(self.bytes.saturating_add(bytes), self.ns_per_mib)
            .saturating_add(self.latency_us.saturating_mul(1_000))
            .saturating_add(late_ns)
    }

    /// Learns from a slice that ended well. Time counts from the end of the slice before, for a path with
    /// more than one on it is never idle between them; a slice that was alone tells the latency instead.
    pub(crate) fn measure(&mut self, bytes: u64, posted_us: u64, now_us: u64, spec: &RailSpec) {
        let since_us = posted_us.max(self.moved_us);
        if self.outstanding.is_empty() && self.sample == (0, 0) && posted_us >= self.moved_us {
            let wire_us = wire_ns(bytes, self.ns_per_mib) / 1_000;
            let seen_us = (now_us - posted_us).saturating_sub(wire_us);
            self.latency_us = blend(self.latency_us, seen_us);
            self.credit_bytes = credit_bytes(spec, self.ns_per_mib, self.latency_us);
        } else {
            self.sample.0 += bytes;
            self.sample.1 += now_us - since_us;
        }
        if self.sample.0 >= SAMPLE_BYTES {
            let (bytes, us) = core::mem::take(&mut self.sample);
            let seen = (us.max(1).saturating_mul(1_000 << 10) / (bytes >> 10).max(1)).max(1);
            self.ns_per_mib = blend(self.ns_per_mib, seen).max(1);
            self.credit_bytes = credit_bytes(spec, self.ns_per_mib, self.latency_us);
        }
    }
}

/// What a path carries in the time that the rail's settings allow it to hold up others.
fn credit_bytes(spec: &RailSpec, ns_per_mib: u64, latency_us: u64) -> u64 {
    let ns = spec.queue_us.saturating_add(latency_us.saturating_mul(2)).saturating_mul(1_000);
    let bytes = (u128::from(ns) << 20) / u128::from(ns_per_mib.max(1));
    u64::try_from(bytes).unwrap_or(u64::MAX).clamp(spec.path_bytes_min, spec.path_bytes)
}

/// Nanoseconds that bytes need at a speed.
pub(crate) fn wire_ns(bytes: u64, ns_per_mib: u64) -> u64 {
    bytes.saturating_mul(ns_per_mib) >> 20
}

/// A moving average.
pub(crate) fn blend(old: u64, new: u64) -> u64 {
    (old.saturating_mul(EWMA_PARTS - 1).saturating_add(new)) / EWMA_PARTS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::Route;

    fn path() -> Path {
        let rail = Rail::new(RailSpec { bytes_per_s: 1 << 30, latency_us: 10, ..RailSpec::default() });
        Path::new(PathNumber(0), 0, Route { rail: RailNumber(0), tier: 0 }, &rail, 0)
    }

    #[test]
    fn a_busy_path_learns_its_speed() {
        let mut path = path();
        path.outstanding = alloc::vec![0, 1];
        // 1 MiB each 10 ms: a tenth of what was believed.
        for turn in 1..60u64 {
            path.measure(1 << 20, 0, turn * 10_000, &RailSpec::default());
            path.moved_us = turn * 10_000;
        }
        assert!((9_900_000..10_100_000).contains(&path.ns_per_mib), "{}", path.ns_per_mib);
        assert_eq!(path.credit_bytes, RailSpec::default().path_bytes_min, "a slow path holds up little");
    }

    #[test]
    fn a_late_path_is_predicted_later() {
        let mut path = path();
        let before = path.predicted_ns(65_536, 0);
        path.outstanding = alloc::vec![0];
        path.bytes = 65_536;
        assert!(path.predicted_ns(65_536, 0) > before);
        assert!(path.predicted_ns(65_536, 100_000) > 90_000_000);
    }
}
