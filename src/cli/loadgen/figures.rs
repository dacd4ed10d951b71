//! A live run's figures as the simulator's report: the same structure, the same definitions.
//!
//! Figures that only a cluster's inside knows (loads, tiers, bytes moved) stay zero or empty. A test checks that the
//! definitions are the simulator's: outcomes of a simulated run give its very figures.

use baton_scheduler::RejectReason;
use baton_sim::RunResult;
use baton_sim::metrics::{ClassCounter, Objective, Outcome, Samples, Series, Status, TenantCounter};
use baton_types::SloClass;

use super::live::SentRequest;

/// The names of a run's settings.
#[derive(Clone, Copy, Debug)]
pub struct RunName<'a> {
    /// In the place of the placement policy.
    pub policy: &'a str,
    /// In the place of the admission mode.
    pub admission: &'a str,
    /// Speed-up of the trace.
    pub speed: f64,
    /// The seed of the run.
    pub seed: u64,
}

/// Sums over a run's requests.
#[derive(Default)]
struct Sums {
    ttft_us: Samples,
    tbt_us: Samples,
    retry_after_us: Samples,
    gap_sum_us: u128,
    gap_count: u64,
    late_us: u64,
    by_status: [u64; 5],
    in_slo: u64,
    ttft_ok: u64,
    tbt_ok: u64,
    e2e_ok: u64,
    input_tokens: u64,
    input_tokens_in_slo: u64,
    output_tokens: u64,
    hit_blocks: u64,
    blocks: u64,
    cached_tokens: u64,
    prompt_tokens: u64,
    refusals: u64,
    retries: u64,
    readmitted: u64,
    readmitted_in_slo: u64,
    reasons: Vec<(&'static str, u64)>,
}

/// The figures of a run whose requests ended as `sent` says, judged by `classes` (at least one); `tenants` are the names
/// from number 1 on.
pub fn result(
    sent: &[SentRequest],
    classes: &[SloClass],
    tenants: &[String],
    name: RunName<'_>,
) -> RunResult {
    let mut sums = Sums::default();
    let (mut by_class, mut by_tenant) = (ClassCounter::new(classes), TenantCounter::new(tenants));
    let span_us = sent.iter().map(|s| s.outcome.end_us).max().unwrap_or(0);
    let mut series = Series::new(span_us, 0);
    for one in sent {
        let class = one.outcome.class_of(classes);
        sums.take(one, class);
        by_class.ended(&one.outcome);
        by_tenant.ended(&one.outcome, class);
        mark(&mut series, one, class);
    }
    let (classes_of, tenants) = (by_class.results(), by_tenant.results());
    RunResult { classes: classes_of, tenants, ..sums.close(classes, name, series, sent.len() as u64) }
}

impl Sums {
    fn take(&mut self, one: &SentRequest, class: &SloClass) {
        let o = &one.outcome;
        self.input_tokens += o.prompt_tokens;
        self.by_status[o.status as usize] += 1;
        for refusal in &one.refusals {
            self.refusals += 1;
            self.retries += u64::from(refusal.returned);
            refusal.retry_after_us.into_iter().for_each(|us| self.retry_after_us.push(us));
            count(&mut self.reasons, reason(&refusal.reason));
        }
        if o.status == Status::Completed {
            self.completed(o, class);
        }
    }

