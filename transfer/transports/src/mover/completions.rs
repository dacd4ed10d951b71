//! The queue between the threads that see transfers end and the one that acts on it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::port::Completion;
use super::reactor::{quiet, ring};

/// Sources that a waiting thread polls itself. With more, their I/O threads poll.
const SOURCES_MAX: usize = 8;

/// A source of completions for a polling thread. It can wake a sleeper through the queue's eventfd itself, so that no
/// other thread has to run in between.
pub(super) trait Source: Send + Sync {
    /// Puts into the queue what can be put without waiting.
    fn look(self: Arc<Self>);
    /// A waiter is about to sleep by the door. False when there is something to look at first. [`Source::wakes`]
    /// follows in any case.
    fn sleeps(&self) -> bool;
    /// The waiter has woken up.
    fn wakes(&self);
}

/// Where waiters sleep that sources wake.
struct Door {
    bell: OwnedFd,
    sources: Mutex<Vec<Weak<dyn Source>>>,
    sleepers: AtomicUsize,
}

/// Completions in the order in which they came. It needs no bound of its own: there is at most one for each
/// slice and notice outstanding, and three for each path, which are bounded where they are taken.
#[derive(Default)]
pub struct CompletionQueue {
    waiting: Mutex<VecDeque<Completion>>,
    /// How many wait, so that a poller need not take the lock to see that there is none.
    count: AtomicUsize,
    came: Condvar,
    /// Asks the waiting thread to look again.
    nudged: AtomicBool,
    /// Made when the first source asks for it.
    door: OnceLock<Door>,
}

impl CompletionQueue {
    /// Adds some, in order.
    pub fn push(&self, completions: impl IntoIterator<Item = Completion>) {
        let mut waiting = self.waiting();
        waiting.extend(completions);
        self.count.store(waiting.len(), Ordering::SeqCst);
        drop(waiting);
        self.wake_one();
    }

    fn wake_one(&self) {
        self.came.notify_one();
        // Pairs with a sleeper's own look after it has counted itself.
        if let Some(door) = self.door.get().filter(|door| door.sleepers.load(Ordering::SeqCst) > 0) {
            ring(&door.bell);
        }
    }

