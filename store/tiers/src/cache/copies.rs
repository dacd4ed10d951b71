//! Copies to slower tiers: to host memory at once, to flash through the I/O thread.

use super::{KvCache, Pool, Purpose};
use crate::file::FileTier;
use crate::index::Place;
use crate::tier::{Tier as _, TierError};
use baton_store::{CopyState, Input};
use baton_types::{BlockKey, Tier};
use std::collections::VecDeque;

/// One order of the store to copy blocks down.
#[derive(Debug)]
pub(super) struct CopyOrder {
    pub(super) ticket: u64,
    from: Tier,
    to: Tier,
    /// Blocks not begun; `None` until the order is looked at for the first time.
    todo: Option<VecDeque<BlockKey>>,
    /// Writes under way.
    pub(super) writes: u32,
    /// Complete copies; those on flash have their places.
    pub(super) arrived: Vec<(BlockKey, Option<Place>)>,
    /// Whether a block could not be copied: then none of the order counts.
    pub(super) failed: bool,
}

impl CopyOrder {
    pub(super) const fn new(ticket: u64, from: Tier, to: Tier) -> Self {
        Self { ticket, from, to, todo: None, writes: 0, arrived: Vec::new(), failed: false }
    }

    /// Complete copies in host memory that the store does not count yet.
    pub(super) fn in_dram(&self) -> usize {
        self.arrived.iter().filter(|(_, place)| place.is_none()).count()
    }

    /// Places on flash that it has.
    pub(super) fn places(&self) -> usize {
        self.arrived.len() - self.in_dram() + self.writes as usize
    }

    fn is_over(&self) -> bool {
        self.writes == 0 && (self.failed || self.todo.as_ref().is_some_and(VecDeque::is_empty))
    }
}

impl KvCache {
    /// Advances every copy as far as it goes without waiting.
    pub(super) fn run_copies(&mut self, pool: &mut dyn Pool) {
        let mut unseen = self.copies.len();
        while unseen > 0 {
            unseen -= 1;
            let Some(mut copy) = self.copies.pop_front() else { return };
            self.advance(&mut copy, pool);
            if copy.is_over() {
                // Follow-up work, such as a copy further down, joins the queue.
                let before = self.copies.len();
                self.end_copy(copy);
                unseen += self.copies.len() - before;
            } else {
                self.copies.push_back(copy);
            }
        }
    }

    /// A write of `ticket` ended.
    pub(super) fn written(&mut self, ticket: u64, block: (BlockKey, Place), outcome: Result<u64, TierError>) {
        let Some(copy) = self.copies.iter_mut().find(|copy| copy.ticket == ticket) else { return };
        copy.writes -= 1;
        match outcome {
            Ok(_) => copy.arrived.push((block.0, Some(block.1))),
            Err(error) => {
                copy.failed = true;
                self.count_error(&error);
            }
        }
    }

    fn advance(&mut self, copy: &mut CopyOrder, pool: &mut dyn Pool) {
        let mut todo = match copy.todo.take() {
            Some(todo) => todo,
            None => self.store.offload_keys(copy.ticket).into(),
        };
        while let Some(&key) = todo.front() {
            if copy.failed || (copy.to == Tier::Ssd && !self.file.as_ref().is_some_and(FileTier::takes_write))
            {
                break;
            }
            todo.pop_front();
            // Copies may have been called off since the order, their source being gone.
            let is_wanted = self.store.copy_state(key, copy.from) == CopyState::Ready
                && self.store.copy_state(key, copy.to) == CopyState::Filling;
            if !is_wanted {
                continue;
            }
            let begun = match copy.to {
                Tier::Dram => self.copy_to_dram(key, pool).map(|()| copy.arrived.push((key, None))),
                _ => self.start_write(copy, key, pool).map(|()| copy.writes += 1),
            };
            if let Err(error) = begun {
                copy.failed = true;
                self.count_error(&error);
            }
        }
        copy.todo = Some(todo);
    }

    fn copy_to_dram(&mut self, key: BlockKey, pool: &dyn Pool) -> Result<(), TierError> {
        let slot = self.address(key).ok_or(TierError::Absent)?;
        self.dram.put_with(key, |place| pool.read(slot, place)).map(|_| ())
    }

    /// Hands a block to the I/O thread, vouched for by the checksum that it has from now on.
    fn start_write(&mut self, copy: &CopyOrder, key: BlockKey, pool: &dyn Pool) -> Result<(), TierError> {
        let Some(file) = &mut self.file else { return Err(TierError::Full) };
        let mut buffer = file.buffer();
        let bytes = &mut buffer[..self.config.block_bytes];
        let checksum = if copy.from == Tier::Dram {
            let (stored, checksum) = self.dram.view(key)?;
            bytes.copy_from_slice(stored);
            checksum
        } else {
            let address = self.addresses.get(&key.short()).filter(|address| address.key == key);
            pool.read(address.ok_or(TierError::Absent)?.slot, bytes);
            crate::checksum::block_checksum(key, bytes)
        };
        let (number, place) = file.write((key, self.store.parent(key)), checksum, buffer)?;
        self.purposes.insert(number, Purpose::Write { ticket: copy.ticket, key, place });
        Ok(())
    }

    /// Answers the order; copies that the store does not count are given up.
    fn end_copy(&mut self, copy: CopyOrder) {
        self.step(Input::OffloadDone { ticket: copy.ticket, ok: !copy.failed });
        for (key, place) in copy.arrived {
            let counts = !copy.failed && self.store.copy_state(key, copy.to) == CopyState::Ready;
            match place {
                None if counts => {}
                None => _ = self.dram.remove(key.short()),
                Some(place) => {
                    let committed = counts && self.file.as_mut().is_some_and(|file| file.commit(key, place));
                    if !committed {
                        self.discard_place(place);
                    }
                }
            }
        }
    }

    fn discard_place(&mut self, place: Place) {
        if let Some(file) = &mut self.file {
            file.discard(place);
        }
    }
}
