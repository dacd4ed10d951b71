//! The life of a request after its placement: each reservation is released exactly once (I5).

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId, Role};

use crate::conductor::Conductor;
use crate::estimate::{StepOutlook, prior_us, scale_us};
use crate::placement::MIN_RETRY_AFTER_US;
use crate::request::{Entry, Stage};
use crate::{AdmissionMode, Effect, Input, RejectReason, Rejection};

/// Answers with fewer steps say too little of the steps of their node.
const LEAST_STEPS: u32 = 10;

impl Conductor {
    pub(crate) fn prefill_finished(
        &mut self,
        id: RequestId,
        measured: (u64, u64),
        effects: &mut Vec<Effect>,
    ) {
        let Some(entry) = self.requests.get_mut(id).filter(|e| e.stage == Stage::Prefilling) else {
            self.stats.stale_inputs += 1;
            return;
        };
        entry.stage = Stage::HandingOff;
        let (at, prompt_tokens, fetch) = (entry.prefill, entry.request.prompt_tokens, entry.fetch.take());
        let foreign = entry.peer.is_some();
        self.prefill_over(id);
        if let Some(fetch) = fetch {
            self.end_flight(id, fetch.from, at, false);
        }
        let (now_us, target_us) = (self.now_us, self.config.step_target_us());
        let (compute_us, cached_tokens) = (measured.0, measured.1.min(prompt_tokens));
        self.stats.cached_tokens += cached_tokens;
        self.stats.prefilled_tokens += prompt_tokens.saturating_sub(cached_tokens);
        let gathered_tokens = self.gathered_tokens(self.fleet.known(at));
        let mut instance = self.fleet.known_mut(at);
        let done = instance.prefill.finish(now_us, id);
        let others = done.expect("a request ends where it was sent").beside_tokens.min(gathered_tokens);
        // The present decodes, without this request and without planned ones, are what the steps of its prefill
        // carried.
        let (batch, context_tokens, _) = instance.decode.now();
        let new = prompt_tokens.saturating_sub(cached_tokens);
        let prior_us =
            prior_us(&instance.spec, (batch, context_tokens), (new, cached_tokens), (others, target_us));
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        instance.prefill_residual.observe(prior_us.unwrap_or(0.0), compute_us as f64);
        drop(instance);
        self.timers.set(at, now_us);
        if !foreign && self.refuse_at_decode(id, effects) {
            return;
        }
        let decode = self.requests.get(id).and_then(|e| e.decode);
        if let Some(decode) = decode {
            self.handoff_is_ready(id, at, decode);
        }
        if decode == Some(at) {
            self.handoff_finished(id, effects);
        }
    }

    pub(crate) fn handoff_finished(&mut self, id: RequestId, effects: &mut Vec<Effect>) {
        let Some(entry) = self.requests.get(id).filter(|e| e.stage == Stage::HandingOff) else {
            self.stats.stale_inputs += 1;
            return;
        };
        let decode = entry.decode.expect("a request that is handed over has a decode instance (I8)");
        let (from, now_us) = (entry.prefill, self.now_us);
        self.end_handoff(id, from, decode, true);
        if let Some(entry) = self.requests.get_mut(id) {
            entry.stage = Stage::Decoding;
            if entry.peer.is_none() {
                effects.push(Effect::StartDecode { request: id, instance: decode });
            }
        }
        self.fleet.known_mut(decode).decode.wait(id, now_us);
        self.next_decodes(decode);
    }

    /// An engine takes as many requests as it may into its steps, first come first served.
    fn next_decodes(&mut self, at: InstanceId) {
        let now_us = self.now_us;
        loop {
            let instance = self.fleet.known(at);
            let taken = instance.spec.max_running.is_none_or(|most| instance.decode.running() < most);
            let Some(id) = instance.decode.first_waiting().filter(|_| taken) else { return };
            self.learn_margin(id);
            let mut instance = self.fleet.known_mut(at);
            let steps_before = instance.count_steps(now_us);
            instance.decode.start(id, now_us);
            drop(instance);
            let entry = self.requests.get_mut(id).expect("a request that waits is live");
            (entry.decode_at_us, entry.steps_before) = (now_us, steps_before);
        }
    }

