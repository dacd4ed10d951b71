//! Tickets: a refused client that returns when it was asked to finds that a place was kept for it.
//!
//! A ticket stands for the request that will return. Until a grace after the time that its client was given, its prefill
//! counts among the promises of the instance that would have taken it, and its decode takes room. Newcomers leave that
//! place alone, and each further refusal names a later time. Not every client returns, so a ticket counts by the share of
//! its class that did, which is learnt: nothing is kept for clients that never do. Before any was due to return, clients are
//! taken at their word.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{ClassId, InstanceId, TenantId};
use core::hash::{BuildHasher, Hasher};
use serde::{Deserialize, Serialize};

use crate::conductor::{Conductor, FixedState, LATEST_US};
use crate::expected::ExpectedLoad;
use crate::placement::{MIN_RETRY_AFTER_US, Refusal};
use crate::queue::WaitingPrefill;
use crate::{Effect, Input, RejectReason, Request};

/// Tickets at a time; a client that is refused beyond these gets a time, and no place is kept for it (I9).
const MAX_TICKETS: usize = 4096;
/// The shortest grace, µs: what a client's clock and the way to it take.
const LEAST_GRACE_US: u64 = 1_000_000;
/// How many outcomes a share follows: of so many it is the mean, with one that returned before them; later each counts for
/// one in so many.
const LEARNS: u64 = 32;
/// Returns of one client that are counted apart.
const RETURNS: usize = 4;
/// A whole, of shares.
const WHOLE: u64 = 1_000_000;
/// Below this share nothing is kept: hardly any of these clients returns.
const LEAST_SHARE: u64 = WHOLE / 4;

/// What is kept for one request: a fact that routers give each other as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ticket {
    /// Names the request, so that it is recognised.
    name: u64,
    class: ClassId,
    tenant: TenantId,
    priority: i32,
    /// Where its tenant's share of the work stands with it: see [`FairShares`](crate::shares::FairShares).
    tag_us: u64,
    /// When it should return, µs.
    from_us: u64,
    /// When it is no longer expected, µs.
    until_us: u64,
    /// The instance that would prefill it, with the work, µs, and the latest moment for its end, µs.
    instance: InstanceId,
    work_us: u64,
    due_us: u64,
    /// From when to when it would decode, µs.
    decode_us: (u64, u64),
    /// What its decode takes, tokens.
    room_tokens: u64,
    context_tokens: u64,
    /// How often its client has returned before.
    returns: u8,
    /// Its client came too early, and was sent away with the same ticket.
    early: bool,
}

impl Ticket {
    fn is_timely(&self) -> bool {
        let (start_us, end_us) = self.decode_us;
        start_us <= end_us && [self.from_us, self.due_us, end_us].iter().all(|us| *us <= LATEST_US)
    }
}

/// Tickets that are neither used nor over.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TicketLedger {
    /// By instance, then by when the prefill is due.
    given: Vec<Ticket>,
    /// Of each class, the share of tickets with which a client returned the first time, the second and so on.
    return_shares: Vec<[ReturnShare; RETURNS]>,
}

/// The share of tickets with which clients returned, as far as it has been seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReturnShare {
    /// The share.
    share: u64,
    /// Outcomes that it is learnt from, up to [`LEARNS`].
    seen: u64,
}

impl Default for ReturnShare {
    fn default() -> Self {
        Self { share: WHOLE, seen: 0 }
    }
}

impl ReturnShare {
    fn learn(&mut self, returned: bool) {
        let weight = (self.seen + 2).min(LEARNS);
        self.share = self.share - self.share / weight + if returned { WHOLE / weight } else { 0 };
        self.seen = (self.seen + 1).min(LEARNS);
    }
}

/// Names a request by what stays the same when its client sends it again.
fn name_of(request: &Request) -> u64 {
    let mut hasher = FixedState.build_hasher();
    for part in [request.tenant.index() as u64, request.class.index() as u64, request.prompt_tokens] {
        hasher.write_u64(part);
    }
    request.chain.last().into_iter().for_each(|last| hasher.write_u64(last.0));
    hasher.finish()
}

fn part_of(whole: u64, share: u64) -> u64 {
    u64::try_from(u128::from(whole) * u128::from(share) / u128::from(WHOLE)).unwrap_or(u64::MAX)
}

impl TicketLedger {
    fn learn(&mut self, ticket: &Ticket, returned: bool) {
        // It was counted when it came too early.
        if ticket.early {
            return;
        }
        if self.return_shares.len() <= ticket.class.index() {
            self.return_shares.resize(ticket.class.index() + 1, <[ReturnShare; RETURNS]>::default());
        }
        let shares = &mut self.return_shares[ticket.class.index()];
        shares[usize::from(ticket.returns).min(RETURNS - 1)].learn(returned);
    }

