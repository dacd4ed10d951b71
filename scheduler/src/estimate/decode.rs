//! What a decode instance has promised, and what its step time will be at a later moment.

use alloc::vec::Vec;
use baton_types::{CostProfile, RequestId};
use serde::{Deserialize, Serialize};

/// One request that decodes there, or will.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DecodeSlot {
    pub request: RequestId,
    /// When its decode started, or is predicted to, µs.
    pub start_us: u64,
    /// When it is predicted to end, µs.
    pub finish_us: u64,
    /// Prompt plus half the predicted output: its mean share of the batch's context, tokens.
    pub context_tokens: u64,
    /// Prompt plus room reserved for the output, tokens.
    pub reserved_tokens: u64,
    /// Whether it decodes already.
    pub running: bool,
}

/// Every promise of one decode instance. Small (a batch), so it is scanned.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct DecodeLedger {
    slots: Vec<DecodeSlot>,
    context_tokens: u64,
    reserved_tokens: u64,
    running: u32,
}

impl DecodeLedger {
    /// Requests promised and the context that they hold together.
    pub(crate) fn all(&self) -> (u32, u64) {
        (u32::try_from(self.slots.len()).unwrap_or(u32::MAX), self.context_tokens)
    }

    /// Tokens promised, those only planned included.
    pub(crate) const fn reserved_tokens(&self) -> u64 {
        self.reserved_tokens
    }

    pub(crate) const fn running(&self) -> u32 {
        self.running
    }

    pub(crate) fn slots(&self) -> &[DecodeSlot] {
        &self.slots
    }

    pub(crate) fn reserve(&mut self, slot: DecodeSlot) {
        self.context_tokens += slot.context_tokens;
        self.reserved_tokens += slot.reserved_tokens;
        self.running += u32::from(slot.running);
        self.slots.push(slot);
    }

    /// Marks a request as decoding from `now_us`; its predicted duration is kept.
    pub(crate) fn start(&mut self, request: RequestId, now_us: u64) {
        if let Some(slot) = self.slots.iter_mut().find(|s| s.request == request && !s.running) {
            let duration = slot.finish_us.saturating_sub(slot.start_us);
            (slot.start_us, slot.finish_us, slot.running) = (now_us, now_us + duration, true);
            self.running += 1;
        }
    }

    /// Takes a request out; false when it holds nothing here.
    pub(crate) fn release(&mut self, request: RequestId) -> bool {
        let Some(at) = self.slots.iter().position(|s| s.request == request) else {
            return false;
        };
        let slot = self.slots.swap_remove(at);
        self.context_tokens -= slot.context_tokens;
        self.reserved_tokens -= slot.reserved_tokens;
        self.running -= u32::from(slot.running);
        true
    }

    /// Batch, context and reserved tokens that are predicted for `at_us`: those that will have
    /// started and not yet ended. A request that overstays its prediction counts as still there.
    pub(crate) fn at(&self, now_us: u64, at_us: u64) -> (u32, u64, u64) {
        let mut load = (0, 0, 0);
        for slot in &self.slots {
            let overdue = slot.running && slot.finish_us <= now_us;
            if slot.start_us <= at_us && (slot.finish_us > at_us || overdue) {
                load = (load.0 + 1, load.1 + slot.context_tokens, load.2 + slot.reserved_tokens);
            }
        }
        load
    }

    /// The same by the paper's system-level rule: whoever has outlived the assumed duration is
    /// taken to be gone.
    pub(crate) fn at_most(&self, at_us: u64) -> (u32, u64, u64) {
        let mut load = (0, 0, 0);
        for slot in self.slots.iter().filter(|s| s.start_us <= at_us && s.finish_us > at_us) {
            load = (load.0 + 1, load.1 + slot.context_tokens, load.2 + slot.reserved_tokens);
        }
        load
    }

    /// Batch and context of those that decode at this moment.
    pub(crate) fn now(&self) -> (u32, u64, u64) {
        let mut load = (0, 0, 0);
        for slot in self.slots.iter().filter(|s| s.running) {
            load = (load.0 + 1, load.1 + slot.context_tokens, load.2 + slot.reserved_tokens);
        }
        load
    }

