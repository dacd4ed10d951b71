//! Roles by forecast: how many instances should prefill and how many decode, and which instance changes its role.
//!
//! Demand is what arrives, refused requests included, so a part that refuses is seen to be short. It is taken over the
//! last minutes. A fluid model says how much of each part it takes: prefill time against what the instances have, and
//! for decodes the step time and the room of as many answers as are under way at once (Little 1961). The *pressure* on a
//! part is demand over what is there; at 1 it is used up. An instance that may do both parts changes its role where the
//! greater of the two pressures falls well by it.

use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{ClassId, InstanceId, Role};
use serde::{Deserialize, Serialize};

use crate::conductor::Conductor;
use crate::estimate::prior_us;
use crate::fleet::Instance;
use crate::{Effect, Input, RejectReason, Request};

/// Demand is counted in stretches of this length, µs. At most one instance changes its role in each.
const STRETCH_US: u64 = 10_000_000;
/// Stretches that are remembered: two minutes, as long as an instance keeps a role.
const STRETCHES: usize = 12;
/// Stretches that must have been seen before a role changes.
const LEAST_STRETCHES: u64 = 3;
/// A role changes where the greater pressure falls to this share of itself or less.
const WORTHWHILE: f64 = 0.85;
/// Below this pressure no role changes: both parts have what they need.
const AT_EASE: f64 = 0.8;
/// A pressure beyond this counts as this: the demand has no bound in the model.
const UTMOST: f64 = 100.0;
/// Rounds until step time and batch agree; each halves the difference or better, except near the utmost pressure.
const ROUNDS: usize = 24;
/// Instances are compared by their time for a prompt of this length, tokens.
const USUAL_TOKENS: u64 = 8192;

/// What the requests of some time ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Demand {
    /// Prefill time on one instance, µs.
    prefill_us: u64,
    /// Output tokens.
    output_tokens: u64,
    /// Context, summed over the steps of their decodes, tokens.
    context_tokens: u64,
    /// Room, summed over the steps of their decodes, tokens.
    room_tokens: u64,
}

impl Demand {
    const fn add(&mut self, other: Self) {
        self.prefill_us = self.prefill_us.saturating_add(other.prefill_us);
        self.output_tokens = self.output_tokens.saturating_add(other.output_tokens);
        self.context_tokens = self.context_tokens.saturating_add(other.context_tokens);
        self.room_tokens = self.room_tokens.saturating_add(other.room_tokens);
    }
}

/// The demand of the last minutes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DemandWindow {
    /// The number of the present stretch since time began.
    stretch: u64,
    /// The number of the first stretch that was seen without a gap.
    since: u64,
    /// By class, then by the number of the stretch, modulo their number.
    classes: Vec<[Demand; STRETCHES]>,
    /// Requests refused for want of a part, by the number of the stretch like those above.
    refusals: [RefusalCounts; STRETCHES],
}

/// Requests refused for want of prefill time, and of room or step time for their decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct RefusalCounts {
    prefill: u32,
    decode: u32,
}

impl DemandWindow {
    /// The number of the present stretch.
    pub(crate) const fn stretch(&self) -> u64 {
        self.stretch
    }

    /// Moves on to the present stretch; true where one has ended.
    fn move_on(&mut self, now_us: u64) -> bool {
        let stretch = now_us / STRETCH_US;
        if stretch == self.stretch {
            return false;
        }
        if stretch - self.stretch >= STRETCHES as u64 {
            *self = Self { stretch, since: stretch, ..Self::default() };
            return false;
        }
        while self.stretch < stretch {
            self.stretch += 1;
            let present = self.present();
            self.classes.iter_mut().for_each(|stretches| stretches[present] = Demand::default());
            self.refusals[present] = RefusalCounts::default();
        }
        true
    }

    fn present(&self) -> usize {
        usize::try_from(self.stretch % STRETCHES as u64).expect("below their number")
    }

    fn add(&mut self, class: ClassId, demand: Demand) {
        if self.classes.len() <= class.index() {
            self.classes.resize(class.index() + 1, <[Demand; STRETCHES]>::default());
        }
        let present = self.present();
        self.classes[class.index()][present].add(demand);
    }

    /// Counts a refusal, if it was for want of one of the parts.
    pub(crate) fn refused(&mut self, reason: RejectReason) {
        let present = self.present();
        let counts = &mut self.refusals[present];
        let count = match reason {
            RejectReason::Ttft => &mut counts.prefill,
            RejectReason::Tbt | RejectReason::Room => &mut counts.decode,
            RejectReason::QueueFull | RejectReason::NoInstance | RejectReason::TooLong => return,
            RejectReason::Costly | RejectReason::Unreachable => return,
        };
        // A saved one may say anything.
        *count = count.saturating_add(1);
    }

