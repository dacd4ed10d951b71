//! A rail: which peers have something to send over it, and whose turn it is.
//!
//! The priorities share a rail by stride: each has a *pass* that grows by the bytes that it sends over its
//! weight, and the one with the least pass among those with work goes next. One that comes back after a rest
//! starts level with the others, so rest is not saved up. The lowest has its floor by a weight that is at
//! least that share of all. Within a priority the peers take turns, slice by slice.

use alloc::collections::VecDeque;

use super::{MoverConfig, RailSpec};
use crate::Priority;

pub(crate) const CLASSES: usize = Priority::ALL.len();
/// Passes grow by bytes times this over the weight.
const STRIDE_SCALE: u64 = 1_000;

#[derive(Clone, Debug)]
pub(crate) struct Rail {
    pub(crate) spec: RailSpec,
    pub(crate) bytes: u64,
    /// Paths on it, those being opened and closed included.
    pub(crate) paths: u32,
    /// What its paths have shown: nanoseconds for one MiB.
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

    /// Whose turn it is: the priority and the peer, which leaves the queue.
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
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
