//! What the front door has done, as plain integers.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the start. Each field is read by itself: sums may be off by what is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouterStats {
    /// Requests received, of any path.
    pub requests: u64,
    /// Responses with a status of 2xx and 3xx.
    pub answered: u64,
    /// Responses with a status of 4xx but 429.
    pub invalid: u64,
    /// Responses with status 429 or 503.
    pub refused: u64,
    /// Responses with any other status of 5xx.
    pub failed: u64,
    /// Streams that ended with an error inside.
    pub failed_in_stream: u64,
    /// Streams that a client left before their end.
    pub disconnected: u64,
    /// Streams cut off because the client did not read.
    pub cut_off: u64,
    /// Parts of prompts whose tokens were remembered.
    pub cached_parts: u64,
    /// Parts of prompts that were tokenised.
    pub fresh_parts: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    requests: AtomicU64,
    answered: AtomicU64,
    invalid: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    failed_in_stream: AtomicU64,
    disconnected: AtomicU64,
    cut_off: AtomicU64,
}

fn one_more(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn received(&self) {
        one_more(&self.requests);
    }

    pub(crate) fn replied(&self, status: u16) {
        one_more(match status {
            429 | 503 => &self.refused,
            400..500 => &self.invalid,
            500.. => &self.failed,
            _ => &self.answered,
        });
    }

    pub(crate) fn failed_in_stream(&self) {
        one_more(&self.failed_in_stream);
    }

    pub(crate) fn disconnected(&self) {
        one_more(&self.disconnected);
    }

    pub(crate) fn cut_off(&self) {
        one_more(&self.cut_off);
    }

    pub(crate) fn read(&self, (cached_parts, fresh_parts): (u64, u64)) -> RouterStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RouterStats {
            requests: read(&self.requests),
            answered: read(&self.answered),
            invalid: read(&self.invalid),
            refused: read(&self.refused),
            failed: read(&self.failed),
            failed_in_stream: read(&self.failed_in_stream),
            disconnected: read(&self.disconnected),
            cut_off: read(&self.cut_off),
            cached_parts,
            fresh_parts,
        }
    }
}
