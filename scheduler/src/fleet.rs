//! The instances: what each can do, what it has been given, and how its measured times differ from its profile.

mod orders;

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use baton_types::{CostProfile, Epoch, InstanceId, RequestId, Role};
use core::ops::{Deref, DerefMut};
use serde::{Deserialize, Serialize};

use crate::estimate::{DecodeLedger, LinkLedger, Residual};
use crate::queue::PrefillLedger;

pub(crate) use orders::FleetOrders;

/// What an instance announces when it joins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceSpec {
    /// Its id, dense from zero.
    pub id: InstanceId,
    /// Its present epoch.
    pub epoch: Epoch,
    /// Its role.
    pub role: Role,
    /// Its cost profile: the prior of every estimate about it.
    #[serde(with = "by_value")]
    pub profile: Arc<CostProfile>,
    /// KV tokens that fit in its HBM; for a store instance, in all that it lends.
    pub capacity_tokens: u64,
    /// Most prompt tokens that it computes in one pass; 0 without an engine.
    pub pass_tokens: u32,
    /// Nodes that form this instance as a chunked pipeline (CPP); 1 for a single node.
    pub pipeline_nodes: u32,
    /// Prompt tokens that it mixes into each decode step: `None` lets it fill the step up to the
    /// TBT target, `Some(0)` means that it never mixes.
    pub mixed_chunk_tokens: Option<u32>,
    /// Most requests that its engine steps together, however short they are; `None` where it has no such limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_running: Option<u32>,
    /// Network rate, each way, bytes/s.
    pub net_bytes_per_s: u64,
    /// Rate between its DRAM and HBM, bytes/s.
    pub host_bytes_per_s: u64,
    /// Read rate of its SSD, bytes/s; 0 when it has none.
    pub ssd_bytes_per_s: u64,
    /// Whether the conductor may change its role between prefill and decode.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub may_change_role: bool,
    /// Whether its engine takes KV by itself and does not say when it has landed, so that nothing is learnt of the network.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub engine_moves_kv: bool,
    /// The kind of its KV: it takes KV from instances of the same kind only.
    #[serde(default, skip_serializing_if = "is_first")]
    pub kind: u32,
}

impl InstanceSpec {
    /// Whether so many requests, with so many tokens of room together, may decode there at once.
    pub(crate) fn holds(&self, requests: usize, tokens: u64) -> bool {
        tokens <= self.capacity_tokens && self.max_running.is_none_or(|most| requests <= most as usize)
    }
}

/// The first kind is not serialised, so clusters of one kind do not mention it.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it so")]
const fn is_first(kind: &u32) -> bool {
    *kind == 0
}

/// A shared profile is written out whole, and read back unshared.
mod by_value {
    use super::{Arc, CostProfile, Deserialize, Serialize};

    pub(super) fn serialize<S: serde::Serializer>(
        profile: &Arc<CostProfile>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        CostProfile::serialize(profile, to)
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<Arc<CostProfile>, D::Error> {
        CostProfile::deserialize(from).map(Arc::new)
    }
}

/// Whether an instance takes work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceState {
    /// Takes new work.
    Serving,
    /// Finishes what it has.
    Draining,
    /// It was lost.
    Lost,
}

/// An instance with its ledgers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Instance {
    pub spec: InstanceSpec,
    pub state: InstanceState,
    pub prefill: PrefillLedger,
    pub decode: DecodeLedger,
    /// Measured over predicted prefill time.
    pub prefill_residual: Residual,
    /// Measured over predicted decode duration.
    pub decode_residual: Residual,
    /// Measured over predicted steps without prompt tokens.
    #[serde(default)]
    pub step_residual: Residual,
    /// Decode steps that it has made by the profile, and up to when they are counted, µs.
    #[serde(default)]
    steps: f64,
    #[serde(default)]
    steps_at_us: u64,
    /// The KV on its way here; what leaves is with the prefills.
    pub inbound: LinkLedger,
    /// A replica is being copied here.
    pub replicating: bool,
    /// Until then no last copy is sent here, because the links serve others too.
    pub rests_until_us: u64,
    /// The stretch of demand in which it took its role; 0 for the role that it joined with.
    #[serde(default)]
    pub role_since: u64,
}

