//! Group commit: entries become lasting together, and slots become free again.
//!
//! A cycle writes the pages of the blocks that a flush has covered, and of those removed, and then
//! flushes; that flush covers the pages, and the blocks written meanwhile, whose turn is next.

use super::{Answer, Flight, IoSequencer, Landing, MAX_FAILURES, OpKind};
use crate::aligned::{AlignedBuffer, PAGE_BYTES};
use crate::index::Place;
use crate::layout::Header;
use crate::tier::TierError;
use std::io;

/// Pages that one cycle writes for removals at most.
const MAX_PAGES: usize = 32;

/// The work of one commit cycle.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// Blocks whose entries are being written.
    blocks: Vec<Landing>,
    /// Blocks whose entries are being taken out.
    leaving: Vec<Place>,
    /// The pages.
    pages: Vec<u32>,
    /// Pages whose write has not ended.
    unwritten: usize,
    /// The first that failed.
    failed: Option<io::Error>,
    /// Blocks whose bytes the flush covers.
    covered: Vec<Landing>,
}

/// Where the cycle is.
#[derive(Debug)]
pub(super) enum Cycle {
    /// Between two.
    Idle,
    /// Pages are being written.
    Pages(Group),
    /// The flush is under way.
    Flush(Group),
    /// A header is being written, to begin a new life.
    Header(Header),
    /// It is being flushed.
    HeaderFlush(Header),
}

impl IoSequencer {
    /// Whether there is anything to commit, to clear, or to wait for.
    pub(super) fn has_work(&self) -> bool {
        let waits = !self.removals.is_empty() || self.index.dirty_pages() > 0;
        !matches!(self.cycle, Cycle::Idle)
            || self.clearing.is_some()
            || !self.landed.is_empty()
            || !self.flushed.is_empty()
            || (waits && self.lasts && !self.is_stalled && !self.is_off)
    }

    /// Begins what can be begun.
    pub(super) fn turn(&mut self) {
        while matches!(self.cycle, Cycle::Idle) && self.has_work() {
            if self.is_off {
                self.give_up();
            } else if let Some(incarnation) = self.clearing {
                self.give_up();
                if !self.flights.is_empty() {
                    return;
                }
                return self.write_header(incarnation);
            } else {
                self.begin();
            }
        }
    }

    /// Blocks that were written and will get no entry.
    fn give_up(&mut self) {
        let blocks: Vec<Landing> = self.landed.drain(..).chain(self.flushed.drain(..)).collect();
        for Landing { number, .. } in blocks {
            self.refuse(number, AlignedBuffer::new(0));
        }
        self.removals.clear();
        if self.is_off && self.clearing.take().is_some() {
            self.resume();
        }
    }

    fn begin(&mut self) {
        let mut group = Group { blocks: std::mem::take(&mut self.flushed), ..Group::default() };
        group.blocks.iter().for_each(|block| self.index.set(&block.entry));
        while self.index.dirty_pages() < MAX_PAGES
            && let Some(place) = self.removals.pop_front()
        {
            self.index.clear(place);
            group.leaving.push(place);
        }
        group.pages = self.index.take_dirty();
        group.unwritten = group.pages.len();
        for page in group.pages.clone() {
            let mut bytes = AlignedBuffer::new(PAGE_BYTES);
            let offset = self.index.compose(page, &mut bytes);
            self.fly(Flight::Page, OpKind::Write, offset, bytes);
        }
        if group.unwritten == 0 { self.flush(group) } else { self.cycle = Cycle::Pages(group) }
    }

    fn flush(&mut self, mut group: Group) {
        group.covered = std::mem::take(&mut self.landed);
        self.cycle = Cycle::Flush(group);
        self.fly(Flight::Flush, OpKind::Flush, 0, AlignedBuffer::new(0));
    }

