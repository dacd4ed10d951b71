//! Terms of a prefill on one instance: what is reused, what is fetched, what is computed.

use baton_types::{InstanceId, RequestId, Role};

use super::{Candidate, Hit, Plan};
use crate::conductor::Conductor;
use crate::estimate::{NEVER_US, fetch_us, least_work_us, load_us, prefill_work, stretches_steps};
use crate::fleet::Instance;
use crate::policies::FetchRule;
use crate::queue::{NewWork, Outlook};
use crate::{FetchPlan, Request};

/// Holders that are asked, about, for what a decode instance has of a prompt.
const HOLDERS: usize = 32;

/// A waiting request that will compute leading blocks of another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueuedLeader {
    request: RequestId,
    /// Leading blocks that they share.
    blocks: u32,
    order_us: u64,
    alone_us: u64,
}

impl Plan {
    /// The weight of the prefill when plans are compared, µs: its work, or more than any work if it breaks decodes.
    pub(crate) const fn burden_us(&self) -> u64 {
        if self.breaks_decodes { NEVER_US } else { self.work_us }
    }
}

impl Conductor {
    fn fetch_rule(&self) -> FetchRule {
        if self.config.fetch { self.policy().fetch } else { FetchRule::Never }
    }

    /// Whether the policy fetches blocks from other instances.
    pub(crate) fn fetches(&self) -> bool {
        self.fetch_rule() != FetchRule::Never
    }

    /// Looks the request's chain up in the index and keeps the hits.
    pub(crate) fn look_up(&mut self, request: &Request) {
        self.hits.reset(self.fleet.bound());
        let (hits, fleet) = (&mut self.hits, &self.fleet);
        let anywhere = self.config.policy.orders_queues();
        let is_source = |id: InstanceId| {
            fleet.get(id).is_some_and(|i| {
                let lends = i.spec.role == Role::Store;
                i.state != crate::InstanceState::Lost && (anywhere || lends || i.spec.role.prefills())
            })
        };
        let mut wide = core::mem::take(&mut hits.wide);
        self.index.narrow_matches(&request.chain, &mut self.scratch, &mut wide, |m| {
            hits.record(m.instance, Hit { blocks: m.blocks, by_tier: m.by_tier, coming: 0 });
            if hits.lacks_sources(m.blocks) && is_source(m.instance) {
                hits.offer_source(m.instance, m.blocks);
            }
        });
        for m in wide.matches() {
            if !hits.lacks_sources(m.blocks) {
                break;
            }
            if hits.of(m.instance).blocks == 0 && is_source(m.instance) {
                hits.offer_source(m.instance, m.blocks);
            }
        }
        hits.wide = wide;
        let decodes = |id: &InstanceId| fleet.get(*id).is_some_and(|i| i.serves() && i.spec.role.decodes());
        let most = hits.some_holders(HOLDERS).filter(decodes).map(|id| hits.of(id).by_tier[0]).max();
        hits.decode_blocks = most.unwrap_or(0);
        if anywhere {
            let (hits, requests) = (&mut self.hits, &self.requests);
            self.coming.holders(
                &request.chain,
                |id| requests.chain_of(id),
                |_, at, blocks| hits.will_hold(at, u32::try_from(blocks).unwrap_or(u32::MAX)),
            );
            self.queued.holders(
                &request.chain,
                |id| requests.chain_of(id),
                |leader, at, blocks| {
                    if leader != request.id {
                        hits.waits(leader, at, u32::try_from(blocks).unwrap_or(u32::MAX));
                    }
                },
            );
        }
    }

    /// Prompt tokens that `blocks` leading blocks hold; the last token is always computed.
    pub(crate) fn tokens_of(&self, request: &Request, blocks: u32) -> u64 {
        assert!(request.prompt_tokens > 0, "request {} has no prompt", request.id);
        (u64::from(blocks) * u64::from(self.config.block_tokens)).min(request.prompt_tokens - 1)
    }

    /// The waiting request of an instance that shares the most leading blocks with a prompt, if it computes more of them than
    /// are there, or will be, without it. One of another band or without room has its turn by other rules.
    fn leader(&self, instance: &Instance, request: &Request) -> Option<QueuedLeader> {
        let (leader, blocks) = self.hits.waiting_on(instance.spec.id)?;
        if blocks <= self.hits.of(instance.spec.id).by_its_turn() {
            return None;
        }
        let w = instance.prefill.of(leader)?;
        let leads = w.held_until_us == 0 && w.priority == self.class(request).priority;
        leads.then_some(QueuedLeader { request: leader, blocks, order_us: w.order_us, alone_us: w.alone_us })
    }

