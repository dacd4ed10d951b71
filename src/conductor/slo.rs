//! SLO attainment by service class: how requests ended against their objectives, their own or those of their classes.

use std::collections::BTreeMap;

use baton_scheduler::{PathFigures, Prediction, PredictionLedger, PredictionPath, ServedRequest};
use baton_types::{ClassId, InstanceId, RequestId, SloClass};
use serde::{Deserialize, Serialize};

use super::driver::Driver;
use super::session::Session;
use crate::capture::CaptureOutcome;
use crate::metrics::SloOutcome;

/// Minutes that are kept of each class.
const MINUTES: u64 = 60;
/// Minutes whose counts the status has one by one.
const SHOWN_MINUTES: u64 = 15;
/// Minutes of the shorter window.
const SHORT_MINUTES: u64 = 5;
const MINUTE_US: u64 = 60_000_000;
/// The class of a request that named none of the configured ones.
const UNKNOWN_CLASS: &str = "unknown";

/// SLO attainment of one class. Counts are since the start of the conductor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SloStatus {
    /// Name of the class.
    pub class: String,
    /// The class's `target_permille` / 1000: the share that `ttft_attained` should reach.
    pub target: f64,
    /// Of the admitted requests that came to a first token or waited too long for it: the share with a first token in
    /// time, since the start of the conductor. Refused, failed and cancelled requests and TBT do not count. None without
    /// a request.
    pub ttft_attained: Option<f64>,
    /// Requests that ended, the cancelled ones included.
    pub requests: u64,
    /// Requests that completed within all objectives.
    pub in_slo: u64,
    /// Prompt tokens of those.
    pub in_slo_prompt_tokens: u64,
    /// Output tokens of those.
    pub in_slo_output_tokens: u64,
    /// Requests with a late first token.
    pub late_ttft: u64,
    /// Requests with an early enough first token and a TBT above the objective.
    pub late_tbt: u64,
    /// Requests with tokens in time and a last token beyond the objective for the whole answer.
    pub late_e2e: u64,
    /// Requests that the conductor refused.
    pub refused: u64,
    /// Requests that were admitted and could not be served.
    pub failed: u64,
    /// Requests that their clients ended before they were late.
    pub cancelled: u64,
    /// `in_slo` over `requests` without the cancelled ones, of the current minute and the 4 before it; none without a
    /// request. Refused and failed requests and a late TBT count as missed, so this may stay below `target`.
    pub attained_5m: Option<f64>,
    /// Likewise, of the current minute and the 59 before it.
    pub attained_1h: Option<f64>,
    /// Of the current minute and the 14 before it, oldest first: requests in SLO, and those that `attained_5m` would count.
    pub last_15m: Vec<(u64, u64)>,
    /// How predictions for its served requests held, for each path that had one.
    pub predictions: Vec<PathFigures>,
}

/// How the requests of each configured class ended.
#[derive(Debug, Default)]
pub(super) struct SloLedger {
    classes: BTreeMap<String, ClassTally>,
}

/// The ends of one class's requests.
#[derive(Debug)]
struct ClassTally {
    totals: [u64; SloOutcome::ALL.len()],
    /// Prompt and output tokens of requests in SLO.
    tokens: [u64; 2],
    minutes: [MinuteCounts; MINUTES as usize],
    predictions: PredictionLedger,
}

/// The ends within one minute of the driver's clock.
#[derive(Clone, Copy, Debug, Default)]
struct MinuteCounts {
    minute: u64,
    in_slo: u64,
    /// All but the cancelled ones.
    judged: u64,
}

impl Default for ClassTally {
    fn default() -> Self {
        Self {
            totals: [0; SloOutcome::ALL.len()],
            tokens: [0; 2],
            minutes: [MinuteCounts::default(); MINUTES as usize],
            predictions: PredictionLedger::default(),
        }
    }
}

impl ClassTally {
    fn count(&mut self, now_us: u64, outcome: SloOutcome) {
        self.totals[outcome as usize] += 1;
        let minute = now_us / MINUTE_US;
        let counts = &mut self.minutes[(minute % MINUTES) as usize];
        if counts.minute != minute {
            *counts = MinuteCounts { minute, ..MinuteCounts::default() };
        }
        counts.in_slo += u64::from(outcome == SloOutcome::InSlo);
        counts.judged += u64::from(outcome != SloOutcome::Cancelled);
    }

    /// The share attained in the current minute and those before it, `minutes` in all.
    fn attained(&self, now_us: u64, minutes: u64) -> Option<f64> {
        let now = now_us / MINUTE_US;
        let within = self.minutes.iter().filter(|counts| counts.minute + minutes > now);
        let (in_slo, judged) =
            within.fold((0, 0), |sum, counts| (sum.0 + counts.in_slo, sum.1 + counts.judged));
        share(in_slo, judged)
    }

