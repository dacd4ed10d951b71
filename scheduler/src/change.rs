//! Changes by an operator while the conductor serves: instances are drained, resumed or given another role, and the
//! settings change.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{ClassId, InstanceId, RequestId, Role};

use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::policies::Policy;
use crate::tickets::TicketLedger;
use crate::{ConfigError, Effect, FailStage, InstanceState, SchedulerConfig};

impl Conductor {
    pub(crate) fn instance_drained(&mut self, id: InstanceId, effects: &mut Vec<Effect>) {
        // A lost instance stays lost when it is drained.
        if self.fleet.get(id).is_some_and(Instance::serves) {
            self.fleet.set_state(id, InstanceState::Draining);
            // It may be about to leave, with all that it holds.
            self.save_from(id, effects);
        }
    }

    pub(crate) fn instance_resumed(&mut self, id: InstanceId) {
        match self.fleet.get(id).map(|i| i.state) {
            Some(InstanceState::Draining) => {
                self.fleet.set_state(id, InstanceState::Serving);
                self.wake_waiting();
            }
            Some(InstanceState::Serving) => {}
            Some(InstanceState::Lost) | None => self.stats.stale_inputs += 1,
        }
    }

    pub(crate) fn role_changed(&mut self, id: InstanceId, role: Role, effects: &mut Vec<Effect>) {
        let Some(instance) = self.fleet.get(id).filter(|i| i.state != InstanceState::Lost) else {
            self.stats.stale_inputs += 1;
            return;
        };
        if instance.spec.role == role {
            return;
        }
        if !instance.computes() {
            self.stats.stale_inputs += 1;
            return;
        }
        let waiting: Vec<RequestId> = instance.prefill.waiting().iter().map(|w| w.request).collect();
        self.fleet.set_role(id, role, self.demand.stretch());
        // These have not been sent: they are placed by the new roles.
        for request in waiting {
            let entry = self.requests.remove(request).expect("one retry ends no other request");
            self.release_legs(&entry, effects);
            if entry.peer.is_none() {
                self.retry(entry, FailStage::NoPlacement, effects);
            }
        }
        self.wake_waiting();
    }

    /// Whether [`Input::PolicyChanged`](crate::Input::PolicyChanged) would be obeyed now.
    ///
    /// # Errors
    /// Names the setting that is out of bounds, that takes a restart, or that live requests rely on.
    pub fn can_change(&self, new: &SchedulerConfig) -> Result<(), ConfigError> {
        new.validate()?;
        self.config.can_become(new)?;
        let live = self.requests.len();
        if live > new.max_waiting_requests as usize {
            return Err(ConfigError(format!(
                "scheduler.max_waiting_requests = {} is below the {live} live requests; drain first, or choose more",
                new.max_waiting_requests
            )));
        }
        self.requests
            .iter()
            .filter(|e| e.peer.is_none())
            .try_for_each(|e| self.class_stays(e.request.class, new))
    }

    /// A live request names its class by position: the class there must still be the one it was.
    fn class_stays(&self, class: ClassId, new: &SchedulerConfig) -> Result<(), ConfigError> {
        let at = class.index();
        let Some(old) = self.config.classes.get(at) else { return Ok(()) };
        let Some(now) = new.classes.get(at) else {
            return Err(ConfigError(format!(
                "scheduler.classes has no class {at}, but live requests are of class {:?} there; keep it until they are done",
                old.name
            )));
        };
        if now.name != old.name && new.classes.iter().any(|c| c.name == old.name) {
            return Err(ConfigError(format!(
                "scheduler.classes[{at}] is {:?}, but live requests are of class {:?} there; keep the order until they are done",
                now.name, old.name
            )));
        }
        Ok(())
    }

    /// Applies new settings between two decisions, or keeps the old ones and counts the input as stale.
    pub(crate) fn policy_changed(&mut self, new: SchedulerConfig) {
        if self.can_change(&new).is_err() {
            self.stats.stale_inputs += 1;
            return;
        }
        let names = |c: &SchedulerConfig| c.classes.iter().map(|c| c.name.clone()).collect::<Vec<String>>();
        let (before, after) = (names(&self.config), names(&new));
        self.lengths.reclass(&before, &after, new.prior_output_tokens);
        self.margins.reclass(&before, &after);
        self.demand.reclass(&before, &after);
        if before != after {
            self.tickets = TicketLedger::default();
        }
        self.fleet.keep_orders(new.step_target_us());
        self.config = new;
        self.wake_waiting();
    }
}

impl SchedulerConfig {
    /// Whether these settings can become `new` without a restart, whatever is live.
    ///
    /// # Errors
    /// Names the setting that takes a restart.
    pub fn can_become(&self, new: &Self) -> Result<(), ConfigError> {
        let refused = |name: &&str| {
            Err(ConfigError(format!("scheduler.{name} cannot change while serving; restart to change it")))
        };
        self.fixed_in(new).first().map_or(Ok(()), refused)
    }

    /// The settings that differ in `new` and take a restart.
    #[must_use]
    pub fn fixed_in(&self, new: &Self) -> Vec<&'static str> {
        let queueing = |config: &Self| Policy::named(config.policy).queueing;
        let fixed = [
            ("block_tokens", self.block_tokens != new.block_tokens),
            ("seed", self.seed != new.seed),
            ("policy", queueing(self) != queueing(new)),
        ];
        fixed.into_iter().filter_map(|(name, differs)| differs.then_some(name)).collect()
    }
}