    /// Whether decodes are what the cluster is short of: of the requests refused in the whole window, more were refused
    /// for want of them than for want of prefill time.
    pub(crate) fn lacks_decodes(&self) -> bool {
        let sum = |of: fn(&RefusalCounts) -> u32| self.refusals.iter().map(of).map(u64::from).sum::<u64>();
        sum(|counts| counts.decode) > sum(|counts| counts.prefill)
    }

    /// Follows a change of the classes: a class of the same name keeps its demand.
    pub(crate) fn reclass(&mut self, old: &[String], new: &[String]) {
        let before = core::mem::take(&mut self.classes);
        let of = |name| old.iter().position(|o| o == name).and_then(|at| before.get(at).copied());
        self.classes = new.iter().map(|name| of(name).unwrap_or_default()).collect();
    }

    /// Whether it is of no more than so many classes, and of no time to come: what was read may be anything.
    pub(crate) const fn is_sound(&self, classes: usize, now_us: u64) -> bool {
        self.classes.len() <= classes && self.since <= self.stretch && self.stretch <= now_us / STRETCH_US
    }

    /// Demand of a µs of some classes, from the whole window: prefill time, output tokens, context and room. `None` until
    /// enough was seen.
    #[expect(clippy::cast_precision_loss, reason = "sums of some minutes are far below 2^53")]
    pub(crate) fn rates(&self, now_us: u64, of: impl Fn(ClassId) -> bool) -> Option<[f64; 4]> {
        let seen = self.stretch - self.since;
        if seen < LEAST_STRETCHES {
            return None;
        }
        let whole = seen.min(STRETCHES as u64 - 1);
        let window_us = (whole * STRETCH_US + now_us % STRETCH_US) as f64;
        let mut sum = Demand::default();
        let counted = (0..).map(ClassId).zip(&self.classes).filter(|(class, _)| of(*class));
        counted.flat_map(|(_, stretches)| stretches).for_each(|stretch| sum.add(*stretch));
        let Demand { prefill_us, output_tokens, context_tokens, room_tokens } = sum;
        Some([prefill_us, output_tokens, context_tokens, room_tokens].map(|sum| sum as f64 / window_us))
    }
}

/// What the instances of a cluster have, by part.
#[derive(Clone, Copy, Debug, Default)]
struct Supply {
    /// Instances that only prefill, in instances of usual speed.
    prefills: f64,
    /// Instances that decode.
    decodes: f64,
    /// Those of them that prefill too, in instances of usual speed without decodes.
    mixing: f64,
    /// Room of those that decode, tokens.
    room_tokens: f64,
}

impl Supply {
    /// This, and so many times another.
    fn plus(&self, other: &Self, times: f64) -> Self {
        Self {
            prefills: self.prefills + times * other.prefills,
            decodes: self.decodes + times * other.decodes,
            mixing: self.mixing + times * other.mixing,
            room_tokens: self.room_tokens + times * other.room_tokens,
        }
    }
}

/// How much of each part is used up, and how many instances of each the demand asks for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleAdvice {
    /// Demand of prefill time over what there is; 1 means used up.
    pub prefill_pressure: f64,
    /// The same of decodes: of step time or room, whichever is scarcer.
    pub decode_pressure: f64,
    /// Instances that should prefill, of those that do one part only.
    pub prefills: u32,
    /// Instances that should decode, of those that do one part only.
    pub decodes: u32,
}

/// How much of each part a demand uses up.
#[derive(Clone, Copy, Debug)]
struct Pressures {
    prefill: f64,
    decode: f64,
}

impl Pressures {
    const fn greater(&self) -> f64 {
        self.prefill.max(self.decode)
    }
}

impl Conductor {
    /// Counts what a request asks for that was just placed or refused.
    pub(crate) fn note_demand(&mut self, request: &Request, new_tokens: Option<u64>) {
        let Some(usual) = self.usual() else { return };
        let found = || self.hits.sources().first().map_or(0, |(blocks, _)| self.tokens_of(request, *blocks));
        let new = new_tokens.unwrap_or_else(|| request.prompt_tokens - found());
        let alone_us = usual.spec.profile.chunked_prefill_us(
            new,
            request.prompt_tokens.saturating_sub(new),
            usual.spec.pass_tokens.into(),
        );
        let tokens = u64::from(self.expected_tokens(request));
        let room = self.reserved_for(request.prompt_tokens, self.room_tokens(request));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive time")]
        let demand = Demand {
            prefill_us: alone_us as u64,
            output_tokens: tokens,
            context_tokens: tokens.saturating_mul(request.prompt_tokens + tokens / 2),
            room_tokens: tokens.saturating_mul(room),
        };
        self.demand.add(request.class, demand);
    }