    /// The first token of a request is due about now: learns by how much it misses its promise. Requests that were
    /// placed again teach nothing about predictions.
    fn learn_margin(&mut self, id: RequestId) {
        let Some(entry) = self.requests.get(id).filter(|entry| !entry.is_placed_again()) else {
            return;
        };
        let instance = self.fleet.known(entry.prefill);
        let over_us = (self.now_us + self.handoff_tail_us(instance)).saturating_sub(entry.promised_us);
        let slack_us = entry.deadline_us.saturating_sub(entry.arrived_us).saturating_sub(entry.work_us);
        let scale_us = scale_us(slack_us, entry.work_us);
        let of = (entry.request.class, instance.spec.role);
        let target_permille = self.class(&entry.request).target_permille;
        self.margins.observe(of, over_us, scale_us, target_permille);
    }

    /// An answer ended: learns when its decode and its first token came, and how long its gaps were, beside what was predicted.
    fn learn_times(&mut self, entry: &Entry, first_us: u64, tbt_us: u64) {
        let Some((outlook, prediction)) = entry.outlook.zip(entry.prediction) else { return };
        let came_us = first_us - entry.arrived_us;
        let role = self.fleet.known(entry.prefill).spec.role;
        let alike = self.margins.samples_mut(entry.request.class, role);
        alike.first_tokens.observe(&outlook, came_us, prediction.ttft_most_us);
        let started_us = entry.decode_at_us - entry.arrived_us;
        alike.decode_starts.observe(&outlook, started_us, prediction.decode_start_most_us);
        if tbt_us > 0 {
            let step = StepOutlook { step_us: entry.expected_step_us };
            alike.gaps.observe(&step, tbt_us, prediction.tbt_most_us);
        }
    }

