//! The threads of a transport: how many there are, and how to wait until there is none.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

/// Stack of a thread: none of them recurses.
const STACK_BYTES: usize = 256 << 10;

/// Counts the threads of a transport.
#[derive(Default)]
pub(super) struct ThreadCounter {
    count: Mutex<usize>,
    left: Condvar,
}

impl ThreadCounter {
    /// Starts a thread.
    pub(super) fn spawn(
        self: &Arc<Self>,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let place = Place(self.clone());
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || {
            let _place = place;
            work();
        })?;
        Ok(())
    }

    /// Waits until no thread is left.
    pub(super) fn wait(&self) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.left.wait_while(count, |count| *count > 0).unwrap_or_else(PoisonError::into_inner));
    }
}

/// A thread's place in the count, given back however it ends.
struct Place(Arc<ThreadCounter>);

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.left.notify_all();
    }
}

/// Wakes a thread that waits in [`ready`].
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings until [`Bell::clear`] is called.
    pub(super) fn ring(&self) {
        // It fails only when it rings already as loud as it can.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Stops ringing.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of some files has something to read (or has failed), for at most `limit`; says which have.
pub(super) fn ready<const N: usize>(files: [BorrowedFd<'_>; N], limit: Option<Duration>) -> [bool; N] {
    let mut polled = files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match rustix::event::poll(&mut polled, limit.as_ref()) {
        Ok(_) => polled.map(|one| !one.revents().is_empty()),
        // A signal, most likely: nothing is ready, and the caller looks again.
        Err(_) => [false; N],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_wakes_and_is_heard() {
        let bells = [Bell::new().unwrap(), Bell::new().unwrap()];
        let limit = Some(Duration::from_millis(1));
        assert_eq!(ready([bells[0].as_fd(), bells[1].as_fd()], limit), [false, false]);
        bells[1].ring();
        bells[1].ring();
        assert_eq!(ready([bells[0].as_fd(), bells[1].as_fd()], None), [false, true]);
        bells[1].clear();
        assert_eq!(ready([bells[1].as_fd()], limit), [false]);
    }

    #[test]
    fn the_crew_waits_for_its_last_thread() {
        let threads = Arc::new(ThreadCounter::default());
        let (go, wait) = std::sync::mpsc::channel::<()>();
        threads
            .spawn("one", move || {
                let _ = wait.recv();
            })
            .unwrap();
        threads.spawn("two", || {}).unwrap();
        let waiting = std::thread::spawn({
            let threads = threads.clone();
            move || threads.wait()
        });
        assert!(!waiting.is_finished());
        go.send(()).unwrap();
        waiting.join().unwrap();
    }
}