impl Instance {
    /// What the step of a request that decodes alone leaves of the objective, µs: what the others of its batch may add.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    pub(crate) fn step_slack_us(&self, tbt_us: u64, context_tokens: u64) -> f64 {
        (tbt_us as f64 - self.step_us(1, context_tokens)).max(0.0)
    }

    /// Counts the steps that those that decode now have made by the profile: the batch is about to change. Returns all so far.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    pub(crate) fn count_steps(&mut self, now_us: u64) -> f64 {
        let passed_us = now_us.saturating_sub(self.steps_at_us);
        if passed_us > 0 && self.decode.running() > 0 {
            let (batch, context_tokens) = self.decode.running_at(now_us);
            self.steps += passed_us as f64 / self.spec.profile.decode_us(batch, context_tokens).max(1.0);
        }
        self.steps_at_us = now_us;
        self.steps
    }

    /// The predicted time of a step of a batch without prompt tokens, µs: by the profile, and by what was measured here.
    pub(crate) fn step_us(&self, batch: u32, context_tokens: u64) -> f64 {
        self.spec.profile.decode_us(batch, context_tokens) * self.step_residual.ratio()
    }

    fn new(spec: InstanceSpec) -> Self {
        Self {
            spec,
            state: InstanceState::Serving,
            prefill: PrefillLedger::default(),
            decode: DecodeLedger::default(),
            prefill_residual: Residual::default(),
            decode_residual: Residual::default(),
            step_residual: Residual::default(),
            steps: 0.0,
            steps_at_us: 0,
            inbound: LinkLedger::default(),
            replicating: false,
            rests_until_us: 0,
            role_since: 0,
        }
    }

    /// Since when it has had nothing to compute, if it has nothing now, µs.
    pub(crate) fn idle_since_us(&self) -> u64 {
        self.prefill.head_since_us().max(self.steps_at_us)
    }

    /// Room that is promised to decodes, tokens: a request takes at least its part of those that decode at a time.
    pub(crate) fn taken_tokens(&self) -> u64 {
        let reserved_tokens = self.decode.reserved_tokens();
        let Some(most) = self.spec.max_running else { return reserved_tokens };
        let part_tokens = self.spec.capacity_tokens / u64::from(most.max(1));
        reserved_tokens.max(part_tokens.saturating_mul(self.decode.all().0.into()))
    }

    /// Whether it has an engine; an instance without one can only store.
    pub(crate) const fn computes(&self) -> bool {
        self.spec.pass_tokens > 0
    }

    /// Whether no request holds anything here.
    pub(crate) fn owes_nothing(&self) -> bool {
        let queued = self.prefill.waiting().len() + self.prefill.dispatched().len();
        queued + self.decode.slots().len() == 0
    }

    pub(crate) fn serves(&self) -> bool {
        self.state == InstanceState::Serving
    }

    /// Whether it decodes, and may prefill what it decodes.
    pub(crate) fn mixes(&self) -> bool {
        self.spec.role == Role::Decode && self.spec.mixed_chunk_tokens != Some(0)
    }

    /// Bytes of KV for `tokens` tokens of this instance's model.
    pub(crate) fn kv_bytes(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(self.spec.profile.kv_bytes_per_token)
    }

    /// Backlog of its engine before work that is appended now, µs.
    pub(crate) fn backlog_us(&self, now_us: u64) -> u64 {
        self.prefill.computing_left_us(now_us) + self.prefill.waiting_us()
    }
}

/// Every instance ever seen, by id; lost ones keep their place.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Fleet {
    instances: Vec<Option<Instance>>,
    /// Ids that may take a prefill as the first leg, ascending.
    pub prefills: Vec<InstanceId>,
    /// Whether some of these do not decode.
    #[serde(default)]
    pub prefills_apart: bool,
    /// Ids that may decode, ascending.
    pub decodes: Vec<InstanceId>,
    /// Ids that lend room and compute nothing, ascending.
    pub stores: Vec<InstanceId>,
    /// KV tokens that the largest decode instance holds.
    pub largest_decode_tokens: u64,
    /// What a decode step with prompt tokens in it may take, µs.
    #[serde(skip)]
    step_target_us: u64,
    /// Orders of its instances, if it is large.
    #[serde(skip)]
    orders: Option<Box<FleetOrders>>,
}

/// An instance that is being changed: at the end its positions in the fleet's orders follow.
pub(crate) struct InstanceChange<'a> {
    fleet: &'a mut Fleet,
    at: usize,
}

impl Deref for InstanceChange<'_> {
    type Target = Instance;
    fn deref(&self) -> &Instance {
        self.fleet.instances[self.at].as_ref().expect("looked up when the change began")
    }
}

impl DerefMut for InstanceChange<'_> {
    fn deref_mut(&mut self) -> &mut Instance {
        self.fleet.instances[self.at].as_mut().expect("looked up when the change began")
    }
}

