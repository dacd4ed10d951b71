//! The tiers below memory: a file on an SSD, and a bucket below that.
//!
//! A thread of its own copies an object down on the first or second touch, while the object is still in memory. So
//! eviction costs nothing, and a put waits for no disk. A read that misses in memory brings the object up again, once
//! for all concurrent readers. A copy below always holds the value that was sealed last: sealing another value or
//! removing the key drops it in the same step.

mod below;
mod brought;
mod budget;
mod cold;
mod directory;
mod flights;
mod pulse;
mod record;
mod ssd;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use baton_tiers::BlobLogStats;
pub(crate) use below::{LowerView, Origin, name_of};
pub use brought::BroughtValue;
pub use cold::{ColdBucket, ColdConfig, ColdStats};
#[cfg(feature = "resp")]
pub(crate) use cold::{ColdTier, Page};
pub(crate) use cold::{Offer, total_bytes};
pub(crate) use directory::{ForgottenCopies, Removal};
use flights::Flights;
pub(crate) use flights::Waiter;
#[cfg(feature = "resp")]
pub(crate) use ssd::Names;
use ssd::{Order, SsdThread};

use baton_types::TenantId;

use crate::key::Key;
use crate::shard::PickedObject;
use crate::store::ObjectStore;

/// When an object is copied to the SSD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdmissionRule {
    /// When it is put.
    First,
    /// When it is read after that, or put again though it was evicted.
    #[default]
    Second,
}

/// The file on an SSD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SsdConfig {
    /// Folder of the file, one for each store.
    pub dir: PathBuf,
    /// Room for values and their headers, bytes.
    pub capacity_bytes: u64,
    /// The unit in which it is given out, bytes; a multiple of 4096. None: as the file of an earlier start has it, and
    /// [`SsdConfig::BLOCK_BYTES`] for a new one.
    pub block_bytes: Option<usize>,
    /// The objects to copy to the SSD.
    pub admit: AdmissionRule,
}

impl SsdConfig {
    /// A page more than 64 KiB: so a value of 64 KiB, 128 KiB ... 1 MiB takes one block for each 64 KiB, and its header
    /// none of its own.
    pub const BLOCK_BYTES: usize = 68 << 10;

    /// Sensible settings of a file in this folder.
    #[must_use]
    pub fn new(dir: PathBuf, capacity_bytes: u64) -> Self {
        Self { dir, capacity_bytes, block_bytes: None, admit: AdmissionRule::default() }
    }

    /// Size and number of the blocks, where an earlier start left a file of blocks of this size and number.
    fn blocks(&self, left: Option<(usize, u32)>) -> Result<(usize, u32), String> {
        let kept = left.filter(|(bytes, blocks)| self.fits(*bytes) == *blocks).map(|(bytes, _)| bytes);
        let block_bytes = self.block_bytes.or(kept).unwrap_or(Self::BLOCK_BYTES);
        if !block_bytes.is_multiple_of(4096) || !(4096..=16 << 20).contains(&block_bytes) {
            return Err("ssd: block_bytes: give a multiple of 4096 up to 16777216".into());
        }
        let blocks = self.fits(block_bytes);
        if (4..=1 << 28).contains(&blocks) {
            Ok((block_bytes, blocks))
        } else {
            Err("ssd: capacity_bytes: give from 4 to 268435456 blocks".into())
        }
    }

    fn fits(&self, block_bytes: usize) -> u32 {
        u32::try_from(self.capacity_bytes / block_bytes as u64).unwrap_or(u32::MAX)
    }
}

/// Hears in words what an operator should know.
pub type OperatorLog = Arc<dyn Fn(&str) + Send + Sync>;

/// The tiers below the memory.
#[derive(Clone, Default)]
pub struct LowerConfig {
    /// The file on an SSD.
    pub ssd: Option<SsdConfig>,
    /// The bucket.
    pub cold: Option<ColdConfig>,
    /// The receiver of errors.
    pub log: Option<OperatorLog>,
}

impl fmt::Debug for LowerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ssd, cold) = (&self.ssd, &self.cold);
        f.debug_struct("LowerConfig").field("ssd", ssd).field("cold", cold).finish_non_exhaustive()
    }
}

/// Counters of the tiers below since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LowerStats {
    /// The file.
    pub ssd: BlobLogStats,
    /// Whether there is one, and it is written to.
    pub ssd_on: bool,
    /// Reads that memory missed and the SSD answered.
    pub ssd_hits: u64,
    /// Bytes of values that they gave.
    pub ssd_hit_bytes: u64,
    /// Objects to be copied down that were not, for too many waited.
    pub passed_over: u64,
    /// Reads that were not made, for the disk did not answer earlier ones.
    pub unasked: u64,
    /// Removals that the disk did not confirm: what was removed may be back after a restart.
    pub unconfirmed: u64,
    /// Bytes of those that wait beside it for their readers.
    pub beside_bytes: u64,
    /// Hits below that were answered as misses: neither memory nor what may be beside it had room.
    pub let_go: u64,
    /// The bucket.
    pub cold: ColdStats,
    /// Removals that the bucket did not confirm in time: each is tried again as long as the process lives.
    pub cold_unconfirmed: u64,
}

