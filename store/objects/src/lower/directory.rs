//! Which keys have a copy on the SSD.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::{Mutex, MutexGuard};

const SHARDS: usize = 16;

#[derive(Clone, Copy, Debug)]
struct Kept {
    tag: u64,
    /// Whether it lasts; before, it is being written.
    lasts: bool,
}

/// Copies by name. Each is one of the value that was sealed last under its key.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    shards: [Mutex<HashMap<u64, Kept>>; SHARDS],
}

/// A removal on its way to the disk or the bucket.
#[derive(Clone, Debug, Default)]
pub(crate) struct Removal {
    state: Arc<AtomicU8>,
}

impl Removal {
    /// What was removed cannot come back.
    pub(super) fn confirm(&self) {
        self.state.store(1, Ordering::Release);
    }

    /// Nobody will say.
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

/// What a key had below: what there is to wait for until it cannot come back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Forgotten {
    /// On the SSD.
    pub(crate) ssd: Option<Removal>,
    /// In the bucket.
    pub(crate) cold: Option<Removal>,
}

impl Forgotten {
    /// Whether the key had nothing below.
    pub(crate) fn is_nothing(&self) -> bool {
        self.ssd.is_none() && self.cold.is_none()
    }

    /// Whether nobody has to be waited for any more.
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
    fn shard(&self, name: u64) -> MutexGuard<'_, HashMap<u64, Kept>> {
        self.shards[(name % SHARDS as u64) as usize].lock()
    }

    /// Begins a copy. False when there is one.
    pub(crate) fn begin(&self, name: u64, tag: u64) -> bool {
        let mut shard = self.shard(name);
        let vacant = !shard.contains_key(&name);
        if vacant {
            shard.insert(name, Kept { tag, lasts: false });
        }
        vacant
    }

    /// The copy lasts from now on, if it is still wanted.
    pub(super) fn kept(&self, name: u64, tag: u64) {
        if let Some(copy) = self.shard(name).get_mut(&name).filter(|copy| copy.tag == tag) {
            copy.lasts = true;
        }
    }

    /// A copy of the start.
    pub(super) fn adopt(&self, name: u64, tag: u64) {
        self.shard(name).insert(name, Kept { tag, lasts: true });
    }

    /// The copy is gone.
    pub(super) fn dropped(&self, name: u64, tag: u64) {
        let mut shard = self.shard(name);
        if shard.get(&name).is_some_and(|copy| copy.tag == tag) {
            shard.remove(&name);
        }
    }

    /// The number of the copy that lasts.
    pub(crate) fn tag(&self, name: u64) -> Option<u64> {
        self.shard(name).get(&name).filter(|copy| copy.lasts).map(|copy| copy.tag)
    }

    /// Forgets a copy; `order` tells the clerk, under the lock, so that it hears of it before any later copy.
    pub(super) fn forget(&self, name: u64, order: impl FnOnce(Removal)) -> Option<Removal> {
        let mut shard = self.shard(name);
        shard.remove(&name)?;
        let removal = Removal::default();
        order(removal.clone());
        Some(removal)
    }

    /// Forgets everything: nothing below can be read any more.
    pub(super) fn clear(&self) {
        self.shards.iter().for_each(|shard| shard.lock().clear());
    }
}
