//! The prefill leg: pin, bring what is missing, compute, hand off layer by layer.

use baton_engine::{Sequence, SequenceId};
use baton_legs::{Input, Leg};
use baton_tiers::Pool as _;
use baton_transports::FetchedBlock;
use baton_types::{BlockKey, FetchPlan, InstanceId, RequestId, TokenLogprob};
use baton_wire::v1;
use baton_wire::v1::failure::Stage;

use super::job::Job;
use super::links::{HandoffContent, Outcome, plan_of};
use super::pool::EnginePool;
use super::sink::KvStream;
use super::worker::Worker;

impl Worker {
    pub(super) fn prefill_ordered(&mut self, request: u64, attempt: u32, order: v1::Prefill) {
        self.release(request);
        let naming = (self.chain_seed, self.engine.shape().block_tokens);
        let mut job = match Job::to_prefill(attempt, order.work, order.room_tokens, naming) {
            Ok(job) => job,
            Err(why) => return self.refuse(request, attempt, &why.to_string()),
        };
        job.to = order.decode;
        let plan =
            |from: &v1::Peer| FetchPlan { from: InstanceId(from.instance), blocks: order.fetch_blocks };
        let fetch = order.fetch_from.as_ref().map(plan);
        (job.fetch_from, job.order) = (order.fetch_from, order.order);
        let (work, stays, order) = (job.work(), job.to.is_none(), job.order);
        self.jobs.insert(request, job);
        self.leg(Input::Prefill { request: RequestId(request), work, stays, fetch, order });
    }

    /// An order that cannot be carried out anywhere.
    pub(super) fn refuse(&mut self, request: u64, attempt: u32, why: &str) {
        let failure = v1::Failure {
            stage: Stage::Engine.into(),
            message: why.into(),
            of_request: true,
            ..v1::Failure::default()
        };
        self.facts.push(v1::Fact { request, attempt, fact: Some(v1::fact::Fact::Failure(failure)) });
    }

    /// A leg that failed here and may do better elsewhere.
    pub(super) fn leg_failed(&mut self, request: u64, stage: Stage, message: String) {
        let attempt = self.jobs.get(&request).map_or(0, |job| job.attempt);
        self.fail(request, attempt, stage, message);
        self.release(request);
    }

    /// Reports to the conductor that a leg failed and that a retry elsewhere may succeed.
    pub(super) fn fail(&mut self, request: u64, attempt: u32, stage: Stage, message: String) {
        let failure =
            v1::Failure { stage: stage.into(), message, of_request: false, ..v1::Failure::default() };
        self.facts.push(v1::Fact { request, attempt, fact: Some(v1::fact::Fact::Failure(failure)) });
    }

    /// Opens prefills, as far as it is time and there is room for their KV.
    pub(super) fn open_prefills(&mut self) {
        loop {
            let queued = self.legs.queued();
            self.leg(Input::OpenNext);
            if self.legs.queued() == queued {
                return;
            }
        }
    }

    /// Fetches blocks that the conductor saw elsewhere, behind those that are here.
    pub(super) fn start_fetch(&mut self, request: u64, have_blocks: u32, upto_blocks: u32) {
        let Some(job) = self.jobs.get_mut(&request) else { return };
        let from = job.fetch_from.take().expect("a fetch is planned with its holder");
        let keys = job.chain[have_blocks as usize..upto_blocks as usize].to_vec();
        let attempt = job.attempt;
        self.links.fetch(request, attempt, from, keys);
    }

    /// Whether blocks are being brought for a prefill.
    fn loads(&self, request: u64) -> bool {
        matches!(self.legs.get(RequestId(request)), Some(Leg::Loading(_)))
    }

