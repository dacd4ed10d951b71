//! Whether the bucket is worth asking.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::lower::OperatorLog;

/// Failures one after the other until the bucket is left alone.
const FAILURES_MAX: u32 = 3;
/// For how long at most.
const REST_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct State {
    in_a_row: u32,
    closed_until: Option<Instant>,
    rest: Duration,
}

/// Decides whether the bucket is used now.
pub(super) struct Health {
    state: Mutex<State>,
    /// For how long it is left alone at first; twice as long each time that it fails the look after that.
    rest_min: Duration,
    failures: AtomicU64,
    log: OperatorLog,
}

impl Health {
    pub(super) fn new(rest_min: Duration, log: OperatorLog) -> Self {
        Self { state: Mutex::default(), rest_min, failures: AtomicU64::new(0), log }
    }

    /// Whether requests may use the bucket.
    pub(super) fn is_open(&self) -> bool {
        self.state.lock().closed_until.is_none()
    }

    /// Whether it was left alone for long enough that one look may be taken.
    pub(super) fn is_due(&self) -> bool {
        self.state.lock().closed_until.is_some_and(|until| Instant::now() >= until)
    }

    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// How something ended; gives back what came of it.
    pub(super) fn record<T>(&self, stage: &str, outcome: Result<T, String>) -> Option<T> {
        match outcome {
            Ok(answer) => {
                self.succeeded();
                Some(answer)
            }
            Err(why) => {
                self.failed(stage, &why);
                None
            }
        }
    }

    fn succeeded(&self) {
        let was_closed = std::mem::take(&mut *self.state.lock()).closed_until.is_some();
        if was_closed {
            (self.log)("cold: the bucket answers again");
        }
    }

    fn failed(&self, stage: &str, why: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.in_a_row = state.in_a_row.saturating_add(1);
        let rests = state.closed_until.is_some_and(|until| Instant::now() < until);
        if state.in_a_row < FAILURES_MAX || rests {
            return;
        }
        let was_open = state.closed_until.is_none();
        state.rest = (2 * state.rest).max(self.rest_min).min(REST_MAX);
        state.closed_until = Some(Instant::now() + state.rest);
        drop(state);
        if was_open {
            (self.log)(&format!(
                "cold: {stage}: {why}; the bucket is left alone until it answers a look, one every 60 s at the least: \
                 see to its address, its keys and the way there"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn it_is_left_alone_after_some_failures_and_an_answer_to_a_look_ends_that() {
        let said = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&said);
        let log: OperatorLog = Arc::new(move |words: &str| heard.lock().push(words.to_owned()));
        let health = Health::new(Duration::from_millis(1), log);
        for _ in 0..FAILURES_MAX {
            assert!(health.is_open() && !health.is_due());
            assert_eq!(health.record::<()>("read", Err("gone".into())), None);
        }
        assert!(!health.is_open() && health.failures() == 3);
        while !health.is_due() {
            std::thread::yield_now();
        }
        assert_eq!(health.record::<()>("look", Err("gone".into())), None);
        assert!(!health.is_open(), "a look that fails opens nothing");
        assert_eq!(health.record("look", Ok(7)), Some(7));
        assert!(health.is_open());
        let said = said.lock();
        assert!(said.len() == 2 && said[0].contains("read: gone") && said[1].contains("again"), "{said:?}");
    }

    #[test]
    fn answers_in_between_begin_the_count_anew() {
        let health = Health::new(Duration::from_secs(1), Arc::new(|_: &str| ()));
        for _ in 0..10 {
            health.record::<()>("read", Err("gone".into()));
            health.record::<()>("read", Err("gone".into()));
            health.record("read", Ok(()));
        }
        assert!(health.is_open() && health.failures() == 20);
    }
}
