//! Measurements of a run. Definitions (also in `docs/metrics.md`):
//!
//! - *TTFT*: from the offer of the request (its last attempt) to its first token.
//! - *TBT*: the mean of the longest tenth of a request's token gaps (at least one gap).
//! - *in SLO*: completed with TTFT, TBT and, where there is such an objective, E2E within its class's objectives.
//! - *goodput*: requests in SLO over requests offered; rejected, failed and late ones all count
//!   against it, each under its own name.
//! - *block hit ratio*: prompt blocks that needed no computing over prompt blocks of admitted
//!   requests that were prefilled.
//! - *wasted prefill*: prompt tokens computed for requests that were refused afterwards.

mod classes;
mod hot;
mod result;
mod samples;
mod series;
mod tenants;

use baton_scheduler::{Decision, Prediction, RejectReason, Rejection, SchedulerStats};
use baton_store::TierStats;
use baton_types::{BlockHash, BlockKey, InstanceId, RequestId, RequestObjectives, Role, SloClass};
use hashbrown::HashMap;

use crate::engine::{Engine, GapSummary};
use crate::setup::Setup;
use crate::workload::{Arrival, Workload};

pub use classes::{ClassCounter, ClassResult};
pub use hot::{HotBlocks, Popularity};
pub use result::{InstanceResult, LatencySummary, Objective, RunResult};
pub use samples::Samples;
pub use series::{Bin, LoadSample, Series};
pub use tenants::{TenantCounter, TenantResult};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It got all its tokens.
    Completed,
    /// It was refused, and its client gave up.
    Rejected,
    /// It was admitted and could not be served.
    Failed,
    /// Its client left.
    Cancelled,
    /// It was admitted, and a stage took longer than it may.
    TimedOut,
}

impl Status {
    /// The word used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Rejected => "rejected",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::TimedOut => "timed_out",
        }
    }
}

/// One request's story.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Its row in what was replayed, from 0 on, in the order of arrival: the same simulated and live.
    pub row: u64,
    /// How it ended.
    pub status: Status,
    /// Its class, by index.
    pub class: u16,
    /// The objectives that it named itself, in place of its class's.
    pub objectives: RequestObjectives,
    /// Its tenant's number, from 1 on; 0 where it names none.
    pub tenant: u32,
    /// When it was first offered, µs.
    pub first_offer_us: u64,
    /// When it was last offered, µs.
    pub offer_us: u64,
    /// When it ended, µs.
    pub end_us: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub output_tokens: u32,
    /// Prompt tokens that needed no computing.
    pub cached_tokens: u64,
    /// Prompt blocks that needed no computing.
    pub hit_blocks: u32,
    /// Prompt blocks.
    pub blocks: u32,
    /// Time to first token, µs.
    pub ttft_us: u64,
    /// Its token gaps.
    pub gaps: GapSummary,
    /// Times offered.
    pub attempts: u32,
    /// Retry time of its last refusal, µs.
    pub retry_after_us: u64,
    /// Prefill instance.
    pub prefill: u32,
    /// Decode instance.
    pub decode: u32,
    /// Prompt tokens computed for nothing.
    pub wasted_tokens: u64,
    /// From its last offer to the start of its decode, µs; meaningless of an answer of one token.
    pub decode_start_us: u64,
    /// What the conductor predicted of it, if it completed where it was first placed.
    pub prediction: Option<Prediction>,
}

impl Outcome {
    /// Its class among these (at least one); an unknown one counts as the last.
    #[must_use]
    pub fn class_of<'a>(&self, classes: &'a [SloClass]) -> &'a SloClass {
        &classes[usize::from(self.class).min(classes.len() - 1)]
    }

    /// Whether an answer that completed kept the TTFT, the TBT and the E2E objective that held for it: its own, else its
    /// class's.
    #[must_use]
    pub fn keeps(&self, class: &SloClass) -> [bool; 3] {
        let e2e_us = self.end_us.saturating_sub(self.offer_us);
        self.objectives.kept(class, (self.ttft_us, self.gaps.worst_tenth_us, e2e_us))
    }

    /// By how much its first token came later than its objective, µs.
    #[must_use]
    pub fn late_us(&self, class: &SloClass) -> u64 {
        self.ttft_us.saturating_sub(self.objectives.in_force(class).0)
    }

    /// A request of one prompt token with these TTFT and TBT, µs, for tests.
    #[cfg(test)]
    pub(crate) fn of_class(class: u16, status: Status, (ttft_us, tbt_us): (u64, u64)) -> Self {
        Self {
            row: 0,
            status,
            class,
            objectives: RequestObjectives::default(),
            tenant: 0,
            first_offer_us: 0,
            offer_us: 0,
            end_us: 0,
            prompt_tokens: 1,
            output_tokens: 1,
            cached_tokens: 0,
            hit_blocks: 0,
            blocks: 1,
            ttft_us,
            gaps: GapSummary { worst_tenth_us: tbt_us, ..GapSummary::default() },
            attempts: 1,
            retry_after_us: 0,
            prefill: 0,
            decode: 0,
            wasted_tokens: 0,
            decode_start_us: 0,
            prediction: None,
        }
    }
}