    /// A decode ended: learns how long steps are here beside the profile, if no prompt tokens were in them.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    fn learn_step(&mut self, entry: &Entry, output_tokens: u32, first_us: u64) {
        let Some(decode) = entry.decode.filter(|_| output_tokens >= LEAST_STEPS) else { return };
        let now_us = self.now_us;
        let mut instance = self.fleet.known_mut(decode);
        let predicted_steps = instance.count_steps(now_us) - entry.steps_before;
        if instance.prefill.idles_since(entry.decode_at_us) && predicted_steps > 0.0 {
            let lasted_us = now_us.saturating_sub(entry.decode_at_us) as f64;
            // Where the prefill drew the first token, one step fewer was made here.
            let steps = f64::from(output_tokens - u32::from(first_us < entry.decode_at_us));
            instance.step_residual.observe(lasted_us / predicted_steps, lasted_us / steps);
        }
    }

    /// A decode ended: learns by how much its steps were longer than promised, where they were too long. Clients judge the
    /// longest tenth of the gaps. It is taken to be longer than the mean by half of what steps with prompt tokens leave of
    /// the objective: what is learnt from the longest tenth itself comes too late for the answers under way.
    fn learn_step_margin(&mut self, entry: &Entry, output_tokens: u32, first_us: u64) {
        let enough = output_tokens >= LEAST_STEPS && entry.peer.is_none();
        let Some(decode) = entry.decode.filter(|_| enough) else { return };
        let step_us = (self.now_us - first_us) / u64::from(output_tokens - 1);
        let steps_for = self.config.steps_for(entry.request.class);
        let class = &self.config.classes[steps_for.index()];
        let (tbt_us, target_permille) = (class.tbt_us, class.target_permille);
        let mixed_us = tbt_us / 1000 * u64::from(self.config.mixed_step_permille);
        let longest_us = step_us.saturating_add((tbt_us - mixed_us) / 2);
        let over_us = if longest_us > tbt_us { longest_us.saturating_sub(entry.promised_step_us) } else { 0 };
        let slack_us = self.fleet.known(decode).step_slack_us(tbt_us, entry.request.prompt_tokens);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most the objective")]
        let slack_us = libm::ceil(slack_us) as u64;
        self.margins.observe_step(steps_for, over_us, slack_us, target_permille);
    }

    /// The paper's second check, by the decode instance, when the prefill is already spent. True when it refused and
    /// everything was released.
    fn refuse_at_decode(&mut self, id: RequestId, effects: &mut Vec<Effect>) -> bool {
        let Some(reason) = self.requests.get(id).and_then(|e| self.overload_at_decode(e)) else {
            return false;
        };
        let entry = self.requests.remove(id).expect("looked up above");
        assert!(entry.stage == Stage::HandingOff, "request {id} is refused at a decode that has begun");
        self.release_legs(&entry, effects);
        self.share(Input::RequestCancelled { request: id }, effects);
        self.stats.count_rejection(reason);
        self.stats.wasted_prefill_tokens += entry.new_tokens;
        effects.push(Effect::Reject(Rejection {
            request: id,
            reason,
            retry_after_us: (self.lengths.mean_duration_us(5_000_000) / 2).max(MIN_RETRY_AFTER_US),
            predicted_ttft_us: Some(self.now_us - entry.arrived_us),
            wasted_tokens: entry.new_tokens,
        }));
        true
    }

    fn overload_at_decode(&self, entry: &Entry) -> Option<RejectReason> {
        let mode = self.config.effective_admission();
        let looks =
            matches!(mode, AdmissionMode::AtDecode | AdmissionMode::Early | AdmissionMode::EarlyPredict);
        // A request that lost its instance was admitted before, and its client may have half of the answer.
        if !looks || entry.is_placed_again() {
            return None;
        }
        let instance = self.fleet.get(entry.decode?)?;
        let (batch, context, _) = instance.decode.now();
        let need = self.decode_need(&entry.request, self.now_us);
        let step_us = instance.spec.profile.decode_us(batch + 1, context + need.context_tokens);
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let slow = step_us > need.tbt_us as f64;
        if slow {
            return Some(RejectReason::Tbt);
        }
        self.is_full(instance, &need).then_some(RejectReason::Room)
    }

    pub(crate) fn fetch_finished(&mut self, id: RequestId, ok: bool) {
        // While the request waits here its fetch is only planned.
        let Some(entry) = self.requests.get_mut(id).filter(|e| e.stage == Stage::Prefilling) else {
            self.stats.stale_inputs += 1;
            return;
        };
        let Some(fetch) = entry.fetch.take() else { return };
        let to = entry.prefill;
        self.end_flight(id, fetch.from, to, ok);
        self.stats.fetches += 1;
        self.stats.fetches_failed += u64::from(!ok);
        let lent = self.fleet.get(fetch.from).is_some_and(|i| i.spec.role == Role::Store);
        self.stats.lent_fetches += u64::from(ok && lent);
    }

    fn prefill_over(&mut self, id: RequestId) {
        assert!(self.coming.over(id), "the prefill of request {id} ends, and was not followed");
    }

    /// Its decode is about to be lost: the client's tokens are added to the prompt.
    pub(crate) fn tokens_emitted(&mut self, id: RequestId, emitted_tokens: u32) {
        let Some(entry) = self.requests.get_mut(id).filter(|e| e.stage == Stage::Decoding) else {
            self.stats.stale_inputs += 1;
            return;
        };
        entry.told_tokens = entry.told_tokens.max(emitted_tokens);
    }

    pub(crate) fn decode_finished(
        &mut self,
        id: RequestId,
        (output_tokens, first_us, tbt_us): (u32, u64, u64),
        effects: &mut Vec<Effect>,
    ) {
        let ends = |e: &&Entry| e.stage == Stage::Decoding || e.peer.is_some();
        if self.requests.get(id).filter(ends).is_none() {
            self.stats.stale_inputs += 1;
            return;
        }
        let entry = self.requests.remove(id).expect("looked up above");
        if entry.stage != Stage::Decoding {
            // Another router's request, of which not every step was heard.
            self.release_legs(&entry, effects);
            return;
        }
        let duration_us = self.now_us - entry.decode_at_us.min(self.now_us);
        self.lengths.observe(entry.request.class, entry.request.prompt_tokens, output_tokens, duration_us);
        // Requests that were placed again teach nothing about predictions; a time of 0 is none.
        if entry.retries == 0 && (entry.arrived_us.max(1)..=self.now_us).contains(&first_us) {
            self.learn_step(&entry, output_tokens, first_us);
            self.learn_step_margin(&entry, output_tokens, first_us);
            self.learn_times(&entry, first_us, tbt_us);
        }
        let decode = entry.decode.expect("a request that decodes has a decode instance (I8)");
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let (prior_us, measured_us) = (entry.decode_prior_us as f64, duration_us as f64);
        self.fleet.known_mut(decode).decode_residual.observe(prior_us, measured_us);
        self.release_decode(id, decode);
        self.stats.finished += u64::from(entry.peer.is_none());
    }

    pub(crate) fn request_cancelled(&mut self, id: RequestId, effects: &mut Vec<Effect>) {
        let Some(entry) = self.requests.remove(id) else {
            self.stats.stale_inputs += 1;
            return;
        };
        let queued = self.unplaced.len();
        self.unplaced.retain(|u| *u != id);
        let left = queued - self.unplaced.len();
        assert!(
            left == usize::from(entry.stage == Stage::Unplaced),
            "request {id} was {left} times in the router's queue"
        );
        self.release_legs(&entry, effects);
        self.stats.cancelled += u64::from(entry.peer.is_none());
    }

    pub(crate) fn release_decode(&mut self, id: RequestId, decode: InstanceId) {
        let mut instance = self.fleet.known_mut(decode);
        instance.count_steps(self.now_us);
        let released = instance.decode.release(id);
        drop(instance);
        assert!(released, "request {id} gives room back on {decode} that it did not have (I5)");
        if self.fleet.known(decode).state != crate::InstanceState::Lost {
            self.next_decodes(decode);
        }
        self.room_came = true;
    }

    /// Releases everything that an entry holds on both legs, whatever its stage (I13). The entry is no longer live.
    pub(crate) fn release_legs(&mut self, entry: &Entry, effects: &mut Vec<Effect>) {
        let id = entry.request.id;
        assert!(!self.requests.contains(id), "request {id} gives back what it goes on with");
        let now_us = self.now_us;
        match entry.stage {
            Stage::Unplaced => return,
            Stage::Waiting => {
                self.leave_queue(id, entry.prefill, entry.peer.is_none());
                if let Some(decode) = entry.decode {
                    self.release_decode(id, decode);
                }
                return;
            }
            Stage::Prefilling => {
                self.prefill_over(id);
                if let Some(fetch) = entry.fetch {
                    self.end_flight(id, fetch.from, entry.prefill, false);
                }
                let sent = self.fleet.known_mut(entry.prefill).prefill.finish(now_us, id);
                assert!(sent.is_some(), "request {id} leaves an engine that it was not sent to (I5)");
                self.timers.set(entry.prefill, now_us);
            }
            Stage::HandingOff | Stage::Decoding => {
                assert!(entry.fetch.is_none(), "request {id} fetches what it has computed already");
            }
        }
        assert!(entry.decode.is_some(), "request {id} was sent without room to decode it (I8)");
        if let Some(decode) = entry.decode {
            match entry.stage {
                // Its place to decode is free for what waits there.
                Stage::Decoding if decode != entry.prefill => self.timers.set(entry.prefill, now_us),
                Stage::Decoding => {}
                _ => self.end_handoff(id, entry.prefill, decode, false),
            }
            self.release_decode(id, decode);
        }
        if entry.peer.is_none() {
            if entry.stage != Stage::Decoding || entry.decode == Some(entry.prefill) {
                effects.push(Effect::Release { request: id, instance: entry.prefill });
            }
            if let Some(decode) = entry.decode.filter(|d| *d != entry.prefill) {
                effects.push(Effect::Release { request: id, instance: decode });
            }
        }
    }
}
