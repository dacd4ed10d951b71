//! State shared by all paths of one transport, and the memories of one peer.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::ShmConfig;
use super::channel::{Channel, MemoryNotice, Packet};
use super::windows::Windows;
use crate::mover::greeting::{Greeting, Purpose};
use crate::mover::reactor::Pool;
use crate::mover::registry::Registry;
use crate::mover::{Exposure, Fault, Location, Memory, NoticeReceiver};

/// Memories that one peer may make us map.
const SEGMENTS_MAX: usize = 1_024;
/// Bytes that are copied at a time, and that a permit is held for.
pub(super) const CHUNK_BYTES: u64 = 256 << 10;

pub(super) struct Site {
    pub(super) config: ShmConfig,
    pub(super) pool: Arc<Pool>,
    pub(super) exposure: Arc<Exposure>,
    pub(super) inbound: Arc<dyn NoticeReceiver>,
    pub(super) registry: Registry,
    pub(super) windows: Windows,
    /// Paths that peers have opened.
    pub(super) served: AtomicUsize,
    /// The receiver of memories.
    pub(super) channels: Mutex<Vec<Weak<Channel>>>,
}

impl Site {
    /// A greeting from here.
    pub(super) fn greeting(&self, purpose: Purpose, to_epoch: u64, text: String) -> Greeting {
        Greeting {
            purpose,
            to_epoch,
            from_epoch: self.config.epoch,
            session: 0,
            slice_bytes_max: self.config.slice_bytes_max,
            outstanding_max: self.config.outstanding_max,
            credit_bytes: self.config.credit_bytes,
            text,
        }
    }

    fn channels(&self) -> MutexGuard<'_, Vec<Weak<Channel>>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a new peer every memory, and adds it to the receivers of later ones.
    pub(super) fn introduce(&self, channel: &Arc<Channel>) -> io::Result<()> {
        // Held over both, so that none is missed in between; a memory announced twice does no harm.
        let mut channels = self.channels();
        channels.retain(|known| known.strong_count() > 0);
        channels.push(Arc::downgrade(channel));
        let all = self.registry.all().into_iter();
        all.map(|(number, memory)| MemoryNotice::Shared(number, memory))
            .try_for_each(|notice| channel.announce(notice))
    }

    /// Takes a memory, and announces it to all peers.
    pub(super) fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault> {
        if memory.file().is_none() {
            let text = "peers cannot map private memory; make it with Memory::shared";
            return Err(Fault::Invalid(text.into()));
        }
        let channels = self.channels();
        let added = self.registry.add(memory);
        for channel in channels.iter().filter_map(Weak::upgrade) {
            let mut told =
                added.gone.iter().try_for_each(|number| channel.announce(MemoryNotice::Forgotten(*number)));
            if added.new {
                told =
                    told.and_then(|()| channel.announce(MemoryNotice::Shared(added.number, memory.clone())));
            }
            if told.is_err() {
                // A peer that misses the news would refuse slices for no reason, so its path is broken instead.
                channel.give_up();
            }
        }
        Ok(())
    }
}

/// The memories of a peer, as far as it has announced them.
#[derive(Default)]
pub(super) struct Segments {
    mapped: BTreeMap<u32, Arc<Memory>>,
    /// The highest number announced; numbers rise.
    told: u32,
}

/// A memory of a peer.
pub(super) enum Segment {
    Mapped(Arc<Memory>),
    /// The peer has yet to tell of it.
    Awaited,
    /// It is gone, or never was.
    Unknown,
}

impl Segments {
    /// The memory of a number.
    ///
    /// # Errors
    /// As the channel; it is read when the number is not known yet.
    pub(super) fn get(&mut self, number: u32, channel: &Channel) -> io::Result<Segment> {
        if !self.mapped.contains_key(&number) {
            self.take(channel)?;
        }
        Ok(match self.mapped.get(&number) {
            Some(memory) => Segment::Mapped(memory.clone()),
            None if number > self.told => Segment::Awaited,
            None => Segment::Unknown,
        })
    }

    /// Whether it is known and not gone.
    pub(super) fn holds(&self, number: u32) -> bool {
        self.mapped.contains_key(&number)
    }

    /// Takes the peer's news.
    ///
    /// # Errors
    /// As the channel; and when a file cannot be mapped or there are too many.
    pub(super) fn take(&mut self, channel: &Channel) -> io::Result<()> {
        while let Some(packet) = channel.next()? {
            if let Packet::Segment { number, .. } = packet {
                self.told = self.told.max(number);
            }
            match packet {
                Packet::Segment { number, bytes, file } if !self.mapped.contains_key(&number) => {
                    if self.mapped.len() >= SEGMENTS_MAX {
                        return Err(io::Error::other("the peer has more memories than can be mapped"));
                    }
                    let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
                    self.mapped.insert(number, Memory::foreign(file, bytes, Location::Anywhere)?);
                }
                Packet::Segment { .. } => {}
                Packet::Forget { number } => {
                    self.mapped.remove(&number);
                }
            }
        }
        Ok(())
    }
}

/// From where to where a chunk is copied.
pub(super) struct Chunk<'a> {
    pub(super) from: &'a Memory,
    pub(super) from_at: u64,
    pub(super) to: &'a Memory,
    pub(super) to_at: u64,
    pub(super) bytes: u64,
}

impl Chunk<'_> {
    /// Copies it; false when it was to be verified and differs.
    pub(super) fn copy(&self, verify: bool, config: &ShmConfig) -> bool {
        let before = verify.then(|| self.from.checksum(self.from_at, self.bytes));
        Memory::copy(self.from, self.from_at, self.to, self.to_at, self.bytes);
        config.damage.strike(self.to, self.to_at);
        before.is_none_or(|sum| sum == self.to.checksum(self.to_at, self.bytes))
    }
}
