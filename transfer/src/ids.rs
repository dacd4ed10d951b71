//! Identifiers: who assigns each one, and how long it is valid.

/// The number of a batch. The submitter chooses it, and must not reuse it while the batch lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// One life of a peer process, numbered by the driver and not used twice: a peer that restarts is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerNumber(pub u32);

/// One way out of this node (a device of a transport), by its place in [`crate::MoverConfig::rails`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RailNumber(pub u8);

/// One connection over a rail to a peer, numbered by the core and not used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathNumber(pub u32);

/// One slice, probe or notice posted on a path. The core forgets a ticket when it ends, so a completion that comes
/// twice or late changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceTicket(pub u64);

impl RailNumber {
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Its bit in a set of rails.
    pub(crate) fn bit(self) -> u64 {
        1 << self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAX_RAILS;

    #[test]
    fn every_rail_has_a_bit_of_its_own_and_all_fit_one_word() {
        let rails = (0..u8::try_from(MAX_RAILS).unwrap()).map(RailNumber);
        let mut set = 0u64;
        for rail in rails {
            assert_eq!((rail.bit().count_ones(), set & rail.bit()), (1, 0), "{rail:?}");
            assert_eq!(rail.bit().trailing_zeros() as usize, rail.index());
            set |= rail.bit();
        }
        assert_eq!(set, u64::MAX);
    }
}