    /// The share of such tickets with which clients return, or nothing where too few do.
    fn return_share(&self, ticket: &Ticket) -> u64 {
        let shares = self.return_shares.get(ticket.class.index());
        let seen = |shares: &[ReturnShare; RETURNS]| shares[usize::from(ticket.returns).min(RETURNS - 1)];
        let ReturnShare { share, .. } = shares.map_or_else(ReturnShare::default, seen);
        if share < LEAST_SHARE { 0 } else { share }
    }

    /// Forgets tickets whose clients did not return in time, and says how many.
    fn expire(&mut self, now_us: u64) -> u64 {
        let (lasting, over) = self.given.iter().partition(|ticket| now_us <= ticket.until_us);
        let over: Vec<Ticket> = over;
        self.given = lasting;
        over.iter().for_each(|ticket| self.learn(ticket, false));
        over.len() as u64
    }

    /// Takes the ticket of a request that has come, the earliest of several.
    pub(crate) fn take(&mut self, request: &Request) -> Option<Ticket> {
        if self.given.is_empty() { None } else { self.take_named(name_of(request)) }
    }

    /// Takes the earliest ticket of that name.
    pub(crate) fn take_named(&mut self, name: u64) -> Option<Ticket> {
        let own = self.given.iter().enumerate().filter(|(_, ticket)| ticket.name == name);
        let (at, _) = own.min_by_key(|(_, ticket)| ticket.from_us)?;
        let ticket = self.given.remove(at);
        self.learn(&ticket, true);
        Some(ticket)
    }

    /// Keeps a place, unless there are too many.
    fn keep(&mut self, ticket: Ticket) -> bool {
        let takes = [ticket.work_us, ticket.room_tokens, ticket.context_tokens];
        // Larger ones are of a profile that says absurd things: sums stay far from overflow.
        if self.given.len() >= MAX_TICKETS
            || takes.iter().any(|takes| *takes > LATEST_US / MAX_TICKETS as u64)
        {
            return false;
        }
        let key = (ticket.instance, ticket.due_us);
        let at = self.given.partition_point(|other| (other.instance, other.due_us) <= key);
        self.given.insert(at, ticket);
        true
    }

    /// Work for which a tenant has tickets, µs.
    fn work_us(&self, tenant: TenantId) -> u64 {
        let own = self.given.iter().filter(|ticket| ticket.tenant == tenant);
        own.fold(0, |sum_us: u64, ticket| sum_us.saturating_add(ticket.work_us))
    }

    /// Works out which places `binding` tickets keep.
    fn look(&self, binding: impl Fn(&Ticket) -> bool, places: &mut KeptPlaces) {
        places.clear();
        for ticket in self.given.iter().filter(|ticket| binding(ticket)) {
            let share = self.return_share(ticket);
            let Ticket { instance, due_us, work_us: whole_us, .. } = *ticket;
            let work_us = part_of(whole_us, share);
            places.prefills.push(KeptPrefill { instance, due_us, work_us, whole_us });
            let load = [share, WHOLE].map(|share| KeptLoad {
                requests: share,
                room_tokens: part_of(ticket.room_tokens, share),
                context_tokens: part_of(ticket.context_tokens, share),
            });
            places.starts.push((ticket.decode_us.0, load));
            places.ends.push((ticket.decode_us.1, load));
        }
        for side in [&mut places.starts, &mut places.ends] {
            side.sort_unstable_by_key(|(at_us, _)| *at_us);
            let mut sum = [KeptLoad::default(); 2];
            for (_, load) in side.iter_mut() {
                sum = [sum[0].plus(load[0]), sum[1].plus(load[1])];
                *load = sum;
            }
        }
    }

    /// Checks order, bounds and shares: a saved one may say anything.
    ///
    /// # Errors
    /// Says what is off.
    pub(crate) fn check(&self, classes: usize) -> Result<(), String> {
        let sum = |of: fn(&Ticket) -> u64| self.given.iter().map(|t| u128::from(of(t))).sum::<u128>();
        let sums = [sum(|t| t.work_us), sum(|t| t.room_tokens), sum(|t| t.context_tokens)];
        let sound = self.given.len() <= MAX_TICKETS
            && self.given.iter().all(Ticket::is_timely)
            && sums.iter().all(|sum| *sum <= u128::from(LATEST_US))
            && self.given.is_sorted_by_key(|t| (t.instance, t.due_us));
        let shared = self.return_shares.len() <= classes
            && self.return_shares.iter().flatten().all(|of| of.share <= WHOLE && of.seen <= LEARNS)
            && self.given.iter().all(|t| t.class.index() < classes);
        if sound && shared {
            Ok(())
        } else {
            Err(String::from("I9: tickets are out of order or out of bounds"))
        }
    }
}

