//! Names of blocks that left the store, with what was known of their use.

use alloc::vec::Vec;

/// Names for each slot of the store.
const NAMES_PER_SLOT: u64 = 8;
/// The most names, for a store of any size: 24 MiB.
const MAX_NAMES: u64 = 1 << 21;

/// A block that left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ghost {
    /// The class of its use.
    pub class: u8,
    /// When it last came to rest.
    pub tick: u32,
}

/// A table with one place for each name; a newer name takes the place of an older.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// The upper half of the name, 0 for none, and the ghost.
    places: Vec<(u32, Ghost)>,
}

impl Ghosts {
    /// An empty table for a store of `slots` slots.
    pub(super) fn new(slots: u64) -> Self {
        let names = slots.saturating_mul(NAMES_PER_SLOT).clamp(1, MAX_NAMES).next_power_of_two();
        Self { places: alloc::vec![(0, Ghost::default()); names as usize] }
    }

    /// Keeps a ghost by its name; gives the one that lost its place, if any did.
    pub(super) fn put(&mut self, name: u64, ghost: Ghost) -> Option<Ghost> {
        let place = self.place(name);
        let (mark, lost) = core::mem::replace(place, (mark_of(name), ghost));
        (mark != 0).then_some(lost)
    }

    /// Takes out the ghost of that name.
    pub(super) fn take(&mut self, name: u64) -> Option<Ghost> {
        let place = self.place(name);
        if place.0 != mark_of(name) {
            return None;
        }
        place.0 = 0;
        Some(place.1)
    }

    fn place(&mut self, name: u64) -> &mut (u32, Ghost) {
        let last = self.places.len() - 1;
        &mut self.places[spread(name) as usize & last]
    }
}

/// Names are hashes already; the product only spreads names that a test numbers by hand.
const fn spread(name: u64) -> u64 {
    let product = name.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    product ^ (product >> 32)
}

/// The bits to compare: 31 bits that do not choose the place, never 0.
const fn mark_of(name: u64) -> u32 {
    (spread(name) >> 32) as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_once_until_another_takes_its_place() {
        let mut ghosts = Ghosts::new(4);
        let ghost = Ghost { class: 3, tick: 9 };
        assert_eq!((ghosts.places.len(), ghosts.take(5)), (32, None));
        assert_eq!((ghosts.put(5, ghost), ghosts.take(5), ghosts.take(5)), (None, Some(ghost), None));
        let lost = (0..200).filter(|&name| ghosts.put(name, ghost).is_some()).count();
        assert!((200 - 32..200).contains(&lost));
        assert_eq!(ghosts.take(199), Some(ghost), "the newest has its place");
        assert_eq!(Ghosts::new(u64::MAX).places.len() as u64, MAX_NAMES);
    }
}