    pub(super) fn fetched(&mut self, request: u64, attempt: u32, blocks: Vec<FetchedBlock>) {
        let loads = self.loads(request);
        let Some(job) = self.jobs.get_mut(&request).filter(|job| job.attempt == attempt && loads) else {
            return;
        };
        let block_bytes = self.engine.shape().block_bytes();
        let have = job.readable_blocks as usize;
        let mut pool = EnginePool(self.engine.as_mut());
        let mut landed = have;
        for (at, block) in (have..).zip(&blocks) {
            let whole = block.bytes.len() == block_bytes;
            let expected = whole && job.chain.get(at).is_some_and(|key| key.0 == block.key);
            let Some(slot) = job.slots().get(at).copied().filter(|_| expected) else { break };
            pool.write(slot, &block.bytes);
            landed = at + 1;
        }
        job.readable_blocks = u32::try_from(landed).unwrap_or(u32::MAX);
        let sealed = self.cache.seal(RequestId(request), job.readable_blocks, &mut pool);
        if let Err(why) = sealed {
            tracing::warn!(request, %why, "fetched blocks are used once and not kept");
        }
        let (request, cached_blocks) = (RequestId(request), job.readable_blocks);
        self.leg(Input::FetchEnded { request, cached_blocks });
    }

    /// Everything is here that could be brought.
    pub(super) fn start_prefill(&mut self, request: u64, cached_tokens: u64) {
        let shape = self.engine.shape().clone();
        let Some(job) = self.jobs.get_mut(&request) else { return };
        let whole = job.sampling.prompt_logprobs.is_some();
        job.cached_tokens = if whole { 0 } else { cached_tokens };
        let computed_tokens = u32::try_from(job.cached_tokens).unwrap_or(u32::MAX);
        let sequence = Sequence {
            id: SequenceId(request),
            tokens: job.tokens.clone(),
            prompt_tokens: job.prompt_tokens,
            computed_tokens,
            blocks: job.slots().to_vec(),
            sampling: job.sampling.clone(),
            leaves: job.to.is_some(),
            order: job.order,
        };
        if let Err(why) = self.engine.start(sequence) {
            let (attempt, why) = (job.attempt, why.to_string());
            self.refuse(request, attempt, &why);
            return self.release(request);
        }
        let job = self.jobs.get(&request).expect("it was there above");
        let sent = (computed_tokens / shape.block_tokens) as usize;
        if let Some(peer) = job.to.clone() {
            let kv_stream = self.open_kv_stream(request, peer);
            let job = self.jobs.get(&request).expect("it was there above");
            kv_stream.send_blocks(job.slots(), sent, shape.layers);
            self.kv_streams.insert(SequenceId(request), kv_stream);
        }
    }

    fn open_kv_stream(&mut self, request: u64, peer: v1::Peer) -> KvStream {
        let shape = self.engine.shape();
        let job = self.jobs.get(&request).expect("outlets are opened for jobs at hand");
        let tokens = u32::try_from(job.tokens.len()).unwrap_or(u32::MAX);
        let blocks = tokens.div_ceil(shape.block_tokens);
        let content = HandoffContent { plan: plan_of(blocks, shape), note: job.packed_tokens() };
        let (attempt, block_tokens) = (job.attempt, shape.block_tokens);
        let slices = self.links.hand_off(request, attempt, peer, content);
        KvStream { slices, tokens, block_tokens }
    }

    /// The KV is complete: everything leaves that has not yet, and the blocks are readable here.
    pub(super) fn computed(&mut self, id: SequenceId, compute_us: u64) {
        self.kv_streams.remove(&id);
        let Some(job) = self.jobs.get_mut(&id.0) else { return };
        job.compute_us = compute_us;
        self.leg(Input::Computed { request: RequestId(id.0) });
    }

    pub(super) fn prompt_logprobs(&mut self, id: SequenceId, logprobs: &[TokenLogprob]) {
        let report = v1::PromptLogprobs { logprobs: logprobs.iter().map(v1::Logprob::from).collect() };
        self.report(id.0, v1::fact::Fact::PromptLogprobs(report));
    }

