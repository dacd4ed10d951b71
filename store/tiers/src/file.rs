//! Blocks in a slab file on flash.

mod many;
mod open;
mod slab;
mod trial;

pub use open::{FileOptions, IoChoice};
pub(crate) use open::{layout_in, pass_by, unlink};
pub use trial::Speed;

use crate::aligned::AlignedBuffer;
use crate::checksum::block_checksum;
use crate::disk::Disk;
use crate::index::{Entry, Place};
use crate::io::IoThread;
use crate::io_sequencer::{Answer, IoCompletion, IoSequencer, Order, verify};
use crate::layout::Layout;
use crate::queue::Queue;
use crate::recover::{Beginning, FlashError, OpenedFile};
use crate::slot_table::SlotTable;
use crate::tier::{Tier, TierError, check_length};
use baton_types::{BlockHash, BlockKey};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// A tier in a preallocated file, read and written past the page cache where the system can.
///
/// In a given folder it outlives the process: a block whose `put` succeeded is there after a kill
/// or a power cut, unless it was removed. Without a folder the file has no name and goes with
/// the process, and nothing waits for the disk's flush.
#[derive(Debug)]
pub struct FileTier {
    disk: Arc<dyn Disk>,
    layout: Layout,
    slot_table: SlotTable,
    io: IoThread,
    /// Ended jobs that no caller has taken yet.
    ended: VecDeque<IoCompletion>,
    /// Jobs of lower numbers were ordered before the last `clear`.
    first_number: u64,
    recovered: Vec<Entry>,
    beginning: Beginning,
    device: String,
    is_stalled: bool,
    is_off: bool,
    /// Slots that became free, for the blob log. No other caller takes them, so at most as many are kept as there are
    /// slots.
    freed: VecDeque<u32>,
    /// Entries that were being removed at the start.
    stale: Vec<Entry>,
    buffer: AlignedBuffer,
}

impl FileTier {
    /// A tier over an opened file.
    pub(crate) fn start(
        disk: Arc<dyn Disk>,
        queue: Box<dyn Queue>,
        opened: OpenedFile,
        lasts: bool,
        device: String,
    ) -> Result<Self, FlashError> {
        let OpenedFile { header, index, entries, places, stale, beginning } = opened;
        let layout = header.layout;
        let slot_table = SlotTable::new(layout, places, &entries, &stale);
        let mut io = IoThread::start(IoSequencer::new(header, index, lasts), queue, layout.stride_bytes())?;
        for entry in &stale {
            io.send(Order::Remove(entry.place));
        }
        Ok(Self {
            disk,
            layout,
            slot_table,
            io,
            ended: VecDeque::new(),
            first_number: 0,
            recovered: entries,
            beginning,
            device,
            is_stalled: false,
            is_off: false,
            freed: VecDeque::new(),
            stale,
            buffer: AlignedBuffer::new(layout.stride_bytes()),
        })
    }

    /// How it began: empty or not, and why.
    #[must_use]
    pub const fn beginning(&self) -> &Beginning {
        &self.beginning
    }

    /// How the disk is read and written, in a few words.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Whether the disk failed so often that the tier has stopped writing.
    #[must_use]
    pub const fn is_off(&self) -> bool {
        self.is_off
    }

    /// The blocks that were there at the start; once.
    pub(crate) fn take_recovered(&mut self) -> Vec<Entry> {
        std::mem::take(&mut self.recovered)
    }

    /// Whether another read may start.
    pub(crate) fn takes_read(&self) -> bool {
        self.io.takes_read()
    }

    /// Whether another write may start: there is a place for its block, too. If not, there may be
    /// after the next [`FileTier::next_done`].
    pub(crate) fn takes_write(&self) -> bool {
        self.io.takes_write() && (self.slot_table.has_free() || !self.waits_for_slots())
    }

