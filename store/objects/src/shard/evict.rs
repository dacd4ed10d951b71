//! Making room: what is over, what the hand of SIEVE points at, and pages taken from the classes that age least.

use baton_types::TenantId;

use super::Shard;
use crate::arena::CLASSES;
use crate::entry::{Entry, State};
use crate::tenant::Share;

/// Leases that a writer gets after its own has expired, before the shard takes its memory. The writer may only have
/// been paused, and a put of the same key takes over at once anyway.
const GIVEN_UP_LEASES: u64 = 5;
/// Entries that a put looks at for what has run out.
const SWEEP_ENTRIES: u32 = 2;
/// Victims that are passed over because another part of their object is held.
const PASSED_OVER_MAX: usize = 64;
/// Entries that have left and are looked at for one whose readers are done.
const LEFT_LOOKED_AT: usize = 8;
/// Looks for a value of a tenant that can go, in one go.
const QUOTA_TRIES: usize = 64;
/// Of so many evictions one compares the ages of the classes.
const COMPARE_EVERY: u8 = 4;

impl Shard {
    /// Frees something that a slot of `class` can be made of. False when this shard has nothing to give.
    pub(super) fn make_room(&mut self, class: u8, now_us: u64) -> bool {
        self.free_left(now_us) || self.evict_in(class, now_us) || self.shed(now_us)
    }

    /// Frees a page, if that can be, for another shard; `pressing`, when pins have to give way.
    pub(crate) fn give(&mut self, now_us: u64, pressing: bool) -> bool {
        self.pressing = pressing;
        let freed = self.shed(now_us);
        self.pressing = false;
        freed
    }

    /// Frees a page, if that can be, for another class.
    fn shed(&mut self, now_us: u64) -> bool {
        if self.free_left(now_us) {
            return true;
        }
        let mut rich: [usize; CLASSES.len()] = std::array::from_fn(|class| class);
        rich.sort_unstable_by_key(|class| {
            std::cmp::Reverse(self.queues[*class].len() as usize * CLASSES[*class])
        });
        rich.into_iter().any(|class| self.queues[class].len() > 0 && self.evict_page(class, now_us))
    }

    /// Evicts one entry of any class.
    pub(super) fn evict_any(&mut self, now_us: u64) -> bool {
        if self.free_left(now_us) {
            return true;
        }
        let mut classes: [usize; CLASSES.len()] = std::array::from_fn(|class| class);
        classes.sort_unstable_by_key(|class| std::cmp::Reverse(self.queues[*class].len()));
        classes.into_iter().any(|class| self.evict_next(class, now_us))
    }

    /// Evicts what a tenant has until a put of `bytes` fits its quota, within a bound. Whether anything went.
    pub(crate) fn evict_of(&mut self, tenant: TenantId, bytes: u64, now_us: u64, pressing: bool) -> bool {
        let before = self.share(tenant).map_or(0, Share::used_bytes);
        self.pressing = pressing;
        for _ in 0..QUOTA_TRIES {
            if self.share(tenant).is_ok_and(|share| share.has_room_for(bytes)) {
                break;
            }
            let Some(queue) = self.by_tenant.get_mut(tenant.0 as usize) else { break };
            if queue.len() == 0 {
                break;
            }
            // A try that finds none goes on where the hand stopped.
            let may = |entry: &Entry| !entry.is_held(now_us, pressing);
            if let Some(victim) = queue.victim(&mut self.entries, now_us, may) {
                if self.is_held(victim, now_us) {
                    self.entries.at_mut(victim).visited = true;
                } else {
                    self.evict(victim, now_us);
                }
            }
        }
        self.pressing = false;
        self.share(tenant).map_or(0, Share::used_bytes) < before
    }

    /// Over the high mark, a put evicts two of its class, so that the next ones need not.
    pub(super) fn trim(&mut self, class: usize, now_us: u64) {
        for _ in 0..2 {
            if self.arena.used_bytes() <= self.config.high_bytes || !self.evict_next(class, now_us) {
                return;
            }
        }
    }

    fn evict_in(&mut self, class: u8, now_us: u64) -> bool {
        self.compare_in = self.compare_in.checked_sub(1).unwrap_or(COMPARE_EVERY);
        if self.compare_in == 0
            && let Some(older) = self.class_older_than(class)
            && self.evict_page(usize::from(older), now_us)
        {
            return true;
        }
        self.evict_next(usize::from(class), now_us)
    }

