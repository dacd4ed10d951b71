//! What is on its way, by ticket.

use super::Ticket;
use super::batch::Piece;
use super::slab::Slab;

/// What was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cargo {
    /// A piece of the batch in this slot.
    Data { batch: u32, piece: Piece },
    /// The notice of the batch in this slot.
    Notice { batch: u32 },
    /// A question for a sign of life.
    Probe,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    serial: u32,
    /// The slot of its path.
    pub(crate) path: u32,
    /// Its place in the path's list.
    pub(crate) seat: u32,
    pub(crate) posted_us: u64,
    pub(crate) cargo: Cargo,
}

impl Slice {
    pub(crate) fn bytes(&self) -> u64 {
        match self.cargo {
            Cargo::Data { piece, .. } => u64::from(piece.bytes),
            Cargo::Notice { .. } | Cargo::Probe => 0,
        }
    }
}

/// Everything outstanding. A ticket is a slot and a serial number, so that one that has ended is not taken
/// for the next in its slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slices {
    slab: Slab<Slice>,
    serial: u32,
}

impl Slices {
    pub(crate) fn insert(&mut self, path: u32, seat: u32, posted_us: u64, cargo: Cargo) -> (u32, Ticket) {
        self.serial = self.serial.wrapping_add(1);
        let slot = self.slab.insert(Slice { serial: self.serial, path, seat, posted_us, cargo });
        (slot, Ticket(u64::from(self.serial) << 32 | u64::from(slot)))
    }

    /// The slot of a ticket that is outstanding.
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a ticket")]
    pub(crate) fn find(&self, ticket: Ticket) -> Option<u32> {
        let (serial, slot) = ((ticket.0 >> 32) as u32, ticket.0 as u32);
        self.slab.get(slot).filter(|slice| slice.serial == serial).map(|_| slot)
    }

    pub(crate) fn remove(&mut self, slot: u32) -> Slice {
        self.slab.remove(slot)
    }

    pub(crate) fn get(&self, slot: u32) -> &Slice {
        &self.slab[slot]
    }

    pub(crate) fn mark_damaged(&mut self, slot: u32) {
        if let Cargo::Data { piece, .. } = &mut self.slab[slot].cargo {
            piece.damaged = true;
        }
    }

    pub(crate) fn reseat(&mut self, slot: u32, seat: u32) {
        self.slab[slot].seat = seat;
    }

    pub(crate) fn len(&self) -> usize {
        self.slab.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_that_has_ended_is_not_found_when_its_slot_is_used_again() {
        let mut slices = Slices::default();
        let (slot, first) = slices.insert(0, 0, 5, Cargo::Probe);
        assert_eq!(slices.find(first), Some(slot));
        slices.remove(slot);
        assert_eq!(slices.find(first), None);
        let (again, second) = slices.insert(0, 0, 6, Cargo::Probe);
        assert_eq!((again, slices.find(first), slices.find(second)), (slot, None, Some(slot)));
        assert_eq!(slices.len(), 1);
    }
}
