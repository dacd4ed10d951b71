//! How long each stage of a request may take: derived from its class's objectives, never one number for all.

use alloc::vec::Vec;

use baton_types::{ClassId, SloClass};

use super::Pair;

/// How many times what its objective allows a stage may take, unless configured.
pub const STAGE_SLACK: u32 = 4;
/// Lower bound on the limit of any stage, unless configured, µs.
pub const STAGE_FLOOR_US: u64 = 5_000_000;
/// Objectives of a class that is not there.
const NO_CLASS: (u64, u64) = (30_000_000, 100_000);

/// Parameters of the limits of all stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairsConfig {
    /// TTFT and TBT of each class, µs.
    classes: Vec<(u64, u64)>,
    slack: u64,
    floor_us: u64,
}

impl PairsConfig {
    /// Limits for these classes: a stage may take `stage_slack` times what its objective allows, and
    /// `stage_floor_us` in any case.
    #[must_use]
    pub fn new(classes: &[SloClass], stage_slack: u32, stage_floor_us: u64) -> Self {
        Self {
            classes: classes.iter().map(|class| (class.ttft_us, class.tbt_us)).collect(),
            slack: u64::from(stage_slack),
            floor_us: stage_floor_us,
        }
    }

    /// The limit for a stage that is expected to take this long.
    pub(super) const fn slack(&self, foreseen_us: u64) -> u64 {
        foreseen_us.saturating_mul(self.slack)
    }

    fn class(&self, class: ClassId) -> (u64, u64) {
        self.classes.get(class.index()).or(self.classes.first()).copied().unwrap_or(NO_CLASS)
    }

    /// Held back by the conductor: it promised the first token within the objective. A request that is late
    /// all the same waits behind those that can still be in time, for twice as long: it is not given up before.
    pub(super) fn queue_stage_us(&self, class: ClassId) -> u64 {
        self.class(class).0.saturating_mul(2).saturating_add(self.floor_us)
    }

    /// Without an instance that could take it on: its client has waited long enough when it would be late.
    pub(super) fn parked_stage_us(&self, class: ClassId) -> u64 {
        self.class(class).0.saturating_add(self.floor_us)
    }

    /// From the order to prefill to its end: at least twice the predicted time, for every class.
    pub(super) fn prefill_stage_us(&self, pair: &Pair) -> u64 {
        let foreseen_us = pair.foreseen_us;
        let allowed_us = foreseen_us.min(self.class(pair.class).0).saturating_mul(self.slack);
        allowed_us.max(foreseen_us.saturating_mul(2)).max(self.floor_us)
    }

    /// From the end of the prefill to verified KV on the decode instance.
    pub(super) fn handoff_stage_us(&self, pair: &Pair) -> u64 {
        pair.foreseen_us.min(self.class(pair.class).0).max(self.floor_us)
    }

    /// Between two tokens.
    pub(super) fn token_stage_us(&self, class: ClassId) -> u64 {
        (self.class(class).1 * self.slack * 10).max(self.floor_us)
    }
}
