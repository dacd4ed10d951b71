//! The latest looks, and what follows from their differences.

use std::collections::VecDeque;
use std::time::Duration;

use super::Sample;
use super::scrape::{Buckets, Scrape};

/// Rates are over this long, or over one interval where that is longer.
const RATE_WINDOW: Duration = Duration::from_secs(5);
/// Percentiles are over this long.
const SPREAD_WINDOW: Duration = Duration::from_secs(60);
/// Looks that are kept at most (I9).
const MAX_SAMPLES: usize = 700;

/// Looks at one life of a service, oldest first.
#[derive(Default)]
pub(super) struct History {
    samples: VecDeque<Sample>,
}

/// Rates of events, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) requests: f64,
    pub(super) tokens: f64,
    pub(super) refused: f64,
    pub(super) failed: f64,
}

/// Distributions, and over how long: `None` is since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Spreads {
    pub(super) over: Option<Duration>,
    pub(super) ttft: Buckets,
    pub(super) tbt: Buckets,
    pub(super) error_ratio: Buckets,
}

impl History {
    /// Takes a look in. One at a service that has started again makes the earlier ones worthless.
    pub(super) fn push(&mut self, sample: Sample) {
        if self.latest().is_some_and(|last| sample.status.uptime_us < last.status.uptime_us) {
            self.samples.clear();
        }
        self.samples.push_back(sample);
        // One look from before the window stays: differences reach back to it.
        while self.samples.len() > MAX_SAMPLES || self.age(1).is_some_and(|age| age >= SPREAD_WINDOW) {
            self.samples.pop_front();
        }
    }

    /// How much older the look at `at` is than the latest.
    fn age(&self, at: usize) -> Option<Duration> {
        Some(self.samples.back()?.at.duration_since(self.samples.get(at)?.at))
    }

    pub(super) fn latest(&self) -> Option<&Sample> {
        self.samples.back()
    }

    /// `None` before the second look.
    pub(super) fn rates(&self) -> Option<Rates> {
        let (last, earlier) = self.latest().zip(self.before_latest())?;
        let seconds = last.at.duration_since(earlier.at).as_secs_f64();
        if seconds <= 0.0 {
            return None;
        }
        let per_second = |total: &dyn Fn(&Scrape) -> f64| {
            (total(&last.scrape) - total(&earlier.scrape)).max(0.0) / seconds
        };
        Some(Rates {
            requests: per_second(&|s| s.total("baton_requests_total")),
            // Each token is one sample of either histogram; the counter only moves at an answer's end.
            tokens: per_second(&|s| {
                s.histogram("baton_ttft_seconds").count() + s.histogram("baton_tbt_seconds").count()
            }),
            refused: per_second(&|s| s.total("baton_requests_refused_total")),
            failed: per_second(&|s| s.total("baton_requests_failed_total")),
        })
    }

    /// The oldest look within the window of rates, or the last but one.
    fn before_latest(&self) -> Option<&Sample> {
        let last = self.latest()?;
        let earlier = self.samples.len().checked_sub(2)?;
        let recent = |sample: &&Sample| last.at.duration_since(sample.at) <= RATE_WINDOW;
        self.samples.range(..=earlier).find(recent).or_else(|| self.samples.get(earlier))
    }

    /// Of the last minute where something was sampled in it, else since the service's start.
    pub(super) fn spreads(&self) -> Spreads {
        let Some(last) = self.latest() else { return Spreads::default() };
        let of = |name: &str| last.scrape.histogram(name);
        let all = Spreads {
            over: None,
            ttft: of("baton_ttft_seconds"),
            tbt: of("baton_tbt_seconds"),
            error_ratio: of("baton_ttft_error_ratio"),
        };
        let Some(first) = self.samples.front().filter(|_| self.samples.len() > 1) else { return all };
        let since = |now: &Buckets, name: &str| now.since(&first.scrape.histogram(name));
        let recent = Spreads {
            over: Some(last.at.duration_since(first.at)),
            ttft: since(&all.ttft, "baton_ttft_seconds"),
            tbt: since(&all.tbt, "baton_tbt_seconds"),
            error_ratio: since(&all.error_ratio, "baton_ttft_error_ratio"),
        };
        if recent.ttft.count() + recent.tbt.count() > 0.0 { recent } else { all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn sample(base: Instant, at_s: u64, requests: u64) -> Sample {
        let page = format!(
            "baton_requests_total {requests}\nbaton_ttft_seconds_bucket{{le=\"0.1\"}} {requests}\n\
             baton_ttft_seconds_bucket{{le=\"+Inf\"}} {requests}\nbaton_tbt_seconds_bucket{{le=\"+Inf\"}} {}\n\
             baton_requests_refused_total{{reason=\"ttft\"}} {at_s}\n",
            9 * requests
        );
        let status = crate::conductor::Status { uptime_us: at_s * 1_000_000, ..Default::default() };
        let at = base + Duration::from_secs(at_s);
        Sample { at, status, scrape: Scrape::read(&page), objectives: None }
    }

    #[test]
    fn rates_are_differences_over_five_seconds_at_most() {
        let (base, mut history) = (Instant::now(), History::default());
        history.push(sample(base, 1, 100));
        assert_eq!(history.rates(), None, "one look has no rate");
        history.push(sample(base, 3, 120));
        let expected = Rates { requests: 10.0, tokens: 100.0, refused: 1.0, failed: 0.0 };
        assert_eq!(history.rates(), Some(expected));
        history.push(sample(base, 8, 120));
        assert_eq!(history.rates().map(|r| r.requests), Some(0.0), "the first look is too old by now");
        history.push(sample(base, 30, 340));
        assert_eq!(history.rates().map(|r| r.requests), Some(10.0), "a long interval is its own window");
    }

    #[test]
    fn a_restart_of_the_service_forgets_what_was_before() {
        let (base, mut history) = (Instant::now(), History::default());
        history.push(sample(base, 100, 1000));
        let mut again = sample(base, 101, 3);
        again.status.uptime_us = 500_000;
        history.push(again);
        assert_eq!(history.rates(), None);
        assert_eq!(history.spreads().ttft.count(), 3.0);
    }

    #[test]
    fn percentiles_are_of_the_last_minute_and_looks_do_not_pile_up() {
        let (base, mut history) = (Instant::now(), History::default());
        (0..2000).for_each(|at| history.push(sample(base, at, at)));
        assert!(history.samples.len() <= 62, "{} looks", history.samples.len());
        let spreads = history.spreads();
        let over = spreads.over.expect("a window");
        assert!((60..=61).contains(&over.as_secs()), "{over:?}");
        assert_eq!(spreads.ttft.count(), over.as_secs_f64());
        history.push(sample(base, 4000, 1999));
        assert_eq!(history.spreads().over, None, "nothing came: figures since the start");
    }
}
