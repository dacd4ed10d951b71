//! The few threads that open paths, for opening waits for the peer.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::mover::{Completions, Fault, Path, PathId, PeerId, Transport};

/// The result of opening a path.
pub(super) type OpeningOutcome = (PathId, Result<Box<dyn Path>, Fault>);

/// A path to open.
pub(super) struct Opening {
    pub(super) path: PathId,
    pub(super) peer: PeerId,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) device: String,
}

/// The threads, and what they have opened.
pub(super) struct Openers {
    jobs: Mutex<Option<SyncSender<Opening>>>,
    opened: Arc<Mutex<Vec<OpeningOutcome>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Openers {
    /// `bound`: paths that may be in the making at once, which the core's pool bounds.
    pub(super) fn start(threads: usize, bound: usize, completions: &Completions) -> std::io::Result<Self> {
        let (jobs, taken) = sync_channel(bound);
        let (taken, opened) = (Arc::new(Mutex::new(taken)), Arc::new(Mutex::new(Vec::new())));
        let mut running = Vec::new();
        for _ in 0..threads.max(1) {
            let (taken, opened, completions) = (Arc::clone(&taken), Arc::clone(&opened), completions.clone());
            let thread = std::thread::Builder::new().name("mover-open".into());
            running.push(thread.spawn(move || serve(&taken, &opened, &completions))?);
        }
        Ok(Self { jobs: Mutex::new(Some(jobs)), opened, threads: Mutex::new(running) })
    }

    /// Gives a job; the job comes back when all are busy beyond the bound, or these have stopped.
    pub(super) fn give(&self, job: Opening) -> Result<(), PathId> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let path = job.path;
        jobs.as_ref().ok_or(path)?.try_send(job).map_err(|_| path)
    }

    /// Takes the paths opened since the last call.
    pub(super) fn take(&self) -> Vec<OpeningOutcome> {
        std::mem::take(&mut *self.opened.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Refuses new jobs, and waits for those in progress.
    pub(super) fn stop(&self) {
        drop(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take());
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            drop(thread.join());
        }
    }
}

fn serve(jobs: &Mutex<Receiver<Opening>>, opened: &Mutex<Vec<OpeningOutcome>>, completions: &Completions) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Opening { path, peer, transport, device }) = job else { return };
        let result = transport.open(path, &peer, &device, completions.clone());
        opened.lock().unwrap_or_else(PoisonError::into_inner).push((path, result));
        completions.nudge();
    }
}