    /// Whether slots will be free without anything new being ordered.
    fn waits_for_slots(&self) -> bool {
        self.slot_table.draining() > 0 && !self.is_stalled && !self.is_off && !self.io.is_gone()
    }

    /// Jobs under way, and slots that will be free.
    pub(crate) fn under_way(&self) -> usize {
        let draining = if self.waits_for_slots() { self.slot_table.draining() as usize } else { 0 };
        self.io.under_way() + draining + self.ended.len()
    }

    /// Reads and writes under way.
    #[cfg(test)]
    pub(crate) fn jobs(&self) -> usize {
        self.io.under_way()
    }

    /// Whether the thread ended before its time: no job under way will ever end.
    pub(crate) const fn is_gone(&self) -> bool {
        self.io.is_gone()
    }

    /// A buffer for [`FileTier::write`]: the block's bytes go first.
    pub(crate) fn buffer(&mut self) -> AlignedBuffer {
        self.io.buffer()
    }

    /// Takes a buffer back.
    pub(crate) fn recycle(&mut self, buffer: AlignedBuffer) {
        self.io.recycle(buffer);
    }

    /// Starts to write a block; commit it or discard it once it is done.
    ///
    /// # Errors
    /// `Full`, or `Io` if the thread is gone.
    pub(crate) fn write(
        &mut self,
        (key, parent): (BlockKey, Option<BlockKey>),
        checksum: u64,
        buffer: AlignedBuffer,
    ) -> Result<(u64, Place), TierError> {
        let Some(place) = self.slot_table.reserve(checksum) else {
            self.recycle(buffer);
            return Err(TierError::Full);
        };
        self.is_stalled = false;
        match self.io.write(Entry { key, parent, place }, buffer) {
            Some(number) => Ok((number, place)),
            None => {
                self.slot_table.give_back(place);
                Err(gone())
            }
        }
    }

    /// Starts to read a block that rests here. `None`: it does not, or the thread is gone.
    pub(crate) fn read(&mut self, key: BlockKey) -> Option<u64> {
        let place = self.slot_table.place(key)?;
        self.io.read(place, key)
    }

    /// Starts to read the first page of a block that rests here, unverified. `None`: it does not, or the thread is gone.
    pub(crate) fn peek(&mut self, key: BlockKey) -> Option<u64> {
        let place = self.slot_table.place(key)?;
        self.io.peek(place)
    }

    /// A job that ended, if any has since the last time. Never waits.
    pub(crate) fn next_done(&mut self) -> Option<IoCompletion> {
        while let Some(answer) = self.io.next_answer() {
            self.on_answer(answer);
        }
        self.ended.pop_front()
    }

    /// The block was written to this place. `false`: a block of that short name rests here
    /// already; discard it.
    pub(crate) fn commit(&mut self, key: BlockKey, place: Place) -> bool {
        self.slot_table.commit(key, place)
    }

    /// A block that was written is not wanted.
    pub(crate) fn discard(&mut self, place: Place) {
        let order = self.slot_table.discard(place);
        self.order_removal(order);
    }

    /// Where a block rests.
    pub(crate) fn place(&self, key: BlockKey) -> Option<Place> {
        self.slot_table.place(key)
    }

    /// Blocks that rest here; `len_blocks` counts places being written to as well.
    pub(crate) fn committed(&self) -> usize {
        self.slot_table.committed()
    }

    /// Forgets every block. Writes under way may still end; later ones begin after them.
    pub(crate) fn clear(&mut self) {
        self.slot_table.clear();
        self.first_number = self.io.next_number();
        self.is_stalled = false;
        self.io.send(Order::Clear(open::fresh_number()));
    }

    fn order_removal(&mut self, order: Order) {
        self.is_stalled = false;
        // A dead thread frees no slot, and it writes nothing either.
        let _ = self.io.send(order);
    }

