//! Engines as cost models: prefill passes and decode steps in exact integer picoseconds.
//!
//! An engine works in *strides*: one prefill pass, one mixed step, or a run of decode steps over an
//! unchanged batch. A run of decode steps is one stride because its time is an arithmetic series
//! (`StepCost::run_ps`); whatever joins in the middle cuts it at the end of the step in progress.
//! So fast-forwarding gives exactly what stepping gives (ADR 0002, `tests::stepping_equals`).

mod gaps;

use std::collections::VecDeque;
use std::sync::Arc;

use baton_types::{CostProfile, StepCost};

pub use gaps::{GapLog, GapMark, GapSummary};

/// Picoseconds in a microsecond.
pub const PS_PER_US: u64 = 1_000_000;

/// How an engine divides its time between prefills and decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// A waiting prefill goes first and stalls the running decodes (vLLM without chunked prefill).
    PrefillFirst,
    /// Each decode step carries up to this many prompt tokens.
    Fixed(u32),
    /// Each decode step carries as many prompt tokens as fit in this time, µs.
    Target(u64),
}

/// A prefill under way.
#[derive(Clone, Debug)]
pub struct Job {
    /// The request's slot in the world.
    pub slot: u32,
    /// Jobs run in ascending order.
    pub order: u64,
    /// Tokens still to compute.
    pub left_tokens: u64,
    /// Tokens whose KV exists: cached and computed ones.
    pub prefix_tokens: u64,
    /// Whether a pass has touched it.
    pub started: bool,
    /// Engine time spent on it so far, ps.
    pub spent_ps: u64,
}

/// A decode under way.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The request's slot in the world.
    pub slot: u32,
    /// Tokens still to emit.
    pub left_tokens: u32,
    /// Tokens whose KV exists.
    pub context_tokens: u64,
    /// Whether its first token comes out of its first step here (its prefill was elsewhere).
    pub first_token_due: bool,
    /// Where its gaps begin in the log.
    pub mark: GapMark,
}

/// What one stride consists of.
#[derive(Clone, Debug)]
struct Stride {
    start_ps: u64,
    end_ps: u64,
    /// Prompt tokens given to each job of the pass, by slot.
    chunks: Vec<(u32, u64)>,
    /// Decode steps taken by every running sequence.
    steps: u64,
    /// Batch context at its start, tokens.
    context_tokens: u64,
    /// Batch at its start, and what a step of it costs.
    batch: u64,
    cost: StepCost,
    /// When the next stride may start: earlier than `end_ps` only in a pipeline.
    free_ps: u64,
}

/// What happened when a stride ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A prefill is complete.
    Prefilled {
        /// Whose.
        slot: u32,
        /// Engine time spent on it, µs.
        compute_us: u64,
    },
    /// A sequence emitted its first token at this time.
    FirstToken {
        /// Whose.
        slot: u32,
        /// When, µs.
        at_us: u64,
    },
    /// A sequence emitted its last token.
    Decoded {
        /// Whose.
        slot: u32,
        /// Where its gaps lie in the log.
        mark: GapMark,
    },
}

/// One engine.
#[derive(Clone, Debug)]
pub struct Engine {
    profile: Arc<CostProfile>,
    mix: Mix,
    pass_tokens: u64,
    pipeline_nodes: u64,
    /// Measured speed over the profile's, per mille; a slow node is below 1000.
    speed_permille: u64,
    jobs: VecDeque<Job>,
    running: Vec<Sequence>,
    /// Arrived during a stride; they run from the next one on.
    joining: Vec<Sequence>,
    context_tokens: u64,
    stride: Option<Stride>,
    /// Pipelined passes that have left the entrance: (end, chunks).
    in_pipeline: VecDeque<Stride>,
    clock_ps: u64,
    version: u32,
    /// The version that `poll` last spoke of.
    announced: u32,
    step_once: bool,
    /// Jobs whose first pass was planned since the last look.
    pub started: Vec<u32>,
    /// Gaps of the decodes.
    pub gaps: GapLog,
    /// Time spent in prefill passes and mixed steps, ps.
    pub prefill_busy_ps: u64,
    /// Time spent in pure decode steps, ps.
    pub decode_busy_ps: u64,
    /// Steps whose batch or context lay outside the profile's range.
    pub outside_steps: u64,
}

const fn to_us(ps: u64) -> u64 {
    ps.div_ceil(PS_PER_US)
}

