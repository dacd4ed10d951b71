//! How long each stage of a request may take: derived from its class's objectives, never one number for all.

use baton_types::ClassId;

use crate::config::Config;

use super::session::Session;

/// Stage budgets by class.
pub(super) struct StagePolicy {
    classes: Vec<(u64, u64)>,
    slack: u64,
    floor_us: u64,
    ageing_us: u64,
}

impl StagePolicy {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            classes: config.scheduler.classes.iter().map(|c| (c.ttft_us, c.tbt_us)).collect(),
            slack: u64::from(config.service.stage_slack),
            floor_us: config.service.stage_floor_us,
            ageing_us: config.scheduler.ageing_us,
        }
    }

    fn class(&self, session: &Session) -> (u64, u64) {
        self.classes
            .get(session.class.index())
            .or(self.classes.first())
            .copied()
            .unwrap_or((30_000_000, 100_000))
    }

    /// Held back by the conductor: it promised the first token within the objective. A request that is late
    /// all the same waits behind those that can still be in time, until it has aged: it is not given up before.
    pub(super) fn queue_stage_us(&self, session: &Session) -> u64 {
        self.class(session).0.max(self.ageing_us).saturating_add(self.floor_us)
    }

    /// Without an instance that could take it on: its client has waited long enough when it would be late.
    pub(super) fn parked_stage_us(&self, session: &Session) -> u64 {
        self.class(session).0.saturating_add(self.floor_us)
    }

    /// From the order to prefill to its end: never less than twice what it is foreseen to take, whatever the class
    /// may ask for.
    pub(super) fn prefill_stage_us(&self, session: &Session) -> u64 {
        let foreseen_us = session.foreseen_us;
        let allowed_us = foreseen_us.min(self.class(session).0).saturating_mul(self.slack);
        allowed_us.max(foreseen_us.saturating_mul(2)).max(self.floor_us)
    }

    /// From the end of the prefill to verified KV on the decode instance.
    pub(super) fn handoff_stage_us(&self, session: &Session) -> u64 {
        session.foreseen_us.min(self.class(session).0).max(self.floor_us)
    }

    /// Between two tokens.
    pub(super) fn token_stage_us(&self, session: &Session) -> u64 {
        (self.class(session).1 * self.slack * 10).max(self.floor_us)
    }
}

/// The class of that name; the first one for who names none, or a tier of the API's that is no class here.
///
/// # Errors
/// In words: there is none.
pub(super) fn class_named(
    classes: &[baton_types::SloClass],
    wanted: Option<&str>,
) -> Result<ClassId, String> {
    let Some(name) = wanted else { return Ok(ClassId(0)) };
    match classes.iter().position(|class| *class.name == *name) {
        Some(at) => Ok(ClassId(u16::try_from(at).unwrap_or(0))),
        None if baton_router::API_TIERS.contains(&name) => Ok(ClassId(0)),
        None => {
            let known: Vec<&str> = classes.iter().map(|class| class.name.as_str()).collect();
            Err(format!("there is no service class '{name}'; there are: {}", known.join(", ")))
        }
    }
}