    /// The class whose next victim is oldest, if that is unread and arrived twice as long ago as the next victim
    /// of `class`: then memory is worth more here.
    fn class_older_than(&self, class: u8) -> Option<u8> {
        let next = |class: u8| {
            let queue = &self.queues[usize::from(class)];
            (queue.len() > 0).then(|| self.entries.at(queue.hand()))
        };
        let age = |generation: u64| self.next_generation - generation;
        let classes = 0..u8::try_from(CLASSES.len()).expect("28 classes");
        let unread =
            classes.filter_map(|class| Some((next(class).filter(|e| !e.visited)?.generation, class)));
        let (oldest, other) = unread.min()?;
        let older = next(class).is_none_or(|ours| age(oldest) / 2 > age(ours.generation));
        (other != class && older).then_some(other)
    }

    fn evict_next(&mut self, class: usize, now_us: u64) -> bool {
        let Some(victim) = self.victim(class, now_us) else { return false };
        self.evict(victim, now_us);
        true
    }

    /// The next victim of a class, of an object that is not held.
    fn victim(&mut self, class: usize, now_us: u64) -> Option<u32> {
        let pressing = self.pressing;
        for _ in 0..PASSED_OVER_MAX {
            let may = |entry: &Entry| !entry.is_held(now_us, pressing);
            let victim = self.queues[class].victim(&mut self.entries, now_us, may)?;
            if !self.is_held(victim, now_us) {
                return Some(victim);
            }
            self.entries.at_mut(victim).visited = true;
        }
        None
    }

    /// Whether eviction must leave a value alone, or another part of its object.
    fn is_held(&self, number: u32, now_us: u64) -> bool {
        let entry = self.entries.at(number);
        // An expired entry does not count as part of an object.
        let held = |number: u32| self.entries.at(number).is_held(now_us, self.pressing);
        held(number) || !entry.is_expired(now_us) && self.others(number).into_iter().any(held)
    }

    /// Evicts a value, and what is of no use without it.
    fn evict(&mut self, number: u32, now_us: u64) {
        let others =
            if self.entries.at(number).is_expired(now_us) { Vec::new() } else { self.others(number) };
        for other in others {
            self.evict_one(other, now_us);
        }
        self.evict_one(number, now_us);
    }

    fn evict_one(&mut self, number: u32, now_us: u64) {
        if self.entries.at(number).is_expired(now_us) {
            self.counters.expired += 1;
        } else {
            self.counters.evicted += 1;
            self.remember(number);
        }
        self.retire(number, now_us);
    }

    /// Evicts everything in the page of the class's next victim, but what is held.
    fn evict_page(&mut self, class: usize, now_us: u64) -> bool {
        let Some(victim) = self.victim(class, now_us) else { return false };
        let generation = self.entries.at(victim).generation;
        let mates = self.entries.at(victim).sealed().map(|room| room.page_mates()).unwrap_or_default();
        for mate in mates {
            let entry = self.entries.at(mate);
            if mate != victim && entry.sealed().is_some() && !self.is_held(mate, now_us) {
                self.evict(mate, now_us);
            }
        }
        // It may have gone as a part of what was in its page.
        if self.entries.at(victim).generation == generation {
            self.evict(victim, now_us);
        }
        true
    }

    /// Frees one entry that has left and whose readers' lease is over, if there is one among the next few: leases that
    /// are renewed do not end in the order in which they began.
    fn free_left(&mut self, now_us: u64) -> bool {
        for _ in 0..LEFT_LOOKED_AT {
            let Some((number, generation)) = self.leaving.pop_front() else { return false };
            let entry = self.entries.at(number);
            if entry.generation != generation {
                continue;
            }
            if !entry.is_leased(now_us) {
                self.free(number);
                return true;
            }
            self.leaving.push_back((number, generation));
        }
        false
    }

    /// Looks at the next few entries for expired ones, so that they go even without a request for them.
    pub(super) fn sweep(&mut self, now_us: u64) {
        if self.expiring == 0 && self.pending.is_empty() && self.leaving.is_empty() {
            return;
        }
        self.free_left(now_us);
        let given_up_us = GIVEN_UP_LEASES * self.config.set.write_lease_us;
        for _ in 0..SWEEP_ENTRIES.min(self.entries.end()) {
            self.sweep_at = (self.sweep_at + 1) % self.entries.end();
            let entry = self.entries.at(self.sweep_at);
            match &entry.state {
                State::Sealed(_) if entry.is_expired(now_us) => {
                    self.counters.expired += 1;
                    self.retire(self.sweep_at, now_us);
                }
                State::Pending(_) if entry.lease_us.saturating_add(given_up_us) <= now_us => {
                    let dropped = self.drop_pending(self.sweep_at);
                    self.counters.abandoned += u64::from(dropped);
                }
                _ => {}
            }
        }
    }
}
