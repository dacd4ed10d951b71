//! The decode leg: make room, take KV in, decode, keep what was written as cache.

use std::sync::Arc;

use baton_engine::{Sequence, SequenceId};
use baton_legs::{Input, Leg};
use baton_tiers::{Hold, HoldRefusal};
use baton_transports::HandoffTicket;
use baton_types::{BlockKey, ChainHasher, RequestId, Sampling};
use baton_wire::v1;
use baton_wire::v1::failure::Stage;
use bytes::Bytes;

use super::job::Job;
use super::links::{ExpectedTransfer, plan_of};
use super::pool::EnginePool;
use super::worker::Worker;

impl Worker {
    pub(super) fn expect_ordered(&mut self, request: u64, attempt: u32, order: v1::Expect) {
        self.release(request);
        let block_tokens = self.engine.shape().block_tokens;
        let job = match Job::expected(attempt, order.work, order.room_tokens, block_tokens) {
            Ok(job) => job,
            Err(why) => return self.refuse(request, attempt, &why.to_string()),
        };
        let work = job.work();
        self.jobs.insert(request, job);
        self.leg(Input::Expect { request: RequestId(request), work });
    }

    /// There is room: from now on its KV is let in; earlier offers were asked to come again.
    pub(super) fn admit(&mut self, request: u64) {
        let Some(job) = self.jobs.get(&request) else { return };
        let tokens = u32::try_from(job.token_count).unwrap_or(u32::MAX);
        let blocks = tokens.div_ceil(self.engine.shape().block_tokens);
        let plan = plan_of(blocks, self.engine.shape());
        let (attempt, have_blocks, slots) = (job.attempt, job.readable_blocks, job.slots().to_vec());
        self.links.expect(request, ExpectedTransfer::new(attempt, have_blocks, plan, slots));
    }

    /// A peer offers a request's KV.
    pub(super) fn offered(&mut self, ticket: HandoffTicket) {
        if self.jobs.get(&ticket.request).is_some_and(|job| job.attempt == ticket.attempt) {
            self.leg(Input::Offered { request: RequestId(ticket.request) });
        }
    }

    /// Another request needs the room of this one, unless its KV was offered meanwhile.
    pub(super) fn withdraw(&mut self, request: RequestId, to: RequestId) {
        if !self.links.withdraw(request.0) {
            return self.leg(Input::Offered { request });
        }
        self.cache.close(request);
        if let Some(job) = self.jobs.get_mut(&request.0) {
            (job.hold, job.readable_blocks) = (None, 0);
        }
        self.leg(Input::Withdrawn { request, to });
    }

    fn receiving(&mut self, ticket: HandoffTicket) -> Option<&mut Job> {
        let expects = matches!(self.legs.get(RequestId(ticket.request)), Some(Leg::Expecting(_)));
        self.jobs.get_mut(&ticket.request).filter(|job| expects && job.attempt == ticket.attempt)
    }

    /// The prefill leg says what the KV is for.
    pub(super) fn tokens_came(&mut self, ticket: HandoffTicket, note: &Bytes) {
        let Some(job) = self.receiving(ticket) else { return };
        if let Err(why) = job.take_tokens(note) {
            return self.leg_failed(ticket.request, Stage::Handoff, why.to_string());
        }
        self.learn(ticket.request);
    }

    /// Handles KV that has arrived and is verified. The conductor has its report already.
    pub(super) fn landed(&mut self, ticket: HandoffTicket) {
        let Some(job) = self.receiving(ticket) else { return };
        if job.tokens.is_empty() {
            return self.leg_failed(
                ticket.request,
                Stage::Handoff,
                "its tokens did not come with the KV".into(),
            );
        }
        self.leg(Input::Landed { request: RequestId(ticket.request) });
    }

    /// All of the prompt's KV is here: its blocks are readable.
    pub(super) fn seal(&mut self, request: u64) {
        let Some(job) = self.jobs.get(&request) else { return };
        let blocks = u32::try_from(job.chain.len()).unwrap_or(u32::MAX);
        let mut pool = EnginePool(self.engine.as_mut());
        // Blocks that another request brings at the same time are sealed by that request.
        let _ = self.cache.seal(RequestId(request), blocks, &mut pool);
    }

    pub(super) fn start_decode(&mut self, request: u64, attempt: u32, answer: &[u32]) {
        let Some(job) = self.jobs.get_mut(&request).filter(|j| j.attempt == attempt) else { return };
        job.answer = answer.to_vec();
        self.leg(Input::StartDecode { request: RequestId(request) });
    }

    /// Decodes with KV that has landed.
    pub(super) fn decode(&mut self, request: u64) {
        let Some(job) = self.jobs.get_mut(&request) else { return };
        let computed_tokens = u32::try_from(job.tokens.len()).unwrap_or(u32::MAX);
        let given = job.tokens.len() - job.prompt_tokens as usize;
        job.tokens.extend_from_slice(job.answer.get(given..).unwrap_or_default());
        let sequence = Sequence {
            id: SequenceId(request),
            tokens: job.tokens.clone(),
            prompt_tokens: job.prompt_tokens,
            computed_tokens,
            blocks: job.slots().to_vec(),
            sampling: without_prompt_logprobs(&job.sampling),
            leaves: false,
            order: 0,
        };
        if let Err(why) = self.engine.start(sequence) {
            self.leg_failed(request, Stage::Engine, why.to_string());
        }
    }

    /// More room for an answer that outgrew its own.
    pub(super) fn grow(&mut self, request: RequestId, blocks: u32) {
        match self.cache.grow(request, blocks) {
            Ok(slots) => self.extend(request.0, slots),
            Err(HoldRefusal::NoRoom { .. }) => self.leg(Input::NotGrown { request, blocks }),
            // Its KV is lost here, not its answer: another instance goes on from the tokens.
            Err(refused) => self.leg_failed(request.0, Stage::Room, refused.to_string()),
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
        self.leg(Input::Ended { request: RequestId(request) });
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

/// The settings of a leg whose prompt was computed elsewhere: the prefill leg has reported the prompt's logprobs.
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
