//! Writing values: the blocks in any order, the head after them.

use super::{BlobLogCore, BlobLogEvent, Job, LARGEST_PART, Object, PutError, Record, Slab, keys};
use crate::checksum::block_checksum;
use crate::index::Place;
use crate::io_sequencer::IoCompletion;
use crate::tier::TierError;
use baton_types::BlockKey;

/// A value being written.
#[derive(Debug)]
pub(super) struct PutOp {
    record: Record,
    head: BlockKey,
    parts: u32,
    /// Blocks whose write began.
    begun: u32,
    /// Writes under way.
    pending: u32,
    written: Vec<(BlockKey, Place)>,
    failed: Option<PutError>,
    /// Removed meanwhile.
    pub(super) cancelled: bool,
}

impl PutOp {
    pub(super) fn name(&self) -> u64 {
        self.head.short().0
    }

    fn ends(&self) -> bool {
        self.failed.is_some() || self.cancelled
    }

    /// The block whose turn is next: the head is last.
    fn next_key(&self) -> (u32, BlockKey) {
        let part = self.begun + 1;
        if part < self.parts { (part, keys::part(self.head, part)) } else { (0, self.head) }
    }

    /// Fills a block with its part of header and value.
    fn fill(&self, part: u32, block: &mut [u8]) {
        let header_bytes = keys::header_bytes(self.head);
        let from = part as usize * block.len();
        let in_header = header_bytes.saturating_sub(from).min(block.len());
        let (first, rest) = block.split_at_mut(in_header);
        first.fill(0);
        let header = self.record.header.get(from..).unwrap_or_default();
        let given = header.len().min(in_header);
        first[..given].copy_from_slice(&header[..given]);
        let offset = (from + in_header).saturating_sub(header_bytes);
        let left = (self.record.bytes as usize).saturating_sub(offset).min(rest.len());
        let (value, tail) = rest.split_at_mut(left);
        if !value.is_empty() {
            self.record.source.copy(offset, value);
        }
        tail.fill(0);
    }
}

impl<S: Slab> BlobLogCore<S> {
    /// Begins to keep a value.
    pub(crate) fn put(&mut self, mut record: Record) {
        record.header = keys::unsealed(&record.header);
        let nonce = self.next_nonce;
        let head = keys::head(record.name, record.bytes, record.header.len(), nonce);
        let verdict =
            head.ok_or(PutError::TooLarge).and_then(|head| self.admit(head).map(|parts| (head, parts)));
        let (head, parts) = match verdict {
            Ok(admitted) => admitted,
            Err(why) => {
                let listing = super::Listing { name: record.name, tag: record.tag, bytes: record.bytes };
                return self.done.push_back(BlobLogEvent::NotKept(listing, why));
            }
        };
        keys::seal(head, &mut record.header);
        self.next_nonce += 1;
        self.owed_blocks += parts as usize;
        let id = self.next_id;
        self.next_id += 1;
        let (failed, written) = (None, Vec::with_capacity(parts as usize));
        let put = PutOp { record, head, parts, begun: 0, pending: 0, written, failed, cancelled: false };
        self.puts.insert(id, put);
        self.write_on();
    }

    /// Whether a value may be put; makes room for it.
    fn admit(&mut self, head: BlockKey) -> Result<u32, PutError> {
        let name = head.short().0;
        if self.slab.is_off() || self.slab.is_lost() {
            return Err(PutError::Failed(TierError::Io(std::io::Error::other("the disk is left alone"))));
        }
        if self.objects.contains_key(&name)
            || self.puts.values().any(|put| put.name() == name && !put.cancelled)
        {
            return Err(PutError::SameName);
        }
        let parts = keys::parts(head, self.slab.block_bytes());
        let capacity = self.slab.capacity_blocks();
        if parts as usize > (capacity / LARGEST_PART).max(1) {
            return Err(PutError::TooLarge);
        }
        while self.slab.used_blocks() + self.owed_blocks + parts as usize > capacity {
            if !self.evict() {
                return Err(PutError::Full);
            }
        }
        Ok(parts)
    }

