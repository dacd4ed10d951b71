//! Requests as the conductor knows them, and their stages.

use alloc::vec::Vec;
use core::fmt;

use baton_types::{BlockHash, ClassId, InstanceId, RequestId, RequestObjectives, TenantId};
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::placement::{Plan, PlannedEnd};

/// A request, parsed and hashed before it reaches the conductor.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Its id.
    pub id: RequestId,
    /// Its service class.
    pub class: ClassId,
    /// The objectives that it names itself, in place of its class's.
    #[serde(default, skip_serializing_if = "RequestObjectives::is_empty")]
    pub objectives: RequestObjectives,
    /// Its tenant.
    pub tenant: TenantId,
    /// Prompt length, tokens, at least 1.
    pub prompt_tokens: u64,
    /// Short names of the prompt's blocks, the last one possibly partial.
    pub chain: Vec<BlockHash>,
    /// Tokens that the client has from earlier attempts. They are part of the prompt now.
    pub emitted_tokens: u32,
    /// The most output tokens that its client takes, in all.
    pub max_output_tokens: Option<u32>,
    /// Output length, when it is known beforehand (the policy `baton_informed` only).
    pub known_output_tokens: Option<u32>,
    /// The longest admissible work per this request's value, µs (the policy `baton_informed` only).
    pub known_work_bound_us: Option<u64>,
    /// Output tokens, in all, that its client asks for by number. It is refused where no instance can hold so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_output_tokens: Option<u32>,
    /// It was let in before, and lost its place because instances died: it is placed again, and not judged again.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub let_in: bool,
}

/// As derived, without what the client does not name, as in the JSON: requests without keep their digests.
impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Request");
        fields.field("id", &self.id).field("class", &self.class);
        if !self.objectives.is_empty() {
            fields.field("objectives", &self.objectives);
        }
        fields.field("tenant", &self.tenant);
        fields.field("prompt_tokens", &self.prompt_tokens).field("chain", &self.chain);
        fields.field("emitted_tokens", &self.emitted_tokens);
        fields.field("max_output_tokens", &self.max_output_tokens);
        fields.field("known_output_tokens", &self.known_output_tokens);
        fields.field("known_work_bound_us", &self.known_work_bound_us);
        if self.asked_output_tokens.is_some() {
            fields.field("asked_output_tokens", &self.asked_output_tokens);
        }
        if self.let_in {
            fields.field("let_in", &true);
        }
        fields.finish()
    }
}

impl Request {
    /// Adds the client's tokens (`emitted_tokens` in all) to the prompt.
    pub(crate) fn has_emitted(&mut self, emitted_tokens: u32, block_tokens: u32) {
        let whole = usize::try_from(self.prompt_tokens / u64::from(block_tokens)).unwrap_or(usize::MAX);
        // The last block continues with tokens of this answer alone.
        self.chain.truncate(whole);
        self.prompt_tokens += u64::from(emitted_tokens.saturating_sub(self.emitted_tokens));
        self.emitted_tokens = self.emitted_tokens.max(emitted_tokens);
        assert!(self.prompt_tokens > 0, "request {} has become a prompt of nothing", self.id);
        debug_assert!(
            self.chain.len() as u64 * u64::from(block_tokens) <= self.prompt_tokens,
            "request {} names blocks beyond its prompt",
            self.id
        );
    }
}

/// The stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stage {
    /// It waits in the router's queue and is not placed.
    Unplaced,
    /// It is placed, and its prefill is not sent yet.
    Waiting,
    /// Sent to its prefill instance.
    Prefilling,
    /// Prefilled; the rest of its KV is being transferred.
    HandingOff,
    /// Decoding.
    Decoding,
}

