//! Batches by number: requests that were begun, in the order in which they were given.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_transports::mover::Direction;

use crate::Failure;
use crate::engine::{BatchGroup, Engine, Note, Piece, State};

/// Batches at once, and requests of one.
const BATCHES_MAX: usize = 65_536;
const REQUESTS_MAX: usize = 1 << 20;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TransferOrder {
    pub(super) target: String,
    pub(super) way: Direction,
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) bytes: u64,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Running,
    /// So many bytes.
    Done(u64),
    Failed,
}

/// Requests that were begun together; they end together.
struct Run {
    moving: BatchGroup,
    state: State,
}

struct Task {
    bytes: u64,
    run: Option<Arc<Mutex<Run>>>,
}

struct Batch {
    capacity: usize,
    tasks: Vec<Task>,
}

#[derive(Default)]
struct BatchTable {
    next: u64,
    batches: BTreeMap<u64, Batch>,
}

/// The open batches, by number.
#[derive(Default)]
pub(super) struct Batches(Mutex<BatchTable>);

impl Batches {
    fn held(&self) -> MutexGuard<'_, BatchTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn allocate(&self, capacity: usize) -> Option<u64> {
        let mut held = self.held();
        if held.batches.len() >= BATCHES_MAX || capacity > REQUESTS_MAX {
            return None;
        }
        held.next += 1;
        let id = held.next;
        held.batches.insert(id, Batch { capacity, tasks: Vec::new() });
        Some(id)
    }

    /// Forgets a batch; false where there is none.
    pub(super) fn free(&self, id: u64) -> bool {
        // Dropped outside the lock: it may have to wait until what was under way has been given up.
        let batch = self.held().batches.remove(&id);
        batch.is_some()
    }

    /// Begins requests. Those that cannot be begun have failed; their batch has not.
    pub(super) fn submit(
        &self,
        engine: &Engine,
        id: u64,
        wanted: &[TransferOrder],
        mut note: Option<Note>,
    ) -> Result<(), Failure> {
        let room = self.held().batches.get(&id).map(|batch| batch.capacity - batch.tasks.len());
        if room.is_none_or(|room| wanted.len() > room) {
            let text =
                format!("submit: {} requests; the batch has room for {}", wanted.len(), room.unwrap_or(0));
            return Err(Failure::new(Failure::FAILED, text));
        }
        let mut tasks = Vec::with_capacity(wanted.len());
        let mut groups = wanted.chunk_by(|a, b| a.target == b.target && a.way == b.way).peekable();
        while let Some(group) = groups.next() {
            let piece =
                |one: &TransferOrder| Piece { local: one.local, remote: one.remote, bytes: one.bytes };
            let pieces: Vec<Piece> = group.iter().map(piece).collect();
            let note = note.take_if(|_| groups.peek().is_none());
            let begun = engine.start_moving(&group[0].target, group[0].way, &pieces, note);
            let run = begun.map(|moving| Arc::new(Mutex::new(Run { moving, state: State::Running })));
            let run = run.inspect_err(|failure| _ = super::said(failure)).ok();
            tasks.extend(group.iter().map(|one| Task { bytes: one.bytes, run: run.clone() }));
        }
        match self.held().batches.get_mut(&id) {
            Some(batch) => batch.tasks.extend(tasks),
            None => return Err(super::missing()),
        }
        Ok(())
    }

    /// How far a request is, by its place in the batch.
    pub(super) fn status(&self, id: u64, task: usize) -> Option<Status> {
        let held = self.held();
        let task = held.batches.get(&id)?.tasks.get(task)?;
        let bytes = task.bytes;
        let Some(run) = task.run.clone() else { return Some(Status::Failed) };
        drop(held);
        let mut run = run.lock().unwrap_or_else(PoisonError::into_inner);
        if run.state == State::Running {
            run.state = run.moving.state();
            if let State::Failed(failure) = &run.state {
                super::said(failure);
            }
        }
        Some(match run.state {
            State::Running => Status::Running,
            State::Done => Status::Done(bytes),
            State::Failed(_) => Status::Failed,
        })
    }
}
