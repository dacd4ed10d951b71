//! Prefixes that no instance holds, and for which requests were refused.
//!
//! A prompt may take longer to prefill than its objective allows, and would be in time if its prefix were in a cache. If
//! all such requests were refused, no cache would ever hold the prefix. So a request whose beginning was asked for before
//! is let in though its first token will be late, and those after it find the prefix. Where nobody else needs the time,
//! one refusal is enough, and none once this has paid. Where others do, as many must have been refused as could be served
//! in that time: nobody knows how many more will come, and to wait until the loss is as large as the price costs at most
//! twice what the best choice would have (ski rental, Karlin and others 1988).
//!
//! As many are let in like this as were in time only because of a cache, and a few at first: where prefixes are evicted
//! before they are used again, it stops. The first request of a beginning is let in where half of all beginnings are asked
//! for again in time: the end of a prompt that no other has is no reason to be late.

use alloc::vec::Vec;
use baton_types::BlockHash;
use serde::{Deserialize, Serialize};

use crate::conductor::Conductor;
use crate::estimate::NeedMoments;
use crate::fleet::Instance;
use crate::placement::{Candidate, Placement, Refusal};
use crate::request::Entry;
use crate::{RejectReason, Request};

/// Prefixes are remembered at multiples of this length, tokens.
const MARK_TOKENS: u32 = 1024;
/// Prefixes that are remembered; a later one takes the slot of an earlier one.
const SLOTS: usize = 1 << 14;
/// Requests that may be late before any was in time because of them.
const FIRST_CREDIT: u32 = 16;
/// The most that may be late in a row.
const MOST_CREDIT: u32 = 1024;
/// Beginnings of which the latest count how many were asked for again; half of them are forgotten then.
const MOST_ONCE: u32 = 512;

/// Requests that were refused with one beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AskedPrefix {
    /// The name of its last block.
    end: BlockHash,
    refused: u32,
    /// Whether one request alone has asked for it.
    once: bool,
}

/// Prefixes of refused requests, and how many more requests may be late to bring such a prefix into a cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ColdPrefixes {
    /// By the low bits of their names; empty until the first.
    slots: Vec<AskedPrefix>,
    credit: u32,
    /// Beginnings that were asked for by one request at least, and by two, lately.
    once: u32,
    again: u32,
    /// Prefill work of those that are let in, µs.
    work_us: NeedMoments,
}