/// A prefill for which a place is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeptPrefill {
    pub instance: InstanceId,
    /// Latest moment for its end, µs.
    pub due_us: u64,
    /// What it counts for among promises: its work by the chance that its client returns, µs.
    pub work_us: u64,
    /// All of its work, µs.
    pub whole_us: u64,
}

/// What decodes take for which places are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeptLoad {
    /// In millionths.
    requests: u64,
    pub room_tokens: u64,
    pub context_tokens: u64,
}

impl KeptLoad {
    const fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            room_tokens: self.room_tokens + other.room_tokens,
            context_tokens: self.context_tokens + other.context_tokens,
        }
    }

    /// What is left of it when another, which is a part of it, has ended.
    const fn less(self, ended: Self) -> Self {
        Self {
            requests: self.requests - ended.requests,
            room_tokens: self.room_tokens - ended.room_tokens,
            context_tokens: self.context_tokens - ended.context_tokens,
        }
    }

    /// One of so many equal parts.
    fn part(self, parts: usize) -> Self {
        let parts = parts.max(1) as u64;
        Self {
            requests: self.requests / parts,
            room_tokens: self.room_tokens / parts,
            context_tokens: self.context_tokens / parts,
        }
    }

    pub(crate) fn batch(self) -> u32 {
        u32::try_from(self.requests.div_ceil(WHOLE)).unwrap_or(u32::MAX)
    }
}

/// The places that are kept from the request at hand, by tickets and for higher bands: worked out once, and looked at for each candidate.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptPlaces {
    prefills: Vec<KeptPrefill>,
    /// By moment, with all that has started, or ended, by then: by the chance that clients return, and as if all did.
    starts: Vec<(u64, [KeptLoad; 2])>,
    ends: Vec<(u64, [KeptLoad; 2])>,
    /// What decodes of higher bands are expected to take of each decode instance.
    pub expected: Option<ExpectedLoad>,
    /// What has left an instance for the request, to see whether that is enough.
    pub made_way: Option<(InstanceId, Vec<WaitingPrefill>)>,
}

impl KeptPlaces {
    pub(crate) fn clear(&mut self) {
        self.prefills.clear();
        self.starts.clear();
        self.ends.clear();
        self.expected = None;
    }

    /// What has left this instance for the request.
    pub(crate) fn made_way(&self, on: InstanceId) -> &[WaitingPrefill] {
        self.made_way.as_ref().filter(|(from, _)| *from == on).map_or(&[], |(_, left)| left)
    }

    /// Prefills on an instance, by when they are due.
    pub(crate) fn prefills(&self, on: InstanceId) -> &[KeptPrefill] {
        let from = self.prefills.partition_point(|kept| kept.instance < on);
        let to = self.prefills.partition_point(|kept| kept.instance <= on);
        &self.prefills[from..to]
    }

    /// What is kept for decodes at a moment on one of so many decode instances; `whole` as if all clients returned.
    pub(crate) fn decodes_at(&self, at_us: u64, whole: bool, instances: usize) -> KeptLoad {
        let sum = |side: &[(u64, [KeptLoad; 2])]| {
            let past = side.partition_point(|(us, _)| *us <= at_us);
            past.checked_sub(1).map_or(KeptLoad::default(), |last| side[last].1[usize::from(whole)])
        };
        sum(&self.starts).less(sum(&self.ends)).part(instances)
    }

    /// What is kept for decodes on one of so many instances, whenever they decode.
    pub(crate) fn decodes(&self, whole: bool, instances: usize) -> KeptLoad {
        self.starts.last().map_or(KeptLoad::default(), |(_, sum)| sum[usize::from(whole)].part(instances))
    }

    /// When decodes end for which places are kept, µs.
    pub(crate) fn ends(&self) -> impl Iterator<Item = u64> {
        self.ends.iter().map(|(at_us, _)| *at_us)
    }
}

