//! Prompts that share passes of an engine: what one may share with, and whom it would make late by that.

use super::{DispatchedPrefill, PrefillLedger};

/// After this time an engine counts as having begun the work that it was sent, µs: later work joins none of its passes but the last one.
const BEGINS_US: u64 = 2_000;

impl PrefillLedger {
    /// Tokens that wait here, or were sent and have not begun: a prompt that comes now shares its pass with them, as far as
    /// they fit in. The one that waits at that place does not count itself.
    pub(crate) fn joinable_tokens(&self, now_us: u64, own: Option<usize>) -> u64 {
        let own_tokens = own.map_or(0, |at| self.waiting[at].new_tokens);
        let begun = self.begun(now_us);
        let sent = self.dispatched.iter().filter(|d| !begun(d));
        self.waiting_tokens - own_tokens + sent.map(|d| d.new_tokens).sum::<u64>()
    }

    /// Counts work that is sent as beside all that has not begun, and those as beside it.
    pub(super) fn count_beside(&mut self, work: &mut DispatchedPrefill) {
        let begun = self.begun(work.sent_us);
        for other in self.dispatched.iter_mut().filter(|d| !begun(d)) {
            work.beside_tokens += other.new_tokens;
            other.beside_tokens += work.new_tokens;
        }
    }

    /// When the engine has begun what it was sent first, µs.
    const fn begins_us(&self) -> u64 {
        self.head_since_us.saturating_add(BEGINS_US)
    }

    /// Whether the engine has begun what it was sent.
    fn begun(&self, now_us: u64) -> impl Fn(&DispatchedPrefill) -> bool + use<> {
        let begins_us = self.begins_us();
        move |sent| now_us >= begins_us && sent.sent_us <= begins_us
    }

    /// The time until which work of `work_us` over `new_tokens` tokens must not be sent, µs, if there is one. Work that
    /// an engine has not begun yet shares passes of `pass_tokens` with work that is sent after it, and ends with them. So
    /// does the last pass of a prompt that it has begun and that takes several. That must make nothing late that was sent
    /// in time.
    pub(crate) fn shares_late_until_us(
        &self,
        now_us: u64,
        work: (u64, u64),
        pass_tokens: u64,
    ) -> Option<u64> {
        let (work_us, new_tokens) = work;
        let begins_us = self.begins_us();
        let begun = now_us >= begins_us;
        let done = self.dispatched.first().is_some_and(|head| begun && head.new_tokens <= pass_tokens);
        let end_us = now_us + self.computing_left_us(now_us);
        let mut room = pass_tokens;
        for sent in self.dispatched.iter().skip(usize::from(done)).rev() {
            let in_last_pass = sent.new_tokens.saturating_sub(1) % pass_tokens.max(1) + 1;
            let shared = new_tokens.min(room).min(pass_tokens.saturating_sub(in_last_pass));
            let later_us = work_us.saturating_mul(shared) / new_tokens.max(1);
            if end_us <= sent.deadline_us && end_us.saturating_add(later_us) > sent.deadline_us {
                let looked_at_us = if begun { sent.deadline_us } else { begins_us.min(sent.deadline_us) };
                return Some(looked_at_us.max(now_us) + 1);
            }
            room = room.saturating_sub(sent.new_tokens);
        }
        None
    }
}