impl Default for ColdPrefixes {
    fn default() -> Self {
        Self { slots: Vec::new(), credit: FIRST_CREDIT, once: 0, again: 0, work_us: NeedMoments::default() }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low bits are the slot")]
const fn slot_of(end: BlockHash) -> usize {
    end.0 as usize % SLOTS
}

impl ColdPrefixes {
    /// The prefixes of a chain that are remembered: how many blocks each is, and its end.
    fn ends(chain: &[BlockHash], block_tokens: u32) -> impl Iterator<Item = (u32, BlockHash)> {
        let every = (MARK_TOKENS / block_tokens.max(1)).max(1) as usize;
        (1..).zip(chain.iter().copied()).skip(every - 1).step_by(every)
    }

    fn asked(&self, end: BlockHash) -> Option<&AskedPrefix> {
        self.slots.get(slot_of(end)).filter(|asked| asked.end == end)
    }

    /// Calls `change` with every remembered beginning of a chain.
    fn each_asked(&mut self, chain: &[BlockHash], block_tokens: u32, change: impl Fn(&mut AskedPrefix)) {
        for (_, end) in Self::ends(chain, block_tokens) {
            let asked = self.slots.get_mut(slot_of(end)).filter(|asked| asked.end == end);
            asked.into_iter().for_each(&change);
        }
    }

    /// How many requests with that beginning were refused.
    fn refused(&self, end: BlockHash) -> u32 {
        self.asked(end).map_or(0, |asked| asked.refused)
    }

    /// A request would be in time with the part of its chain up to `end`, and does not find it.
    fn ask(&mut self, chain: &[BlockHash], block_tokens: u32, end: BlockHash) {
        if self.slots.is_empty() {
            self.slots.resize(SLOTS, AskedPrefix::default());
        }
        let first = self.asked(end).is_none();
        // What was let in for it, if anything was, has not helped.
        self.asked_again(chain, block_tokens, end, self.refused(end) > 0);
        for (_, end) in Self::ends(chain, block_tokens) {
            if self.asked(end).is_none() {
                self.slots[slot_of(end)] = AskedPrefix { end, refused: 0, once: first };
            }
        }
        if first {
            self.once += 1;
            if self.once >= MOST_ONCE {
                (self.once, self.again) = (self.once / 2, self.again / 2);
            }
        }
    }

    /// The beginning up to `end` is asked for again, and it was worth having, or would have been.
    fn asked_again(&mut self, chain: &[BlockHash], block_tokens: u32, end: BlockHash, pays: bool) {
        if !self.asked(end).is_some_and(|asked| asked.once) {
            return;
        }
        self.again = (self.again + u32::from(pays)).min(self.once);
        self.each_asked(chain, block_tokens, |asked| asked.once = false);
    }

    /// A request was refused because nobody holds its prefix.
    fn note(&mut self, chain: &[BlockHash], block_tokens: u32) {
        self.each_asked(chain, block_tokens, |asked| asked.refused = asked.refused.saturating_add(1));
    }

    /// Whether a request may be late after so many with its beginning were refused: the very first of a beginning only
    /// where most beginnings are asked for again, and more were in time because of a cache than were late for it.
    const fn may_be_late(&self, refused: u32) -> bool {
        if refused > 0 {
            return self.credit > 0;
        }
        self.credit > FIRST_CREDIT && self.again >= self.once / 2
    }

    /// A request is let in to bring its prefix into a cache.
    fn spend(&mut self, chain: &[BlockHash], block_tokens: u32) {
        assert!(self.credit > 0, "a request is late for nothing");
        self.credit -= 1;
        self.each_asked(chain, block_tokens, |asked| asked.refused = 0);
    }

    /// Counts a request that was let in, and whether it is in time only because of a cache.
    fn admitted(&mut self, work_us: u64, by_cache: bool) {
        self.work_us.note(work_us);
        self.credit = (self.credit + u32::from(by_cache)).min(MOST_CREDIT);
    }

    /// What was read may be anything.
    pub(crate) fn is_sound(&self) -> bool {
        self.credit <= MOST_CREDIT
            && self.again <= self.once
            && self.once < MOST_ONCE
            && (self.slots.is_empty() || self.slots.len() == SLOTS)
            && self.work_us.is_sound()
    }
}

impl Conductor {
    /// A place for a request that will be late, so that those after it find its prefix. Its objective begins when the prefix
    /// is computed; all other promises are kept.
    pub(crate) fn place_to_warm(
        &mut self,
        entry: &mut Entry,
        refusal: Refusal,
    ) -> Result<Placement, Refusal> {
        let request = &entry.request;
        if refusal.reason != RejectReason::Unreachable {
            return Err(refusal);
        }
        let by_held = |i: &&Instance| self.idle_prefill_us(i, request, self.hits.of(i.spec.id).by_its_turn());
        let Some((cold_us, soonest)) =
            self.able_prefills(request).map(|i| (by_held(&i), i)).min_by_key(|(us, _)| *us)
        else {
            return Err(refusal);
        };
        let budget_us = entry.deadline_us.saturating_sub(self.now_us);
        // Its steps are too long, whatever is cached.
        if cold_us <= budget_us {
            return Err(refusal);
        }
        let Some(end) = self.needed_end(soonest, request, budget_us) else { return Err(refusal) };
        let block_tokens = self.config.block_tokens;
        self.cold.ask(&request.chain, block_tokens, end);
        let refused = self.cold.refused(end);
        let deadline_us = entry.deadline_us.saturating_add(cold_us);
        if self.cold.may_be_late(refused)
            && let Ok(placement) = self.place_for(request, deadline_us, true)
            && (self.is_spare(request, &placement) || self.pays(&placement, refused))
        {
            self.cold.spend(&request.chain, block_tokens);
            self.stats.admitted_cold += 1;
            entry.deadline_us = deadline_us;
            return Ok(placement);
        }
        self.cold.note(&request.chain, block_tokens);
        Err(refusal)
    }

    /// The end of the shortest remembered part of its prompt that would bring a request in time on an idle instance, were
    /// it cached there.
    fn needed_end(&self, instance: &Instance, request: &Request, budget_us: u64) -> Option<BlockHash> {
        let ends: Vec<(u32, BlockHash)> =
            ColdPrefixes::ends(&request.chain, self.config.block_tokens).collect();
        // With more of it cached a prompt never takes longer.
        let late = |blocks: u32| self.idle_prefill_us(instance, request, blocks) > budget_us;
        ends.get(ends.partition_point(|(blocks, _)| late(*blocks))).map(|(_, end)| *end)
    }

    /// Whether nobody else needs the time and the room that a placement takes.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    fn is_spare(&self, request: &Request, placement: &Placement) -> bool {
        let decode = self.fleet.known(placement.decode);
        let need = self.decode_need(request, self.now_us + placement.candidate.latest_us);
        let alone_us = decode.step_us(1, need.context_tokens);
        let beside_us = self.predicted_step_us(decode, &need) - alone_us;
        placement.candidate.queue_us == 0
            && decode.taken_tokens() <= decode.spec.capacity_tokens / 2
            && beside_us <= (need.tbt_us as f64 - alone_us) / 2.0
    }

    /// Whether as many were refused as could be served in the time that a placement takes.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    fn pays(&self, placement: &Placement, refused: u32) -> bool {
        placement.candidate.plan.work_us as f64 <= self.cold.work_us.mean() * f64::from(refused)
    }

