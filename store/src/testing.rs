//! A store on a bench, for the tests of single rules: every step is audited.

use crate::{Effect, Eviction, Hits, Input, Offload, Owner, Store, StoreConfig};
use alloc::vec::Vec;
use baton_types::{BlockKey, RequestId};

/// A store, and words for what tests do with it. Owners and keys are plain numbers.
pub(crate) struct Rig {
    /// The store.
    pub store: Store,
    now_us: u64,
}

/// Keys from numbers.
pub(crate) fn keys(numbers: &[u128]) -> Vec<BlockKey> {
    numbers.iter().map(|&number| BlockKey(number)).collect()
}

/// An owner from a number.
pub(crate) fn owner(number: u64) -> Owner {
    RequestId(number)
}

impl Rig {
    /// Tiers of the given sizes under `Lru`; flash takes everything.
    pub(crate) fn new(capacities: [u64; 3], offload: Offload) -> Self {
        let [hbm_blocks, dram_blocks, ssd_blocks] = capacities;
        Self::with(StoreConfig {
            hbm_blocks,
            dram_blocks,
            ssd_blocks,
            eviction: Eviction::Lru,
            offload,
            ssd_second_touch: false,
        })
    }

    /// A store of any configuration.
    pub(crate) fn with(config: StoreConfig) -> Self {
        Self { store: Store::new(config).unwrap(), now_us: 0 }
    }

    /// One audited step.
    pub(crate) fn step(&mut self, input: Input<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.now_us += 1;
        self.store.step(self.now_us, input, &mut effects);
        assert_eq!(self.store.check(), Ok(()));
        effects
    }

    /// Lets time pass.
    pub(crate) fn wait_us(&mut self, wait_us: u64) {
        self.now_us += wait_us;
    }

    pub(crate) fn open(&mut self, number: u64, chain: &[u128], room_blocks: u32) -> Vec<Effect> {
        self.step(Input::Open { owner: owner(number), chain: &keys(chain), room_blocks })
    }

    pub(crate) fn read(&mut self, number: u64, chain: &[u128]) -> Vec<Effect> {
        self.step(Input::Read { owner: owner(number), chain: &keys(chain) })
    }

    pub(crate) fn seal(&mut self, number: u64, upto_blocks: u32) -> Vec<Effect> {
        self.step(Input::Seal { owner: owner(number), upto_blocks })
    }

    pub(crate) fn close(&mut self, number: u64) -> Vec<Effect> {
        self.step(Input::Close { owner: owner(number) })
    }

    pub(crate) fn onboarded(&mut self, number: u64, ok: bool) -> Vec<Effect> {
        self.step(Input::OnboardDone { owner: owner(number), ok })
    }

    pub(crate) fn offloaded(&mut self, ticket: u64, ok: bool) -> Vec<Effect> {
        self.step(Input::OffloadDone { ticket, ok })
    }

    /// Opens, seals and closes; gives all effects.
    pub(crate) fn serve(&mut self, number: u64, chain: &[u128]) -> Vec<Effect> {
        let mut effects = self.open(number, chain, 0);
        effects.extend(self.seal(number, u32::MAX));
        effects.extend(self.close(number));
        effects
    }

    /// Leading readable blocks in HBM, DRAM and on flash.
    pub(crate) fn hits(&self, chain: &[u128]) -> (u32, u32, u32) {
        let Hits { hbm, dram, ssd, .. } = self.store.lookup(&keys(chain));
        (hbm, dram, ssd)
    }
}
