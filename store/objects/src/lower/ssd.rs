//! The thread that keeps the file: it copies down what shards offer, reads, and removes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_tiers::{
    BlobLog, BlobLogEvent, BlobLogOptions, BlobReadError, FlashError, IoChoice, PutError, Record, Source,
};

use super::below::LowerView;
use super::{NoAnswerError, Removal, SsdConfig, record};
use crate::arena::ArenaMemory;
use crate::reading::copy_out;
use crate::shard::PickedObject;

/// Stands for the meaning of names and headers.
const FINGERPRINT: u64 = 0x0001_7363_656A_626F;
/// A sleeping worker looks for work this often, even without a wake-up.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Header and value, or nothing.
pub(crate) type ReadReply = Box<dyn FnOnce(Option<(Vec<u8>, Vec<u8>)>) + Send>;
/// Tenants' names and keys, and the name after which to go on; none at the end.
pub(crate) type Names = (Vec<(String, Vec<u8>)>, Option<u64>);
/// Some names, all of them in order; or the disk did not give one.
pub(crate) type ListReply = Box<dyn FnOnce(Result<Names, NoAnswerError>) + Send>;

/// Orders to the SSD's worker.
pub(crate) enum Order {
    /// There is something to do.
    Wake,
    /// Read a value.
    Get { name: u64, reply: ReadReply },
    /// Take a value away, and tell when it cannot come back.
    Remove { name: u64, removal: Removal },
    /// Read the headers of values.
    #[cfg_attr(not(feature = "resp"), expect(dead_code, reason = "the server alone asks for lists"))]
    List { after: Option<u64>, most: usize, reply: ListReply },
    /// Tell when all that was offered has been seen to.
    Settle(Box<dyn FnOnce() + Send>),
    /// Stop the worker.
    Stop,
}

struct FromMemory(Arc<ArenaMemory>);

impl Source for FromMemory {
    fn copy(&self, offset: usize, into: &mut [u8]) {
        copy_out(&self.0, offset, into);
    }
}

/// Size and number of the blocks of the file that an earlier start left.
pub(super) fn left_in(dir: &Path) -> Option<(usize, u32)> {
    BlobLog::blocks_in(dir, FINGERPRINT)
}

/// Opens the file of blocks of this size and number; what is to be said about it.
pub(super) fn open(
    config: &SsdConfig,
    (block_bytes, capacity_blocks): (usize, u32),
) -> Result<(BlobLog, String), String> {
    let (dir, fingerprint) = (&config.dir, FINGERPRINT);
    let options = BlobLogOptions { dir, capacity_blocks, block_bytes, fingerprint, io: IoChoice::Auto };
    match BlobLog::open(&options) {
        Ok((blob_log, speed)) => {
            let (beginning, device) = blob_log.beginning();
            let speed = speed.map_or(String::new(), |speed| {
                let rate = |bytes: u64| bytes / 1_000_000;
                let (write, read) = (rate(speed.write_bytes_per_s), rate(speed.read_bytes_per_s));
                format!(", writes {write} MB/s, reads {read} MB/s")
            });
            let objects = blob_log.stats().values;
            let words = format!("ssd: {}: {beginning}, {objects} objects; {device}{speed}", dir.display());
            Ok((blob_log, words))
        }
        Err(FlashError::NoRoom { file_bytes, why }) => Err(format!(
            "ssd: {}: no room for {file_bytes} bytes ({why}); give less or free some",
            dir.display()
        )),
        Err(error) => Err(format!("ssd: {}: {error}", dir.display())),
    }
}

/// Marks a file that this start could not use, so that the next start that can use it empties it. Otherwise it would
/// bring back values that are removed or replaced meanwhile. Returns the text for the log.
pub(super) fn pass_by(dir: &Path) -> String {
    match BlobLog::pass_by(dir) {
        Ok(true) => "; the file is marked: the next start that can use it empties it".into(),
        Ok(false) => String::new(),
        Err(why) => format!(
            "; the file could not be marked as passed by ({why}): remove it before the next start, or values that are \
             removed or replaced meanwhile are back"
        ),
    }
}

/// The thread.
pub(super) struct SsdThread {
    thread: JoinHandle<()>,
}