    /// Counts a request that is in time there.
    pub(crate) fn note_in_time(&mut self, request: &Request, candidate: &Candidate) {
        let Some(instance) = self.fleet.get(candidate.instance) else { return };
        let budget_us = self.deadline_us(request, self.now_us) - self.now_us;
        let by_cache =
            candidate.plan.cached_tokens > 0 && self.idle_prefill_us(instance, request, 0) > budget_us;
        if by_cache && let Some(end) = self.needed_end(instance, request, budget_us) {
            self.cold.asked_again(&request.chain, self.config.block_tokens, end, true);
        }
        self.cold.admitted(candidate.plan.work_us, by_cache);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use proptest::prelude::*;

    const BLOCK: u32 = 512;

    /// A chain of so many blocks, of which the first are those of a document.
    fn chain(document: u64, shared: u64, own: u64) -> Vec<BlockHash> {
        let name =
            |of: u64, at: u64| BlockHash((of << 20 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32));
        (0..shared).map(|at| name(document, at)).chain((0..4).map(|at| name(1_000 + own, at))).collect()
    }

    fn refuse(cold: &mut ColdPrefixes, chain: &[BlockHash], block_tokens: u32) {
        let end = *chain.last().expect("a chain");
        cold.ask(chain, block_tokens, end);
        cold.note(chain, block_tokens);
    }

    #[test]
    fn blocks_longer_than_a_mark_are_remembered_each() {
        let mut cold = ColdPrefixes::default();
        let blocks: Vec<BlockHash> = (1..4).map(BlockHash).collect();
        refuse(&mut cold, &blocks, 4_096);
        assert!(blocks.iter().all(|end| cold.refused(*end) == 1));
        assert_eq!(cold.refused(BlockHash(9)), 0);
        cold.note(&[], 16);
        assert!(cold.is_sound());
    }

    #[test]
    fn the_first_of_a_beginning_is_let_in_where_most_beginnings_come_again() {
        let mut cold = ColdPrefixes { credit: MOST_CREDIT, ..ColdPrefixes::default() };
        let end = |chain: &[BlockHash]| chain[chain.len() - 1];
        // Each prompt has an end of its own, without which it is late.
        for own in 0..100 {
            refuse(&mut cold, &chain(1, 8, own), BLOCK);
        }
        assert_eq!((cold.once, cold.again), (100, 0));
        assert!(cold.may_be_late(1) && !cold.may_be_late(0), "none of them came again");
        for own in 100..200 {
            let chain = chain(1, 8, own);
            refuse(&mut cold, &chain, BLOCK);
            (0..3).for_each(|_| refuse(&mut cold, &chain, BLOCK));
        }
        assert_eq!((cold.once, cold.again), (200, 100), "one that comes four times counts once");
        assert!(cold.may_be_late(0));
        // What was let in at once and is not there when it is asked for again was in vain; what is there was not.
        for (own, there) in (200..220).map(|own| (own, own % 2 == 0)) {
            let chain = chain(1, 8, own);
            cold.ask(&chain, BLOCK, end(&chain));
            cold.spend(&chain, BLOCK);
            if there {
                cold.asked_again(&chain, BLOCK, end(&chain), true);
            } else {
                cold.ask(&chain, BLOCK, end(&chain));
            }
        }
        assert_eq!((cold.once, cold.again), (220, 110));
        (0..1_000).for_each(|own| refuse(&mut cold, &chain(2, 8, 1_000 + own), BLOCK));
        assert!(cold.once < MOST_ONCE && cold.again < 60 && cold.is_sound(), "the latest count");
        assert!(!ColdPrefixes { once: MOST_ONCE, ..cold.clone() }.is_sound());
        assert!(!ColdPrefixes { again: cold.once + 1, ..cold }.is_sound());
    }

    #[test]
    fn no_more_are_late_than_were_in_time_because_of_a_cache() {
        let mut cold = ColdPrefixes::default();
        assert!(!cold.may_be_late(0) && cold.may_be_late(1), "nothing has paid yet");
        (0..FIRST_CREDIT).for_each(|_| cold.spend(&[], BLOCK));
        assert!(!cold.may_be_late(9));
        cold.admitted(1_000, false);
        assert!(!cold.may_be_late(9), "it was in time without a cache");
        cold.admitted(3_000, true);
        assert!(cold.may_be_late(1) && !cold.may_be_late(0));
        assert!((cold.work_us.mean() - 2_000.0).abs() < 1e-9);
        (0..5_000).for_each(|_| cold.admitted(3_000, true));
        assert!(cold.may_be_late(0) && cold.credit == MOST_CREDIT && cold.is_sound());
        assert!(!ColdPrefixes { credit: MOST_CREDIT + 1, ..cold.clone() }.is_sound());
        let work_us = serde_json::from_str(r#"{"count":9000.0,"mean":1.0,"variance":0.0}"#).expect("moments");
        assert!(!ColdPrefixes { work_us, ..cold.clone() }.is_sound());
        assert!(!ColdPrefixes { slots: Vec::from([AskedPrefix::default()]), ..cold }.is_sound());
    }

    proptest! {
        /// What is remembered is what a map without bounds would count, where no two share a slot.
        #[test]
        fn prefixes_are_counted_as_a_map_counts_them(
            acts in proptest::collection::vec((0u64..3, 0u64..9, 0u64..4, any::<bool>()), 0..30),
        ) {
            let mut cold = ColdPrefixes::default();
            let mut naive: BTreeMap<BlockHash, u32> = BTreeMap::new();
            let every = (MARK_TOKENS / BLOCK) as usize;
            for (document, shared, own, spends) in acts {
                let chain = chain(document, shared, own);
                let ends: Vec<BlockHash> = (1..=chain.len() / every).map(|nth| chain[nth * every - 1]).collect();
                prop_assert_eq!(ColdPrefixes::ends(&chain, BLOCK).map(|(_, end)| end).collect::<Vec<_>>(), ends.clone());
                if spends && cold.may_be_late(1) {
                    cold.spend(&chain, BLOCK);
                    ends.iter().for_each(|end| _ = naive.remove(end));
                } else {
                    cold.ask(&chain, BLOCK, ends[ends.len() - 1]);
                    cold.note(&chain, BLOCK);
                    ends.iter().for_each(|end| *naive.entry(*end).or_default() += 1);
                }
                for end in &ends {
                    prop_assert_eq!(cold.refused(*end), naive.get(end).copied().unwrap_or(0));
                }
            }
            prop_assert!(cold.is_sound());
        }
    }
}
