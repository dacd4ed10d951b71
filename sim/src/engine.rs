//! Engines as cost models: prefill passes and decode steps in exact integer picoseconds.
//!
//! An engine works in *strides*: one prefill pass, one mixed step, or a run of decode steps over an
//! unchanged batch. A run of decode steps is one stride because its time is an arithmetic series
//! (`StepCost::run_ps`); whatever joins or leaves in the middle cuts it at the end of the step in
//! progress. So fast-forwarding gives exactly what stepping gives (ADR 0002,
//! `tests::fast_forwarding_is_stepping`).
//!
//! A moment of the world has two halves: first everything that falls on it is handled, then idle
//! engines plan. A step that ends at this very microsecond has ended in both halves; what comes in
//! the first half still joins the next stride, what comes in the second half waits for that one's
//! first step to end. [`Moment`] says which half it is.

mod gaps;
mod plan;
mod progress;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use baton_types::{CostProfile, Rng};

pub use gaps::{GapLog, GapMark, GapSummary, summarise};
use plan::Stride;

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

/// A point of the world's time, in halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// When, µs.
    pub now_us: u64,
    /// Whether idle engines have planned at this time already.
    pub planned: bool,
}

/// A prefill to do.
#[derive(Clone, Debug)]
pub struct Job {
    /// The request's slot in the world.
    pub slot: u32,
    /// Jobs run in ascending order.
    pub order: u64,
    /// Tokens to compute, at least 1.
    pub left_tokens: u64,
    /// Tokens whose KV exists already.
    pub prefix_tokens: u64,
}

/// A decode to do.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The request's slot in the world.
    pub slot: u32,
    /// Tokens to emit, at least 1.
    pub left_tokens: u32,
    /// Of them, those that it has room for. Without room it has to be extended before the next stride is planned.
    pub room_tokens: u32,
    /// Tokens whose KV exists already.
    pub context_tokens: u64,
    /// Whether its first token here is the first since its client waits for one (its prefill was
    /// elsewhere): then there is no gap before it.
    pub first_token_due: bool,
}

/// A prefill under way.
#[derive(Clone, Debug)]
struct ActivePrefill {
    job: Job,
    /// Names it in strides: slots are used again.
    serial: u64,
    started: bool,
    /// Passes planned and not ended.
    passes: u32,
    /// Engine time spent on it so far, ps.
    spent_ps: u64,
}

/// A decode under way.
#[derive(Clone, Debug)]
struct ActiveDecode {
    sequence: Sequence,
    emitted_tokens: u32,
    mark: GapMark,
}

/// An event that the engine reports to the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// A prefill is complete.
    Prefilled {
        /// The request's slot in the world.
        slot: u32,
        /// Engine time spent on it, µs.
        compute_us: u64,
    },
    /// A sequence emitted its first token. The engine may report it late, at the end of the stride.
    FirstToken {
        /// The request's slot in the world.
        slot: u32,
        /// When the sequence emitted it, µs.
        at_us: u64,
    },
    /// A sequence emitted its last token.
    Decoded {
        /// The request's slot in the world.
        slot: u32,
        /// Tokens that it emitted here.
        emitted_tokens: u32,
        /// Where its gaps lie in the log.
        mark: GapMark,
    },
}

/// A decode that died with its engine, or gave its KV up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostDecode {
    /// The request's slot in the world.
    pub slot: u32,
    /// Tokens that it emitted here.
    pub emitted_tokens: u32,
    /// When the last of them left, µs; meaningless without any.
    pub last_token_us: u64,
    /// Its gaps here, µs.
    pub gaps_us: Vec<u32>,
}

impl LostDecode {
    const fn unbegun(slot: u32) -> Self {
        Self { slot, emitted_tokens: 0, last_token_us: 0, gaps_us: Vec::new() }
    }
}

/// One engine.
#[derive(Clone, Debug)]
pub struct Engine {
    profile: Arc<CostProfile>,
    mix: Mix,
    pass_tokens: u64,
    pipeline_nodes: u64,
    /// Most requests that it works on at once.
    max_running: usize,
    /// Speed over the profile's, per mille, without noise; a slow node is below 1000.
    rated_permille: u64,
    /// Speed of the present stride.
    speed_permille: u64,
    noise: Option<EngineNoise>,
    jobs: VecDeque<ActivePrefill>,
    running: Vec<ActiveDecode>,
    /// Arrived during a stride, or while it had as many as it may: they run once a stride begins with a place for them.
    /// With the number of their arrival among prefills and decodes.
    joining: Vec<(u64, Sequence)>,
    /// Context of `running` at the start of the stride.
    context_tokens: u64,
    stride: Option<Stride>,
    /// Pipelined passes that have left the entrance, in order of their end.
    in_pipeline: VecDeque<Stride>,
    clock_ps: u64,
    next_serial: u64,
    version: u32,
    /// The version that `poll` last spoke of.
    announced: u32,
    step_once: bool,
    /// Jobs whose first pass was planned since the last look.
    pub started: Vec<u32>,
    /// Sequences that used their room up since the last look, and the tokens that they emitted here. Each is to be
    /// extended or taken out before the next stride is planned.
    pub starved: Vec<(u32, u32)>,
    /// Gaps of the decodes.
    pub gaps: GapLog,
    /// Time spent in prefill passes and mixed steps, ps.
    pub prefill_busy_ps: u64,
    /// Time spent in pure decode steps, ps.
    pub decode_busy_ps: u64,
    /// Steps whose batch or context lay outside the profile's range.
    pub outside_steps: u64,
}

