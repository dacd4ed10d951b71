//! Carrying operations out with io_uring: one system call starts many and waits for any.
#![allow(unsafe_code, reason = "the kernel is given addresses of buffers; each block argues for them")]

use crate::io_sequencer::{Op, OpKind};
use crate::queue::{Bell, Completion, Queue};
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, Probe, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// Operations under way at a time; more wait in line.
const DEPTH: usize = 120;
/// Places in the submission ring: the depth and the bell.
const ENTRIES: u32 = 128;
/// Names the bell among the completions; no token gets there.
const BELL: u64 = u64::MAX;
/// "Something can be read", as poll(2) has it.
const POLL_IN: u32 = 1;

#[derive(Debug)]
struct EventBell(OwnedFd);

impl Bell for EventBell {
    fn ring(&self) {
        // It fails only after 2^64 rings without a reader.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// An operation, and how much of it is done.
#[derive(Debug)]
struct Flight {
    op: Op,
    done_bytes: usize,
}

/// A queue in the kernel.
pub(crate) struct Ring {
    ring: IoUring,
    /// Kept open, and where it is, as long as the kernel may use it.
    file: Arc<File>,
    bell: Arc<EventBell>,
    is_armed: bool,
    /// Operations given to the kernel, or about to be: their buffers stay untouched meanwhile.
    flights: BTreeMap<u64, Flight>,
    line: VecDeque<Op>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("file", &self.file).field("flights", &self.flights.len()).finish()
    }
}

impl Ring {
    /// Sets it up, and asks the kernel whether it knows all that is needed.
    ///
    /// # Errors
    /// The kernel has no io_uring, an old one, or one that this process may not use.
    pub(crate) fn start(file: Arc<File>) -> io::Result<Self> {
        let ring = IoUring::new(ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::PollAdd::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let bell = Arc::new(EventBell(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?));
        Ok(Self { ring, file, bell, is_armed: false, flights: BTreeMap::new(), line: VecDeque::new() })
    }

    /// Hands the kernel what there is room for.
    fn fill(&mut self) -> io::Result<()> {
        if !self.is_armed {
            self.push(&opcode::PollAdd::new(Fd(self.bell.0.as_raw_fd()), POLL_IN).build().user_data(BELL))?;
            self.is_armed = true;
        }
        while self.flights.len() < DEPTH
            && let Some(op) = self.line.pop_front()
        {
            let token = op.token;
            self.flights.insert(token, Flight { op, done_bytes: 0 });
            self.push_flight(token)?;
        }
        Ok(())
    }

    /// Hands the kernel what is left of an operation.
    fn push_flight(&mut self, token: u64) -> io::Result<()> {
        let file = Fd(self.file.as_raw_fd());
        let Some(Flight { op, done_bytes }) = self.flights.get_mut(&token) else { return Ok(()) };
        let rest = &mut op.buffer[*done_bytes..];
        let (pointer, length) = (rest.as_mut_ptr(), u32::try_from(rest.len()));
        let length = length.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let offset = op.offset + *done_bytes as u64;
        let entry = match op.kind {
            OpKind::Read => opcode::Read::new(file, pointer, length).offset(offset).build(),
            OpKind::Write => opcode::Write::new(file, pointer, length).offset(offset).build(),
            OpKind::Flush => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        };
        self.push(&entry.user_data(token))
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: the entry names one of two files, both open as long as the ring is, since
            // `self` owns them. A read or write also names a buffer: it
            // belongs to a flight in `self.flights`, whose memory neither moves (it is on the heap,
            // in a `Vec` that nobody resizes) nor is looked at, nor freed, before its completion
            // was seen: `reap` takes a flight out only then, and `drop` waits for all or leaks them.
            let pushed = unsafe { self.ring.submission().push(entry) };
            if pushed.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }

    /// Waits for at least one completion.
    fn enter(&self) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes in what the kernel has done.
    fn reap(&mut self) -> io::Result<Vec<Completion>> {
        let ended: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        let mut completions = Vec::with_capacity(ended.len());
        for (token, result) in ended {
            if token == BELL {
                self.is_armed = false;
                // It is rung or, if its last ring was seen already, not: both are fine.
                let _ = rustix::io::read(&self.bell.0, &mut [0; 8]);
                continue;
            }
            match self.outcome(token, result) {
                Some(result) => {
                    let Some(flight) = self.flights.remove(&token) else { continue };
                    completions.push(Completion { token, result, buffer: flight.op.buffer });
                }
                None => self.push_flight(token)?,
            }
        }
        Ok(completions)
    }

    /// How an operation ended; `None` if a part of it is left to do.
    fn outcome(&mut self, token: u64, result: i32) -> Option<io::Result<()>> {
        let flight = self.flights.get_mut(&token)?;
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
            return if again { None } else { Some(Err(error)) };
        }
        flight.done_bytes += result as usize;
        match flight.op.kind {
            _ if flight.done_bytes >= flight.op.buffer.len() => Some(Ok(())),
            OpKind::Read if result == 0 => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            OpKind::Write if result == 0 => Some(Err(io::ErrorKind::WriteZero.into())),
            _ => None,
        }
    }
}

impl Queue for Ring {
    fn submit(&mut self, op: Op) {
        self.line.push_back(op);
    }

