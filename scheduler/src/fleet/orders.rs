//! Orders of the instances of a large fleet. They are kept as ledgers change, so that a decision looks at a few
//! instances and not at all.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use baton_types::InstanceId;

use super::Instance;
use crate::estimate::{NEVER_US, prefill_work};

/// A fleet with more instances than this keeps orders. Every decision in a smaller one looks at all, which costs less
/// there. In tests nearly every fleet keeps them, so each is compared with the ledgers.
pub(super) const KEPT_BEYOND: usize = if cfg!(test) { 2 } else { 24 };

/// Instances are compared by their time for a prompt of this length.
const USUAL_TOKENS: u64 = 8192;

/// The positions of one instance in the orders; none in those that it is not in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Keys {
    /// Of those that may take a prefill as the first leg: when it has done all its prefills and one more.
    prefill: Option<u64>,
    /// The same, of those that may prefill what they decode.
    local: Option<u64>,
    /// Of those that decode: its kind, and by how much more tokens are promised than there is room for.
    room: Option<(u32, i128)>,
    /// The least fair-share tag of its waiting requests.
    tag: Option<u64>,
    /// Whether a request waits there for room.
    held: Option<()>,
    /// Time for the one more prefill, µs.
    work_us: u64,
}

impl Keys {
    fn of(instance: &Instance, step_target_us: u64) -> Self {
        let (spec, serves) = (&instance.spec, instance.serves());
        let prefills = serves && spec.role.prefills();
        let local = serves && instance.mixes();
        let mut work_us = 0;
        if prefills || local {
            let work = prefill_work(instance, (USUAL_TOKENS, 0), 0, step_target_us);
            work_us = if work.breaks_decodes { NEVER_US } else { work.us };
        }
        let ready_us = instance.prefill.free_at_us().saturating_add(work_us);
        Self {
            prefill: prefills.then_some(ready_us),
            local: local.then_some(ready_us),
            room: (serves && spec.role.decodes()).then(|| (spec.kind, beyond_room(instance))),
            tag: instance.prefill.waiting().iter().map(|w| w.tag_us).min(),
            held: instance.prefill.held().next().map(|_| ()),
            work_us,
        }
    }
}

/// Tokens promised to decodes beyond an instance's room; below zero where room is left.
fn beyond_room(instance: &Instance) -> i128 {
    i128::from(instance.taken_tokens()) - i128::from(instance.spec.capacity_tokens)
}

/// Instances in ascending order of a key, of equals the lowest id first.
type Order<K> = BTreeSet<(K, InstanceId)>;

/// Moves an instance within an order.
fn reorder<K: Copy + Ord>(order: &mut Order<K>, id: InstanceId, before: Option<K>, after: Option<K>) {
    if before == after {
        return;
    }
    if let Some(key) = before {
        let known = order.remove(&(key, id));
        assert!(known, "instance {id} is not where its order has it");
    }
    order.extend(after.map(|key| (key, id)));
}

/// All orders of a fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FleetOrders {
    keys: Vec<Keys>,
    prefills: Order<u64>,
    locals: Order<u64>,
    rooms: Order<(u32, i128)>,
    tags: Order<u64>,
    held: Order<()>,
}

