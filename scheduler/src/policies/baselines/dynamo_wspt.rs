//! Dynamo's cost behind a queue in the router: no request is placed while every instance is busy; then the request with
//! the least work is placed first.

use alloc::vec::Vec;
use baton_types::RequestId;

use super::dynamo;
use crate::conductor::Conductor;
use crate::policies::{Choice, FetchRule, Policy, QueueLocation, Ties};
use crate::request::{Entry, Stage};
use crate::{AdmissionMode, Effect};

pub(in crate::policies) const POLICY: Policy = Policy {
    choice: Choice::Least { score: dynamo::score, ties: Ties::ByLot },
    fetch: FetchRule::Never,
    queueing: QueueLocation::BeforePlacement,
    admission: AdmissionMode::None,
    foresees: false,
};

impl Conductor {
    /// Keeps a request in the router's queue.
    pub(crate) fn park(&mut self, mut entry: Entry) {
        self.look_up(&entry.request);
        let best = self.fleet.prefills.iter().map(|id| self.hits.of(*id).blocks).max().unwrap_or(0);
        entry.new_tokens = entry.request.prompt_tokens - self.tokens_of(&entry.request, best);
        self.unplaced.push(entry.request.id);
        self.requests.insert(entry);
    }

    /// Places the requests that the router's queue releases.
    pub(crate) fn run_unplaced(&mut self, effects: &mut Vec<Effect>) {
        while !self.unplaced.is_empty() && self.any_instance_free() {
            let Some(at) = self.shortest_unplaced() else { return };
            let id = self.unplaced.remove(at);
            let entry = self.requests.remove(id).expect("a request that is in the router's queue is live");
            assert!(entry.stage == Stage::Unplaced, "request {id} is in the router's queue, and placed");
            self.admit(entry, effects);
        }
    }

    fn any_instance_free(&self) -> bool {
        let permille = u64::from(self.config.queue_threshold_permille);
        self.fleet
            .prefills
            .iter()
            .filter_map(|id| self.fleet.get(*id))
            .any(|i| i.prefill.active_tokens() * 1000 <= u64::from(i.spec.pass_tokens) * permille)
    }

    /// Keys are computed once at arrival (`new_tokens`), as Dynamo does within its refresh interval.
    fn shortest_unplaced(&self) -> Option<usize> {
        let key = |(at, id): &(usize, &RequestId)| {
            let entry = self.requests.get(**id).expect("a request that is in the router's queue is live");
            (entry.new_tokens, *at)
        };
        self.unplaced.iter().enumerate().min_by_key(key).map(|(at, _)| at)
    }
}
