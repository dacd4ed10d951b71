//! One tier's slots: free, reserved or used (I4).

/// Counts of one tier's slots; used + reserved never exceed the capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Capacity {
    capacity: u64,
    used: u64,
    reserved: u64,
}

impl Capacity {
    /// A tier of `capacity` free slots.
    pub(crate) const fn new(capacity: u64) -> Self {
        Self { capacity, used: 0, reserved: 0 }
    }

    /// All slots.
    pub(crate) const fn capacity(self) -> u64 {
        self.capacity
    }

    /// Slots that hold readable bytes.
    pub(crate) const fn used(self) -> u64 {
        self.used
    }

    /// Slots that bytes are on their way to, and private room.
    pub(crate) const fn reserved(self) -> u64 {
        self.reserved
    }

    /// Free slots.
    pub(crate) const fn free(self) -> u64 {
        self.capacity - self.used - self.reserved
    }

    /// Takes `slots` free ones.
    pub(crate) fn reserve(&mut self, slots: u64) {
        assert!(slots <= self.free(), "I4: reserving more than is free");
        self.reserved += slots;
        assert!(self.used + self.reserved <= self.capacity, "I4: more slots are taken than there are");
    }

    /// Gives back `slots` that were reserved.
    pub(crate) fn unreserve(&mut self, slots: u64) {
        assert!(slots <= self.reserved, "I4: giving back more than was reserved");
        self.reserved -= slots;
    }

    /// A reserved slot became readable.
    pub(crate) fn fill(&mut self) {
        self.unreserve(1);
        self.used += 1;
    }

    /// A readable slot became free.
    pub(crate) fn empty(&mut self) {
        assert!(self.used > 0, "I4: emptying a slot of an empty tier");
        self.used -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_move_between_free_reserved_and_used() {
        let mut space = Capacity::new(3);
        space.reserve(2);
        space.fill();
        assert_eq!((space.free(), space.reserved(), space.used()), (1, 1, 1));
        space.unreserve(1);
        space.empty();
        assert_eq!(space, Capacity::new(3));
    }

    #[test]
    #[should_panic(expected = "I4")]
    fn overcommitting_is_a_programmer_error() {
        Capacity::new(1).reserve(2);
    }

    #[test]
    #[should_panic(expected = "I4")]
    fn a_slot_is_given_back_once() {
        let mut space = Capacity::new(1);
        space.reserve(1);
        space.unreserve(1);
        space.unreserve(1);
    }
}
