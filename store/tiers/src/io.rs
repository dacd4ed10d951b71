//! The thread between a tier and its disk: it keeps the sequencer, and the sequencer's operations going.

use crate::aligned::{AlignedBuffer, PAGE_BYTES};
use crate::index::{Entry, Place};
use crate::io_sequencer::{Answer, IoSequencer, Order};
use crate::queue::{Bell, Queue};
use baton_types::BlockKey;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

/// Reads, and as many writes, that the disk has in hand at most; of large blocks fewer.
const MAX_DEPTH: usize = 64;
const MIN_DEPTH: usize = 8;
const DEPTH_BYTES: usize = 64 << 20;
/// A write is under way until it lasts, which is longer than the disk has it in hand: so many
/// times the depth may be.
const WRITES_PER_DEPTH: usize = 4;

/// The thread and the channels to and from it. They are bounded by their use: so many
/// reads and writes, and one removal for each slot.
#[derive(Debug)]
pub(crate) struct IoThread {
    orders: Option<Sender<Order>>,
    answers: Receiver<Answer>,
    bell: Arc<dyn Bell>,
    thread: Option<JoinHandle<()>>,
    next_number: u64,
    depth: usize,
    reads: usize,
    writes: usize,
    /// Writes whose buffers have not come back.
    writes_in_hand: usize,
    buffer_bytes: usize,
    spare: Vec<AlignedBuffer>,
    is_gone: bool,
}

