//! A rail: which peers have something to send over it, and whose turn it is.
//!
//! The priorities share a rail by stride: each has a *pass* that grows by the bytes that it sends over its
//! weight, and the one with the least pass among those with work goes next. One that comes back after a rest
//! starts level with the others, so rest is not saved up. The lowest has its floor by a weight that is at
//! least that share of all. Within a priority the peers take turns, slice by slice.

use alloc::collections::VecDeque;

use crate::Priority;
use crate::{MoverConfig, RailSpec};

pub(crate) const CLASSES: usize = Priority::ALL.len();
/// Passes grow by bytes times this over the weight.
const STRIDE_SCALE: u64 = 1_000;

#[derive(Clone, Debug)]
pub(crate) struct Rail {
    pub(crate) spec: RailSpec,
    pub(crate) bytes: u64,
    /// Bytes of slices on it that ended well.
    pub(crate) moved_bytes: u64,
    /// Paths on it, those being opened and closed included.
    pub(crate) paths: u32,
    /// Measured speed of its paths: nanoseconds for one MiB.
    pub(crate) ns_per_mib: u64,
    pub(crate) latency_us: u64,
    /// Peers with work that may find a path on this rail, by priority.
    ready: [VecDeque<u32>; CLASSES],
    pass: [u128; CLASSES],
    /// The pass of the priority that sent last, before it did.
    reached: u128,
}

impl Rail {
    pub(crate) fn new(spec: RailSpec) -> Self {
        let ns_per_mib = ((1u64 << 20).saturating_mul(1_000_000_000) / spec.bytes_per_s).max(1);
        Self {
            spec,
            bytes: 0,
            moved_bytes: 0,
            paths: 0,
            ns_per_mib,
            latency_us: spec.latency_us,
            ready: Default::default(),
            pass: [0; CLASSES],
            reached: 0,
        }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.bytes < self.spec.rail_bytes
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.iter().any(|peers| !peers.is_empty())
    }

    /// A peer that does not stand in this queue has work.
    pub(crate) fn push(&mut self, class: usize, peer: u32) {
        if self.ready[class].is_empty() {
            self.pass[class] = self.pass[class].max(self.reached);
        }
        self.ready[class].push_back(peer);
    }

    /// Takes the next turn out of the queue: the priority and the peer.
    pub(crate) fn pop(&mut self) -> Option<(usize, u32)> {
        let class = self.least()?;
        self.ready[class].pop_front().map(|peer| (class, peer))
    }

    /// A priority has sent something.
    pub(crate) fn charge(&mut self, class: usize, bytes: u64, weights: &[u64; CLASSES]) {
        // Not at `pop`: a turn that sends nothing, for want of room, must not count as one.
        self.reached = self.pass[class];
        self.pass[class] += u128::from(bytes.max(1) * STRIDE_SCALE) * 1_000 / u128::from(weights[class]);
    }

    pub(crate) fn remove(&mut self, peer: u32) {
        for peers in &mut self.ready {
            peers.retain(|&other| other != peer);
        }
    }

    pub(crate) fn queued(&self, class: usize) -> impl Iterator<Item = u32> {
        self.ready[class].iter().copied()
    }

    fn least(&self) -> Option<usize> {
        (0..CLASSES).filter(|&class| !self.ready[class].is_empty()).min_by_key(|&class| self.pass[class])
    }
}

