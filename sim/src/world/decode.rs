//! The decode side: room, the hand-off's landing, tokens, the end.

use baton_legs::pairs::{EmittedTokens, outgrown_room};
use baton_legs::{Complete, Input as LegInput, Leg};
use baton_store::Input as StoreInput;
use baton_types::RequestId;

use super::World;
use super::inbox::ConductorInput;
use crate::engine::{GapMark, Sequence, summarise};
use crate::metrics::Status;
use baton_types::simulated::Handoff;

impl World {
    /// Offers KV to its decode node as soon as it may leave, and lets it flow there once there is room.
    pub(crate) fn begin_handoff(&mut self, slot: u32) {
        let live = &self.live[slot as usize];
        let (request, at) = (live.id, live.decode);
        if live.handoff.is_some() || live.landed || !self.may_leave(slot) {
            return;
        }
        match self.leg_at(at, slot) {
            Some(Leg::WaitingForRoom(_)) => self.leg(at, LegInput::Offered { request }),
            Some(Leg::Expecting(_)) => {
                self.leg(at, LegInput::Offered { request });
                // Blocks that the decode node holds already need not travel; those below HBM travel anyway, it
                // is quicker than to wait for two sources. They are readable there once sealed.
                let here = self.tokens_of(slot, self.live[slot as usize].decode_blocks);
                self.fly_handoff(slot, here);
            }
            _ => self.handoff_lost(slot),
        }
    }

    /// Whether some of a request's KV may leave its prefill node: layers as they are computed, or all of it.
    fn may_leave(&self, slot: u32) -> bool {
        match self.prefill_leg(slot) {
            Some(Leg::Computing(_)) => {
                let live = &self.live[slot as usize];
                let layerwise = self.setup.handoff == Handoff::Layerwise;
                layerwise
                    && live.prefill != live.decode
                    && self.nodes[live.prefill as usize].engine.has_begun(slot)
            }
            Some(leg) => *leg == Leg::Held(Complete::Leaves),
            None => false,
        }
    }

    /// A decode leg gives its room to another whose KV is there already.
    pub(crate) fn withdraw_room(&mut self, slot: u32, at: u32, to: RequestId) {
        let request = self.live[slot as usize].id;
        self.step_store(at, StoreInput::Close { owner: request });
        self.leg(at, LegInput::Withdrawn { request, to });
    }

    /// The conductor orders that decoding begins.
    pub(crate) fn start_decode(&mut self, slot: u32, at: u32) {
        let live = &mut self.live[slot as usize];
        let request = live.id;
        self.oracle.witness(live.decode == at, || format!("{request} decodes elsewhere: {live:?}"));
        if live.prefill == at {
            // Computed by the prefill, and let out now that the request may stay (ADR 0004).
            live.streamed_tokens += 1;
            self.first_token(slot, self.now_us);
        }
        self.leg(at, LegInput::StartDecode { request });
    }

    /// The engine decodes: on with what it computed, of which a token is drawn already, or with what has landed.
    pub(crate) fn decode(&mut self, slot: u32, at: u32) {
        let live = &self.live[slot as usize];
        let local = live.prefill == at;
        let answer_tokens = live.streamed_tokens + u32::from(local);
        let left_tokens = live.output_tokens - answer_tokens;
        let context_tokens = live.prompt_tokens + u64::from(live.drawn_token());
        let room_tokens = live.promised_tokens(answer_tokens).min(live.free_tokens());
        let sequence = Sequence { slot, left_tokens, room_tokens, context_tokens, first_token_due: !local };
        self.engine(at, |engine, moment, ended| engine.add_sequence(moment, sequence, ended));
    }

    /// Answers that used their room up: the pairs hear of those that are longer than was promised, and the others get
    /// more KV, as long as there is some.
    pub(crate) fn take_starved(&mut self, at: u32) {
        let mut starved = std::mem::take(&mut self.nodes[at as usize].engine.starved);
        for (slot, emitted_tokens) in starved.drain(..) {
            // It may have given its KV to one before.
            if self.nodes[at as usize].engine.holds(slot).1
                && let Some(tokens) = self.more_room(slot, at, emitted_tokens)
            {
                self.nodes[at as usize].engine.extend(slot, tokens);
            }
        }
        self.nodes[at as usize].engine.starved = starved;
    }

    /// Tokens that a decode may emit from here on, having emitted `emitted_tokens` in its engine. None: it gave its KV
    /// up.
    fn more_room(&mut self, slot: u32, at: u32, emitted_tokens: u32) -> Option<u32> {
        let live = &mut self.live[slot as usize];
        let (request, answer_tokens) = (live.id, live.streamed_tokens + emitted_tokens);
        if emitted_tokens > 0 && answer_tokens - live.given_tokens >= live.room_tokens {
            live.room_tokens = outgrown_room(live.room_tokens);
            let (router, input) = (live.router, live.emitted(answer_tokens));
            self.send(router, input);
        }
        while self.live[slot as usize].free_tokens() <= emitted_tokens {
            self.leg(at, LegInput::Starved { request });
            if !matches!(self.leg_at(at, slot), Some(Leg::Decoding { .. })) {
                return None;
            }
        }
        let live = &self.live[slot as usize];
        Some(live.promised_tokens(answer_tokens).min(live.free_tokens() - emitted_tokens))
    }

    /// Reserves more blocks for an answer.
    pub(crate) fn grow(&mut self, slot: u32, at: u32, blocks: u32) {
        let request = self.live[slot as usize].id;
        if self.grow_store(at, request, blocks) {
            let tokens = u64::from(blocks) * u64::from(self.setup.scheduler.block_tokens);
            self.live[slot as usize].kv_tokens += tokens;
        } else {
            self.leg(at, LegInput::NotGrown { request, blocks });
        }
    }

    /// A token that its client has waited for: the very first, or the first after a loss.
    pub(crate) fn first_token(&mut self, slot: u32, at_us: u64) {
        let live = &mut self.live[slot as usize];
        live.attempt_first_us = at_us;
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
    pub(crate) fn finish_request(&mut self, at: u32, slot: u32) {
        let live = &mut self.live[slot as usize];
        self.gaps_us.append(&mut live.gaps_us);
        let gaps = summarise(&mut self.gaps_us);
        let (id, router, output_tokens) = (live.id, live.router, live.output_tokens);
        let all = EmittedTokens { last: true, ..live.tokens(output_tokens) };
        let answered = ConductorInput::Answered(all, gaps.worst_tenth_us);
        let whole = live.streamed_tokens == output_tokens && gaps.count + 1 == u64::from(output_tokens);
        self.oracle.witness(whole, || {
            format!(
                "{id} asked for {output_tokens} tokens, got {} with {} gaps",
                live.streamed_tokens, gaps.count
            )
        });
        self.leg(at, LegInput::Ended { request: id });
        self.end(slot, Status::Completed, Some(gaps));
        self.send(router, answered);
    }
}
