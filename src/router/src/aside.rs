//! Work on large bodies, aside from the threads that serve everybody.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};

use crate::error::ApiError;

/// A body with more than this is worked on aside: parsing it takes longer than others should wait.
pub(crate) const LARGE_BYTES: usize = 64 << 10;

type Work = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Whether this thread is there for large bodies.
    static ASIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is done aside already.
pub(crate) fn is_in_background() -> bool {
    ASIDE.get()
}

/// Threads for large bodies, half as many as there are cores. Small bodies and the rest of the process use the other
/// cores. The memory limit of bodies bounds the queue.
///
/// The threads are its own, and stay: a tokenizer keeps 16 MiB of words for each thread that it has worked on, and takes
/// milliseconds to begin on another. They end with it.
#[derive(Debug)]
pub(crate) struct LargeBodyPool {
    turns: Arc<Semaphore>,
    works: Sender<Work>,
}

impl LargeBodyPool {
    pub(crate) fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = (cores / 2).max(1);
        let (works, taken) = channel();
        let taken = Arc::new(Mutex::new(taken));
        for number in 0..threads {
            let taken = Arc::clone(&taken);
            let thread = std::thread::Builder::new().name(format!("baton-large-{number}"));
            // Without the memory for a thread there is none to serve anybody with.
            thread.spawn(move || run_all(&taken)).expect("a thread can be started");
        }
        Self { turns: Arc::new(Semaphore::new(threads)), works }
    }

    /// Runs `work` on one of its threads. A client that leaves while it waits gives up its turn; work that was begun
    /// is ended first.
    pub(crate) async fn run<T, W>(&self, work: W) -> Result<T, ApiError>
    where
        T: Send + 'static,
        W: FnOnce() -> Result<T, ApiError> + Send + 'static,
    {
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_| stopped())?;
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move || {
            // Where the work breaks off there is no reply.
            let _ = reply.send(work());
            drop(turn);
        });
        self.works.send(work).map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }
}

/// Does one work after the other, until nobody can send one.
fn run_all(works: &Mutex<Receiver<Work>>) {
    ASIDE.set(true);
    loop {
        let work = works.lock().recv();
        let Ok(work) = work else { return };
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            tracing::error!("router: work on a large body broke off");
        }
    }
}

fn stopped() -> ApiError {
    ApiError::new(500, "the body could not be worked on; this is a fault here").code("internal")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_is_done_elsewhere_and_no_more_at_once_than_there_are_turns() {
        let aside = Arc::new(LargeBodyPool::new());
        let turns = aside.turns.available_permits();
        let here = std::thread::current().id();
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = Arc::new(parking_lot::Mutex::new(released));
        let works: Vec<_> = (0..turns + 1)
            .map(|_| {
                let (aside, begun, released) = (Arc::clone(&aside), begun.clone(), Arc::clone(&released));
                tokio::spawn(async move {
                    let work = move || {
                        begun.send(std::thread::current().id() != here && is_in_background()).unwrap();
                        let _ = released.lock().recv();
                        Ok(())
                    };
                    aside.run(work).await
                })
            })
            .collect();
        for _ in 0..turns {
            assert_eq!(begins.recv().await, Some(true), "on another thread");
        }
        tokio::task::yield_now().await;
        assert!(begins.try_recv().is_err(), "one waits");
        for _ in works.iter() {
            release.send(()).unwrap();
        }
        for work in works {
            work.await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn work_that_breaks_off_is_an_error() {
        let done: Result<(), ApiError> = LargeBodyPool::new().run(|| panic!("on purpose")).await;
        assert_eq!(done.unwrap_err().status, 500);
    }
}