    fn completed(&mut self, o: &Outcome, class: &SloClass) {
        self.output_tokens += u64::from(o.output_tokens);
        self.hit_blocks += u64::from(o.hit_blocks);
        self.blocks += u64::from(o.blocks);
        self.cached_tokens += o.cached_tokens;
        self.prompt_tokens += o.prompt_tokens;
        self.ttft_us.push(o.ttft_us);
        if o.gaps.count > 0 {
            // An answer of one token has no gap.
            self.tbt_us.push(o.gaps.worst_tenth_us);
        }
        self.gap_sum_us += u128::from(o.gaps.mean_us) * u128::from(o.gaps.count);
        self.gap_count += o.gaps.count;
        let kept = o.keeps(class);
        let (in_slo, [ttft_ok, tbt_ok, e2e_ok]) = (kept == [true; 3], kept);
        self.ttft_ok += u64::from(ttft_ok);
        self.tbt_ok += u64::from(tbt_ok);
        self.e2e_ok += u64::from(e2e_ok);
        self.readmitted += u64::from(o.attempts > 1);
        self.late_us = self.late_us.max(o.late_us(class));
        if in_slo {
            self.in_slo += 1;
            self.input_tokens_in_slo += o.prompt_tokens;
            self.readmitted_in_slo += u64::from(o.attempts > 1);
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    fn close(self, classes: &[SloClass], name: RunName<'_>, series: Series, requests: u64) -> RunResult {
        let ratio = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        let (ttft_s, ttft_quantiles_s) = self.ttft_us.figures(1e6);
        let (tbt_ms, tbt_quantiles_ms) = self.tbt_us.figures(1e3);
        let status = |status: Status| self.by_status[status as usize];
        RunResult {
            policy: name.policy.into(),
            admission: name.admission.into(),
            speed: name.speed,
            seed: name.seed,
            objectives: classes.iter().map(Objective::new).collect(),
            classes: Vec::new(),
            tenants: Vec::new(),
            requests,
            completed: status(Status::Completed),
            rejected: status(Status::Rejected),
            failed: status(Status::Failed) + status(Status::TimedOut),
            cancelled: status(Status::Cancelled),
            in_slo: self.in_slo,
            goodput: ratio(self.in_slo, requests),
            bound: None,
            ttft_ok: self.ttft_ok,
            tbt_ok: self.tbt_ok,
            e2e_ok: self.e2e_ok,
            input_tokens: self.input_tokens,
            input_tokens_in_slo: self.input_tokens_in_slo,
            output_tokens: self.output_tokens,
            ttft_s,
            tbt_ms,
            ttft_quantiles_s,
            tbt_quantiles_ms,
            itl_ms_mean: self.gap_sum_us as f64 / self.gap_count.max(1) as f64 / 1e3,
            worst_lateness_s: self.late_us as f64 / 1e6,
            block_hit_ratio: ratio(self.hit_blocks, self.blocks),
            token_hit_ratio: ratio(self.cached_tokens, self.prompt_tokens),
            prefill_busy_s: 0.0,
            oscillation_index: 0.0,
            wasted_prefill_tokens: 0,
            refusals: self.refusals,
            refusals_by_reason: self.reasons,
            retry_after_s: self.retry_after_us.figures(1e6).0,
            retries: self.retries,
            readmitted: self.readmitted,
            readmitted_in_slo: self.readmitted_in_slo,
            shadow: Vec::new(),
            fetched_bytes: 0,
            handoff_bytes: 0,
            lent_bytes: 0,
            replications: 0,
            second_tries: 0,
            second_tries_admitted: 0,
            saves: 0,
            role_changes: 0,
            preemptions: 0,
            prefill_prediction_error: 0.0,
            strides_outside_profile: 0,
            prompts_outside_profile: 0,
            cpu_s: 0.0,
            instances: Vec::new(),
            hot_blocks: Vec::new(),
            series,
        }
    }
}

/// The scheduler's own word for a reason that a server named; `other` for a reason not of ours.
fn reason(name: &str) -> &'static str {
    let known = RejectReason::ALL.map(RejectReason::name);
    known.into_iter().find(|known| *known == name).unwrap_or("other")
}

fn count(counts: &mut Vec<(&'static str, u64)>, name: &'static str) {
    match counts.iter_mut().find(|(known, _)| *known == name) {
        Some((_, n)) => *n += 1,
        None => counts.push((name, 1)),
    }
}

/// Enters a request into the bins of the moments at which it arrived, was last offered and refused.
fn mark(series: &mut Series, one: &SentRequest, class: &SloClass) {
    let o = &one.outcome;
    let bin_us = series.bin_us.max(1);
    let bins = &mut series.bins;
    let mut at = |us: u64| {
        let at = usize::try_from(us / bin_us).unwrap_or(usize::MAX).min(MOST_BINS - 1);
        bins.resize_with(bins.len().max(at + 1), Default::default);
        at
    };
    let (arrived, offered) = (at(o.first_offer_us), at(o.offer_us));
    let refused: Vec<usize> = one.refusals.iter().map(|r| at(r.at_us)).collect();
    bins[arrived].arrived += 1;
    refused.into_iter().for_each(|at| bins[at].rejected += 1);
    if o.status == Status::Completed {
        let bin = &mut bins[offered];
        bin.completed += 1;
        bin.in_slo += u64::from(o.keeps(class) == [true; 3]);
        bin.ttft_us += o.ttft_us;
        bin.hit_blocks += u64::from(o.hit_blocks);
        bin.blocks += u64::from(o.blocks);
    }
}

/// The width of a bin is chosen by the span, so that there are never more.
const MOST_BINS: usize = 480;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use baton_sim::{TraceWorkload, World};
    use std::sync::Arc;

    fn tenants() -> Vec<String> {
        ["a", "b"].map(String::from).to_vec()
    }

    /// A simulated overload: answers in time, late and refused.
    fn simulated() -> (RunResult, Vec<Outcome>, Vec<SloClass>) {
        let config = crate::config::parse(
            "[[cluster.pools]]\nrole = 'prefill'\ncount = 1\n[[cluster.pools]]\nrole = 'decode'\ncount = 1\n\
             [[scheduler.classes]]\nname = 'a'\nttft_us = 3000000\ntbt_us = 40000\n",
        )
        .unwrap();
        let mut setup = crate::cli::cluster::setup(&config, 1).unwrap();
        setup.keep_outcomes = true;
        let mut trace = baton_traces::synth::like(baton_traces::synth::PublishedTrace::Conversation, 1);
        for (row, tenant) in trace.records.iter_mut().zip(tenants().into_iter().cycle()) {
            row.extra.get_or_insert_default().tenant = Some(tenant);
        }
        let trace = Arc::new(trace);
        let classes = setup.scheduler.classes.clone();
        setup.scheduler.block_tokens = trace.block_tokens;
        let mut world = World::new(setup, Box::new(TraceWorkload::new(trace, 1.0).limited(600))).unwrap();
        while world.advance().unwrap() {}
        world.rest().unwrap();
        let mut metrics = world.into_metrics();
        (metrics.result(("x", "y"), 1.0, 1), std::mem::take(&mut metrics.outcomes), classes)
    }

    fn sent(outcome: Outcome) -> SentRequest {
        let refusal = super::super::live::SeenRefusal {
            at_us: outcome.end_us,
            reason: "ttft".into(),
            retry_after_us: Some(outcome.retry_after_us),
            returned: false,
        };
        SentRequest {
            refusals: if outcome.status == Status::Rejected { vec![refusal] } else { vec![] },
            outcome,
            lag_us: 0,
            statuses: vec![],
            error: None,
            usage: None,
            merged_tokens: 0,
            wrong_length: false,
        }
    }

    #[test]
    fn the_definitions_are_the_simulators() {
        let (theirs, outcomes, classes) = simulated();
        assert!(theirs.rejected > 0 && theirs.in_slo > 0, "a run with all kinds of ends");
        let sent: Vec<SentRequest> = outcomes.into_iter().map(sent).collect();
        let ours = result(&sent, &classes, &tenants(), NAME);
        let key = |r: &RunResult| {
            let counts =
                [r.requests, r.completed, r.rejected, r.failed, r.cancelled, r.in_slo, r.ttft_ok, r.tbt_ok];
            let tokens = [r.input_tokens, r.input_tokens_in_slo, r.output_tokens, r.refusals];
            let ratios = [r.goodput, r.block_hit_ratio, r.token_hit_ratio, r.itl_ms_mean, r.worst_lateness_s];
            (counts, tokens, ratios)
        };
        assert_eq!(key(&ours), key(&theirs));
        assert_eq!((ours.ttft_s, ours.tbt_ms), (theirs.ttft_s, theirs.tbt_ms));
        assert_eq!(ours.retry_after_s, theirs.retry_after_s);
        assert_eq!(ours.objectives, theirs.objectives);
        assert_eq!(ours.classes, theirs.classes);
        assert_eq!((ours.tenants.len(), &ours.tenants), (2, &theirs.tenants));
        assert_eq!(ours.ttft_quantiles_s, theirs.ttft_quantiles_s);
        let sums = |r: &RunResult| {
            let all = baton_sim::metrics::Bin::sum(&r.series.bins);
            [all.arrived, all.completed, all.in_slo, all.rejected, all.ttft_us, all.blocks]
        };
        assert_eq!(sums(&ours), sums(&theirs));
    }

    const NAME: RunName<'_> = RunName { policy: "x", admission: "y", speed: 1.0, seed: 1 };

    #[test]
    fn a_run_of_nothing_has_a_page() {
        let run = result(&[], &Config::default().scheduler.classes, &[], NAME);
        assert_eq!((run.requests, run.goodput, run.ttft_s.p99), (0, 0.0, None));
        assert!(baton_sim::report::html("Live", &[], &[run]).contains("</html>"));
    }

    #[test]
    fn a_reason_of_another_server_is_other() {
        assert_eq!((reason("tbt"), reason("rate_limited")), ("tbt", "other"));
    }
}