impl SsdThread {
    pub(super) fn start(
        blob_log: BlobLog,
        orders: Receiver<Order>,
        below: Arc<LowerView>,
        pick: Box<dyn FnMut() -> Option<PickedObject> + Send>,
    ) -> Result<Self, String> {
        let mut worker = SsdWorker {
            blob_log,
            orders,
            below,
            pick,
            in_hand_bytes: 0,
            in_hand: BTreeSet::new(),
            asked: Vec::new(),
            gets: VecDeque::new(),
            reading: BTreeMap::new(),
            reading_bytes: 0,
            weights: BTreeMap::new(),
            removing: BTreeMap::new(),
            settling: Vec::new(),
            next_token: 0,
            is_over: false,
            given_up: AbandonState::No,
            ended: 0,
            failures: 0,
        };
        let listed_tags: Vec<_> = worker.blob_log.listings().collect();
        listed_tags.iter().for_each(|one| worker.below.directory.adopt(one.name, one.tag));
        worker.publish();
        let thread = std::thread::Builder::new().name("objects-ssd".into()).spawn(move || worker.run());
        let thread = thread.map_err(|e| format!("ssd: start a thread: {e}; lower the number of threads"))?;
        Ok(Self { thread })
    }

    /// Waits for its end, unless it is that thread that asks.
    pub(super) fn join(self) {
        if self.thread.thread().id() != std::thread::current().id() {
            // A thread that panicked has said so.
            let _ = self.thread.join();
        }
    }
}

/// A read that was asked for.
enum ReadRequest {
    Value(ReadReply),
    /// One header of a list.
    Header(u64),
}

/// A list that was asked for and is not begun.
struct AskedListing {
    after: Option<u64>,
    most: usize,
    reply: ListReply,
    /// The last copy that was in hand. The beginning of a list waits for its end: a value that memory has evicted
    /// meanwhile is nowhere else.
    behind: Option<u64>,
}

/// A list under way.
struct PendingListing {
    found: Vec<(String, Vec<u8>)>,
    left: usize,
    next: Option<u64>,
    /// The disk did not give one of the headers.
    is_short: bool,
    reply: ListReply,
}

/// The state of giving up a file whose disk failed too often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AbandonState {
    /// It is in use.
    No,
    /// It is to be taken away, which failed last at this moment.
    Failed(Instant),
    /// No start finds it again: what was removed cannot come back.
    Yes,
}

struct SsdWorker {
    blob_log: BlobLog,
    orders: Receiver<Order>,
    below: Arc<LowerView>,
    pick: Box<dyn FnMut() -> Option<PickedObject> + Send>,
    in_hand_bytes: u64,
    /// Numbers of the copies that are being written.
    in_hand: BTreeSet<u64>,
    asked: Vec<AskedListing>,
    gets: VecDeque<(u64, ReadRequest)>,
    reading: BTreeMap<u64, ReadRequest>,
    /// Bytes of the values that are being read, and of each.
    reading_bytes: u64,
    weights: BTreeMap<u64, u64>,
    removing: BTreeMap<u64, (u64, Removal)>,
    settling: Vec<Box<dyn FnOnce() + Send>>,
    next_token: u64,
    is_over: bool,
    given_up: AbandonState,
    /// Blocks that the disk had read and written when it was looked at.
    ended: u64,
    failures: u64,
}

