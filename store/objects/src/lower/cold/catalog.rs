//! Which values the bucket has, is being given and is to lose.

use std::collections::{BTreeMap, VecDeque};
#[cfg(any(test, feature = "resp"))]
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::super::directory::Removal;
use super::label::Label;

const SHARDS: usize = 16;
/// Places in line that may be stale, beside as many as there are copies.
const SLACK: u64 = 1_024;

#[derive(Debug)]
enum State {
    /// Not sent yet: it may still be dropped without a word.
    Waiting,
    /// On its way.
    Writing,
    /// Written and readable.
    Lasts,
    /// Never to be read again. It counts until the bucket has confirmed that it is gone.
    Deleting(PendingRemoval),
}

#[derive(Debug)]
struct PendingRemoval {
    removal: Removal,
    /// Whether its writing has ended, so that it cannot arrive after its removal.
    sure: bool,
    /// Whether a worker has the removal in progress.
    ordered: bool,
}

#[derive(Debug)]
struct Entry {
    label: Label,
    bytes: u64,
    state: State,
    /// Read since it was last looked at for room.
    visited: bool,
}

/// The next step for an outdated value of a key.
#[derive(Debug)]
pub(super) enum ForgetAction {
    /// The bucket has none.
    Nothing,
    /// A removal is in progress; its outcome.
    UnderWay(Removal),
    /// Remove this one; the word of its end.
    Remove(Label, Removal),
}

/// Copies by name of their key, one for each. Bytes and objects are counted as long as the bucket may have them.
#[derive(Debug)]
pub(super) struct Catalog {
    shards: [Mutex<BTreeMap<u64, Entry>>; SHARDS],
    /// Names and tags in the order in which they give way, except those that were read meanwhile.
    order: Mutex<VecDeque<(u64, u64)>>,
    capacity_bytes: u64,
    objects_max: u64,
    bytes: AtomicU64,
    objects: AtomicU64,
    deleting: AtomicU64,
}

impl Catalog {
    pub(super) fn new(capacity_bytes: u64, objects_max: u64) -> Self {
        Self {
            shards: Default::default(),
            order: Mutex::default(),
            capacity_bytes,
            objects_max,
            bytes: AtomicU64::new(0),
            objects: AtomicU64::new(0),
            deleting: AtomicU64::new(0),
        }
    }

