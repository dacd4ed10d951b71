//! The blocks and runs of each instance, so that an instance can be forgotten without a walk over all blocks.

use alloc::vec::Vec;

use baton_types::InstanceId;

use super::run::{RunId, Runs};

/// Stale names kept per list before it is swept, beyond as many as are live.
const SLACK: usize = 32;

#[derive(Debug, Default)]
struct Holding {
    blocks: usize,
    live_runs: usize,
    /// Every run that the instance holds; also, until swept, runs that it held before.
    runs: Vec<RunId>,
}

/// The holdings of all instances.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    each: Vec<Holding>,
    list_bytes: usize,
}

impl Holdings {
    /// Heap bytes, exactly.
    pub(super) const fn memory_bytes(&self) -> usize {
        self.each.capacity() * size_of::<Holding>() + self.list_bytes
    }

    /// Blocks that an instance holds.
    pub(super) fn blocks(&self, instance: InstanceId) -> usize {
        self.each.get(instance.index()).map_or(0, |holding| holding.blocks)
    }

    /// Instances known so far: one more than the highest id.
    pub(super) const fn instances(&self) -> usize {
        self.each.len()
    }

    /// Bytes by which the table of instances grows when `instance` first holds something.
    pub(super) fn growth_bytes(&self, instance: InstanceId) -> usize {
        let (now, needed) = (self.each.capacity(), instance.index() + 1);
        if needed <= now { 0 } else { needed.max(2 * now) * size_of::<Holding>() }
    }

    pub(super) fn add_blocks(&mut self, instance: InstanceId, blocks: usize) {
        self.of(instance).blocks += blocks;
    }

    pub(super) fn drop_blocks(&mut self, instance: InstanceId, blocks: usize) {
        let holding = self.of(instance);
        debug_assert!(holding.blocks >= blocks, "{instance} gives up more blocks than it holds");
        holding.blocks -= blocks;
    }

    /// Records that `instance` now holds `run`.
    pub(super) fn link(&mut self, instance: InstanceId, run: RunId, runs: &Runs) {
        let holding = self.of(instance);
        holding.live_runs += 1;
        let before = holding.runs.capacity();
        if holding.runs.len() == before {
            holding.sweep(instance, runs);
        }
        holding.runs.push(run);
        let after = holding.runs.capacity();
        self.list_bytes = self.list_bytes + after * size_of::<RunId>() - before * size_of::<RunId>();
    }

    /// Records that `instance` has lost a run.
    pub(super) fn unlink(&mut self, instance: InstanceId) {
        let holding = self.of(instance);
        debug_assert!(holding.live_runs > 0, "{instance} gives up a run, and holds none");
        holding.live_runs -= 1;
    }

    /// Takes the run list of an instance, for its end; entries may be stale or doubled.
    pub(super) fn take_runs(&mut self, instance: InstanceId) -> Vec<RunId> {
        let Some(holding) = self.each.get_mut(instance.index()) else { return Vec::new() };
        let runs = core::mem::take(&mut holding.runs);
        self.list_bytes -= runs.capacity() * size_of::<RunId>();
        runs
    }

    /// Live runs and their names by instance, for the audit.
    pub(super) fn lists(&self) -> impl Iterator<Item = (usize, &[RunId])> {
        self.each.iter().map(|holding| (holding.live_runs, holding.runs.as_slice()))
    }

    /// Heap bytes of the lists, recounted for the audit.
    pub(super) fn recounted_bytes(&self) -> usize {
        let lists = self.each.iter().map(|holding| holding.runs.capacity());
        self.each.capacity() * size_of::<Holding>() + lists.sum::<usize>() * size_of::<RunId>()
    }

    fn of(&mut self, instance: InstanceId) -> &mut Holding {
        if self.each.len() <= instance.index() {
            self.each.resize_with(instance.index() + 1, Holding::default);
        }
        &mut self.each[instance.index()]
    }
}

impl Holding {
    /// Makes room for one more name: by dropping stale ones if there are many, else by growing.
    fn sweep(&mut self, instance: InstanceId, runs: &Runs) {
        if self.runs.len() >= 2 * self.live_runs + SLACK {
            self.runs.sort_unstable();
            self.runs.dedup();
            let holds =
                |id: &RunId| runs.live(*id).is_some_and(|run| !run.holders.get(instance).is_nowhere());
            self.runs.retain(holds);
        }
        if self.runs.len() == self.runs.capacity() {
            self.runs.reserve_exact(self.runs.len() / 4 + 4);
        }
    }
}
