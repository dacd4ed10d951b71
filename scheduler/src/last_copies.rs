//! Last-copy offload: chains that an instance is about to lose are copied to a store instance, where others can fetch
//! them.
//!
//! The core learns of an eviction after it happened, which is too late for a copy. So it keeps, for each instance, the
//! chains that were sent there, in order of their last use, and counts the blocks that the instance has taken in since.
//! Once these are a good part of what the instance holds, and it has begun to lose blocks, the chain is due. A chain is
//! copied when the last instance that it was sent to is about to lose it. A store instance receives one chain at a
//! time, and rests after each for as long as the copy took.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{BlockHash, InstanceId, Role};
use serde::{Deserialize, Serialize};

use crate::conductor::{Conductor, LATEST_US};
use crate::estimate::{fetch_us, least_work_us};
use crate::index::Match;
use crate::request::Entry;
use crate::{Effect, InstanceState};

/// Most blocks of all recorded chains (a bound, I9).
const BLOCKS: usize = 1 << 20;
/// Most recorded uses of one instance (a bound, I9).
const USES: usize = 1 << 15;
/// A chain is due once this share, per mille, of what its instance holds came in after it.
const AGED_PERMILLE: u64 = 500;

/// A chain that some instance holds. Its key is its last block.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct KnownChain {
    chain: Vec<BlockHash>,
    /// Number of its latest use. Uses with another number have ended.
    use_number: u64,
    /// Instances of that use that still keep it.
    keepers: u32,
}

/// A use of a chain on one instance.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Use {
    head: BlockHash,
    number: u64,
    /// Blocks that the instance had taken in before this use.
    taken_in: u64,
}

/// The recorded uses of one instance.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Turnover {
    /// Uses, oldest first.
    uses: VecDeque<Use>,
    /// Blocks that it has taken in, in all.
    taken_in: u64,
    /// Whether some blocks have left all of its tiers.
    loses: bool,
}

/// Chains by the time of their last use, and the rates at which instances evict.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LastCopies {
    known: BTreeMap<BlockHash, KnownChain>,
    /// Blocks of all of them.
    blocks: usize,
    instances: Vec<Turnover>,
    uses: u64,
}

impl LastCopies {
    /// Records a use of a chain on `keepers`. Its prefixes are no longer chains of their own.
    pub(crate) fn used(&mut self, chain: &[BlockHash], keepers: &[InstanceId]) {
        let Some(&head) = chain.last() else { return };
        chain.iter().for_each(|hash| self.forget(*hash));
        let most = keepers.iter().map(|at| at.index() + 1).max().unwrap_or(0);
        if self.instances.len() < most {
            self.instances.resize_with(most, Turnover::default);
        }
        for at in keepers {
            while self.blocks + chain.len() > BLOCKS && self.drop_oldest(*at) {}
        }
        if self.blocks + chain.len() > BLOCKS {
            return;
        }
        self.uses += 1;
        for at in keepers {
            if self.instances[at.index()].uses.len() >= USES {
                self.drop_oldest(*at);
            }
            let turnover = &mut self.instances[at.index()];
            turnover.uses.push_back(Use { head, number: self.uses, taken_in: turnover.taken_in });
        }
        let keepers = u32::try_from(keepers.len()).unwrap_or(u32::MAX);
        self.blocks += chain.len();
        assert!(self.blocks <= BLOCKS, "more blocks are kept in mind than may be (I9)");
        self.known.insert(head, KnownChain { chain: chain.to_vec(), use_number: self.uses, keepers });
    }

    /// An instance took in blocks that it did not hold.
    pub(crate) fn blocks_added(&mut self, at: InstanceId, blocks: usize) {
        if let Some(turnover) = self.instances.get_mut(at.index()) {
            turnover.taken_in += blocks as u64;
        }
    }

    /// An instance lost blocks.
    pub(crate) fn blocks_removed(&mut self, at: InstanceId) {
        if let Some(turnover) = self.instances.get_mut(at.index()) {
            turnover.loses = true;
        }
    }

    /// An instance was lost or its cache was cleared: nothing of it can be copied any longer.
    pub(crate) fn cleared(&mut self, at: InstanceId) {
        while self.drop_oldest(at) {}
        if let Some(turnover) = self.instances.get_mut(at.index()) {
            *turnover = Turnover::default();
        }
    }

