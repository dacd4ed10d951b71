//! The audit: every invariant of the index, recounted from scratch.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::PrefixIndex;
use super::run::{Run, RunId};

type Audit = Result<(), String>;

fn ensure(holds: bool, broken: impl FnOnce() -> String) -> Audit {
    if holds { Ok(()) } else { Err(format!("index audit: {}; rebuild the index", broken())) }
}

impl PrefixIndex {
    pub(super) fn audit(&self) -> Audit {
        for (id, run) in self.runs.iter() {
            self.audit_run(id, run)?;
            self.audit_holders(id, run)?;
        }
        self.audit_space()?;
        self.audit_holdings()?;
        self.audit_counters()
    }

    fn audit_run(&self, id: RunId, run: &Run) -> Audit {
        ensure(run.reserved >= run.len, || format!("{id:?} is longer than its slots"))?;
        let hashes = self.arena.hashes(run.blocks());
        let ends = (hashes.first(), hashes.last());
        ensure(ends == (Some(&run.first), Some(&run.last)), || format!("{id:?} misstates its ends"))?;
        let extent = run.extent();
        for position in extent.start..extent.start + extent.len {
            ensure(self.arena.owner(position) == Some(id), || format!("{id:?} lost slot {position}"))?;
        }
        for (position, &hash) in (run.start..).zip(hashes) {
            let found = self.blocks.find(hash, |at| self.arena.hash(at) == hash);
            ensure(found == Some(position), || format!("block {hash:#x} is found at {found:?}"))?;
        }
        let head = self.heads.find(run.first, |at| self.runs.get(RunId(at)).first == run.first);
        ensure(head == Some(id.0), || format!("{id:?} is not found by its first block"))
    }

    fn audit_holders(&self, id: RunId, run: &Run) -> Audit {
        let holders = run.holders.as_slice();
        ensure(!holders.is_empty(), || format!("{id:?} is held by nobody"))?;
        let sorted = holders.windows(2).all(|pair| pair[0].instance() < pair[1].instance());
        ensure(sorted, || format!("the holders of {id:?} are out of order"))?;
        ensure(!holders.iter().any(|h| h.is_nowhere()), || format!("{id:?} is held in no tier"))
    }

    /// Runs and free extents cover the arena, each slot once.
    fn audit_space(&self) -> Audit {
        let mut seen = vec![false; self.arena.slots()];
        let owned = self.runs.iter().map(|(_, run)| run.extent());
        for extent in owned.chain(self.arena.free_extents()) {
            for position in extent.start..extent.start + extent.len {
                let before = core::mem::replace(&mut seen[position as usize], true);
                ensure(!before, || format!("slot {position} has two owners"))?;
            }
        }
        ensure(seen.iter().all(|&slot| slot), || String::from("a slot is lost"))?;
        let free = self.arena.free_extents().map(|extent| extent.len as usize).sum::<usize>();
        ensure(free == self.arena.free_slots(), || format!("{free} slots are free, not as counted"))
    }

    fn audit_holdings(&self) -> Audit {
        let mut held = vec![(0usize, 0usize); self.holdings.instances()];
        for (_, run) in self.runs.iter() {
            for holder in run.holders.as_slice() {
                let of = &mut held[holder.instance().index()];
                *of = (of.0 + usize::from(run.len), of.1 + 1);
            }
        }
        for (instance, (live_runs, list)) in self.holdings.lists().enumerate() {
            let id = baton_types::InstanceId(instance as u32);
            let counted = (self.holdings.blocks(id), live_runs);
            ensure(held[instance] == counted, || {
                format!("instance {id} holds {:?}, counted {counted:?}", held[instance])
            })?;
            let mut named: Vec<RunId> = list.to_vec();
            named.sort_unstable();
            named.dedup();
            let holds =
                |run: &RunId| self.runs.live(*run).is_some_and(|run| !run.holders.get(id).is_nowhere());
            let known = named.iter().filter(|run| holds(run)).count();
            ensure(known == live_runs, || format!("instance {id} lists {known} of {live_runs} runs"))?;
        }
        Ok(())
    }

    fn audit_counters(&self) -> Audit {
        let blocks = self.runs.iter().map(|(_, run)| usize::from(run.len)).sum::<usize>();
        ensure(blocks == self.blocks.len(), || {
            format!("{blocks} blocks, {} in the table", self.blocks.len())
        })?;
        let runs = self.runs.iter().count();
        let counted = (self.runs.len(), self.heads.len());
        ensure(counted == (runs, runs), || format!("{runs} runs, counted {counted:?}"))?;
        ensure(self.blocks.audit() && self.heads.audit(), || String::from("a table miscounts"))?;
        let lists = (self.holdings.recounted_bytes(), self.holdings.memory_bytes());
        ensure(lists.0 == lists.1, || format!("lists take {} bytes, counted {}", lists.0, lists.1))
    }
}
