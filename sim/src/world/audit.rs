//! The oracle's part that no core can see: live requests, holds, engines and flights agree, and at
//! rest nothing is left of any of them.

use baton_scheduler::Conductor;
use baton_scheduler::index::MatchScratch;
use baton_store::StoreSnapshot;
use baton_types::{BlockHash, BlockKey, InstanceId};
use hashbrown::HashMap;

use super::World;
use super::node::Node;
use super::requests::{Live, Phase};

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
        self.transfers.check()
    }

    fn check_requests(&self) -> Result<(), String> {
        let used = self.live.iter().filter(|l| l.used).count() as u64;
        ensure!(used == self.in_flight, "I5: {} requests in flight, {used} slots in use", self.in_flight);
        for (slot, live) in (0u32..).zip(&self.live).filter(|(_, l)| l.used) {
            self.check_request(slot, live).map_err(|e| format!("{} in {:?}: {e}", live.id, live.phase))?;
        }
        Ok(())
    }

    fn check_request(&self, slot: u32, live: &Live) -> Result<(), String> {
        let (prefill, decode) = (&self.nodes[live.prefill as usize], &self.nodes[live.decode as usize]);
        let local = live.prefill == live.decode;
        let holds = (live.prefill_open, live.decode_open);
        ensure!(live.handoff.is_none_or(|n| self.flights.contains_key(&n)), "its hand-off is nowhere");
        match live.phase {
            Phase::Outside => {
                ensure!(holds == (false, false), "I5: it holds {holds:?}");
                ensure!(live.handoff.is_none() && live.reading_from.is_none(), "I5: it has flights");
            }
            Phase::Incoming => {
                ensure!(holds == (false, false), "I5: it holds {holds:?}");
                ensure!(prefill.incoming.iter().any(|(_, s)| *s == slot), "it waits at no door");
            }
            Phase::Loading => {
                ensure!(live.prefill_open && live.decode_open == local, "I5: it holds {holds:?}");
                ensure!(live.loads > 0 || live.shares, "it waits for nothing");
                ensure!(!live.shares || prefill.sharing.contains(&slot), "nobody looks at what it shares");
            }
            Phase::Prefilling => {
                ensure!(live.prefill_open, "I5: it computes without a hold");
                ensure!(prefill.engine.holds(slot).0, "no engine computes it");
            }
            Phase::HandingOff => {
                ensure!(live.prefill_open && live.prefilled, "I13: nothing to hand off");
                let waits = live.handoff.is_some() || decode.crowded.contains(&slot);
                ensure!(waits, "it is neither under way nor waiting for room");
            }
            Phase::Decoding => {
                ensure!(live.decode_open && live.prefill_open == local, "I8: it holds {holds:?}");
                ensure!(decode.engine.holds(slot).1, "no engine decodes it");
            }
        }
        Ok(())
    }

    fn check_nodes(&self) -> Result<(), String> {
        for (at, node) in (0u32..).zip(&self.nodes) {
            let id = node.spec.id;
            let here = || self.live.iter().filter(|l| l.used && l.prefill == at);
            let opened = here().filter(|l| l.prefill_open && !l.prefilled);
            let opened_tokens: u64 = opened.map(|l| l.prompt_tokens - l.cached_tokens).sum();
            ensure!(
                node.opened_tokens == opened_tokens,
                "instance {id} counts {} opened tokens instead of {opened_tokens}",
                node.opened_tokens
            );
            let jobs = here().filter(|l| l.phase == Phase::Prefilling).count();
            ensure!(
                node.engine.jobs() == jobs,
                "instance {id} computes {} jobs instead of {jobs}",
                node.engine.jobs()
            );
            let batch =
                self.live.iter().filter(|l| l.used && l.decode == at && l.phase == Phase::Decoding).count();
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
        let clean = live.phase == Phase::Outside
            && !live.prefill_open
            && !live.decode_open
            && live.handoff.is_none()
            && live.reading_from.is_none();
        self.oracle
            .witness(clean, || format!("I13: {} starts over before it was taken back: {live:?}", live.id));
    }

    /// At rest nothing may be held anywhere, and every request has ended (I3, I5).
    pub(crate) fn oracle_at_rest(&mut self) -> Result<(), String> {
        let failed = |what: String| format!("oracle at rest: {what}");
        if let Some(stuck) = self.live.iter().find(|l| l.used) {
            let (id, phase, at) = (stuck.id, stuck.phase, (stuck.prefill, stuck.decode));
            return Err(failed(format!(
                "{} requests never ended, {id} in {phase:?} at {at:?} first",
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

/// Nobody is at a node's doors, on its engine or among its pins.
fn check_idle(node: &Node) -> Result<(), String> {
    let (id, pinned) = (node.spec.id, node.store.pinned_total());
    ensure!(pinned == 0, "I3: {pinned} blocks are still pinned on instance {id}");
    let reserved: u64 = node.store.stats().tiers.iter().map(|t| t.reserved_blocks).sum();
    ensure!(reserved == 0, "I5: {reserved} blocks are still reserved on instance {id}");
    let waiting = node.incoming.len() + node.sharing.len() + node.crowded.len();
    ensure!(waiting == 0, "{waiting} requests still wait at the doors of instance {id}");
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