    /// The best plan on `instance` by the policy's fetch rule, from the last look-up, beside so many tokens of others in its
    /// pass, behind a request that waits there.
    pub(crate) fn plan(
        &self,
        instance: &Instance,
        request: &Request,
        others_tokens: u64,
        leader: Option<&QueuedLeader>,
    ) -> Plan {
        let (hit, block) = (self.hits.of(instance.spec.id), u64::from(self.config.block_tokens));
        let here_blocks = leader.map_or(hit.by_its_turn(), |leader| leader.blocks);
        let cached = self.tokens_of(request, here_blocks);
        let below = |tier: usize| u64::from(hit.by_tier[tier]) * block;
        let new_tokens = request.prompt_tokens - cached;
        // The prefill behind these blocks loads them first, and is in an earlier pass.
        let coming = cached - self.tokens_of(request, hit.blocks.min(here_blocks));
        let local_load = if here_blocks > hit.blocks { 0 } else { load_us(instance, below(1), below(2)) };
        let beside_tokens = self.beside_tokens(instance, new_tokens, others_tokens.saturating_sub(coming));
        let sends_us = self.sends_us(instance, request);
        let planned = |cached_tokens: u64, load_us: u64, fetch: Option<FetchPlan>| {
            let new_tokens = request.prompt_tokens - cached_tokens;
            let others = if fetch.is_none() { beside_tokens } else { 0 };
            let target_us = self.config.step_target_us();
            let work = prefill_work(instance, (new_tokens, cached_tokens), others, target_us);
            let breaks_decodes = work.breaks_decodes
                || self.has_place_beside(instance)
                    && stretches_steps(instance, new_tokens, cached_tokens, target_us);
            Plan {
                cached_tokens,
                new_tokens,
                load_us,
                work_us: work.us.max(sends_us),
                alone_us: work.alone_us.max(sends_us),
                breaks_decodes,
                fetch,
                after: leader.filter(|_| fetch.is_none()).map(|leader| leader.request),
            }
        };
        let local = || planned(cached, local_load, None);
        let rule = self.fetch_rule();
        if rule == FetchRule::Never {
            return local();
        }
        let Some((blocks, source)) = self.best_source(instance.spec.id, here_blocks) else {
            return local();
        };
        let far = self.tokens_of(request, blocks);
        assert!(far >= cached, "what is fetched reaches as far as what is there");
        let load_us = local_load + self.bring_us(source, instance, far - cached);
        let fetched = planned(far, load_us, Some(FetchPlan { from: source.spec.id, blocks }));
        let take = match rule {
            FetchRule::Never => false,
            FetchRule::Longer => true,
            FetchRule::Threshold => {
                let permille = self.config.balancing_threshold_permille;
                u64::from(blocks) * 1000 > u64::from(hit.blocks.max(1)) * u64::from(permille)
                    || (hit.blocks == 0 && blocks > 0)
            }
            FetchRule::Sooner => {
                let fetched_us = fetched.load_us + fetched.burden_us();
                // The bound decides most cases; only the others need the whole estimate.
                if fetched_us >= local_load + least_work_us(instance, (new_tokens, cached), beside_tokens) {
                    let local = local();
                    return if fetched_us < local.load_us + local.burden_us() { fetched } else { local };
                }
                true
            }
        };
        if take { fetched } else { local() }
    }

    /// Whether an instance of both roles has others beside it that prefill and do not decode.
    pub(crate) fn has_place_beside(&self, instance: &Instance) -> bool {
        instance.spec.role == Role::Both && self.fleet.prefills_apart
    }

    /// Predicted time to fetch `tokens` tokens from `source`, µs. A store instance has most of them in slower memory,
    /// and reads the end of a chain from there before it sends.
    fn bring_us(&self, source: &Instance, target: &Instance, tokens: u64) -> u64 {
        let over_us = fetch_us(source, target, tokens);
        if source.spec.role != Role::Store {
            return over_us;
        }
        let flash = self.hits.of(source.spec.id).by_tier[2];
        let flash_tokens = (u64::from(flash) * u64::from(self.config.block_tokens)).min(tokens);
        over_us.max(load_us(source, 0, flash_tokens))
    }

    /// The holder of the longest prefix beyond `blocks`; among equals the one with the fewest transfers.
    fn best_source(&self, target: InstanceId, blocks: u32) -> Option<(u32, &Instance)> {
        let able = |id: InstanceId| id != target && self.fleet.share(id, target);
        let usable = self.hits.sources().iter().filter(|(b, id)| *b > blocks && able(*id));
        let longest = usable.clone().map(|(b, _)| *b).max()?;
        usable
            .filter(|(b, _)| *b == longest)
            .filter_map(|(b, id)| self.fleet.get(*id).map(|i| (*b, i)))
            .min_by_key(|(_, i)| (i.prefill.outbound.flights(), i.spec.id))
    }