    /// The eventfd that wakes threads sleeping at the door.
    pub(super) fn bell(&self) -> io::Result<BorrowedFd<'_>> {
        if self.door.get().is_none() {
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            // Another may have been quicker; then that one's stays.
            let _ = self.door.set(Door { bell, sources: Mutex::default(), sleepers: AtomicUsize::new(0) });
        }
        Ok(self.door.get().expect("just made").bell.as_fd())
    }

    /// Adds a source, for as long as it lives. It has been given the bell.
    pub(super) fn join(&self, source: Weak<dyn Source>) {
        let Some(door) = self.door.get() else { return };
        let mut sources = door.sources.lock().unwrap_or_else(PoisonError::into_inner);
        sources.retain(|known| known.strong_count() > 0);
        sources.push(source);
    }

    /// The sources that a waiter looks at, and where it sleeps.
    fn sources(&self) -> Option<(&Door, Vec<Arc<dyn Source>>)> {
        let door = self.door.get()?;
        let sources = door.sources.lock().unwrap_or_else(PoisonError::into_inner);
        let live: Vec<_> = sources.iter().filter_map(Weak::upgrade).collect();
        (1..=SOURCES_MAX).contains(&live.len()).then_some((door, live))
    }

    /// Looks at the sources and sleeps by the door, until `enough` or for `limit`. `enough` has no effects.
    fn sleep_by(
        &self,
        (door, sources): (&Door, Vec<Arc<dyn Source>>),
        limit: Duration,
        enough: impl Fn(&Self) -> bool,
    ) {
        let began = Instant::now();
        loop {
            sources.iter().for_each(|source| Arc::clone(source).look());
            let left = limit.saturating_sub(began.elapsed());
            if enough(self) || left.is_zero() {
                return;
            }
            door.sleepers.fetch_add(1, Ordering::SeqCst);
            let mut quiet = true;
            sources.iter().for_each(|source| quiet &= source.sleeps());
            if quiet && !enough(self) {
                door.sleep(left);
            }
            door.sleepers.fetch_sub(1, Ordering::SeqCst);
            sources.iter().for_each(|source| source.wakes());
        }
    }

    /// Takes all that wait, without waiting for any.
    pub fn drain(&self, into: &mut Vec<Completion>) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut waiting = self.waiting();
        into.extend(waiting.drain(..));
        self.count.store(0, Ordering::SeqCst);
    }

    /// Takes all that wait, waiting for the first no longer than `limit`.
    pub fn wait(&self, into: &mut Vec<Completion>, limit: Duration) {
        if let Some(sources) = self.sources() {
            self.sleep_by(sources, limit, |queue| !queue.is_empty());
            return self.drain(into);
        }
        let waiting = self.waiting();
        let waited = self.came.wait_timeout_while(waiting, limit, |waiting| waiting.is_empty());
        let (mut waiting, _) = waited.unwrap_or_else(PoisonError::into_inner);
        into.extend(waiting.drain(..));
        self.count.store(0, Ordering::SeqCst);
    }

    /// Waits until completions are there or another thread nudges, no longer than `limit`, and takes none.
    pub fn wait_any(&self, limit: Duration) {
        if let Some(sources) = self.sources() {
            self.sleep_by(sources, limit, |queue| !queue.is_empty() || queue.nudged.load(Ordering::SeqCst));
            self.nudged.store(false, Ordering::SeqCst);
            return;
        }
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
        self.nudged.store(true, Ordering::SeqCst);
        drop(waiting);
        self.wake_one();
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Completion>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Door {
    /// Sleeps until the bell rings, no longer than `limit`.
    fn sleep(&self, limit: Duration) {
        let limit = Timespec::try_from(limit).ok();
        let mut bell = [PollFd::new(&self.bell, PollFlags::IN)];
        // A signal interrupts the sleep. The caller then looks again.
        if poll(&mut bell, limit.as_ref()).is_ok_and(|rang| rang > 0) {
            quiet(&self.bell);
        }
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

    /// Completions that a peer has for the queue, which are in it only when someone looks.
    #[derive(Default)]
    struct Peer {
        queue: OnceLock<Arc<CompletionQueue>>,
        answers: Mutex<Vec<Completion>>,
        sleeping: AtomicUsize,
    }

    impl Source for Peer {
        fn look(self: Arc<Self>) {
            let answers = std::mem::take(&mut *self.answers.lock().unwrap());
            if !answers.is_empty() {
                self.queue.get().unwrap().push(answers);
            }
        }

        fn sleeps(&self) -> bool {
            self.sleeping.fetch_add(1, Ordering::SeqCst);
            self.answers.lock().unwrap().is_empty()
        }

        fn wakes(&self) {
            self.sleeping.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn sleepers_by_the_door_are_woken_by_peers_pushes_and_nudges() {
        let (queue, peer) = (Arc::new(CompletionQueue::default()), Arc::new(Peer::default()));
        queue.bell().unwrap();
        assert!(peer.queue.set(queue.clone()).is_ok());
        let source: Weak<dyn Source> = Arc::downgrade(&(peer.clone() as Arc<dyn Source>));
        queue.join(source);
        let done = |ticket| Completion::Done { path: PathId(0), ticket };
        let until_asleep = || {
            while peer.sleeping.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let wait = || {
            let queue = queue.clone();
            std::thread::spawn(move || {
                let mut taken = Vec::new();
                queue.wait(&mut taken, Duration::from_secs(600));
                taken
            })
        };
        let waiting = wait();
        until_asleep();
        peer.answers.lock().unwrap().push(done(1));
        ring(queue.bell().unwrap());
        assert_eq!(waiting.join().unwrap(), [done(1)]);
        let waiting = wait();
        until_asleep();
        queue.push([done(2)]);
        assert_eq!(waiting.join().unwrap(), [done(2)]);
        // A completion that exists before a thread sleeps needs no bell.
        peer.answers.lock().unwrap().push(done(3));
        assert_eq!(wait().join().unwrap(), [done(3)]);
        let waiting = std::thread::spawn({
            let queue = queue.clone();
            move || queue.wait_any(Duration::from_secs(600))
        });
        until_asleep();
        queue.nudge();
        waiting.join().unwrap();
        let mut taken = Vec::new();
        queue.wait(&mut taken, Duration::from_millis(5));
        assert_eq!((taken.len(), peer.sleeping.load(Ordering::SeqCst)), (0, 0));
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
        queue.push([Completion::PathCapacity { path: PathId(1) }]);
        queue.wait_any(Duration::from_secs(600));
        assert!(!queue.is_empty());
    }
}
