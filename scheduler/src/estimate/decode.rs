//! What a decode instance has promised, and what its step time will be at a later moment.
//!
//! A store holds a block once, however many prompts begin with it, so the ledger reserves room for it once. The slots
//! are sorted by the prompts' chains. A prompt shares no more with any earlier prompt than with the one directly before
//! it. For any set of requests, one pass over the slots therefore counts each of their blocks once.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{BlockHash, RequestId};
use serde::{Deserialize, Serialize};

use super::turns::{NewTurn, Turn};
use crate::InstanceSpec;

/// A request that decodes on the instance, or will.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DecodeSlot {
    pub request: RequestId,
    /// The band of its class.
    pub priority: i32,
    /// When its decode started, or is predicted to, µs.
    pub start_us: u64,
    /// When it is predicted to end, µs.
    pub finish_us: u64,
    /// When it has to start, µs.
    #[serde(default)]
    pub due_us: u64,
    /// Prompt plus half the predicted output: its mean share of the batch's context, tokens.
    pub context_tokens: u64,
    /// Predicted output, of which half is in `context_tokens`, tokens.
    pub output_tokens: u64,
    /// Prompt plus room reserved for the output, tokens.
    pub reserved_tokens: u64,
    /// Those of them in blocks that the slot before this one holds too.
    pub common_tokens: u64,
    /// Whether it decodes already.
    pub running: bool,
    /// Whether its KV is there while its engine runs as many others as it may.
    #[serde(default)]
    pub waits: bool,
    /// Whether the request is held: not sent until there is room for it.
    pub held: bool,
}

impl DecodeSlot {
    /// Room that it takes besides `common_tokens` that another request holds, tokens.
    const fn takes(&self, common_tokens: u64) -> u64 {
        self.reserved_tokens.saturating_sub(common_tokens)
    }

    /// As it is predicted at `now_us`: one that waits for its turn starts now at the earliest, and ends as much later.
    const fn as_of(self, now_us: u64) -> Self {
        let late_us = if self.waits { now_us.saturating_sub(self.start_us) } else { 0 };
        Self { start_us: self.start_us + late_us, finish_us: self.finish_us.saturating_add(late_us), ..self }
    }

    /// Whether it is there at `now_us` though it was predicted to have ended.
    const fn overstays(&self, now_us: u64) -> bool {
        (self.running || self.held) && self.finish_us <= now_us
    }

    /// Its turn at its engine, as it is predicted at `now_us`.
    fn turn(&self, now_us: u64) -> Turn {
        let slot = self.as_of(now_us);
        let all_us = slot.finish_us - slot.start_us;
        // One that overstays has about as much before it as one that has just begun.
        let left_us =
            if slot.finish_us <= now_us { all_us } else { slot.finish_us - slot.start_us.max(now_us) };
        Turn {
            begun: slot.running,
            at_us: if slot.running { now_us } else { slot.start_us },
            request: slot.request,
            lasts_us: if slot.running { left_us } else { all_us },
            tokens: slot.takes(slot.common_tokens),
            due_us: slot.due_us,
        }
    }

    /// Its context at a moment, tokens: the prompt and what is decoded by then at an even pace. Those that are under way
    /// are the longer answers, and half of what was expected of an answer is long passed in some of them.
    fn context_at(&self, at_us: u64) -> u64 {
        let lasts_us = self.finish_us.saturating_sub(self.start_us).max(1);
        let decoded = self.output_tokens.saturating_mul(at_us.saturating_sub(self.start_us)) / lasts_us;
        let prompt_tokens = self.context_tokens.saturating_sub(self.output_tokens / 2);
        prompt_tokens.saturating_add(decoded).min(self.reserved_tokens.max(self.context_tokens))
    }
}

/// The position of a prompt among those of a ledger, and the tokens that it shares with its two neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChainPosition {
    at: usize,
    before_tokens: u64,
    after_tokens: u64,
}