impl IoThread {
    /// Starts it; `buffer_bytes` is the length of every buffer.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start(
        sequencer: IoSequencer,
        queue: Box<dyn Queue>,
        buffer_bytes: usize,
    ) -> io::Result<Self> {
        let (orders, inbox) = channel();
        let (outbox, answers) = channel();
        let bell = queue.bell();
        let thread = std::thread::Builder::new()
            .name("kv-flash".into())
            .spawn(move || run(sequencer, queue, &inbox, &outbox))?;
        Ok(Self {
            orders: Some(orders),
            answers,
            bell,
            thread: Some(thread),
            next_number: 0,
            depth: (DEPTH_BYTES / buffer_bytes.max(1)).clamp(MIN_DEPTH, MAX_DEPTH),
            reads: 0,
            writes: 0,
            writes_in_hand: 0,
            buffer_bytes,
            spare: Vec::new(),
            is_gone: false,
        })
    }

    /// Whether another read may start.
    pub(crate) fn takes_read(&self) -> bool {
        self.reads < self.depth
    }

    /// Whether another write may start.
    pub(crate) fn takes_write(&self) -> bool {
        self.writes_in_hand < self.depth && self.writes < self.depth * WRITES_PER_DEPTH
    }

    /// Jobs whose end was not seen yet.
    pub(crate) const fn under_way(&self) -> usize {
        self.reads + self.writes
    }

    /// The number that the next job gets at least.
    pub(crate) const fn next_number(&self) -> u64 {
        self.next_number << 1
    }

    /// A buffer of the right length, with anything in it.
    pub(crate) fn buffer(&mut self) -> AlignedBuffer {
        self.spare.pop().unwrap_or_else(|| AlignedBuffer::new(self.buffer_bytes))
    }

    /// Takes a buffer back; an empty one is none.
    pub(crate) fn recycle(&mut self, buffer: AlignedBuffer) {
        if buffer.len() == self.buffer_bytes && self.spare.len() < self.depth {
            self.spare.push(buffer);
        }
    }

    /// Starts a write; ask [`IoThread::takes_write`] first. `None`: the thread is gone.
    pub(crate) fn write(&mut self, entry: Entry, buffer: AlignedBuffer) -> Option<u64> {
        let number = self.number(true);
        self.send(Order::Write { number, entry, buffer })?;
        self.writes += 1;
        self.writes_in_hand += 1;
        Some(number)
    }

    /// Starts a read; ask [`IoThread::takes_read`] first. `None`: the thread is gone.
    pub(crate) fn read(&mut self, place: Place, key: BlockKey) -> Option<u64> {
        let buffer = self.buffer();
        let number = self.number(false);
        self.send(Order::Read { number, key, place, buffer })?;
        self.reads += 1;
        Some(number)
    }

    /// Starts to read the first page of a block, which nothing verifies; as [`IoThread::read`].
    pub(crate) fn peek(&mut self, place: Place) -> Option<u64> {
        let (number, buffer) = (self.number(false), AlignedBuffer::new(PAGE_BYTES));
        self.send(Order::Peek { number, place, buffer })?;
        self.reads += 1;
        Some(number)
    }

    /// Sends what is no job.
    pub(crate) fn send(&mut self, order: Order) -> Option<()> {
        self.orders.as_ref()?.send(order).ok()?;
        self.bell.ring();
        Some(())
    }

    /// Whether a job is a write.
    pub(crate) const fn is_write(number: u64) -> bool {
        number & 1 == 1
    }

    /// The sequencer's next answer, if there is one. Never waits.
    pub(crate) fn next_answer(&mut self) -> Option<Answer> {
        match self.answers.try_recv() {
            Ok(answer) => Some(self.count(answer)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => self.lose(),
        }
    }

    /// Waits for the sequencer's next answer. `None`: the thread is gone.
    pub(crate) fn wait_answer(&mut self) -> Option<Answer> {
        match self.answers.recv() {
            Ok(answer) => Some(self.count(answer)),
            Err(_) => self.lose(),
        }
    }

    /// Whether the thread ended before its time: no job under way will ever end.
    pub(crate) const fn is_gone(&self) -> bool {
        self.is_gone
    }

    fn number(&mut self, is_write: bool) -> u64 {
        let number = self.next_number << 1 | u64::from(is_write);
        self.next_number += 1;
        number
    }

    fn count(&mut self, answer: Answer) -> Answer {
        match &answer {
            Answer::Spare(_) => self.writes_in_hand -= 1,
            Answer::Done(done) if Self::is_write(done.number) => {
                self.writes -= 1;
                self.writes_in_hand -= usize::from(done.buffer.len() == self.buffer_bytes);
            }
            Answer::Done(_) => self.reads -= 1,
            Answer::Freed { .. } | Answer::Stalled | Answer::Off => {}
        }
        answer
    }

    fn lose(&mut self) -> Option<Answer> {
        self.is_gone = true;
        (self.reads, self.writes, self.writes_in_hand) = (0, 0, 0);
        None
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.orders = None;
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            // The thread first carries out the queued orders: a bounded number of transfers.
            let _ = thread.join();
        }
    }
}