    fn on_answer(&mut self, answer: Answer) {
        match answer {
            Answer::Done(done) => {
                let is_present = done.number >= self.first_number;
                if IoThread::is_write(done.number) && done.outcome.is_err() && is_present {
                    self.slot_table.failed();
                }
                self.ended.push_back(done);
            }
            Answer::Freed { slot, epoch } => {
                if self.slot_table.freed(slot, epoch) {
                    if self.freed.len() >= self.layout.slots() as usize {
                        self.freed.pop_front();
                    }
                    self.freed.push_back(slot);
                }
            }
            Answer::Spare(buffer) => self.io.recycle(buffer),
            Answer::Stalled => self.is_stalled = true,
            Answer::Off => self.is_off = true,
        }
    }

    /// Waits for the sequencer to tell something, or for the thread to be gone.
    fn wait(&mut self) {
        if let Some(answer) = self.io.wait_answer() {
            self.on_answer(answer);
        }
    }

    /// Waits until the disk has done something; the caller knows that it will.
    pub(crate) fn wait_some(&mut self) {
        if self.ended.is_empty() {
            self.wait();
        }
    }

    /// One of these jobs that ended.
    fn take_ended(&mut self, is_mine: impl Fn(u64) -> bool) -> Option<IoCompletion> {
        let at = self.ended.iter().position(|done| is_mine(done.number))?;
        self.ended.remove(at)
    }

    /// Waits for the end of one job.
    fn wait_for(&mut self, number: u64) -> Result<IoCompletion, TierError> {
        loop {
            if let Some(done) = self.take_ended(|ended| ended == number) {
                return Ok(done);
            }
            let answer = self.io.wait_answer().ok_or_else(gone)?;
            self.on_answer(answer);
        }
    }

    /// Waits until no slot drains that will be free.
    fn settle(&mut self) {
        while self.waits_for_slots() {
            self.wait();
        }
    }
}

fn gone() -> TierError {
    TierError::Io(io::ErrorKind::BrokenPipe.into())
}

impl Tier for FileTier {
    fn block_bytes(&self) -> usize {
        self.layout.block_bytes
    }

    fn capacity_blocks(&self) -> usize {
        self.slot_table.capacity() as usize
    }

    fn len_blocks(&self) -> usize {
        self.slot_table.in_use()
    }

    fn put(&mut self, key: BlockKey, bytes: &[u8]) -> Result<(), TierError> {
        check_length(self.block_bytes(), bytes.len())?;
        match self.slot_table.get(key.short()) {
            Some((known, _)) if known != key => return Err(TierError::SameShortName),
            // The older copy is gone for good before the newer one is written: it cannot come back.
            Some(_) => _ = self.remove(key.short()),
            None => {}
        }
        self.settle();
        let mut buffer = self.buffer();
        buffer[..bytes.len()].copy_from_slice(bytes);
        let (number, place) = self.write((key, None), block_checksum(key, bytes), buffer)?;
        let done = self.wait_for(number)?;
        self.recycle(done.buffer);
        done.outcome?;
        self.slot_table.commit(key, place);
        Ok(())
    }

    fn get(&mut self, key: BlockKey, out: &mut [u8]) -> Result<u64, TierError> {
        check_length(self.block_bytes(), out.len())?;
        let place = self.place(key).ok_or(TierError::Absent)?;
        self.disk.read_at(&mut self.buffer, self.layout.slot_offset(place.slot))?;
        let bytes = &self.buffer[..out.len()];
        let checksum = verify(key, place, bytes)?;
        out.copy_from_slice(bytes);
        Ok(checksum)
    }

