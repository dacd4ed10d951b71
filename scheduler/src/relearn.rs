//! Engines that are predicted to be too slow for everybody.
//!
//! An engine or a link that stalled, or was slow for a while, counts as slow until it is measured again. Where that bars
//! an instance from all requests, it never would be. So once it has idled for as long as a request would take there at
//! that speed, one is let in as if nothing had been learnt of it, and what is measured then counts more than all before.
//! Whatever comes meanwhile is judged by what was learnt: at most one at a time is late for this.

use alloc::vec::Vec;
use core::mem::replace;

use baton_types::InstanceId;

use crate::conductor::Conductor;
use crate::estimate::{Residual, prefill_work};
use crate::fleet::Instance;
use crate::placement::{Placement, Refusal};
use crate::request::Entry;
use crate::{RejectReason, Request};

/// What was learnt of an instance's speed.
struct LearntSpeed {
    prefill: Residual,
    step: Residual,
    outbound: f64,
    inbound: f64,
}

impl Default for LearntSpeed {
    fn default() -> Self {
        Self { prefill: Residual::default(), step: Residual::default(), outbound: 1.0, inbound: 1.0 }
    }
}

impl Instance {
    fn replace_speed(&mut self, by: LearntSpeed) -> LearntSpeed {
        LearntSpeed {
            prefill: replace(&mut self.prefill_residual, by.prefill),
            step: replace(&mut self.step_residual, by.step),
            outbound: self.prefill.outbound.replace_slowness(by.outbound),
            inbound: self.inbound.replace_slowness(by.inbound),
        }
    }

    fn doubt_speed(&mut self) {
        self.prefill_residual.doubt();
        self.step_residual.doubt();
        self.prefill.outbound.doubt();
        self.inbound.doubt();
    }

    /// Whether anything that was learnt makes it slower than its profile.
    fn seems_slow(&self) -> bool {
        let residuals = [self.prefill_residual, self.step_residual];
        let links = [&self.prefill.outbound, &self.inbound];
        residuals.iter().any(|of| of.ratio() > 1.0) || links.iter().any(|link| link.learnt_us(1_000) > 1_000)
    }
}

impl Conductor {
    /// A place for a refused request on instances that only what was learnt of them bars. All promises are kept if they are
    /// as fast as their profiles.
    pub(crate) fn place_to_measure(&mut self, entry: &Entry, refusal: Refusal) -> Result<Placement, Refusal> {
        let too_slow = [RejectReason::Ttft, RejectReason::Tbt, RejectReason::Unreachable];
        let doubted =
            if too_slow.contains(&refusal.reason) { self.doubted(&entry.request) } else { Vec::new() };
        if doubted.is_empty() {
            return Err(refusal);
        }
        let forget = |id: &InstanceId| self.fleet.known_mut(*id).replace_speed(LearntSpeed::default());
        let learnt: Vec<LearntSpeed> = doubted.iter().map(forget).collect();
        let placed = self.place_for(&entry.request, entry.deadline_us, true);
        for (id, learnt) in doubted.iter().zip(learnt) {
            self.fleet.known_mut(*id).replace_speed(learnt);
        }
        let placement = placed.map_err(|_| refusal)?;
        let used = [placement.candidate.instance, placement.decode];
        doubted.iter().filter(|id| used.contains(id)).for_each(|id| self.fleet.known_mut(*id).doubt_speed());
        Ok(placement)
    }

    /// Candidates for either part of a request that were slower than their profiles, and have idled for long enough since.
    fn doubted(&mut self, request: &Request) -> Vec<InstanceId> {
        let mut ids = self.candidate_ids(request, None);
        if let Some(first) = ids.first() {
            ids.extend(self.decodes_to_ask(request, *first));
        }
        ids.sort_unstable();
        ids.dedup();
        ids.retain(|id| self.fleet.get(*id).is_some_and(|instance| self.is_doubted(instance, request)));
        ids
    }

    fn is_doubted(&self, instance: &Instance, request: &Request) -> bool {
        if !instance.owes_nothing() || !instance.seems_slow() {
            return false;
        }
        let prompt_tokens = request.prompt_tokens;
        let work = prefill_work(instance, (prompt_tokens, 0), 0, self.config.step_target_us());
        let decode_us = if instance.spec.role.decodes() {
            self.decode_duration_us(request, instance.step_us(1, prompt_tokens))
        } else {
            0
        };
        self.now_us.saturating_sub(instance.idle_since_us()) >= work.us.saturating_add(decode_us)
    }
}
