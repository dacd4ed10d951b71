//! The thread that keeps the file: it copies down what shards offer, reads, and removes.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use baton_tiers::{FlashError, IoChoice, Record, Shelf, ShelfDone, ShelfOptions, Source, Unshelved};

use super::below::Below;
use super::{Removal, SsdConfig, record};
use crate::arena::Room;
use crate::reading::copy_out;
use crate::shard::Picked;

/// Stands for the meaning of names and headers.
const FINGERPRINT: u64 = 0x0001_7363_656A_626F;
/// A sleeping clerk looks around so often, though nobody woke it.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Header and value, or nothing.
pub(crate) type ReadReply = Box<dyn FnOnce(Option<(Vec<u8>, Vec<u8>)>) + Send>;
/// Tenants' names and keys, and the name after which to go on; none at the end.
pub(crate) type ListReply = Box<dyn FnOnce(Vec<(String, Vec<u8>)>, Option<u64>) + Send>;

/// What the clerk is told.
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
    /// End.
    Stop,
}

struct FromRoom(Arc<Room>);

impl Source for FromRoom {
    fn copy(&self, offset: usize, into: &mut [u8]) {
        copy_out(&self.0, offset, into);
    }
}

/// Size and number of the blocks of the file that an earlier start left.
pub(super) fn left_in(dir: &Path) -> Option<(usize, u32)> {
    Shelf::blocks_in(dir, FINGERPRINT)
}

/// Opens the file of blocks of this size and number; what is to be said about it.
pub(super) fn open(
    config: &SsdConfig,
    (block_bytes, capacity_blocks): (usize, u32),
) -> Result<(Shelf, String), String> {
    let (dir, fingerprint) = (&config.dir, FINGERPRINT);
    let options = ShelfOptions { dir, capacity_blocks, block_bytes, fingerprint, io: IoChoice::Auto };
    match Shelf::open(&options) {
        Ok((shelf, speed)) => {
            let (beginning, device) = shelf.beginning();
            let speed = speed.map_or(String::new(), |speed| {
                let rate = |bytes: u64| bytes / 1_000_000;
                let (write, read) = (rate(speed.write_bytes_per_s), rate(speed.read_bytes_per_s));
                format!(", writes {write} MB/s, reads {read} MB/s")
            });
            let objects = shelf.stats().values;
            let words = format!("ssd: {}: {beginning}, {objects} objects; {device}{speed}", dir.display());
            Ok((shelf, words))
        }
        Err(FlashError::NoRoom { file_bytes, why }) => Err(format!(
            "ssd: {}: no room for {file_bytes} bytes ({why}); give less or free some",
            dir.display()
        )),
        Err(error) => Err(format!("ssd: {}: {error}", dir.display())),
    }
}

/// The thread.
pub(super) struct Clerk {
    thread: JoinHandle<()>,
}

