//! An audit of the whole state: every ledger agrees with the requests that it speaks of.

use alloc::format;
use alloc::string::String;
use baton_types::InstanceId;
use hashbrown::HashSet;

use crate::conductor::{Conductor, FixedState};
use crate::estimate::common_blocks;
use crate::request::{Entry, Stage};

impl Conductor {
    /// Checks I4, I5, I8, I9 and the ledgers' agreement with the live requests.
    ///
    /// # Errors
    /// Names the first disagreement.
    pub fn check(&self) -> Result<(), String> {
        self.index.check()?;
        self.salvage.check()?;
        self.check_ledgers()
    }

    /// The part of [`Conductor::check`] that a live service can afford: requests, queues and promises, but neither the
    /// index nor what is copied from lost instances.
    ///
    /// # Errors
    /// The first that does not hold.
    pub fn check_ledgers(&self) -> Result<(), String> {
        if self.requests.len() > self.config.max_waiting_requests as usize + 1 {
            return Err(format!("I9: {} live requests exceed the bound", self.requests.len()));
        }
        let mut waiting = 0;
        let mut dispatched = 0;
        let mut promised = 0;
        for instance in self.fleet.iter() {
            waiting += instance.prefill.waiting().len();
            dispatched += instance.prefill.dispatched().len();
            promised += instance.decode.slots().len();
            self.check_instance(instance)?;
        }
        let count = |stage| self.requests.iter().filter(|e| e.stage == stage).count();
        if waiting != count(Stage::Waiting) || dispatched != count(Stage::Prefilling) {
            return Err(format!(
                "I5: {waiting} waiting and {dispatched} dispatched, but {} and {} requests say so",
                count(Stage::Waiting),
                count(Stage::Prefilling)
            ));
        }
        let reserved = self.requests.iter().filter(|e| e.decode.is_some()).count();
        if promised != reserved {
            return Err(format!(
                "I8: {promised} decode slots for {reserved} requests with a decode instance"
            ));
        }
        let own = |e: &&Entry| e.stage == Stage::Prefilling && !e.foreign;
        let under_way = |id| self.requests.get(id).filter(own).map(|e| e.prefill);
        self.coming.check(self.requests.iter().filter(own).count(), under_way)?;
        self.check_starts()
    }

    fn check_instance(&self, instance: &crate::fleet::Instance) -> Result<(), String> {
        let id = instance.spec.id;
        instance.decode.check().map_err(|why| format!("{why}, on instance {id}"))?;
        let mut seen = HashSet::with_hasher(FixedState);
        let queued = instance.prefill.waiting().iter().map(|w| w.request);
        for request in queued.chain(instance.prefill.dispatched().iter().map(|d| d.request)) {
            if !seen.insert(request) {
                return Err(format!("I5: request {request} is twice on instance {id}"));
            }
            if self.requests.get(request).is_none_or(|e| e.prefill != id) {
                return Err(format!("I5: instance {id} holds request {request}, which is not placed there"));
            }
        }
        self.check_sharing(instance)?;
        for slot in instance.decode.slots() {
            if self.requests.get(slot.request).is_none_or(|e| e.decode != Some(id)) {
                return Err(format!(
                    "I8: instance {id} keeps room for request {}, which is not its own",
                    slot.request
                ));
            }
        }
        Ok(())
    }

    /// What prompts beside each other in a ledger share is what their chains say.
    fn check_sharing(&self, instance: &crate::fleet::Instance) -> Result<(), String> {
        let block_tokens = u64::from(self.config.block_tokens);
        for pair in instance.decode.slots().windows(2) {
            let entry = |at: usize| self.requests.get(pair[at].request);
            let Some((one, other)) = entry(0).zip(entry(1)) else { continue };
            let common = common_blocks(&one.request.chain, &other.request.chain);
            if pair[1].common_tokens != common as u64 * block_tokens {
                let id = instance.spec.id;
                return Err(format!(
                    "I8: request {} shares {common} blocks on instance {id}, the ledger says {} tokens",
                    pair[1].request, pair[1].common_tokens
                ));
            }
        }
        Ok(())
    }

    /// Whoever decodes or is handed over has a decode instance with room reserved (I8).
    fn check_starts(&self) -> Result<(), String> {
        for entry in self.requests.iter() {
            let needs = matches!(entry.stage, Stage::Prefilling | Stage::HandingOff | Stage::Decoding);
            if needs && entry.decode.is_none() {
                return Err(format!("I8: request {} runs without decode room", entry.request.id));
            }
            let holds = |d: InstanceId| {
                self.fleet
                    .get(d)
                    .is_some_and(|i| i.decode.slots().iter().any(|s| s.request == entry.request.id))
            };
            if entry.decode.is_some_and(|d| !holds(d)) {
                return Err(format!("I8: request {} lost its reservation", entry.request.id));
            }
        }
        Ok(())
    }
}
