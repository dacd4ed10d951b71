//! One stream with what waits for it and what is under way on it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::driver_api::{Device, Event, Running, Stream};
use super::fault::DeviceFault;
use super::ledger::{CopyId, Entry, Ledger};
use super::transfer::Transfer;

/// Most copies behind one event.
const GROUP_COPIES_MAX: usize = 64;

/// See the module.
pub(super) struct Lane {
    stream: Arc<Stream>,
    ledger: Arc<Ledger>,
    /// An event is set behind so many bytes, or sooner.
    group_bytes: u64,
    queue: Mutex<Queue>,
    /// Something is under way, or the lane is closing.
    work: Condvar,
}

struct Queue {
    waiting: VecDeque<Piece>,
    running: VecDeque<Group>,
    /// One for each group that may yet begin: this bounds what is under way.
    spare: Vec<Event>,
    closing: bool,
}

struct Piece {
    batch: CopyId,
    transfer: Transfer,
}

/// Copies of one batch that end together.
struct Group {
    batch: CopyId,
    pieces: usize,
    bytes: u64,
    running: Running,
    refused: Option<DeviceFault>,
}

impl Lane {
    /// A lane with at most `depth` groups under way.
    pub(super) fn new(
        device: &Arc<Device>,
        ledger: &Arc<Ledger>,
        depth: usize,
        group_bytes: u64,
    ) -> Result<Arc<Self>, DeviceFault> {
        let stream = device.stream()?;
        let spare = (0..depth).map(|_| device.event()).collect::<Result<_, _>>()?;
        let queue = Queue { waiting: VecDeque::new(), running: VecDeque::new(), spare, closing: false };
        let (queue, work) = (Mutex::new(queue), Condvar::new());
        Ok(Arc::new(Self { stream, ledger: ledger.clone(), group_bytes, queue, work }))
    }

    /// Takes pieces of one batch and begins as many as there is room for.
    pub(super) fn post(&self, batch: CopyId, transfers: Vec<Transfer>) {
        let mut queue = self.queue();
        queue.waiting.extend(transfers.into_iter().map(|transfer| Piece { batch, transfer }));
        if queue.closing {
            self.leave_out(&mut queue, |_| true);
        } else {
            self.fill(&mut queue);
        }
    }

    /// Leaves out the pieces of a batch that wait.
    pub(super) fn drop_waiting(&self, batch: CopyId) {
        self.leave_out(&mut self.queue(), |piece| piece.batch == batch);
    }

    /// Leaves out all that waits, and lets [`Lane::watch`] return when nothing is under way any more.
    pub(super) fn close(&self) {
        let mut queue = self.queue();
        queue.closing = true;
        self.leave_out(&mut queue, |_| true);
        drop(queue);
        self.work.notify_all();
    }

    /// Sleeps on the events of the lane, one after the other, until it is closed and all has ended.
    pub(super) fn watch(&self) {
        while let Some(group) = self.next() {
            self.settle(group);
        }
    }

    /// Books what has ended, without waiting for what has not.
    pub(super) fn poll(&self) {
        loop {
            let mut queue = self.queue();
            if !queue.running.front().is_some_and(|group| group.running.is_over()) {
                return;
            }
            let group = queue.running.pop_front().expect("just seen");
            drop(queue);
            self.settle(group);
        }
    }

    fn next(&self) -> Option<Group> {
        let idle = |queue: &mut Queue| queue.running.is_empty() && !queue.closing;
        let waited = self.work.wait_while(self.queue(), idle);
        waited.unwrap_or_else(PoisonError::into_inner).running.pop_front()
    }

    /// Waits for the end of a group and books it.
    fn settle(&self, group: Group) {
        let Group { batch, pieces, bytes, running, refused } = group;
        let settled = running.settle();
        let mut failure = settled.failure;
        if let Some(fault) = refused {
            failure = Some((fault, failure.is_none_or(|(_, certain)| certain)));
        }
        let failed = failure.is_some();
        let copied_bytes = if failed { 0 } else { bytes };
        let entry = Entry { pieces, copied_bytes, failure, left_out: false };
        if failed {
            // Booked first, so that no more of a batch or of a device that failed is begun.
            self.ledger.enter(batch, entry);
            self.refill(settled.event);
        } else {
            // Begun first, so that the stream has work while this thread does the books.
            self.refill(settled.event);
            self.ledger.enter(batch, entry);
        }
    }

    fn refill(&self, spare: Option<Event>) {
        let mut queue = self.queue();
        queue.spare.extend(spare);
        self.fill(&mut queue);
    }

    fn fill(&self, queue: &mut Queue) {
        while let Some(batch) = queue.waiting.front().map(|piece| piece.batch) {
            if !self.ledger.wants(batch) {
                self.leave_out(queue, |piece| piece.batch == batch);
                continue;
            }
            let Some(event) = queue.spare.pop() else { return };
            let group = self.begin(queue, batch, event);
            queue.running.push_back(group);
            self.work.notify_one();
        }
    }

    /// Begins the pieces at the front that are of one batch, up to the size of a group.
    fn begin(&self, queue: &mut Queue, batch: CopyId, event: Event) -> Group {
        let (mut copies, mut bytes) = (Vec::new(), 0);
        while bytes < self.group_bytes && copies.len() < GROUP_COPIES_MAX {
            let Some(piece) = queue.waiting.pop_front_if(|piece| piece.batch == batch) else { break };
            bytes += piece.transfer.bytes();
            copies.push(piece.transfer);
        }
        let pieces = copies.len();
        let (running, refused) = self.stream.run(copies, event);
        Group { batch, pieces, bytes, running, refused }
    }

    fn leave_out(&self, queue: &mut Queue, which: impl Fn(&Piece) -> bool) {
        let (out, rest) = std::mem::take(&mut queue.waiting).into_iter().partition(which);
        queue.waiting = rest;
        let out: VecDeque<Piece> = out;
        for piece in out {
            self.ledger.enter(piece.batch, Entry { pieces: 1, left_out: true, ..Entry::default() });
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
