//! The driver: carries out what the core decides, over real transports.
//!
//! Everything happens under one lock, in whichever thread has something to say: the one that submits, the
//! one that polls, or the background thread. Posting never blocks, and opening has threads of its own, so
//! the lock is held for microseconds. A caller that polls drains the completions itself and needs no other
//! thread to run first.

mod batch;
mod openers;
mod outcomes;
mod settings;
mod state;
mod translate;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_transfer::{BatchId, Input, MoverStats};

pub use batch::{Batch, Op, Outcome, Progress, Refusal};
pub use settings::MoverSettings;

use crate::mover::{
    CompletionQueue, Completions, Exposure, Fault, Grant, Memory, PeerId, RemoteSegment, Transport, WindowId,
};
use openers::Openers;
use state::State;

/// The longest that the background thread sleeps.
const IDLE_SLEEP: Duration = Duration::from_secs(1);
/// The longest that a waiter without a background thread leaves the stepping to another.
const FOLLOW_SLEEP: Duration = Duration::from_millis(5);
/// Rounds of completions that one call takes before it lets others have the lock.
const ROUNDS: usize = 64;

/// Moves batches between this node and its peers. See the crate's `mover` module for what is promised.
pub struct Mover {
    shared: Arc<Shared>,
    background: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    /// Some batch has ended.
    ended: Condvar,
    completions: Completions,
    openers: Openers,
    transports: Vec<Arc<dyn Transport>>,
    exposure: Arc<Exposure>,
    /// Held by the one waiter that sleeps on the completions, where there is no background thread.
    leader: Mutex<()>,
    has_background: bool,
    stopping: AtomicBool,
    /// Until when the background thread sleeps, in the time of the state; 0 while it is awake.
    asleep_until_us: AtomicU64,
    shutdown_limit: Duration,
}

impl Mover {
    /// A mover over these transports, the preferred first. They serve peers through the same `exposure`.
    ///
    /// # Errors
    /// When there are no devices or too many, or threads cannot be started.
    pub fn new(
        settings: MoverSettings,
        exposure: Arc<Exposure>,
        transports: Vec<Arc<dyn Transport>>,
    ) -> Result<Self, Fault> {
        let layout = settings.layout(&transports).map_err(Fault::Invalid)?;
        let completions = Completions::new(CompletionQueue::default());
        let failed = |error: std::io::Error| Fault::Invalid(format!("cannot start a thread: {error}"));
        let bound = layout.core.max_paths as usize;
        let openers = Openers::start(settings.openers, bound, &completions).map_err(failed)?;
        let shared = Arc::new(Shared {
            ended: Condvar::new(),
            completions,
            openers,
            exposure,
            leader: Mutex::new(()),
            has_background: settings.background,
            stopping: AtomicBool::new(false),
            asleep_until_us: AtomicU64::new(0),
            shutdown_limit: settings.shutdown_limit,
            state: Mutex::new(State::new(settings, layout, transports.clone())),
            transports,
        });
        let mut background = None;
        if shared.has_background {
            let run = shared.clone();
            let thread = std::thread::Builder::new().name("mover".into());
            background = Some(thread.spawn(move || run.run()).map_err(failed)?);
        }
        Ok(Self { shared, background: Mutex::new(background) })
    }

    /// Registers a memory with the transports: with those of their devices that can reach it. A second call does
    /// nothing.
    ///
    /// # Errors
    /// The last transport's, when none can reach it.
    pub fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault> {
        let (mut reach, mut fault) = (0, Fault::Invalid("no transport is configured".into()));
        for (index, transport) in self.shared.transports.iter().enumerate() {
            match transport.register(memory) {
                Ok(()) => reach |= 1 << index,
                Err(error) => fault = error,
            }
        }
        if reach == 0 {
            return Err(fault);
        }
        self.shared.state().registered(memory, reach);
        Ok(())
    }