impl Drop for InstanceChange<'_> {
    fn drop(&mut self) {
        self.fleet.reorder(self.at);
    }
}

impl Fleet {
    /// Orders the instances, which a saved fleet does not have in order, by what a step with prompt tokens in it may take.
    pub(crate) fn keep_orders(&mut self, step_target_us: u64) {
        self.step_target_us = step_target_us;
        self.orders = self.present_orders();
    }

    /// The orders of a large fleet as its instances are now.
    fn present_orders(&self) -> Option<Box<FleetOrders>> {
        let large = self.instances.len() > orders::KEPT_BEYOND;
        large.then(|| Box::new(FleetOrders::of(self.iter(), self.step_target_us)))
    }

    /// Puts an instance where it belongs now.
    fn reorder(&mut self, at: usize) {
        if let (Some(orders), Some(instance)) = (&mut self.orders, &self.instances[at]) {
            orders.update(instance, self.step_target_us);
        }
    }

    /// The orders of the instances, if the fleet is large.
    pub(crate) fn orders(&self) -> Option<&FleetOrders> {
        self.orders.as_deref()
    }

    /// Adds or replaces an instance; false when the epoch is not newer than the known one, or the
    /// id is beyond what the index takes (ids are dense: each one below it costs memory).
    pub(crate) fn join(&mut self, spec: InstanceSpec) -> bool {
        let at = spec.id.index();
        if spec.id.0 >= crate::index::MAX_INSTANCES {
            return false;
        }
        if at >= self.instances.len() {
            self.instances.resize_with(at + 1, || None);
        }
        if let Some(known) = &self.instances[at] {
            if known.spec.epoch >= spec.epoch {
                return false;
            }
            assert!(known.owes_nothing(), "instance {} begins anew while its last life has work", spec.id);
        }
        self.instances[at] = Some(Instance::new(spec));
        self.rebuild_pools();
        if self.orders.is_none() {
            self.orders = self.present_orders();
        }
        self.reorder(at);
        true
    }

    /// Changes an instance's state.
    pub(crate) fn set_state(&mut self, id: InstanceId, state: InstanceState) {
        let mut instance = self.known_mut(id);
        assert!(
            instance.state != InstanceState::Lost,
            "instance {id} is gone; only a new life brings it back"
        );
        instance.state = state;
        drop(instance);
        self.rebuild_pools();
    }

    /// Changes an instance's role in a stretch of demand; its work stays with it.
    pub(crate) fn set_role(&mut self, id: InstanceId, role: Role, stretch: u64) {
        let mut instance = self.known_mut(id);
        (instance.spec.role, instance.role_since) = (role, stretch);
        drop(instance);
        self.rebuild_pools();
    }

    fn rebuild_pools(&mut self) {
        (self.prefills, self.decodes, self.stores, self.largest_decode_tokens) = self.pools();
        self.prefills_apart = self.has_prefills_apart();
    }

    fn has_prefills_apart(&self) -> bool {
        self.iter().any(|i| i.serves() && i.spec.role == Role::Prefill)
    }

    /// Instances that may prefill, decode and store, and the most tokens that one decode instance holds.
    fn pools(&self) -> (Vec<InstanceId>, Vec<InstanceId>, Vec<InstanceId>, u64) {
        let pool = |wanted: fn(Role) -> bool| {
            self.iter().filter(|i| i.serves() && wanted(i.spec.role)).map(|i| i.spec.id).collect()
        };
        let (prefills, decodes): (Vec<_>, Vec<_>) = (pool(Role::prefills), pool(Role::decodes));
        let stores: Vec<_> = pool(|role| role == Role::Store);
        let capacity = |id: &InstanceId| self.get(*id).map_or(0, |i| i.spec.capacity_tokens);
        let largest_decode_tokens = decodes.iter().map(capacity).max().unwrap_or(0);
        (prefills, decodes, stores, largest_decode_tokens)
    }