    /// A candidate's terms, without score.
    pub(crate) fn candidate(&self, instance: &Instance, request: &Request, deadline_us: u64) -> Candidate {
        // Where room to decode is scarce what leads may be refused at its turn, and leaves its work to its followers.
        if self.config.policy.orders_queues()
            && !self.demand.lacks_decodes()
            && let Some(leader) = self.leader(instance, request)
            && let candidate = self.candidate_behind(instance, request, deadline_us, Some(&leader))
            && candidate.feasible
        {
            return candidate;
        }
        self.candidate_behind(instance, request, deadline_us, None)
    }

    /// The terms of a candidate, behind a request that waits there if one is given.
    fn candidate_behind(
        &self,
        instance: &Instance,
        request: &Request,
        deadline_us: u64,
        leader: Option<&QueuedLeader>,
    ) -> Candidate {
        let now = self.now_us;
        let plan = self.plan(instance, request, instance.prefill.joinable_tokens(now, None), leader);
        let latency = self.pipeline_latency_us(instance, &plan);
        let tail_us = self.handoff_tail_us(instance) + latency;
        let own_us = plan.load_us + plan.work_us + tail_us;
        let slack_us = deadline_us.saturating_sub(now).saturating_sub(own_us);
        let margin_us = self.margins.of_wait_us(request.class, instance.spec.role, (slack_us, own_us));
        let deadline_us = deadline_us - margin_us.min(deadline_us);
        let due_us = deadline_us.saturating_sub(tail_us);
        let new = NewWork {
            work_us: plan.work_us,
            deadline_us: due_us,
            order_us: leader.map_or(due_us, |leader| leader.order_us),
            priority: self.class(request).priority,
            rank_us: leader.map_or(plan.alone_us, |leader| leader.alone_us.max(plan.alone_us)),
        };
        let (queue_us, latest_us, behind_us, keeps) = if self.config.policy.orders_queues() {
            let o = self.outlook(instance, new);
            let behind_us = u64::from(o.behind) * plan.work_us;
            (o.expected_wait_us, o.deadline_wait_us, behind_us, o.keeps_promises)
        } else {
            let queue_us = instance.backlog_us(now);
            (queue_us, queue_us, 0, true)
        };
        let ttft_us = queue_us.max(plan.load_us) + plan.work_us + tail_us;
        // At the latest it is alone: those that it would share a pass with may be gone by then.
        let latest_us = latest_us.max(plan.load_us) + plan.alone_us + tail_us;
        Candidate {
            instance: instance.spec.id,
            plan,
            queue_us,
            ttft_us,
            latest_us,
            behind_us,
            room_wait_us: 0,
            deadline_us,
            new,
            score: 0.0,
            feasible: keeps && !plan.breaks_decodes && now + latest_us <= deadline_us,
        }
    }

    /// The outlook of new work on an instance, beside what is kept there for others.
    pub(crate) fn outlook(&self, instance: &Instance, new: NewWork) -> Outlook {
        let id = instance.spec.id;
        instance.prefill.outlook(self.now_us, new, self.kept.prefills(id), self.kept.made_way(id))
    }

    /// Time of a prefill on an idle instance that has so many leading blocks of it, µs.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times are positive and far below 2^53"
    )]
    pub(crate) fn idle_prefill_us(&self, instance: &Instance, request: &Request, cached_blocks: u32) -> u64 {
        let spec = &instance.spec;
        let cached = self.tokens_of(request, cached_blocks);
        let new = request.prompt_tokens - cached;
        let alone_us = spec.profile.chunked_prefill_us(new, cached, spec.pass_tokens.into());
        let ratio = instance.prefill_residual.lasting_ratio();
        (alone_us / f64::from(spec.pipeline_nodes.max(1)) * ratio) as u64
    }

    /// Time after which a pipeline is free for the next chunk, µs; that is before the last chunk has left it.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times are positive and small"
    )]
    pub(crate) fn pipeline_latency_us(&self, instance: &Instance, plan: &Plan) -> u64 {
        let nodes = instance.spec.pipeline_nodes;
        if nodes <= 1 {
            return 0;
        }
        let last = plan.new_tokens.min(instance.spec.pass_tokens.into());
        let pass_us = instance.spec.profile.prefill_us(last, plan.cached_tokens + plan.new_tokens - last);
        (pass_us * f64::from(nodes - 1) / f64::from(nodes)) as u64
    }

    /// Time from the end of a prefill to the first token on the decode side: the last layer's KV and about one and a
    /// half decode steps. Zero if the prefill is local.
    pub(crate) fn handoff_tail_us(&self, instance: &Instance) -> u64 {
        if instance.spec.role.decodes() { 0 } else { self.first_step_us() }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times are positive and small"
    )]
    pub(crate) fn first_step_us(&self) -> u64 {
        let step_us = self.fleet.decodes.first().and_then(|id| self.fleet.get(*id)).map_or(0.0, |d| {
            let (batch, context, _) = d.decode.now();
            d.step_us(batch + 1, context)
        });
        (step_us * 1.5) as u64
    }
}