    /// The next due chain whose last keeper is `at`. The instance holds `held_blocks` blocks, and loses all of them if
    /// it `leaves`.
    fn due(&mut self, at: InstanceId, held_blocks: usize, leaves: bool) -> Option<Vec<BlockHash>> {
        loop {
            let turnover = self.instances.get_mut(at.index())?;
            let oldest = *turnover.uses.front()?;
            let stale = self.known.get(&oldest.head).is_none_or(|k| k.use_number != oldest.number);
            assert!(turnover.taken_in >= oldest.taken_in, "a use of {at} is of a time to come");
            let since = turnover.taken_in - oldest.taken_in;
            let aged = turnover.loses && since * 1000 >= held_blocks as u64 * AGED_PERMILLE;
            if !stale && !aged && !leaves {
                return None;
            }
            turnover.uses.pop_front();
            if !stale && let Some(chain) = self.released(oldest.head) {
                return Some(chain);
            }
        }
    }

    /// Removes one keeper of a chain. Returns the chain if that was the last one.
    fn released(&mut self, head: BlockHash) -> Option<Vec<BlockHash>> {
        let known = self.known.get_mut(&head)?;
        assert!(known.keepers > 0, "a chain is kept in mind that nobody keeps");
        known.keepers -= 1;
        if known.keepers > 0 {
            return None;
        }
        let known = self.known.remove(&head)?;
        assert!(self.blocks >= known.chain.len(), "more blocks are forgotten than were kept in mind");
        self.blocks -= known.chain.len();
        Some(known.chain)
    }

    fn forget(&mut self, head: BlockHash) {
        if let Some(known) = self.known.remove(&head) {
            assert!(self.blocks >= known.chain.len(), "more blocks are forgotten than were kept in mind");
            self.blocks -= known.chain.len();
        }
    }

    /// Checks that the indexes agree and that the bounds hold.
    ///
    /// # Errors
    /// Names the first disagreement.
    pub(crate) fn check(&self) -> Result<(), String> {
        let blocks: usize = self.known.values().map(|known| known.chain.len()).sum();
        if blocks != self.blocks || blocks > BLOCKS {
            return Err(format!(
                "I9: {blocks} blocks are kept in mind, {} counted, {BLOCKS} allowed",
                self.blocks
            ));
        }
        let uses = || self.instances.iter().flat_map(|turnover| &turnover.uses);
        if self.instances.iter().any(|turnover| turnover.uses.len() > USES) {
            return Err(format!("I9: more than {USES} uses of one instance are kept in mind"));
        }
        let taken_in = self.instances.iter().map(|turnover| turnover.taken_in);
        if taken_in.chain([self.uses]).max() > Some(LATEST_US) {
            return Err(String::from("counts of uses or of evicted blocks are out of bounds"));
        }
        let ahead = |turnover: &Turnover| turnover.uses.iter().any(|u| u.taken_in > turnover.taken_in);
        if let Some(at) = self.instances.iter().position(ahead) {
            return Err(format!("a use of instance {at} is of a time to come"));
        }
        let mut keepers: BTreeMap<BlockHash, u32> = BTreeMap::new();
        for place in uses() {
            if self.known.get(&place.head).is_some_and(|known| known.use_number == place.number) {
                *keepers.entry(place.head).or_default() += 1;
            }
        }
        let wrong = self.known.iter().find(|(head, known)| keepers.get(*head) != Some(&known.keepers));
        match wrong {
            Some((head, known)) => {
                Err(format!("chain {head:?} has {} keepers, which do not say so", known.keepers))
            }
            None => Ok(()),
        }
    }

    /// Drops the oldest use of an instance; false when there is none.
    fn drop_oldest(&mut self, at: InstanceId) -> bool {
        let oldest = self.instances.get_mut(at.index()).and_then(|t| t.uses.pop_front());
        let Some(oldest) = oldest else { return false };
        if self.known.get(&oldest.head).is_some_and(|k| k.use_number == oldest.number) {
            self.released(oldest.head);
        }
        true
    }
}

/// A copy to be ordered.
struct Copy {
    from: InstanceId,
    to: InstanceId,
    blocks: usize,
    /// Predicted duration, µs.
    takes_us: u64,
}

impl Conductor {
    /// Whether chains are copied at all: a store instance lends room, and the policy fetches.
    pub(crate) fn salvages(&self) -> bool {
        !self.fleet.stores.is_empty() && self.config.replicate && self.fetches()
    }

    /// Records that a request's prefill is sent: its chain is in use on both instances.
    pub(crate) fn note_use(&mut self, entry: &Entry, decode: InstanceId) {
        if !self.salvages() {
            return;
        }
        let request = &entry.request;
        let whole = request.prompt_tokens / u64::from(self.config.block_tokens);
        let whole = usize::try_from(whole).unwrap_or(usize::MAX).min(request.chain.len());
        let both = [entry.prefill, decode];
        let keepers = if entry.prefill == decode { &both[..1] } else { &both[..] };
        self.last_copies.used(&request.chain[..whole], keepers);
    }