impl SsdWorker {
    fn run(&mut self) {
        let mut lists: BTreeMap<u64, PendingListing> = BTreeMap::new();
        loop {
            while let Ok(order) = self.orders.try_recv() {
                self.take(order);
            }
            self.copy_down();
            self.read_on();
            self.blob_log.pump();
            while let Some(done) = self.blob_log.next_done() {
                self.on_event(done, &mut lists);
            }
            self.begin_lists(&mut lists);
            self.publish();
            if self.is_over && !self.blob_log.is_waiting() {
                return self.end();
            }
            if self.blob_log.is_waiting() {
                self.blob_log.wait();
            } else if self.is_quiet() {
                self.settling.drain(..).for_each(|callback| callback());
                self.sleep();
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.gets.is_empty() && (self.below.offered.load(Ordering::SeqCst) == 0 || self.blob_log.is_off())
    }

    fn sleep(&mut self) {
        self.below.asleep.store(true, Ordering::SeqCst);
        if self.is_quiet() {
            match self.orders.recv_timeout(LOOK_EVERY) {
                Ok(order) => self.take(order),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.is_over = true,
            }
        }
        self.below.asleep.store(false, Ordering::SeqCst);
    }

    /// Ends the worker and answers every waiter.
    fn end(&mut self) {
        self.below.directory.clear();
        self.removing.values().for_each(|(_, removal)| removal.give_up());
        self.settling.drain(..).for_each(|callback| callback());
        let reads =
            self.gets.drain(..).map(|(_, read)| read).chain(std::mem::take(&mut self.reading).into_values());
        for read in reads {
            if let ReadRequest::Value(reply) = read {
                reply(None);
            }
        }
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Wake => {}
            Order::Get { name, reply } => self.gets.push_back((name, ReadRequest::Value(reply))),
            Order::Remove { name, removal } => {
                let token = self.token();
                self.removing.insert(token, (name, removal));
                self.blob_log.remove(name, token);
            }
            Order::List { after, most, reply } => {
                let behind = self.in_hand.last().copied().filter(|_| after.is_none());
                self.asked.push(AskedListing { after, most, reply, behind });
            }
            Order::Settle(callback) => self.settling.push(callback),
            Order::Stop => self.is_over = true,
        }
    }

    /// Begins the lists that wait for no copy.
    fn begin_lists(&mut self, lists: &mut BTreeMap<u64, PendingListing>) {
        let (first, is_off) = (self.in_hand.first().copied(), self.blob_log.is_off());
        let waits = |one: &AskedListing| !is_off && first.is_some() && one.behind >= first;
        let (waiting, ready) = std::mem::take(&mut self.asked).into_iter().partition(waits);
        self.asked = waiting;
        for AskedListing { after, most, reply, .. } in ready {
            let names = self.blob_log.names_after(after, most);
            let (left, next) = (names.len(), names.last().copied().filter(|_| names.len() == most));
            if names.is_empty() {
                reply(Ok((Vec::new(), None)));
                continue;
            }
            let list = self.token();
            lists.insert(list, PendingListing { found: Vec::new(), left, next, is_short: false, reply });
            self.gets.extend(names.into_iter().map(|name| (name, ReadRequest::Header(list))));
        }
    }

    /// Takes up what shards offer, as much as there may be in hand.
    fn copy_down(&mut self) {
        while self.blob_log.takes_put()
            && !self.blob_log.is_off()
            && self.in_hand_bytes < self.below.in_hand_max_bytes
            && self.below.offered.load(Ordering::SeqCst) > 0
            && let Some(picked) = (self.pick)()
        {
            let PickedObject { name, tag, tenant, key, room, checksum } = picked;
            self.in_hand.insert(tag);
            // Removals of an earlier value of this name come first: they were sent before this one was picked.
            while let Ok(order) = self.orders.try_recv() {
                self.take(order);
            }
            let bytes = u32::try_from(room.bytes()).expect("a value has less than 4 GiB");
            // One of this very value may have been among them.
            let is_wanted = self.below.directory.is_wanted(name, tag);
            let Some(header) = record::header(&tenant, &key, checksum).filter(|_| is_wanted) else {
                self.in_hand.remove(&tag);
                self.below.directory.dropped(name, tag);
                continue;
            };
            self.in_hand_bytes += u64::from(bytes);
            self.blob_log.put(Record { name, tag, header, bytes, source: Box::new(FromMemory(room)) });
        }
    }

    fn read_on(&mut self) {
        while self.blob_log.takes_get()
            && let Some((name, read)) = self.gets.front()
        {
            let header_only = matches!(read, ReadRequest::Header(_));
            let bytes = if header_only { 0 } else { self.blob_log.bytes_of(*name).unwrap_or(0).into() };
            if self.reading_bytes > 0 && self.reading_bytes + bytes > self.below.reading_max_bytes {
                // The end of one that is being read makes room for it.
                return;
            }
            let Some((name, read)) = self.gets.pop_front() else { return };
            let token = self.token();
            self.reading_bytes += bytes;
            self.weights.insert(token, bytes);
            self.reading.insert(token, read);
            self.blob_log.get(name, token, header_only);
        }
    }

    fn on_event(&mut self, done: BlobLogEvent, lists: &mut BTreeMap<u64, PendingListing>) {
        match done {
            BlobLogEvent::Kept(one) => {
                self.in_hand_bytes -= u64::from(one.bytes);
                self.in_hand.remove(&one.tag);
                self.below.directory.kept(one.name, one.tag);
            }
            BlobLogEvent::NotKept(one, why) => {
                self.in_hand_bytes -= u64::from(one.bytes);
                self.in_hand.remove(&one.tag);
                self.below.directory.dropped(one.name, one.tag);
                self.failed(&why);
            }
            BlobLogEvent::Dropped(one) => self.below.directory.dropped(one.name, one.tag),
            BlobLogEvent::Removed(token) => {
                if let Some((name, removal)) = self.removing.remove(&token) {
                    self.below.directory.gone(name, &removal);
                }
            }
            BlobLogEvent::Got(token, found) => {
                match self.reading.remove(&token) {
                    Some(ReadRequest::Value(reply)) => reply(found.ok()),
                    Some(ReadRequest::Header(list)) => {
                        self.list_on(list, found.map(|(header, _)| header), lists)
                    }
                    None => {}
                }
                self.reading_bytes -= self.weights.remove(&token).unwrap_or(0);
            }
        }
    }

    fn list_on(
        &mut self,
        number: u64,
        header: Result<Vec<u8>, BlobReadError>,
        lists: &mut BTreeMap<u64, PendingListing>,
    ) {
        let Some(list) = lists.get_mut(&number) else { return };
        list.is_short |= matches!(header, Err(BlobReadError::Failed));
        let named = header.as_deref().ok().and_then(record::names);
        list.found.extend(named.map(|(tenant, key)| (tenant.to_owned(), key.to_vec())));
        list.left -= 1;
        if list.left == 0
            && let Some(list) = lists.remove(&number)
        {
            (list.reply)(if list.is_short { Err(NoAnswerError) } else { Ok((list.found, list.next)) });
        }
    }

    fn failed(&mut self, why: &PutError) {
        if let PutError::Failed(error) = why {
            self.failures += 1;
            if self.failures.is_power_of_two() {
                self.below.log(&format!("ssd: copy down: {error} ({} so far)", self.failures));
            }
        }
    }

    /// Shows what there is, and gives the file up when its disk is left alone.
    fn publish(&mut self) {
        *self.below.blob_log.lock() = self.blob_log.stats();
        if std::mem::replace(&mut self.ended, self.blob_log.ended()) != self.blob_log.ended() {
            self.below.pulse.beat();
        }
        if !self.blob_log.is_off() {
            return;
        }
        if self.given_up != AbandonState::Yes {
            self.give_up_file();
        }
        if self.given_up == AbandonState::Yes {
            for (name, removal) in std::mem::take(&mut self.removing).into_values() {
                self.below.directory.gone(name, &removal);
            }
        } else {
            // Asked for again they wait for the file to go.
            self.removing.values().for_each(|(_, removal)| removal.give_up());
        }
    }

    /// Takes the file's name away: removals that it did not take would be undone by the next start.
    fn give_up_file(&mut self) {
        let is_first = match self.given_up {
            AbandonState::Failed(last) if last.elapsed() < LOOK_EVERY => return,
            before => before == AbandonState::No,
        };
        self.below.off.store(true, Ordering::Relaxed);
        let taken = self.blob_log.give_up();
        self.given_up = if taken.is_ok() { AbandonState::Yes } else { AbandonState::Failed(Instant::now()) };
        let off = "ssd: the disk failed too often: nothing more is copied down";
        match taken {
            Ok(()) => self.below.log(&format!(
                "{off}, and the file was removed, so that the next start does not bring back what is removed from now \
                 on; look at the disk and restart"
            )),
            Err(why) if is_first => self.below.log(&format!(
                "{off}, and the file could not be removed ({why}): removals of what it holds are answered with TRYAGAIN \
                 until it can be; look at the disk, remove the file and restart"
            )),
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::arena::{Arena, Slabs};
    use crate::lower::name_of;

    #[test]
    fn a_value_that_is_removed_before_its_copy_begins_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let config = SsdConfig::new(dir.path().to_owned(), 16 << 20);
        let open = || open(&config, config.blocks(None).unwrap()).unwrap().0;
        let (send, orders) = channel();
        let below = Arc::new(LowerView::new(send, Some(0), (1 << 20, 1 << 20), (None, Arc::new(|_| ()))));
        let slabs = Slabs::new(Arena::new(2).unwrap());
        let room = Arc::new(ArenaMemory::take(&slabs, 1_000, 0).unwrap());
        let (name, shard) = (name_of("", b"k"), Arc::clone(&below));
        let pick = move || {
            shard.taken();
            let (tag, room) = (shard.fresh_tag(), Arc::clone(&room));
            assert!(shard.directory.begin(name, tag));
            // As a DEL that comes at this moment.
            assert!(shard.forget(name, None).ssd.is_some());
            let (tenant, key, checksum) = (String::new(), b"k".to_vec(), None);
            Some(PickedObject { name, tag, tenant, key, room, checksum })
        };
        let thread = SsdThread::start(open(), orders, Arc::clone(&below), Box::new(pick)).unwrap();
        below.offer();
        let (send, receive) = channel();
        below.send(Order::Settle(Box::new(move || send.send(()).unwrap())));
        receive.recv().unwrap();
        below.send(Order::Stop);
        thread.join();
        assert_eq!(open().listings().count(), 0, "the next start does not bring it back");
    }
}