    /// The counts of the latest minutes one by one, oldest first.
    fn by_minute(&self, now_us: u64) -> Vec<(u64, u64)> {
        let now = now_us / MINUTE_US;
        let minutes = (0..SHOWN_MINUTES).rev().map(|ago| {
            let minute = now.checked_sub(ago)?;
            let counts = self.minutes.get((minute % MINUTES) as usize)?;
            (counts.minute == minute).then_some((counts.in_slo, counts.judged))
        });
        minutes.map(Option::unwrap_or_default).collect()
    }
}

fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

impl SloLedger {
    fn count(&mut self, now_us: u64, class: &str, outcome: SloOutcome) {
        match self.classes.get_mut(class) {
            Some(tally) => tally.count(now_us, outcome),
            None => self.classes.entry(class.to_owned()).or_default().count(now_us, outcome),
        }
    }

    fn add_tokens(&mut self, class: &str, tokens: [u64; 2]) {
        if let Some(tally) = self.classes.get_mut(class) {
            tally.tokens.iter_mut().zip(tokens).for_each(|(sum, tokens)| *sum += tokens);
        }
    }

    fn compare(&mut self, class: &str, prediction: &Prediction, served: &ServedRequest) {
        if let Some(tally) = self.classes.get_mut(class) {
            tally.predictions.observe(prediction, served);
        }
    }

    /// Drops the counts of classes that are no longer configured.
    pub(super) fn keep_only(&mut self, classes: &[SloClass]) {
        self.classes.retain(|name, _| classes.iter().any(|class| class.name == *name));
    }

    /// The attainment of each configured class.
    pub(super) fn status(&self, classes: &[SloClass], now_us: u64) -> Vec<SloStatus> {
        let status = |class: &SloClass| {
            let tally = self.classes.get(&class.name);
            let total = |outcome: SloOutcome| tally.map_or(0, |tally| tally.totals[outcome as usize]);
            let in_time = total(SloOutcome::InSlo) + total(SloOutcome::LateTbt) + total(SloOutcome::LateE2e);
            let [in_slo_prompt_tokens, in_slo_output_tokens] = tally.map_or([0; 2], |tally| tally.tokens);
            SloStatus {
                class: class.name.clone(),
                target: f64::from(class.target_permille) / 1000.0,
                ttft_attained: share(in_time, in_time + total(SloOutcome::LateTtft)),
                requests: SloOutcome::ALL.into_iter().map(total).sum(),
                in_slo: total(SloOutcome::InSlo),
                in_slo_prompt_tokens,
                in_slo_output_tokens,
                late_ttft: total(SloOutcome::LateTtft),
                late_tbt: total(SloOutcome::LateTbt),
                late_e2e: total(SloOutcome::LateE2e),
                refused: total(SloOutcome::Refused),
                failed: total(SloOutcome::Failed),
                cancelled: total(SloOutcome::Cancelled),
                attained_5m: tally.and_then(|tally| tally.attained(now_us, SHORT_MINUTES)),
                attained_1h: tally.and_then(|tally| tally.attained(now_us, MINUTES)),
                last_15m: tally.map_or_else(Vec::new, |tally| tally.by_minute(now_us)),
                predictions: tally.map_or_else(Vec::new, |t| t.predictions.figures()),
            }
        };
        classes.iter().map(status).collect()
    }
}

/// How a request ended that ends now.
fn judge(session: &Session, class: &SloClass, now_us: u64) -> SloOutcome {
    let since_us = |at_us: u64| at_us.saturating_sub(session.arrived_us);
    let (served, tbt_us) = (session.is_served(), session.gaps.tbt_us().unwrap_or(0));
    let end_us = if served { session.last_token_us } else { now_us };
    let ttft_us = since_us(session.first_token_us.unwrap_or(now_us));
    let [ttft, tbt, e2e] = session.submission.objectives.kept(class, (ttft_us, tbt_us, since_us(end_us)));
    match session.outcome {
        _ if served && !ttft => SloOutcome::LateTtft,
        _ if served && !tbt => SloOutcome::LateTbt,
        _ if served && !e2e => SloOutcome::LateE2e,
        _ if served => SloOutcome::InSlo,
        CaptureOutcome::Rejected => SloOutcome::Refused,
        CaptureOutcome::Failed if !session.excused => SloOutcome::Failed,
        // A client that gives up after its objective passed does not make the service look better.
        _ if !ttft => SloOutcome::LateTtft,
        _ if !e2e => SloOutcome::LateE2e,
        _ => SloOutcome::Cancelled,
    }
}

/// What was measured of a request that was served.
fn measured(session: &Session) -> Option<ServedRequest> {
    let since_us = |at_us: u64| at_us.saturating_sub(session.arrived_us);
    let ttft_us = session.first_token_us.filter(|_| session.is_served()).map(since_us)?;
    let tbt_us = session.gaps.tbt_us();
    Some(ServedRequest {
        ttft_us,
        tbt_us,
        // An answer of one token has no decode.
        decode_start_us: session.decodes_at_us.filter(|_| tbt_us.is_some()).map(since_us),
        output_tokens: u32::try_from(session.answer.len()).unwrap_or(u32::MAX),
    })
}

