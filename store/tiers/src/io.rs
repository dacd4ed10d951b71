//! The thread that writes and reads the slab file, in the order in which it is told to.

use crate::slab::{Place, Slab};
use crate::tier::TierError;
use baton_types::BlockKey;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;

/// Jobs under way at most; writes may take half of them, so that they never keep a load waiting
/// for a place.
const MAX_JOBS: usize = 64;
const MAX_WRITES: usize = MAX_JOBS / 2;

/// One transfer.
#[derive(Debug)]
struct Job {
    number: u64,
    key: BlockKey,
    place: Place,
    /// What to write as checksum; a read has none.
    write: Option<u64>,
    buffer: Vec<u8>,
}

/// A transfer that ended. The buffer holds a slot header, then the block.
#[derive(Debug)]
pub(crate) struct Done {
    /// Which.
    pub number: u64,
    /// How: a checksum that was verified, or written.
    pub outcome: Result<u64, TierError>,
    /// Its buffer.
    pub buffer: Vec<u8>,
}

/// The thread and the two bounded queues to it.
#[derive(Debug)]
pub(crate) struct IoThread {
    jobs: Option<SyncSender<Job>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    next_number: u64,
    reads: usize,
    writes: usize,
    buffer_bytes: usize,
    spare: Vec<Vec<u8>>,
    is_gone: bool,
}

impl IoThread {
    /// Starts it.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start(slab: Arc<Slab>) -> io::Result<Self> {
        let buffer_bytes = slab.buffer_bytes();
        let (jobs, inbox) = sync_channel::<Job>(MAX_JOBS);
        let (outbox, done) = sync_channel(MAX_JOBS);
        let thread = std::thread::Builder::new().name("kv-flash".into()).spawn(move || {
            // Ends when the cache drops its side of either queue.
            while let Ok(job) = inbox.recv() {
                if outbox.send(carry_out(&slab, job)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self {
            jobs: Some(jobs),
            done,
            thread: Some(thread),
            next_number: 0,
            reads: 0,
            writes: 0,
            buffer_bytes,
            spare: Vec::new(),
            is_gone: false,
        })
    }

    /// Whether another read may start.
    pub(crate) fn takes_read(&self) -> bool {
        self.reads + self.writes < MAX_JOBS
    }

    /// Whether another write may start.
    pub(crate) fn takes_write(&self) -> bool {
        self.takes_read() && self.writes < MAX_WRITES
    }

    /// Jobs whose end was not seen yet.
    pub(crate) const fn under_way(&self) -> usize {
        self.reads + self.writes
    }

    /// A buffer of the right length.
    pub(crate) fn buffer(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_else(|| vec![0; self.buffer_bytes])
    }

    /// Takes a buffer back.
    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < MAX_JOBS {
            self.spare.push(buffer);
        }
    }

    /// Starts a write; ask [`IoThread::takes_write`] first. `None`: the thread is gone.
    pub(crate) fn write(
        &mut self,
        place: Place,
        key: BlockKey,
        checksum: u64,
        buffer: Vec<u8>,
    ) -> Option<u64> {
        self.send(Job { number: 0, key, place, write: Some(checksum), buffer })
    }

    /// Starts a read; ask [`IoThread::takes_read`] first. `None`: the thread is gone.
    pub(crate) fn read(&mut self, place: Place, key: BlockKey) -> Option<u64> {
        let buffer = self.buffer();
        self.send(Job { number: 0, key, place, write: None, buffer })
    }

    /// A job that ended, if any has since the last time. Never waits.
    pub(crate) fn next_done(&mut self) -> Option<Done> {
        match self.done.try_recv() {
            Ok(done) => {
                let is_write = done.number & 1 == 1;
                *if is_write { &mut self.writes } else { &mut self.reads } -= 1;
                Some(done)
            }
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                self.is_gone = true;
                (self.reads, self.writes) = (0, 0);
                None
            }
        }
    }

    /// Whether the thread ended before its time: no job under way will ever end.
    pub(crate) const fn is_gone(&self) -> bool {
        self.is_gone
    }

