//! Tenants by name. The core keeps one account per number. Names that no request uses any longer return their number.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use baton_types::TenantId;

/// Tenants with a number of their own at a time (a bound, I9), as many as the core keeps accounts of; more are one with the
/// nameless.
const TENANTS: usize = 4095;

/// The tenants that requests use now, by name.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    known: BTreeMap<Arc<str>, TenantEntry>,
    free: Vec<TenantId>,
    /// Counts up with each request that has a name.
    sequence: u64,
}

#[derive(Debug)]
struct TenantEntry {
    id: TenantId,
    /// When its latest request came, by that count.
    sequence: u64,
}

impl Tenants {
    /// The number of a name. Where all are given out, the names that were not heard of for longest and that are not `in_use`
    /// give theirs back.
    pub(super) fn number(
        &mut self,
        name: &Arc<str>,
        in_use: impl FnOnce() -> BTreeSet<TenantId>,
    ) -> TenantId {
        self.sequence += 1;
        let sequence = self.sequence;
        if let Some(known) = self.known.get_mut(name) {
            known.sequence = sequence;
            return known.id;
        }
        if self.known.len() >= TENANTS {
            self.forget(&in_use());
        }
        let Some(id) = self.free.pop().or_else(|| self.fresh()) else { return TenantId(0) };
        self.known.insert(Arc::clone(name), TenantEntry { id, sequence });
        id
    }

    /// A number that nobody had; none when all were given out.
    fn fresh(&self) -> Option<TenantId> {
        let next = self.known.len() + 1;
        u32::try_from(next).ok().filter(|_| next <= TENANTS).map(TenantId)
    }

    /// Forgets the older half of the tenants without open requests. Forgetting half at once keeps it rare even where a
    /// client sends a new name with each request.
    fn forget(&mut self, in_use: &BTreeSet<TenantId>) {
        let idle = self.known.iter().filter(|(_, known)| !in_use.contains(&known.id));
        let mut idle: Vec<(u64, Arc<str>)> =
            idle.map(|(name, known)| (known.sequence, Arc::clone(name))).collect();
        idle.sort_unstable();
        idle.truncate(idle.len().div_ceil(2));
        let forgotten = idle.iter().filter_map(|(_, name)| self.known.remove(name));
        self.free.extend(forgotten.map(|known| known.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(number: usize) -> Arc<str> {
        format!("t{number}").into()
    }

    #[test]
    fn a_name_keeps_its_number_while_it_is_used() {
        let mut tenants = Tenants::default();
        let none = BTreeSet::new;
        let (a, b) = (tenants.number(&named(1), none), tenants.number(&named(2), none));
        assert_eq!((a, b), (TenantId(1), TenantId(2)));
        assert_eq!(tenants.number(&named(1), none), a);
    }

    #[test]
    fn names_that_a_stranger_makes_up_do_not_use_the_numbers_up() {
        let mut tenants = Tenants::default();
        let held = tenants.number(&named(0), BTreeSet::new);
        for number in 1..3 * TENANTS {
            let id = tenants.number(&named(number), || BTreeSet::from([held]));
            assert!(id != TenantId(0) && id != held && id.index() <= TENANTS, "{number}: {id:?}");
            assert!(tenants.known.len() <= TENANTS);
        }
        assert_eq!(tenants.number(&named(0), BTreeSet::new), held, "it has work under way");
        let ids: BTreeSet<TenantId> = tenants.known.values().map(|known| known.id).collect();
        assert_eq!(ids.len(), tenants.known.len(), "no two share a number");
    }

    #[test]
    fn where_all_have_work_under_way_the_next_one_is_nameless() {
        let mut tenants = Tenants::default();
        let all = || (0..=TENANTS).map(|number| TenantId(u32::try_from(number).unwrap())).collect();
        (0..TENANTS).for_each(|number| assert_ne!(tenants.number(&named(number), all), TenantId(0)));
        assert_eq!(tenants.number(&named(TENANTS), all), TenantId(0));
        assert_eq!(tenants.known.len(), TENANTS);
    }
}