    fn remove(&mut self, block: BlockHash) -> bool {
        let order = self.slot_table.remove(block);
        let was_there = order.is_some();
        if let Some(order) = order {
            self.order_removal(order);
        }
        was_there
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::disk::testing::FailingDisk;
    use crate::queue::Threads;
    use crate::recover::{FoundHeader, begin, look, recover};

    /// A lasting tier on a disk in memory, recovered from what is there.
    pub(crate) fn on_disk(disk: &Arc<FailingDisk>, layout: Layout) -> Result<FileTier, FlashError> {
        let disk = Arc::clone(disk) as Arc<dyn Disk>;
        let opened = match look(disk.as_ref(), &layout)? {
            FoundHeader::Usable(header) => recover(disk.as_ref(), header)?,
            FoundHeader::Unusable(sequence, reason) => {
                // All of it is there from the beginning, as in a file.
                let length = layout.file_bytes() as usize;
                disk.write_at(&vec![0; length], 0)?;
                let beginning = reason.map_or(Beginning::New, |reason| Beginning::Emptied { reason });
                let header = crate::layout::Header { layout, incarnation: open::fresh_number(), sequence };
                begin(disk.as_ref(), header, beginning)?
            }
        };
        let queue = Box::new(Threads::start(&disk)?);
        FileTier::start(disk, queue, opened, true, "a disk in memory".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::testing::FailingDisk;

    const LAYOUT: Layout = Layout { block_bytes: 100, capacity: 1, fingerprint: 0 };

    #[test]
    fn a_failed_write_leaves_no_copy_and_takes_no_place() {
        let disk = Arc::new(FailingDisk::default());
        let mut tier = testing::on_disk(&disk, LAYOUT).unwrap();
        tier.put(BlockKey(1), &[1; 100]).unwrap();
        tier.remove(BlockKey(1).short());
        tier.settle();
        disk.state.lock().unwrap().fail_writes = 1;
        assert!(matches!(tier.put(BlockKey(1), &[2; 100]), Err(TierError::Io(_))));
        assert!(matches!(tier.get(BlockKey(1), &mut [0; 100]), Err(TierError::Absent)));
        assert_eq!(tier.len_blocks(), 0);
        tier.put(BlockKey(2), &[2; 100]).unwrap();
    }

    #[test]
    fn what_was_put_is_there_again_and_what_was_removed_is_not() {
        let disk = Arc::new(FailingDisk::default());
        let layout = Layout { capacity: 9, ..LAYOUT };
        let mut tier = testing::on_disk(&disk, layout).unwrap();
        assert_eq!(tier.beginning(), &Beginning::New);
        for key in 0..5 {
            tier.put(BlockKey(key), &[key as u8; 100]).unwrap();
        }
        tier.put(BlockKey(2), &[22; 100]).unwrap();
        tier.remove(BlockKey(3).short());
        drop(tier);
        let mut tier = testing::on_disk(&disk, layout).unwrap();
        assert_eq!(tier.beginning(), &Beginning::Recovered { blocks: 4, lost_pages: 0, torn_pages: 0 });
        for (key, fill) in [(0, 0), (1, 1), (2, 22), (4, 4)] {
            let mut out = [9; 100];
            tier.get(BlockKey(key), &mut out).unwrap();
            assert_eq!(out, [fill; 100]);
        }
        tier.clear();
        tier.put(BlockKey(7), &[7; 100]).unwrap();
        drop(tier);
        let tier = testing::on_disk(&disk, layout).unwrap();
        assert_eq!((tier.committed(), tier.place(BlockKey(7)).is_some()), (1, true));
    }

    #[test]
    fn a_disk_that_never_flushes_is_switched_off() {
        let disk = Arc::new(FailingDisk::default());
        let mut tier = testing::on_disk(&disk, Layout { capacity: 9, ..LAYOUT }).unwrap();
        tier.put(BlockKey(1), &[1; 100]).unwrap();
        disk.state.lock().unwrap().fail_flushes = u32::MAX;
        for key in 2..30 {
            assert!(tier.put(BlockKey(key), &[1; 100]).is_err());
        }
        assert!(tier.is_off());
        assert_eq!(tier.under_way(), 0, "nothing is waited for");
        tier.get(BlockKey(1), &mut [0; 100]).expect("what rests there can still be read");
    }
}