/// A live request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub request: Request,
    pub stage: Stage,
    pub arrived_us: u64,
    /// When its first token is due by its objective, µs.
    pub deadline_us: u64,
    /// The longest decode step that was promised, µs.
    #[serde(default)]
    pub promised_step_us: u64,
    /// When its first token is due by the promise made at placement, µs.
    pub promised_us: u64,
    /// What was predicted when it was first placed; kept for drivers.
    pub prediction: Option<crate::Prediction>,
    /// What the prediction of its first token was made from.
    #[serde(default)]
    pub outlook: Option<crate::estimate::WaitOutlook>,
    /// Steps that its decode instance had made by the profile when its decode began.
    #[serde(default)]
    pub steps_before: f64,
    /// What the prediction of its TBT was made from: the step of its batch, µs.
    #[serde(default)]
    pub expected_step_us: u64,
    /// Where its tenant's share began with it, once it was let in.
    pub tag_us: Option<u64>,
    pub prefill: InstanceId,
    pub decode: Option<InstanceId>,
    /// The instance where it failed last: its KV did not reach it, or its prefill or decode failed there. It is placed
    /// there again only if there is no other.
    pub excluded: Option<InstanceId>,
    pub fetch: Option<crate::FetchPlan>,
    /// Predicted prefill work on `prefill`, µs.
    pub work_us: u64,
    /// The same if no other prompt shared its passes, µs.
    pub alone_us: u64,
    /// Predicted tokens to compute.
    pub new_tokens: u64,
    /// How often it left a queue for a request of another router.
    pub made_way: u32,
    /// Predicted output tokens reserved for.
    pub room_tokens: u32,
    /// When the decode started or is predicted to start, µs.
    pub decode_at_us: u64,
    /// When its decode is predicted to end, µs.
    pub finish_us: u64,
    /// Uncorrected prediction of its decode's duration, µs.
    pub decode_prior_us: u64,
    pub retries: u32,
    /// It was preempted for an older request, and has not been sent again since.
    pub gave_way: bool,
    /// It was refused before, and its client came back for the place that was kept.
    #[serde(default)]
    pub returned: bool,
    /// Tokens that the client has, in all, of a decode that is about to be lost. They become part of the prompt once
    /// the request is placed again. Until then the decode ledger still holds the old prompt.
    pub told_tokens: u32,
    /// The other router whose request it is: its load counts, and no order is given for it.
    pub peer: Option<u32>,
}

impl Entry {
    /// Whether it had a place before and lost it, to a fault or to an older request.
    pub(crate) const fn is_placed_again(&self) -> bool {
        self.retries > 0 || self.gave_way || self.request.let_in
    }

    /// Its prefill is to reuse, fetch and compute what the plan says.
    pub(crate) const fn take_plan(&mut self, plan: &Plan) {
        self.take_work(plan);
        self.fetch = plan.fetch;
    }

    /// Its prefill is to compute what the plan says; what it fetches is settled later.
    pub(crate) const fn take_work(&mut self, plan: &Plan) {
        (self.work_us, self.alone_us, self.new_tokens) = (plan.work_us, plan.alone_us, plan.new_tokens);
    }

    /// Its prefill where it is placed, which ends at that time, µs.
    pub(crate) const fn planned_end(&self, at_us: u64) -> PlannedEnd {
        PlannedEnd { on: self.prefill, at_us, work_us: self.work_us }
    }

    /// A request that holds nothing yet.
    pub(crate) fn new(request: Request, arrived_us: u64) -> Self {
        Self {
            request,
            stage: Stage::Unplaced,
            arrived_us,
            deadline_us: u64::MAX,
            promised_step_us: 0,
            expected_step_us: 0,
            steps_before: 0.0,
            promised_us: 0,
            prediction: None,
            outlook: None,
            tag_us: None,
            prefill: InstanceId(0),
            decode: None,
            excluded: None,
            fetch: None,
            work_us: 0,
            alone_us: 0,
            new_tokens: 0,
            made_way: 0,
            room_tokens: 0,
            decode_at_us: 0,
            finish_us: 0,
            decode_prior_us: 0,
            retries: 0,
            gave_way: false,
            returned: false,
            told_tokens: 0,
            peer: None,
        }
    }
}

