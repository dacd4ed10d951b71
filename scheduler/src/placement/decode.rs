//! Which decode instance takes the request, by its predicted TBT when the prefill ends.

use alloc::vec::Vec;
use baton_types::InstanceId;

use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::request::Entry;
use crate::{RejectReason, Request};

/// Decode instances whose predictions are worked out for one request at most.
const CLOSER_LOOK: usize = 24;

/// The outcome of choosing a decode instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DecodeChoice {
    /// This one, with its predicted step time, µs.
    At(InstanceId, f64),
    /// None, and why.
    Never(RejectReason),
}

/// What a request will ask of a decode instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeNeed {
    /// When it will start, µs.
    pub at_us: u64,
    /// Prompt and room, tokens.
    pub tokens: u64,
    /// Mean context, tokens.
    pub context_tokens: u64,
    /// TBT objective, µs.
    pub tbt_us: u64,
}

impl Conductor {
    /// Output tokens to keep room for: what most answers of its kind do not exceed.
    pub(crate) fn room_tokens(&self, request: &Request) -> u32 {
        let key = (request.class, request.prompt_tokens);
        let whole = request
            .known_output_tokens
            .unwrap_or_else(|| self.lengths.quantile_tokens(key, request.emitted_tokens, 800));
        // Where the prompt leaves less, the answer gets what there is.
        let left = self.fleet.largest_decode_tokens.saturating_sub(request.prompt_tokens);
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        whole.saturating_sub(request.emitted_tokens).min(left).max(1)
    }

    /// Output tokens expected.
    pub(crate) fn expected_tokens(&self, request: &Request) -> u32 {
        let mean = || self.lengths.mean_tokens(request.class, request.prompt_tokens);
        request.known_output_tokens.unwrap_or_else(mean).saturating_sub(request.emitted_tokens).max(1)
    }

    pub(crate) fn decode_need(&self, request: &Request, at_us: u64) -> DecodeNeed {
        // Room is kept in whole blocks, those of the prompt apart from those of the output.
        let block = u64::from(self.config.block_tokens);
        let whole = |tokens: u64| baton_types::blocks_for(tokens, self.config.block_tokens) * block;
        DecodeNeed {
            at_us,
            tokens: (whole(request.prompt_tokens) + whole(self.room_tokens(request).into()))
                .min(self.fleet.largest_decode_tokens),
            context_tokens: request.prompt_tokens + u64::from(self.expected_tokens(request)) / 2,
            tbt_us: self.class(request).tbt_us,
        }
    }

    /// Predicted step time there with the request in it, µs; a step stretched by local prefills
    /// counts at its target, or at what the longest chunk takes where that is less.
    pub(crate) fn predicted_step_us(&self, instance: &Instance, need: &DecodeNeed) -> f64 {
        let spec = &instance.spec;
        let alone = instance.decode.step_us(&spec.profile, (self.now_us, need.at_us), need.context_tokens);
        let left = instance.backlog_us(self.now_us);
        let mixed = self.config.local_prefill && left > need.at_us.saturating_sub(self.now_us);
        if !mixed {
            return alone;
        }
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let target = (need.tbt_us / 1000 * u64::from(self.config.mixed_step_permille)) as f64;
        let chunk_tokens = spec.mixed_chunk_tokens.unwrap_or(spec.pass_tokens);
        let chunk_us = spec.profile.prefill_us(chunk_tokens.into(), need.context_tokens);
        target.min(alone + chunk_us).max(alone)
    }

    /// Whether an instance can take the request at all, and if not, why.
    pub(crate) fn decode_fits(&self, instance: &Instance, need: &DecodeNeed) -> Result<f64, RejectReason> {
        let stay_us = self.lengths.mean_duration_us(1);
        if !instance.decode.fits_fairly(
            (self.now_us, need.at_us),
            (need.tokens, stay_us),
            instance.spec.capacity_tokens,
        ) {
            return Err(RejectReason::Room);
        }
        let step_us = self.predicted_step_us(instance, need);
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        if step_us > need.tbt_us as f64 { Err(RejectReason::Tbt) } else { Ok(step_us) }
    }