/// Noise of the time that strides take.
#[derive(Clone, Debug)]
struct EngineNoise {
    /// Most that a stride takes less or more, per mille.
    permille: u64,
    rng: Rng,
}

impl EngineNoise {
    /// Time of the next stride over what it would be without noise, per mille.
    fn next_permille(&mut self) -> u64 {
        1000 - self.permille + self.rng.below(2 * self.permille + 1)
    }
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
            max_running: usize::MAX,
            rated_permille: 1000,
            speed_permille: 1000,
            noise: None,
            jobs: VecDeque::new(),
            running: Vec::new(),
            joining: Vec::new(),
            context_tokens: 0,
            stride: None,
            in_pipeline: VecDeque::new(),
            clock_ps: 0,
            next_serial: 0,
            version: 0,
            announced: 0,
            step_once: false,
            started: Vec::new(),
            starved: Vec::new(),
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

    /// Lets at most so many requests, at least one, be prefilled or decoded at once; the others wait.
    pub fn limit_requests(&mut self, max_running: u32) {
        self.max_running = max_running.max(1) as usize;
    }

    /// How many more requests it may begin.
    fn free_seqs(&self) -> usize {
        let begun = self.running.len() + self.jobs.iter().filter(|job| job.started).count();
        self.max_running.saturating_sub(begun)
    }

    /// Whether there are prompt tokens that it may compute now.
    fn can_prefill(&self) -> bool {
        let left = |job: &&ActivePrefill| job.job.left_tokens > 0;
        self.jobs.iter().find(left).is_some_and(|first| first.started || self.free_seqs() > 0)
    }

    /// Sets the speed from the next stride on, per mille of the profile's. `poll` must follow.
    pub fn set_speed_permille(&mut self, at: Moment, permille: u64, ended: &mut Vec<EngineEvent>) {
        self.cut(at, ended);
        self.rated_permille = permille.max(1);
    }

    /// Makes each stride take up to `permille` less or more time than by the engine's speed, evenly distributed.
    pub fn add_noise(&mut self, permille: u32, rng: Rng) {
        self.noise = Some(EngineNoise { permille: permille.into(), rng });
    }

    /// Sequences decoding.
    #[must_use]
    pub fn batch(&self) -> usize {
        self.running.len() + self.joining.len()
    }

    /// Context of the sequences that decode, as it is at `now_us`, tokens.
    #[must_use]
    pub fn context_tokens(&self, now_us: u64) -> u64 {
        let done = self.stride.as_ref().filter(|s| s.chunks.is_empty()).map_or(0, |s| s.steps_by(now_us));
        self.context_tokens + done * self.running.len() as u64
    }

    /// Jobs not finished.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// Whether a request prefills here, and whether it decodes here: for audits.
    #[must_use]
    pub fn holds(&self, slot: u32) -> (bool, bool) {
        let decodes =
            self.running.iter().map(|d| d.sequence.slot).chain(self.joining.iter().map(|(_, s)| s.slot));
        (self.jobs.iter().any(|p| p.job.slot == slot), decodes.into_iter().any(|s| s == slot))
    }

    /// Whether the first pass of a request's prefill has been planned.
    #[must_use]
    pub fn has_begun(&self, slot: u32) -> bool {
        self.jobs.iter().any(|p| p.started && p.job.slot == slot)
    }

    /// Adds a prefill whose cached blocks are in HBM. `poll` must follow.
    pub fn add_job(&mut self, at: Moment, job: Job, ended: &mut Vec<EngineEvent>) {
        self.cut(at, ended);
        self.next_serial += 1;
        let place = self.jobs.partition_point(|p| p.started || p.job.order <= job.order);
        let prefilling =
            ActivePrefill { job, serial: self.next_serial, started: false, passes: 0, spent_ps: 0 };
        self.jobs.insert(place, prefilling);
    }

    /// Adds a decode whose KV is here. `poll` must follow.
    pub fn add_sequence(&mut self, at: Moment, sequence: Sequence, ended: &mut Vec<EngineEvent>) {
        self.cut(at, ended);
        self.next_serial += 1;
        if self.max_running < usize::MAX && !sequence.first_token_due {
            // It keeps the place that it had when its prompt was computed here.
            let behind = self.joining.partition_point(|(came, _)| *came == 0);
            self.joining.insert(behind, (0, sequence));
        } else {
            self.joining.push((self.next_serial, sequence));
        }
    }

