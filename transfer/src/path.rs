//! A path: what is on its way over it, how fast it is, and how far it is to be trusted.

use alloc::vec::Vec;

use crate::rail::Rail;
use crate::{PathNumber, RailNumber, RailSpec};

/// Least bytes in a speed sample; smaller slices are summed up first.
const SAMPLE_BYTES: u64 = 256 << 10;
/// A new sample has a weight of 1 / `EWMA_PARTS` in the average.
const EWMA_PARTS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathState {
    Opening,
    /// Open after a failure: must answer a probe before it is given slices.
    Trial,
    Open,
    /// Closing on request, or broken. Bytes in flight may still land until the transport has closed the path.
    Closing,
}

#[derive(Clone, Debug)]
pub(crate) struct Path {
    pub(crate) number: PathNumber,
    pub(crate) peer: u32,
    pub(crate) rail: RailNumber,
    pub(crate) tier: u8,
    pub(crate) state: PathState,
    /// The path takes no new slices and closes when it is empty, because another peer waits for its slot.
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
    /// Slots of the batches that had slices on it when it broke, each once.
    pub(crate) doubtful: Vec<u32>,
    pub(crate) timer_us: Option<u64>,
}

impl Path {
    pub(crate) fn new(number: PathNumber, peer: u32, route: crate::Route, rail: &Rail, now_us: u64) -> Self {
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

    /// Updates the estimates from a slice that ended well. For speed, time counts from the end of the previous slice,
    /// because a path with several slices on it is never idle between them. A slice that was alone on the path gives
    /// the latency instead.
    pub(crate) fn measure(&mut self, bytes: u64, posted_us: u64, now_us: u64, spec: &RailSpec) {
        let since_us = posted_us.max(self.moved_us);
        assert!(since_us <= now_us, "I11: a slice ends after it was posted and after the one before");
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

/// Bytes that a path carries in the time for which the rail's settings let it delay other slices.
fn credit_bytes(spec: &RailSpec, ns_per_mib: u64, latency_us: u64) -> u64 {
    let ns = spec.queue_us.saturating_add(latency_us.saturating_mul(2)).saturating_mul(1_000);
    let bytes = (u128::from(ns) << 20) / u128::from(ns_per_mib.max(1));
    u64::try_from(bytes).unwrap_or(u64::MAX).clamp(spec.path_bytes_min, spec.path_bytes)
}

/// Nanoseconds that bytes need at a speed.
pub(crate) fn wire_ns(bytes: u64, ns_per_mib: u64) -> u64 {
    // In 128 bits: what is large or slow would pass 64 before it is divided, and seem to need hours at most.
    let ns = (u128::from(bytes) * u128::from(ns_per_mib)) >> 20;
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// A moving average.
pub(crate) fn blend(old: u64, new: u64) -> u64 {
    (old.saturating_mul(EWMA_PARTS - 1).saturating_add(new)) / EWMA_PARTS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Route;
    use alloc::vec;
    use baton_types::Rng;

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

    fn rail() -> Rail {
        Rail::new(RailSpec { bytes_per_s: 1 << 30, latency_us: 10, ..RailSpec::default() })
    }

    #[test]
    fn only_an_open_path_that_stays_serves() {
        use PathState::{Closing, Open, Opening, Trial};
        let table = [(Opening, false), (Trial, false), (Open, true), (Closing, false)];
        for (state, serves) in table {
            let path = Path { state, ..path() };
            assert_eq!(path.serves(), serves, "{state:?}");
            assert!(!Path { draining: true, ..path }.serves(), "{state:?}, draining");
        }
        assert_eq!(path().state, Opening, "a new one is being opened");
    }

    #[test]
    fn a_path_has_room_for_so_many_slices_and_bytes_and_always_for_one() {
        let rail =
            Rail::new(RailSpec { path_slices: 3, path_bytes: 100, path_bytes_min: 100, ..rail().spec });
        let fresh = Path::new(PathNumber(0), 0, Route { rail: RailNumber(0), tier: 0 }, &rail, 0);
        // Slices and bytes outstanding, whether it refused one, and whether one more goes.
        let table = [
            (0, 0, false, true),
            (1, 99, false, true),
            (1, 100, false, false),
            (0, 1_000, false, true),
            (2, 2, false, true),
            (3, 3, false, false),
            (4, 3, false, false),
            (0, 0, true, false),
            (1, 1, true, false),
        ];
        for (slices, bytes, full, room) in table {
            let path = Path { outstanding: vec![0; slices], bytes, full, ..fresh.clone() };
            assert_eq!(path.has_room(&rail), room, "{slices} slices, {bytes} bytes, full: {full}");
        }
    }

    #[test]
    fn a_new_path_believes_its_rail() {
        let mut rail = rail();
        (rail.ns_per_mib, rail.latency_us) = (5_000_000, 77);
        let path = Path::new(PathNumber(4), 9, Route { rail: RailNumber(2), tier: 1 }, &rail, 123);
        assert_eq!((path.ns_per_mib, path.latency_us), (5_000_000, 77), "what it has shown, not the setting");
        assert_eq!((path.number, path.peer, path.rail, path.tier), (PathNumber(4), 9, RailNumber(2), 1));
        assert_eq!([path.opened_us, path.alive_us, path.moved_us], [123; 3]);
        assert_eq!(path.credit_bytes, credit_bytes(&rail.spec, 5_000_000, 77));
    }

    #[test]
    fn bytes_need_what_exact_reckoning_says() {
        let mut rng = Rng::new(5);
        for _ in 0..20_000 {
            let (bytes, ns_per_mib) = (any_size(&mut rng), any_size(&mut rng));
            let exact = (u128::from(bytes) * u128::from(ns_per_mib)) >> 20;
            assert_eq!(u128::from(wire_ns(bytes, ns_per_mib)), exact.min(u128::from(u64::MAX)));
        }
        // 16 GiB at 500 kB/s: nine hours and a half.
        assert_eq!(wire_ns(16 << 30, 2_097_152_000), 34_359_738_368_000);
    }

    /// A number of any magnitude.
    fn any_size(rng: &mut Rng) -> u64 {
        let magnitude = rng.below(64);
        rng.next_u64() >> magnitude
    }

    #[test]
    fn a_prediction_is_what_is_ahead_and_itself_and_latency_and_lateness() {
        let mut rng = Rng::new(6);
        for _ in 0..5_000 {
            let mut path = path();
            path.ns_per_mib = 1 + rng.below(10_000_000);
            path.latency_us = rng.below(10_000);
            path.moved_us = rng.below(1_000_000);
            path.bytes = rng.below(64 << 20);
            path.outstanding = vec![0; rng.below(2) as usize];
            let now_us = path.moved_us + rng.below(400_000);
            let bytes = rng.below(4 << 20);
            let wire = |bytes: u64| bytes as f64 * path.ns_per_mib as f64 / f64::from(1 << 20);
            let on_time = wire(path.bytes) + path.latency_us as f64 * 1e3;
            let waited = (now_us - path.moved_us) as f64 * 1e3;
            let busy = !path.outstanding.is_empty();
            let late = if busy { (waited - on_time).max(0.0) } else { 0.0 };
            let expected = wire(path.bytes + bytes) + path.latency_us as f64 * 1e3 + late;
            let got = path.predicted_ns(bytes, now_us) as f64;
            assert!((got - expected).abs() < 4.0, "{got} for {expected}: {path:?}");
        }
    }

    #[test]
    fn predictions_of_what_is_immense_do_not_go_round() {
        let mut path = path();
        (path.bytes, path.latency_us, path.ns_per_mib) = (u64::MAX, u64::MAX, u64::MAX);
        path.outstanding = vec![0];
        assert_eq!(path.predicted_ns(u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn any_speed_is_learned_within_forty_five_samples() {
        for us_per_mib in [1, 50, 1_000, 33_333, 1_000_000] {
            let mut path = path();
            path.outstanding = vec![0];
            for turn in 1..=45 {
                path.measure(1 << 20, 0, turn * us_per_mib, &RailSpec::default());
                path.moved_us = turn * us_per_mib;
            }
            let learned = path.ns_per_mib as f64 / (us_per_mib as f64 * 1_000.0);
            assert!((0.99..1.01).contains(&learned), "{us_per_mib} us for a MiB: {learned} of it");
            assert_eq!(path.latency_us, 10, "a busy path says nothing of latency");
        }
    }

    #[test]
    fn small_slices_are_gathered_into_one_sample() {
        let mut path = path();
        path.outstanding = vec![0];
        let before = path.ns_per_mib;
        let slices = SAMPLE_BYTES / 4_096;
        for turn in 1..=slices {
            assert_eq!(path.ns_per_mib, before, "slice {turn} of {slices}");
            path.measure(4_096, 0, turn * 100, &RailSpec::default());
            path.moved_us = turn * 100;
        }
        let seen = slices * 100 * 1_000 * ((1 << 20) / SAMPLE_BYTES);
        assert_eq!((path.ns_per_mib, path.sample), (blend(before, seen), (0, 0)));
    }

    #[test]
    fn a_slice_that_was_alone_tells_the_latency() {
        let mut path = path();
        for turn in 0..40 {
            let posted_us = turn * 1_000;
            // 64 KiB need 61 us at the speed believed; the rest of 161 is latency.
            path.moved_us = posted_us;
            path.measure(65_536, posted_us, posted_us + 161, &RailSpec::default());
        }
        assert!((97..=100).contains(&path.latency_us), "{}", path.latency_us);
        assert_eq!(path.ns_per_mib, rail().ns_per_mib, "and nothing of speed");
        path.measure(65_536, 39_000, 39_001, &RailSpec::default());
        assert!(path.latency_us < 80, "sooner than the wire allows counts as none");
    }

    #[test]
    fn a_slice_behind_another_is_timed_from_the_end_of_that() {
        let mut path = path();
        path.moved_us = 10_000;
        path.measure(SAMPLE_BYTES / 2, 0, 10_100, &RailSpec::default());
        assert_eq!((path.sample, path.latency_us), ((SAMPLE_BYTES / 2, 100), 10));
    }

    #[test]
    fn credit_is_what_the_queue_time_carries_between_its_bounds() {
        let spec =
            RailSpec { queue_us: 1_000, path_bytes_min: 1_000, path_bytes: 1 << 30, ..RailSpec::default() };
        // At a MiB in a ms, with 500 us of latency: two ms worth.
        assert_eq!(credit_bytes(&spec, 1_000_000, 500), 2 << 20);
        let mut rng = Rng::new(8);
        for _ in 0..5_000 {
            let [ns_per_mib, latency_us] = [0; 2].map(|_: u64| any_size(&mut rng));
            let credit = credit_bytes(&spec, ns_per_mib, latency_us);
            assert!((spec.path_bytes_min..=spec.path_bytes).contains(&credit));
            assert!(
                credit >= credit_bytes(&spec, ns_per_mib.saturating_add(1), latency_us),
                "slower, but more"
            );
            assert!(
                credit <= credit_bytes(&spec, ns_per_mib, latency_us.saturating_add(1)),
                "longer, but less"
            );
        }
    }

    #[test]
    fn an_average_stays_between_and_comes_near() {
        let mut rng = Rng::new(9);
        for _ in 0..5_000 {
            let [mut old, new] = [0; 2].map(|_: u64| any_size(&mut rng) >> 4);
            for _ in 0..160 {
                let next = blend(old, new);
                assert!((old.min(new)..=old.max(new)).contains(&next), "{old} {new}: {next}");
                old = next;
            }
            assert!(old.abs_diff(new) < EWMA_PARTS, "{old} is not {new}");
        }
    }
}