impl LowerStats {
    /// Bytes written to the SSD for each byte of a value that it gave back: what wears it out for what it saves.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn written_per_hit_byte(&self) -> f64 {
        self.ssd.written_bytes as f64 / self.ssd_hit_bytes.max(1) as f64
    }
}

/// The SSD or the bucket does not answer, so its content is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoAnswerError;

/// A value from below.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FoundValue {
    /// Its bytes, verified.
    pub(crate) value: Vec<u8>,
    /// Its CRC-32C, if one was kept.
    pub(crate) checksum: Option<u32>,
}

/// The tiers of one store, with their threads; they end with it.
pub(crate) struct LowerTiers {
    pub(crate) below: Arc<LowerView>,
    flights: Flights,
    ssd: Option<SsdThread>,
}

impl fmt::Debug for LowerTiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lower").finish_non_exhaustive()
    }
}

/// The tiers below, which the shards need at creation, and the opened file.
pub(crate) struct LowerSetup {
    pub(crate) below: Arc<LowerView>,
    blob_log: Option<baton_tiers::BlobLog>,
    orders: std::sync::mpsc::Receiver<Order>,
}

/// Memory that values on their way down may keep though they were evicted: a part of all, and a most.
const IN_HAND_PART: u64 = 16;
const IN_HAND_MAX_BYTES: u64 = 64 << 20;

/// Bytes that are read from a tier below at a time, and that wait for their readers though memory has no room for them:
/// a part of the memory, and a least and a most. One value alone may have more.
const READING_PART: u64 = 8;
const READING_BYTES: std::ops::RangeInclusive<u64> = 16 << 20..=256 << 20;

/// Opens the configured tiers. Where a file or a bucket is unusable, this reports it and the store runs without it.
pub(crate) fn open(
    config: &LowerConfig,
    capacity_bytes: u64,
    value_max_bytes: u64,
) -> Result<Option<LowerSetup>, String> {
    let in_hand_max_bytes = (capacity_bytes / IN_HAND_PART).min(IN_HAND_MAX_BYTES);
    let log = config.log.clone().unwrap_or_else(|| Arc::new(|_| ()));
    let mut blob_log = None;
    if let Some(ssd) = &config.ssd {
        match ssd::open(ssd, ssd.blocks(ssd::left_in(&ssd.dir))?) {
            Ok((opened, words)) => {
                log(&words);
                blob_log = Some(opened);
            }
            Err(why) => {
                log(&format!("{why}; the store goes on in memory alone{}", ssd::pass_by(&ssd.dir)));
            }
        }
    }
    let reading_max_bytes =
        (capacity_bytes / READING_PART).clamp(*READING_BYTES.start(), *READING_BYTES.end());
    let in_bytes = (in_hand_max_bytes, reading_max_bytes);
    let open = |cold| cold::open(cold, in_bytes, value_max_bytes, &log);
    let cold = config.cold.as_ref().map(open).transpose()?.flatten();
    if blob_log.is_none() && cold.is_none() {
        return Ok(None);
    }
    let after = config.ssd.as_ref().filter(|_| blob_log.is_some()).map(|ssd| match ssd.admit {
        AdmissionRule::First => 0,
        AdmissionRule::Second => 1,
    });
    let (send, orders) = std::sync::mpsc::channel();
    let below = Arc::new(LowerView::new(send, after, in_bytes, (cold, log)));
    Ok(Some(LowerSetup { below, blob_log, orders }))
}

impl LowerSetup {
    /// Starts the threads. `pick` gives the next object that is to be copied down.
    pub(crate) fn start(
        self,
        pick: impl FnMut() -> Option<PickedObject> + Send + 'static,
    ) -> Result<Arc<LowerTiers>, String> {
        let Self { below, blob_log, orders } = self;
        let start = |blob_log| SsdThread::start(blob_log, orders, Arc::clone(&below), Box::new(pick));
        let ssd = blob_log.map(start).transpose()?;
        Ok(Arc::new(LowerTiers { below, flights: Flights::default(), ssd }))
    }
}