    /// Orders copies of due chains of an instance, as far as store instances are free.
    pub(crate) fn save_from(&mut self, at: InstanceId, effects: &mut Vec<Effect>) {
        if !self.salvages() {
            return;
        }
        while self.fleet.stores.iter().any(|id| self.may_take(*id)) {
            let Some(instance) = self.fleet.get(at).filter(|i| i.state != InstanceState::Lost) else {
                return;
            };
            let (lends, leaves) =
                (instance.spec.role == Role::Store, instance.state == InstanceState::Draining);
            let held_blocks = self.index.held_blocks(at);
            let Some(chain) = self.last_copies.due(at, held_blocks, leaves).filter(|_| !lends) else {
                return;
            };
            if let Some(copy) = self.copy_of(&chain) {
                self.order_save(&copy, chain, effects);
            }
        }
    }

    /// A store instance became free: orders copies of due chains of any instance.
    pub(crate) fn save_from_any(&mut self, effects: &mut Vec<Effect>) {
        if !self.salvages() {
            return;
        }
        for at in 0..self.fleet.bound() {
            self.save_from(InstanceId(u32::try_from(at).unwrap_or(u32::MAX)), effects);
        }
    }

    pub(crate) fn may_take(&self, id: InstanceId) -> bool {
        self.fleet.get(id).is_some_and(|i| i.serves() && !i.replicating && i.rests_until_us <= self.now_us)
    }

    /// Source and target of a copy. `None` if a store instance holds the chain already, if none can take it, or if
    /// fetching it would not be faster than computing it.
    fn copy_of(&mut self, chain: &[BlockHash]) -> Option<Copy> {
        let mut matches: Vec<Match> = Vec::new();
        self.index.matches(chain, &mut self.scratch, |m| matches.push(m));
        let held = |id: InstanceId| matches.iter().find(|m| m.instance == id).map_or(0, |m| m.blocks);
        let alive = |m: &&Match| self.fleet.get(m.instance).is_some_and(|i| i.state != InstanceState::Lost);
        let source = matches.iter().filter(alive).filter(|m| !self.fleet.stores.contains(&m.instance));
        let source = source.max_by_key(|m| (m.blocks, core::cmp::Reverse(m.instance)))?;
        let stored = self.fleet.stores.iter().map(|id| held(*id)).max().unwrap_or(0);
        if stored >= source.blocks {
            return None;
        }
        let able = |id: &InstanceId| self.may_take(*id) && self.fleet.share(source.instance, *id);
        let able = self.fleet.stores.iter().copied().filter(able);
        // A chain is useful only if it is whole. So a store instance that holds half of it is preferred, then the one
        // with most room.
        let to = able.max_by_key(|id| {
            let begun = held(*id) * 2 >= source.blocks;
            (begun, self.room_blocks(*id), core::cmp::Reverse(*id))
        })?;
        let (blocks, here) = (u64::from(source.blocks), u64::from(held(to)));
        let block = u64::from(self.config.block_tokens);
        let (from, target) = (self.fleet.get(source.instance)?, self.fleet.get(to)?);
        let takes_us = fetch_us(from, target, (blocks - here) * block);
        // When the last prefill instance leaves, one of the same kind will join.
        let prefill = self.fleet.prefills.first().and_then(|id| self.fleet.get(*id)).unwrap_or(from);
        let computes_us = least_work_us(prefill, ((blocks - here) * block, here * block), 0);
        let copy = Copy { from: from.spec.id, to, blocks: source.blocks as usize, takes_us };
        (fetch_us(target, prefill, (blocks - here) * block) < computes_us).then_some(copy)
    }

    /// Blocks that an instance can take in before it has to evict others.
    fn room_blocks(&self, id: InstanceId) -> u64 {
        let capacity_tokens = self.fleet.get(id).map_or(0, |i| i.spec.capacity_tokens);
        let held = self.index.held_blocks(id) as u64;
        (capacity_tokens / u64::from(self.config.block_tokens)).saturating_sub(held)
    }

