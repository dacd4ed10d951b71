//! Load balancing: the paper's second baseline.

use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::placement::Candidate;
use crate::policies::{Choice, FetchRule, Policy, QueueLocation, Ties};

pub(in crate::policies) const POLICY: Policy = Policy {
    choice: Choice::Least { score, ties: Ties::First },
    fetch: FetchRule::Never,
    queueing: QueueLocation::AtEngines,
    admission: AdmissionMode::None,
    foresees: false,
};

#[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
fn score(_: &Conductor, candidate: &Candidate, _: &Instance) -> f64 {
    candidate.queue_us as f64
}
