//! The prefill leg: pin, bring what is missing, compute, hand off layer by layer.

use std::time::{Duration, Instant};

use baton_engine::{Sequence, SequenceId};
use baton_tiers::{Pool as _, Refused};
use baton_transports::FetchedBlock;
use baton_types::{BlockKey, RequestId, TokenLogprob};
use baton_wire::v1;

use super::job::{Job, Stage};
use super::links::{Cargo, Outcome, plan_of};
use super::pool::{EnginePool, open};
use super::sink::Outlet;
use super::worker::Worker;

/// Passes for whose prompts blocks are pinned and brought ahead. A prompt behind them looks later, and finds what
/// those before it computed; one that would only fill up another's last pass does not delay it. As the simulator's.
const PASSES_AHEAD: u64 = 2;

/// How long KV whose hand-off failed is kept without a word from the conductor.
const STRANDED_LEASE: Duration = Duration::from_secs(8);

impl Worker {
    pub(super) fn prefill_ordered(&mut self, request: u64, attempt: u32, order: v1::Prefill) {
        self.release(request);
        let naming = (self.chain_seed, self.engine.shape().block_tokens);
        let mut job = match Job::to_prefill(attempt, order.work, order.room_tokens, naming) {
            Ok(job) => job,
            Err(why) => return self.refuse(request, attempt, &why),
        };
        job.to = order.decode;
        job.fetch = order.fetch_from.map(|from| (from, order.fetch_blocks));
        self.arrivals += 1;
        (job.order, job.arrival) = (order.order, self.arrivals);
        let place = (job.order, job.arrival);
        self.jobs.insert(request, job);
        if self.can_ever_hold(request) {
            self.queue.insert(place, request);
        }
    }

    /// Whether the pool is large enough for a leg; if not, it has failed and is gone.
    pub(super) fn can_ever_hold(&mut self, request: u64) -> bool {
        let shape = self.engine.shape();
        let Some(job) = self.jobs.get(&request) else { return false };
        let tokens = job.token_count + job.leg_room_tokens();
        let (needed, blocks) = (tokens.div_ceil(shape.block_tokens as usize), shape.blocks);
        if needed > blocks as usize {
            let message = format!("{tokens} tokens need {needed} blocks, the pool has {blocks}");
            self.leg_failed(request, "room", message);
            return false;
        }
        true
    }

    /// An order that cannot be carried out anywhere.
    pub(super) fn refuse(&mut self, request: u64, attempt: u32, why: &str) {
        let failure = v1::Failure {
            stage: "engine".into(),
            message: why.into(),
            of_request: true,
            ..v1::Failure::default()
        };
        self.facts.push(v1::Fact { request, attempt, fact: Some(v1::fact::Fact::Failure(failure)) });
    }

    /// A leg that failed here and may do better elsewhere.
    pub(super) fn leg_failed(&mut self, request: u64, stage: &str, message: String) {
        let failure =
            v1::Failure { stage: stage.into(), message, of_request: false, ..v1::Failure::default() };
        self.tell(request, v1::fact::Fact::Failure(failure));
        self.release(request);
    }

    /// Opens prefills in order, some passes ahead, as long as there is room for their KV.
    pub(super) fn open_prefills(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let block_tokens = self.engine.shape().block_tokens;
        let left = |job: &Job| job.token_count as u64 - u64::from(job.computed_tokens(block_tokens));
        let opened = |job: &&Job| matches!(job.stage, Stage::Loading | Stage::Computing);
        let mut ahead: u64 = self.jobs.values().filter(opened).map(left).sum();
        while ahead < PASSES_AHEAD * u64::from(self.pass_tokens)
            && let Some((&place, &request)) = self.queue.first_key_value()
        {
            let Some(job) = self.jobs.get_mut(&request) else {
                self.queue.remove(&place);
                continue;
            };
            let tokens = job.token_count + job.leg_room_tokens();
            match open(&mut self.cache, request, job, (tokens, block_tokens)) {
                Ok(hold) => {
                    self.queue.remove(&place);
                    job.stage = Stage::Loading;
                    job.readable_blocks = hold.readable_blocks;
                    job.awaits_cache = hold.waiting;
                    job.hold = Some(hold);
                    ahead += left(job);
                    self.learn(request);
                    self.begin_fetch(request);
                }
                // Whoever ends makes room; nothing overtakes.
                Err(Refused::NoRoom { .. }) if self.holds_others(request) => return,
                Err(refused) => self.leg_failed(request, "room", refused.to_string()),
            }
        }
    }