    /// Takes a request out, whatever it does here. `poll` must follow.
    pub fn remove(&mut self, at: Moment, slot: u32, ended: &mut Vec<EngineEvent>) {
        let first_us = self.stride.as_ref().map_or(u64::MAX, Stride::first_step_us);
        let done = self.cut(at, ended);
        // The pass or step in progress still computes for the request. The engine drops that result.
        self.jobs.retain(|p| p.job.slot != slot);
        self.joining.retain(|(_, s)| s.slot != slot);
        if let Some(place) = self.running.iter().position(|d| d.sequence.slot == slot) {
            let gone = self.running.remove(place).sequence;
            self.context_tokens -= gone.context_tokens;
            if gone.first_token_due && done > 0 {
                ended.push(EngineEvent::FirstToken { slot, at_us: first_us });
            }
        }
    }

    /// Gives a running sequence more room.
    pub fn extend(&mut self, slot: u32, tokens: u32) {
        if let Some(decoding) = self.running.iter_mut().find(|d| d.sequence.slot == slot) {
            decoding.sequence.room_tokens += tokens;
        }
    }

    /// Takes a decode out between two strides, and says how far it came.
    pub fn preempt(&mut self, slot: u32) -> Option<LostDecode> {
        if let Some(place) = self.joining.iter().position(|(_, s)| s.slot == slot) {
            self.joining.remove(place);
            return Some(LostDecode::unbegun(slot));
        }
        let place = self.running.iter().position(|d| d.sequence.slot == slot)?;
        debug_assert!(self.stride.is_none(), "steps that have ended are not counted yet");
        let decoding = self.running.remove(place);
        self.context_tokens -= decoding.sequence.context_tokens;
        Some(self.lost(&decoding))
    }

    /// Forgets everything: the process died. First tokens that left before go to `ended`.
    pub fn clear(&mut self, at: Moment, ended: &mut Vec<EngineEvent>) -> Vec<LostDecode> {
        self.end_completed_steps(at.now_us, ended);
        let lost = self.running.iter().map(|d| self.lost(d)).collect::<Vec<LostDecode>>();
        let joining = self.joining.drain(..).map(|(_, s)| LostDecode::unbegun(s.slot));
        let lost = lost.into_iter().chain(joining).collect();
        self.jobs.clear();
        self.running.clear();
        self.starved.clear();
        self.context_tokens = 0;
        self.stride = None;
        self.in_pipeline.clear();
        self.version += 1;
        self.gaps.forget_before(None);
        lost
    }

    fn lost(&self, decoding: &ActiveDecode) -> LostDecode {
        let mut gaps_us = Vec::new();
        self.gaps.collect(&decoding.mark, &mut gaps_us);
        LostDecode {
            slot: decoding.sequence.slot,
            emitted_tokens: decoding.emitted_tokens,
            last_token_us: to_us(self.gaps.last_step_end_ps()),
            gaps_us,
        }
    }

    /// Plans the next stride if the engine is free: the second half of a moment. Returns when it
    /// must be looked at next, with the version to hand to [`Engine::advance`] then; `None` when
    /// that is known already.
    pub fn poll(&mut self, now_us: u64) -> Option<(u64, u32)> {
        self.join(now_us);
        if self.stride.is_none() {
            if self.running.is_empty() && !self.can_prefill() {
                return None;
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

    /// Lets those who came during the last stride into the batch, if it has ended, as far as it has places. Their room can
    /// be looked at then.
    pub fn join(&mut self, now_us: u64) {
        if self.stride.is_some() {
            return;
        }
        if self.clock_ps + PS_PER_US <= now_us * PS_PER_US {
            self.clock_ps = now_us * PS_PER_US;
        }
        // A prompt that came before has the next place.
        let waiting = self.jobs.iter().filter(|job| !job.started && self.max_running < usize::MAX);
        let first_job = waiting.map(|job| job.serial).min().unwrap_or(u64::MAX);
        let before = self.joining.iter().take_while(|(came, _)| *came < first_job).count();
        for (_, sequence) in self.joining.drain(..before.min(self.free_seqs())) {
            if sequence.room_tokens == 0 {
                self.starved.push((sequence.slot, 0));
            }
            self.context_tokens += sequence.context_tokens;
            self.running.push(ActiveDecode {
                sequence,
                emitted_tokens: 0,
                mark: self.gaps.mark(self.clock_ps),
            });
        }
    }

    /// Drops the gaps that precede every running decode.
    pub fn forget_gaps(&mut self) {
        let oldest = self.running.iter().map(|d| d.mark.at()).min();
        self.gaps.forget_before(oldest);
    }
}
