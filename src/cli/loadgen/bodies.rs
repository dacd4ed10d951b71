//! A trace's rows as requests ready to be sent, built ahead of their time.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use anyhow::{Context as _, Result};
use baton_sim::TraceWorkload;
use baton_sim::workload::{Arrival, Workload as _};
use baton_traces::Trace;
use bytes::Bytes;

use super::prompt::Vocabulary;

/// Requests built ahead: bounds memory, as bodies of long prompts are large.
const AHEAD: usize = 64;

/// One request of the run.
#[derive(Debug)]
pub struct PlannedRequest {
    /// Its number in the run.
    pub row: u64,
    /// Arrival time and lengths.
    pub arrival: Arrival,
    /// Its class, by name, when the trace names it.
    pub class: Option<Arc<str>>,
    /// Its tenant, when the trace names it.
    pub tenant: Option<Arc<str>>,
    /// Its conversation, when the trace names it.
    pub session: Option<Arc<str>>,
    /// Its body.
    pub body: Bytes,
}

/// The inputs for request bodies.
pub struct BodyPlan {
    /// The trace.
    pub trace: Arc<Trace>,
    /// The trace's rows at the run's speed and number.
    pub workload: TraceWorkload,
    /// Rows in one round of the workload.
    pub rows_a_round: usize,
    /// The vocabulary of the prompts.
    pub vocabulary: Vocabulary,
    /// Model that is asked for.
    pub model: String,
}

impl BodyPlan {
    /// Builds requests on a thread of its own, in order, at most a few dozen ahead of the receiver. The thread ends
    /// when the receiver is dropped.
    pub fn start(self) -> Result<Receiver<PlannedRequest>> {
        let (send, receive) = sync_channel(AHEAD);
        std::thread::Builder::new()
            .name("bodies".into())
            .spawn(move || self.build(&send))
            .context("live: no thread to build requests on")?;
        Ok(receive)
    }

    fn build(mut self, send: &SyncSender<PlannedRequest>) {
        for row in 0u64.. {
            let Some(arrival) = self.workload.next() else { return };
            let at = usize::try_from(row).unwrap_or(usize::MAX) % self.rows_a_round.max(1);
            let record = &self.trace.records[at];
            let extra = record.extra.as_deref();
            let planned = PlannedRequest {
                row,
                class: extra.and_then(|e| e.class.as_deref()).map(Arc::from),
                tenant: extra.and_then(|e| e.tenant.as_deref()).map(Arc::from),
                session: record.session_id().map(Arc::from),
                body: self.body(&arrival, row),
                arrival,
            };
            if send.send(planned).is_err() {
                return;
            }
        }
    }

    /// The body of a completion call: exactly the prompt, exactly so many tokens.
    fn body(&self, arrival: &Arrival, row: u64) -> Bytes {
        let model = serde_json::Value::from(self.model.as_str());
        let mut body = format!("{{\"model\":{model},\"prompt\":").into_bytes();
        self.vocabulary.write_prompt(arrival, row, self.trace.block_tokens, &mut body);
        let rest = format!(
            ",\"max_tokens\":{},\"ignore_eos\":true,\"temperature\":0,\"stream\":true,\"stream_options\":{{\"include_usage\":true}}}}",
            arrival.output_tokens
        );
        body.extend_from_slice(rest.as_bytes());
        body.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_traces::{Dialect, Record};
    use serde_json::Value;

    #[test]
    fn a_row_becomes_a_call_with_its_lengths_and_names() {
        let mut record =
            Record { input_length: 20, output_length: 7, hash_ids: vec![1, 2], ..Record::default() };
        let extra = record.extra.get_or_insert_default();
        (extra.class, extra.session_id) = (Some("batch".into()), Some("s1".into()));
        let trace = Arc::new(Trace {
            block_tokens: 16,
            records: vec![record],
            assumptions: vec![],
            dialect: Dialect::Mooncake,
        });
        let workload = TraceWorkload::new(Arc::clone(&trace), 1.0).repeated(2);
        let vocabulary = Vocabulary::new(256).unwrap();
        let plan = BodyPlan { trace, workload, rows_a_round: 1, vocabulary, model: "m\"x".into() };
        let all: Vec<PlannedRequest> = plan.start().unwrap().iter().collect();
        assert_eq!(all.len(), 2);
        assert_eq!(
            (all[1].row, all[1].class.as_deref(), all[1].session.as_deref()),
            (1, Some("batch"), Some("s1"))
        );
        let body: Value = serde_json::from_slice(&all[0].body).unwrap();
        assert_eq!(body["prompt"].as_array().unwrap().len(), 20);
        assert_eq!((&body["model"], &body["max_tokens"]), (&Value::from("m\"x"), &Value::from(7)));
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert_eq!((&body["ignore_eos"], &body["stream"]), (&Value::from(true), &Value::from(true)));
        let second: Value = serde_json::from_slice(&all[1].body).unwrap();
        assert_ne!(body["prompt"], second["prompt"], "rounds share no blocks");
    }
}
