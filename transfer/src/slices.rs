//! Slices, probes and notices in flight, by ticket.

use crate::SliceTicket;
use crate::batch::Piece;
use crate::slab::Slab;

/// The content of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SliceContent {
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
    pub(crate) position: u32,
    pub(crate) posted_us: u64,
    pub(crate) content: SliceContent,
}

impl Slice {
    pub(crate) fn bytes(&self) -> u64 {
        match self.content {
            SliceContent::Data { piece, .. } => u64::from(piece.bytes),
            SliceContent::Notice { .. } | SliceContent::Probe => 0,
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
    pub(crate) fn insert(
        &mut self,
        path: u32,
        position: u32,
        posted_us: u64,
        content: SliceContent,
    ) -> (u32, SliceTicket) {
        self.serial = self.serial.wrapping_add(1);
        let slot = self.slab.insert(Slice { serial: self.serial, path, position, posted_us, content });
        (slot, SliceTicket(u64::from(self.serial) << 32 | u64::from(slot)))
    }

    /// The slot of a ticket that is outstanding.
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a ticket")]
    pub(crate) fn find(&self, ticket: SliceTicket) -> Option<u32> {
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
        if let SliceContent::Data { piece, .. } = &mut self.slab[slot].content {
            piece.damaged = true;
        }
    }

    pub(crate) fn reseat(&mut self, slot: u32, position: u32) {
        self.slab[slot].position = position;
    }

    pub(crate) fn len(&self) -> usize {
        self.slab.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::{BTreeMap, BTreeSet};
    use baton_types::Rng;

    #[test]
    fn a_ticket_that_has_ended_is_not_found_when_its_slot_is_used_again() {
        let mut slices = Slices::default();
        let (slot, first) = slices.insert(0, 0, 5, SliceContent::Probe);
        assert_eq!(slices.find(first), Some(slot));
        slices.remove(slot);
        assert_eq!(slices.find(first), None);
        let (again, second) = slices.insert(0, 0, 6, SliceContent::Probe);
        assert_eq!((again, slices.find(first), slices.find(second)), (slot, None, Some(slot)));
        assert_eq!(slices.len(), 1);
    }

    fn data(batch: u32, bytes: u32) -> SliceContent {
        SliceContent::Data { batch, piece: Piece { op: 0, at: 0, bytes, tries: 1, damaged: false } }
    }

    #[test]
    fn only_what_is_outstanding_is_found_under_any_ticket_ever_given() {
        let (mut slices, mut rng) = (Slices::default(), Rng::new(11));
        let (mut live, mut given) = (BTreeMap::new(), BTreeSet::new());
        for turn in 0..10_000u32 {
            if rng.chance_permille(520) || live.is_empty() {
                let (slot, ticket) = slices.insert(turn, turn / 2, u64::from(turn), data(turn, turn + 1));
                assert!(given.insert(ticket), "a ticket was given twice");
                assert_eq!(live.insert(ticket, (slot, turn)), None);
            } else {
                let nth = rng.below(live.len() as u64) as usize;
                let (&ticket, &(slot, path)) = live.iter().nth(nth).unwrap();
                let slice = slices.remove(slot);
                assert_eq!((slice.path, slice.position, slice.posted_us), (path, path / 2, u64::from(path)));
                assert_eq!((slice.content, slice.bytes()), (data(path, path + 1), u64::from(path) + 1));
                live.remove(&ticket);
            }
            assert_eq!(slices.len(), live.len());
            if turn.is_multiple_of(100) {
                for &ticket in &given {
                    assert_eq!(slices.find(ticket), live.get(&ticket).map(|&(slot, _)| slot));
                }
            }
        }
    }

    #[test]
    fn tickets_that_were_never_given_are_not_found() {
        let mut slices = Slices::default();
        assert_eq!(slices.find(SliceTicket(0)), None, "nothing was posted yet");
        let (slot, ticket) = slices.insert(0, 0, 0, SliceContent::Probe);
        let wrong_slot = SliceTicket(ticket.0 + 1);
        let wrong_serial = SliceTicket(ticket.0 ^ (1 << 63));
        assert_eq!(
            [wrong_slot, wrong_serial, SliceTicket(u64::from(slot)), SliceTicket(u64::MAX)]
                .map(|t| slices.find(t)),
            [None; 4]
        );
    }

    #[test]
    fn serial_numbers_go_round_without_harm() {
        let mut slices = Slices { serial: u32::MAX - 1, ..Slices::default() };
        let (slot, last) = slices.insert(0, 0, 0, SliceContent::Probe);
        slices.remove(slot);
        let (again, first) = slices.insert(0, 0, 0, SliceContent::Probe);
        assert_eq!((again, first.0 >> 32), (slot, 0), "the serial number went round");
        assert_eq!((slices.find(last), slices.find(first)), (None, Some(slot)));
    }

    #[test]
    fn damage_sticks_to_data_and_changes_nothing_else() {
        let mut slices = Slices::default();
        let (slot, _) = slices.insert(3, 1, 9, data(5, 77));
        let (other, _) = slices.insert(3, 2, 9, data(5, 78));
        slices.mark_damaged(slot);
        let SliceContent::Data { batch: 5, piece } = slices.get(slot).content else { panic!() };
        assert_eq!(piece, Piece { op: 0, at: 0, bytes: 77, tries: 1, damaged: true });
        assert_eq!(slices.get(other).content, data(5, 78));
        for content in [SliceContent::Probe, SliceContent::Notice { batch: 5 }] {
            let (slot, _) = slices.insert(3, 3, 9, content);
            slices.mark_damaged(slot);
            assert_eq!((slices.get(slot).content, slices.get(slot).bytes()), (content, 0));
        }
    }

    #[test]
    fn a_slice_that_is_seated_elsewhere_keeps_its_ticket() {
        let mut slices = Slices::default();
        let (slot, ticket) = slices.insert(3, 8, 9, data(1, 1));
        slices.reseat(slot, 2);
        let slice = slices.get(slot);
        assert_eq!((slice.position, slice.path, slice.posted_us), (2, 3, 9));
        assert_eq!(slices.find(ticket), Some(slot));
    }
}
