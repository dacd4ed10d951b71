//! The oracle's part that no core can see: live requests, holds, engines and flights agree, and at
//! rest nothing is left of any of them.

use baton_legs::pairs::Pair;
use baton_legs::{Complete, Leg};
use baton_scheduler::Conductor;
use baton_scheduler::index::MatchScratch;
use baton_store::StoreSnapshot;
use baton_types::{BlockHash, BlockKey, InstanceId};
use hashbrown::HashMap;

use super::World;
use super::node::Node;
use super::requests::LiveRequest;

/// Fails with a sentence unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $($sentence:tt)+) => {
        if !$condition {
            return Err(format!($($sentence)+));
        }
    };
}

impl World {
    /// Audits whole cores when it is due, and what was witnessed at every moment.
    pub(crate) fn audit(&mut self) -> Result<(), String> {
        let now_us = self.now_us;
        let failed = |what: String| format!("oracle at {now_us} µs: {what}");
        if let Some(complaint) = self.oracle.complaint() {
            return Err(failed(complaint.into()));
        }
        if !self.oracle.is_due() {
            return Ok(());
        }
        self.check_cores().map_err(failed)?;
        self.check_requests().map_err(failed)?;
        self.check_nodes().map_err(failed)
    }

    fn check_cores(&self) -> Result<(), String> {
        self.conductors.iter().try_for_each(Conductor::check)?;
        self.nodes
            .iter()
            .try_for_each(|n| n.store.check().map_err(|e| format!("instance {}: {e}", n.spec.id)))?;
        self.network.check()
    }

    fn check_requests(&self) -> Result<(), String> {
        let used = self.live.iter().filter(|l| l.used).count() as u64;
        ensure!(used == self.in_flight, "I5: {} requests in flight, {used} slots in use", self.in_flight);
        for (slot, live) in (0u32..).zip(&self.live).filter(|(_, l)| l.used) {
            self.check_request(slot, live).map_err(|e| format!("{}: {e}; {live:?}", live.id))?;
        }
        Ok(())
    }

    fn check_request(&self, slot: u32, live: &LiveRequest) -> Result<(), String> {
        let (prefill, decode) = (&self.nodes[live.prefill as usize], &self.nodes[live.decode as usize]);
        let local = live.prefill == live.decode;
        ensure!(live.handoff.is_none_or(|n| self.flights.contains_key(&n)), "its hand-off is nowhere");
        let elsewhere = if local { None } else { self.leg_at(live.decode, slot) };
        match self.prefill_leg(slot) {
            None if elsewhere.is_none() => {
                ensure!(live.handoff.is_none() && live.reading_from.is_none(), "I5: it has flights");
            }
            Some(Leg::Loading(_)) => {
                let waits = live.loads > 0 || live.shares || live.reading_from.is_some();
                ensure!(waits, "it waits for nothing");
                ensure!(!live.shares || prefill.sharing.contains(&slot), "nobody looks at what it shares");
            }
            Some(Leg::Computing(_)) => ensure!(prefill.engine.holds(slot).0, "no engine computes it"),
            Some(Leg::Held(complete)) => {
                let retried =
                    || self.pairs[live.router as usize].get(live.id).is_some_and(Pair::retries_handoff);
                let waits = live.handoff.is_some()
                    || matches!(elsewhere, Some(Leg::WaitingForRoom(_)))
                    || (matches!(complete, Complete::Stranded(_)) && retried());
                ensure!(waits, "it is neither under way, nor waiting for room or for its next hand-off");
            }
            _ => {}
        }
        let decodes = self.leg_at(live.decode, slot).filter(|leg| matches!(leg, Leg::Decoding { .. }));
        if let Some(leg) = decodes {
            ensure!(*leg == Leg::Decoding { local }, "I8: it decodes where it is not: {leg:?}");
            ensure!(decode.engine.holds(slot).1, "no engine decodes it");
        }
        Ok(())
    }

    fn check_nodes(&self) -> Result<(), String> {
        for node in &self.nodes {
            let id = node.spec.id;
            node.legs.check().map_err(|e| format!("instance {id}: {e}"))?;
            let count = |which: fn(&Leg) -> bool| node.legs.iter().filter(|(_, leg)| which(leg)).count();
            let jobs = count(|leg| matches!(leg, Leg::Computing(_)));
            ensure!(
                node.engine.jobs() == jobs,
                "instance {id} computes {} jobs instead of {jobs}",
                node.engine.jobs()
            );
            let batch = count(|leg| matches!(leg, Leg::Decoding { .. }));
            ensure!(
                node.engine.batch() == batch,
                "instance {id} decodes {} instead of {batch}",
                node.engine.batch()
            );
        }
        Ok(())
    }