/// Ends when all is done and the tier has dropped its side, or when the queue is broken.
fn run(
    mut sequencer: IoSequencer,
    mut queue: Box<dyn Queue>,
    inbox: &Receiver<Order>,
    outbox: &Sender<Answer>,
) {
    loop {
        let is_closed = loop {
            match inbox.try_recv() {
                Ok(order) => sequencer.take(order),
                Err(error) => break error == TryRecvError::Disconnected,
            }
        };
        sequencer.next_ops().into_iter().for_each(|op| queue.submit(op));
        for answer in sequencer.next_answers() {
            // A tier that is gone needs no answer, only that its writes end.
            let _ = outbox.send(answer);
        }
        if is_closed && sequencer.is_idle() {
            return;
        }
        let Ok(ended) = queue.wait() else { return };
        for done in ended {
            sequencer.completed(done.token, done.result, done.buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::block_checksum;
    use crate::disk::Disk;
    use crate::disk::testing::FailingDisk;
    use crate::index::Index;
    use crate::io_sequencer::IoCompletion;
    use crate::layout::{Header, Layout};
    use crate::queue::Threads;
    use crate::tier::TierError;

    const LAYOUT: Layout = Layout { block_bytes: 100, capacity: 99, fingerprint: 0 };
    const KEY: BlockKey = BlockKey(7);

    fn started(disk: &Arc<FailingDisk>) -> IoThread {
        let disk = Arc::clone(disk) as Arc<dyn Disk>;
        let header = Header { layout: LAYOUT, incarnation: 1, sequence: 0 };
        let sequencer = IoSequencer::new(header, Index::new(LAYOUT, 1), true);
        let queue = Box::new(Threads::start(&disk).unwrap());
        IoThread::start(sequencer, queue, LAYOUT.stride_bytes()).unwrap()
    }

    fn place(slot: u32, fill: u8) -> Place {
        Place { slot, generation: 1, checksum: block_checksum(KEY, &[fill; 100]) }
    }

    fn write(io: &mut IoThread, slot: u32, fill: u8) -> Option<u64> {
        let mut buffer = io.buffer();
        buffer[..100].fill(fill);
        io.write(Entry { key: KEY, parent: None, place: place(slot, fill) }, buffer)
    }

    fn wait(io: &mut IoThread) -> IoCompletion {
        loop {
            if let Answer::Done(done) = io.wait_answer().expect("the thread lives") {
                return done;
            }
        }
    }

    #[test]
    fn a_read_after_a_write_of_the_same_slot_sees_it() {
        let mut io = started(&Arc::default());
        for fill in 0..20 {
            let written = write(&mut io, 3, fill).unwrap();
            let read = io.read(place(3, fill), KEY).unwrap();
            for _ in 0..2 {
                let IoCompletion { number, outcome, buffer } = wait(&mut io);
                assert!(number == written || number == read);
                assert_eq!(outcome.unwrap(), place(3, fill).checksum);
                assert!(number == written || buffer[..100] == [fill; 100]);
                io.recycle(buffer);
            }
        }
        assert_eq!(io.under_way(), 0);
    }

    #[test]
    fn writes_and_reads_are_bounded_and_leave_each_other_room() {
        let disk = Arc::new(FailingDisk::default());
        let mut io = started(&disk);
        disk.state.lock().unwrap().is_held = true;
        let mut writes = 0;
        while io.takes_write() {
            write(&mut io, writes, 1).unwrap();
            writes += 1;
        }
        assert!(writes as usize == MAX_DEPTH && io.takes_read());
        while io.takes_read() {
            io.read(place(0, 1), KEY).unwrap();
        }
        assert_eq!(io.under_way(), 2 * MAX_DEPTH);
        disk.state.lock().unwrap().is_held = false;
        for _ in 0..2 * MAX_DEPTH {
            wait(&mut io).outcome.unwrap();
        }
        while io.next_answer().is_some() {}
        assert!(io.takes_write() && io.under_way() == 0);
    }

    #[test]
    fn a_failing_disk_is_reported_for_the_job_that_met_it() {
        let disk = Arc::new(FailingDisk::default());
        let mut io = started(&disk);
        disk.state.lock().unwrap().fail_writes = 1;
        write(&mut io, 0, 1).unwrap();
        assert!(matches!(wait(&mut io).outcome, Err(TierError::Io(_))));
        write(&mut io, 0, 1).unwrap();
        wait(&mut io).outcome.unwrap();
        disk.state.lock().unwrap().fail_reads = 1;
        io.read(place(0, 1), KEY).unwrap();
        assert!(matches!(wait(&mut io).outcome, Err(TierError::Io(_))));
    }

    #[test]
    fn what_was_ordered_is_carried_out_before_the_thread_ends() {
        let disk = Arc::new(FailingDisk::default());
        let mut io = started(&disk);
        write(&mut io, 5, 9).unwrap();
        drop(io);
        let state = disk.state.lock().unwrap();
        let from = LAYOUT.slot_offset(5) as usize;
        assert_eq!(state.bytes[from..from + 100], [9; 100]);
        assert!(state.flushes >= 2, "the block, then its entry");
    }
}
