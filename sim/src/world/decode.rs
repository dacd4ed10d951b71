//! The decode side: room, the hand-off's landing, tokens, the end.

use baton_scheduler::Input;
use baton_store::Input as StoreInput;

use super::World;
use super::requests::Phase;
use crate::engine::{GapMark, Sequence};
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
        let room_blocks = live.room_tokens.div_ceil(self.setup.scheduler.block_tokens);
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
        // is quicker than to wait for two sources.
        let here = self.tokens_of(slot, opened.hbm);
        self.finish_onboard_at_once(at, id, opened.onboard);
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
        let (id, router, prefill, decode) = (live.id, live.router, live.prefill, live.decode);
        let all = u32::try_from(live.keys.len()).unwrap_or(u32::MAX);
        live.prefill_open = false;
        self.step_store(decode, StoreInput::Seal { owner: id, upto_blocks: all });
        self.look_at_shared(decode);
        self.step_store(prefill, StoreInput::Close { owner: id });
        self.door(prefill);
        self.tell_of(router, Input::HandoffFinished { request: id });
    }

    /// The conductor says that decoding may begin.
    pub(crate) fn start_decode(&mut self, slot: u32, at: u32) {
        let live = &mut self.live[slot as usize];
        let local = live.prefill == live.decode;
        live.phase = Phase::Decoding;
        let left_tokens = live.output_tokens - live.emitted_tokens - u32::from(local);
        let (id, context_tokens) = (live.id, live.prompt_tokens + u64::from(local));
        let block = self.setup.scheduler.block_tokens;
        let excess = live.output_tokens.saturating_sub(live.room_tokens);
        if excess > 0 {
            // Room is asked for when it is known to be short: at the start, not at the overflow.
            self.step_store(at, StoreInput::GrowRoom { owner: id, room_blocks: excess.div_ceil(block) });
        }
        if left_tokens == 0 {
            self.finish_request(at, slot, crate::engine::GapSummary::default());
            return;
        }
        let sequence = Sequence { slot, left_tokens, context_tokens, first_token_due: !local, mark: GapMark::default() };
        let now_us = self.now_us;
        self.nodes[at as usize].engine.add_sequence(now_us, sequence);
        self.touch(at);
    }

    pub(crate) fn first_token(&mut self, slot: u32, at_us: u64) {
        let live = &mut self.live[slot as usize];
        if live.used && live.first_token_us == 0 {
            live.first_token_us = at_us;
        }
    }

    pub(crate) fn decoded(&mut self, at: u32, slot: u32, mark: &GapMark) {
        let gaps = self.nodes[at as usize].engine.gaps.summary(mark, &mut self.metrics.scratch);
        self.finish_request(at, slot, gaps);
    }

    fn finish_request(&mut self, at: u32, slot: u32, gaps: crate::engine::GapSummary) {
        let live = &mut self.live[slot as usize];
        let (id, router, output_tokens) = (live.id, live.router, live.output_tokens);
        live.decode_open = false;
        live.prefill_open = false;
        self.step_store(at, StoreInput::Close { owner: id });
        self.end(slot, Status::Completed, Some(gaps));
        self.tell_of(router, Input::DecodeFinished { request: id, output_tokens });
        self.door(at);
    }

    /// The KV cannot reach its decode node.
    pub(crate) fn handoff_lost(&mut self, slot: u32) {
        let live = &self.live[slot as usize];
        let (router, request) = (live.router, live.id);
        self.tell_of(router, Input::HandoffFailed { request });
    }
}