    /// Opens `bytes` of a registered memory from `at` on to peers, over every transport that can reach it.
    ///
    /// # Errors
    /// [`Fault::Invalid`] when the range is not inside, or no transport reaches the memory.
    pub fn open_window(
        &self,
        memory: &Arc<Memory>,
        at: u64,
        bytes: u64,
        grant: Grant,
    ) -> Result<RemoteSegment, Fault> {
        let window = self.shared.exposure.open(memory.clone(), at, bytes, grant)?;
        let (mut access, mut fault) = (Vec::new(), Fault::Invalid("no transport is configured".into()));
        for transport in &self.shared.transports {
            match transport.access(window, memory, at, bytes) {
                Ok(key) => access.push((transport.name().to_owned(), key)),
                Err(error) => fault = error,
            }
        }
        if access.is_empty() {
            self.revoke(window);
            return Err(fault);
        }
        Ok(RemoteSegment { window, bytes, access })
    }

    /// Closes a window. When it returns, nothing can land through the window. Waits for copies under way.
    pub fn revoke(&self, window: WindowId) {
        self.shared.exposure.revoke(window, &self.shared.transports);
    }

    /// Takes a batch, and posts of it what may be posted.
    ///
    /// # Errors
    /// When it is not taken; nothing of it is done then.
    pub fn submit(&self, batch: Batch) -> Result<BatchId, Refusal> {
        let mut state = self.shared.state();
        let taken = state.submit(batch, &self.shared.openers);
        self.shared.release(state);
        taken
    }

    /// Does what can be done now, without waiting, and says how far the batch is.
    pub fn poll(&self, batch: BatchId) -> Progress {
        self.shared.drive();
        let state = self.shared.state();
        match state.outcome(batch) {
            Some(outcome) => Progress::Ended(outcome.clone()),
            None if !state.is_running(batch) => Progress::Unknown,
            None => Progress::Running { done_bytes: state.core.done_bytes(batch).unwrap_or(0) },
        }
    }

    /// Waits for a batch to end, no longer than `limit`; none if it has not ended by then or is not known.
    pub fn wait(&self, batch: BatchId, limit: Duration) -> Option<Outcome> {
        self.shared.wait(batch, Instant::now() + limit)
    }

    /// Ends when the batch does; with none for a batch that is not known. Needs the background thread, or
    /// someone who polls.
    pub fn finished(&self, batch: BatchId) -> BatchFuture {
        BatchFuture { shared: self.shared.clone(), batch }
    }

    /// Cancels a batch. The batch soon ends as cancelled, or with its real outcome if it has just ended. Until then
    /// it owns its memory.
    pub fn cancel(&self, batch: BatchId) {
        self.shared.apply(Input::Cancel { batch });
    }

    /// A life of a peer is over, as the membership says: what was meant for it fails.
    pub fn peer_ended(&self, peer: &PeerId) {
        self.shared.end_peers(|known| known == peer);
    }

    /// The core's counters.
    pub fn stats(&self) -> MoverStats {
        self.shared.state().core.stats()
    }

    /// Bytes of slices that ended well, by transport: the same name as often as it has devices.
    pub fn moved_bytes(&self) -> Vec<(&'static str, u64)> {
        let state = self.shared.state();
        let names = state.layout.places.iter().map(|place| self.shared.transports[place.transport].name());
        names.zip(state.core.moved_bytes()).collect()
    }