/// Gathers a run's figures.
#[derive(Debug)]
pub struct Collector {
    classes: Vec<SloClass>,
    keep: bool,
    /// Every outcome in order of ending, when they are kept.
    pub outcomes: Vec<Outcome>,
    /// Decisions recorded.
    pub decisions: Vec<Decision>,
    /// Of completed requests, when they were last offered and their TTFT, µs; kept while decisions are recorded.
    answered_us: HashMap<RequestId, (u64, u64)>,
    ttft_us: Samples,
    tbt_us: Samples,
    gap_sum_us: u128,
    gap_count: u64,
    retry_after_us: Samples,
    late_us: u64,
    counts: Counts,
    by_class: ClassCounter,
    by_tenant: TenantCounter,
    reasons: [u64; RejectReason::ALL.len()],
    /// Loads over time.
    pub series: Series,
    instances: Vec<InstanceResult>,
    /// Role of each instance, by its number.
    roles: Vec<Role>,
    popularity: Popularity,
    scheduler: SchedulerStats,
    prefill_error: f64,
    /// For gap summaries.
    pub scratch: Vec<u32>,
}

/// Plain sums.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    arrived: u64,
    input_tokens: u64,
    output_tokens: u64,
    completed: u64,
    rejected: u64,
    failed: u64,
    cancelled: u64,
    in_slo: u64,
    in_slo_input_tokens: u64,
    ttft_ok: u64,
    tbt_ok: u64,
    e2e_ok: u64,
    refusals: u64,
    retried_in_slo: u64,
    second_tries: u64,
    second_tries_admitted: u64,
    retried: u64,
    readmitted: u64,
    hit_blocks: u64,
    blocks: u64,
    cached_tokens: u64,
    prompt_tokens: u64,
    wasted_tokens: u64,
    prefill_us: u64,
    fetched_bytes: u64,
    lent_bytes: u64,
    handoff_bytes: u64,
    preemptions: u64,
    outside_profile: u64,
}

impl Collector {
    /// An empty collector for a run.
    #[must_use]
    pub fn new(setup: &Setup, workload: &dyn Workload) -> Self {
        Self {
            classes: setup.scheduler.classes.clone(),
            keep: setup.keep_outcomes,
            outcomes: Vec::new(),
            decisions: Vec::new(),
            answered_us: HashMap::new(),
            ttft_us: Samples::default(),
            tbt_us: Samples::default(),
            gap_sum_us: 0,
            gap_count: 0,
            retry_after_us: Samples::default(),
            late_us: 0,
            counts: Counts::default(),
            by_class: ClassCounter::new(&setup.scheduler.classes),
            by_tenant: TenantCounter::new(workload.tenants()),
            reasons: [0; RejectReason::ALL.len()],
            series: Series::new(workload.span_us(), setup.instances()),
            instances: Vec::new(),
            roles: setup.pools.iter().flat_map(|p| (0..p.count).map(|_| p.role)).collect(),
            popularity: Popularity::new(),
            scheduler: SchedulerStats::default(),
            prefill_error: 0.0,
            scratch: Vec::new(),
        }
    }

    pub(crate) fn arrived(&mut self, now_us: u64, arrival: &Arrival) {
        self.counts.arrived += 1;
        self.counts.input_tokens += arrival.prompt_tokens;
        self.series.at(now_us).arrived += 1;
    }

    /// A request names the blocks of its prompt: popular ones are counted. `holders` says how many
    /// instances hold a block now; it is asked rarely.
    pub fn asked(&mut self, keys: &[BlockKey], holders: impl Fn(BlockHash) -> usize) {
        for key in keys {
            self.popularity.asked(key.short(), &holders);
        }
    }

    pub(crate) fn refused(&mut self, now_us: u64, rejection: &Rejection, returns: bool) {
        self.counts.refusals += 1;
        self.counts.wasted_tokens += rejection.wasted_tokens;
        self.counts.retried += u64::from(returns);
        self.reasons[rejection.reason as usize] += 1;
        self.retry_after_us.push(rejection.retry_after_us);
        self.series.at(now_us).rejected += 1;
    }

    pub(crate) fn prefilled(&mut self, now_us: u64, instance: u32, tokens: u64, compute_us: u64) {
        self.counts.prefill_us += compute_us;
        self.series.prefill(now_us, instance, tokens, compute_us);
    }

    pub(crate) const fn fetched(&mut self, bytes: u64, lent: bool) {
        self.counts.fetched_bytes += bytes;
        self.counts.lent_bytes += if lent { bytes } else { 0 };
    }

    pub(crate) const fn handed_off(&mut self, bytes: u64) {
        self.counts.handoff_bytes += bytes;
    }

    pub(crate) const fn preempted(&mut self) {
        self.counts.preemptions += 1;
    }

    pub(crate) fn explained(&mut self, decision: Decision) {
        self.decisions.push(decision);
    }

