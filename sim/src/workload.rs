//! Requests as they arrive: a trace, speeded up, repeated or copied, one row at a time.

use std::collections::HashMap;
use std::sync::Arc;

use baton_traces::{Record, Trace};
use baton_types::{MAX_OWN_OBJECTIVE_US, RequestObjectives};

/// One arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// When, µs from the start of the run.
    pub at_us: u64,
    /// Prompt tokens, at least 1.
    pub prompt_tokens: u64,
    /// Tokens that the answer will have, at least 1.
    pub output_tokens: u32,
    /// Ids of its blocks in the trace.
    pub ids: Vec<u64>,
    /// Service class, by index.
    pub class: u16,
    /// The objectives that it names itself, in place of its class's.
    pub objectives: RequestObjectives,
    /// Tenant, by index.
    pub tenant: u32,
    /// The client leaves this long after arriving, µs.
    pub cancel_after_us: Option<u64>,
}

/// A source of arrivals in order of time.
pub trait Workload: Send {
    /// The next arrival.
    fn next(&mut self) -> Option<Arrival>;
    /// Time from the first arrival to the last, as far as known beforehand, µs.
    fn span_us(&self) -> u64;
    /// How many there will be.
    fn len(&self) -> u64;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Names of the tenants, from number 1 on.
    fn tenants(&self) -> &[String] {
        &[]
    }
}

/// A trace in memory, replayed `repeat` times in a row, each time with block ids of its own.
#[derive(Clone, Debug)]
pub struct TraceWorkload {
    trace: Arc<Trace>,
    classes: Arc<Vec<String>>,
    /// In the order in which they first come.
    tenants: Vec<String>,
    tenant_numbers: HashMap<String, u32>,
    speed: f64,
    next: usize,
    round: u64,
    repeat: u64,
    limit: usize,
}

impl TraceWorkload {
    /// The trace at `speed` times its pace.
    #[must_use]
    pub fn new(trace: Arc<Trace>, speed: f64) -> Self {
        let limit = trace.records.len();
        let (mut tenants, mut tenant_numbers) = (Vec::new(), HashMap::new());
        for name in trace.records.iter().filter_map(|record| record.extra.as_ref()?.tenant.as_ref()) {
            if !tenant_numbers.contains_key(name) {
                tenants.push(name.clone());
                tenant_numbers.insert(name.clone(), u32::try_from(tenants.len()).unwrap_or(u32::MAX));
            }
        }
        Self {
            trace,
            classes: Arc::new(Vec::new()),
            tenants,
            tenant_numbers,
            speed,
            next: 0,
            round: 0,
            repeat: 1,
            limit,
        }
    }

    /// Class names, so that rows that name one find it.
    #[must_use]
    pub fn with_classes(mut self, classes: Vec<String>) -> Self {
        self.classes = Arc::new(classes);
        self
    }

    /// Replays it this many times in a row; blocks are not shared between rounds.
    #[must_use]
    pub const fn repeated(mut self, times: u64) -> Self {
        self.repeat = if times == 0 { 1 } else { times };
        self
    }

    /// Takes only the first `rows` rows of each round.
    #[must_use]
    pub fn limited(mut self, rows: usize) -> Self {
        self.limit = rows.min(self.trace.records.len());
        self
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "times are positive and far below 2^53"
    )]
    fn time_us(&self, record: &Record, round: u64) -> u64 {
        let first = self.trace.records.first().map_or(0.0, |r| r.timestamp_ms);
        let offset = round as f64 * self.round_ms();
        ((record.timestamp_ms - first + offset) * 1000.0 / self.speed).max(0.0) as u64
    }

    /// Length of a round: to the last arrival and one mean gap more.
    #[expect(clippy::cast_precision_loss, reason = "row counts are far below 2^53")]
    fn round_ms(&self) -> f64 {
        let records = &self.trace.records[..self.limit];
        match (records.first(), records.last()) {
            (Some(first), Some(last)) => {
                let span = last.timestamp_ms - first.timestamp_ms;
                span + span / (records.len() as f64).max(1.0)
            }
            _ => 0.0,
        }
    }

    fn class_of(&self, record: &Record) -> u16 {
        let named = record.extra.as_ref().and_then(|e| e.class.as_ref());
        let at = named.and_then(|name| self.classes.iter().position(|c| c == name));
        u16::try_from(at.unwrap_or(0)).unwrap_or(0)
    }

    fn tenant_of(&self, record: &Record) -> u32 {
        let named = record.extra.as_ref().and_then(|e| e.tenant.as_ref());
        named.and_then(|name| self.tenant_numbers.get(name)).copied().unwrap_or(0)
    }
}

