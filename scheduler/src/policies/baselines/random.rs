//! Uniformly at random: the paper's first baseline.

use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::policies::{Choice, FetchRule, Policy, QueueLocation};

pub(in crate::policies) const POLICY: Policy = Policy {
    choice: Choice::Unseen(any),
    fetch: FetchRule::Never,
    queueing: QueueLocation::AtEngines,
    admission: AdmissionMode::None,
    foresees: false,
};

fn any(conductor: &mut Conductor, candidates: u64) -> u64 {
    conductor.rng.below(candidates)
}