    /// Gives an instance another role where the demand of the last minutes asks for it. At the end of each stretch.
    pub(crate) fn review_roles(&mut self, effects: &mut Vec<Effect>) {
        if !self.demand.move_on(self.now_us) || self.router.is_some_and(|router| router > 0) {
            return;
        }
        let Some((instance, role)) = self.role_to_change() else { return };
        self.stats.role_changes += 1;
        effects.push(Effect::ChangeRole { instance, role });
        self.share(Input::RoleChanged { instance, role }, effects);
        self.role_changed(instance, role, effects);
    }

    /// What the demand of the last minutes asks for. `None` until enough was seen, or where no instance computes.
    #[must_use]
    pub fn role_advice(&self) -> Option<RoleAdvice> {
        let rates = self.demand.rates(self.now_us, |_| true)?;
        let count = |role: Role| self.fleet.iter().filter(move |i| i.serves() && i.spec.role == role);
        let supply = self.supply();
        let now = self.pressures(&rates, &supply)?;
        let mut least = now.greater();
        let (prefills, decodes) = (count(Role::Prefill).count(), count(Role::Decode).count());
        let (mut at, mut whole) = (prefills, supply);
        // One after another moves as long as that helps: the greater pressure has one least value.
        let change = self.mean_change();
        for (sign, possible) in [(1.0, decodes), (-1.0, prefills)] {
            for _ in 1..possible {
                let moved = whole.plus(&change, sign);
                let Some(after) = self.pressures(&rates, &moved) else { break };
                if after.greater() >= least * WORTHWHILE {
                    break;
                }
                (least, whole) = (after.greater(), moved);
                at = if sign > 0.0 { at + 1 } else { at - 1 };
            }
        }
        let as_count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Some(RoleAdvice {
            prefill_pressure: now.prefill,
            decode_pressure: now.decode,
            prefills: as_count(at),
            decodes: as_count(prefills + decodes - at),
        })
    }

    /// An instance whose costs stand for all: the first that computes.
    fn usual(&self) -> Option<&Instance> {
        let computing = |ids: &[InstanceId]| ids.first().and_then(|id| self.fleet.get(*id));
        computing(&self.fleet.prefills).or_else(|| computing(&self.fleet.decodes))
    }

    /// An instance's prefill speed beside the usual one.
    fn speed(&self, instance: &Instance) -> f64 {
        let time_us = |i: &Instance| {
            let passes = i.spec.profile.chunked_prefill_us(USUAL_TOKENS, 0, i.spec.pass_tokens.into());
            passes / f64::from(i.spec.pipeline_nodes.max(1))
        };
        let usual_us = self.usual().map_or(1.0, time_us);
        usual_us / (time_us(instance) * instance.prefill_residual.ratio()).max(1.0)
    }

    fn supply(&self) -> Supply {
        let mut supply = Supply::default();
        for instance in self.fleet.iter().filter(|i| i.serves() && i.computes()) {
            self.count_in(&mut supply, instance, instance.spec.role, 1.0);
        }
        supply
    }

    /// Adds an instance in a role, or (`sign` −1) takes it out.
    #[expect(clippy::cast_precision_loss, reason = "room is far below 2^53 tokens")]
    fn count_in(&self, supply: &mut Supply, instance: &Instance, role: Role, sign: f64) {
        let speed = sign * self.speed(instance);
        if role == Role::Prefill {
            supply.prefills += speed;
            return;
        }
        supply.decodes += sign;
        supply.room_tokens += sign * instance.spec.capacity_tokens as f64;
        let local = self.config.local_prefill && self.config.policy.orders_queues();
        if role == Role::Both || (local && instance.spec.mixed_chunk_tokens != Some(0)) {
            supply.mixing += speed;
        }
    }

    /// What becomes of the supply where a decode instance takes the other part, in the mean of the instances with one part.
    fn mean_change(&self) -> Supply {
        let (mut change, mut count) = (Supply::default(), 0.0);
        let single = |i: &&Instance| i.serves() && matches!(i.spec.role, Role::Prefill | Role::Decode);
        for instance in self.fleet.iter().filter(single) {
            count += 1.0;
            self.count_in(&mut change, instance, Role::Prefill, 1.0);
            self.count_in(&mut change, instance, Role::Decode, -1.0);
        }
        Supply::default().plus(&change, 1.0 / f64::max(count, 1.0))
    }

