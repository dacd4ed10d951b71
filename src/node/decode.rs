//! The decode leg: make room, take KV in, decode, keep what was written as cache.

use std::sync::Arc;

use baton_engine::{Sequence, SequenceId};
use baton_tiers::{Hold, Refused};
use baton_transports::{SliceAt, Ticket};
use baton_types::{BlockKey, ChainHasher, RequestId, Sampling};
use baton_wire::v1;
use bytes::Bytes;

use super::job::{Job, Stage};
use super::links::plan_of;
use super::pool::{EnginePool, open};
use super::worker::Worker;

/// Blocks asked for when an answer outgrows its room.
const GROW_BLOCKS: u32 = 4;

impl Worker {
    pub(super) fn expect_ordered(&mut self, request: u64, attempt: u32, order: v1::Expect) {
        self.release(request);
        let block_tokens = self.engine.shape().block_tokens;
        let mut job = match Job::expected(attempt, order.work, order.room_tokens, block_tokens) {
            Ok(job) => job,
            Err(why) => return self.refuse(request, attempt, &why),
        };
        job.stage = Stage::Expecting;
        self.jobs.insert(request, job);
        if self.can_ever_hold(request) {
            self.crowded.push(request);
        }
    }

    /// Opens holds for expected KV, oldest first, as far as there is room.
    pub(super) fn let_decodes_in(&mut self) {
        let block_tokens = self.engine.shape().block_tokens;
        let waiting = std::mem::take(&mut self.crowded);
        for request in waiting {
            let Some(job) = self.jobs.get_mut(&request) else { continue };
            let tokens = job.token_count + job.room_tokens as usize;
            let hold = match open(&mut self.cache, request, job, (tokens, block_tokens)) {
                Ok(hold) => hold,
                Err(Refused::NoRoom { .. }) => {
                    self.crowded.push(request);
                    continue;
                }
                Err(refused) => {
                    self.leg_failed(request, "store", refused.to_string());
                    continue;
                }
            };
            job.readable_blocks = hold.readable_blocks;
            let have_blocks = hold.readable_blocks;
            job.hold = Some(hold);
            // From now on its KV is let in; earlier offers were asked to come again.
            let blocks = u32::try_from(job.token_count).unwrap_or(u32::MAX).div_ceil(block_tokens);
            self.links.expect(request, job.attempt, have_blocks, plan_of(blocks, self.engine.shape()));
        }
    }

    fn receiving(&mut self, ticket: Ticket) -> Option<&mut Job> {
        let job = self.jobs.get_mut(&ticket.request)?;
        (job.attempt == ticket.attempt && job.stage == Stage::Expecting).then_some(job)
    }

    /// The prefill leg says what the KV is for.
    pub(super) fn tokens_came(&mut self, ticket: Ticket, note: &Bytes) {
        let Some(job) = self.receiving(ticket) else { return };
        if let Err(why) = job.take_tokens(note) {
            return self.leg_failed(ticket.request, "handoff", why);
        }
        self.learn(ticket.request);
    }

    pub(super) fn slice(&mut self, ticket: Ticket, at: SliceAt, bytes: &Bytes) {
        let Some(job) = self.receiving(ticket) else { return };
        let slot = job.slots().get(at.block as usize).copied();
        let shape = self.engine.shape();
        let fits = bytes.len() == shape.layer_bytes && at.layer < shape.layers;
        match slot.filter(|_| fits) {
            Some(slot) => self.engine.write_layer(slot, at.layer, bytes),
            // What is left out here would be read as KV later.
            None => self.leg_failed(ticket.request, "handoff", format!("a slice that has no place: {at:?}")),
        }
    }

    /// Every byte is there and verified; the conductor has been told.
    pub(super) fn landed(&mut self, ticket: Ticket) {
        let Some(job) = self.receiving(ticket) else { return };
        if job.tokens.is_empty() {
            return self.leg_failed(ticket.request, "handoff", "its tokens did not come with the KV".into());
        }
        job.stage = Stage::Landed;
        let blocks = u32::try_from(job.chain.len()).unwrap_or(u32::MAX);
        let mut pool = EnginePool(self.engine.as_mut());
        // Where another flight brings the same block, that one's request seals it; all of the bytes
        // are here, whoever does.
        let _ = self.cache.seal(RequestId(ticket.request), blocks, &mut pool);
    }

    pub(super) fn start_decode(&mut self, request: u64, attempt: u32, answer: &[u32]) {
        let Some(job) = self.jobs.get_mut(&request).filter(|j| j.attempt == attempt) else { return };
        match job.stage {
            // Its prefill ran here: the sequence waits in the engine.
            Stage::Held if job.to.is_none() => {
                job.stage = Stage::Decoding;
                self.engine.proceed(SequenceId(request));
            }
            // Told twice.
            Stage::Decoding => {}
            Stage::Landed => self.decode_landed(request, answer),
            _ => {
                let message = format!("it was told to decode at stage {:?}", job.stage);
                self.leg_failed(request, "engine", message);
            }
        }
    }