    pub(super) fn page_written(&mut self, result: io::Result<()>) {
        let Cycle::Pages(mut group) = std::mem::replace(&mut self.cycle, Cycle::Idle) else { return };
        group.unwritten -= 1;
        if let Err(error) = result {
            group.failed.get_or_insert(error);
        }
        match (group.unwritten, group.failed.take()) {
            (0, None) => self.flush(group),
            (0, Some(error)) => {
                // A disk like this is not asked for what is waiting either.
                group.covered = std::mem::take(&mut self.landed);
                self.fail(group, &error);
            }
            (_, failed) => self.cycle = Cycle::Pages(Group { failed, ..group }),
        }
    }

    pub(super) fn flush_ended(&mut self, result: io::Result<()>) {
        match std::mem::replace(&mut self.cycle, Cycle::Idle) {
            Cycle::Flush(group) => match result {
                Ok(()) => self.succeed(group),
                Err(error) => self.fail(group, &error),
            },
            Cycle::HeaderFlush(header) => self.header_lasts(header, result),
            other => self.cycle = other,
        }
    }

    fn succeed(&mut self, group: Group) {
        self.failures = 0;
        group.pages.iter().for_each(|&page| self.index.lasts(page));
        for Landing { number, entry, .. } in group.blocks {
            self.done(number, Ok(entry.place.checksum), AlignedBuffer::new(0));
        }
        group.leaving.iter().for_each(|place| self.free(place.slot, self.epoch));
        self.flushed = group.covered;
    }

    /// Ends a failed group. The disk's content is unknown: no block counts, and no slot is free, until a later cycle
    /// has written the pages without them.
    fn fail(&mut self, group: Group, error: &io::Error) {
        group.pages.iter().for_each(|&page| self.index.missed(page));
        let again = || TierError::Io(io::Error::new(error.kind(), error.to_string()));
        for Landing { number, entry, .. } in group.blocks {
            self.index.clear(entry.place);
            self.removals.push_back(entry.place);
            self.done(number, Err(again()), AlignedBuffer::new(0));
        }
        group.leaving.into_iter().rev().for_each(|place| self.removals.push_front(place));
        for Landing { number, entry, epoch } in group.covered {
            self.done(number, Err(again()), AlignedBuffer::new(0));
            self.free(entry.place.slot, epoch);
        }
        self.count_failure();
    }

    fn count_failure(&mut self) {
        self.failures += 1;
        self.is_stalled = true;
        self.answers.push(Answer::Stalled);
        if self.failures >= MAX_FAILURES && !self.is_off {
            self.is_off = true;
            self.answers.push(Answer::Off);
        }
    }

    fn write_header(&mut self, incarnation: u64) {
        let header = Header { incarnation, sequence: self.header.sequence + 1, ..self.header };
        let mut bytes = AlignedBuffer::new(PAGE_BYTES);
        header.encode(&mut bytes);
        self.cycle = Cycle::Header(header);
        self.fly(Flight::Header, OpKind::Write, header.offset(), bytes);
    }

    pub(super) fn header_written(&mut self, result: io::Result<()>) {
        let Cycle::Header(header) = std::mem::replace(&mut self.cycle, Cycle::Idle) else { return };
        match result {
            Ok(()) => {
                self.cycle = Cycle::HeaderFlush(header);
                self.fly(Flight::Flush, OpKind::Flush, 0, AlignedBuffer::new(0));
            }
            Err(_) => self.header_lasts(header, result),
        }
    }

    /// Ends the clear. If the new life could not begin, the old entries still describe their slots, so the sequencer
    /// stops writing.
    fn header_lasts(&mut self, header: Header, result: io::Result<()>) {
        self.clearing = None;
        if result.is_ok() {
            self.header = header;
            self.index.restart(header.incarnation);
            self.is_stalled = false;
        } else {
            self.is_off = true;
            self.answers.push(Answer::Off);
        }
        self.resume();
    }

    /// Goes on after a `Clear`.
    fn resume(&mut self) {
        self.epoch += 1;
        while self.clearing.is_none()
            && let Some(order) = self.parked.pop_front()
        {
            self.take(order);
        }
    }
}
