//! Plans an engine's next stride: a prefill pass, a mixed step, or a run of decode steps.

use std::sync::Arc;

use baton_types::{CostProfile, PassLimit, PassLoad, StepCost};

use super::{Engine, EngineNoise, Mix, to_us};

/// One stride: a prefill pass, a mixed step, or a run of decode steps.
#[derive(Clone, Debug)]
pub(super) struct Stride {
    pub start_ps: u64,
    pub end_ps: u64,
    /// When the next stride may start: earlier than `end_ps` only in a pipeline.
    pub free_ps: u64,
    /// Engine time that it takes: less than from start to end where it waits for the pass ahead.
    pub work_ps: u64,
    /// Prompt tokens given to each job of the pass, by serial.
    pub chunks: Vec<(u64, u64)>,
    /// Decode steps taken by every running sequence.
    pub steps: u64,
    /// Batch context at its start, tokens.
    pub context_tokens: u64,
    /// Batch at its start, and what a step of it costs.
    pub batch: u64,
    pub cost: StepCost,
}

impl Stride {
    /// When the first `steps` steps of a run of decode steps end, ps.
    pub(super) const fn steps_end_ps(&self, steps: u64) -> u64 {
        self.start_ps + self.cost.run_ps(self.context_tokens, self.batch, steps)
    }

    /// When its first step ends, µs.
    pub(super) fn first_step_us(&self) -> u64 {
        to_us(if self.chunks.is_empty() { self.steps_end_ps(1) } else { self.end_ps })
    }

    /// Steps of a run of decode steps that have ended by `now_us`.
    pub(super) fn steps_by(&self, now_us: u64) -> u64 {
        let (mut low, mut high) = (0, self.steps);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if to_us(self.steps_end_ps(middle)) <= now_us { low = middle } else { high = middle - 1 }
        }
        low
    }
}

impl Engine {
    pub(super) fn plan(&mut self) -> Stride {
        let takes_permille = self.noise.as_mut().map_or(1000, EngineNoise::next_permille);
        self.speed_permille = (self.rated_permille * 1000 / takes_permille).max(1);
        debug_assert!(self.running.iter().all(|d| d.sequence.room_tokens > 0), "a sequence is starved");
        let profile = Arc::clone(&self.profile);
        let whole = |tokens: u64| PassLimit::whole(tokens.max(1));
        let prefills = self.can_prefill();
        if !self.running.is_empty() {
            // A token needs the one before: nothing overlaps with a step.
            let left_ps = self.in_pipeline.back().map_or(0, |s| s.end_ps);
            self.clock_ps = self.clock_ps.max(left_ps);
        }
        match (prefills, self.running.is_empty(), self.mix) {
            (false, ..) => self.plan_decodes(),
            (true, true, Mix::Fixed(tokens)) if self.pipeline_nodes == 1 => {
                self.plan_pass(whole(tokens.into()), false)
            }
            (true, true, _) | (true, false, Mix::PrefillFirst) => {
                self.plan_pass(whole(self.pass_tokens), false)
            }
            (true, false, Mix::Fixed(tokens)) => self.plan_pass(whole(tokens.into()), true),
            (true, false, Mix::Target(us)) => self.plan_pass(self.mixed_limit(us, &profile), true),
        }
    }