    fn order_save(&mut self, copy: &Copy, mut chain: Vec<BlockHash>, effects: &mut Vec<Effect>) {
        chain.truncate(copy.blocks);
        self.stats.saves += 1;
        let now_us = self.now_us;
        self.copy_begins(copy.from, copy.to);
        let rests_us = 2 * copy.takes_us.min(crate::estimate::NEVER_US / 4);
        self.fleet.known_mut(copy.to).rests_until_us = now_us + rests_us;
        effects.push(Effect::Replicate { from: copy.from, to: copy.to, chain });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use baton_types::Rng;

    /// A chain, and its remaining keepers with the blocks that each had taken in by then.
    type KeptChain = (Vec<BlockHash>, Vec<(InstanceId, u64)>);

    /// The reference for [`LastCopies`]: a list of all uses, searched in full.
    #[derive(Default)]
    struct Naive {
        uses: Vec<KeptChain>,
        taken_in: [u64; 4],
        loses: [bool; 4],
    }

    impl Naive {
        fn used(&mut self, chain: &[BlockHash], keepers: &[InstanceId]) {
            self.uses.retain(|(known, _)| known.last().is_none_or(|head| !chain.contains(head)));
            let at = keepers.iter().map(|at| (*at, self.taken_in[at.index()])).collect();
            self.uses.push((chain.to_vec(), at));
        }

        fn cleared(&mut self, at: InstanceId) {
            self.uses.iter_mut().for_each(|(_, keepers)| keepers.retain(|(keeper, _)| *keeper != at));
            self.uses.retain(|(_, keepers)| !keepers.is_empty());
            (self.taken_in[at.index()], self.loses[at.index()]) = (0, false);
        }

        fn due(&mut self, at: InstanceId, held_blocks: u64, leaves: bool) -> Option<Vec<BlockHash>> {
            loop {
                let mine = |(_, keepers): &KeptChain| keepers.iter().position(|(keeper, _)| *keeper == at);
                let (oldest, place) = self.uses.iter().enumerate().find_map(|(n, u)| Some((n, mine(u)?)))?;
                let since = self.taken_in[at.index()] - self.uses[oldest].1[place].1;
                let aged = self.loses[at.index()] && since * 1000 >= held_blocks * AGED_PERMILLE;
                if !aged && !leaves {
                    return None;
                }
                self.uses[oldest].1.remove(place);
                if self.uses[oldest].1.is_empty() {
                    return Some(self.uses.remove(oldest).0);
                }
            }
        }
    }

    /// Sessions that grow, on random instances.
    fn chain(rng: &mut Rng) -> Vec<BlockHash> {
        let (session, blocks) = (rng.below(6), 1 + rng.below(5));
        (0..blocks).map(|at| BlockHash(session * 100 + at)).collect()
    }

    #[test]
    fn what_is_due_is_what_a_list_of_all_uses_says() {
        let mut found = 0;
        for seed in 0..200 {
            let (mut last_copies, mut naive) = (LastCopies::default(), Naive::default());
            let mut rng = Rng::fork(seed, 5);
            for _ in 0..200 {
                let at = InstanceId(u32::try_from(rng.below(4)).expect("below four"));
                match rng.below(8) {
                    0..3 => {
                        let other = InstanceId((at.0 + 1) % 4);
                        let keepers = if rng.below(2) == 0 { vec![at] } else { vec![at, other] };
                        let chain = chain(&mut rng);
                        last_copies.used(&chain, &keepers);
                        naive.used(&chain, &keepers);
                    }
                    3 | 4 => {
                        let blocks = rng.below(6);
                        // Nothing is counted for an instance that was never used.
                        if last_copies.instances.len() > at.index() {
                            naive.taken_in[at.index()] += blocks;
                        }
                        last_copies.blocks_added(at, usize::try_from(blocks).expect("few"));
                    }
                    5 => {
                        naive.loses[at.index()] |= last_copies.instances.len() > at.index();
                        last_copies.blocks_removed(at);
                    }
                    6 if rng.below(6) == 0 => {
                        last_copies.cleared(at);
                        naive.cleared(at);
                    }
                    _ => {
                        let (held, leaves) = (rng.below(20), rng.below(10) == 0);
                        let due = last_copies.due(at, usize::try_from(held).expect("few"), leaves);
                        assert_eq!(due, naive.due(at, held, leaves), "seed {seed}");
                        found += usize::from(due.is_some());
                    }
                }
                assert_eq!(last_copies.check(), Ok(()), "seed {seed}");
            }
        }
        assert!(found > 1000, "{found} chains were due");
    }

    #[test]
    fn what_is_kept_in_mind_is_bounded() {
        let mut last_copies = LastCopies::default();
        let keepers = [InstanceId(0), InstanceId(1)];
        for n in 0..400u64 {
            let chain: Vec<BlockHash> = (0..4096).map(|at| BlockHash(n << 32 | at)).collect();
            last_copies.used(&chain, &keepers);
            assert_eq!(last_copies.check(), Ok(()));
        }
        assert_eq!(last_copies.blocks, BLOCKS, "the oldest made room");
        assert_eq!(last_copies.due(InstanceId(0), 0, true), None, "the other one keeps it, too");
        let oldest = last_copies.due(InstanceId(1), 0, true).expect("the oldest that was not forgotten");
        assert_eq!(oldest[0].0 >> 32, 400 - (BLOCKS as u64 >> 12));
        for n in 0..2 * USES as u64 {
            last_copies.used(&[BlockHash(n % 7 + (1 << 50))], &keepers);
        }
        assert_eq!(last_copies.check(), Ok(()));
    }
}