/// Live requests by id: a slab with a map for look-up. The map is never iterated.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    slots: Vec<Option<Entry>>,
    free: Vec<u32>,
    by_id: HashMap<RequestId, u32, crate::conductor::FixedState>,
}

impl Requests {
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn contains(&self, id: RequestId) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Adds an entry, whose id must not be live: a skipped one would be lost silently.
    pub(crate) fn insert(&mut self, entry: Entry) {
        let id = entry.request.id;
        assert!(!self.by_id.contains_key(&id), "request {id} is live already");
        let slot = if let Some(slot) = self.free.pop() {
            let before = self.slots[slot as usize].replace(entry);
            assert!(before.is_none(), "slot {slot} is listed as vacant, and was not");
            slot
        } else {
            self.slots.push(Some(entry));
            u32::try_from(self.slots.len() - 1).expect("live requests are bounded far below 2^32")
        };
        self.by_id.insert(id, slot);
        debug_assert_eq!(
            self.by_id.len() + self.free.len(),
            self.slots.len(),
            "every slot is live or vacant"
        );
    }

    pub(crate) fn get(&self, id: RequestId) -> Option<&Entry> {
        self.slots[*self.by_id.get(&id)? as usize].as_ref()
    }

    /// The blocks of a live request's prompt. Every request of a ledger is live.
    pub(crate) fn chain_of(&self, id: RequestId) -> &[BlockHash] {
        &self.get(id).expect("a request that a ledger names is live").request.chain
    }

    pub(crate) fn get_mut(&mut self, id: RequestId) -> Option<&mut Entry> {
        self.slots[*self.by_id.get(&id)? as usize].as_mut()
    }

    pub(crate) fn remove(&mut self, id: RequestId) -> Option<Entry> {
        let slot = self.by_id.remove(&id)?;
        self.free.push(slot);
        let entry = self.slots[slot as usize].take();
        assert!(entry.as_ref().is_some_and(|e| e.request.id == id), "the slot of request {id} is another's");
        entry
    }

    /// The slots, and the vacant ones in the order of their reuse.
    pub(crate) fn save(&self) -> (Vec<Option<Entry>>, Vec<u32>) {
        (self.slots.clone(), self.free.clone())
    }

    /// Restores a saved slab; `None` when the two parts contradict each other.
    pub(crate) fn restore(slots: Vec<Option<Entry>>, free: Vec<u32>) -> Option<Self> {
        let mut by_id = HashMap::default();
        for (slot, entry) in (0..).zip(&slots) {
            if let Some(entry) = entry
                && by_id.insert(entry.request.id, slot).is_some()
            {
                return None;
            }
        }
        let mut vacant: Vec<u32> = (0..).zip(&slots).filter(|(_, e)| e.is_none()).map(|(at, _)| at).collect();
        let mut listed = free.clone();
        vacant.sort_unstable();
        listed.sort_unstable();
        (vacant == listed).then_some(Self { slots, free, by_id })
    }

    /// Live entries in slot order (deterministic: slots follow the order of inputs).
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.slots.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: u64) -> Entry {
        Entry::new(Request { id: RequestId(id), ..Request::default() }, 0)
    }

    #[test]
    fn an_id_lives_once_and_slots_are_reused() {
        let mut requests = Requests::default();
        requests.insert(entry(1));
        requests.insert(entry(2));
        assert_eq!(requests.remove(RequestId(1)).map(|e| e.request.id), Some(RequestId(1)));
        assert!(requests.remove(RequestId(1)).is_none());
        requests.insert(entry(3));
        assert_eq!((requests.len(), requests.slots.len()), (2, 2));
        assert!(requests.contains(RequestId(3)) && requests.get(RequestId(1)).is_none());
        let order: Vec<_> = requests.iter().map(|e| e.request.id.0).collect();
        assert_eq!(order, [3, 2]);
    }

    #[test]
    #[should_panic(expected = "request 1 is live already")]
    fn a_live_id_is_not_replaced() {
        let mut requests = Requests::default();
        requests.insert(entry(1));
        requests.insert(entry(1));
    }
}