    /// Room for prompt tokens beside a decode step within `target_us`.
    #[expect(clippy::cast_precision_loss, reason = "step times are far below 2^53")]
    fn mixed_limit<'a>(&self, target_us: u64, profile: &'a CostProfile) -> PassLimit<'a> {
        // The engine does not know how long this stride will take beyond what is usual.
        let step_ps = self.step_cost_at(self.rated_permille).step_ps(self.context_tokens);
        let free_us = target_us as f64 - step_ps as f64 / 1e6;
        let speed = self.rated_permille as f64 / 1000.0;
        PassLimit::beside(self.pass_tokens, profile, free_us * speed)
    }

    /// A pass over the first jobs, with a decode step of the batch in it if `mixed`.
    fn plan_pass(&mut self, limit: PassLimit<'_>, mixed: bool) -> Stride {
        let mut filled = PassLoad::new(limit);
        let (mut tokens, mut attention_us) = (0, 0.0);
        let mut chunks = Vec::with_capacity(2);
        let mut free_seqs = self.free_seqs();
        for prefilling in self.jobs.iter_mut().filter(|p| p.job.left_tokens > 0) {
            if !prefilling.started && free_seqs == 0 {
                break;
            }
            let take = filled.take(prefilling.job.left_tokens, prefilling.job.prefix_tokens);
            if take == 0 {
                break;
            }
            tokens += take;
            attention_us += self.profile.attention_us(take, prefilling.job.prefix_tokens);
            if !prefilling.started {
                prefilling.started = true;
                free_seqs -= 1;
                self.started.push(prefilling.job.slot);
            }
            prefilling.job.left_tokens -= take;
            prefilling.job.prefix_tokens += take;
            prefilling.passes += 1;
            chunks.push((prefilling.serial, take));
        }
        let cost = self.step_cost();
        let shared_us = if mixed { self.profile.shared_us } else { 0.0 };
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
        let work_us = self.profile.dense_us(tokens as f64) + attention_us;
        let mut cost_ps = self.scaled((work_us - shared_us).max(0.001));
        if mixed {
            cost_ps += cost.step_ps(self.context_tokens);
        }
        self.prefill_busy_ps += cost_ps / self.pipeline_nodes;
        self.note_range(u64::from(mixed), (self.running.len() as u64, self.context_tokens));
        let (free_ps, end_ps) = self.pass_times(cost_ps);
        Stride {
            start_ps: self.clock_ps,
            end_ps,
            free_ps,
            work_ps: cost_ps,
            chunks,
            steps: u64::from(mixed),
            context_tokens: self.context_tokens,
            batch: self.running.len() as u64,
            cost,
        }
    }

    /// When the entrance is free again after a pass of `cost_ps`, and when the pass leaves.
    fn pass_times(&self, cost_ps: u64) -> (u64, u64) {
        if self.pipeline_nodes == 1 || !self.running.is_empty() {
            return (self.clock_ps + cost_ps, self.clock_ps + cost_ps);
        }
        let stage_ps = cost_ps / self.pipeline_nodes;
        // A pass cannot overtake the one before: it leaves one stage after it at the earliest.
        let behind_ps = self.in_pipeline.back().map_or(0, |s| s.end_ps + stage_ps);
        (self.clock_ps + stage_ps, (self.clock_ps + cost_ps).max(behind_ps))
    }

    /// Decode steps until the first sequence ends or has no room.
    fn plan_decodes(&self) -> Stride {
        let least = self.running.iter().map(|d| d.sequence.left_tokens.min(d.sequence.room_tokens)).min();
        let least = least.unwrap_or(1).max(1);
        let steps = if self.step_once { 1 } else { u64::from(least) };
        let (cost, batch) = (self.step_cost(), self.running.len() as u64);
        let end_ps = self.clock_ps + cost.run_ps(self.context_tokens, batch, steps);
        Stride {
            start_ps: self.clock_ps,
            end_ps,
            free_ps: end_ps,
            work_ps: end_ps - self.clock_ps,
            chunks: Vec::new(),
            steps,
            context_tokens: self.context_tokens,
            batch,
            cost,
        }
    }

    /// Cost of a decode step of the present batch, at the present speed.
    fn step_cost(&self) -> StepCost {
        self.step_cost_at(self.speed_permille)
    }

    fn step_cost_at(&self, speed_permille: u64) -> StepCost {
        let batch = u32::try_from(self.running.len()).unwrap_or(u32::MAX);
        let mut cost = self.profile.step_cost(batch);
        if speed_permille != 1000 {
            cost.base_ps = cost.base_ps * 1000 / speed_permille;
            cost.slope_ps = cost.slope_ps * 1000 / speed_permille;
        }
        cost
    }

    fn scaled(&self, us: f64) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "costs are positive and far below 2^53 ps"
        )]
        let ps = (us * 1e6) as u64;
        if self.speed_permille == 1000 { ps } else { ps * 1000 / self.speed_permille }
    }

    /// Counts the steps of a run over `(batch, context tokens)` that lie outside the profile's
    /// measured range.
    pub(super) fn note_range(&mut self, steps: u64, (batch, context_tokens): (u64, u64)) {
        let valid = &self.profile.valid;
        let most = batch * valid.max_context_tokens.max(1);
        let inside = match (most.checked_sub(context_tokens), batch) {
            (_, 0) => steps,
            (Some(spare), _) if batch <= u64::from(valid.max_batch.max(1)) => spare / batch + 1,
            _ => 0,
        };
        self.outside_steps += steps.saturating_sub(inside);
    }
}