impl Engine {
    /// An idle engine.
    #[must_use]
    pub fn new(profile: Arc<CostProfile>, mix: Mix, pass_tokens: u32, pipeline_nodes: u32) -> Self {
        Self {
            profile,
            mix,
            pass_tokens: u64::from(pass_tokens.max(1)),
            pipeline_nodes: u64::from(pipeline_nodes.max(1)),
            speed_permille: 1000,
            jobs: VecDeque::new(),
            running: Vec::new(),
            joining: Vec::new(),
            context_tokens: 0,
            stride: None,
            in_pipeline: VecDeque::new(),
            clock_ps: 0,
            version: 0,
            announced: 0,
            step_once: false,
            started: Vec::new(),
            gaps: GapLog::default(),
            prefill_busy_ps: 0,
            decode_busy_ps: 0,
            outside_steps: 0,
        }
    }

    /// Makes every decode step a stride of its own: the slow way, for the proof of equality.
    pub const fn step_once(&mut self) {
        self.step_once = true;
    }

    /// Sets the speed from the next stride on, per mille of the profile's.
    pub fn set_speed_permille(&mut self, permille: u64) {
        self.speed_permille = permille.max(1);
    }

    /// Sequences decoding.
    #[must_use]
    pub fn batch(&self) -> usize {
        self.running.len() + self.joining.len()
    }

    /// Context of the batch, tokens.
    #[must_use]
    pub const fn context_tokens(&self) -> u64 {
        self.context_tokens
    }

    /// Jobs not finished.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// Prompt tokens not computed yet.
    #[must_use]
    pub fn job_tokens(&self) -> u64 {
        self.jobs.iter().map(|j| j.left_tokens).sum()
    }

    /// Adds a prefill whose cached blocks are in HBM. `poll` must follow.
    pub fn add_job(&mut self, now_us: u64, job: Job) {
        self.cut(now_us);
        let at = self.jobs.partition_point(|j| j.started || j.order <= job.order);
        self.jobs.insert(at, job);
    }

    /// Adds a decode whose KV is here. `poll` must follow.
    pub fn add_sequence(&mut self, now_us: u64, sequence: Sequence) {
        self.cut(now_us);
        self.joining.push(sequence);
    }

    /// Takes a request out, whatever it does here. `poll` must follow.
    pub fn remove(&mut self, now_us: u64, slot: u32) {
        self.cut(now_us);
        // What is in a stride already goes on computing for nobody until that ends.
        self.jobs.retain(|j| j.slot != slot);
        self.joining.retain(|s| s.slot != slot);
        if let Some(at) = self.running.iter().position(|s| s.slot == slot) {
            let gone = self.running.remove(at);
            self.context_tokens -= gone.context_tokens;
        }
    }

    /// Forgets everything (the process died). Returns the slots that were here, in order, with the
    /// tokens that each had still to emit (0 for prefills).
    pub fn clear(&mut self) -> Vec<(u32, u32)> {
        let decodes = self.running.iter().chain(&self.joining).map(|s| (s.slot, s.left_tokens));
        let slots = self.jobs.iter().map(|j| (j.slot, 0)).chain(decodes).collect();
        self.jobs.clear();
        self.running.clear();
        self.joining.clear();
        self.context_tokens = 0;
        self.stride = None;
        self.in_pipeline.clear();
        self.version += 1;
        self.gaps = GapLog::default();
        slots
    }