    fn decode_landed(&mut self, request: u64, answer: &[u32]) {
        let Some(job) = self.jobs.get_mut(&request) else { return };
        let computed_tokens = u32::try_from(job.tokens.len()).unwrap_or(u32::MAX);
        let given = job.tokens.len() - job.prompt_tokens as usize;
        job.tokens.extend_from_slice(answer.get(given..).unwrap_or_default());
        job.stage = Stage::Decoding;
        let sequence = Sequence {
            id: SequenceId(request),
            tokens: job.tokens.clone(),
            prompt_tokens: job.prompt_tokens,
            computed_tokens,
            blocks: job.slots().to_vec(),
            sampling: without_prompt_logprobs(&job.sampling),
            hold: false,
            layerwise: false,
            order: 0,
        };
        if let Err(why) = self.engine.start(sequence) {
            self.leg_failed(request, "engine", why.to_string());
        }
    }

    /// The next token has no slot.
    pub(super) fn starved(&mut self, id: SequenceId) {
        let request = id.0;
        if !self.jobs.contains_key(&request) {
            return;
        }
        let more = self.cache.grow(RequestId(request), GROW_BLOCKS);
        match more.or_else(|_| self.cache.grow(RequestId(request), 1)) {
            Ok(slots) => self.extend(request, slots),
            Err(Refused::NoRoom { .. }) => self.preempt_for(request),
            // Its KV is lost here, not its answer: another instance goes on from the tokens.
            Err(refused) => self.leg_failed(request, "room", refused.to_string()),
        }
    }

    /// KV is short: the youngest gives its own up, and `request` goes on unless that is itself. So the oldest
    /// always comes to its end, and makes room for the others. Requests are numbered in order of arrival.
    fn preempt_for(&mut self, request: u64) {
        loop {
            // A prefill whose KV is on its way elsewhere leaves soon by itself.
            let holds = |job: &Job| job.hold.is_some() && job.to.is_none();
            let youngest = self.jobs.iter().rev().find(|(_, job)| holds(job)).map(|(id, _)| *id);
            let victim = youngest.unwrap_or(request).max(request);
            // Alone it has all there is: elsewhere there may be more.
            let stage = if self.holds_others(victim) { "preempted" } else { "room" };
            self.leg_failed(victim, stage, "KV ran short: it gave way to older requests".to_owned());
            if victim == request {
                return;
            }
            if let Ok(slots) = self.cache.grow(RequestId(request), GROW_BLOCKS) {
                self.extend(request, slots);
                return;
            }
        }
    }

    fn extend(&mut self, request: u64, slots: Vec<u32>) {
        self.engine.extend(SequenceId(request), &slots);
        if let Some(hold) = self.jobs.get_mut(&request).and_then(|job| job.hold.as_mut()) {
            hold.slots.extend(slots);
        }
    }

    /// The answer is complete: what was written stays as cache for the next turn.
    pub(super) fn decode_ended(&mut self, request: u64) {
        let chain_seed = self.chain_seed;
        let block_tokens = self.engine.shape().block_tokens;
        let Some(mut job) = self.jobs.remove(&request) else { return };
        self.links.forget(request);
        let Some(hold) = job.hold.take() else { return };
        let (kept, tokens) = kept_chain(&job, &hold, (chain_seed, block_tokens));
        if let Some(announcer) = &mut self.announcer {
            announcer.learn(&kept, &tokens);
        }
        let slots = hold.slots[..kept.len()].to_vec();
        let mut pool = EnginePool(self.engine.as_mut());
        // Failing to keep them costs the next turn some time, nothing else.
        if let Err(why) = self.cache.adopt(RequestId(request), &kept, &slots, &mut pool) {
            tracing::debug!(request, %why, "the answer's blocks are not kept");
        }
    }
}

/// The settings of a leg whose prompt was computed elsewhere: there its logprobs were told.
fn without_prompt_logprobs(sampling: &Arc<Sampling>) -> Arc<Sampling> {
    match sampling.prompt_logprobs {
        Some(_) => Arc::new(Sampling { prompt_logprobs: None, ..(**sampling).clone() }),
        None => Arc::clone(sampling),
    }
}

/// Keys of the full blocks of prompt and answer, and their tokens, the last one excepted: its KV was never computed.
fn kept_chain(job: &Job, hold: &Hold, naming: (u64, u32)) -> (Vec<BlockKey>, Vec<u32>) {
    let (seed, block_tokens) = naming;
    let mut tokens = job.tokens.clone();
    // A local decode's sequence was started without what it drew; a landed one's with its first tokens.
    tokens.extend_from_slice(&job.drawn);
    tokens.truncate(tokens.len().saturating_sub(1));
    let size = block_tokens as usize;
    let mut chain = job.chain.clone();
    let mut hasher = ChainHasher::resume(seed, chain.last().copied().unwrap_or(job.root));
    for block in tokens.chunks_exact(size).skip(chain.len()) {
        chain.push(hasher.push_tokens(block));
    }
    chain.truncate((tokens.len() / size).min(hold.slots.len()));
    (chain, tokens)
}