impl FleetOrders {
    /// The orders of these instances, from their present state.
    pub(super) fn of<'a>(instances: impl Iterator<Item = &'a Instance>, step_target_us: u64) -> Self {
        let mut orders = Self::default();
        instances.for_each(|instance| orders.update(instance, step_target_us));
        orders
    }

    /// Moves an instance to its present positions.
    pub(super) fn update(&mut self, instance: &Instance, step_target_us: u64) {
        let id = instance.spec.id;
        if self.keys.len() <= id.index() {
            self.keys.resize(id.index() + 1, Keys::default());
        }
        let after = Keys::of(instance, step_target_us);
        let before = core::mem::replace(&mut self.keys[id.index()], after);
        reorder(&mut self.prefills, id, before.prefill, after.prefill);
        reorder(&mut self.locals, id, before.local, after.local);
        reorder(&mut self.rooms, id, before.room, after.room);
        reorder(&mut self.tags, id, before.tag, after.tag);
        reorder(&mut self.held, id, before.held, after.held);
    }

    /// How many instances may take a prefill as the first leg, and how many may prefill what they decode.
    pub(crate) fn prefilling(&self) -> (usize, usize) {
        (self.prefills.len(), self.locals.len())
    }

    /// Instances that may take a prefill as the first leg, the soonest ready first.
    pub(crate) fn prefills(&self) -> impl Iterator<Item = InstanceId> {
        self.prefills.iter().map(|(_, id)| *id)
    }

    /// Instances that may prefill what they decode, the soonest ready first.
    pub(crate) fn locals(&self) -> impl Iterator<Item = InstanceId> {
        self.locals.iter().map(|(_, id)| *id)
    }

    /// Decode instances of a kind, the one with the most room left first.
    pub(super) fn roomiest(&self, kind: u32) -> impl Iterator<Item = InstanceId> {
        let (least, most) = (((kind, i128::MIN), InstanceId(0)), ((kind, i128::MAX), InstanceId(u32::MAX)));
        self.rooms.range(least..=most).map(|(_, id)| *id)
    }

    /// The least fair-share tag of all waiting requests.
    pub(super) fn least_tag_us(&self) -> Option<u64> {
        self.tags.first().map(|(tag_us, _)| *tag_us)
    }

    /// Instances where a request waits for room.
    pub(super) fn held(&self) -> impl Iterator<Item = InstanceId> {
        self.held.iter().map(|(_, id)| *id)
    }

    /// Whether an instance may take a prefill as the first leg.
    pub(crate) fn is_prefill(&self, id: InstanceId) -> bool {
        self.keys[id.index()].prefill.is_some()
    }

    /// Whether an instance may prefill what it decodes.
    pub(crate) fn is_local(&self, id: InstanceId) -> bool {
        self.keys[id.index()].local.is_some()
    }

    /// About how long a prefill of so many new tokens takes on an instance with the wait for it, µs. `None` where none
    /// is taken.
    pub(crate) fn about_us(&self, id: InstanceId, now_us: u64, new_tokens: u64) -> Option<u64> {
        let keys = self.keys.get(id.index())?;
        let ready_us = keys.prefill.or(keys.local)?;
        let wait_us = ready_us.saturating_sub(keys.work_us).saturating_sub(now_us);
        Some(wait_us.saturating_add(keys.work_us / USUAL_TOKENS * new_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InstanceState;
    use crate::estimate::{ChainPosition, DecodeSlot};
    use crate::fleet::{Fleet, InstanceSpec};
    use crate::queue::{DispatchedPrefill, WaitingPrefill};
    use crate::testing::spec;
    use baton_types::{Epoch, RequestId, Role, TenantId};
    use proptest::prelude::*;

    const TARGET_US: u64 = 90_000;

    fn waiting(id: u64, work_us: u64) -> WaitingPrefill {
        WaitingPrefill {
            request: RequestId(id),
            work_us,
            alone_us: work_us,
            new_tokens: work_us,
            arrived_us: id,
            deadline_us: 10 * work_us,
            order_us: 10 * work_us,
            priority: 0,
            tenant: TenantId(0),
            weight: 1,
            held_until_us: if id.is_multiple_of(3) { u64::MAX } else { 0 },
            tag_us: work_us % 17,
            since_us: 0,
            peer: None,
            after: None,
        }
    }

    fn slot(id: u64, tokens: u64) -> DecodeSlot {
        DecodeSlot {
            request: RequestId(id),
            priority: 0,
            start_us: 0,
            finish_us: 100,
            due_us: 0,
            context_tokens: tokens,
            output_tokens: 0,
            reserved_tokens: tokens,
            common_tokens: 0,
            running: false,
            waits: false,
            held: false,
        }
    }

    /// One change of an instance; `id` names a new request.
    fn change(fleet: &mut Fleet, (act, at, size): (u8, u32, u64), id: u64) {
        let at = InstanceId(at);
        let known = fleet.get(at).map(|i| (i.state, i.owes_nothing(), i.spec.epoch));
        match (act, known) {
            (0, _) if known.is_none_or(|(_, idle, _)| idle) => {
                let role = [Role::Prefill, Role::Decode, Role::Both, Role::Store][size as usize % 4];
                let epoch = Epoch(known.map_or(1, |(.., epoch)| epoch.0 + 1));
                let chunk = [None, Some(0), Some(512)][size as usize % 3];
                let kind = at.0 % 2;
                assert!(fleet.join(InstanceSpec {
                    epoch,
                    kind,
                    capacity_tokens: 1_000_000 * (1 + size % 5),
                    mixed_chunk_tokens: chunk,
                    ..spec(at.0, role)
                }));
            }
            (1, Some((state, ..))) if state != InstanceState::Lost => {
                let next = if state == InstanceState::Serving {
                    InstanceState::Draining
                } else {
                    InstanceState::Serving
                };
                fleet.set_state(at, next);
            }
            (2, Some(_)) => fleet.set_role(at, if size % 2 == 0 { Role::Both } else { Role::Decode }, 0),
            (3, Some(_)) => fleet.known_mut(at).prefill.enqueue(waiting(id, size)),
            (4, Some(_)) if !fleet.known(at).prefill.waiting().is_empty() => {
                _ = fleet.known_mut(at).prefill.take_waiting(0);
            }
            (5, Some(_)) => {
                let work = DispatchedPrefill {
                    request: RequestId(id),
                    work_us: size,
                    new_tokens: 1,
                    deadline_us: 0,
                    sent_us: id,
                    beside_tokens: 0,
                };
                fleet.known_mut(at).prefill.dispatch(work);
            }
            (6, Some(_)) => {
                let sent = fleet.known(at).prefill.dispatched().first().map(|d| d.request);
                sent.into_iter().for_each(|sent| _ = fleet.known_mut(at).prefill.finish(id, sent));
            }
            (7, Some(_)) => fleet.known_mut(at).decode.reserve(slot(id, size), ChainPosition::default()),
            (8, Some(_)) => {
                let first = fleet.known(at).decode.slots().first().map(|s| s.request);
                first.into_iter().for_each(|first| _ = fleet.known_mut(at).decode.release(first));
            }
            (9, Some(_)) => fleet.known_mut(at).prefill_residual.observe(1e6, size as f64),
            _ => {}
        }
    }

    /// Ids of the instances that are wanted, by a key computed from each anew.
    fn sorted<K: Ord>(
        fleet: &Fleet,
        wanted: impl Fn(&Instance) -> bool,
        key: impl Fn(&Instance) -> K,
    ) -> Vec<InstanceId> {
        let mut all: Vec<_> = fleet.iter().filter(|i| wanted(i)).map(|i| (key(i), i.spec.id)).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, id)| id).collect()
    }

    fn ready_us(i: &Instance) -> u64 {
        let sent_us = i.prefill.dispatched().iter().map(|d| d.work_us).sum::<u64>();
        let begun_us = if sent_us == 0 && i.prefill.dispatched().is_empty() {
            0
        } else {
            i.prefill.runs_low_at_us(0) - sent_us
        };
        let one = prefill_work(i, (8192, 0), 0, TARGET_US);
        begun_us + sent_us + i.prefill.waiting_us() + if one.breaks_decodes { NEVER_US } else { one.us }
    }

    proptest! {
        #[test]
        fn orders_are_those_of_all_instances_sorted_anew(
            ops in proptest::collection::vec((0u8..10, 0u32..12, 1u64..5_000_000), 1..150),
        ) {
            let mut fleet = Fleet::default();
            fleet.keep_orders(TARGET_US);
            for (id, op) in (1..).zip(ops) {
                change(&mut fleet, op, id);
                prop_assert_eq!(fleet.check(), Ok(()));
                prop_assert_eq!(fleet.orders().is_some(), fleet.bound() > 2);
                let Some(orders) = fleet.orders() else { continue };
                let prefills = sorted(&fleet, |i| i.serves() && matches!(i.spec.role, Role::Prefill | Role::Both), ready_us);
                prop_assert_eq!(orders.prefills().collect::<Vec<_>>(), prefills.clone());
                let mixes = |i: &Instance| i.spec.role == Role::Decode && i.spec.mixed_chunk_tokens != Some(0);
                let locals = sorted(&fleet, |i| i.serves() && mixes(i), ready_us);
                prop_assert_eq!(orders.prefilling(), (prefills.len(), locals.len()));
                prop_assert_eq!(orders.locals().collect::<Vec<_>>(), locals);
                for from in fleet.iter().map(|i| i.spec.id) {
                    let decodes = |i: &Instance| {
                        i.serves() && matches!(i.spec.role, Role::Decode | Role::Both) && i.spec.kind == from.0 % 2
                    };
                    let left = |i: &Instance| {
                        let promised: u64 = i.decode.slots().iter().map(|s| s.reserved_tokens).sum();
                        i128::from(i.spec.capacity_tokens) - i128::from(promised)
                    };
                    let rooms = sorted(&fleet, decodes, |i| core::cmp::Reverse(left(i)));
                    prop_assert_eq!(fleet.decodes_of(from).collect::<Vec<_>>(), rooms);
                }
                let waiting = || fleet.iter().flat_map(|i| i.prefill.waiting());
                prop_assert_eq!(fleet.least_tag_us(), waiting().map(|w| w.tag_us).min());
                let mut held: Vec<_> =
                    waiting().filter(|w| w.held_until_us > 0).map(|w| (w.arrived_us, w.request)).collect();
                held.sort_unstable();
                prop_assert_eq!(fleet.held(), held);
            }
        }
    }
}
