//! Keys that are parts of one object; all of them are in one shard.

use baton_types::TenantId;

use super::{Place, Shard};
use crate::key::Key;
use crate::lower;

impl Shard {
    /// Whether every part of the key's object is there, in memory or below. True for what has no parts.
    pub(crate) fn is_whole(&self, at: &Place<'_>) -> bool {
        let part = self.config.set.parts.as_ref().and_then(|rule| rule.split(at.key.bytes));
        part.is_none_or(|part| {
            part.all(|key| {
                let key = Key { bytes: key, ..at.key };
                self.has(&Place { key, place: self.place_of(&key), ..*at })
            })
        })
    }

    fn has(&self, at: &Place<'_>) -> bool {
        let found = self.find(&at.key, at.place);
        found.is_some_and(|number| !self.entries.at(number).is_expired(at.now_us)) || self.is_below(&at.key)
    }

    fn is_below(&self, key: &Key<'_>) -> bool {
        let Some(below) = &self.below else { return false };
        let share = self.tenants.share(key.tenant);
        share.is_ok_and(|share| below.may_hold(lower::name_of(share.name(), key.bytes)))
    }

    /// The other parts of an object that are in memory. Empty for what has no parts.
    pub(super) fn others(&self, number: u32) -> Vec<u32> {
        let Some(rule) = &self.config.set.parts else { return Vec::new() };
        let entry = self.entries.at(number);
        let mut others = Vec::new();
        if let Some(part) = rule.split(&entry.key) {
            part.all(|key| {
                let key = Key { tenant: TenantId(entry.tenant), bytes: key };
                others.extend(self.find(&key, self.place_of(&key)).filter(|other| *other != number));
                true
            });
        }
        others
    }
}