    /// The pressure that demand puts on a supply; `None` where no instance computes.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "loads of one instance"
    )]
    fn pressures(&self, rates: &[f64; 4], supply: &Supply) -> Option<Pressures> {
        let [prefill, tokens, context, room] = *rates;
        let decoding =
            self.fleet.decodes.first().and_then(|id| self.fleet.get(*id)).or_else(|| self.usual())?;
        let (spec, target_us) = (&decoding.spec, self.config.step_target_us());
        let share = 1.0 / supply.decodes.max(0.01);
        let ratio = decoding.decode_residual.ratio();
        let load = |step_us: f64| {
            let (batch, context_tokens) = (tokens * step_us * share, context * step_us * share);
            (libm::ceil(batch.min(1e6)).max(1.0) as u32, context_tokens.min(1e12) as u64)
        };
        let step_of =
            |(batch, context_tokens): (u32, u64)| spec.profile.decode_us(batch, context_tokens) * ratio;
        let mut step_us = step_of((1, 0));
        for _ in 0..ROUNDS {
            let next_us = step_of(load(step_us));
            let settled = next_us <= step_us * 1.001 || next_us > target_us as f64 * UTMOST;
            step_us = next_us;
            if settled {
                break;
            }
        }
        let steps = step_us / (target_us as f64).max(1.0);
        let rooms = room * step_us / supply.room_tokens.max(1.0);
        let decode = steps.max(rooms).min(UTMOST);
        let alone_us = spec.profile.chunked_prefill_us(USUAL_TOKENS, 0, spec.pass_tokens.into());
        let beside_us = self.mixed_prefill_us(decoding, load(step_us));
        let mixing = beside_us.map_or(0.0, |us| supply.mixing * (alone_us / us.max(1.0)).min(1.0));
        let prefill = (prefill / (supply.prefills + mixing).max(0.01)).min(UTMOST);
        Some(Pressures { prefill, decode })
    }

    /// Time of the usual prefill beside such decodes, µs; `None` where their steps leave no time for one.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    fn mixed_prefill_us(&self, decoding: &Instance, beside: (u32, u64)) -> Option<f64> {
        let (spec, target_us) = (&decoding.spec, self.config.step_target_us());
        if let Some(fixed) = spec.mixed_chunk_tokens.filter(|_| spec.role != Role::Both) {
            let tokens = u64::from(fixed).min(USUAL_TOKENS);
            let step_us = spec.profile.decode_us(beside.0, beside.1) + spec.profile.prefill_us(tokens, 0);
            if step_us > target_us as f64 {
                return None;
            }
        }
        prior_us(spec, beside, (USUAL_TOKENS, 0), (0, target_us))
    }

    /// The instance that should change its role, and its new one.
    fn role_to_change(&self) -> Option<(InstanceId, Role)> {
        let able = |i: &&Instance| i.serves() && i.spec.may_change_role && self.leaves_another(i);
        self.fleet.iter().find(able)?;
        let rates = self.demand.rates(self.now_us, |_| true)?;
        let supply = self.supply();
        let now = self.pressures(&rates, &supply)?;
        if now.greater() < AT_EASE {
            return None;
        }
        let mut best = None;
        let mut least = now.greater() * WORTHWHILE;
        for (from, to) in [(Role::Prefill, Role::Decode), (Role::Decode, Role::Prefill)] {
            let load = |i: &&Instance| (i.backlog_us(self.now_us), i.decode.reserved_tokens(), i.spec.id);
            let rested = |i: &&Instance| {
                i.role_since == 0 || i.role_since.saturating_add(STRETCHES as u64) <= self.demand.stretch
            };
            let of_role = self.fleet.iter().filter(able).filter(|i| i.spec.role == from);
            let Some(instance) = of_role.filter(rested).min_by_key(load) else { continue };
            let mut moved = supply;
            self.count_in(&mut moved, instance, from, -1.0);
            self.count_in(&mut moved, instance, to, 1.0);
            let Some(after) = self.pressures(&rates, &moved) else { continue };
            if after.greater() < least {
                least = after.greater();
                best = Some((instance.spec.id, to));
            }
        }
        best
    }

    /// Whether another instance of the same kind and role serves.
    fn leaves_another(&self, instance: &Instance) -> bool {
        let spec = &instance.spec;
        let same = |i: &&Instance| {
            i.serves() && i.spec.id != spec.id && i.spec.role == spec.role && i.spec.kind == spec.kind
        };
        self.fleet.iter().any(|i| same(&i))
    }
}
