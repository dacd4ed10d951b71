//! The conductor's counters by name, for the status.

use std::collections::BTreeMap;

use super::driver::Driver;

impl Driver {
    /// The counters that the status shows.
    pub(super) fn counters(&self) -> BTreeMap<String, u64> {
        let stats = self.core.stats();
        let mut counters = BTreeMap::from([
            ("arrived".to_owned(), stats.arrived),
            ("admitted".to_owned(), stats.admitted),
            ("finished".to_owned(), stats.finished),
            ("cancelled".to_owned(), stats.cancelled),
            ("failed".to_owned(), stats.failed),
            ("retried".to_owned(), stats.retried),
            ("rejected".to_owned(), stats.rejected_total()),
            ("cached_tokens".to_owned(), stats.cached_tokens),
            ("prefilled_tokens".to_owned(), stats.prefilled_tokens),
            ("fetches".to_owned(), stats.fetches),
            ("fetches_failed".to_owned(), stats.fetches_failed),
            ("lent_fetches".to_owned(), stats.lent_fetches),
            ("replications".to_owned(), stats.replications),
            ("saves".to_owned(), stats.saves),
            ("role_changes".to_owned(), stats.role_changes),
            ("tickets_given".to_owned(), stats.tickets_given),
            ("tickets_used".to_owned(), stats.tickets_used),
            ("tickets_broken".to_owned(), stats.tickets_broken),
            ("tickets_expired".to_owned(), stats.tickets_expired),
            ("admitted_cold".to_owned(), stats.admitted_cold),
            ("index_refused_blocks".to_owned(), stats.index_refused_blocks),
            ("stale_inputs".to_owned(), stats.stale_inputs),
        ]);
        for (mode, refused, judged) in &stats.shadow {
            counters.insert(format!("shadow_{}_judged", mode.name()), *judged);
            counters.insert(format!("shadow_{}_refused", mode.name()), *refused);
        }
        counters.insert("parked".into(), self.pairs.parked() as u64);
        if let Some(capture) = &self.capture {
            let stats = capture.stats();
            counters.insert("captured_rows".into(), stats.written);
            counters.insert("capture_dropped_rows".into(), stats.dropped);
            counters.insert("capture_disk_errors".into(), stats.disk_errors);
        }
        if let Some(journal) = &self.journal {
            let status = journal.status();
            counters.insert("journal_steps".into(), status.steps);
            counters.insert("journal_lost_steps".into(), status.lost_steps);
        }
        counters
    }
}
