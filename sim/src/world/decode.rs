//! The decode side: room, the hand-off's landing, tokens, the end.

use baton_scheduler::Input;
use baton_store::Input as StoreInput;

use super::World;
use super::requests::Phase;
use crate::engine::{GapMark, Sequence, summarise};
use crate::metrics::Status;

impl World {
    /// Reserves HBM at the decode node and lets the KV flow there.
    pub(crate) fn begin_handoff(&mut self, slot: u32) {
        let live = &self.live[slot as usize];
        if live.handoff.is_some() || live.landed {
            return;
        }
        let at = live.decode;
        if !self.nodes[at as usize].alive {
            self.handoff_lost(slot);
            return;
        }
        if live.decode_open {
            return;
        }
        let id = live.id;
        let room_blocks = self.room_blocks(slot, at);
        let keys = std::mem::take(&mut self.live[slot as usize].keys);
        let opened = self.open_store(at, id, &keys, room_blocks);
        let live = &mut self.live[slot as usize];
        live.keys = keys;
        let Some(opened) = opened else {
            let crowded = &mut self.nodes[at as usize].crowded;
            if !crowded.contains(&slot) {
                crowded.push(slot);
            }
            return;
        };
        live.decode_open = true;
        // Blocks that this node holds already need not travel; those below HBM travel anyway, it
        // is quicker than to wait for two sources. They are readable here once sealed.
        let here = self.tokens_of(slot, opened.hbm);
        self.fly_handoff(slot, here);
    }

    /// Somebody left a decode node: whoever waits for room there tries again.
    pub(crate) fn let_decodes_in(&mut self, at: u32) {
        if self.nodes[at as usize].crowded.is_empty() {
            return;
        }
        let waiting = std::mem::take(&mut self.nodes[at as usize].crowded);
        for slot in waiting {
            self.begin_handoff(slot);
        }
    }

    /// All KV is at the decode node and the prefill is over.
    pub(crate) fn handoff_done(&mut self, slot: u32) {
        let live = &mut self.live[slot as usize];
        let (id, prefill, decode) = (live.id, live.prefill, live.decode);
        let all = u32::try_from(live.keys.len()).unwrap_or(u32::MAX);
        live.prefill_open = false;
        self.step_store(decode, StoreInput::Seal { owner: id, upto_blocks: all });
        self.step_store(prefill, StoreInput::Close { owner: id });
        self.report(slot, Input::HandoffFinished { request: id });
    }

    /// The conductor says that decoding may begin.
    pub(crate) fn start_decode(&mut self, slot: u32, at: u32) {
        let live = &mut self.live[slot as usize];
        let local = live.prefill == live.decode;
        let ready =
            live.phase == Phase::HandingOff && live.prefilled && (local || live.landed) && live.decode_open;
        self.oracle.witness(ready && live.decode == at, || {
            format!("{} decodes before its KV landed: {live:?}", live.id)
        });
        live.phase = Phase::Decoding;
        if local && live.streamed_tokens < live.output_tokens {
            // Computed by the prefill, and let out now that the request may stay (ADR 0004).
            live.streamed_tokens += 1;
            self.first_token(slot, self.now_us);
        }
        let live = &self.live[slot as usize];
        let left_tokens = live.output_tokens - live.streamed_tokens;
        let drawn = u64::from(local || live.prefill_streamed);
        let (id, context_tokens) = (live.id, live.prompt_tokens + drawn);
        let excess = left_tokens.saturating_sub(live.room_tokens);
        if excess > 0 {
            // Room is asked for when it is known to be short: at the start, not at the overflow.
            let room_blocks = excess.div_ceil(self.setup.scheduler.block_tokens);
            self.step_store(at, StoreInput::GrowRoom { owner: id, room_blocks });
        }
        if left_tokens == 0 {
            self.gaps_us.clear();
            self.finish_request(at, slot);
            return;
        }
        let sequence = Sequence { slot, left_tokens, context_tokens, first_token_due: !local };
        self.engine(at, |engine, moment, ended| engine.add_sequence(moment, sequence, ended));
    }

    /// A token that its client has waited for: the very first, or the first after a loss.
    pub(crate) fn first_token(&mut self, slot: u32, at_us: u64) {
        let live = &mut self.live[slot as usize];
        if live.first_token_us == 0 {
            live.first_token_us = at_us;
        } else {
            live.gaps_us.push(u32::try_from(at_us - live.last_token_us).unwrap_or(u32::MAX));
        }
        live.last_token_us = at_us;
    }

    pub(crate) fn decoded(&mut self, at: u32, slot: u32, emitted_tokens: u32, mark: &GapMark) {
        self.gaps_us.clear();
        self.nodes[at as usize].engine.gaps.collect(mark, &mut self.gaps_us);
        self.live[slot as usize].streamed_tokens += emitted_tokens;
        self.finish_request(at, slot);
    }

    /// The last token left; `gaps_us` holds the gaps of this stay.
    fn finish_request(&mut self, at: u32, slot: u32) {
        let live = &mut self.live[slot as usize];
        self.gaps_us.append(&mut live.gaps_us);
        let gaps = summarise(&mut self.gaps_us);
        let (id, router, output_tokens) = (live.id, live.router, live.output_tokens);
        let whole = live.streamed_tokens == output_tokens && gaps.count + 1 == u64::from(output_tokens);
        self.oracle.witness(whole, || {
            format!(
                "{id} asked for {output_tokens} tokens, got {} with {} gaps",
                live.streamed_tokens, gaps.count
            )
        });
        (live.decode_open, live.prefill_open) = (false, false);
        self.step_store(at, StoreInput::Close { owner: id });
        self.end(slot, Status::Completed, Some(gaps));
        self.tell_of(router, Input::DecodeFinished { request: id, output_tokens });
    }

    /// The KV cannot reach its decode node.
    pub(crate) fn handoff_lost(&mut self, slot: u32) {
        let request = self.live[slot as usize].id;
        self.report(slot, Input::HandoffFailed { request });
    }
}
