//! Which keys have a copy on the SSD.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use dashmap::{DashMap, Entry};

#[derive(Clone, Copy, Debug)]
struct DirectoryEntry {
    tag: u64,
    /// Whether it lasts; before, it is being written.
    lasts: bool,
}

/// Copies by name. Each is one of the value that was sealed last under its key.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    copies: DashMap<u64, DirectoryEntry>,
    /// Removals that the disk has not confirmed: who asks for the same again waits for the same. Its locks are taken
    /// under those of the copies, never the other way round.
    removals: DashMap<u64, Removal>,
}

/// A removal on its way to the disk or the bucket.
#[derive(Clone, Debug, Default)]
pub(crate) struct Removal {
    state: Arc<AtomicU8>,
}

impl Removal {
    /// Confirms that the removed copy cannot reappear.
    pub(super) fn confirm(&self) {
        self.state.store(1, Ordering::Release);
    }

    /// Ends the removal without an answer.
    pub(super) fn give_up(&self) {
        self.state.store(2, Ordering::Release);
    }

    /// Whether it was confirmed; none while there is no answer.
    pub(crate) fn outcome(&self) -> Option<bool> {
        match self.state.load(Ordering::Acquire) {
            0 => None,
            state => Some(state == 1),
        }
    }
}

/// The pending removals of a key's copies below.
#[derive(Clone, Debug, Default)]
pub(crate) struct ForgottenCopies {
    /// On the SSD.
    pub(crate) ssd: Option<Removal>,
    /// In the bucket.
    pub(crate) cold: Option<Removal>,
}

impl ForgottenCopies {
    /// Whether the key had nothing below.
    pub(crate) fn is_nothing(&self) -> bool {
        self.ssd.is_none() && self.cold.is_none()
    }

    /// Whether every removal has its answer.
    pub(crate) fn is_answered(&self) -> bool {
        let answered = |removal: &Option<Removal>| removal.as_ref().is_none_or(|one| one.outcome().is_some());
        answered(&self.ssd) && answered(&self.cold)
    }

    /// This one, where it has something to wait for, else the other.
    #[cfg(feature = "resp")]
    pub(crate) fn or(self, other: Self) -> Self {
        Self { ssd: self.ssd.or(other.ssd), cold: self.cold.or(other.cold) }
    }
}

impl Directory {
    /// Begins a copy. False when there is one.
    pub(crate) fn begin(&self, name: u64, tag: u64) -> bool {
        match self.copies.entry(name) {
            Entry::Vacant(place) => {
                place.insert(DirectoryEntry { tag, lasts: false });
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    /// Whether the copy is still wanted.
    pub(super) fn is_wanted(&self, name: u64, tag: u64) -> bool {
        self.copies.get(&name).is_some_and(|copy| copy.tag == tag)
    }

    /// The copy lasts from now on, if it is still wanted.
    pub(super) fn kept(&self, name: u64, tag: u64) {
        if let Some(mut copy) = self.copies.get_mut(&name).filter(|copy| copy.tag == tag) {
            copy.lasts = true;
        }
    }

    /// A copy of the start.
    pub(super) fn adopt(&self, name: u64, tag: u64) {
        self.copies.insert(name, DirectoryEntry { tag, lasts: true });
    }

    /// The copy is gone.
    pub(super) fn dropped(&self, name: u64, tag: u64) {
        self.copies.remove_if(&name, |_, copy| copy.tag == tag);
    }

    /// The number of the copy that lasts.
    pub(crate) fn tag(&self, name: u64) -> Option<u64> {
        self.copies.get(&name).filter(|copy| copy.lasts).map(|copy| copy.tag)
    }

    /// Forgets a copy. `order` sends the worker its removal, under the lock, so that the worker gets it before any
    /// later copy. Without a copy: returns the earlier removal that is not confirmed yet.
    pub(super) fn forget(&self, name: u64, order: impl FnOnce(Removal)) -> Option<Removal> {
        let Entry::Occupied(copy) = self.copies.entry(name) else { return self.unconfirmed_removal(name) };
        let removal = Removal::default();
        self.removals.insert(name, removal.clone());
        order(removal.clone());
        copy.remove();
        Some(removal)
    }

    /// The removal of a copy of this name that is not confirmed yet.
    pub(super) fn unconfirmed_removal(&self, name: u64) -> Option<Removal> {
        self.removals.get(&name).map(|removal| removal.clone())
    }

    /// A removal is confirmed.
    pub(super) fn gone(&self, name: u64, removal: &Removal) {
        removal.confirm();
        self.removals.remove_if(&name, |_, one| Arc::ptr_eq(&one.state, &removal.state));
    }

    /// Forgets every copy, so that nothing below is readable.
    pub(super) fn clear(&self) {
        self.copies.clear();
    }
}
