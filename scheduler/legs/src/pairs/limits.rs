//! How long each stage of a request may take: derived from its objectives, never one number for all.

use alloc::vec;
use alloc::vec::Vec;

use baton_types::{ClassId, SloClass};

use super::Pair;

/// How many times what its objective allows a stage may take, unless configured.
pub const STAGE_SLACK: u32 = 4;
/// Lower bound on the limit of any stage, unless configured, µs.
pub const STAGE_FLOOR_US: u64 = 5_000_000;

/// Parameters of the limits of all stages.
#[derive(Clone, Debug, PartialEq)]
pub struct PairsConfig {
    /// At least one.
    classes: Vec<SloClass>,
    slack: u64,
    floor_us: u64,
}

impl PairsConfig {
    /// Limits for these classes: a stage may take `stage_slack` times what its objective allows, and
    /// `stage_floor_us` in any case.
    #[must_use]
    pub fn new(classes: &[SloClass], stage_slack: u32, stage_floor_us: u64) -> Self {
        Self {
            classes: if classes.is_empty() { vec![SloClass::default()] } else { classes.to_vec() },
            slack: u64::from(stage_slack),
            floor_us: stage_floor_us,
        }
    }

    /// The limit for a stage that is expected to take this long.
    pub(super) const fn slack(&self, foreseen_us: u64) -> u64 {
        foreseen_us.saturating_mul(self.slack)
    }

    fn class(&self, class: ClassId) -> &SloClass {
        self.classes.get(class.index()).unwrap_or(&self.classes[0])
    }

    /// The TTFT that holds for a request, µs.
    fn ttft_us(&self, pair: &Pair) -> u64 {
        pair.objectives.in_force(self.class(pair.class)).0
    }

    /// Held back by the conductor: it promised the first token within the objective. A request that is late
    /// all the same waits behind those that can still be in time, for twice as long: it is not given up before.
    pub(super) fn queue_stage_us(&self, pair: &Pair) -> u64 {
        self.ttft_us(pair).saturating_mul(2).saturating_add(self.floor_us)
    }

    /// Without an instance that could take it on: its client has waited long enough when it would be late.
    pub(super) fn parked_stage_us(&self, pair: &Pair) -> u64 {
        self.ttft_us(pair).saturating_add(self.floor_us)
    }

    /// From the order to prefill to its end: at least twice the predicted time, whatever the objective.
    pub(super) fn prefill_stage_us(&self, pair: &Pair) -> u64 {
        let foreseen_us = pair.foreseen_us;
        let allowed_us = foreseen_us.min(self.ttft_us(pair)).saturating_mul(self.slack);
        allowed_us.max(foreseen_us.saturating_mul(2)).max(self.floor_us)
    }

    /// From the end of the prefill to verified KV on the decode instance.
    pub(super) fn handoff_stage_us(&self, pair: &Pair) -> u64 {
        pair.foreseen_us.min(self.ttft_us(pair)).max(self.floor_us)
    }

    /// Between two tokens: by its class's TBT, also where a request names a longer one. An engine that stands still is
    /// found in the same time for all.
    pub(super) fn token_stage_us(&self, class: ClassId) -> u64 {
        (self.class(class).tbt_us * self.slack * 10).max(self.floor_us)
    }
}
