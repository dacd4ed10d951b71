//! A run's figures as scripts read them.

use baton_types::{Role, SloClass};
use serde::Serialize;

use crate::bound::BoundResult;

use super::{ClassResult, Collector, HotBlocks, Series, TenantResult, seconds};

/// Mean and percentiles; `None` where there was nothing to measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Mean.
    pub mean: Option<f64>,
    /// Median.
    pub p50: Option<f64>,
    /// 90th percentile.
    pub p90: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
    /// Largest.
    pub max: Option<f64>,
}

/// The objectives of one service class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Objective {
    /// Name of the class.
    pub class: String,
    /// Bound of the time to first token.
    pub ttft_s: f64,
    /// Bound of the mean of the longest tenth of a request's gaps.
    pub tbt_ms: f64,
    /// Bound of the time to the last token, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub e2e_s: Option<f64>,
}

impl Objective {
    /// Those of a class.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    pub fn new(class: &SloClass) -> Self {
        Self {
            class: class.name.clone(),
            ttft_s: seconds(class.ttft_us),
            tbt_ms: class.tbt_us as f64 / 1e3,
            e2e_s: (class.e2e_us > 0).then(|| seconds(class.e2e_us)),
        }
    }
}

/// One instance's totals.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct InstanceResult {
    /// Its number.
    pub instance: u32,
    /// Its role.
    pub role: Role,
    /// Time in prefill passes and mixed steps.
    pub prefill_busy_s: f64,
    /// Time in pure decode steps.
    pub decode_busy_s: f64,
    /// Blocks found by tier: HBM, DRAM, SSD.
    pub tier_hit_blocks: [u64; 3],
    /// Blocks evicted by tier.
    pub tier_evicted_blocks: [u64; 3],
    /// Blocks held at the end, by tier.
    pub tier_used_blocks: [u64; 3],
}