impl LowerTiers {
    /// Asks the tiers for a value; `waiter` is called once with the result, from any thread. A found value is in
    /// memory by then, if there is room.
    pub(crate) fn bring(&self, store: &ObjectStore, key: Key<'_>, waiter: Waiter) {
        let Some(name) = store.name_of(key).filter(|name| self.may_hold(*name)) else {
            return waiter(None);
        };
        let tag = self.below.directory.tag(name);
        let is_stalled = tag.is_some() && self.below.pulse.is_stalled();
        if is_stalled {
            self.below.count_unasked();
            // It would wait for the same disk.
            if self.flights.is_under_way(key) {
                return waiter(None);
            }
        }
        let Some(waiter) = self.flights.join(key, waiter) else { return };
        // The first flies for all.
        if !self.flights.begin(key, waiter) {
            return;
        }
        let flight = Flight { store: store.clone(), tenant: key.tenant, key: key.bytes.to_vec(), name };
        match tag.filter(|_| !is_stalled) {
            Some(tag) => {
                let asked = self.below.pulse.start();
                let reply = move |read| {
                    drop(asked);
                    flight.left_ssd(read, tag);
                };
                self.below.send(Order::Get { name, reply: Box::new(reply) });
            }
            None => flight.go_on(),
        }
    }

    /// Whether a key may be below, as far as that is known without a look.
    pub(crate) fn may_hold(&self, name: u64) -> bool {
        self.below.may_hold(name)
    }

    /// Whether the bucket has the value of this name.
    pub(crate) fn is_cold(&self, name: u64) -> bool {
        self.below.cold.as_ref().is_some_and(|cold| cold.holds(name))
    }

    /// Whether the value of this name is on the SSD for good.
    pub(crate) fn lasts(&self, name: u64) -> bool {
        self.below.directory.tag(name).is_some()
    }

    /// Waits until what waited to be copied down is there, at most so long. False when it is not.
    pub(crate) fn settle(&self, at_most: Duration) -> bool {
        let (send, receive) = std::sync::mpsc::channel();
        self.below.send(Order::Settle(Box::new(move || _ = send.send(()))));
        let ssd = self.ssd.is_none() || receive.recv_timeout(at_most).is_ok();
        self.below.cold.as_ref().is_none_or(|cold| cold.settle(at_most)) && ssd
    }

    /// Keys below from a name on, at most so many: tenant's name and key of each, and the name to go on after.
    #[cfg(feature = "resp")]
    pub(crate) fn list(&self, after: Option<u64>, most: usize, reply: ssd::ListReply) {
        if self.ssd.is_none() {
            return reply(Ok((Vec::new(), None)));
        }
        if self.below.pulse.is_stalled() {
            return reply(Err(NoAnswerError));
        }
        let asked = self.below.pulse.start();
        let reply = Box::new(move |listed| {
            drop(asked);
            reply(listed);
        });
        self.below.send(Order::List { after, most, reply });
    }

    pub(crate) fn stats(&self) -> LowerStats {
        self.below.stats()
    }
}

/// One read below on its way.
struct Flight {
    store: ObjectStore,
    tenant: TenantId,
    key: Vec<u8>,
    name: u64,
}

impl Flight {
    /// The SSD has answered; what it has not may be further down.
    fn left_ssd(self, read: Option<(Vec<u8>, Vec<u8>)>, tag: u64) {
        let named = self.store.tenant_name(self.tenant);
        let found = read.and_then(|(header, value)| record::open(&header, value, &named, &self.key));
        let name = self.name;
        let placed = found.and_then(|found| self.place(found, Origin::Ssd { name, tag }));
        match placed {
            Some(found) => {
                self.lower().below.count_hit(found.bytes());
                self.land(Some(&found));
            }
            None => self.go_on(),
        }
    }

    /// Nothing nearer than the bucket has it.
    fn go_on(self) {
        let (name, below) = (self.name, Arc::clone(&self.lower().below));
        let Some(cold) = &below.cold else { return self.land(None) };
        let whose = (self.store.tenant_name(self.tenant), self.key.clone());
        let reply = move |read: Option<(FoundValue, u64)>| {
            let placed = read.and_then(|(found, tag)| self.place(found, Origin::Cold { name, tag }));
            if let (Some(found), Some(cold)) = (&placed, &self.lower().below.cold) {
                cold.count_hit(found.bytes());
            }
            self.land(placed.as_ref());
        };
        cold.read(name, whose, Box::new(reply));
    }

    fn lower(&self) -> &Arc<LowerTiers> {
        self.store.lower().expect("flights are of stores with tiers below")
    }

    fn key(&self) -> Key<'_> {
        Key { tenant: self.tenant, bytes: &self.key }
    }

    /// Places the found value in memory, if it is still the key's value.
    fn place(&self, found: FoundValue, origin: Origin) -> Option<Arc<BroughtValue>> {
        self.store.place_found(self.key(), found, origin)
    }

    fn land(&self, found: Option<&Arc<BroughtValue>>) {
        self.lower().flights.land(self.key(), found);
    }
}

impl Drop for LowerTiers {
    fn drop(&mut self) {
        self.below.send(Order::Stop);
        if let Some(thread) = self.ssd.take() {
            thread.join();
        }
    }
}