    /// Whether waiting helps: somebody else holds blocks that will come free.
    pub(super) fn holds_others(&self, request: u64) -> bool {
        self.jobs.iter().any(|(other, job)| *other != request && job.hold.is_some())
    }

    /// Brings the blocks that the conductor saw elsewhere, if they are still missing here.
    fn begin_fetch(&mut self, request: u64) {
        let Some(job) = self.jobs.get_mut(&request) else { return };
        let Some((from, blocks)) = job.fetch.take() else { return };
        let upto = (blocks as usize).min(job.chain.len());
        let have = job.readable_blocks as usize;
        if upto <= have || job.awaits_cache {
            return self.tell(request, v1::fact::Fact::Fetch(true));
        }
        job.awaits_fetch = true;
        let keys = job.chain[have..upto].to_vec();
        let attempt = job.attempt;
        self.links.fetch(request, attempt, from, keys);
    }

    pub(super) fn fetched(&mut self, request: u64, attempt: u32, blocks: Vec<FetchedBlock>) {
        let Some(job) = self.jobs.get_mut(&request).filter(|j| j.attempt == attempt && j.awaits_fetch) else {
            return;
        };
        job.awaits_fetch = false;
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
        self.tell(request, v1::fact::Fact::Fetch(landed > have));
    }

    /// Starts whoever has everything that could be brought.
    pub(super) fn start_loaded(&mut self) {
        let loaded = |job: &Job| job.stage == Stage::Loading && !job.awaits_cache && !job.awaits_fetch;
        let ready: Vec<u64> = self.jobs.iter().filter(|(_, job)| loaded(job)).map(|(r, _)| *r).collect();
        for request in ready {
            self.start_prefill(request);
        }
    }

    fn start_prefill(&mut self, request: u64) {
        let shape = self.engine.shape().clone();
        let Some(job) = self.jobs.get_mut(&request) else { return };
        let whole = job.sampling.prompt_logprobs.is_some();
        let computed_tokens = if whole { 0 } else { job.computed_tokens(shape.block_tokens) };
        job.cached_tokens = u64::from(computed_tokens);
        job.stage = Stage::Computing;
        let sequence = Sequence {
            id: SequenceId(request),
            tokens: job.tokens.clone(),
            prompt_tokens: job.prompt_tokens,
            computed_tokens,
            blocks: job.slots().to_vec(),
            sampling: job.sampling.clone(),
            hold: true,
            layerwise: job.to.is_some(),
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
            let mut outlet = self.open_outlet(request, peer);
            let job = self.jobs.get(&request).expect("it was there above");
            outlet.send_blocks(job.slots(), sent, (shape.layers, self.engine.view()));
            self.outlets.insert(SequenceId(request), outlet);
        }
    }

    fn open_outlet(&mut self, request: u64, peer: v1::Peer) -> Outlet {
        let shape = self.engine.shape();
        let job = self.jobs.get(&request).expect("outlets are opened for jobs at hand");
        let tokens = u32::try_from(job.tokens.len()).unwrap_or(u32::MAX);
        let blocks = tokens.div_ceil(shape.block_tokens);
        let cargo = Cargo { plan: plan_of(blocks, shape), note: job.packed_tokens() };
        let (attempt, block_tokens, layers) = (job.attempt, shape.block_tokens, shape.layers as usize);
        let departure = self.links.hand_off(request, attempt, peer, cargo);
        let waiting = departure.waits.then(|| vec![0; layers]);
        Outlet { slices: departure.slices, waiting, attempt, tokens, block_tokens }
    }

    /// A hand-off that waited has its turn: what its prefill has computed leaves now.
    pub(super) fn departs(&mut self, request: u64, attempt: u32) {
        let id = SequenceId(request);
        let Some(outlet) = self.outlets.get_mut(&id).filter(|outlet| outlet.attempt == attempt) else {
            return;
        };
        let Some(job) = self.jobs.get(&request) else { return };
        let is_whole = outlet.is_ready();
        outlet.depart(job.slots(), self.engine.view());
        if is_whole {
            self.outlets.remove(&id);
        }
    }

