//! Numbered places with one tenant each.

/// `0..capacity`, each free or taken.
#[derive(Debug)]
pub(crate) struct Slots {
    free: Vec<u32>,
    is_taken: Vec<bool>,
}

impl Slots {
    /// All are free; the lowest goes first.
    pub(crate) fn new(capacity: u32) -> Self {
        Self { free: (0..capacity).rev().collect(), is_taken: vec![false; capacity as usize] }
    }

    /// Takes these, each of which is free, at once.
    pub(crate) fn take_these(&mut self, slots: impl Iterator<Item = u32>) {
        for slot in slots {
            let taken = std::mem::replace(&mut self.is_taken[slot as usize], true);
            assert!(!taken, "a slot has one tenant");
        }
        let is_taken = &self.is_taken;
        self.free.retain(|&slot| !is_taken[slot as usize]);
    }

    /// Whether one is free.
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a free one, the one given back last.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let slot = self.free.pop()?;
        assert!(!self.is_taken[slot as usize], "a slot is never handed out twice");
        self.is_taken[slot as usize] = true;
        Some(slot)
    }

    /// Gives back one that is taken.
    pub(crate) fn give(&mut self, slot: u32) {
        let taken = std::mem::replace(&mut self.is_taken[slot as usize], false);
        assert!(taken, "a slot is given back once");
        self.free.push(slot);
    }

    /// How many are taken.
    pub(crate) fn taken(&self) -> usize {
        self.is_taken.len() - self.free.len()
    }

    /// Whether `slot` is taken.
    pub(crate) fn is_taken(&self, slot: u32) -> bool {
        self.is_taken.get(slot as usize).is_some_and(|&taken| taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_has_one_tenant() {
        let mut slots = Slots::new(3);
        assert_eq!(
            [slots.take(), slots.take(), slots.take(), slots.take()],
            [Some(0), Some(1), Some(2), None]
        );
        slots.give(1);
        assert!(!slots.is_taken(1) && slots.is_taken(2) && !slots.is_taken(3));
        assert_eq!((slots.taken(), slots.take()), (2, Some(1)));
    }

    #[test]
    #[should_panic(expected = "given back once")]
    fn a_slot_cannot_be_given_back_twice() {
        let mut slots = Slots::new(2);
        slots.take();
        slots.give(0);
        slots.give(0);
    }
}
