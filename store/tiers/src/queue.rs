//! Carrying the sequencer's operations out, many at a time.

use crate::aligned::AlignedBuffer;
use crate::disk::Disk;
use crate::io_sequencer::{Op, OpKind};
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Operations under way at a time on threads: as many as there are threads.
const THREADS: usize = 16;

/// An operation that ended.
#[derive(Debug)]
pub(crate) struct Completion {
    /// The token of the operation that ended.
    pub token: u64,
    /// The operation's result.
    pub result: io::Result<()>,
    /// Its buffer.
    pub buffer: AlignedBuffer,
}

/// Wakes the thread that waits on a queue; from any thread.
pub(crate) trait Bell: Debug + Send + Sync {
    /// The next or the present [`Queue::wait`] returns.
    fn ring(&self);
}

/// Operations under way on a disk. Its user bounds how many.
pub(crate) trait Queue: Debug + Send {
    /// Starts an operation, or puts it in line.
    fn submit(&mut self, op: Op);
    /// Waits until an operation ended or the bell rang, and gives what ended.
    ///
    /// # Errors
    /// The queue is broken: what is under way may never end.
    fn wait(&mut self) -> io::Result<Vec<Completion>>;
    /// Its bell.
    fn bell(&self) -> Arc<dyn Bell>;
}

/// State shared by the threads.
#[derive(Debug, Default)]
struct State {
    todo: VecDeque<Op>,
    done: Vec<Completion>,
    is_rung: bool,
    is_over: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the lock")
    }
}

impl Bell for Shared {
    fn ring(&self) {
        self.lock().is_rung = true;
        self.changed.notify_all();
    }
}

/// A queue that is worked off by threads, each waiting for one operation at a time.
#[derive(Debug)]
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts them.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start(disk: &Arc<dyn Disk>) -> io::Result<Self> {
        let mut queue = Self { shared: Arc::default(), threads: Vec::new() };
        for _ in 0..THREADS {
            let (shared, disk) = (Arc::clone(&queue.shared), Arc::clone(disk));
            let builder = std::thread::Builder::new().name("kv-flash-io".into());
            queue.threads.push(builder.spawn(move || work_off(&shared, disk.as_ref()))?);
        }
        Ok(queue)
    }
}

impl Queue for Threads {
    fn submit(&mut self, op: Op) {
        self.shared.lock().todo.push_back(op);
        self.shared.work.notify_one();
    }

    fn wait(&mut self) -> io::Result<Vec<Completion>> {
        let idle = |state: &mut State| !state.is_rung && state.done.is_empty();
        let waited = self.shared.changed.wait_while(self.shared.lock(), idle);
        let mut state = waited.expect("no thread panics while it holds the lock");
        state.is_rung = false;
        Ok(std::mem::take(&mut state.done))
    }

    fn bell(&self) -> Arc<dyn Bell> {
        Arc::clone(&self.shared) as Arc<dyn Bell>
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

fn work_off(shared: &Shared, disk: &dyn Disk) {
    loop {
        let idle = |state: &mut State| state.todo.is_empty() && !state.is_over;
        let waited = shared.work.wait_while(shared.lock(), idle);
        let mut state = waited.expect("no thread panics while it holds the lock");
        let Some(Op { token, kind, offset, mut buffer }) = state.todo.pop_front() else { return };
        drop(state);
        let act = AssertUnwindSafe(|| match kind {
            OpKind::Read => disk.read_at(&mut buffer, offset),
            OpKind::Write => disk.write_at(&buffer, offset),
            OpKind::Flush => disk.flush(),
        });
        let result =
            catch_unwind(act).unwrap_or_else(|_| Err(io::Error::other("the disk's driver panicked")));
        shared.lock().done.push(Completion { token, result, buffer });
        shared.changed.notify_all();
    }
}