/// Leading blocks that two chains have in common. A hash commits to all before it (I1), so where two are equal, so are
/// all before them.
pub(crate) fn common_blocks(one: &[BlockHash], other: &[BlockHash]) -> usize {
    let (mut low, mut high) = (0, one.len().min(other.len()));
    if high == 0 || one[0] != other[0] {
        return 0;
    }
    while low < high {
        let middle = usize::midpoint(low, high);
        if one[middle] == other[middle] { low = middle + 1 } else { high = middle }
    }
    low
}

/// The position of a chain in a list sorted by chain, and the numbers of leading blocks that it shares with the chain
/// before that position and the chain at it.
pub(crate) fn place_among<'a, T>(
    all: &[T],
    chain: &[BlockHash],
    chain_of: impl Fn(&T) -> &'a [BlockHash],
) -> (usize, usize, usize) {
    let comes_first = |one: &T| {
        let other = chain_of(one);
        let common = common_blocks(other, chain);
        other.get(common) < chain.get(common)
    };
    let at = all.partition_point(comes_first);
    let common = |one: Option<&T>| one.map_or(0, |one| common_blocks(chain_of(one), chain));
    (at, common(at.checked_sub(1).and_then(|at| all.get(at))), common(all.get(at)))
}

/// The moments at which a stay is looked at, µs: when it begins, when a third of it is over, two thirds, and all of it.
pub(crate) fn moments_of_stay(at_us: u64, stay_us: u64) -> impl Iterator<Item = u64> {
    (0..4).map(move |third| at_us + stay_us * third / 3)
}

/// All promises of one decode instance. There are few (a batch), so the ledger is scanned.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct DecodeLedger {
    /// In the order of their prompts' chains.
    slots: Vec<DecodeSlot>,
    context_tokens: u64,
    /// Each block is counted once.
    reserved_tokens: u64,
    running: u32,
}

impl DecodeLedger {
    /// When a request that comes at a moment, decodes for so long and takes so much room gets its turn at an engine with
    /// this spec, and what that does to the others.
    pub(crate) fn turn(&self, spec: &InstanceSpec, now_us: u64, new: (u64, u64, u64)) -> NewTurn {
        let (at_us, lasts_us, tokens) = new;
        if spec.holds(self.slots.len() + 1, self.reserved_tokens.saturating_add(tokens)) {
            return NewTurn { at_us, makes_late: false };
        }
        let request = RequestId(u64::MAX);
        let new = Turn { at_us, request, lasts_us, tokens, due_us: u64::MAX, begun: false };
        NewTurn::among(self.slots.iter().map(|slot| slot.turn(now_us)).collect(), spec, &new)
    }

    /// Requests promised and the context that they hold together.
    pub(crate) fn all(&self) -> (u32, u64) {
        (u32::try_from(self.slots.len()).unwrap_or(u32::MAX), self.context_tokens)
    }

    /// Promised tokens, planned ones included. Each block is counted once.
    pub(crate) const fn reserved_tokens(&self) -> u64 {
        self.reserved_tokens
    }

    pub(crate) const fn running(&self) -> u32 {
        self.running
    }

    pub(crate) fn slots(&self) -> &[DecodeSlot] {
        &self.slots
    }

