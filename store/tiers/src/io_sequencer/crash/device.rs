//! A disk with a cache that forgets: writes last once they are flushed, and any of them, or any
//! part of them, may last earlier. Operations end in any order, and some fail.

use crate::aligned::AlignedBuffer;
use crate::io_sequencer::{Op, OpKind};
use crate::queue::Completion;
use baton_types::Rng;
use std::io;

/// Bytes that a disk writes at once or not at all.
const SECTOR_BYTES: usize = 512;

#[derive(Debug)]
struct InFlightOp {
    op: Op,
    /// A flush covers as many of the cached writes.
    covers: usize,
}

/// A disk whose unflushed writes a crash may lose.
#[derive(Debug)]
pub(crate) struct Device {
    lasting: Vec<u8>,
    cached: Vec<(u64, Vec<u8>)>,
    flying: Vec<InFlightOp>,
    /// From here on a power cut may leave a sector that is neither old nor new.
    garbles_from: u64,
}

fn put(bytes: &mut [u8], offset: u64, written: &[u8]) {
    bytes[offset as usize..offset as usize + written.len()].copy_from_slice(written);
}

/// A write of which each sector is there or not, or is nothing of either.
fn tear(bytes: &mut [u8], offset: u64, written: &[u8], (rng, may_garble): (&mut Rng, bool)) {
    let garbles = may_garble && rng.below(8) == 0;
    for (at, sector) in written.chunks(SECTOR_BYTES).enumerate() {
        let offset = offset + (at * SECTOR_BYTES) as u64;
        match rng.below(if garbles { 3 } else { 2 }) {
            0 => {}
            1 => put(bytes, offset, sector),
            _ => put(bytes, offset, &vec![rng.below(256) as u8; sector.len()]),
        }
    }
}

impl Device {
    pub(crate) fn new(lasting: Vec<u8>, garbles_from: u64) -> Self {
        Self { lasting, cached: Vec::new(), flying: Vec::new(), garbles_from }
    }

    pub(crate) fn garbles_from(&self) -> u64 {
        self.garbles_from
    }

    pub(crate) fn lasting(&self) -> &[u8] {
        &self.lasting
    }

    pub(crate) fn submit(&mut self, op: Op) {
        self.flying.push(InFlightOp { op, covers: self.cached.len() });
    }

    /// One of the operations under way ends.
    pub(crate) fn complete_any(&mut self, rng: &mut Rng, may_fail: bool) -> Option<Completion> {
        if self.flying.is_empty() {
            return None;
        }
        let at = rng.below(self.flying.len() as u64) as usize;
        let InFlightOp { op, covers } = self.flying.swap_remove(at);
        let Op { token, kind, offset, mut buffer } = op;
        let fails = may_fail && rng.below(50) == 0;
        match kind {
            OpKind::Read => self.read(offset, &mut buffer),
            OpKind::Write if fails => {
                let mut torn = self.as_read(offset, buffer.len());
                tear(&mut torn, 0, &buffer, (rng, false));
                self.cached.push((offset, torn));
            }
            OpKind::Write => self.cached.push((offset, buffer.to_vec())),
            // A flush that fails may have done its work, but not even that is known.
            OpKind::Flush if fails && rng.below(2) == 0 => {}
            OpKind::Flush => {
                for (offset, written) in self.cached.drain(..covers) {
                    put(&mut self.lasting, offset, &written);
                }
            }
        }
        let result = if fails { Err(io::Error::other("it failed")) } else { Ok(()) };
        Some(Completion { token, result, buffer })
    }

    /// The content of the disk after a power cut at this moment.
    pub(crate) fn after_power_cut(&self, rng: &mut Rng) -> Self {
        let mut lasting = self.lasting.clone();
        let flying = self.flying.iter().filter(|flying| flying.op.kind == OpKind::Write);
        let flying = flying.map(|flying| (flying.op.offset, &flying.op.buffer[..]));
        let cached = self.cached.iter().map(|(offset, written)| (*offset, &written[..]));
        for (offset, written) in cached.chain(flying) {
            match rng.below(3) {
                0 => {}
                1 => put(&mut lasting, offset, written),
                _ => tear(&mut lasting, offset, written, (rng, offset >= self.garbles_from)),
            }
        }
        Self::new(lasting, self.garbles_from)
    }

    fn as_read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = AlignedBuffer::new(len);
        self.read(offset, &mut out);
        out.to_vec()
    }

    fn read(&self, offset: u64, out: &mut [u8]) {
        let from = offset as usize;
        out.copy_from_slice(&self.lasting[from..from + out.len()]);
        for (_, written) in self.cached.iter().filter(|(at, _)| *at == offset) {
            out.copy_from_slice(written);
        }
    }
}
