//! The use of a connection: requests since it opened, answers in progress, and the time since the last one ended.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::stats::CloseReason;

/// The use of one connection.
#[derive(Debug)]
pub(crate) struct Activity {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    asked: bool,
    under_way: usize,
    /// When the latest answer ended; before, when the connection opened.
    quiet_since: Instant,
}

/// An answer under way, until this is dropped.
#[derive(Debug)]
pub(crate) struct UnderWay(Arc<Activity>);

/// How long a connection may be open without use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeLimits {
    /// Until the head of the first request.
    pub(crate) first: Duration,
    /// Between an answer's end and the next request.
    pub(crate) idle: Duration,
}

impl Activity {
    pub(crate) fn new() -> Arc<Self> {
        let state = State { asked: false, under_way: 0, quiet_since: Instant::now() };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// A request's head was read.
    pub(crate) fn begin(self: &Arc<Self>) -> UnderWay {
        let mut state = self.state.lock();
        state.asked = true;
        state.under_way += 1;
        UnderWay(Arc::clone(self))
    }

    /// Whether an answer is under way.
    pub(crate) fn is_under_way(&self) -> bool {
        self.state.lock().under_way > 0
    }

    /// Resolves when the connection has been of no use for too long.
    pub(crate) async fn outlasts(&self, time_limit: TimeLimits) -> CloseReason {
        loop {
            let due = {
                let state = self.state.lock();
                let limit = if state.asked { time_limit.idle } else { time_limit.first };
                let now = Instant::now();
                let from = if state.under_way > 0 { now } else { state.quiet_since };
                match from + limit {
                    due if due > now => due,
                    _ if state.asked => return CloseReason::Idle,
                    _ => return CloseReason::NoRequest,
                }
            };
            tokio::time::sleep_until(due).await;
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.under_way -= 1;
        state.quiet_since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME_LIMIT: TimeLimits =
        TimeLimits { first: Duration::from_millis(20), idle: Duration::from_millis(40) };

    async fn open_for(activity: &Activity) -> (CloseReason, Duration) {
        let begun = Instant::now();
        (activity.outlasts(TIME_LIMIT).await, begun.elapsed())
    }

    #[tokio::test]
    async fn a_connection_is_open_until_its_first_request_is_overdue() {
        let activity = Activity::new();
        let opened = Instant::now();
        assert_eq!(activity.outlasts(TIME_LIMIT).await, CloseReason::NoRequest);
        assert!(opened.elapsed() >= TIME_LIMIT.first / 2, "{:?}", opened.elapsed());
    }

    #[tokio::test]
    async fn an_answer_may_take_as_long_as_it_does() {
        let activity = Activity::new();
        let answer = activity.begin();
        let waits = tokio::time::timeout(TIME_LIMIT.idle * 3, activity.outlasts(TIME_LIMIT)).await;
        assert!(waits.is_err() && activity.is_under_way());
        drop(answer);
        let (why, after) = open_for(&activity).await;
        assert!(
            why == CloseReason::Idle && after >= TIME_LIMIT.idle - Duration::from_millis(5),
            "{why:?} {after:?}"
        );
    }
}
