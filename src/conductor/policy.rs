//! The policy in force: what is derived from it, and how it changes, whole or not at all.
//!
//! The conductor numbers its policies and keeps the one before, so that a change can be taken back. A change may name
//! the policy that it was made from; it is refused when another is in force by then.

use std::sync::Arc;

use baton_legs::pairs::PairsConfig;
use baton_scheduler::Input;
use baton_types::ClassId;

use super::driver::Driver;
use crate::config::Config;
use crate::policy::{Change, PolicyError, in_lines};

/// A policy that shall be in force.
pub struct PolicyChange {
    /// The whole configuration with it.
    pub config: Config,
    /// The tag of the policy that it was made from ([`crate::policy::tag`]); without one it replaces any.
    pub basis: Option<String>,
    /// Whether an operator says that it is meant. A file that is not confirmed may be half-written, so it may not drop
    /// classes in use.
    pub confirmed: bool,
}

impl PolicyChange {
    /// A change that an operator has confirmed, whatever is in force.
    pub fn confirmed(config: Config) -> Self {
        Self { config, basis: None, confirmed: true }
    }
}

/// A change that was made.
#[derive(Debug, PartialEq, Eq)]
pub struct PolicyOutcome {
    /// The number of the policy that is in force now.
    pub revision: u64,
    /// What differs from the one before, a line each.
    pub changes: Vec<String>,
}

/// Why a policy did not come into force.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum PolicyRefusal {
    /// The policy is wrong: sending it again cannot help.
    #[error(transparent)]
    Wrong(#[from] PolicyError),
    /// Another policy is in force than the one that the change was made from.
    #[error("{0}")]
    Stale(String),
    /// Somebody else was quicker, or there is nothing to take back: read what is in force, and decide anew.
    #[error("{0}")]
    Conflict(String),
    /// It cannot be made here and now, whatever it says; the words tell what to do.
    #[error("{0}")]
    NotNow(String),
}

impl PolicyRefusal {
    /// The refusal of a change that was made from another policy than `revision`.
    pub fn stale(revision: u64) -> Self {
        Self::Stale(format!(
            "the policy has changed since it was read: revision {revision} is in force; read it and decide anew"
        ))
    }
}

/// How long each stage of a request may take.
pub(crate) fn limits(config: &Config) -> PairsConfig {
    let (scheduler, service) = (&config.scheduler, &config.service);
    PairsConfig::new(&scheduler.classes, service.stage_slack, service.stage_floor_us)
}

/// A name that no class has.
#[derive(Debug, thiserror::Error)]
#[error("there is no service class '{name}'; there are: {known}")]
pub(super) struct UnknownClassError {
    name: String,
    known: String,
}

/// The class of that name; the first one where none is named, or a tier of the API's that is no class here.
///
/// # Errors
/// There is none.
pub(super) fn class_named(
    classes: &[baton_types::SloClass],
    wanted: Option<&str>,
) -> Result<ClassId, UnknownClassError> {
    let Some(name) = wanted else { return Ok(ClassId(0)) };
    match classes.iter().position(|class| *class.name == *name) {
        Some(at) => Ok(ClassId(u16::try_from(at).unwrap_or(0))),
        None if baton_router::API_TIERS.contains(&name) => Ok(ClassId(0)),
        None => {
            let known: Vec<&str> = classes.iter().map(|class| class.name.as_str()).collect();
            Err(UnknownClassError { name: name.to_owned(), known: known.join(", ") })
        }
    }
}

impl Driver {
    /// Whether a policy that nobody confirmed leaves clients the classes that they ask for.
    fn keeps_classes(&self, config: &Config) -> Result<(), PolicyError> {
        let has = |config: &Config, name: &str| config.scheduler.classes.iter().any(|c| c.name == name);
        let lost = |name: &&Arc<str>| has(&self.config, name) && !has(config, name);
        let lost: Vec<&str> = self.classes_in_use.iter().filter(lost).map(|name| &**name).collect();
        if lost.is_empty() { Ok(()) } else { Err(PolicyError::DropsClasses(lost.join(", "))) }
    }

    /// Whether a file that nobody confirmed still asks for the keys that are asked for now.
    fn keeps_keys(&self, config: &Config) -> Result<(), PolicyError> {
        let (before, after) = (&self.config.service, &config.service);
        let lost = [
            ("service.api_keys", !before.api_keys.is_empty() && after.api_keys.is_empty()),
            ("service.admin_key", before.admin_key.is_set() && !after.admin_key.is_set()),
        ];
        let lost: Vec<&str> = lost.into_iter().filter_map(|(name, lost)| lost.then_some(name)).collect();
        if lost.is_empty() { Ok(()) } else { Err(PolicyError::DropsKeys(lost.join(" and no "))) }
    }

    /// The configuration under another policy, and what differs from the one in force.
    pub(super) fn checked_policy(&self, mut config: Config) -> Result<(Config, Vec<Change>), PolicyError> {
        crate::policy::keep_what_is_fixed(&self.config, &mut config);
        crate::policy::can_reload(&self.config, &config)?;
        let changes = crate::policy::changes(&self.config, &config);
        self.core.can_change(&config.scheduler).map_err(PolicyError::Scheduler)?;
        Ok((config, changes))
    }

    /// Follows another policy from the next decision on, or none of it.
    fn change_policy(&mut self, config: Config) -> Result<PolicyOutcome, PolicyRefusal> {
        let (config, changes) = self.checked_policy(config)?;
        if !changes.is_empty() {
            self.pairs.configure(limits(&config));
            self.keys.set(&config);
            let differs = self.config.scheduler != config.scheduler;
            if differs {
                self.step(Input::PolicyChanged(Box::new(config.scheduler.clone())));
                self.slo.keep_only(&config.scheduler.classes);
                self.metrics.show_classes(config.scheduler.classes.iter().map(|class| &*class.name));
                self.revision += 1;
            }
            let before = std::mem::replace(&mut self.config, config).scheduler;
            self.previous = if differs { Some(before) } else { self.previous.take() };
            changes.iter().for_each(|change| tracing::info!(%change, "policy changed"));
        }
        Ok(PolicyOutcome { revision: self.revision, changes: in_lines(&changes) })
    }

    /// Makes a change, unless it was made from another policy than the one in force.
    pub(super) fn take_policy(&mut self, change: PolicyChange) -> Result<PolicyOutcome, PolicyRefusal> {
        self.expect_basis(change.basis.as_deref())?;
        if !change.confirmed {
            self.keeps_classes(&change.config)?;
            self.keeps_keys(&change.config)?;
        }
        self.change_policy(change.config)
    }

    /// Takes the last change back, which is a change that can be taken back likewise.
    pub(super) fn roll_back(&mut self, basis: Option<&str>) -> Result<PolicyOutcome, PolicyRefusal> {
        self.expect_basis(basis)?;
        let scheduler = self.previous.clone().ok_or(PolicyError::NothingBefore)?;
        self.change_policy(Config { scheduler, ..self.config.clone() })
    }

    fn expect_basis(&self, basis: Option<&str>) -> Result<(), PolicyRefusal> {
        match basis {
            Some(basis) if basis != crate::policy::tag(self.revision, &self.config) => {
                Err(PolicyRefusal::stale(self.revision))
            }
            _ => Ok(()),
        }
    }
}
