//! An independent account of each request's reservations, kept from inputs and effects alone.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId, Role};

use crate::{Effect, Input};

/// Where a request is, as its driver sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Accepted, nothing ordered yet.
    Queued,
    /// Its prefill was ordered.
    Prefilling,
    /// Its KV is complete on the prefill side.
    HandingOff,
    /// Its decode was ordered.
    Decoding,
}

/// A live request.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub phase: Phase,
    pub prefill: Option<InstanceId>,
    pub decode: Option<InstanceId>,
    pub fetch: Option<InstanceId>,
    /// Instances on which the driver holds something for it.
    pub held: BTreeSet<InstanceId>,
}

/// The account: panics as soon as an order contradicts an earlier one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Oracle {
    pub live: BTreeMap<RequestId, Account>,
    pub alive: BTreeMap<InstanceId, Role>,
    /// The present or last kind of each instance.
    pub kinds: BTreeMap<InstanceId, u32>,
    pub accepted: u64,
    pub rejected: u64,
    pub failed: u64,
    pub finished: u64,
    pub cancelled: u64,
    /// Instances that are receiving a copy.
    pub copying: BTreeSet<InstanceId>,
}

impl Oracle {
    /// Live requests in a phase, by id.
    pub(crate) fn in_phase(&self, phase: Phase) -> Vec<RequestId> {
        self.live.iter().filter(|(_, a)| a.phase == phase).map(|(id, _)| *id).collect()
    }

    /// Records a fact just before the conductor receives it.
    pub(crate) fn hears(&mut self, input: &Input) {
        match input {
            Input::InstanceJoined(spec) => {
                self.alive.insert(spec.id, spec.role);
                self.kinds.insert(spec.id, spec.kind);
                self.copying.remove(&spec.id);
            }
            Input::ReplicateFinished { to } => _ = self.copying.remove(to),
            Input::RequestArrived(request)
                if request.prompt_tokens > 0 && !self.live.contains_key(&request.id) =>
            {
                self.accepted += 1;
                let account = Account {
                    phase: Phase::Queued,
                    prefill: None,
                    decode: None,
                    fetch: None,
                    held: BTreeSet::new(),
                };
                self.live.insert(request.id, account);
            }
            Input::RequestCancelled { request } => {
                // The effects of this step must release what the request holds.
                if let Some(account) = self.live.get_mut(request) {
                    account.phase = Phase::Queued;
                    self.cancelled += 1;
                }
            }
            Input::PrefillFinished { request, .. } => {
                self.advance(*request, Phase::Prefilling, Phase::HandingOff)
            }
            Input::RoleChanged { instance, role } => {
                if let Some(known) = self.alive.get_mut(instance) {
                    *known = *role;
                }
            }
            Input::HandoffFailed { request } => {
                if let Some(account) = self.live.get_mut(request) {
                    account.fetch = None;
                }
            }
            Input::FetchFinished { request, .. } => {
                if let Some(account) = self.live.get_mut(request).filter(|a| a.phase == Phase::Prefilling) {
                    account.fetch = None;
                }
            }
            Input::DecodeFinished { request, .. }
                if self.live.get(request).is_some_and(|a| a.phase == Phase::Decoding) =>
            {
                self.live.remove(request);
                self.finished += 1;
            }
            _ => {}
        }
    }

    /// An instance died: reads from it will not arrive.
    pub(crate) fn dies(&mut self, instance: InstanceId) {
        self.alive.remove(&instance);
        for account in self.live.values_mut().filter(|a| a.fetch == Some(instance)) {
            account.fetch = None;
        }
    }

    fn advance(&mut self, request: RequestId, from: Phase, to: Phase) {
        if let Some(account) = self.live.get_mut(&request).filter(|a| a.phase == from) {
            account.phase = to;
            account.fetch = None;
        }
    }

    /// Records the conductor's orders.
    pub(crate) fn sees(&mut self, input: &Input, effects: &[Effect]) {
        for effect in effects {
            self.sees_one(effect);
        }
        if let Input::RequestCancelled { request } = input
            && let Some(account) = self.live.remove(request)
        {
            assert!(account.held.is_empty(), "cancelled request {request} still holds {account:?}");
        }
    }