    pub(super) fn drew(&mut self, id: SequenceId, mut token: v1::Token) {
        let request = id.0;
        let Some(job) = self.jobs.get_mut(&request) else { return };
        job.drawn.push(token.token);
        let finished = token.finish != 0;
        let leg = self.legs.get(RequestId(request));
        let prefilled = matches!(leg, Some(Leg::Held(_) | Leg::Decoding { local: true }));
        let first = prefilled && job.drawn.len() == 1;
        let done = v1::Prefilled { compute_us: job.compute_us, cached_tokens: job.cached_tokens };
        let local = job.to.is_none();
        if first {
            token.cached_tokens = Some(job.cached_tokens);
        }
        self.report(request, v1::fact::Fact::Token(token));
        if first {
            // The report follows the token, because the decode node needs the token.
            self.report(request, v1::fact::Fact::Prefilled(done));
            if finished && local {
                self.decode_ended(request);
            }
        } else if finished {
            self.decode_ended(request);
        }
    }

    /// The hand-off's task is over.
    pub(super) fn flight_ended(&mut self, request: u64, attempt: u32, outcome: Outcome) {
        if !self.jobs.get(&request).is_some_and(|j| j.attempt == attempt && j.to.is_some()) {
            return;
        }
        let ok = outcome.is_ok();
        match outcome {
            Ok(bytes) => self.handoff_bytes += bytes,
            Err(why) => {
                tracing::warn!(request, attempt, %why, "hand-off failed");
                self.kv_streams.remove(&SequenceId(request));
                self.report(request, v1::fact::Fact::Handoff(false));
            }
        }
        // After a success the peer has it all, verified; what is cached here stays as cache.
        let now_us = self.now_us();
        self.leg(Input::HandedOff { request: RequestId(request), ok, now_us });
    }

    /// Another decode instance shall have the KV that is complete here.
    pub(super) fn handoff_ordered(&mut self, request: u64, attempt: u32, to: Option<v1::Peer>) {
        let id = RequestId(request);
        let Some(job) =
            self.jobs.get_mut(&request).filter(|_| matches!(self.legs.get(id), Some(Leg::Held(_))))
        else {
            // Not a failed hand-off: the request has to be prefilled again, anywhere.
            return self.fail(request, attempt, Stage::Handoff, "its KV is not here, or not any more".into());
        };
        job.attempt = attempt;
        job.to.clone_from(&to);
        if to.is_none() {
            return self.report(request, v1::fact::Fact::Handoff(false));
        }
        self.leg(Input::HandOff { request: id });
    }

    /// Sends KV that is complete here.
    pub(super) fn send_all(&mut self, request: u64) {
        let Some(peer) = self.jobs.get(&request).and_then(|job| job.to.clone()) else { return };
        let kv_stream = self.open_kv_stream(request, peer);
        let shape = self.engine.shape();
        let job = self.jobs.get(&request).expect("it was there above");
        let blocks = job.tokens.len().div_ceil(shape.block_tokens as usize);
        kv_stream.send_blocks(job.slots(), blocks, shape.layers);
    }

    /// Bytes for a peer: as far as they are readable and verified.
    pub(super) fn wanted(&mut self, keys: &[BlockKey], reply: super::links::Reply) {
        let owner = self.helper();
        let keys = self.cache.full_keys(keys);
        // A reader pins from the root on; who asks may hold the beginning.
        let mut chain = keys.first().map(|key| self.cache.ancestors(*key)).unwrap_or_default();
        let before = chain.len();
        chain.extend(&keys);
        let readable = self.cache.read_for_peer(owner, &chain).unwrap_or(0) as usize;
        let readable = readable.saturating_sub(before);
        let block_bytes = self.engine.shape().block_bytes();
        let pool = EnginePool(self.engine.as_mut());
        let mut blocks = Vec::new();
        for key in &keys[..readable.min(keys.len())] {
            let mut bytes = vec![0u8; block_bytes];
            if self.cache.read_block(*key, &pool, &mut bytes).is_err() {
                break;
            }
            let checksum = baton_transports::checksum(&bytes);
            blocks.push(FetchedBlock { key: key.0, bytes: bytes.into(), checksum });
        }
        self.cache.close(owner);
        let _ = reply.send(blocks);
    }
}