    /// The decode instance with the least predicted step time that keeps the objective, of those that take KV `from`
    /// this prefill.
    pub(crate) fn choose_decode(&self, request: &Request, from: InstanceId, at_us: u64) -> DecodeChoice {
        let need = self.decode_need(request, at_us);
        let mut best: Option<(f64, InstanceId)> = None;
        let mut reason = RejectReason::NoInstance;
        for id in self.roomiest_decodes(from) {
            let Some(instance) = self.fleet.get(id).filter(|_| self.holds(id, request)) else { continue };
            match self.decode_fits(instance, &need) {
                Ok(step_us) => {
                    if best.is_none_or(|(least, _)| step_us < least) {
                        best = Some((step_us, id));
                    }
                }
                Err(why) => reason = why,
            }
        }
        match best {
            Some((step_us, id)) => DecodeChoice::At(id, step_us),
            None => DecodeChoice::Never(reason),
        }
    }

    /// Decode instances worth a closer look, in id order: all of a small pool, those with most
    /// room of a large one.
    fn roomiest_decodes(&self, from: InstanceId) -> Vec<InstanceId> {
        let pool: Vec<InstanceId> = self.fleet.decodes_of(from).collect();
        if pool.len() <= CLOSER_LOOK {
            return pool;
        }
        let promised =
            |id: &InstanceId| (self.fleet.get(*id).map_or(u64::MAX, |i| i.decode.reserved_tokens()), *id);
        let mut loads: Vec<(u64, InstanceId)> = pool.iter().map(promised).collect();
        loads.select_nth_unstable(CLOSER_LOOK);
        let mut ids: Vec<InstanceId> = loads[..CLOSER_LOOK].iter().map(|(_, id)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// The decode instance with the least promised context, whatever its state: for policies that
    /// do not look at objectives.
    pub(crate) fn least_loaded_decode(&self, request: &Request, from: InstanceId) -> Option<InstanceId> {
        let load = |i: &Instance| (i.decode.reserved_tokens(), i.decode.all().0, i.spec.id);
        let able = self.fleet.decodes_of(from).filter(|id| self.holds(*id, request));
        able.filter_map(|id| self.fleet.get(id)).min_by_key(|i| load(i)).map(|i| i.spec.id)
    }

    /// How long the decode of this request is predicted to take, µs.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a positive product far below 2^53"
    )]
    pub(crate) fn decode_duration_us(&self, request: &Request, step_us: f64) -> u64 {
        if !self.config.policy.orders_queues() {
            // The paper's system-level prediction: every decode lasts the same.
            return match self.config.decode_duration_us {
                0 => self.lengths.mean_duration_us(5_000_000),
                fixed => fixed,
            };
        }
        (f64::from(self.expected_tokens(request)) * step_us) as u64 + 1
    }

    /// Reserves room for an entry that is about to be prefilled for `decode` (I8), or plans to
    /// while its prefill still waits here.
    pub(crate) fn reserve_decode(&mut self, entry: &mut Entry, decode: InstanceId, at_us: u64) {
        let need = self.decode_need(&entry.request, at_us);
        let room = self.room_tokens(&entry.request);
        let Some(instance) = self.fleet.get(decode) else { return };
        let step_us = self.predicted_step_us(instance, &need);
        let prior_us = self.decode_duration_us(&entry.request, step_us);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a positive time"
        )]
        let duration = (prior_us as f64 * instance.decode_residual.ratio()) as u64;
        entry.decode_prior_us = prior_us;
        entry.decode = Some(decode);
        entry.room_tokens = room;
        entry.decode_at_us = at_us;
        entry.finish_us = at_us + duration;
        let slot = crate::estimate::DecodeSlot {
            request: entry.request.id,
            start_us: at_us,
            finish_us: entry.finish_us,
            context_tokens: need.context_tokens,
            reserved_tokens: need.tokens,
            running: false,
        };
        if let Some(instance) = self.fleet.get_mut(decode) {
            instance.decode.reserve(slot);
        }
    }
}