/// The weights, in thousandths, with the lowest lifted to its floor.
pub(crate) fn weights(config: &MoverConfig) -> [u64; CLASSES] {
    let mut weights = config.weights.map(|weight| u64::from(weight) * 1_000);
    let above: u64 = weights[..CLASSES - 1].iter().sum();
    let floor = (above * u64::from(config.floor_permille)).div_ceil(1_000 - u64::from(config.floor_permille));
    weights[CLASSES - 1] = weights[CLASSES - 1].max(floor);
    assert!(weights.iter().all(|&weight| weight > 0), "passes are divided by the weights");
    weights
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;
    use baton_types::Rng;

    fn shares(present: &[usize]) -> [u64; CLASSES] {
        let (mut rail, weights) = (Rail::new(RailSpec::default()), weights(&MoverConfig::default()));
        for &class in present {
            rail.push(class, 7);
        }
        let mut sent = [0; CLASSES];
        for _ in 0..10_000 {
            let (class, peer) = rail.pop().unwrap();
            sent[class] += 1;
            rail.charge(class, 65_536, &weights);
            rail.push(class, peer);
        }
        sent
    }

    #[test]
    fn priorities_share_by_weight_and_the_lowest_has_its_floor() {
        let sent = shares(&[0, 1, 2, 3]);
        assert!(sent[3] >= 499, "{sent:?}");
        assert!((5_700..5_900).contains(&sent[0]), "{sent:?}");
        assert!((2_850..2_950).contains(&sent[1]), "{sent:?}");
        let sent = shares(&[0, 3]);
        assert!((730..800).contains(&sent[3]), "{sent:?}");
    }

    #[test]
    fn a_rest_is_not_saved_up() {
        let (mut rail, weights) = (Rail::new(RailSpec::default()), weights(&MoverConfig::default()));
        for _ in 0..1_000 {
            rail.push(0, 1);
            let (class, _) = rail.pop().unwrap();
            rail.charge(class, 65_536, &weights);
        }
        rail.push(0, 1);
        rail.push(3, 2);
        let firsts = (0..20).filter(|_| {
            let (class, peer) = rail.pop().unwrap();
            rail.charge(class, 65_536, &weights);
            rail.push(class, peer);
            class == 0
        });
        assert!(firsts.count() >= 15);
    }

    /// Any weights that a config may have.
    fn drawn(rng: &mut Rng) -> MoverConfig {
        let mut weights = [0; CLASSES].map(|_: u32| 1 + rng.below(10_000) as u32);
        weights.sort_unstable_by(|a, b| b.cmp(a));
        let floor_permille = rng.below(501) as u32;
        MoverConfig { weights, floor_permille, ..MoverConfig::default() }
    }

    #[test]
    fn the_lowest_has_its_floor_whatever_the_weights_and_no_more_than_that() {
        let mut rng = Rng::new(1);
        for _ in 0..5_000 {
            let config = drawn(&mut rng);
            let got = weights(&config);
            let asked = config.weights.map(|weight| u64::from(weight) * 1_000);
            assert_eq!(got[..CLASSES - 1], asked[..CLASSES - 1], "only the lowest is lifted");
            let (all, lowest) = (got.iter().sum::<u64>(), got[CLASSES - 1]);
            let floor = u64::from(config.floor_permille);
            assert!(lowest * 1_000 >= all * floor, "{config:?}");
            let lifted = lowest > asked[CLASSES - 1];
            assert!(!lifted || (lowest - 1) * 1_000 < (all - 1) * floor, "lifted too far: {config:?}");
        }
    }

    /// By stride no two priorities are ever further apart than one slice of each over its weight.
    #[test]
    fn shares_are_never_further_apart_than_one_slice() {
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let weights = weights(&drawn(&mut rng));
            let mut rail = Rail::new(RailSpec::default());
            let present: Vec<usize> = (0..CLASSES).filter(|_| rng.chance_permille(700)).collect();
            present.iter().for_each(|&class| rail.push(class, 1));
            let mut sent = [0u64; CLASSES];
            for _ in 0..3_000 {
                let Some((class, peer)) = rail.pop() else { break };
                let bytes = 1 + rng.below(65_536);
                rail.charge(class, bytes, &weights);
                rail.push(class, peer);
                sent[class] += bytes;
                for (&one, &two) in present.iter().flat_map(|one| present.iter().map(move |two| (one, two))) {
                    // sent[one] / weight[one] - sent[two] / weight[two] <= one slice / weight[one], but for
                    // what rounding took from each of 3,000 slices.
                    let scale = |class: usize| sent[class] as f64 / weights[class] as f64;
                    let bound = 65_536.0 / weights[one] as f64 + 0.01;
                    assert!(scale(one) - scale(two) <= bound, "{one} {two}: {sent:?} {weights:?}");
                }
            }
            assert!((0..CLASSES).all(|class| (sent[class] > 0) == present.contains(&class)));
        }
    }

    #[test]
    fn peers_of_one_priority_take_turns_in_order() {
        let mut rail = Rail::new(RailSpec::default());
        [5, 3, 9].into_iter().for_each(|peer| rail.push(1, peer));
        let mut turns = vec![];
        for _ in 0..7 {
            let (class, peer) = rail.pop().unwrap();
            rail.charge(class, 1, &[1_000; CLASSES]);
            rail.push(class, peer);
            turns.push(peer);
        }
        assert_eq!(turns, [5, 3, 9, 5, 3, 9, 5]);
        assert!(rail.queued(1).eq([3, 9, 5]) && rail.queued(0).next().is_none());
    }

    #[test]
    fn a_turn_that_sends_nothing_does_not_count() {
        let (mut rail, weights) = (Rail::new(RailSpec::default()), weights(&MoverConfig::default()));
        [0, 3].into_iter().for_each(|class| rail.push(class, 1));
        for _ in 0..1_000 {
            let (class, peer) = rail.pop().unwrap();
            assert_eq!(class, 0, "nothing was sent, so it is still the first one's turn");
            rail.push(class, peer);
        }
        rail.pop();
        rail.charge(0, 1, &weights);
        rail.push(0, 1);
        assert_eq!(rail.pop(), Some((3, 1)));
    }

    #[test]
    fn what_has_no_bytes_is_a_turn_too() {
        let (mut rail, weights) = (Rail::new(RailSpec::default()), weights(&MoverConfig::default()));
        [0, 1].into_iter().for_each(|class| rail.push(class, 1));
        let turns = (0..300).filter(|_| {
            let (class, peer) = rail.pop().unwrap();
            rail.charge(class, 0, &weights);
            rail.push(class, peer);
            class == 1
        });
        assert_eq!(turns.count(), 100, "half the weight, a third of the turns");
    }

    #[test]
    fn one_that_comes_back_ahead_of_the_others_is_not_set_back_to_them() {
        let mut rail = Rail::new(RailSpec::default());
        let weights = [1_000_000, 1_000, 1_000, 1_000];
        // Priority 1 sends a lot and rests; priority 0 has sent little when it comes back.
        rail.push(1, 1);
        rail.pop();
        rail.charge(1, 1 << 20, &weights);
        [(0, 1), (0, 2), (1, 1)].into_iter().for_each(|(class, peer)| rail.push(class, peer));
        for turn in 0..100 {
            let (class, peer) = rail.pop().unwrap();
            assert_eq!(class, 0, "turn {turn}: what was sent before is not forgotten");
            rail.charge(class, 1 << 20, &weights);
            rail.push(class, peer);
        }
    }

    #[test]
    fn a_peer_that_is_removed_stands_in_no_queue() {
        let mut rail = Rail::new(RailSpec::default());
        assert!(!rail.is_ready() && rail.pop().is_none());
        for (class, peer) in [(0, 7), (0, 8), (2, 7), (3, 7)] {
            rail.push(class, peer);
        }
        rail.remove(7);
        assert_eq!(
            (rail.is_ready(), rail.pop(), rail.is_ready(), rail.pop()),
            (true, Some((0, 8)), false, None)
        );
    }

    #[test]
    fn there_is_room_below_the_bound_and_speeds_of_any_size_are_taken() {
        let mut rail = Rail::new(RailSpec { rail_bytes: 10, latency_us: 7, ..RailSpec::default() });
        for (bytes, room) in [(0, true), (9, true), (10, false), (11, false)] {
            rail.bytes = bytes;
            assert_eq!(rail.has_room(), room, "{bytes} of 10");
        }
        assert_eq!(rail.latency_us, 7);
        let ns_per_mib = |bytes_per_s| Rail::new(RailSpec { bytes_per_s, ..RailSpec::default() }).ns_per_mib;
        assert_eq!([1, 1 << 20, 1 << 30].map(ns_per_mib), [1_000_000_000 << 20, 1_000_000_000, 976_562]);
        assert_eq!(ns_per_mib(u64::MAX), 1, "never nothing, for it divides");
    }
}