    /// The position of a prompt among those of the ledger; `chain_of` gives their chains.
    pub(crate) fn chain_position<'a>(
        &self,
        chain: &[BlockHash],
        block_tokens: u32,
        chain_of: impl Fn(RequestId) -> &'a [BlockHash],
    ) -> ChainPosition {
        let (at, before, after) = place_among(&self.slots, chain, |slot| chain_of(slot.request));
        let tokens = |blocks: usize| blocks as u64 * u64::from(block_tokens);
        ChainPosition { at, before_tokens: tokens(before), after_tokens: tokens(after) }
    }

    /// Reserves room for a request whose prompt has the position `chain_position`.
    pub(crate) fn reserve(&mut self, slot: DecodeSlot, chain_position: ChainPosition) {
        assert!(chain_position.at <= self.slots.len(), "a place worked out for another ledger");
        debug_assert!(
            self.slots.iter().all(|s| s.request != slot.request),
            "request {} keeps room here already",
            slot.request
        );
        let slot = DecodeSlot { common_tokens: chain_position.before_tokens, ..slot };
        self.context_tokens += slot.context_tokens;
        self.reserved_tokens += slot.takes(slot.common_tokens);
        self.running += u32::from(slot.running);
        self.beside(chain_position.at, chain_position.after_tokens);
        self.slots.insert(chain_position.at, slot);
        debug_assert_eq!(self.check(), Ok(()), "after room was kept for request {}", slot.request);
    }

    /// Sets how many tokens the slot at `at` shares with the slot before it.
    fn beside(&mut self, at: usize, common_tokens: u64) {
        if let Some(slot) = self.slots.get_mut(at) {
            assert!(self.reserved_tokens >= slot.takes(slot.common_tokens), "a slot takes more than all do");
            self.reserved_tokens -= slot.takes(slot.common_tokens);
            slot.common_tokens = common_tokens;
            self.reserved_tokens += slot.takes(common_tokens);
        }
    }

    /// Tokens of a prompt that some request of the ledger holds or will hold.
    pub(crate) fn shared_with(&self, chain_position: ChainPosition) -> u64 {
        self.shared(chain_position, |_| true)
    }

    /// Marks a request with reserved room as decoding from `now_us`; its predicted duration is kept.
    pub(crate) fn start(&mut self, request: RequestId, now_us: u64) {
        let slot = self.slot_of(request);
        assert!(!slot.running, "request {request} decodes already");
        let duration = slot.finish_us.saturating_sub(slot.start_us);
        (slot.start_us, slot.finish_us) = (now_us, now_us + duration);
        (slot.running, slot.waits) = (true, false);
        self.running += 1;
        assert!(self.running as usize <= self.slots.len(), "more decode than keep room");
    }

    /// Marks a request with reserved room as one that starts when others end: its KV is there.
    pub(crate) fn wait(&mut self, request: RequestId, now_us: u64) {
        let slot = self.slot_of(request);
        assert!(!slot.running && !slot.waits, "request {request} decodes already, or waits to");
        let duration = slot.finish_us.saturating_sub(slot.start_us);
        (slot.start_us, slot.finish_us, slot.waits) = (now_us, now_us + duration, true);
    }

    /// The one that has waited the longest for others to end.
    pub(crate) fn first_waiting(&self) -> Option<RequestId> {
        let waiting = self.slots.iter().filter(|slot| slot.waits);
        waiting.map(|slot| (slot.start_us, slot.request)).min().map(|(_, request)| request)
    }

    /// The slot of a request that has not been released.
    fn slot_of(&mut self, request: RequestId) -> &mut DecodeSlot {
        self.slots.iter_mut().find(|s| s.request == request).expect("who is spoken of keeps room here")
    }

    /// Reserves more room for a request, and sets how long its answer is predicted to be and when it ends.
    pub(crate) fn grow(
        &mut self,
        request: RequestId,
        reserved_tokens: u64,
        output_tokens: u64,
        finish_us: u64,
    ) {
        let slot = self.slot_of(request);
        let before_tokens = slot.takes(slot.common_tokens);
        (slot.reserved_tokens, slot.finish_us) = (reserved_tokens, finish_us);
        let after_tokens = slot.takes(slot.common_tokens);
        let output_tokens = output_tokens.max(slot.output_tokens);
        let longer_tokens = output_tokens / 2 - slot.output_tokens / 2;
        slot.output_tokens = output_tokens;
        slot.context_tokens += longer_tokens;
        self.context_tokens += longer_tokens;
        assert!(self.reserved_tokens >= before_tokens, "a slot takes more than all do");
        self.reserved_tokens = self.reserved_tokens - before_tokens + after_tokens;
        debug_assert_eq!(self.check(), Ok(()), "after request {request} outgrew its room");
    }

    /// Sets whether a request is held for want of room.
    pub(crate) fn hold(&mut self, request: RequestId, held: bool) {
        self.slot_of(request).held = held;
    }

    /// Whether a request fits from `at_us` on, for as long as `stay_us`, beside those that are predicted to be here then and
    /// are not held for want of room themselves: looked at when it would start and three times more, since those that were
    /// let in before must still find their room. `fits` is asked with what they take at a moment, and with what of its prompt
    /// they hold, tokens. An instance with no other request always has room.
    pub(crate) fn has_room(
        &self,
        (now_us, at_us, stay_us): (u64, u64, u64),
        chain_position: ChainPosition,
        fits: impl Fn(u64, u64, u64) -> bool,
    ) -> bool {
        moments_of_stay(at_us, stay_us).all(|at_us| {
            // A request past its predicted end overstays, or has not started yet.
            let lasts = |s: DecodeSlot| s.finish_us > at_us || s.finish_us <= now_us;
            let there = |s: &DecodeSlot| !s.held && s.start_us <= at_us && lasts(s.as_of(now_us));
            let (_, _, taken) = self.load(there);
            taken == 0 || fits(at_us, taken, self.shared(chain_position, there))
        })
    }

    /// Whether a request of `tokens` fits beside the requests that decode at this moment.
    pub(crate) fn has_room_now(
        &self,
        tokens: u64,
        spec: &InstanceSpec,
        chain_position: ChainPosition,
    ) -> bool {
        let own_tokens = tokens.saturating_sub(self.shared(chain_position, |s| s.running));
        let (batch, _, taken) = self.now();
        spec.holds(batch as usize + 1, taken + own_tokens)
    }

    /// Batch, context and room of the requests that are `there`; each block is counted once.
    fn load(&self, there: impl Fn(&DecodeSlot) -> bool) -> (u32, u64, u64) {
        self.load_by(there, |slot| slot.context_tokens)
    }

    fn load_by(
        &self,
        there: impl Fn(&DecodeSlot) -> bool,
        context_of: impl Fn(&DecodeSlot) -> u64,
    ) -> (u32, u64, u64) {
        let mut load = (0, 0, 0);
        let mut common_tokens = u64::MAX;
        for slot in &self.slots {
            common_tokens = common_tokens.min(slot.common_tokens);
            if there(slot) {
                load = (load.0 + 1, load.1 + context_of(slot), load.2 + slot.takes(common_tokens));
                common_tokens = u64::MAX;
            }
        }
        load
    }

    /// Tokens of a prompt that the requests that are `there` hold already.
    fn shared(&self, chain_position: ChainPosition, there: impl Fn(&DecodeSlot) -> bool) -> u64 {
        assert!(chain_position.at <= self.slots.len(), "a place worked out for another ledger");
        let (before, after) = self.slots.split_at(chain_position.at);
        let mut left_tokens = chain_position.before_tokens;
        for slot in before.iter().rev() {
            if left_tokens == 0 || there(slot) {
                break;
            }
            left_tokens = left_tokens.min(slot.common_tokens);
        }
        let mut right_tokens = chain_position.after_tokens;
        for (at, slot) in after.iter().enumerate() {
            if at > 0 {
                right_tokens = right_tokens.min(slot.common_tokens);
            }
            if right_tokens == 0 || there(slot) {
                return left_tokens.max(right_tokens);
            }
        }
        left_tokens
    }

    /// Removes a request; false when it holds nothing here.
    pub(crate) fn release(&mut self, request: RequestId) -> bool {
        let Some(at) = self.slots.iter().position(|s| s.request == request) else {
            return false;
        };
        let slot = self.slots.remove(at);
        assert!(self.context_tokens >= slot.context_tokens, "a slot has more context than all have");
        assert!(self.reserved_tokens >= slot.takes(slot.common_tokens), "a slot takes more than all do");
        assert!(self.running >= u32::from(slot.running), "one ends where none decodes");
        self.context_tokens -= slot.context_tokens;
        self.reserved_tokens -= slot.takes(slot.common_tokens);
        self.running -= u32::from(slot.running);
        // The next slot shares with the slot before the removed one what both shared with the removed one.
        let next_tokens = self.slots.get(at).map_or(0, |next| next.common_tokens);
        self.beside(at, next_tokens.min(slot.common_tokens));
        debug_assert_eq!(self.check(), Ok(()), "after request {request} gave its room back");
        true
    }

    /// Batch, context and reserved tokens that are predicted for `at_us`: of the requests that will have started and
    /// not yet ended. A request that overstays its prediction, or is held, counts as still there.
    pub(crate) fn at(&self, now_us: u64, at_us: u64) -> (u32, u64, u64) {
        self.load_by(Self::there_at(now_us, at_us), |slot| slot.as_of(now_us).context_at(at_us))
    }

    /// Batch and context of all requests that may be there at some time in a stay of `stay_us` from `at_us` on, if each lasts
    /// up to four times as long as predicted; without those predicted to have ended by `ends_by_us`. A request that
    /// overstays has not ended. Lengths of answers scatter about as exponential ones do, of which one in fifty is longer
    /// than four times the mean.
    pub(crate) fn may_meet(&self, now_us: u64, (at_us, stay_us): (u64, u64), ends_by_us: u64) -> (u32, u64) {
        let (batch, context_tokens, _) = self.load(|slot| {
            let slot = slot.as_of(now_us);
            let lasts_us = slot.finish_us.saturating_sub(slot.start_us);
            let counts = slot.finish_us > ends_by_us || slot.finish_us <= now_us;
            let begins = slot.start_us < at_us.saturating_add(stay_us);
            counts
                && begins
                && (slot.overstays(now_us) || slot.finish_us.saturating_add(lasts_us * 3) > at_us)
        });
        (batch, context_tokens)
    }

    /// As [`Self::at`], of the requests of higher bands than this one.
    pub(crate) fn at_of_higher(&self, now_us: u64, at_us: u64, priority: i32) -> (u32, u64, u64) {
        let there = Self::there_at(now_us, at_us);
        self.load_by(|slot| slot.priority > priority && there(slot), |slot| slot.context_at(at_us))
    }

    fn there_at(now_us: u64, at_us: u64) -> impl Fn(&DecodeSlot) -> bool + Copy {
        move |slot| {
            let slot = slot.as_of(now_us);
            slot.start_us <= at_us && (slot.finish_us > at_us || slot.overstays(now_us))
        }
    }

    /// As [`Self::at`], by the paper's system-level rule: a request that has outlived the assumed duration counts as
    /// ended.
    pub(crate) fn at_most(&self, at_us: u64) -> (u32, u64, u64) {
        self.load(|s| s.start_us <= at_us && s.finish_us > at_us)
    }

    /// Batch and context of those that decode, as far as their answers are predicted to be by `now_us`.
    pub(crate) fn running_at(&self, now_us: u64) -> (u32, u64) {
        let (batch, context_tokens, _) =
            self.load_by(|slot| slot.running, |slot| slot.as_of(now_us).context_at(now_us));
        (batch, context_tokens)
    }

    /// Batch and context of those that decode at this moment.
    pub(crate) fn now(&self) -> (u32, u64, u64) {
        self.load(|s| s.running)
    }

    /// Whether a request fits from when it would start until it would end: looked at when it would start and three times
    /// more, since others that are promised room later must still find it. `fits` is asked with what is promised at a
    /// moment, or in all, and with what of its prompt somebody else holds by then, tokens.
    pub(crate) fn fits_throughout(
        &self,
        when: (u64, u64),
        stay_us: u64,
        chain_position: ChainPosition,
        fits: impl Fn(Option<u64>, u64, u64) -> bool,
    ) -> bool {
        // Everything promised counted together: no need to look at when each starts and ends.
        fits(None, self.reserved_tokens, self.shared_with(chain_position))
            || moments_of_stay(when.1, stay_us).all(|at_us| {
                let there = Self::there_at(when.0, at_us);
                fits(Some(at_us), self.load(there).2, self.shared(chain_position, there))
            })
    }

    /// Checks that the sums are those of the slots, and that the first slot shares nothing.
    ///
    /// # Errors
    /// Names the sum that is off.
    pub(crate) fn check(&self) -> Result<(), String> {
        // A saved ledger may hold any numbers, so an overflow is detected before the sums are formed.
        let wide = |tokens: fn(&DecodeSlot) -> u64| -> u128 {
            self.slots.iter().map(|slot| u128::from(tokens(slot))).sum()
        };
        let most = u128::from(u64::MAX);
        if wide(|slot| slot.context_tokens) > most || wide(|slot| slot.reserved_tokens) > most {
            return Err(String::from("I8: no instance has so many tokens as its slots say"));
        }
        let running = self.slots.iter().filter(|slot| slot.running).count();
        if running != self.running as usize {
            return Err(format!("I8: {running} decode, the ledger says {}", self.running));
        }
        let (count, context_tokens, reserved_tokens) = self.load(|_| true);
        let known = (self.slots.len(), self.context_tokens, self.reserved_tokens);
        if (count as usize, context_tokens, reserved_tokens) != known {
            return Err(format!(
                "I8: {count} slots hold {reserved_tokens} tokens, the ledger says {known:?}"
            ));
        }
        match self.slots.first() {
            Some(first) if first.common_tokens > 0 => {
                Err(format!("I8: request {} shares with nobody", first.request))
            }
            _ => Ok(()),
        }
    }

    #[cfg(test)]
    pub(crate) fn add_for_test(&mut self, count: u64, context_tokens: u64) {
        for i in 0..count {
            let slot = DecodeSlot {
                request: RequestId(1_000_000 + i),
                priority: 0,
                start_us: 0,
                finish_us: 1_000_000,
                due_us: 0,
                context_tokens: context_tokens / count,
                output_tokens: 0,
                reserved_tokens: context_tokens / count,
                common_tokens: 0,
                running: true,
                waits: false,
                held: false,
            };
            self.reserve(slot, ChainPosition::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::{BTreeMap, BTreeSet};
    use proptest::prelude::*;

    fn slot(id: u64, start_us: u64, finish_us: u64, tokens: u64) -> DecodeSlot {
        DecodeSlot {
            request: RequestId(id),
            priority: 0,
            start_us,
            finish_us,
            due_us: 0,
            context_tokens: tokens,
            output_tokens: 0,
            reserved_tokens: tokens * 2,
            common_tokens: 0,
            running: false,
            waits: false,
            held: false,
        }
    }

    fn alone(ledger: &mut DecodeLedger, slot: DecodeSlot) {
        ledger.reserve(slot, ChainPosition::default());
    }

    /// With half of its output at all times an answer of 10,000 tokens would count for 5,000 even near its end, and those
    /// under way are mostly the long ones.
    #[test]
    fn the_context_of_an_answer_grows_while_it_is_decoded() {
        let answer = DecodeSlot {
            context_tokens: 300,
            output_tokens: 400,
            reserved_tokens: 900,
            ..slot(1, 1_000, 5_000, 0)
        };
        let mut ledger = DecodeLedger::default();
        alone(&mut ledger, answer);
        ledger.start(RequestId(1), 1_000);
        let context = |ledger: &DecodeLedger, at_us| ledger.at(1_000, at_us).1;
        assert_eq!([1_000, 2_000, 4_990].map(|at_us| context(&ledger, at_us)), [100, 200, 499]);
        assert_eq!(ledger.at(6_000, 7_000).1, 700, "it is overdue, and still decodes");
        assert_eq!(ledger.at(60_000, 70_000).1, 900, "no more than its room");
        ledger.grow(RequestId(1), 2_000, 1_000, 11_000);
        assert_eq!((context(&ledger, 6_000), ledger.all().1), (600, 600));
        assert_eq!(ledger.running_at(6_000), (1, 600));
        alone(&mut ledger, slot(2, 0, 9_000, 10));
        assert_eq!(ledger.running_at(6_000), (1, 600), "it has not begun");
    }

    #[test]
    fn load_counts_those_alive_at_the_moment_asked_for() {
        let mut ledger = DecodeLedger::default();
        alone(&mut ledger, slot(1, 0, 100, 10));
        alone(&mut ledger, slot(2, 50, 200, 20));
        assert_eq!(ledger.at(0, 60), (2, 30, 60));
        assert_eq!(ledger.at(0, 150), (1, 20, 40));
        assert_eq!(ledger.at(0, 10), (1, 10, 20));
        alone(&mut ledger, DecodeSlot { priority: 1, ..slot(3, 0, 60, 5) });
        assert_eq!(ledger.at_of_higher(0, 50, 0), (1, 5, 10));
        assert_eq!((ledger.at_of_higher(0, 50, 1), ledger.at_of_higher(0, 60, 0)), ((0, 0, 0), (0, 0, 0)));
        assert!(ledger.release(RequestId(3)));
        ledger.start(RequestId(1), 30);
        assert_eq!(ledger.now(), (1, 10, 20));
        assert_eq!(ledger.at(200, 250).0, 1, "an overdue decode is still there");
        assert_eq!(ledger.at_most(250).0, 0, "the paper's rule takes it for gone");
        assert_eq!(ledger.may_meet(10, (10, 50), 10), (2, 30), "the other begins before it ends");
        assert_eq!(ledger.may_meet(10, (10, 40), 10), (1, 10), "the other begins when it has ended");
        assert_eq!(ledger.may_meet(10, (429, 1), 10), (2, 30), "answers are longer than expected");
        assert_eq!(ledger.may_meet(10, (430, 1), 10), (1, 20), "not by more than four times");
        assert_eq!(ledger.may_meet(10, (10, 50), 150), (1, 20), "one has ended by then");
        assert_eq!(ledger.may_meet(200, (900, 1), 250), (1, 10), "an overdue decode may never end");
        assert!(ledger.release(RequestId(1)) && !ledger.release(RequestId(1)));
        assert_eq!(ledger.all(), (1, 20));
    }

    #[test]
    fn room_frees_in_order_of_predicted_ends() {
        let fits = |ledger: &DecodeLedger, at_us, tokens: u64| {
            ledger.fits_throughout((0, at_us), 0, ChainPosition::default(), |_, promised, _| {
                promised + tokens <= 50
            })
        };
        let mut ledger = DecodeLedger::default();
        alone(&mut ledger, slot(1, 0, 100, 10));
        alone(&mut ledger, slot(2, 0, 300, 10));
        assert!(fits(&ledger, 0, 10) && !fits(&ledger, 0, 11));
        assert!(fits(&ledger, 150, 30), "by then the first has ended and most is free");
        assert!(!fits(&ledger, 150, 31));
    }

    /// Chains that sometimes share a beginning: sessions over a few documents, some of them repeated in full.
    fn chain(document: u64, shared: u64, own: (u64, u64)) -> Vec<BlockHash> {
        let names = (0..shared).map(|at| document * 1000 + at);
        let own_names = (0..own.1).map(|at| ((own.0 + 1) << 32) + (document * 100 + shared) * 100 + at);
        names.chain(own_names).map(BlockHash).collect()
    }

    /// Number of distinct blocks of the chains.
    fn distinct<'a>(chains: impl Iterator<Item = &'a Vec<BlockHash>>) -> u64 {
        chains.flatten().map(|hash| hash.0).collect::<BTreeSet<u64>>().len() as u64
    }

    const BLOCK: u64 = 16;
    const ROOM: u64 = 7;

    /// The expected ledger, computed from all chains.
    #[derive(Default)]
    struct Naive(BTreeMap<u64, (Vec<BlockHash>, DecodeSlot)>);

    impl Naive {
        fn reserved(&self, there: impl Fn(&DecodeSlot) -> bool) -> u64 {
            let those = || self.0.values().filter(|(_, slot)| there(slot));
            let own = |(chain, slot): &(Vec<BlockHash>, DecodeSlot)| {
                slot.reserved_tokens - BLOCK * chain.len() as u64
            };
            those().map(own).sum::<u64>() + BLOCK * distinct(those().map(|(chain, _)| chain))
        }

        fn slot(&mut self, id: u64) -> &mut DecodeSlot {
            &mut self.0.get_mut(&id).expect("it is here").1
        }
    }

    fn agree(ledger: &DecodeLedger, naive: &Naive, asks: &[BlockHash]) {
        assert_eq!(ledger.check(), Ok(()));
        assert_eq!(ledger.reserved_tokens(), naive.reserved(|_| true));
        assert_eq!(ledger.now().2, naive.reserved(|s| s.running));
        assert_eq!(ledger.all().0 as usize, naive.0.len());
        let chain_position = ledger.chain_position(asks, 16, |id| &naive.0[&id.0].0);
        let asked = asks.to_vec();
        for at_us in [0, 20, 40, 60, 90] {
            let there = DecodeLedger::there_at(10, at_us);
            assert_eq!(ledger.at(10, at_us).2, naive.reserved(there), "at {at_us}");
            let held = || naive.0.values().filter(|(_, s)| there(s)).map(|(chain, _)| chain);
            let more = distinct(held().chain([&asked])) - distinct(held());
            let own_tokens = asks.len() as u64 * BLOCK - ledger.shared(chain_position, there);
            assert_eq!(own_tokens, more * BLOCK, "at {at_us}");
        }
    }

    proptest! {
        #[test]
        fn each_block_is_reserved_once_as_requests_come_and_go(
            ops in proptest::collection::vec((0u64..12, 0u64..3, 0u64..6, 0u64..4, 0u64..100, 0u8..6), 0..80),
        ) {
            let (mut ledger, mut naive) = (DecodeLedger::default(), Naive::default());
            for (id, document, shared, own, us, act) in ops {
                // Every third request repeats another one's prompt.
                let asks = chain(document, shared, (id % 3, own));
                agree(&ledger, &naive, &asks);
                let request = RequestId(id);
                match (act, naive.0.contains_key(&id)) {
                    (0..4, false) => {
                        let chain_position = ledger.chain_position(&asks, 16, |id| &naive.0[&id.0].0);
                        let reserved_tokens = asks.len() as u64 * BLOCK + ROOM;
                        let slot = DecodeSlot { reserved_tokens, ..slot(id, us / 2, us, 1) };
                        ledger.reserve(slot, chain_position);
                        naive.0.insert(id, (asks, slot));
                    }
                    (0, true) => {
                        let slot = naive.slot(id);
                        if !slot.running {
                            ledger.start(request, us);
                            let takes_us = slot.finish_us.saturating_sub(slot.start_us);
                            (slot.start_us, slot.finish_us, slot.running) = (us, us + takes_us, true);
                        }
                    }
                    (1, true) => {
                        let slot = naive.slot(id);
                        (slot.reserved_tokens, slot.finish_us) = (slot.reserved_tokens + us, us);
                        ledger.grow(request, slot.reserved_tokens, us / 3, us);
                    }
                    (2, true) => {
                        naive.slot(id).held = us % 2 == 0;
                        ledger.hold(request, us % 2 == 0);
                    }
                    _ => prop_assert_eq!(ledger.release(request), naive.0.remove(&id).is_some()),
                }
            }
        }
    }

    proptest! {
        #[test]
        fn totals_equal_the_sum_of_slots(ops in proptest::collection::vec((0u64..8, 1u64..50, any::<bool>()), 0..60)) {
            let mut ledger = DecodeLedger::default();
            for (id, tokens, add) in ops {
                if add && !ledger.slots().iter().any(|s| s.request == RequestId(id)) {
                    alone(&mut ledger, slot(id, 0, tokens, tokens));
                } else if add {
                    if ledger.slots().iter().any(|s| s.request == RequestId(id) && !s.running) {
                        ledger.start(RequestId(id), 3);
                    }
                } else {
                    ledger.release(RequestId(id));
                }
                prop_assert_eq!(ledger.all().1, ledger.slots().iter().map(|s| s.context_tokens).sum::<u64>());
                prop_assert_eq!(ledger.reserved_tokens(), ledger.slots().iter().map(|s| s.reserved_tokens).sum::<u64>());
                prop_assert_eq!(ledger.running() as usize, ledger.slots().iter().filter(|s| s.running).count());
            }
        }
    }
}
