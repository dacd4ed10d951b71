//! Sampling loads over time, looking ahead for the policy `baton_informed`, and closing the books.

use baton_scheduler::Request;
use baton_types::Tier;

use super::World;
use crate::events::Event;
use crate::metrics::LoadSample;

impl World {
    pub(crate) fn sample(&mut self) {
        let snapshot = self.conductors[0].snapshot();
        for load in &snapshot.instances {
            let node = &self.nodes[load.instance.index()];
            self.metrics.sampled(
                self.now_us,
                &LoadSample {
                    backlog_us: load.backlog_us,
                    batch: u32::try_from(node.engine.batch()).unwrap_or(u32::MAX),
                    context_tokens: node.engine.context_tokens(self.now_us),
                    step_us: load.step_us,
                    instance: load.instance.0,
                    prefills: node.spec.role.prefills(),
                    decodes: node.spec.role.decodes(),
                },
            );
        }
        self.sampled = true;
    }

    /// Plans the next sample after a sample, once engines have planned. Sampling alone keeps no run
    /// alive: a stuck one must come to rest and be found out.
    pub(crate) fn go_on_sampling(&mut self) {
        let going = self.in_flight > 0 || self.upcoming.is_some();
        if std::mem::take(&mut self.sampled) && going && !self.events.is_empty() {
            self.events.push(self.now_us + self.setup.sample_us, Event::Sample);
        }
    }

    /// Adds the facts that only the policy `baton_informed` may know: the answer's length, and the largest work
    /// that the near future can carry. Other policies get the request unchanged.
    pub(crate) fn foresee(&self, slot: u32, mut request: Request) -> Request {
        if !self.setup.scheduler.policy.foresees() {
            return request;
        }
        request.known_output_tokens = Some(self.live[slot as usize].output_tokens);
        request.known_work_bound_us = self.work_bound_us();
        request
    }

    /// The largest work that still fits when the next minute's requests are served cheapest first,
    /// each counted at its mean cost with the hit ratio seen so far; `None` while all of it fits.
    fn work_bound_us(&self) -> Option<u64> {
        let horizon_us = self.setup.foresight_us.max(1);
        let mut works: Vec<u64> =
            self.foreseen.iter().map(|a| self.expected_work_us(a.prompt_tokens)).collect();
        works.sort_unstable();
        let backlog_us: u64 = self.conductors[0].snapshot().instances.iter().map(|i| i.backlog_us).sum();
        let time_limit_us = self.setup.scheduler.classes[0].ttft_us;
        let workers = self.foresight_workers_permille();
        let room_us = ((horizon_us + time_limit_us) * workers / 1000).saturating_sub(backlog_us);
        let mut spent_us = 0;
        for work_us in works {
            spent_us += work_us;
            if spent_us > room_us {
                return Some(work_us);
            }
        }
        None
    }

    /// Prefill capacity in instances, per mille; a mixing decode instance counts for six tenths.
    fn foresight_workers_permille(&self) -> u64 {
        self.nodes.iter().map(|n| if n.spec.role.prefills() { 1000 } else { 600 }).sum()
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "positive times"
    )]
    fn expected_work_us(&self, prompt_tokens: u64) -> u64 {
        let new = (prompt_tokens as f64 * (1.0 - self.metrics.token_hit_ratio())) as u64;
        let spec = &self.nodes[0].spec;
        spec.profile.chunked_prefill_us(new.max(1), prompt_tokens - new, spec.pass_tokens.into()) as u64
    }

    /// Final figures of the nodes.
    pub(crate) fn finish_samples(&mut self) {
        for node in &self.nodes {
            let stats = node.store.stats();
            let tiers = Tier::LOCAL.map(|t| stats.tiers[t.index()]);
            self.metrics.node_closed(node.spec.id.0, &node.engine, tiers);
        }
        let first = &self.conductors[0];
        self.metrics.conductor_closed(first.stats().clone(), first.prefill_errors());
    }
}