    fn shard(&self, name: u64) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.shards[(name % SHARDS as u64) as usize].lock()
    }

    /// Does something with the entry of this very writing.
    fn with<R>(&self, name: u64, tag: u64, act: impl FnOnce(&mut Entry) -> R) -> Option<R> {
        let mut shard = self.shard(name);
        shard.get_mut(&name).filter(|entry| entry.label.tag == tag).map(act)
    }

    fn add(&self, entry: Entry) -> bool {
        let mut shard = self.shard(entry.label.name);
        let vacant = !shard.contains_key(&entry.label.name);
        if vacant {
            self.bytes.fetch_add(entry.bytes, Ordering::SeqCst);
            self.objects.fetch_add(1, Ordering::SeqCst);
            shard.insert(entry.label.name, entry);
        }
        vacant
    }

    fn take(&self, shard: &mut BTreeMap<u64, Entry>, name: u64) {
        if let Some(entry) = shard.remove(&name) {
            self.bytes.fetch_sub(entry.bytes, Ordering::SeqCst);
            self.objects.fetch_sub(1, Ordering::SeqCst);
            if let State::Deleting(deleting) = entry.state {
                self.deleting.fetch_sub(1, Ordering::SeqCst);
                deleting.removal.confirm();
            }
        }
    }

    /// Begins a copy. False when there is one, or when it could never fit.
    pub(super) fn begin(&self, label: Label, bytes: u64) -> bool {
        bytes <= self.capacity_bytes
            && self.add(Entry { label, bytes, state: State::Waiting, visited: false })
    }

    /// A copy that a listing found. False when there is one of its name already.
    pub(super) fn adopt(&self, label: Label, bytes: u64) -> bool {
        let added = self.add(Entry { label, bytes, state: State::Lasts, visited: false });
        if added {
            self.line_up(label.name, label.tag);
        }
        added
    }

    fn line_up(&self, name: u64, tag: u64) {
        let mut order = self.order.lock();
        order.push_back((name, tag));
        // Those that went another way are still in line.
        if order.len() as u64 > 2 * self.objects() + SLACK {
            order.retain(|(name, tag)| self.tag(*name) == Some(*tag));
        }
    }

    /// Drops a copy that was not sent.
    pub(super) fn drop_waiting(&self, name: u64, tag: u64) {
        let mut shard = self.shard(name);
        let waits = |entry: &&Entry| entry.label.tag == tag && matches!(entry.state, State::Waiting);
        if shard.get(&name).filter(waits).is_some() {
            self.take(&mut shard, name);
        }
    }

    /// Marks the value as being sent, with this digest. None when the value is outdated.
    pub(super) fn start(&self, name: u64, tag: u64, digest: u64) -> Option<Label> {
        self.with(name, tag, |entry| {
            entry.label.digest = digest;
            entry.state = State::Writing;
            entry.label
        })
    }

    /// It has arrived. False when it is to go again.
    pub(super) fn written(&self, name: u64, tag: u64) -> bool {
        let wanted = self.with(name, tag, |entry| match &mut entry.state {
            State::Deleting(deleting) => {
                deleting.sure = true;
                false
            }
            state => {
                *state = State::Lasts;
                true
            }
        });
        if wanted == Some(true) {
            self.line_up(name, tag);
        }
        wanted == Some(true)
    }

    /// Marks a value whose arrival is unknown: it is to be removed.
    pub(super) fn unsure(&self, name: u64, tag: u64) {
        self.with(name, tag, |entry| {
            if !matches!(entry.state, State::Deleting(_)) {
                self.dismiss(entry, false);
            }
        });
    }

    /// Marks a copy as being removed.
    fn dismiss(&self, entry: &mut Entry, sure: bool) -> Removal {
        let removal = Removal::default();
        entry.state = State::Deleting(PendingRemoval { removal: removal.clone(), sure, ordered: true });
        self.deleting.fetch_add(1, Ordering::SeqCst);
        removal
    }

    /// The key has another value, of this digest if that is known, or none. Equal bytes keep their copy.
    pub(super) fn forget(&self, name: u64, digest: Option<u64>) -> ForgetAction {
        let mut shard = self.shard(name);
        let Some(entry) = shard.get_mut(&name) else { return ForgetAction::Nothing };
        match &mut entry.state {
            State::Waiting => {
                self.take(&mut shard, name);
                ForgetAction::Nothing
            }
            State::Writing | State::Lasts if digest == Some(entry.label.digest) => ForgetAction::Nothing,
            State::Writing => ForgetAction::UnderWay(self.dismiss(entry, false)),
            State::Lasts => ForgetAction::Remove(entry.label, self.dismiss(entry, true)),
            State::Deleting(deleting) if deleting.ordered => ForgetAction::UnderWay(deleting.removal.clone()),
            State::Deleting(deleting) => {
                deleting.order();
                ForgetAction::Remove(entry.label, deleting.removal.clone())
            }
        }
    }

    /// Drops a copy whose bytes differ from those written. None when that has been done already.
    pub(super) fn refuse(&self, name: u64, tag: u64) -> Option<Label> {
        self.with(name, tag, |entry| {
            let lasts = matches!(entry.state, State::Lasts);
            lasts.then(|| {
                self.dismiss(entry, true);
                entry.label
            })
        })?
    }

    /// Whether a copy that is to go is one that cannot arrive later; none when it is not to go.
    pub(super) fn is_sure(&self, name: u64, tag: u64) -> Option<bool> {
        self.with(name, tag, |entry| match &entry.state {
            State::Deleting(deleting) => Some(deleting.sure),
            _ => None,
        })?
    }

    /// The bucket has confirmed that the copy is gone.
    pub(super) fn gone(&self, name: u64, tag: u64) {
        let mut shard = self.shard(name);
        if shard.get(&name).is_some_and(|entry| entry.label.tag == tag) {
            self.take(&mut shard, name);
        }
    }

    /// The bucket did not take the removal, so a later retry must.
    pub(super) fn stuck(&self, name: u64, tag: u64) {
        self.with(name, tag, |entry| {
            if let State::Deleting(deleting) = &mut entry.state {
                deleting.ordered = false;
                deleting.removal.give_up();
            }
        });
    }

    /// Retries a removal, unless a retry is in progress or the removal is over.
    pub(super) fn retry(&self, name: u64, tag: u64) -> Option<Label> {
        self.with(name, tag, |entry| match &mut entry.state {
            State::Deleting(deleting) if !deleting.ordered => {
                deleting.order();
                Some(entry.label)
            }
            _ => None,
        })?
    }

    /// The copy that can be read, and its length; it counts as read.
    pub(super) fn find(&self, name: u64) -> Option<(Label, u64)> {
        let mut shard = self.shard(name);
        let entry = shard.get_mut(&name).filter(|entry| matches!(entry.state, State::Lasts))?;
        entry.visited = true;
        Some((entry.label, entry.bytes))
    }

    /// The number of the copy that can be read.
    pub(super) fn tag(&self, name: u64) -> Option<u64> {
        let shard = self.shard(name);
        shard.get(&name).filter(|entry| matches!(entry.state, State::Lasts)).map(|entry| entry.label.tag)
    }

    /// Whether there is a copy, or one on its way, of a value with an object of so many bytes.
    pub(super) fn may_equal(&self, name: u64, bytes: u64) -> bool {
        let shard = self.shard(name);
        let stays = |entry: &&Entry| matches!(entry.state, State::Writing | State::Lasts);
        shard.get(&name).filter(stays).is_some_and(|entry| entry.bytes == bytes)
    }

    /// Names of a tenant's values, in any state.
    #[cfg(any(test, feature = "resp"))]
    pub(super) fn of_tenant(&self, tenant: u32) -> Vec<u64> {
        let mut names = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            let his = shard.values().filter(|entry| entry.label.tenant == tenant);
            names.extend(his.map(|entry| entry.label.name));
        }
        names
    }

    /// Copies that can be read of names after this one, in the order of names, at most so many.
    #[cfg(any(test, feature = "resp"))]
    pub(super) fn after(&self, name: Option<u64>, most: usize) -> Vec<(Label, u64)> {
        let from = name.map_or(Bound::Unbounded, Bound::Excluded);
        let mut found = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            let lasting = shard.range((from, Bound::Unbounded)).map(|(_, entry)| entry);
            let lasting = lasting.filter(|entry| matches!(entry.state, State::Lasts)).take(most);
            found.extend(lasting.map(|entry| (entry.label, entry.bytes)));
        }
        found.sort_unstable_by_key(|(label, _)| label.name);
        found.truncate(most);
        found
    }

    /// Objects, tombstones included, that a start takes over.
    pub(super) fn listed_max(&self) -> u64 {
        self.objects_max.saturating_mul(2)
    }

    /// Whether more is counted than there may be.
    pub(super) fn is_over(&self) -> bool {
        self.bytes() > self.capacity_bytes || self.objects() > self.objects_max
    }

    /// The next one to give way: it is to go from now on. None when there is none.
    pub(super) fn victim(&self) -> Option<Label> {
        let mut order = self.order.lock();
        for _ in 0..=2 * order.len() {
            let (name, tag) = order.pop_front()?;
            let verdict = self.with(name, tag, |entry| match entry.state {
                State::Lasts if std::mem::take(&mut entry.visited) => None,
                State::Lasts => {
                    self.dismiss(entry, true);
                    Some(Some(entry.label))
                }
                _ => Some(None),
            });
            match verdict {
                Some(None) => order.push_back((name, tag)),
                Some(Some(Some(label))) => return Some(label),
                // It went another way.
                Some(Some(None)) | None => {}
            }
        }
        None
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    pub(super) fn objects(&self) -> u64 {
        self.objects.load(Ordering::SeqCst)
    }

    /// How many are to go and have not gone.
    pub(super) fn deleting(&self) -> u64 {
        self.deleting.load(Ordering::SeqCst)
    }
}