    /// Audits the core: a pass over all batches and paths, under the lock.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.shared.state().core.check()
    }

    /// Refuses new batches, cancels live ones and waits for their ends within the configured limit. Then ends every
    /// path and thread. A second call does nothing.
    pub fn shutdown(&self) {
        if self.shared.stopping.load(Ordering::Acquire) {
            return;
        }
        let deadline = Instant::now() + self.shared.shutdown_limit;
        let mut state = self.shared.state();
        state.closed = true;
        let running = state.running();
        let cancels = running.iter().map(|&batch| Input::Cancel { batch });
        state.apply(cancels, &self.shared.openers);
        self.shared.release(state);
        for batch in running {
            self.shared.wait(batch, deadline);
        }
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.completions.nudge();
        if let Some(thread) = self.background.lock().unwrap_or_else(PoisonError::into_inner).take() {
            drop(thread.join());
        }
        self.shared.state().drop_paths();
        for transport in &self.shared.transports {
            transport.shutdown();
        }
        self.shared.openers.stop();
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the lock back, and wakes whose batches have ended, and the thread that would oversleep.
    fn release(&self, mut state: MutexGuard<'_, State>) {
        let woken = std::mem::take(&mut state.woken);
        let ended = std::mem::take(&mut state.newly_ended);
        let next_us = state.core.next_deadline().unwrap_or(u64::MAX);
        let oversleeps = next_us < self.asleep_until_us.load(Ordering::Acquire);
        drop(state);
        if ended {
            self.ended.notify_all();
        }
        // Without a background thread a waiter may sleep on the completions, whose batch another has ended.
        if oversleeps || (ended && !self.has_background) {
            self.completions.nudge();
        }
        woken.into_iter().for_each(Waker::wake);
    }

    /// Does what can be done now.
    fn drive(&self) {
        let mut state = self.state();
        let mut completions = Vec::new();
        for _ in 0..ROUNDS {
            state.opened(&self.openers);
            self.completions.drain(&mut completions);
            if completions.is_empty() && !state.is_due() {
                break;
            }
            if completions.is_empty() {
                state.apply([Input::TimerFired], &self.openers);
            } else {
                state.complete(completions.drain(..), &self.openers);
            }
        }
        self.release(state);
    }

    fn run(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            self.drive();
            let state = self.state();
            let sleep = state.sleep(IDLE_SLEEP);
            let until_us =
                state.now_us().saturating_add(u64::try_from(sleep.as_micros()).unwrap_or(u64::MAX));
            // Stored under the lock, so that a thread that sets an earlier time after this sees it.
            self.asleep_until_us.store(until_us, Ordering::Release);
            drop(state);
            self.completions.wait_any(sleep);
            self.asleep_until_us.store(0, Ordering::Release);
        }
    }

    fn wait(&self, batch: BatchId, deadline: Instant) -> Option<Outcome> {
        loop {
            self.drive();
            let state = self.state();
            if let Some(outcome) = state.outcome(batch) {
                return Some(outcome.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !state.is_running(batch) {
                return None;
            }
            let leader = if self.has_background { None } else { self.leader.try_lock().ok() };
            if leader.is_some() {
                let sleep = state.sleep(left);
                drop(state);
                self.completions.wait_any(sleep);
            } else {
                let sleep = if self.has_background { left } else { left.min(FOLLOW_SLEEP) };
                drop(self.ended.wait_timeout(state, sleep));
            }
        }
    }

    fn apply(&self, input: Input) {
        let mut state = self.state();
        state.apply([input], &self.openers);
        self.release(state);
    }

    fn end_peers(&self, is_meant: impl Fn(&PeerId) -> bool) {
        let mut state = self.state();
        let inputs: Vec<Input> =
            state.numbers(is_meant).into_iter().map(|peer| Input::PeerEnded { peer }).collect();
        state.apply(inputs, &self.openers);
        self.release(state);
    }
}

/// The end of a batch, to be awaited.
pub struct BatchFuture {
    shared: Arc<Shared>,
    batch: BatchId,
}

impl Future for BatchFuture {
    type Output = Option<Outcome>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.shared.state();
        if let Some(outcome) = state.outcome(self.batch) {
            return Poll::Ready(Some(outcome.clone()));
        }
        if state.wake_when_ended(self.batch, context.waker()) { Poll::Pending } else { Poll::Ready(None) }
    }
}