impl Driver {
    /// Counts a request that has ended. The conductor's own requests are not counted.
    pub(super) fn count_end(&mut self, request: RequestId, session: &Session) {
        if self.canary.is(request) {
            return;
        }
        let Some(class) = self.config.scheduler.classes.get(session.class.index()) else { return };
        let outcome = judge(session, class, self.now_us);
        self.metrics.slo_ended((&class.name, session.submission.tenant.as_deref()), outcome);
        self.slo.count(self.now_us, &class.name, outcome);
        if outcome == SloOutcome::InSlo {
            let tokens = [session.submission.tokens.len() as u64, session.answer.len() as u64];
            self.metrics.slo_tokens(&class.name, tokens);
            self.slo.add_tokens(&class.name, tokens);
        }
        if let Some(tbt_us) = session.gaps.tbt_us().filter(|_| session.is_served()) {
            self.metrics.request_tbt(&class.name, tbt_us);
        }
        if let Some((prediction, served)) = session.prediction.zip(measured(session)) {
            self.metrics.predicted(&class.name, &prediction, &served);
            self.slo.compare(&class.name, &prediction, &served);
        }
    }

    /// What the core predicted of a request that is sent to an instance.
    pub(super) fn prediction(&self, request: RequestId, instance: InstanceId) -> Option<Prediction> {
        let prediction = self.core.prediction(request)?;
        let remote = self.fleet.get(instance).is_some_and(|node| node.hello.engine_moves_kv);
        let path = if remote { PredictionPath::Remote } else { prediction.path };
        Some(Prediction { path, ..prediction })
    }

    /// Counts a request that is refused before the core is asked; it may have no class.
    pub(super) fn count_turned_away(
        &mut self,
        request: RequestId,
        class: Option<ClassId>,
        tenant: Option<&str>,
    ) {
        if self.canary.is(request) {
            return;
        }
        match class.and_then(|class| self.config.scheduler.classes.get(class.index())) {
            Some(class) => {
                self.metrics.slo_ended((&class.name, tenant), SloOutcome::Refused);
                self.slo.count(self.now_us, &class.name, SloOutcome::Refused);
            }
            None => self.metrics.slo_ended((UNKNOWN_CLASS, tenant), SloOutcome::Refused),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_last_minutes_and_cancelled_requests_are_not_in_them() {
        let classes = ["a", "b"].map(|name| SloClass { name: name.into(), ..SloClass::default() });
        let mut ledger = SloLedger::default();
        let at = |minute: u64| minute * MINUTE_US + 59_999_999;
        ledger.count(at(100), "a", SloOutcome::Refused);
        (0..3).for_each(|_| ledger.count(at(100), "a", SloOutcome::InSlo));
        (0..9).for_each(|_| ledger.count(at(100), "a", SloOutcome::Cancelled));
        let shares = |ledger: &SloLedger, minute| {
            let status = ledger.status(&classes, at(minute));
            assert_eq!((status[1].attained_5m, status[1].attained_1h, status[1].requests), (None, None, 0));
            (status[0].attained_5m, status[0].attained_1h)
        };
        assert_eq!(shares(&ledger, 100), (Some(0.75), Some(0.75)));
        ledger.count(at(104), "a", SloOutcome::LateTbt);
        assert_eq!(shares(&ledger, 104), (Some(0.6), Some(0.6)));
        assert_eq!(shares(&ledger, 105), (Some(0.0), Some(0.6)));
        let minutes = |minute| ledger.status(&classes, at(minute)).remove(0).last_15m;
        let mut expected = vec![(0, 0); 15];
        (expected[9], expected[13]) = ((3, 4), (0, 1));
        assert_eq!(minutes(105), expected);
        assert_eq!(minutes(164), vec![(0, 0); 15], "the same places in the ring, an hour later");
        assert_eq!(shares(&ledger, 159), (None, Some(0.6)));
        assert_eq!(shares(&ledger, 160), (None, Some(0.0)));
        assert_eq!(shares(&ledger, 164), (None, None));
        // The same place in the ring, an hour later.
        ledger.count(at(160), "a", SloOutcome::InSlo);
        assert_eq!(shares(&ledger, 160), (Some(1.0), Some(0.5)));
        let status = ledger.status(&classes, at(160)).remove(0);
        assert_eq!((status.requests, status.in_slo, status.refused, status.cancelled), (15, 4, 1, 9));
        assert_eq!((status.late_ttft, status.late_tbt, status.failed), (0, 1, 0));
        // The refused request and the late TBT are missing from the attained share only.
        assert_eq!(status.ttft_attained, Some(1.0));
        assert!((status.target - 0.995).abs() < 1e-12, "{}", status.target);
        ledger.keep_only(&classes[1..]);
        assert!(ledger.classes.is_empty());
    }
}