    /// A request that starts over has nothing left of the attempt before.
    pub(crate) fn witness_clean(&mut self, slot: u32) {
        let live = &self.live[slot as usize];
        let clean = !self.has_legs(slot) && live.handoff.is_none() && live.reading_from.is_none();
        self.oracle
            .witness(clean, || format!("I13: {} starts over before it was taken back: {live:?}", live.id));
    }

    /// At rest nothing may be held anywhere, and every request has ended (I3, I5).
    pub(crate) fn oracle_at_rest(&mut self) -> Result<(), String> {
        let failed = |what: String| format!("oracle at rest: {what}");
        if let Some(stuck) = self.live.iter().find(|l| l.used) {
            let (id, at) = (stuck.id, (stuck.prefill, stuck.decode));
            let [prefill, decode] = [at.0, at.1].map(|at| self.nodes[at as usize].legs.get(id));
            return Err(failed(format!(
                "{} requests never ended, {id} first, at {at:?} in {prefill:?} and {decode:?}",
                self.in_flight
            )));
        }
        self.oracle.at_rest(self.arrivals).map_err(failed)?;
        self.check_cores().map_err(failed)?;
        self.check_nodes().map_err(failed)?;
        let flights = self.flights.len();
        if flights > 0 {
            return Err(failed(format!("{flights} flights never ended")));
        }
        for node in &self.nodes {
            check_idle(node).map_err(failed)?;
        }
        for (router, conductor) in self.conductors.iter().enumerate() {
            let known = conductor.snapshot().requests;
            if known > 0 {
                return Err(failed(format!("I5: conductor {router} still knows {known} requests")));
            }
            self.check_index(conductor).map_err(failed)?;
        }
        Ok(())
    }

    /// With all news delivered, the index knows exactly what the stores hold (I6 in its best case).
    /// Slow, so only of audited runs.
    fn check_index(&self, conductor: &Conductor) -> Result<(), String> {
        if self.setup.faults.lost_news_permille > 0 || self.setup.audit_every == 0 {
            return Ok(());
        }
        let mut scratch = MatchScratch::default();
        for node in &self.nodes {
            let snapshot = node.store.snapshot();
            let id = node.spec.id;
            let known = conductor.index().held_blocks(id);
            let held = if node.alive {
                snapshot.blocks.iter().filter(|b| !b.readable_in.is_empty()).count()
            } else {
                0
            };
            ensure!(
                known == held,
                "I6: the index knows {known} blocks on instance {id}, its store holds {held}"
            );
            if node.alive {
                check_chains(conductor, &mut scratch, id, &snapshot)?;
            }
        }
        Ok(())
    }
}

/// Checks that a node at rest has no legs, no pinned or reserved blocks and no waiting requests.
fn check_idle(node: &Node) -> Result<(), String> {
    let (id, pinned) = (node.spec.id, node.store.pinned_total());
    ensure!(pinned == 0, "I3: {pinned} blocks are still pinned on instance {id}");
    let reserved: u64 = node.store.stats().tiers.iter().map(|t| t.reserved_blocks).sum();
    ensure!(reserved == 0, "I5: {reserved} blocks are still reserved on instance {id}");
    let legs: Vec<_> = node.legs.iter().collect();
    ensure!(legs.is_empty(), "instance {id} still has legs: {legs:?}");
    ensure!(
        node.sharing.is_empty(),
        "{} requests still wait for blocks on instance {id}",
        node.sharing.len()
    );
    Ok(())
}

/// Every chain that a store holds is found by a look-up, in full.
fn check_chains(
    conductor: &Conductor,
    scratch: &mut MatchScratch,
    id: InstanceId,
    snapshot: &StoreSnapshot,
) -> Result<(), String> {
    let parents: HashMap<BlockKey, Option<BlockKey>> =
        snapshot.blocks.iter().map(|b| (b.key, b.parent)).collect();
    for block in snapshot.blocks.iter().filter(|b| !b.readable_in.is_empty()) {
        let upward = std::iter::successors(Some(block.key), |key| parents.get(key).copied().flatten());
        let mut chain: Vec<BlockHash> = upward.map(BlockKey::short).collect();
        chain.reverse();
        let mut found = 0;
        conductor.index().matches(&chain, scratch, |m| {
            if m.instance == id {
                found = m.blocks as usize;
            }
        });
        ensure!(
            found == chain.len(),
            "I6: instance {id} holds a chain of {} blocks, the index {found}",
            chain.len()
        );
    }
    Ok(())
}
