//! How strides end, whole or cut short.

use super::plan::Stride;
use super::{Engine, EngineEvent, Moment, to_us};

impl Engine {
    /// Before something joins or leaves: a run of decode steps goes on only to the end of the step
    /// in progress. Returns how many of its steps have ended by then.
    pub(super) fn cut(&mut self, at: Moment, ended: &mut Vec<EngineEvent>) -> u64 {
        let Some(stride) = self.stride.as_mut().filter(|s| s.chunks.is_empty()) else { return 0 };
        let done = stride.steps_by(at.now_us);
        let at_boundary = done > 0 && to_us(stride.steps_end_ps(done)) == at.now_us;
        if !at.planned && at_boundary {
            self.end_completed_steps(at.now_us, ended);
            return done;
        }
        let keep = (done + 1).min(stride.steps);
        if keep < stride.steps {
            stride.end_ps = stride.steps_end_ps(keep);
            stride.free_ps = stride.end_ps;
            stride.steps = keep;
            self.version += 1;
        }
        done
    }

    /// Ends a run of decode steps with its last step that has ended by `now_us`.
    pub(super) fn end_completed_steps(&mut self, now_us: u64, ended: &mut Vec<EngineEvent>) {
        let Some(mut stride) = self.stride.take_if(|s| s.chunks.is_empty()) else { return };
        self.version += 1;
        stride.steps = stride.steps_by(now_us);
        if stride.steps > 0 {
            stride.end_ps = stride.steps_end_ps(stride.steps);
            self.clock_ps = stride.end_ps;
            self.finish_steps(&stride, ended);
        }
    }

    /// Takes in that the moment announced by [`Engine::poll`] came; stale versions do nothing.
    /// Returns when a pass that has just left the entrance of the pipeline will leave it, µs.
    pub fn advance(&mut self, version: u32, ended: &mut Vec<EngineEvent>) -> Option<u64> {
        if version != self.version {
            return None;
        }
        let stride = self.stride.take()?;
        self.version += 1;
        self.clock_ps = stride.free_ps;
        if stride.end_ps > stride.free_ps {
            let end_us = to_us(stride.end_ps);
            self.in_pipeline.push_back(stride);
            return Some(end_us);
        }
        self.finish(&stride, ended);
        None
    }

    /// Takes in that pipelined passes left.
    pub fn drain_pipeline(&mut self, now_us: u64, ended: &mut Vec<EngineEvent>) {
        while let Some(stride) = self.in_pipeline.pop_front_if(|s| to_us(s.end_ps) <= now_us) {
            if self.max_running < usize::MAX {
                // It may leave its place to a prompt, which joins the next step.
                self.cut(Moment { now_us, planned: false }, ended);
            }
            self.finish(&stride, ended);
        }
    }

    fn finish(&mut self, stride: &Stride, ended: &mut Vec<EngineEvent>) {
        if stride.steps > 0 {
            self.finish_steps(stride, ended);
        }
        let total: u64 = stride.chunks.iter().map(|(_, n)| n).sum();
        for (serial, tokens) in &stride.chunks {
            let Some(place) = self.jobs.iter().position(|p| p.serial == *serial) else { continue };
            let share = u128::from(stride.work_ps) * u128::from(*tokens) / u128::from(total.max(1));
            let prefilling = &mut self.jobs[place];
            prefilling.spent_ps += u64::try_from(share).unwrap_or(u64::MAX);
            prefilling.passes -= 1;
            if prefilling.job.left_tokens == 0 && prefilling.passes == 0 {
                let compute_us = to_us(prefilling.spent_ps) / self.pipeline_nodes;
                ended.push(EngineEvent::Prefilled { slot: prefilling.job.slot, compute_us });
                self.jobs.remove(place);
            }
        }
    }

    /// Every running sequence takes the stride's steps.
    fn finish_steps(&mut self, stride: &Stride, ended: &mut Vec<EngineEvent>) {
        let (batch, steps) = (self.running.len() as u64, stride.steps);
        let mixed = !stride.chunks.is_empty();
        let first_ps =
            if mixed { stride.end_ps - stride.start_ps } else { stride.cost.step_ps(stride.context_tokens) };
        if !mixed {
            self.decode_busy_ps += stride.end_ps - stride.start_ps;
            self.note_range(steps, (stride.batch, stride.context_tokens));
        }
        let delta_ps = stride.cost.slope_ps * stride.batch;
        self.gaps.steps((stride.start_ps, stride.end_ps), steps, first_ps, delta_ps);
        let first_end_us = stride.first_step_us();
        let taken = u32::try_from(steps).unwrap_or(u32::MAX);
        self.context_tokens += batch * steps;
        let mut gone_tokens = 0;
        self.running.retain_mut(|decoding| {
            let sequence = &mut decoding.sequence;
            decoding.emitted_tokens += taken;
            sequence.left_tokens = sequence.left_tokens.saturating_sub(taken);
            sequence.room_tokens = sequence.room_tokens.saturating_sub(taken);
            sequence.context_tokens += steps;
            if sequence.first_token_due {
                sequence.first_token_due = false;
                decoding.mark.skip_first_step();
                ended.push(EngineEvent::FirstToken { slot: sequence.slot, at_us: first_end_us });
            }
            if sequence.left_tokens == 0 {
                gone_tokens += sequence.context_tokens;
                let (slot, emitted_tokens) = (sequence.slot, decoding.emitted_tokens);
                ended.push(EngineEvent::Decoded { slot, emitted_tokens, mark: decoding.mark });
            } else if sequence.room_tokens == 0 {
                self.starved.push((sequence.slot, decoding.emitted_tokens));
            }
            sequence.left_tokens > 0
        });
        self.context_tokens -= gone_tokens;
    }
}
