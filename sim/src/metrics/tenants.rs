//! Figures by tenant.

use std::collections::BTreeMap;

use baton_types::SloClass;
use serde::Serialize;

use super::classes::share;
use super::{LatencySummary, Outcome, Samples, Status};

/// The figures of one tenant. Each request counts once, when it ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TenantResult {
    /// Name of the tenant; empty for the requests that name none.
    pub name: String,
    /// Requests offered: completed, rejected, failed and cancelled ones.
    pub requests: u64,
    /// Requests that got all their tokens.
    pub completed: u64,
    /// Requests within the objectives that held for them.
    pub in_slo: u64,
    /// Requests refused for good.
    pub rejected: u64,
    /// Requests admitted that could not be served.
    pub failed: u64,
    /// Requests whose client left.
    pub cancelled: u64,
    /// `in_slo` over `requests` without the cancelled ones; none without a request.
    pub attained: Option<f64>,
    /// Prompt tokens of requests in SLO.
    pub input_tokens_in_slo: u64,
    /// Time to first token of completed requests.
    pub ttft_s: LatencySummary,
}

impl TenantResult {
    /// Tenants in a table of a report at most; the others are one row more.
    pub const SHOWN: usize = 20;

    /// Rows for a table of `most` tenants, and one of the sums of all others, if there are any; each with its title.
    #[must_use]
    pub fn rows(all: &[Self], most: usize) -> Vec<(String, Self)> {
        let (shown, rest) = all.split_at(most.min(all.len()));
        let title =
            |tenant: &Self| if tenant.name.is_empty() { "(none)".into() } else { tenant.name.clone() };
        let mut rows: Vec<(String, Self)> = shown.iter().map(|t| (title(t), t.clone())).collect();
        if !rest.is_empty() {
            rows.push((format!("{} others", rest.len()), Self::sum(rest)));
        }
        rows
    }

    /// The sums of several. Times are of each alone, and left out.
    fn sum(of: &[Self]) -> Self {
        let mut sum = Self::default();
        for tenant in of {
            sum.requests += tenant.requests;
            sum.completed += tenant.completed;
            sum.in_slo += tenant.in_slo;
            sum.rejected += tenant.rejected;
            sum.failed += tenant.failed;
            sum.cancelled += tenant.cancelled;
            sum.input_tokens_in_slo += tenant.input_tokens_in_slo;
        }
        Self { attained: share(sum.in_slo, sum.requests - sum.cancelled), ..sum }
    }
}

/// Counts requests by tenant as they end.
#[derive(Clone, Debug)]
pub struct TenantCounter {
    /// Names of the tenants from number 1 on; number 0 is of those who name none.
    names: Vec<String>,
    tenants: BTreeMap<u32, (TenantResult, Samples)>,
}

impl TenantCounter {
    /// A counter of no request; `names` are those of the tenants from number 1 on.
    #[must_use]
    pub fn new(names: &[String]) -> Self {
        Self { names: names.to_vec(), tenants: BTreeMap::new() }
    }

    /// Counts a request of `class` that ended.
    pub fn ended(&mut self, outcome: &Outcome, class: &SloClass) {
        if self.names.is_empty() {
            return;
        }
        let (counts, ttft_us) = self.tenants.entry(outcome.tenant).or_default();
        counts.requests += 1;
        match outcome.status {
            Status::Completed => {
                let kept = outcome.keeps(class) == [true; 3];
                counts.completed += 1;
                counts.in_slo += u64::from(kept);
                counts.input_tokens_in_slo += if kept { outcome.prompt_tokens } else { 0 };
                ttft_us.push(outcome.ttft_us);
            }
            Status::Rejected => counts.rejected += 1,
            Status::Failed | Status::TimedOut => counts.failed += 1,
            Status::Cancelled => counts.cancelled += 1,
        }
    }

    /// The figures of each tenant with a request, those with the most requests first; none where nobody names a tenant.
    #[must_use]
    pub fn results(&self) -> Vec<TenantResult> {
        let result = |(number, (counts, ttft_us)): (&u32, &(TenantResult, Samples))| TenantResult {
            name: number
                .checked_sub(1)
                .and_then(|at| self.names.get(at as usize))
                .map_or_else(String::new, Clone::clone),
            attained: share(counts.in_slo, counts.requests - counts.cancelled),
            ttft_s: ttft_us.figures(1e6).0,
            ..counts.clone()
        };
        let mut results: Vec<TenantResult> = self.tenants.iter().map(result).collect();
        results
            .sort_by(|one, other| other.requests.cmp(&one.requests).then_with(|| one.name.cmp(&other.name)));
        results
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tenant: u32, status: Status, times: (u64, u64)) -> Outcome {
        Outcome { tenant, ..Outcome::of_class(0, status, times) }
    }

    #[test]
    fn each_request_counts_once_for_its_tenant() {
        let class = SloClass { ttft_us: 1_000, tbt_us: 100, ..SloClass::default() };
        let mut counter = TenantCounter::new(&["small".into(), "large".into()]);
        for outcome in [
            of(2, Status::Completed, (1_000, 100)),
            of(2, Status::Completed, (1_001, 100)),
            of(2, Status::Rejected, (0, 0)),
            of(2, Status::Cancelled, (0, 0)),
            of(1, Status::Completed, (1, 101)),
            of(1, Status::TimedOut, (0, 0)),
            of(0, Status::Completed, (1, 1)),
        ] {
            counter.ended(&outcome, &class);
        }
        let results = counter.results();
        let counts =
            |r: &TenantResult| [r.requests, r.completed, r.in_slo, r.rejected, r.failed, r.cancelled];
        assert_eq!(results.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["large", "small", ""]);
        assert_eq!(
            results.iter().map(counts).collect::<Vec<_>>(),
            [[4, 2, 1, 1, 0, 1], [2, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0]]
        );
        assert_eq!(results[0].attained, Some(1.0 / 3.0), "not the cancelled");
        let rows = TenantResult::rows(&results, 1);
        assert_eq!(rows.iter().map(|(title, _)| title.as_str()).collect::<Vec<_>>(), ["large", "2 others"]);
        assert_eq!((counts(&rows[1].1), rows[1].1.attained), ([3, 2, 1, 0, 1, 0], Some(1.0 / 3.0)));
        let all = TenantResult::rows(&results, 3);
        assert_eq!(
            all.iter().map(|(title, _)| title.as_str()).collect::<Vec<_>>(),
            ["large", "small", "(none)"]
        );
    }

    #[test]
    fn a_trace_without_tenants_has_no_figures_of_tenants() {
        let mut counter = TenantCounter::new(&[]);
        counter.ended(&of(0, Status::Completed, (1, 1)), &SloClass::default());
        assert_eq!(counter.results(), []);
    }
}