    fn scaled(&self, us: f64) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "costs are positive and far below 2^63 ps")]
        let ps = (us * 1e6) as u64;
        if self.speed_permille == 1000 { ps } else { ps / self.speed_permille * 1000 }
    }

    /// Ends a run of decode steps at the end of the step in progress at `now_us`.
    fn cut(&mut self, now_us: u64) {
        let Some(stride) = self.stride.as_mut() else { return };
        if stride.steps <= 1 || !stride.chunks.is_empty() {
            return;
        }
        let ends = |steps: u64| stride.start_ps + stride.cost.run_ps(stride.context_tokens, stride.batch, steps);
        let (mut low, mut high) = (1, stride.steps);
        while low < high {
            let middle = u64::midpoint(low, high);
            if to_us(ends(middle)) >= now_us { high = middle } else { low = middle + 1 }
        }
        if low < stride.steps {
            stride.end_ps = ends(low);
            stride.free_ps = stride.end_ps;
            stride.steps = low;
            self.version += 1;
        }
    }

    /// Cost of a decode step of the present batch, at the present speed.
    fn step_cost(&self) -> StepCost {
        let batch = u32::try_from(self.running.len()).unwrap_or(u32::MAX);
        let mut cost = self.profile.step_cost(batch);
        if self.speed_permille != 1000 {
            cost.base_ps = cost.base_ps / self.speed_permille * 1000;
            cost.slope_ps = cost.slope_ps * 1000 / self.speed_permille;
        }
        cost
    }

    /// Plans the next stride if the engine is free. Returns when it must be looked at next, with
    /// the version to hand to [`Engine::advance`] then; `None` when that is known already.
    pub fn poll(&mut self, now_us: u64) -> Option<(u64, u32)> {
        if self.stride.is_none() {
            self.take_joining();
            if self.jobs.iter().all(|j| j.left_tokens == 0) && self.running.is_empty() {
                return None;
            }
            if self.clock_ps + PS_PER_US <= now_us * PS_PER_US {
                self.clock_ps = now_us * PS_PER_US;
            }
            self.stride = Some(self.plan());
            self.version += 1;
        }
        if self.announced == self.version {
            return None;
        }
        self.announced = self.version;
        self.stride.as_ref().map(|s| (to_us(s.free_ps), self.version))
    }

    fn take_joining(&mut self) {
        for mut sequence in self.joining.drain(..) {
            sequence.mark = self.gaps.mark();
            self.context_tokens += sequence.context_tokens;
            self.running.push(sequence);
        }
    }

    fn plan(&mut self) -> Stride {
        let prefills = self.jobs.iter().any(|j| j.left_tokens > 0);
        match (prefills, self.running.is_empty(), self.mix) {
            (false, ..) => self.plan_decodes(),
            (true, true, Mix::Fixed(tokens)) if self.pipeline_nodes == 1 => self.plan_pass(u64::from(tokens).max(1), false),
            (true, true, _) | (true, false, Mix::PrefillFirst) => self.plan_pass(self.pass_tokens, false),
            (true, false, Mix::Fixed(tokens)) => self.plan_pass(u64::from(tokens).max(1), true),
            (true, false, Mix::Target(us)) => {
                let tokens = self.mixed_tokens(us);
                if tokens == 0 { self.plan_decodes() } else { self.plan_pass(tokens, true) }
            }
        }
    }

    /// Prompt tokens of the first job that fit beside a decode step within `target_us`.
    #[expect(clippy::cast_precision_loss, reason = "step times are far below 2^53")]
    fn mixed_tokens(&self, target_us: u64) -> u64 {
        let decode_us = self.step_cost().step_ps(self.context_tokens) as f64 / 1e6;
        let speed = self.speed_permille as f64 / 1000.0;
        let budget = (target_us as f64 - decode_us) * speed + self.profile.shared_us;
        let prefix = self.jobs.iter().find(|j| j.left_tokens > 0).map_or(0, |j| j.prefix_tokens);
        self.profile.chunk_within(budget, prefix, self.pass_tokens)
    }

    /// A pass over the first jobs, up to `tokens`, with a decode step of the batch in it if `mixed`.
    fn plan_pass(&mut self, tokens: u64, mixed: bool) -> Stride {
        let (mut budget, mut attention_us) = (tokens, 0.0);
        let mut chunks = Vec::with_capacity(2);
        for job in &mut self.jobs {
            if budget == 0 {
                break;
            }
            let take = job.left_tokens.min(budget);
            if take == 0 {
                continue;
            }
            attention_us += self.profile.attention_us(take, job.prefix_tokens);
            if !job.started {
                job.started = true;
                self.started.push(job.slot);
            }
            job.left_tokens -= take;
            job.prefix_tokens += take;
            budget -= take;
            chunks.push((job.slot, take));
        }
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
        let dense_us = self.profile.dense_us((tokens - budget) as f64);
        let shared_us = if mixed { self.profile.shared_us } else { 0.0 };
        let mut cost_ps = self.scaled((dense_us + attention_us - shared_us).max(1.0));
        if mixed {
            cost_ps += self.step_cost().step_ps(self.context_tokens);
        }
        self.prefill_busy_ps += cost_ps / self.pipeline_nodes;
        Stride {
            start_ps: self.clock_ps,
            end_ps: self.clock_ps + cost_ps,
            free_ps: self.clock_ps + cost_ps / self.pipeline_nodes,
            chunks,
            steps: u64::from(mixed),
            context_tokens: self.context_tokens,
            batch: self.running.len() as u64,
            cost: self.step_cost(),
        }
    }

    /// Decode steps until the first sequence ends.
    fn plan_decodes(&mut self) -> Stride {
        let least = self.running.iter().map(|s| s.left_tokens).min().unwrap_or(1).max(1);
        let steps = if self.step_once { 1 } else { u64::from(least) };
        let (cost, batch) = (self.step_cost(), self.running.len() as u64);
        let run_ps = cost.run_ps(self.context_tokens, batch, steps);
        self.note_range();
        Stride {
            start_ps: self.clock_ps,
            end_ps: self.clock_ps + run_ps,
            free_ps: self.clock_ps + run_ps,
            chunks: Vec::new(),
            steps,
            context_tokens: self.context_tokens,
            batch,
            cost,
        }
    }

    fn note_range(&mut self) {
        let valid = &self.profile.valid;
        let batch = self.running.len() as u64;
        let long = self.context_tokens > batch * valid.max_context_tokens.max(1);
        if batch > u64::from(valid.max_batch.max(1)) || long {
            self.outside_steps += 1;
        }
    }

    /// Takes in that the moment announced by [`Engine::poll`] came; stale versions do nothing.
    pub fn advance(&mut self, version: u32, ended: &mut Vec<Ended>) {
        if version != self.version {
            return;
        }
        let Some(stride) = self.stride.take() else { return };
        self.clock_ps = stride.free_ps;
        if stride.end_ps > stride.free_ps {
            self.in_pipeline.push_back(stride);
        } else {
            self.finish(&stride, ended);
        }
        self.version += 1;
    }

    /// When the next pipelined pass leaves, if any: to be looked at besides the stride.
    #[must_use]
    pub fn pipeline_end_us(&self) -> Option<u64> {
        self.in_pipeline.front().map(|s| to_us(s.end_ps))
    }

    /// Takes in that a pipelined pass left.
    pub fn drain_pipeline(&mut self, now_us: u64, ended: &mut Vec<Ended>) {
        while self.in_pipeline.front().is_some_and(|s| to_us(s.end_ps) <= now_us) {
            let stride = self.in_pipeline.pop_front().expect("looked at above");
            self.finish(&stride, ended);
        }
    }

    fn finish(&mut self, stride: &Stride, ended: &mut Vec<Ended>) {
        let took_ps = stride.end_ps - stride.start_ps;
        if stride.steps > 0 {
            self.finish_steps(stride, ended);
        } else if !self.running.is_empty() {
            self.gaps.stall(took_ps);
        }
        let total: u64 = stride.chunks.iter().map(|(_, n)| n).sum();
        for (slot, tokens) in &stride.chunks {
            let Some(at) = self.jobs.iter().position(|j| j.slot == *slot) else { continue };
            let share = u128::from(took_ps) * u128::from(*tokens) / u128::from(total.max(1));
            let job = &mut self.jobs[at];
            job.spent_ps += u64::try_from(share).unwrap_or(u64::MAX);
            let in_flight = self.in_pipeline.iter().any(|s| s.chunks.iter().any(|(c, _)| c == slot));
            if job.left_tokens == 0 && !in_flight {
                ended.push(Ended::Prefilled { slot: *slot, compute_us: to_us(job.spent_ps) / self.pipeline_nodes });
                self.jobs.remove(at);
            }
        }
    }

    /// Every running sequence takes the stride's steps.
    fn finish_steps(&mut self, stride: &Stride, ended: &mut Vec<Ended>) {
        let (batch, steps) = (self.running.len() as u64, stride.steps);
        let mixed = !stride.chunks.is_empty();
        let first_ps = if mixed { stride.end_ps - stride.start_ps } else { stride.cost.step_ps(stride.context_tokens) };
        if !mixed {
            self.decode_busy_ps += stride.end_ps - stride.start_ps;
        }
        self.gaps.steps(steps, first_ps, stride.cost.slope_ps * stride.batch);
        let first_end_us = to_us(stride.start_ps + first_ps);
        let taken = u32::try_from(steps).unwrap_or(u32::MAX);
        self.context_tokens += batch * steps;
        for sequence in &mut self.running {
            sequence.left_tokens = sequence.left_tokens.saturating_sub(taken);
            sequence.context_tokens += steps;
            if sequence.first_token_due {
                sequence.first_token_due = false;
                sequence.mark.skip_first_step();
                ended.push(Ended::FirstToken { slot: sequence.slot, at_us: first_end_us });
            }
        }
        let mut gone = 0;
        self.running.retain(|s| {
            if s.left_tokens == 0 {
                gone += s.context_tokens;
                ended.push(Ended::Decoded { slot: s.slot, mark: s.mark });
            }
            s.left_tokens > 0
        });
        self.context_tokens -= gone;
    }

    /// Drops gaps that nobody will ask for any more.
    pub fn forget_gaps(&mut self) {
        let oldest = self.running.iter().map(|s| s.mark.at()).min();
        self.gaps.forget_before(oldest);
    }
}