    fn must_decode(&self, instance: InstanceId) {
        let role = self.alive.get(&instance);
        assert!(role.is_some_and(|role| role.decodes()), "a decode on {instance}, which is {role:?}");
    }

    /// KV goes between instances of one kind.
    fn must_share(&self, from: InstanceId, to: InstanceId) {
        assert_eq!(self.kinds.get(&from), self.kinds.get(&to), "KV goes from {from} to {to}");
    }

    fn account(&mut self, request: RequestId) -> &mut Account {
        self.live
            .get_mut(&request)
            .unwrap_or_else(|| panic!("an order for request {request}, which is not live here"))
    }

    fn sees_one(&mut self, effect: &Effect) {
        match *effect {
            Effect::ChangeRole { instance, role } => {
                let before = self.alive.insert(instance, role);
                assert!(
                    before.is_some_and(|before| before != role),
                    "{instance} becomes {role:?} from {before:?}"
                );
            }
            Effect::StartPrefill { request, instance, decode, fetch, .. } => {
                self.must_decode(decode);
                self.must_share(instance, decode);
                fetch.iter().for_each(|fetch| self.must_share(fetch.from, instance));
                let first_leg = self.alive.get(&instance).is_some_and(|role| role.prefills());
                assert!(first_leg || instance == decode, "request {request} prefills on {instance}");
                let account = self.account(request);
                assert!(account.held.is_empty(), "request {request} starts again while it holds {account:?}");
                account.phase = Phase::Prefilling;
                (account.prefill, account.decode) = (Some(instance), Some(decode));
                account.fetch = fetch.map(|f| f.from);
                account.held.extend([instance, decode]);
                if let Some(fetch) = fetch {
                    assert!(
                        fetch.from != instance && fetch.blocks > 0,
                        "request {request} fetches {fetch:?}"
                    );
                    assert!(
                        self.alive.contains_key(&fetch.from),
                        "request {request} fetches from a dead instance"
                    );
                }
            }
            Effect::StartDecode { request, instance } => {
                let account = self.account(request);
                assert_eq!(
                    (account.phase, account.decode),
                    (Phase::HandingOff, Some(instance)),
                    "request {request}"
                );
                account.phase = Phase::Decoding;
                // The KV has moved: only the decode side remains.
                account.held = BTreeSet::from([instance]);
            }
            Effect::Handoff { request, from, to, .. } => {
                self.must_decode(to);
                self.must_share(from, to);
                let account = self.account(request);
                assert_eq!(
                    (account.phase, account.prefill),
                    (Phase::HandingOff, Some(from)),
                    "request {request}"
                );
                account.decode = Some(to);
                assert!(account.held.insert(to), "request {request} already holds {to}");
            }
            Effect::Release { request, instance } => {
                let account = self.account(request);
                assert!(
                    account.held.remove(&instance),
                    "request {request} releases {instance} which it does not hold"
                );
                if account.held.is_empty() {
                    (account.phase, account.fetch) = (Phase::Queued, None);
                }
            }
            Effect::Reject(ref rejection) => {
                self.ends(rejection.request);
                self.rejected += 1;
            }
            Effect::Fail { request, .. } => {
                self.ends(request);
                self.failed += 1;
            }
            Effect::Replicate { from, to, ref chain } => {
                assert!(from != to && !chain.is_empty());
                assert!(self.alive.contains_key(&from));
                self.must_share(from, to);
                let role = self.alive.get(&to);
                assert!(
                    matches!(role, Some(Role::Prefill | Role::Store)),
                    "a copy to {to}, which is {role:?}"
                );
                assert!(self.copying.insert(to), "two copies to {to} at a time");
            }
            Effect::Explain(_) | Effect::Share(_) => {}
        }
    }

    fn ends(&mut self, request: RequestId) {
        let account = self.live.remove(&request);
        let account = account.unwrap_or_else(|| panic!("request {request} ends twice"));
        assert!(account.held.is_empty(), "request {request} ended holding {account:?}");
    }
}