    /// Checks that each instance has its position, and that the pools match roles and states.
    ///
    /// # Errors
    /// Names the first instance that is misplaced, or the pool that is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        let places = self.instances.iter().enumerate().filter_map(|(at, i)| i.as_ref().map(|i| (at, i)));
        for (at, instance) in places {
            if instance.spec.id.index() != at {
                return Err(format!("instance {} stands in place {at}", instance.spec.id));
            }
        }
        if let Some(i) = self.iter().find(|i| !(0.0..=1e18).contains(&i.steps)) {
            return Err(format!("instance {} has made {} steps", i.spec.id, i.steps));
        }
        if self.orders != self.present_orders() {
            return Err(String::from("the orders of instances are not what their ledgers say"));
        }
        let (prefills, decodes, stores, largest) = self.pools();
        let same = self.prefills == prefills && self.decodes == decodes && self.stores == stores;
        if same && self.largest_decode_tokens == largest && self.prefills_apart == self.has_prefills_apart() {
            Ok(())
        } else {
            Err(String::from("the pools of instances are not what roles and states say"))
        }
    }

    pub(crate) fn get(&self, id: InstanceId) -> Option<&Instance> {
        self.instances.get(id.index())?.as_ref()
    }

    /// Whether KV may go from one instance to the other.
    pub(crate) fn share(&self, one: InstanceId, other: InstanceId) -> bool {
        let both = self.get(one).zip(self.get(other));
        both.is_some_and(|(one, other)| one.spec.kind == other.spec.kind)
    }

    /// Serving instances that decode what is prefilled on `from`. In a large fleet those with the least promised tokens
    /// come first.
    pub(crate) fn decodes_of(&self, from: InstanceId) -> impl Iterator<Item = InstanceId> {
        let kind = self.get(from).map(|i| i.spec.kind);
        let of_kind = move |id: &InstanceId| self.get(*id).map(|i| i.spec.kind) == kind;
        let ordered = self.orders().zip(kind).map(|(orders, kind)| orders.roomiest(kind));
        let all = self.orders.is_none().then(|| self.decodes.iter().copied().filter(of_kind));
        ordered.into_iter().flatten().chain(all.into_iter().flatten())
    }

    /// The least fair-share tag of all waiting requests.
    pub(crate) fn least_tag_us(&self) -> Option<u64> {
        match self.orders() {
            Some(orders) => orders.least_tag_us(),
            None => self.iter().flat_map(|i| i.prefill.waiting()).map(|w| w.tag_us).min(),
        }
    }

    /// Requests of this router that are held back for want of room, the oldest first, with their arrivals.
    pub(crate) fn held(&self) -> Vec<(u64, RequestId)> {
        let mut held: Vec<_> = match self.orders() {
            Some(orders) => orders.held().flat_map(|id| self.known(id).prefill.held()).collect(),
            None => self.iter().flat_map(|i| i.prefill.held()).collect(),
        };
        held.sort_unstable();
        held
    }

    pub(crate) fn get_mut(&mut self, id: InstanceId) -> Option<InstanceChange<'_>> {
        self.get(id)?;
        Some(InstanceChange { fleet: self, at: id.index() })
    }

    /// An instance that a live request or a placement refers to. Lost instances keep their entry.
    pub(crate) fn known(&self, id: InstanceId) -> &Instance {
        self.get(id).expect("an instance that is spoken of is known")
    }

    /// See [`Self::known`].
    pub(crate) fn known_mut(&mut self, id: InstanceId) -> InstanceChange<'_> {
        self.get_mut(id).expect("an instance that is spoken of is known")
    }

    /// One past the highest id.
    pub(crate) fn bound(&self) -> usize {
        self.instances.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Instance> {
        self.instances.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::spec;

    #[test]
    fn pools_follow_roles_and_states() {
        let mut fleet = Fleet::default();
        assert!(fleet.join(spec(0, Role::Prefill)));
        assert!(fleet.join(spec(2, Role::Decode)));
        assert!(fleet.join(spec(3, Role::Both)));
        assert_eq!(fleet.prefills, [InstanceId(0), InstanceId(3)]);
        assert_eq!(fleet.decodes, [InstanceId(2), InstanceId(3)]);
        fleet.set_state(InstanceId(3), InstanceState::Draining);
        assert_eq!(fleet.decodes, [InstanceId(2)]);
        assert!(fleet.get(InstanceId(1)).is_none() && fleet.bound() == 4);
    }

    #[test]
    fn an_older_epoch_does_not_replace_a_newer_life() {
        let mut fleet = Fleet::default();
        let newer = InstanceSpec { epoch: Epoch(5), ..spec(0, Role::Prefill) };
        assert!(fleet.join(newer));
        assert!(!fleet.join(spec(0, Role::Prefill)));
        assert!(!fleet.join(InstanceSpec { epoch: Epoch(5), ..spec(0, Role::Prefill) }));
        assert!(fleet.join(InstanceSpec { epoch: Epoch(6), ..spec(0, Role::Prefill) }));
    }
}
