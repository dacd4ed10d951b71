//! Workloads that a test writes down.

use std::collections::VecDeque;

use baton_sim::Workload;
use baton_sim::workload::Arrival;

/// Arrivals written down.
pub(super) struct RecordedArrivals(pub(super) VecDeque<Arrival>);

impl Workload for RecordedArrivals {
    fn next(&mut self) -> Option<Arrival> {
        self.0.pop_front()
    }
    fn span_us(&self) -> u64 {
        self.0.back().map_or(0, |a| a.at_us)
    }
    fn len(&self) -> u64 {
        self.0.len() as u64
    }
}
