//! Fair shares: what each tenant has had, of service and of admission.

use alloc::vec::Vec;

use baton_types::TenantId;
use serde::{Deserialize, Serialize};

use crate::conductor::LATEST_US;

/// The weighted accounts of each tenant: of service, for the order inside a band; and of admission, by start-time fair
/// queueing (Goyal, Vin, Cheng 1996). A request's tag is its tenant's account when it is admitted, at least the virtual
/// time, which is the least tag of the waiting requests. So a tenant that asks for more than a share has tags far
/// ahead, and an idle tenant saves nothing up.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct FairShares {
    served: Vec<u64>,
    floor: u64,
    admitted: Vec<u64>,
    virtual_us: u64,
    virtual_at_us: u64,
}

/// Tenants beyond this share one account (I9).
const MAX_TENANTS: usize = 4096;

/// Virtual time is computed again after this, µs.
const VIRTUAL_FOR_US: u64 = 10_000;

impl FairShares {
    /// Whether all accounts can go on: what was read may be anything, and no service lasts for so long.
    pub(crate) fn is_sound(&self) -> bool {
        let others = [self.floor, self.virtual_us, self.virtual_at_us];
        let most_us = self.served.iter().chain(&self.admitted).chain(&others).copied().max();
        self.served.len().max(self.admitted.len()) <= MAX_TENANTS && most_us <= Some(LATEST_US)
    }

    fn slot(tenant: TenantId) -> usize {
        tenant.index().min(MAX_TENANTS - 1)
    }

    /// Weighted service of a tenant, µs; an idle tenant does not save up.
    pub(crate) fn served(&self, tenant: TenantId) -> u64 {
        self.served.get(Self::slot(tenant)).copied().unwrap_or(0).max(self.floor)
    }

    /// Charges a tenant for dispatched work.
    pub(crate) fn charge(&mut self, tenant: TenantId, weight: u32, work_us: u64) {
        let slot = Self::slot(tenant);
        if self.served.len() <= slot {
            self.served.resize(slot + 1, 0);
        }
        let before = self.served[slot].max(self.floor);
        self.served[slot] = before + work_us / u64::from(weight.max(1));
        // The tenant just served was the least served one that waits: no tenant may lag behind it.
        self.floor = before;
    }

    /// Moves virtual time to the least tag of the waiting requests, or past all tags where none waits.
    pub(crate) fn move_on(&mut self, now_us: u64, least_tag_us: impl FnOnce() -> Option<u64>) {
        if now_us < self.virtual_at_us + VIRTUAL_FOR_US {
            return;
        }
        self.virtual_at_us = now_us;
        let least = least_tag_us().unwrap_or_else(|| self.admitted.iter().copied().max().unwrap_or(0));
        self.virtual_us = self.virtual_us.max(least);
    }

    /// The tag of the next request of a tenant.
    pub(crate) fn tag_us(&self, tenant: TenantId) -> u64 {
        self.admitted.get(Self::slot(tenant)).copied().unwrap_or(0).max(self.virtual_us)
    }

    /// Admits work of a tenant, and returns its tag.
    pub(crate) fn admit(&mut self, tenant: TenantId, weight: u32, work_us: u64) -> u64 {
        let (slot, tag_us) = (Self::slot(tenant), self.tag_us(tenant));
        if self.admitted.len() <= slot {
            self.admitted.resize(slot + 1, 0);
        }
        self.admitted[slot] = tag_us + share_us(weight, work_us);
        tag_us
    }

    /// Takes back what a tenant was charged for work that was admitted and is not done.
    pub(crate) fn take_back(&mut self, tenant: TenantId, weight: u32, work_us: u64) {
        if let Some(account_us) = self.admitted.get_mut(Self::slot(tenant)) {
            *account_us = account_us.saturating_sub(share_us(weight, work_us));
        }
    }
}

/// What work takes of a tenant's share of admission, µs.
fn share_us(weight: u32, work_us: u64) -> u64 {
    (work_us / u64::from(weight.max(1))).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_has_its_tags_far_ahead() {
        let mut fair = FairShares::default();
        let flood: Vec<u64> = (0..10).map(|_| fair.admit(TenantId(0), 1, 100)).collect();
        assert_eq!((flood[0], flood[9]), (0, 900));
        assert_eq!(fair.admit(TenantId(1), 1, 100), 0, "its first stands where the flood's first did");
        assert_eq!(fair.admit(TenantId(1), 4, 100), 100);
        assert_eq!(fair.tag_us(TenantId(1)), 125, "a weight divides");
        fair.move_on(20_000, || Some(500));
        assert_eq!(fair.tag_us(TenantId(2)), 500, "a newcomer begins with those that wait");
        fair.move_on(20_001, || Some(600));
        assert_eq!(fair.tag_us(TenantId(2)), 500, "virtual time rests for a while");
        fair.move_on(40_000, || None);
        assert_eq!(fair.tag_us(TenantId(2)), 1_000, "nobody waits: nothing is saved up");
    }

    #[test]
    fn an_idle_tenant_does_not_save_up_service() {
        let mut fair = FairShares::default();
        for _ in 0..10 {
            fair.charge(TenantId(0), 1, 100);
        }
        assert!(fair.served(TenantId(1)) >= 900);
    }

    #[test]
    fn what_is_taken_back_was_never_charged() {
        let mut fair = FairShares::default();
        fair.admit(TenantId(0), 1, 100);
        fair.admit(TenantId(0), 4, 100);
        fair.take_back(TenantId(0), 4, 100);
        assert_eq!(fair.tag_us(TenantId(0)), 100);
        fair.take_back(TenantId(0), 1, 1_000);
        fair.take_back(TenantId(7), 1, 1_000);
        assert_eq!(
            (fair.tag_us(TenantId(0)), fair.tag_us(TenantId(7))),
            (0, 0),
            "an account is never less than nothing"
        );
        assert!(fair.is_sound());
        fair.admit(TenantId(0), 1, u64::MAX / 2);
        assert!(!fair.is_sound());
    }
}