    /// Starts as many writes as there may be, values in the order in which they came.
    pub(super) fn write_on(&mut self) {
        let waiting: Vec<u64> = self
            .puts
            .iter()
            .filter(|(_, put)| put.begun < put.parts && !put.ends())
            .map(|(id, _)| *id)
            .collect();
        for id in waiting {
            while self.slab.takes_write() && self.write_next(id) {}
            self.try_finish(id);
        }
    }

    /// Starts the next write of a value. False when there is none.
    fn write_next(&mut self, id: u64) -> bool {
        let Some(put) = self.puts.get_mut(&id).filter(|put| put.begun < put.parts && !put.ends()) else {
            return false;
        };
        let (part, key) = put.next_key();
        let block_bytes = self.slab.block_bytes();
        let mut buffer = self.slab.buffer();
        put.fill(part, &mut buffer[..block_bytes]);
        let checksum = block_checksum(key, &buffer[..block_bytes]);
        put.begun += 1;
        self.owed_blocks -= 1;
        let parent = (part > 0).then_some(put.head);
        match self.slab.write((key, parent), checksum, buffer) {
            Ok((number, place)) => {
                put.pending += 1;
                self.stats.written_bytes += block_bytes.next_multiple_of(crate::aligned::PAGE_BYTES) as u64;
                self.jobs.insert(number, Job::Put { id, key, place });
            }
            Err(error) => put.failed = Some(PutError::Failed(error)),
        }
        true
    }

    /// A block's write ended.
    pub(super) fn block_written(&mut self, id: u64, (key, place): (BlockKey, Place), done: IoCompletion) {
        self.slab.recycle(done.buffer);
        let put = self.puts.get_mut(&id).expect("a value with a write under way is being written");
        put.pending -= 1;
        match done.outcome {
            Ok(_) => put.written.push((key, place)),
            Err(error) => {
                self.stats.io_errors += 1;
                put.failed.get_or_insert(PutError::Failed(error));
                let (name, is_head) = (put.name(), key == put.head);
                if is_head {
                    // Its entry may be on the disk all the same, until the slot is free for good.
                    self.leaves(name, place.slot);
                }
            }
        }
        self.try_finish(id);
    }

    /// Ends a value's writing, if there is nothing more to wait for.
    pub(super) fn try_finish(&mut self, id: u64) {
        let over = |put: &PutOp| put.pending == 0 && (put.begun == put.parts || put.ends());
        if !self.puts.get(&id).is_some_and(over) {
            return;
        }
        let mut put = self.puts.remove(&id).expect("looked at above");
        self.owed_blocks -= (put.parts - put.begun) as usize;
        if put.cancelled {
            put.failed = Some(PutError::Removed);
        }
        if put.failed.is_none() {
            let listed = put.written.iter().take_while(|(key, place)| self.slab.commit(*key, *place)).count();
            if listed == put.written.len() {
                return self.finish(&put);
            }
            // Another block happens to have the same short name: as unlikely as it is harmless.
            for (key, place) in put.written.drain(..listed) {
                self.slab.remove(key);
                if key == put.head {
                    self.leaves(put.head.short().0, place.slot);
                }
            }
            put.failed = Some(PutError::SameName);
        }
        self.give_up(put);
    }

    fn finish(&mut self, put: &PutOp) {
        let (head, tag) = (put.head, put.record.tag);
        self.objects.insert(put.name(), Object { head, tag, hit: false });
        self.order.push_back((put.name(), tag));
        self.done.push_back(BlobLogEvent::Kept(keys::listing(head, tag)));
    }

    fn give_up(&mut self, put: PutOp) {
        let name = put.name();
        // Without its head a value does not come back: who waits for that waits for the head's slot.
        for (key, place) in put.written {
            self.slab.discard(place);
            if key == put.head {
                self.leaves(name, place.slot);
            }
        }
        if put.cancelled {
            self.delete_confirmed(name);
        }
        let why = put.failed.unwrap_or(PutError::Removed);
        self.done.push_back(BlobLogEvent::NotKept(keys::listing(put.head, put.record.tag), why));
    }
}