impl Clerk {
    pub(super) fn start(
        shelf: Shelf,
        orders: Receiver<Order>,
        below: Arc<Below>,
        pick: Box<dyn FnMut() -> Option<Picked> + Send>,
    ) -> Result<Self, String> {
        let mut desk = Desk {
            shelf,
            orders,
            below,
            pick,
            in_hand_bytes: 0,
            gets: VecDeque::new(),
            reading: BTreeMap::new(),
            removing: BTreeMap::new(),
            settling: Vec::new(),
            next_token: 0,
            is_over: false,
            said_off: false,
            failures: 0,
        };
        let shelf_tags: Vec<_> = desk.shelf.listings().collect();
        shelf_tags.iter().for_each(|one| desk.below.directory.adopt(one.name, one.tag));
        desk.publish();
        let thread = std::thread::Builder::new().name("objects-ssd".into()).spawn(move || desk.run());
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
enum Read {
    Value(ReadReply),
    /// One header of a list.
    Header(u64),
}

/// A list under way.
struct Listed {
    found: Vec<(String, Vec<u8>)>,
    left: usize,
    next: Option<u64>,
    reply: ListReply,
}

struct Desk {
    shelf: Shelf,
    orders: Receiver<Order>,
    below: Arc<Below>,
    pick: Box<dyn FnMut() -> Option<Picked> + Send>,
    in_hand_bytes: u64,
    gets: VecDeque<(u64, Read)>,
    reading: BTreeMap<u64, Read>,
    removing: BTreeMap<u64, Removal>,
    settling: Vec<Box<dyn FnOnce() + Send>>,
    next_token: u64,
    is_over: bool,
    said_off: bool,
    failures: u64,
}

impl Desk {
    fn run(&mut self) {
        let mut lists: BTreeMap<u64, Listed> = BTreeMap::new();
        loop {
            while let Ok(order) = self.orders.try_recv() {
                self.take(order, &mut lists);
            }
            self.copy_down(&mut lists);
            self.read_on();
            self.shelf.pump();
            while let Some(done) = self.shelf.next_done() {
                self.hear(done, &mut lists);
            }
            self.publish();
            if self.is_over && !self.shelf.is_waiting() {
                return self.end();
            }
            if self.shelf.is_waiting() {
                self.shelf.wait();
            } else if self.is_quiet() {
                self.settling.drain(..).for_each(|tell| tell());
                self.sleep(&mut lists);
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.gets.is_empty() && (self.below.offered.load(Ordering::SeqCst) == 0 || self.shelf.is_off())
    }

    fn sleep(&mut self, lists: &mut BTreeMap<u64, Listed>) {
        self.below.asleep.store(true, Ordering::SeqCst);
        if self.is_quiet() {
            match self.orders.recv_timeout(LOOK_EVERY) {
                Ok(order) => self.take(order, lists),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.is_over = true,
            }
        }
        self.below.asleep.store(false, Ordering::SeqCst);
    }

    /// Nobody is left waiting.
    fn end(&mut self) {
        self.below.directory.clear();
        self.removing.values().for_each(Removal::give_up);
        self.settling.drain(..).for_each(|tell| tell());
        let reads =
            self.gets.drain(..).map(|(_, read)| read).chain(std::mem::take(&mut self.reading).into_values());
        for read in reads {
            if let Read::Value(reply) = read {
                reply(None);
            }
        }
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    fn take(&mut self, order: Order, lists: &mut BTreeMap<u64, Listed>) {
        match order {
            Order::Wake => {}
            Order::Get { name, reply } => self.gets.push_back((name, Read::Value(reply))),
            Order::Remove { name, removal } => {
                let token = self.token();
                self.removing.insert(token, removal);
                self.shelf.remove(name, token);
            }
            Order::List { after, most, reply } => {
                let names = self.shelf.names_after(after, most);
                let (left, next) = (names.len(), names.last().copied().filter(|_| names.len() == most));
                if names.is_empty() {
                    return reply(Vec::new(), None);
                }
                let list = self.token();
                lists.insert(list, Listed { found: Vec::new(), left, next, reply });
                self.gets.extend(names.into_iter().map(|name| (name, Read::Header(list))));
            }
            Order::Settle(tell) => self.settling.push(tell),
            Order::Stop => self.is_over = true,
        }
    }

    /// Takes up what shards offer, as much as there may be in hand.
    fn copy_down(&mut self, lists: &mut BTreeMap<u64, Listed>) {
        while self.shelf.takes_put()
            && !self.shelf.is_off()
            && self.in_hand_bytes < self.below.in_hand_max_bytes
            && self.below.offered.load(Ordering::SeqCst) > 0
            && let Some(picked) = (self.pick)()
        {
            let Picked { name, tag, tenant, key, room, checksum } = picked;
            // Removals of an earlier value of this name come first: they were sent before this one was picked.
            while let Ok(order) = self.orders.try_recv() {
                self.take(order, lists);
            }
            let bytes = u32::try_from(room.bytes()).expect("a value has less than 4 GiB");
            let Some(header) = record::header(&tenant, &key, checksum) else {
                self.below.directory.dropped(name, tag);
                continue;
            };
            self.in_hand_bytes += u64::from(bytes);
            self.shelf.put(Record { name, tag, header, bytes, source: Box::new(FromRoom(room)) });
        }
    }

    fn read_on(&mut self) {
        while self.shelf.takes_get()
            && let Some((name, read)) = self.gets.pop_front()
        {
            let token = self.token();
            let header_only = matches!(read, Read::Header(_));
            self.reading.insert(token, read);
            self.shelf.get(name, token, header_only);
        }
    }

    fn hear(&mut self, done: ShelfDone, lists: &mut BTreeMap<u64, Listed>) {
        match done {
            ShelfDone::Kept(one) => {
                self.in_hand_bytes -= u64::from(one.bytes);
                self.below.directory.kept(one.name, one.tag);
            }
            ShelfDone::NotKept(one, why) => {
                self.in_hand_bytes -= u64::from(one.bytes);
                self.below.directory.dropped(one.name, one.tag);
                self.failed(&why);
            }
            ShelfDone::Dropped(one) => self.below.directory.dropped(one.name, one.tag),
            ShelfDone::Removed(token) => {
                if let Some(removal) = self.removing.remove(&token) {
                    removal.confirm();
                }
            }
            ShelfDone::Got(token, found) => match self.reading.remove(&token) {
                Some(Read::Value(reply)) => reply(found),
                Some(Read::Header(list)) => self.list_on(list, found.map(|(header, _)| header), lists),
                None => {}
            },
        }
    }

    fn list_on(&mut self, number: u64, header: Option<Vec<u8>>, lists: &mut BTreeMap<u64, Listed>) {
        let Some(list) = lists.get_mut(&number) else { return };
        let named = header.as_deref().and_then(record::names);
        list.found.extend(named.map(|(tenant, key)| (tenant.to_owned(), key.to_vec())));
        list.left -= 1;
        if list.left == 0
            && let Some(list) = lists.remove(&number)
        {
            (list.reply)(list.found, list.next);
        }
    }

    fn failed(&mut self, why: &Unshelved) {
        if let Unshelved::Failed(error) = why {
            self.failures += 1;
            if self.failures.is_power_of_two() {
                self.below.tell(&format!("ssd: copy down: {error} ({} so far)", self.failures));
            }
        }
    }

    /// Shows what there is, and says once when the disk is left alone.
    fn publish(&mut self) {
        *self.below.shelf.lock() = self.shelf.stats();
        if self.shelf.is_off() {
            self.removing.values().for_each(Removal::give_up);
            self.removing.clear();
            if !self.said_off {
                self.said_off = true;
                self.below.off.store(true, Ordering::Relaxed);
                self.below.tell(
                    "ssd: the disk failed too often: nothing more is copied down; look at it and restart",
                );
            }
        }
    }
}