impl Conductor {
    /// Looks at what tickets keep from a newcomer. Those of a lower band do not bar it, nor those of a tenant that is ahead
    /// of its share; and whatever has returned in time with a ticket of its own is not barred by others.
    pub(crate) fn see_tickets(&mut self, request: &Request) {
        if self.tickets.given.is_empty() {
            return;
        }
        self.stats.tickets_expired += self.tickets.expire(self.now_us);
        let priority = self.class(request).priority;
        let fair_us = self.fair.tag_us(request.tenant).saturating_add(self.fair_lead_us(request));
        let equal = |t: &Ticket| t.tenant == request.tenant || t.tag_us <= fair_us;
        let binding = |t: &Ticket| t.priority > priority || (t.priority == priority && equal(t));
        self.tickets.look(binding, &mut self.kept);
    }

    fn keep_ticket(&mut self, ticket: Ticket, effects: &mut Vec<Effect>) -> bool {
        let kept = self.tickets.keep(ticket);
        if kept {
            self.share(Input::PeerTicket(Box::new(ticket)), effects);
        }
        kept
    }

    /// Takes the ticket of a request that has come, if it has one.
    pub(crate) fn take_ticket(&mut self, request: &Request, effects: &mut Vec<Effect>) -> Option<Ticket> {
        let ticket = self.tickets.take(request)?;
        self.share(Input::PeerTicketTaken { name: ticket.name }, effects);
        Some(ticket)
    }

    /// Keeps the place that another router promised.
    pub(crate) fn peer_ticket(&mut self, ticket: Ticket) {
        let known = ticket.class.index() < self.config.classes.len();
        if !(known && ticket.is_timely() && self.tickets.keep(ticket)) {
            self.stats.stale_inputs += 1;
        }
    }

    /// Whether a request that comes with this ticket comes at its time.
    pub(crate) fn is_time_of(&self, ticket: Option<&Ticket>) -> bool {
        ticket.is_some_and(|ticket| ticket.from_us <= self.now_us && self.now_us <= ticket.until_us)
    }

    /// Refuses a request that may have come with a ticket. One that came too early keeps it.
    pub(crate) fn refuse_returned(
        &mut self,
        request: &Request,
        ticket: Option<Ticket>,
        refusal: Refusal,
        effects: &mut Vec<Effect>,
    ) -> Refusal {
        let Some(ticket) = ticket else { return self.with_ticket(request, 0, refusal, effects) };
        if ticket.from_us <= self.now_us || refusal.reason == RejectReason::Unreachable {
            self.stats.tickets_broken += u64::from(self.now_us <= ticket.until_us);
            return self.with_ticket(request, ticket.returns.saturating_add(1), refusal, effects);
        }
        let retry_after_us = (ticket.from_us - self.now_us).max(MIN_RETRY_AFTER_US);
        let kept = self.keep_ticket(Ticket { early: true, ..ticket }, effects);
        assert!(kept, "there is room for a ticket that was just taken");
        Refusal { retry_after_us, ..refusal }
    }