    fn wait(&mut self) -> io::Result<Vec<Completion>> {
        self.fill()?;
        self.enter()?;
        self.reap()
    }

    fn bell(&self) -> Arc<dyn Bell> {
        Arc::clone(&self.bell) as Arc<dyn Bell>
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while !self.flights.is_empty() {
            if self.enter().and_then(|()| self.reap()).is_err() {
                // The kernel may still use the buffers: better lost than freed.
                std::mem::forget(std::mem::take(&mut self.flights));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aligned::AlignedBuffer;
    use crate::disk::Disk;
    use crate::queue::Threads;
    use std::collections::BTreeSet;

    fn op(token: u64, kind: OpKind, offset: u64, fill: u8, len: usize) -> Op {
        let mut buffer = AlignedBuffer::new(len);
        buffer.fill(fill);
        Op { token, kind, offset, buffer }
    }

    fn all(queue: &mut dyn Queue, count: usize) -> Vec<Completion> {
        let mut done = Vec::new();
        while done.len() < count {
            done.extend(queue.wait().unwrap());
        }
        done
    }

    /// Both kinds of queue, each over a file of its own.
    fn each(test: impl Fn(Box<dyn Queue>)) {
        let file = || Arc::new(tempfile::tempfile().unwrap());
        test(Box::new(Threads::start(&(file() as Arc<dyn Disk>)).unwrap()));
        let refused = "io_uring is refused here, so it cannot be tested: allow it (containers: a seccomp profile that \
                       does), or leave these tests out with --skip ring::tests";
        test(Box::new(Ring::start(file()).expect(refused)));
    }

    #[test]
    fn more_operations_than_its_depth_all_end() {
        each(|mut queue| {
            for token in 0..300 {
                queue.submit(op(token, OpKind::Write, token * 4096, token as u8, 4096));
            }
            let written = all(&mut *queue, 300);
            assert!(written.iter().all(|done| done.result.is_ok()));
            queue.submit(op(1000, OpKind::Flush, 0, 0, 0));
            assert!(all(&mut *queue, 1)[0].result.is_ok());
            for token in 0..300 {
                queue.submit(op(token, OpKind::Read, token * 4096, 0, 4096));
            }
            let read = all(&mut *queue, 300);
            let is_good =
                |done: &Completion| done.result.is_ok() && done.buffer[..] == [done.token as u8; 4096];
            assert!(read.iter().all(is_good));
            assert_eq!(read.iter().map(|done| done.token).collect::<BTreeSet<_>>().len(), 300);
        });
    }

    #[test]
    fn the_end_of_the_file_is_an_error_and_not_zeros() {
        each(|mut queue| {
            queue.submit(op(1, OpKind::Write, 0, 7, 5000));
            all(&mut *queue, 1);
            queue.submit(op(2, OpKind::Read, 0, 0, 8192));
            let done = all(&mut *queue, 1).remove(0);
            assert_eq!(done.result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        });
    }

    #[test]
    fn the_bell_wakes_it_whenever_it_is_rung() {
        each(|mut queue| {
            let bell = queue.bell();
            for _ in 0..5 {
                let bell = Arc::clone(&bell);
                let thread = std::thread::spawn(move || bell.ring());
                assert!(queue.wait().unwrap().is_empty());
                thread.join().unwrap();
            }
        });
    }

    #[test]
    fn it_can_be_dropped_while_operations_are_under_way() {
        each(|mut queue| {
            for token in 0..64 {
                queue.submit(op(token, OpKind::Write, token << 20, 1, 1 << 20));
            }
            queue.wait().unwrap();
        });
    }
}
