//! Reading values, block by block, each verified.

use super::{BlobLogCore, BlobLogEvent, BlobReadError, Job, Slab, keys};
use crate::aligned::PAGE_BYTES;
use crate::io_sequencer::IoCompletion;
use crate::tier::TierError;
use baton_types::BlockKey;

/// A value being read.
#[derive(Debug)]
pub(super) struct GetOp {
    token: u64,
    head: BlockKey,
    tag: u64,
    /// Only the header is wanted, which has a checksum of its own: the read covers at most the first page of the
    /// head.
    is_peek: bool,
    /// Blocks wanted.
    parts: u32,
    begun: u32,
    pending: u32,
    header: Vec<u8>,
    value: Vec<u8>,
    failed: Option<TierError>,
}

impl GetOp {
    /// Takes a block's bytes to their places.
    fn take(&mut self, part: u32, block: &[u8]) {
        let from = part as usize * block.len();
        let in_header = self.header.len().saturating_sub(from).min(block.len());
        if in_header > 0 {
            self.header[from..from + in_header].copy_from_slice(&block[..in_header]);
        }
        let offset = (from + in_header).saturating_sub(self.header.len());
        let left = self.value.len().saturating_sub(offset).min(block.len() - in_header);
        if left > 0 {
            self.value[offset..offset + left].copy_from_slice(&block[in_header..in_header + left]);
        }
    }
}

impl<S: Slab> BlobLogCore<S> {
    /// Begins to read a value, or its header alone.
    pub(crate) fn get(&mut self, name: u64, token: u64, header_only: bool) {
        let block_bytes = self.slab.block_bytes();
        let Some(object) = self.objects.get_mut(&name) else {
            return self.done.push_back(BlobLogEvent::Got(token, Err(BlobReadError::Absent)));
        };
        object.hit |= !header_only;
        let (head, tag) = (object.head, object.tag);
        let header = vec![0; keys::header_bytes(head)];
        let is_peek = header_only && block_bytes > PAGE_BYTES;
        let (parts, value) = if header_only {
            (header.len().div_ceil(block_bytes).max(1) as u32, Vec::new())
        } else {
            (keys::parts(head, block_bytes), vec![0; keys::value_bytes(head) as usize])
        };
        let (begun, pending, failed) = (0, 0, None);
        let getting = GetOp { token, head, tag, is_peek, parts, begun, pending, header, value, failed };
        let id = self.next_id;
        self.next_id += 1;
        self.gets.insert(id, getting);
        self.read_on();
    }

    /// Starts as many reads as there may be.
    pub(super) fn read_on(&mut self) {
        let waiting: Vec<u64> =
            self.gets.iter().filter(|(_, get)| get.begun < get.parts).map(|(id, _)| *id).collect();
        for id in waiting {
            while self.slab.takes_read()
                && let Some(get) = self.gets.get_mut(&id).filter(|get| get.begun < get.parts)
            {
                let key = if get.begun == 0 { get.head } else { keys::part(get.head, get.begun) };
                let started = if get.is_peek { self.slab.peek(key) } else { self.slab.read(key) };
                match started {
                    Some(number) => {
                        self.jobs.insert(number, Job::Get { id, part: get.begun });
                        get.begun += 1;
                        get.pending += 1;
                    }
                    // Removed meanwhile.
                    None => {
                        get.begun = get.parts;
                        get.failed.get_or_insert(TierError::Absent);
                    }
                }
            }
            self.finish_get(id);
        }
    }

    /// A block's read ended.
    pub(super) fn block_read(&mut self, id: u64, part: u32, done: IoCompletion) {
        let get = self.gets.get_mut(&id).expect("a value with a read under way is being read");
        get.pending -= 1;
        match done.outcome {
            Ok(_) => {
                let bytes = self.slab.block_bytes().min(done.buffer.len());
                get.take(part, &done.buffer[..bytes]);
            }
            Err(error) => {
                self.stats.io_errors += u64::from(matches!(error, TierError::Io(_)));
                get.begun = get.parts;
                get.failed.get_or_insert(error);
            }
        }
        self.slab.recycle(done.buffer);
        self.finish_get(id);
    }

    fn finish_get(&mut self, id: u64) {
        if !self.gets.get(&id).is_some_and(|get| get.pending == 0 && get.begun == get.parts) {
            return;
        }
        let mut get = self.gets.remove(&id).expect("looked at above");
        let opened = keys::open(get.head, &get.header);
        if get.failed.is_none() && opened.is_none() {
            get.failed = Some(TierError::Corrupt { what: "the header of a value on flash" });
        }
        let (name, tag) = (get.head.short().0, get.tag);
        if matches!(get.failed, Some(TierError::Corrupt { .. }))
            && self.objects.get(&name).is_some_and(|object| object.head == get.head)
        {
            self.stats.corrupt += 1;
            self.take_down(name);
            self.done.push_back(BlobLogEvent::Dropped(keys::listing(get.head, tag)));
        }
        let found = match get.failed {
            None => Ok((opened.unwrap_or_default(), get.value)),
            Some(TierError::Corrupt { .. }) => Err(BlobReadError::Damaged),
            Some(TierError::Absent) => Err(BlobReadError::Absent),
            Some(_) => Err(BlobReadError::Failed),
        };
        self.done.push_back(BlobLogEvent::Got(get.token, found));
    }
}
