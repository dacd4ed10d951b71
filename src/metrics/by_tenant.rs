//! Counters by tenant: a set of series for each of the first tenants that a request named.

use std::collections::BTreeMap;

use metrics::{Counter, Key, Label, Recorder as _};
use metrics_exporter_prometheus::PrometheusRecorder;
use parking_lot::Mutex;

use super::METADATA;
use super::by_class::SloOutcome;

/// Tenants with series of their own at most: without API keys a client may name any.
const MAX_TENANTS: usize = 256;
/// The tenant of the requests of all further tenants.
const OTHER_TENANT: &str = "other";

/// The series of every tenant that was counted.
#[derive(Default)]
pub(super) struct TenantCounters {
    tenants: Mutex<BTreeMap<String, [Counter; SloOutcome::ALL.len()]>>,
}

impl TenantCounters {
    /// Counts a request of a tenant that has ended.
    pub(super) fn ended(&self, recorder: &PrometheusRecorder, tenant: &str, outcome: SloOutcome) {
        let mut tenants = self.tenants.lock();
        let known = tenants.contains_key(tenant) || tenants.len() < MAX_TENANTS;
        let tenant = if known { tenant } else { OTHER_TENANT };
        let counters = tenants.entry(tenant.to_owned()).or_insert_with(|| Self::counters(recorder, tenant));
        counters[outcome as usize].increment(1);
    }

    /// Every outcome begins at zero: a rate of an outcome that never happened is 0 rather than absent.
    fn counters(recorder: &PrometheusRecorder, tenant: &str) -> [Counter; SloOutcome::ALL.len()] {
        SloOutcome::ALL.map(|outcome| {
            let labels = vec![Label::new("tenant", tenant.to_owned()), Label::new("outcome", outcome.name())];
            let key = Key::from_parts("baton_tenant_requests_total", labels);
            let counter = recorder.register_counter(&key, &METADATA);
            counter.increment(0);
            counter
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics_exporter_prometheus::PrometheusBuilder;

    #[test]
    fn each_tenant_has_every_outcome_and_tenants_are_bounded() {
        let (by_tenant, recorder) = (TenantCounters::default(), PrometheusBuilder::new().build_recorder());
        for at in 0..MAX_TENANTS + 10 {
            by_tenant.ended(&recorder, &format!("t{at}"), SloOutcome::Refused);
        }
        by_tenant.ended(&recorder, "t0", SloOutcome::InSlo);
        let page = recorder.handle().render();
        for (tenant, outcome, count) in
            [("t0", "in_slo", 1), ("t0", "refused", 1), ("t1", "failed", 0), ("other", "refused", 10)]
        {
            let line =
                format!("baton_tenant_requests_total{{tenant=\"{tenant}\",outcome=\"{outcome}\"}} {count}\n");
            assert!(page.contains(&line), "{line} is missing");
        }
        assert_eq!(by_tenant.tenants.lock().len(), MAX_TENANTS + 1);
    }
}
