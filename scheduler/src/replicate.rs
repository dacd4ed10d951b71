//! Replication: a chain that many requests share should not depend on one holder.
//!
//! Fetches at placement already leave replicas where the demand is. Replication adds what fetches cannot: an idle
//! instance with room gets a copy before a request needs it.

use alloc::vec::Vec;
use baton_types::{BlockHash, InstanceId, Role};
use serde::{Deserialize, Serialize};

use crate::conductor::{Conductor, LATEST_US};
use crate::placement::Hits;
use crate::{Effect, Request};

/// Most prefixes whose popularity is counted (a bound, I9).
const FOLLOWED: usize = 64;
/// Shortest prefix that is copied, blocks.
const MIN_BLOCKS: u32 = 4;
/// Matches before a prefix counts as hot.
const HOT: u32 = 16;
/// Matches after which all counts are halved; no count exceeds twice as many.
const HALVED_AFTER: u64 = 1024;
/// Most matches that a saved state may claim: far more than any count comes to.
const MOST_MATCHES: u32 = 1 << 30;

/// One popular prefix.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct PopularPrefix {
    head: BlockHash,
    chain: Vec<BlockHash>,
    count: u32,
}

/// Counts which prefixes are matched, keeping the most frequent (space-saving, Metwally 2005).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Replicator {
    followed: Vec<PopularPrefix>,
    noted: u64,
    last: Option<usize>,
}

impl Replicator {
    /// Counts one request's match.
    pub(crate) fn note(&mut self, hits: &Hits, request: &Request) {
        self.last = None;
        let blocks = hits.sources().first().map_or(0, |(b, _)| *b);
        if blocks < MIN_BLOCKS || blocks as usize > request.chain.len() {
            return;
        }
        self.noted += 1;
        if self.noted.is_multiple_of(HALVED_AFTER) {
            self.followed.iter_mut().for_each(|f| f.count /= 2);
        }
        let head = request.chain[blocks as usize - 1];
        if let Some(at) = self.followed.iter().position(|f| f.head == head) {
            self.followed[at].count += 1;
            self.last = Some(at);
            return;
        }
        let fresh = |count| PopularPrefix { head, chain: request.chain[..blocks as usize].to_vec(), count };
        if self.followed.len() < FOLLOWED {
            self.followed.push(fresh(1));
        } else if let Some(least) = self.followed.iter_mut().min_by_key(|f| f.count) {
            *least = fresh(least.count + 1);
        }
    }

    /// Whether all counters can go on: what was read may be anything.
    pub(crate) fn is_sound(&self) -> bool {
        self.noted <= LATEST_US && self.followed.iter().all(|f| f.count <= MOST_MATCHES)
    }

    /// The chain that has just become hotter, if it is hot.
    fn hot(&self) -> Option<&[BlockHash]> {
        let followed = self.followed.get(self.last?)?;
        (followed.count >= HOT).then_some(followed.chain.as_slice())
    }
}

impl Conductor {
    /// Copies the chain just matched to an idle instance that lacks it, if it is hot.
    pub(crate) fn replicate_hot(&mut self, effects: &mut Vec<Effect>) {
        if !self.config.replicate || !self.config.policy.orders_queues() {
            return;
        }
        let Some(chain) = self.replicator.hot() else { return };
        let blocks = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        let idle = |i: &&crate::fleet::Instance| {
            i.serves() && i.spec.role == Role::Prefill && !i.replicating && i.backlog_us(self.now_us) == 0
        };
        let lacks = |i: &&crate::fleet::Instance| self.hits.of(i.spec.id).blocks * 2 < blocks;
        let soonest = self.fleet.orders().map(|orders| orders.prefills().take(self.config.candidates));
        let all = soonest.is_none().then(|| self.fleet.prefills.iter().copied());
        let pool = soonest.into_iter().flatten().chain(all.into_iter().flatten());
        let to =
            pool.filter_map(|id| self.fleet.get(id)).filter(idle).filter(lacks).map(|i| i.spec.id).next();
        let Some(to) = to.or_else(|| self.store_without(blocks)) else { return };
        let able = |id: InstanceId| id != to && self.fleet.share(id, to);
        let holder = self.hits.sources().iter().find(|(b, id)| *b >= blocks && able(*id)).map(|(_, id)| *id);
        let Some(from) = holder else { return };
        let chain = chain.to_vec();
        self.stats.replications += 1;
        self.copy_begins(from, to);
        effects.push(Effect::Replicate { from, to, chain });
    }

    /// Records an ordered copy. An instance receives one at a time.
    pub(crate) fn copy_begins(&mut self, from: InstanceId, to: InstanceId) {
        assert!(from != to, "instance {to} would copy from itself");
        let mut target = self.fleet.known_mut(to);
        assert!(!target.replicating, "instance {to} gets a second copy beside the first");
        target.replicating = true;
    }

    /// A store instance that may take the chain just matched. A hot chain outlives its holders there, if no store
    /// instance holds much of it yet.
    fn store_without(&self, blocks: u32) -> Option<InstanceId> {
        let holds = |id: &InstanceId| self.hits.of(*id).blocks * 2 >= blocks;
        let stores = &self.fleet.stores;
        if stores.iter().any(holds) {
            return None;
        }
        stores.iter().copied().find(|id| self.may_take(*id))
    }

    pub(crate) fn replicate_finished(&mut self, to: InstanceId, effects: &mut Vec<Effect>) {
        let now_us = self.now_us;
        let Some(mut instance) = self.fleet.get_mut(to).filter(|i| i.replicating) else { return };
        instance.replicating = false;
        let (role, rested_us) = (instance.spec.role, instance.rests_until_us);
        drop(instance);
        if role != Role::Store {
            return;
        }
        if rested_us > now_us {
            self.timers.set(to, rested_us);
        } else {
            self.save_from_any(effects);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn only_repeated_long_matches_become_hot() {
        let mut replicator = Replicator::default();
        let request = Request { chain: (0..10).map(BlockHash).collect(), ..Request::default() };
        let mut hits = Hits::default();
        hits.reset(1);
        hits.offer_source(InstanceId(0), 3);
        replicator.note(&hits, &request);
        assert!(replicator.followed.is_empty(), "three blocks are not worth a copy");
        hits.reset(1);
        hits.offer_source(InstanceId(0), 6);
        for _ in 0..HOT - 1 {
            replicator.note(&hits, &request);
            assert!(replicator.hot().is_none());
        }
        replicator.note(&hits, &request);
        assert_eq!(replicator.hot(), Some(&request.chain[..6]));
    }

    #[test]
    fn the_followed_set_is_bounded() {
        let mut replicator = Replicator::default();
        let mut hits = Hits::default();
        for n in 0..(FOLLOWED as u64 * 3) {
            let request = Request { chain: vec![BlockHash(n); 5], ..Request::default() };
            hits.reset(1);
            hits.offer_source(InstanceId(0), 5);
            replicator.note(&hits, &request);
        }
        assert_eq!(replicator.followed.len(), FOLLOWED);
    }
}
