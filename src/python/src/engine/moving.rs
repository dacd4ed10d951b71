//! A transfer under way.

use std::sync::Arc;
use std::time::Duration;

use baton_transports::mover::{BatchId, Direction, Mover, Outcome, Progress};

use super::RegisteredRange;
use crate::Failure;
use crate::ranges::Use;

/// Longer than any batch lives: the mover ends each within its own limit.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Not at its end.
    Running,
    /// All is in place.
    Done,
    /// Not all of it is, nor will be.
    Failed(Failure),
}

/// Batches that were begun together. Dropped before their end they are cancelled, and waited for: their memory is
/// their own until then.
pub struct BatchGroup {
    mover: Arc<Mover>,
    what: String,
    batches: Vec<BatchId>,
    used: Vec<Use<RegisteredRange>>,
}

impl BatchGroup {
    pub(super) fn new(mover: Arc<Mover>, target: &str, way: Direction) -> Self {
        let verb = if way == Direction::Write { "write to" } else { "read from" };
        Self { mover, what: format!("{verb} {target}"), batches: Vec::new(), used: Vec::new() }
    }

    pub(super) fn hold(&mut self, used: Vec<Use<RegisteredRange>>) {
        self.used = used;
    }

    pub(super) fn add(&mut self, batch: BatchId) {
        self.batches.push(batch);
    }

    pub(super) fn batches(&self) -> usize {
        self.batches.len()
    }

    /// Waits for the end of all.
    ///
    /// # Errors
    /// The first failure; the rest has then ended too.
    pub fn wait(mut self) -> Result<(), Failure> {
        self.wait_batches()
    }

    pub(super) fn wait_batches(&mut self) -> Result<(), Failure> {
        while let Some(batch) = self.batches.first().copied() {
            let outcome = self.mover.wait(batch, TIME_LIMIT);
            // It stays in the list until it has ended, so that dropping waits for it.
            self.batches.remove(0);
            self.judge(outcome)?;
        }
        Ok(())
    }

    /// How far it is now.
    pub fn state(&mut self) -> State {
        while let Some(batch) = self.batches.first().copied() {
            let outcome = match self.mover.poll(batch) {
                Progress::Running { .. } => return State::Running,
                Progress::Ended(outcome) => Some(outcome),
                Progress::Unknown => None,
            };
            self.batches.remove(0);
            if let Err(failure) = self.judge(outcome) {
                return State::Failed(failure);
            }
        }
        // Nothing of it is under way: its memory may be unregistered.
        self.used.clear();
        State::Done
    }

    fn judge(&self, outcome: Option<Outcome>) -> Result<(), Failure> {
        let why = match outcome {
            Some(Outcome::Done { .. }) => return Ok(()),
            Some(Outcome::Failed { failure, cause, .. }) => format!("{failure} ({cause})"),
            Some(Outcome::Cancelled { .. }) => "cancelled".into(),
            None => "its end is not known".into(),
        };
        Err(Failure::new(Failure::FAILED, format!("{}: {why}", self.what)))
    }
}

impl Drop for BatchGroup {
    fn drop(&mut self) {
        for batch in &self.batches {
            self.mover.cancel(*batch);
        }
        for batch in &self.batches {
            // The mover ends what is cancelled within its own limits; whatever it says, it is over.
            self.mover.wait(*batch, TIME_LIMIT);
        }
    }
}
