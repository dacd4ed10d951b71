//! The queue between the threads that see transfers end and the one that acts on it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::port::Completion;

/// Completions in the order in which they came. It needs no bound of its own: there is at most one for each
/// slice and notice outstanding, and three for each path, which are bounded where they are taken.
#[derive(Default)]
pub struct CompletionQueue {
    waiting: Mutex<VecDeque<Completion>>,
    /// How many wait, so that a poller need not take the lock to see that there is none.
    count: AtomicUsize,
    came: Condvar,
    /// Someone wants whoever waits to look again.
    nudged: AtomicBool,
}

impl CompletionQueue {
    /// Adds some, in order.
    pub fn push(&self, completions: impl IntoIterator<Item = Completion>) {
        let mut waiting = self.waiting();
        waiting.extend(completions);
        self.count.store(waiting.len(), Ordering::Release);
        drop(waiting);
        self.came.notify_one();
    }

    /// Takes all that wait, without waiting for any.
    pub fn drain(&self, into: &mut Vec<Completion>) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut waiting = self.waiting();
        into.extend(waiting.drain(..));
        self.count.store(0, Ordering::Release);
    }

    /// Takes all that wait, waiting for the first no longer than `limit`.
    pub fn wait(&self, into: &mut Vec<Completion>, limit: Duration) {
        let waiting = self.waiting();
        let waited = self.came.wait_timeout_while(waiting, limit, |waiting| waiting.is_empty());
        let (mut waiting, _) = waited.unwrap_or_else(PoisonError::into_inner);
        into.extend(waiting.drain(..));
        self.count.store(0, Ordering::Release);
    }

    /// Waits until some wait or somebody nudges, no longer than `limit`, and takes none.
    pub fn wait_any(&self, limit: Duration) {
        let waiting = self.waiting();
        let nothing = |waiting: &mut VecDeque<Completion>| {
            waiting.is_empty() && !self.nudged.swap(false, Ordering::AcqRel)
        };
        drop(self.came.wait_timeout_while(waiting, limit, nothing));
    }

    /// Ends the present [`CompletionQueue::wait_any`], or the next.
    pub fn nudge(&self) {
        // Under the lock, so that it does not fall between a waiter's look and its sleep.
        let waiting = self.waiting();
        self.nudged.store(true, Ordering::Release);
        drop(waiting);
        self.came.notify_one();
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Completion>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::PathId;
    use std::sync::Arc;

    #[test]
    fn completions_come_out_in_order_and_wake_the_waiting() {
        let queue = Arc::new(CompletionQueue::default());
        let done = |ticket| Completion::Done { path: PathId(0), ticket };
        let mut taken = Vec::new();
        queue.drain(&mut taken);
        queue.wait(&mut taken, Duration::from_millis(1));
        assert_eq!(taken, []);
        let waiting = std::thread::spawn({
            let queue = queue.clone();
            move || {
                let mut taken = Vec::new();
                queue.wait(&mut taken, Duration::from_secs(30));
                taken
            }
        });
        queue.push([done(1), done(2)]);
        let mut all = waiting.join().unwrap();
        queue.push([done(3)]);
        queue.drain(&mut all);
        assert_eq!(all, [done(1), done(2), done(3)]);
    }

    #[test]
    fn a_nudge_ends_a_wait_that_takes_nothing() {
        let queue = Arc::new(CompletionQueue::default());
        let waiting = std::thread::spawn({
            let queue = queue.clone();
            move || queue.wait_any(Duration::from_secs(600))
        });
        queue.nudge();
        waiting.join().unwrap();
        queue.push([Completion::Room { path: PathId(1) }]);
        queue.wait_any(Duration::from_secs(600));
        assert!(!queue.is_empty());
    }
}
