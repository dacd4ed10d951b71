//! Which hand-offs have been used, for as long as their leases could make a second use look right.

use std::collections::{BTreeSet, HashMap};

/// Hand-offs remembered at most. More than this many within one lease are refused.
const MOST: usize = 65_536;

/// The names of used hand-offs.
#[derive(Debug, Default)]
pub(crate) struct SpentNames {
    until: HashMap<String, u64>,
    order: BTreeSet<(u64, String)>,
}

/// Why a hand-off may not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpendRefusal {
    /// It has been used.
    Again,
    /// Too many are remembered.
    Full,
}

impl SpentNames {
    /// Marks a hand-off as used, until its lease has run out.
    pub(crate) fn spend(&mut self, name: String, until_us: u64, now_us: u64) -> Result<(), SpendRefusal> {
        while self.order.first().is_some_and(|(until, _)| *until <= now_us) {
            if let Some((_, name)) = self.order.pop_first() {
                self.until.remove(&name);
            }
        }
        if self.until.contains_key(&name) {
            return Err(SpendRefusal::Again);
        }
        if self.until.len() >= MOST {
            return Err(SpendRefusal::Full);
        }
        self.order.insert((until_us, name.clone()));
        self.until.insert(name, until_us);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_once_while_its_lease_lasts() {
        let mut spent = SpentNames::default();
        assert_eq!(spent.spend("a".into(), 10, 0), Ok(()));
        assert_eq!(spent.spend("a".into(), 99, 9), Err(SpendRefusal::Again));
        assert_eq!(spent.spend("b".into(), 10, 9), Ok(()));
        assert_eq!(
            spent.spend("a".into(), 30, 10),
            Ok(()),
            "the old lease is over, and admission has refused it"
        );
        assert_eq!(spent.until.len(), spent.order.len());
    }

    #[test]
    fn memory_is_bounded_and_a_full_one_refuses() {
        let mut spent = SpentNames::default();
        for at in 0..MOST {
            assert_eq!(spent.spend(at.to_string(), 10, 0), Ok(()));
        }
        assert_eq!(spent.spend("x".into(), 10, 0), Err(SpendRefusal::Full));
        assert_eq!(spent.spend("x".into(), 20, 10), Ok(()));
        assert_eq!(spent.until.len(), 1);
    }
}
