//! The front door's statistics, as plain integers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::ApiError;

/// Maximum number of error kinds that are counted separately: the backend supplies codes, too.
const ERROR_KINDS: usize = 96;

/// Why the front door closed a connection by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// No request came in time.
    NoRequest,
    /// Nothing was asked for long after the latest answer.
    Idle,
    /// Its client read nothing of what was written to it.
    Unread,
    /// All places were taken, or as many as one peer may have.
    NoPlace,
    /// Its answer was still under way at the drain limit.
    Drained,
}

impl CloseReason {
    /// All of them, in order.
    pub const ALL: [Self; 5] = [Self::NoRequest, Self::Idle, Self::Unread, Self::NoPlace, Self::Drained];

    /// As metrics name it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoRequest => "no_request",
            Self::Idle => "idle",
            Self::Unread => "unread",
            Self::NoPlace => "no_place",
            Self::Drained => "drained",
        }
    }
}

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
    /// Streams that a client left before their end, or whose connection was closed.
    pub disconnected: u64,
    /// Streams cut off because the client did not read.
    pub cut_off: u64,
    /// Parts of prompts whose tokens were remembered.
    pub cached_parts: u64,
    /// Parts of prompts that were tokenised.
    pub fresh_parts: u64,
    /// Connections that are open.
    pub connections: u64,
    /// Connections that were closed from this side, by [`CloseReason`].
    pub closed: [u64; CloseReason::ALL.len()],
    /// Times that no connection could be accepted.
    pub accept_failures: u64,
    /// Bytes of bodies that are held now.
    pub body_bytes: u64,
}

/// Responses that were errors, of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorCount {
    /// HTTP status.
    pub status: u16,
    /// `error.code`; `invalid` where it had none, `other` beyond the maximum number of kinds.
    pub reason: Arc<str>,
    /// Number of errors of this kind.
    pub count: u64,
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
    connections: AtomicU64,
    closed: [AtomicU64; CloseReason::ALL.len()],
    accept_failures: AtomicU64,
    errors: Mutex<BTreeMap<(u16, Arc<str>), u64>>,
}

/// A connection that is open, until this is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection(Arc<Counters>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
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

    /// Counts an error by its status and code, in addition to the count of [`Counters::replied`].
    pub(crate) fn erred(&self, error: &ApiError) {
        let mut errors = self.errors.lock();
        let reason: Cow<'_, str> = error.code.as_deref().unwrap_or("invalid").into();
        let mut key = (error.status, Arc::from(reason));
        if errors.len() >= ERROR_KINDS && !errors.contains_key(&key) {
            key.1 = Arc::from("other");
        }
        *errors.entry(key).or_default() += 1;
    }

    pub(crate) fn errors(&self) -> Vec<ErrorCount> {
        let errors = self.errors.lock();
        let count = |(key, &count): (&(u16, Arc<str>), &u64)| ErrorCount {
            status: key.0,
            reason: Arc::clone(&key.1),
            count,
        };
        errors.iter().map(count).collect()
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

    pub(crate) fn opened(self: &Arc<Self>) -> OpenConnection {
        one_more(&self.connections);
        OpenConnection(Arc::clone(self))
    }

    pub(crate) fn closed(&self, why: CloseReason) {
        one_more(&self.closed[why as usize]);
    }

    pub(crate) fn not_accepted(&self) {
        one_more(&self.accept_failures);
    }

    pub(crate) fn read(&self, (cached_parts, fresh_parts): (u64, u64), body_bytes: usize) -> RouterStats {
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
            connections: read(&self.connections),
            closed: std::array::from_fn(|at| read(&self.closed[at])),
            accept_failures: read(&self.accept_failures),
            body_bytes: body_bytes as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_connections_are_counted_under_their_name() {
        let counters = Counters::default();
        for (at, why) in CloseReason::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, at, "{}", why.name());
            counters.closed(why);
        }
        assert_eq!(counters.read((0, 0), 0).closed, [1; CloseReason::ALL.len()]);
    }

    #[test]
    fn kinds_of_errors_are_bounded() {
        let counters = Counters::default();
        for at in 0..ERROR_KINDS * 2 {
            counters.erred(&ApiError::new(502, "x").code(format!("made-up-{at}")));
        }
        counters.erred(&ApiError::invalid("n", "x"));
        let errors = counters.errors();
        assert_eq!(errors.len(), ERROR_KINDS + 2, "and one for all others of each status");
        assert_eq!(errors.iter().map(|error| error.count).sum::<u64>(), ERROR_KINDS as u64 * 2 + 1);
    }
}