    /// Whether `tokens` more may be promised for `at_us`: they must fit, and once half of
    /// `capacity_tokens` is promised they may take at most a quarter of what is free then. So the
    /// room that is left under overload goes to many small requests rather than to the next large
    /// one (a dynamic threshold, after Choudhury and Hahne 1998), and predictions that were a
    /// little off still find room.
    ///
    /// Looked at when the request would start and three times more until it would end: others
    /// that are promised room later must still find it.
    pub(crate) fn fits_fairly(&self, when: (u64, u64), need: (u64, u64), capacity_tokens: u64) -> bool {
        let (tokens, stay_us) = need;
        let fair = |promised: u64| {
            let free = capacity_tokens.saturating_sub(promised);
            tokens <= free && (promised * 2 <= capacity_tokens || tokens * 4 <= free)
        };
        // Everything promised counted together: no need to look at when each starts and ends.
        fair(self.reserved_tokens)
            || (0..4).all(|third| fair(self.at(when.0, when.1 + stay_us * third / 3).2))
    }

    /// Predicted step time with one more request of `context_tokens`, at `at_us`, µs.
    pub(crate) fn step_us(&self, profile: &CostProfile, when: (u64, u64), context_tokens: u64) -> f64 {
        let (batch, context, _) = self.at(when.0, when.1);
        profile.decode_us(batch + 1, context + context_tokens)
    }

    #[cfg(test)]
    pub(crate) fn add_for_test(&mut self, count: u64, context_tokens: u64) {
        for i in 0..count {
            self.reserve(DecodeSlot {
                request: RequestId(1_000_000 + i),
                start_us: 0,
                finish_us: 1_000_000,
                context_tokens: context_tokens / count,
                reserved_tokens: context_tokens / count,
                running: true,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slot(id: u64, start_us: u64, finish_us: u64, tokens: u64) -> DecodeSlot {
        DecodeSlot {
            request: RequestId(id),
            start_us,
            finish_us,
            context_tokens: tokens,
            reserved_tokens: tokens * 2,
            running: false,
        }
    }

    #[test]
    fn load_counts_those_alive_at_the_moment_asked_for() {
        let mut ledger = DecodeLedger::default();
        ledger.reserve(slot(1, 0, 100, 10));
        ledger.reserve(slot(2, 50, 200, 20));
        assert_eq!(ledger.at(0, 60), (2, 30, 60));
        assert_eq!(ledger.at(0, 150), (1, 20, 40));
        assert_eq!(ledger.at(0, 10), (1, 10, 20));
        ledger.start(RequestId(1), 30);
        assert_eq!(ledger.now(), (1, 10, 20));
        assert_eq!(ledger.at(200, 250).0, 1, "an overdue decode is still there");
        assert_eq!(ledger.at_most(250).0, 0, "the paper's rule takes it for gone");
        assert!(ledger.release(RequestId(1)) && !ledger.release(RequestId(1)));
        assert_eq!(ledger.all(), (1, 20));
    }

    #[test]
    fn room_frees_in_order_of_predicted_ends() {
        let mut ledger = DecodeLedger::default();
        ledger.reserve(slot(1, 0, 100, 10));
        ledger.reserve(slot(2, 0, 300, 10));
        assert!(
            ledger.fits_fairly((0, 0), (2, 0), 50) && !ledger.fits_fairly((0, 0), (3, 0), 50),
            "a quarter of ten"
        );
        assert!(ledger.fits_fairly((0, 150), (30, 0), 50), "by then the first has ended and most is free");
        assert!(!ledger.fits_fairly((0, 150), (31, 0), 50));
    }

    proptest! {
        #[test]
        fn totals_equal_the_sum_of_slots(ops in proptest::collection::vec((0u64..8, 1u64..50, any::<bool>()), 0..60)) {
            let mut ledger = DecodeLedger::default();
            for (id, tokens, add) in ops {
                if add && !ledger.slots().iter().any(|s| s.request == RequestId(id)) {
                    ledger.reserve(slot(id, 0, tokens, tokens));
                } else if add {
                    ledger.start(RequestId(id), 3);
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
