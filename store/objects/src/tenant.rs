//! Tenants: a number for each name, and how much each may have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_types::TenantId;
use parking_lot::RwLock;

use crate::refusal::Refusal;

/// Most tenants of a store.
pub const TENANTS_MAX: usize = 4096;

/// One tenant's share.
#[derive(Debug)]
pub(crate) struct Share {
    name: String,
    used_bytes: AtomicU64,
    quota_bytes: AtomicU64,
}

impl Share {
    /// Takes `bytes` of the quota, all or nothing.
    pub(crate) fn charge(&self, bytes: u64) -> bool {
        let quota = self.quota_bytes.load(Ordering::Relaxed);
        let more = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= quota);
        self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Whether so much more fits at the moment.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        self.used_bytes().checked_add(bytes).is_some_and(|sum| sum <= self.quota_bytes())
    }

    pub(crate) fn quota_bytes(&self) -> u64 {
        self.quota_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn refund(&self, bytes: u64) {
        let before = self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "a share is refunded once");
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }
}

/// All tenants, dense from zero.
#[derive(Debug)]
pub(crate) struct Tenants {
    shares: RwLock<Vec<Arc<Share>>>,
}

impl Tenants {
    pub(crate) fn new() -> Self {
        let anonymous = Share {
            name: String::new(),
            used_bytes: AtomicU64::new(0),
            quota_bytes: AtomicU64::new(u64::MAX),
        };
        Self { shares: RwLock::new(vec![Arc::new(anonymous)]) }
    }

    /// The number of `name`, with `quota_bytes` from now on; none when there are [`TENANTS_MAX`].
    pub(crate) fn open(&self, name: &str, quota_bytes: u64) -> Option<TenantId> {
        let mut shares = self.shares.write();
        let at = shares.iter().position(|share| share.name == name).or_else(|| {
            let share =
                Share { name: name.into(), used_bytes: AtomicU64::new(0), quota_bytes: AtomicU64::new(0) };
            (shares.len() < TENANTS_MAX).then(|| {
                shares.push(Arc::new(share));
                shares.len() - 1
            })
        })?;
        shares[at].quota_bytes.store(quota_bytes, Ordering::Relaxed);
        Some(TenantId(u32::try_from(at).expect("at most TENANTS_MAX")))
    }

    pub(crate) fn share(&self, tenant: TenantId) -> Result<Arc<Share>, Refusal> {
        self.shares.read().get(tenant.0 as usize).cloned().ok_or(Refusal::Tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_ends_at_its_quota_and_names_keep_their_number() {
        let tenants = Tenants::new();
        assert_eq!(tenants.open("a", 100), Some(TenantId(1)));
        let share = tenants.share(TenantId(1)).unwrap();
        assert!(share.charge(60) && !share.charge(41) && share.charge(40));
        share.refund(1);
        assert_eq!(share.used_bytes(), 99);
        assert_eq!(tenants.open("a", 50), Some(TenantId(1)));
        assert!(!share.charge(1), "a smaller quota counts at once");
        assert!(tenants.share(TenantId(2)).is_err());
    }

    #[test]
    fn there_is_a_most() {
        let tenants = Tenants::new();
        assert!((1..TENANTS_MAX).all(|n| tenants.open(&n.to_string(), 1).is_some()));
        assert_eq!(tenants.open("one more", 1), None);
        assert_eq!(tenants.open("1", 1), Some(TenantId(1)));
    }
}