impl PendingRemoval {
    fn order(&mut self) {
        self.ordered = true;
        self.removal = Removal::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(name: u64, tag: u64) -> Label {
        Label { name, tenant: u32::try_from(name % 2).unwrap(), digest: 0, tag }
    }

    fn lasting(catalog: &Catalog, name: u64, tag: u64, bytes: u64) {
        assert!(catalog.begin(label(name, tag), bytes));
        assert_eq!(catalog.start(name, tag, name).unwrap().digest, name);
        assert!(catalog.written(name, tag));
    }

    #[test]
    fn a_copy_is_readable_between_its_arrival_and_the_end_of_its_value_alone() {
        let catalog = Catalog::new(100, 10);
        assert!(
            catalog.begin(label(7, 1), 40)
                && !catalog.begin(label(7, 2), 40)
                && !catalog.begin(label(8, 3), 101)
        );
        assert!(catalog.find(7).is_none() && !catalog.may_equal(7, 40));
        catalog.start(7, 1, 5).unwrap();
        assert!(catalog.find(7).is_none() && catalog.may_equal(7, 40) && !catalog.may_equal(7, 41));
        assert!(catalog.written(7, 1));
        assert_eq!((catalog.find(7).unwrap().0.digest, catalog.tag(7), catalog.bytes()), (5, Some(1), 40));
        assert!(matches!(catalog.forget(7, Some(5)), ForgetAction::Nothing), "the same bytes");
        let ForgetAction::Remove(gone, removal) = catalog.forget(7, Some(6)) else { panic!("other bytes") };
        assert!(catalog.find(7).is_none() && catalog.tag(7).is_none() && !catalog.may_equal(7, 40));
        assert!(!catalog.begin(label(7, 4), 40), "not before the old one is gone");
        assert!(matches!(catalog.forget(7, None), ForgetAction::UnderWay(_)));
        assert_eq!((catalog.bytes(), catalog.deleting(), removal.outcome()), (40, 1, None));
        catalog.stuck(7, 1);
        assert_eq!(removal.outcome(), Some(false));
        assert_eq!(catalog.retry(7, 1), Some(gone));
        assert_eq!((catalog.retry(7, 1), catalog.is_sure(7, 1)), (None, Some(true)));
        let ForgetAction::UnderWay(again) = catalog.forget(7, None) else { panic!("it is being tried") };
        catalog.gone(7, 1);
        assert_eq!(
            (again.outcome(), catalog.bytes(), catalog.objects(), catalog.deleting()),
            (Some(true), 0, 0, 0)
        );
        assert!(matches!(catalog.forget(7, None), ForgetAction::Nothing));
    }

    #[test]
    fn what_ends_while_it_is_written_goes_when_it_has_arrived() {
        let catalog = Catalog::new(100, 10);
        catalog.begin(label(1, 1), 10);
        assert!(matches!(catalog.forget(1, None), ForgetAction::Nothing), "it was not sent");
        assert!(catalog.start(1, 1, 0).is_none() && catalog.objects() == 0);
        catalog.begin(label(1, 2), 10);
        catalog.start(1, 2, 0);
        let ForgetAction::UnderWay(removal) = catalog.forget(1, None) else { panic!("it is on its way") };
        assert_eq!(catalog.is_sure(1, 2), Some(false));
        assert!(!catalog.written(1, 2) && removal.outcome().is_none());
        assert_eq!(catalog.is_sure(1, 2), Some(true));
        catalog.gone(1, 2);
        assert_eq!(removal.outcome(), Some(true));
        catalog.begin(label(1, 3), 10);
        catalog.start(1, 3, 0);
        catalog.unsure(1, 3);
        assert_eq!(
            (catalog.is_sure(1, 3), catalog.find(1).is_none(), catalog.deleting()),
            (Some(false), true, 1)
        );
    }

    #[test]
    fn what_was_not_read_gives_way_first_and_everything_is_counted_until_it_is_gone() {
        let catalog = Catalog::new(100, 3);
        (0..4).for_each(|n| lasting(&catalog, n, n, 30));
        assert!(catalog.is_over() && catalog.find(0).is_some());
        let victim = catalog.victim().unwrap();
        assert_eq!((victim.name, catalog.bytes(), catalog.objects()), (1, 120, 4));
        assert!(catalog.is_over());
        catalog.gone(victim.name, victim.tag);
        assert!(!catalog.is_over());
        let order: Vec<u64> = std::iter::from_fn(|| catalog.victim()).map(|label| label.name).collect();
        assert_eq!(order, [2, 3, 0]);
        assert_eq!((catalog.victim(), catalog.deleting()), (None, 3));
        let mut names = catalog.of_tenant(0);
        names.sort_unstable();
        assert_eq!(names, [0, 2]);
    }

    #[test]
    fn the_line_is_no_longer_than_it_need_be() {
        let catalog = Catalog::new(100, 10);
        for tag in 0..5 * SLACK {
            lasting(&catalog, 1, tag, 1);
            catalog.forget(1, None);
            catalog.gone(1, tag);
        }
        assert!(catalog.order.lock().len() as u64 <= SLACK + 2, "{}", catalog.order.lock().len());
    }

    #[test]
    fn a_listing_is_taken_over_and_what_was_refused_goes() {
        let catalog = Catalog::new(100, 10);
        assert!(catalog.adopt(label(1, 9), 10) && !catalog.adopt(label(1, 10), 10));
        assert_eq!((catalog.refuse(1, 10), catalog.refuse(1, 9)), (None, Some(label(1, 9))));
        assert_eq!((catalog.refuse(1, 9), catalog.tag(1)), (None, None));
    }
}
