//! Takes the instances in turn.

use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::policies::{Choice, FetchRule, Policy, QueueLocation};

pub(in crate::policies) const POLICY: Policy = Policy {
    choice: Choice::Unseen(next),
    fetch: FetchRule::Never,
    queueing: QueueLocation::AtEngines,
    admission: AdmissionMode::None,
    foresees: false,
};

fn next(conductor: &mut Conductor, candidates: u64) -> u64 {
    let at = conductor.turn % candidates;
    conductor.turn += 1;
    at
}