    /// Gives a ticket to a request whose client has returned so often before, and is refused now.
    pub(crate) fn with_ticket(
        &mut self,
        request: &Request,
        returns: u8,
        refusal: Refusal,
        effects: &mut Vec<Effect>,
    ) -> Refusal {
        let wait_us = refusal.retry_after_us;
        let Some(closest) = refusal.closest.filter(|_| wait_us > 0) else { return refusal };
        let class = self.class(request);
        let (priority, weight) = (class.priority, class.weight);
        let from_us = self.now_us.saturating_add(wait_us).min(LATEST_US);
        let start_us = from_us.saturating_add(closest.takes_us).min(LATEST_US);
        let need = self.decode_need(request, start_us);
        let pool = self.decodes_to_ask(request, closest.instance);
        let decodes = pool.iter().filter_map(|id| self.fleet.get(*id));
        // As it is reserved for others: with what was learnt of the instance.
        let lasts = |i| self.predicted_step_us(i, &need) * i.decode_residual.ratio();
        let step_us = decodes.map(lasts).fold(f64::INFINITY, f64::min);
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let lasts_us = self.decode_duration_us(request, step_us.min(need.tbt_us as f64));
        let (room_tokens, context_tokens) = (need.tokens, need.context_tokens);
        let ahead_us = self.tickets.work_us(request.tenant) / u64::from(weight.max(1));
        let grace_us = (wait_us / 4).min(self.ttft_objective_us(request)).max(LEAST_GRACE_US);
        let ticket = Ticket {
            name: name_of(request),
            class: request.class,
            tenant: request.tenant,
            priority,
            tag_us: self.fair.tag_us(request.tenant).saturating_add(ahead_us),
            from_us,
            until_us: from_us.saturating_add(grace_us),
            instance: closest.instance,
            work_us: closest.work_us,
            due_us: closest.due_us.saturating_add(wait_us).min(LATEST_US),
            decode_us: (start_us, start_us.saturating_add(lasts_us).min(LATEST_US)),
            room_tokens,
            context_tokens,
            returns,
            early: false,
        };
        self.stats.tickets_given += u64::from(self.keep_ticket(ticket, effects));
        refusal
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ticket(name: u64, instance: u32, due_us: u64, decode_us: (u64, u64)) -> Ticket {
        Ticket {
            name,
            class: ClassId(0),
            tenant: TenantId(0),
            priority: 0,
            tag_us: 0,
            from_us: 100,
            until_us: 200,
            instance: InstanceId(instance),
            work_us: 40,
            due_us,
            decode_us,
            room_tokens: 1_000,
            context_tokens: 600,
            returns: 0,
            early: false,
        }
    }

    #[test]
    fn places_are_kept_by_the_share_of_clients_that_return() {
        let mut tickets = TicketLedger::default();
        let mut places = KeptPlaces::default();
        let look = |tickets: &TicketLedger, places: &mut KeptPlaces| {
            tickets.look(|_| true, places);
            places
                .prefills(InstanceId(1))
                .iter()
                .map(|kept| (kept.work_us, kept.whole_us))
                .collect::<Vec<_>>()
        };
        let asked = Request { prompt_tokens: 5, ..Request::default() };
        let own = ticket(name_of(&asked), 1, 900, (300, 500));
        assert!(tickets.keep(own));
        assert_eq!(look(&tickets, &mut places), [(40, 40)], "nothing says that it will not return");
        assert_eq!(places.decodes_at(400, true, 2).room_tokens, 500);
        for _ in 0..20 {
            assert_eq!(tickets.take(&asked), Some(own));
            assert!(tickets.keep(own));
        }
        let kept_us = look(&tickets, &mut places)[0].0;
        assert_eq!(kept_us, 40, "all have returned so far");
        assert_eq!(tickets.check(1), Ok(()));
        for at in 0..60 {
            assert_eq!(tickets.expire(201 + at), 1);
            assert!(tickets.keep(own));
        }
        assert_eq!(look(&tickets, &mut places), [(0, 40)], "too few of them");
        let returned = Ticket { returns: 1, ..own };
        assert!(tickets.take(&asked).is_some() && tickets.keep(returned));
        assert_eq!(
            look(&tickets, &mut places),
            [(40, 40)],
            "second returns are counted apart from first ones"
        );
        assert!(tickets.take(&Request { prompt_tokens: 6, ..asked }).is_none(), "another request");
    }

    #[test]
    fn tickets_are_bounded() {
        let mut tickets = TicketLedger::default();
        assert!((0..MAX_TICKETS as u64).all(|name| tickets.keep(ticket(name, 1, name, (0, 1)))));
        assert!(!tickets.keep(ticket(0, 1, 0, (0, 1))));
        assert_eq!(tickets.check(1), Ok(()));
        assert!(tickets.check(0).is_err(), "of a class that does not exist");
        tickets.given[0].due_us = u64::MAX;
        assert!(tickets.check(1).is_err(), "out of order and of bounds");
    }

    proptest! {
        #[test]
        fn what_decodes_take_is_the_sum_of_those_that_are_there(
            of in proptest::collection::vec((0u32..3, 0u64..50, 0u64..50, 1u64..50), 0..20),
            at_us in 0u64..120,
        ) {
            let mut tickets = TicketLedger::default();
            for (name, (instance, due_us, start_us, lasts_us)) in of.iter().enumerate() {
                prop_assert!(tickets.keep(ticket(name as u64, *instance, *due_us, (*start_us, start_us + lasts_us))));
            }
            prop_assert_eq!(tickets.check(1), Ok(()));
            let mut places = KeptPlaces::default();
            tickets.look(|_| true, &mut places);
            let there = of.iter().filter(|(_, _, start_us, lasts_us)| *start_us <= at_us && at_us < start_us + lasts_us);
            let there = there.count() as u64;
            let kept = places.decodes_at(at_us, true, 1);
            prop_assert_eq!((kept.room_tokens, kept.context_tokens), (there * 1_000, there * 600));
            prop_assert_eq!(u64::from(kept.batch()), there);
            prop_assert_eq!(places.decodes(true, 1).room_tokens, of.len() as u64 * 1_000);
            for instance in 0..3 {
                let on: Vec<u64> = places.prefills(InstanceId(instance)).iter().map(|kept| kept.due_us).collect();
                let mut naive: Vec<u64> = of.iter().filter(|t| t.0 == instance).map(|t| t.1).collect();
                naive.sort_unstable();
                prop_assert_eq!(on, naive);
            }
        }
    }
}