    /// The KV is complete: everything leaves that has not yet, and the blocks are readable here.
    pub(super) fn computed(&mut self, id: SequenceId, compute_us: u64) {
        if self.outlets.get(&id).is_some_and(|outlet| !outlet.is_ready()) {
            self.outlets.remove(&id);
        }
        let Some(job) = self.jobs.get_mut(&id.0) else { return };
        job.compute_us = compute_us;
        if job.stage == Stage::Computing {
            let blocks = u32::try_from(job.chain.len()).unwrap_or(u32::MAX);
            let mut pool = EnginePool(self.engine.as_mut());
            // What another request fills at the same time is that one's to seal.
            let _ = self.cache.seal(RequestId(id.0), blocks, &mut pool);
        }
    }

    pub(super) fn prompt_logprobs(&mut self, id: SequenceId, logprobs: &[TokenLogprob]) {
        let told = v1::PromptLogprobs { logprobs: logprobs.iter().map(v1::Logprob::from).collect() };
        self.tell(id.0, v1::fact::Fact::PromptLogprobs(told));
    }

    pub(super) fn drew(&mut self, id: SequenceId, mut token: v1::Token) {
        let request = id.0;
        let Some(job) = self.jobs.get_mut(&request) else { return };
        job.drawn.push(token.token);
        let finished = token.finish != 0;
        let first = job.stage == Stage::Computing;
        let done = v1::Prefilled { compute_us: job.compute_us, cached_tokens: job.cached_tokens };
        let local = job.to.is_none();
        if first {
            job.stage = Stage::Held;
            token.cached_tokens = Some(job.cached_tokens);
        }
        self.tell(request, v1::fact::Fact::Token(token));
        if first {
            // After the token: whoever decodes on needs it.
            self.tell(request, v1::fact::Fact::Prefilled(done));
            if finished && local {
                self.decode_ended(request);
            }
        } else if finished {
            self.decode_ended(request);
        }
    }

    /// The hand-off's task is over.
    pub(super) fn flight_ended(&mut self, request: u64, attempt: u32, outcome: Outcome) {
        let Some(job) = self.jobs.get(&request).filter(|j| j.attempt == attempt && j.to.is_some()) else {
            return;
        };
        match outcome {
            Ok(bytes) => {
                self.handoff_bytes += bytes;
                // The peer has it all, verified; what is cached here stays as cache.
                if job.stage == Stage::Held {
                    self.release(request);
                }
            }
            Err(why) => {
                tracing::warn!(request, attempt, why, "hand-off failed");
                self.outlets.remove(&SequenceId(request));
                self.tell(request, v1::fact::Fact::Handoff(false));
                if let Some(job) = self.jobs.get_mut(&request) {
                    job.stranded = Some(Instant::now());
                }
            }
        }
    }

    /// Lets go what nobody asked for again: the word that it had all arrived may be what was lost.
    pub(super) fn reap_stranded(&mut self) {
        let over = |job: &Job| job.stranded.is_some_and(|since| since.elapsed() > STRANDED_LEASE);
        let requests: Vec<u64> = self.jobs.iter().filter(|(_, job)| over(job)).map(|(r, _)| *r).collect();
        for request in requests {
            tracing::info!(request, "nobody wants its KV any more");
            self.release(request);
        }
    }

    /// Another decode instance shall have the KV that is complete here.
    pub(super) fn handoff_ordered(&mut self, request: u64, attempt: u32, to: Option<v1::Peer>) {
        let Some(job) = self.jobs.get_mut(&request).filter(|j| j.stage == Stage::Held) else {
            // Not a failed hand-off: the request has to be prefilled again, anywhere.
            let message = "its KV is not here, or not any more".into();
            let failure =
                v1::Failure { stage: "handoff".into(), message, of_request: false, ..v1::Failure::default() };
            let fact = v1::fact::Fact::Failure(failure);
            return self.facts.push(v1::Fact { request, attempt, fact: Some(fact) });
        };
        job.attempt = attempt;
        job.stranded = None;
        job.to.clone_from(&to);
        let Some(peer) = to else { return self.tell(request, v1::fact::Fact::Handoff(false)) };
        let mut outlet = self.open_outlet(request, peer);
        let layers = self.engine.shape().layers;
        let job = self.jobs.get(&request).expect("it was there above");
        let blocks = job.tokens.len().div_ceil(self.engine.shape().block_tokens as usize);
        outlet.send_blocks(job.slots(), blocks, (layers, self.engine.view()));
        if outlet.is_ready() {
            self.outlets.insert(SequenceId(request), outlet);
        }
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