    /// The TTFT of the request that a recorded decision placed, µs; none where the decision placed none, where the request
    /// was offered again later, or where it did not complete.
    #[must_use]
    pub fn ttft_after_us(&self, decision: &Decision) -> Option<u64> {
        let (offer_us, ttft_us) = *self.answered_us.get(&decision.request)?;
        (decision.chosen.is_some() && decision.at_us >= offer_us).then_some(ttft_us)
    }

    pub(crate) fn sampled(&mut self, now_us: u64, load: &LoadSample) {
        self.series.sample(now_us, load);
    }

    /// Share of prompt tokens that needed no computing so far.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn token_hit_ratio(&self) -> f64 {
        self.counts.cached_tokens as f64 / (self.counts.prompt_tokens.max(1)) as f64
    }

    pub(crate) fn ended(&mut self, request: RequestId, outcome: &Outcome) {
        let c = &mut self.counts;
        match outcome.status {
            Status::Completed => c.completed += 1,
            Status::Rejected => c.rejected += 1,
            Status::Failed | Status::TimedOut => c.failed += 1,
            Status::Cancelled => c.cancelled += 1,
        }
        c.second_tries += u64::from(outcome.attempts > 1);
        c.second_tries_admitted += u64::from(outcome.attempts == 2 && outcome.status != Status::Rejected);
        self.by_class.ended(outcome);
        self.by_tenant.ended(outcome, outcome.class_of(&self.classes));
        if outcome.status == Status::Completed {
            self.completed(outcome);
            if !self.decisions.is_empty() {
                self.answered_us.insert(request, (outcome.offer_us, outcome.ttft_us));
            }
        }
        if self.keep {
            self.outcomes.push(*outcome);
        }
    }

    fn completed(&mut self, outcome: &Outcome) {
        let class = outcome.class_of(&self.classes);
        let c = &mut self.counts;
        c.output_tokens += u64::from(outcome.output_tokens);
        c.hit_blocks += u64::from(outcome.hit_blocks);
        c.blocks += u64::from(outcome.blocks);
        c.cached_tokens += outcome.cached_tokens;
        c.prompt_tokens += outcome.prompt_tokens;
        self.ttft_us.push(outcome.ttft_us);
        if outcome.gaps.count > 0 {
            // An answer of one token has no gap.
            self.tbt_us.push(outcome.gaps.worst_tenth_us);
        }
        self.gap_sum_us += u128::from(outcome.gaps.mean_us) * u128::from(outcome.gaps.count);
        self.gap_count += outcome.gaps.count;
        let kept = outcome.keeps(class);
        let (in_slo, [ttft_ok, tbt_ok, e2e_ok]) = (kept == [true; 3], kept);
        c.ttft_ok += u64::from(ttft_ok);
        c.tbt_ok += u64::from(tbt_ok);
        c.e2e_ok += u64::from(e2e_ok);
        c.readmitted += u64::from(outcome.attempts > 1);
        self.late_us = self.late_us.max(outcome.late_us(class));
        if in_slo {
            c.in_slo += 1;
            c.in_slo_input_tokens += outcome.prompt_tokens;
            c.retried_in_slo += u64::from(outcome.attempts > 1);
        }
        let bin = self.series.at(outcome.offer_us);
        bin.completed += 1;
        bin.in_slo += u64::from(in_slo);
        bin.ttft_us += outcome.ttft_us;
        bin.hit_blocks += u64::from(outcome.hit_blocks);
        bin.blocks += u64::from(outcome.blocks);
    }

    pub(crate) fn node_closed(&mut self, instance: u32, engine: &Engine, tiers: [TierStats; 3]) {
        self.counts.outside_profile += engine.outside_steps;
        self.instances.push(InstanceResult {
            instance,
            role: self.roles.get(instance as usize).copied().unwrap_or(Role::Both),
            prefill_busy_s: seconds(engine.prefill_busy_ps / 1_000_000),
            decode_busy_s: seconds(engine.decode_busy_ps / 1_000_000),
            tier_hit_blocks: tiers.map(|t| t.hit_blocks),
            tier_evicted_blocks: tiers.map(|t| t.evicted_blocks),
            tier_used_blocks: tiers.map(|t| t.used_blocks),
        });
    }

    pub(crate) fn conductor_closed(&mut self, stats: SchedulerStats, errors: Vec<(InstanceId, f64)>) {
        self.scheduler = stats;
        let seen: Vec<f64> = errors.into_iter().map(|(_, e)| e).filter(|e| *e > 0.0).collect();
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        let mean = seen.iter().sum::<f64>() / seen.len().max(1) as f64;
        self.prefill_error = mean;
    }

    /// Refusals by reason, with their names.
    #[must_use]
    pub fn refusals_by_reason(&self) -> Vec<(&'static str, u64)> {
        RejectReason::ALL
            .iter()
            .map(|r| (r.name(), self.reasons[*r as usize]))
            .filter(|(_, n)| *n > 0)
            .collect()
    }
}

/// Microseconds as seconds.
#[expect(clippy::cast_precision_loss, reason = "a figure for a report")]
pub(crate) fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}