/// The objectives that a row names: whole milliseconds, of which there is at least one, as clients send them.
fn objectives_of(record: &Record) -> RequestObjectives {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive time")]
    let us = |ms: f64| (ms.round().max(1.0) as u64).saturating_mul(1000).min(MAX_OWN_OBJECTIVE_US);
    record.extra.as_ref().map_or_else(RequestObjectives::default, |extra| RequestObjectives {
        ttft_us: extra.slo_ttft_ms.map(us),
        tbt_us: extra.slo_tbt_ms.map(us),
    })
}

impl Workload for TraceWorkload {
    fn next(&mut self) -> Option<Arrival> {
        if self.next >= self.limit {
            self.next = 0;
            self.round += 1;
        }
        if self.round >= self.repeat || self.limit == 0 {
            return None;
        }
        let at = self.next;
        self.next += 1;
        let record = &self.trace.records[at];
        let salt = self.round << 40;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive time")]
        let cancel = |ms: f64| (ms.max(0.0) * 1000.0) as u64;
        Some(Arrival {
            at_us: self.time_us(record, self.round),
            prompt_tokens: record.input_length.max(1),
            output_tokens: u32::try_from(record.output_length.max(1)).unwrap_or(u32::MAX),
            ids: record.hash_ids.iter().map(|id| id ^ salt).collect(),
            class: self.class_of(record),
            objectives: objectives_of(record),
            tenant: self.tenant_of(record),
            cancel_after_us: record.extra.as_ref().and_then(|e| e.cancel_after_ms).map(cancel),
        })
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "times are positive and far below 2^53"
    )]
    fn span_us(&self) -> u64 {
        (self.round_ms() * self.repeat as f64 * 1000.0 / self.speed) as u64
    }

    fn len(&self) -> u64 {
        self.limit as u64 * self.repeat
    }

    fn tenants(&self) -> &[String] {
        &self.tenants
    }
}

/// Requests by hand, for tests.
#[cfg(test)]
pub(crate) struct Requests(pub(crate) std::collections::VecDeque<Arrival>);

#[cfg(test)]
impl Workload for Requests {
    fn next(&mut self) -> Option<Arrival> {
        self.0.pop_front()
    }
    fn span_us(&self) -> u64 {
        self.0.back().map_or(1, |a| a.at_us)
    }
    fn len(&self) -> u64 {
        self.0.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_traces::Extra;

    fn trace(rows: &[(f64, u64, u64)]) -> Arc<Trace> {
        let record = |&(timestamp_ms, input_length, output_length): &(f64, u64, u64)| Record {
            timestamp_ms,
            input_length,
            output_length,
            hash_ids: (0..input_length.div_ceil(512)).collect(),
            extra: None,
        };
        Arc::new(Trace {
            block_tokens: 512,
            records: rows.iter().map(record).collect(),
            assumptions: vec![],
            dialect: baton_traces::Dialect::Mooncake,
        })
    }

    #[test]
    fn speed_divides_time_and_repeats_do_not_share_blocks() {
        let mut w = TraceWorkload::new(trace(&[(100.0, 600, 0), (300.0, 5, 7)]), 2.0).repeated(2);
        let all: Vec<Arrival> = std::iter::from_fn(|| w.next()).collect();
        let times: Vec<u64> = all.iter().map(|a| a.at_us).collect();
        assert_eq!(times, [0, 100_000, 150_000, 250_000]);
        assert_eq!((all[0].output_tokens, all[1].output_tokens), (1, 7));
        assert_ne!(all[0].ids, all[2].ids);
        assert_eq!((w.len(), w.next()), (4, None));
    }
    #[test]
    fn rows_name_objectives_as_clients_send_them() {
        let mut trace = Arc::unwrap_or_clone(trace(&[(0.0, 5, 1), (1.0, 5, 1), (2.0, 5, 1)]));
        let objectives = [(Some(1500.4), Some(40.0)), (Some(0.0), None), (Some(1e12), None)];
        for (record, (slo_ttft_ms, slo_tbt_ms)) in trace.records.iter_mut().zip(objectives) {
            record.extra = Some(Box::new(Extra { slo_ttft_ms, slo_tbt_ms, ..Extra::default() }));
        }
        let mut workload = TraceWorkload::new(Arc::new(trace), 1.0);
        let read: Vec<_> = std::iter::from_fn(|| workload.next()).map(|a| a.objectives).collect();
        let us = |o: &RequestObjectives| (o.ttft_us, o.tbt_us);
        assert_eq!(us(&read[0]), (Some(1_500_000), Some(40_000)), "whole milliseconds");
        assert_eq!(us(&read[1]), (Some(1_000), None), "at least one");
        assert_eq!(us(&read[2]), (Some(MAX_OWN_OBJECTIVE_US), None));
    }
}