/// Everything that a run measured. The names are relied upon by scripts.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    /// Placement policy.
    pub policy: String,
    /// Admission mode in force.
    pub admission: String,
    /// Speed-up of the trace.
    pub speed: f64,
    /// Seed.
    pub seed: u64,
    /// The objectives of each class.
    pub objectives: Vec<Objective>,
    /// The figures of each class, in the order of `objectives`.
    pub classes: Vec<ClassResult>,
    /// The figures of each tenant, those with the most requests first; empty where no request names one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<TenantResult>,
    /// Requests offered.
    pub requests: u64,
    /// Requests that got all their tokens.
    pub completed: u64,
    /// Requests refused for good.
    pub rejected: u64,
    /// Requests admitted that could not be served.
    pub failed: u64,
    /// Requests whose client left.
    pub cancelled: u64,
    /// Requests in SLO.
    pub in_slo: u64,
    /// `in_slo` over `requests`.
    pub goodput: f64,
    /// The bound on `in_slo` and the best run, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<BoundResult>,
    /// Completed requests within the TTFT objective.
    pub ttft_ok: u64,
    /// Completed requests within the TBT objective.
    pub tbt_ok: u64,
    /// Completed requests within the E2E objective, or without one.
    pub e2e_ok: u64,
    /// Prompt tokens offered.
    pub input_tokens: u64,
    /// Prompt tokens of requests in SLO.
    pub input_tokens_in_slo: u64,
    /// Tokens emitted to requests that completed.
    pub output_tokens: u64,
    /// Time to first token.
    pub ttft_s: LatencySummary,
    /// Mean of the longest tenth of a request's gaps.
    pub tbt_ms: LatencySummary,
    /// Distribution of the time to first token: share of completed requests, and the value that
    /// this share does not exceed. At most 103 points.
    pub ttft_quantiles_s: Vec<(f32, f32)>,
    /// Distribution of the mean of the longest tenth of a request's gaps.
    pub tbt_quantiles_ms: Vec<(f32, f32)>,
    /// Mean of all gaps.
    pub itl_ms_mean: f64,
    /// Latest first token past its objective.
    pub worst_lateness_s: f64,
    /// Prompt blocks reused over prompt blocks of completed requests.
    pub block_hit_ratio: f64,
    /// Prompt tokens reused over prompt tokens of completed requests.
    pub token_hit_ratio: f64,
    /// Engine time spent on prefills.
    pub prefill_busy_s: f64,
    /// See `Series::oscillation_index`.
    pub oscillation_index: f64,
    /// Prompt tokens computed for requests refused afterwards.
    pub wasted_prefill_tokens: u64,
    /// Refusals in all, those that were followed by a retry among them.
    pub refusals: u64,
    /// Refusals by reason.
    pub refusals_by_reason: Vec<(&'static str, u64)>,
    /// Retry times that refused clients received.
    pub retry_after_s: LatencySummary,
    /// Refusals whose client retries.
    pub retries: u64,
    /// Requests that were offered again after a refusal, when they were asked to or up to the clients' jitter later.
    pub second_tries: u64,
    /// Of those, let in at once.
    pub second_tries_admitted: u64,
    /// Requests that completed after a retry.
    pub readmitted: u64,
    /// Of those, in SLO.
    pub readmitted_in_slo: u64,
    /// Each shadow mode with the number of requests that it would have refused and that it judged.
    pub shadow: Vec<(&'static str, u64, u64)>,
    /// Bytes fetched between instances.
    pub fetched_bytes: u64,
    /// Bytes handed from prefill to decode.
    pub handoff_bytes: u64,
    /// Of the bytes fetched, those that store instances lent.
    pub lent_bytes: u64,
    /// Copies made ahead of demand.
    pub replications: u64,
    /// Chains saved on store instances because their last holder was about to evict them.
    pub saves: u64,
    /// Roles of instances that the conductor changed.
    pub role_changes: u64,
    /// Decodes that gave their KV up because a node had no more, and were sent again.
    pub preemptions: u64,
    /// Mean relative error of the conductor's prefill predictions.
    pub prefill_prediction_error: f64,
    /// Decode strides outside the profile's measured range.
    pub strides_outside_profile: u64,
    /// Requests whose prompt lies outside the profile's measured range.
    pub prompts_outside_profile: u64,
    /// Processor time of the run.
    pub cpu_s: f64,
    /// Per instance.
    pub instances: Vec<InstanceResult>,
    /// Replicas of popular blocks while they were asked for, most popular first; empty if not counted.
    pub hot_blocks: Vec<HotBlocks>,
    /// Over time.
    pub series: Series,
}

impl RunResult {
    /// How many nodes of each role there were, such as `8P8D`; `B` stands for both, `S` for store.
    #[must_use]
    pub fn nodes(&self) -> String {
        let roles = [(Role::Prefill, 'P'), (Role::Decode, 'D'), (Role::Both, 'B'), (Role::Store, 'S')];
        let count = |role| self.instances.iter().filter(|instance| instance.role == role).count();
        let parts = roles.into_iter().map(|(role, letter)| (count(role), letter));
        parts.filter(|(count, _)| *count > 0).map(|(count, letter)| format!("{count}{letter}")).collect()
    }
}

impl Collector {
    /// The figures, under the names of the run.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    pub fn result(&self, names: (&str, &str), speed: f64, seed: u64) -> RunResult {
        let c = &self.counts;
        let ratio = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        let busy_us: f64 = self.instances.iter().map(|i| i.prefill_busy_s).sum();
        let (ttft_s, ttft_quantiles_s) = self.ttft_us.figures(1e6);
        let (tbt_ms, tbt_quantiles_ms) = self.tbt_us.figures(1e3);
        RunResult {
            policy: names.0.into(),
            admission: names.1.into(),
            speed,
            seed,
            objectives: self.classes.iter().map(Objective::new).collect(),
            classes: self.by_class.results(),
            tenants: self.by_tenant.results(),
            requests: c.arrived,
            completed: c.completed,
            rejected: c.rejected,
            failed: c.failed,
            cancelled: c.cancelled,
            in_slo: c.in_slo,
            goodput: ratio(c.in_slo, c.arrived),
            bound: None,
            ttft_ok: c.ttft_ok,
            tbt_ok: c.tbt_ok,
            e2e_ok: c.e2e_ok,
            input_tokens: c.input_tokens,
            input_tokens_in_slo: c.in_slo_input_tokens,
            output_tokens: c.output_tokens,
            ttft_s,
            tbt_ms,
            ttft_quantiles_s,
            tbt_quantiles_ms,
            itl_ms_mean: if self.gap_count == 0 {
                0.0
            } else {
                self.gap_sum_us as f64 / self.gap_count as f64 / 1e3
            },
            worst_lateness_s: seconds(self.late_us),
            block_hit_ratio: ratio(c.hit_blocks, c.blocks),
            token_hit_ratio: ratio(c.cached_tokens, c.prompt_tokens),
            prefill_busy_s: busy_us,
            oscillation_index: self.series.oscillation_index(),
            wasted_prefill_tokens: c.wasted_tokens,
            refusals: c.refusals,
            refusals_by_reason: self.refusals_by_reason(),
            retry_after_s: self.retry_after_us.figures(1e6).0,
            retries: c.retried,
            readmitted: c.readmitted,
            readmitted_in_slo: c.retried_in_slo,
            second_tries: c.second_tries,
            second_tries_admitted: c.second_tries_admitted,
            shadow: self.scheduler.shadow.iter().map(|(m, refused, of)| (m.name(), *refused, *of)).collect(),
            fetched_bytes: c.fetched_bytes,
            handoff_bytes: c.handoff_bytes,
            lent_bytes: c.lent_bytes,
            replications: self.scheduler.replications,
            saves: self.scheduler.saves,
            role_changes: self.scheduler.role_changes,
            preemptions: c.preemptions,
            prefill_prediction_error: self.prefill_error,
            strides_outside_profile: c.outside_profile,
            prompts_outside_profile: 0,
            cpu_s: 0.0,
            instances: self.instances.clone(),
            hot_blocks: self.popularity.ranked(),
            series: self.series.clone(),
        }
    }
}
