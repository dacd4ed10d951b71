//! Records the requests that a stand-in received, and the violations among them.

use std::collections::VecDeque;

use parking_lot::Mutex;
use serde_json::Value;

/// Requests remembered at most; the oldest are forgotten.
const MOST: usize = 1_024;

/// A request as it came.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceivedRequest {
    /// Its path.
    pub path: String,
    /// Its `X-Request-Id`.
    pub request_id: Option<String>,
    /// Its `X-data-parallel-rank`.
    pub dp_rank: Option<String>,
    /// Its `Authorization`.
    pub authorization: Option<String>,
    /// Its body; null when it had none.
    pub body: Value,
}

/// The book of one stand-in.
#[derive(Debug, Default)]
pub(super) struct RequestLog {
    received: Mutex<VecDeque<ReceivedRequest>>,
    violations: Mutex<Vec<String>>,
}

impl RequestLog {
    pub(super) fn receive(&self, received: ReceivedRequest) {
        let mut all = self.received.lock();
        if all.len() == MOST {
            all.pop_front();
        }
        all.push_back(received);
    }

    pub(super) fn violate(&self, what: impl Into<String>) {
        let mut all = self.violations.lock();
        if all.len() < MOST {
            all.push(what.into());
        }
    }

    pub(super) fn received(&self) -> Vec<ReceivedRequest> {
        self.received.lock().iter().cloned().collect()
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }
}
