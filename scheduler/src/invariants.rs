//! An audit of the whole state: every ledger agrees with the requests that it refers to.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};
use hashbrown::HashSet;

use crate::InstanceState;
use crate::conductor::{Conductor, FixedState, LATEST_US};
use crate::config::MOST_RETRIES;
use crate::estimate::common_blocks;
use crate::request::{Entry, Stage};

impl Conductor {
    /// Checks I4, I5, I8, I9 and the ledgers' agreement with the live requests.
    ///
    /// # Errors
    /// Names the first disagreement.
    pub fn check(&self) -> Result<(), String> {
        self.index.check()?;
        self.last_copies.check()?;
        self.check_ledgers()
    }

    /// The part of [`Conductor::check`] that a live service can afford: requests, queues and promises, but neither the
    /// index nor what is copied from lost instances.
    ///
    /// # Errors
    /// The first that does not hold.
    pub fn check_ledgers(&self) -> Result<(), String> {
        self.fleet.check()?;
        let classes = self.config.classes.len();
        if !self.lengths.is_sound(classes)
            || !self.margins.knows(classes)
            || !self.demand.is_sound(classes, self.now_us)
        {
            return Err(String::from(
                "what was learnt of lengths, margins and demand is of other classes than are configured, or of a time \
                 to come",
            ));
        }
        if !self.reserve.is_sound() {
            return Err(String::from("what is kept for higher bands is out of bounds"));
        }
        if self.now_us.max(self.turn).max(self.sequence) > LATEST_US
            || !self.stats.is_sound()
            || !self.replicator.is_sound()
            || !self.cold.is_sound()
        {
            return Err(String::from("time or counters are out of bounds"));
        }
        if !self.fair.is_sound() {
            return Err(String::from("the tenants' shares are out of bounds"));
        }
        self.tickets.check(classes)?;
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
        let sent = |e: &&Entry| e.stage == Stage::Prefilling;
        let under_way = |id| self.requests.get(id).filter(sent).map(|e| e.prefill);
        self.coming.check(self.requests.iter().filter(sent).count(), under_way)?;
        let own = |e: &&Entry| e.stage == Stage::Waiting && e.peer.is_none();
        let waits = |id| self.requests.get(id).filter(own).map(|e| e.prefill);
        self.queued.check(self.requests.iter().filter(own).count(), waits)?;
        self.check_unplaced()?;
        self.check_flights()?;
        self.check_starts()
    }

    /// The router's queue holds the unplaced requests, each once.
    fn check_unplaced(&self) -> Result<(), String> {
        let mut queued = self.unplaced.clone();
        let unplaced = self.requests.iter().filter(|e| e.stage == Stage::Unplaced);
        let mut known: Vec<RequestId> = unplaced.map(|e| e.request.id).collect();
        queued.sort_unstable();
        known.sort_unstable();
        if queued == known {
            Ok(())
        } else {
            Err(format!("I5: {queued:?} wait to be placed, but {known:?} say so"))
        }
    }

    /// The flights of an instance's links are the fetches of its prefills, and hand-offs.
    fn check_flights(&self) -> Result<(), String> {
        let mut flights = vec![[const { Vec::new() }; 2]; self.fleet.bound()];
        for entry in self.requests.iter() {
            let fetch =
                entry.fetch.filter(|_| entry.stage == Stage::Prefilling).map(|f| (f.from, entry.prefill));
            let sent = matches!(entry.stage, Stage::Prefilling | Stage::HandingOff);
            let handoff =
                entry.decode.filter(|to| sent && *to != entry.prefill).map(|to| (entry.prefill, to));
            for (from, to) in fetch.into_iter().chain(handoff) {
                for (at, way) in [(from, 0), (to, 1)] {
                    if self.fleet.get(at).is_none_or(|i| i.state == InstanceState::Lost) {
                        let id = entry.request.id;
                        return Err(format!(
                            "I5: KV of request {id} goes by way of {at}, which is not there"
                        ));
                    }
                    flights[at.index()][way].push(entry.request.id);
                }
            }
        }
        for instance in self.fleet.iter() {
            let links = [&instance.prefill.outbound, &instance.inbound];
            for (link, expected) in links.into_iter().zip(&mut flights[instance.spec.id.index()]) {
                if !link.is_sound() {
                    return Err(format!(
                        "I5: a link of instance {} has learnt what none can",
                        instance.spec.id
                    ));
                }
                let mut known: Vec<RequestId> = link.requests().collect();
                known.sort_unstable();
                expected.sort_unstable();
                if known != *expected {
                    let id = instance.spec.id;
                    return Err(format!("I5: a link of instance {id} carries {known:?}, not {expected:?}"));
                }
            }
        }
        Ok(())
    }

    fn check_instance(&self, instance: &crate::fleet::Instance) -> Result<(), String> {
        let id = instance.spec.id;
        instance.prefill.check().map_err(|why| format!("{why}, on instance {id}"))?;
        instance.decode.check().map_err(|why| format!("{why}, on instance {id}"))?;
        if instance.state == InstanceState::Lost && !instance.owes_nothing() {
            return Err(format!("I13: instance {id} is lost and has work still"));
        }
        let mut seen = HashSet::with_hasher(FixedState);
        let queued = instance.prefill.waiting().iter().map(|w| (w.request, Stage::Waiting));
        let sent = instance.prefill.dispatched().iter().map(|d| (d.request, Stage::Prefilling));
        for (request, stage) in queued.chain(sent) {
            if !seen.insert(request) {
                return Err(format!("I5: request {request} is twice on instance {id}"));
            }
            if self.requests.get(request).is_none_or(|e| e.prefill != id || e.stage != stage) {
                return Err(format!("I5: instance {id} holds request {request}, which is not placed there"));
            }
        }
        let whose = |id| self.requests.get(id).and_then(|e| e.peer);
        if let Some(waiting) = instance.prefill.waiting().iter().find(|w| w.peer != whose(w.request)) {
            return Err(format!("I5: request {} waits on instance {id} for another router", waiting.request));
        }
        self.check_sharing(instance)?;
        for slot in instance.decode.slots() {
            let decodes = |e: &Entry| {
                e.decode == Some(id) && (slot.running || slot.waits) == (e.stage == Stage::Decoding)
            };
            if !self.requests.get(slot.request).is_some_and(decodes) {
                return Err(format!(
                    "I8: instance {id} keeps room for request {}, which is not its own or elsewhere in its life",
                    slot.request
                ));
            }
        }
        Ok(())
    }

    /// The shared tokens of neighbours in a ledger match their chains.
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

    /// A request that decodes or is handed over has room reserved on a decode instance (I8).
    fn check_starts(&self) -> Result<(), String> {
        for entry in self.requests.iter() {
            check_entry(entry)?;
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

/// Invariants of a single live request.
fn check_entry(entry: &Entry) -> Result<(), String> {
    let id = entry.request.id;
    if entry.request.prompt_tokens == 0 {
        return Err(format!("request {id} has no prompt"));
    }
    if entry.retries > MOST_RETRIES + 1 {
        return Err(format!("request {id} was retried {} times", entry.retries));
    }
    if entry.stage == Stage::Unplaced && entry.peer.is_some() {
        return Err(format!("request {id} waits here, though it is another router's"));
    }
    if entry.stage == Stage::Unplaced && entry.decode.is_some() {
        return Err(format!("I8: request {id} has a decode instance before it is placed"));
    }
    if entry.fetch.is_some() && matches!(entry.stage, Stage::HandingOff | Stage::Decoding) {
        return Err(format!("I5: request {id} fetches what it has computed already"));
    }
    Ok(())
}
