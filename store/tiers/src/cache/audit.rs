//! The audit: addresses and bytes are where the store believes them to be.

use super::KvCache;
use crate::tier::Tier as _;
use baton_types::Tier;

macro_rules! ensure {
    ($condition:expr, $($sentence:tt)+) => {
        if !$condition {
            return Err(format!($($sentence)+));
        }
    };
}

impl KvCache {
    /// Audits the ledger of blocks, in a pass over all of them.
    ///
    /// # Errors
    /// The first thing that does not hold, in words.
    pub fn check_ledger(&self) -> Result<(), String> {
        self.store.check()
    }

    /// Audits the store and every address. Slow: for tests and debug builds.
    ///
    /// # Errors
    /// The first thing that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        self.store.check()?;
        self.check_slots()?;
        self.check_bytes()?;
        let snapshot = self.store.snapshot();
        let holds = snapshot.owners.iter().map(|owner| owner.owner);
        ensure!(holds.eq(self.held.keys().copied()), "the holds are not those of the store");
        for owner in self.waiting.keys().chain(self.loads.keys()) {
            ensure!(self.held.contains_key(owner), "{owner} waits without a hold");
        }
        let copies = self.copies.len();
        let tickets = snapshot.offloads_under_way.len();
        ensure!(copies == tickets, "{copies} copies under way, the store waits for {tickets}");
        Ok(())
    }

    /// Every block in HBM has one slot, every private room its slots, and no slot two tenants.
    fn check_slots(&self) -> Result<(), String> {
        let mut tenants = Vec::new();
        for block in self.store.snapshot().blocks {
            if block.readable_in.contains(&Tier::Hbm) || block.filling_in.contains(&Tier::Hbm) {
                let slot = self.address(block.key);
                tenants.push(slot.ok_or_else(|| format!("{:?} has no HBM slot", block.key))?);
            }
        }
        ensure!(tenants.len() == self.addresses.len(), "slots are kept for blocks that left HBM");
        tenants.extend(self.held.values().flat_map(|held| &held.room));
        tenants.sort_unstable();
        ensure!(tenants.is_sorted_by(|a, b| a < b), "an HBM slot has two tenants");
        ensure!(tenants.iter().all(|&slot| self.slots.is_taken(slot)), "a free HBM slot has a tenant");
        ensure!(tenants.len() == self.slots.taken(), "an HBM slot is taken by nobody");
        let hbm = self.store.stats().tiers[Tier::Hbm.index()];
        let granted = hbm.used_blocks + hbm.reserved_blocks;
        ensure!(tenants.len() as u64 == granted, "{} HBM slots taken, {granted} granted", tenants.len());
        Ok(())
    }

    /// Every copy that the store believes in is there, and no others.
    fn check_bytes(&self) -> Result<(), String> {
        let (mut in_dram, mut on_flash) = (0, 0);
        for block in self.store.snapshot().blocks {
            if block.readable_in.contains(&Tier::Dram) {
                in_dram += 1;
                ensure!(self.dram.has(block.key), "{:?} is not in host memory", block.key);
            }
            if block.readable_in.contains(&Tier::Ssd) {
                on_flash += 1;
                let there = self.file.as_ref().is_some_and(|file| file.place(block.key).is_some());
                ensure!(there, "{:?} is not on flash", block.key);
            }
        }
        let arrived: usize = self.copies.iter().map(|copy| copy.in_dram()).sum();
        let kept = self.dram.len_blocks();
        ensure!(kept == in_dram + arrived, "host memory has {kept} blocks, {in_dram} readable");
        if let Some(file) = &self.file {
            let committed = file.committed();
            ensure!(committed == on_flash, "flash has {committed} blocks, {on_flash} readable");
            let places: usize = self.copies.iter().map(|copy| copy.places()).sum();
            let taken = file.len_blocks();
            ensure!(taken == committed + places, "{taken} places on flash, {committed} + {places} in use");
        }
        Ok(())
    }
}