    fn send(&mut self, mut job: Job) -> Option<u64> {
        let is_write = job.write.is_some();
        let number = self.next_number << 1 | u64::from(is_write);
        job.number = number;
        self.next_number += 1;
        self.jobs.as_ref()?.try_send(job).ok()?;
        *if is_write { &mut self.writes } else { &mut self.reads } += 1;
        Some(number)
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // What is queued is carried out first: a bounded number of transfers.
            let _ = thread.join();
        }
    }
}

fn carry_out(slab: &Slab, job: Job) -> Done {
    let Job { number, key, place, write, mut buffer } = job;
    let outcome = match write {
        Some(checksum) => slab.write(place, key, checksum, &mut buffer).map(|()| checksum),
        None => slab.read(place, key, &mut buffer),
    };
    Done { number, outcome, buffer }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::block_checksum;
    use crate::slab::testing::Sick;
    use crate::slab::{HEADER_BYTES, Layout};

    const LAYOUT: Layout = Layout { block_bytes: 100, slots: 99, fingerprint: 0 };

    fn started(disk: &Arc<Sick>) -> IoThread {
        let slab = Slab::start(Box::new(Arc::clone(disk)), LAYOUT, 1).unwrap();
        IoThread::start(Arc::new(slab)).unwrap()
    }

    fn write(io: &mut IoThread, slot: u32, fill: u8) -> Option<u64> {
        let mut buffer = io.buffer();
        buffer[HEADER_BYTES..].fill(fill);
        let checksum = block_checksum(BlockKey(7), &buffer[HEADER_BYTES..]);
        io.write(Place { slot, generation: 1 }, BlockKey(7), checksum, buffer)
    }

    fn wait(io: &mut IoThread) -> Done {
        loop {
            if let Some(done) = io.next_done() {
                return done;
            }
            assert!(!io.is_gone());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_read_after_a_write_of_the_same_slot_sees_it() {
        let mut io = started(&Arc::default());
        for fill in 0..20 {
            let written = write(&mut io, 3, fill).unwrap();
            let read = io.read(Place { slot: 3, generation: 1 }, BlockKey(7)).unwrap();
            let (first, second) = (wait(&mut io), wait(&mut io));
            assert_eq!((first.number, second.number), (written, read));
            assert_eq!(first.outcome.unwrap(), second.outcome.unwrap());
            assert_eq!(second.buffer[HEADER_BYTES..], [fill; 100]);
            io.recycle(first.buffer);
        }
        assert_eq!(io.under_way(), 0);
    }

    #[test]
    fn writes_leave_half_of_the_places_to_reads() {
        let mut io = started(&Arc::default());
        let mut writes = 0;
        while io.takes_write() {
            write(&mut io, 0, 1).unwrap();
            writes += 1;
        }
        assert!(writes == MAX_WRITES && io.takes_read());
        while io.takes_read() {
            io.read(Place { slot: 0, generation: 1 }, BlockKey(7)).unwrap();
        }
        assert_eq!(io.under_way(), MAX_JOBS);
        for _ in 0..MAX_JOBS {
            wait(&mut io).outcome.unwrap();
        }
        assert!(io.takes_write() && io.next_done().is_none());
    }

    #[test]
    fn a_failing_disk_is_reported_for_the_job_that_met_it() {
        let disk = Arc::new(Sick::default());
        let mut io = started(&disk);
        disk.state.lock().unwrap().fail_writes = 1;
        write(&mut io, 0, 1).unwrap();
        assert!(matches!(wait(&mut io).outcome, Err(TierError::Io(_))));
        write(&mut io, 0, 1).unwrap();
        wait(&mut io).outcome.unwrap();
        disk.state.lock().unwrap().fail_reads = 1;
        io.read(Place { slot: 0, generation: 1 }, BlockKey(7)).unwrap();
        assert!(matches!(wait(&mut io).outcome, Err(TierError::Io(_))));
    }
}
