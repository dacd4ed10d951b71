//! Always picks the last candidate. It is compiled only for tests: this file and its line in the table are all that a
//! new policy needs, and every rule that holds for all policies is tested with it.

use super::{Choice, FetchRule, Policy, QueueLocation, Ties};
use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::placement::Candidate;

pub(super) const POLICY: Policy = Policy {
    choice: Choice::Least { score, ties: Ties::First },
    fetch: FetchRule::Never,
    queueing: QueueLocation::AtEngines,
    admission: AdmissionMode::None,
    foresees: false,
};

fn score(_: &Conductor, candidate: &Candidate, _: &Instance) -> f64 {
    -f64::from(candidate.instance.0)
}

#[cfg(test)]
mod tests {
    use crate::testing::{conductor, offer, plain, request, started};
    use crate::{AdmissionMode, PolicyName};

    #[test]
    fn it_places_by_the_rule_in_its_file() {
        let mut conductor = conductor(plain(PolicyName::Last, AdmissionMode::Auto), 3, 1);
        assert_eq!(conductor.config().effective_admission(), AdmissionMode::None);
        for id in 0..4 {
            assert_eq!(started(&offer(&mut conductor, 0, request(id, 10_000, 0))).prefill, 2);
        }
    }
}
