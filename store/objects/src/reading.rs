//! Reading under a lease.

use std::sync::{Arc, Weak};

use crc_fast::{CrcAlgorithm, Digest};

use crate::arena::ArenaMemory;
use crate::refusal::Refusal;
use crate::shard::LeasedValue;
use crate::store::{ObjectStat, ObjectStore};

/// A value that is being read, in as many steps as it takes.
///
/// The value stays until this is dropped, but no longer than the read lease: after that the store may take the
/// memory, though never in the middle of a step. The next step then fails with [`Refusal::Revoked`]; bytes of
/// another value are never seen.
#[derive(Debug)]
pub struct Reading {
    store: ObjectStore,
    shard: usize,
    number: u32,
    room: Weak<ArenaMemory>,
    stat: ObjectStat,
}

impl Reading {
    pub(crate) fn new(store: ObjectStore, shard: usize, opened: LeasedValue) -> Self {
        Self { store, shard, number: opened.number, room: opened.room, stat: opened.stat }
    }

    /// The facts about the value at the moment of opening.
    #[must_use]
    pub fn stat(&self) -> &ObjectStat {
        &self.stat
    }

    /// Length of the value.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.stat.bytes as usize
    }

    /// The memory, kept while the answer lives: for one step that does not wait.
    pub(crate) fn hold(&self) -> Result<Arc<ArenaMemory>, Refusal> {
        self.room.upgrade().ok_or(Refusal::Revoked)
    }

    /// Renews the lease, for a reader that goes on reading.
    #[cfg(feature = "resp")]
    pub(crate) fn renew(&self, now_us: u64) {
        self.store.shard(self.shard).renew_reader((self.number, self.stat.generation), now_us);
    }

    /// Calls `look` with the slices of the value, in order. It must not wait: the memory stays meanwhile.
    ///
    /// # Errors
    /// [`Refusal::Revoked`].
    pub fn visit<R>(&self, look: impl FnOnce(&mut dyn Iterator<Item = &[u8]>) -> R) -> Result<R, Refusal> {
        let room = self.hold()?;
        Ok(look(&mut room.slices()))
    }

    /// Copies from byte `offset` on, as much as there is and as fits. Returns how much.
    ///
    /// # Errors
    /// [`Refusal::Revoked`].
    pub fn copy_to(&self, offset: usize, into: &mut [u8]) -> Result<usize, Refusal> {
        Ok(copy_out(&*self.hold()?, offset, into))
    }

    /// The whole value.
    ///
    /// # Errors
    /// [`Refusal::Revoked`].
    pub fn to_vec(&self) -> Result<Vec<u8>, Refusal> {
        let mut copy = Vec::with_capacity(self.bytes());
        self.visit(|slices| slices.for_each(|slice| copy.extend_from_slice(slice)))?;
        Ok(copy)
    }

    /// Compares the value with its checksum; one without passes.
    ///
    /// # Errors
    /// [`Refusal::Corrupt`], [`Refusal::Revoked`].
    pub fn verify(&self) -> Result<(), Refusal> {
        let found = room_checksum(&*self.hold()?);
        match self.stat.checksum {
            Some(expected) if expected != found => Err(Refusal::Corrupt { expected, found }),
            _ => Ok(()),
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.store.shard(self.shard).close(self.number, self.stat.generation);
    }
}

/// Copies from byte `offset` of a value on. Returns how much.
pub(crate) fn copy_out(room: &ArenaMemory, offset: usize, into: &mut [u8]) -> usize {
    let (mut skip, mut done) = (offset, 0);
    for slice in room.slices() {
        let from = &slice[skip.min(slice.len())..];
        skip -= slice.len().min(skip);
        let bytes = from.len().min(into.len() - done);
        into[done..done + bytes].copy_from_slice(&from[..bytes]);
        done += bytes;
        if done == into.len() {
            break;
        }
    }
    done
}

/// CRC-32C of a value.
pub(crate) fn room_checksum(room: &ArenaMemory) -> u32 {
    let mut slices = room.slices();
    let (first, second) = (slices.next().unwrap_or_default(), slices.next());
    let Some(second) = second else { return crate::checksum(first) };
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    [first, second].into_iter().chain(slices).for_each(|slice| digest.update(slice));
    u32::try_from(digest.finalize()).expect("a CRC of 32 bits")
}
