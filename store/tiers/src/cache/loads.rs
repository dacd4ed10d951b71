//! Loads: blocks come up from host memory and flash into their HBM slots, verified.

use super::{KvCache, Pool, Purpose};
use crate::file::FileTier;
use crate::io_sequencer::IoCompletion;
use crate::tier::TierError;
use baton_store::{CopyState, Input, Owner};
use baton_types::{BlockKey, Tier};
use std::collections::VecDeque;

/// The loads of one owner: the store wants them answered from the root on.
#[derive(Debug, Default)]
pub(super) struct Loads {
    /// Orders not answered, the active one included.
    pub(super) orders: u32,
    active: Option<Load>,
}

/// One load.
#[derive(Debug)]
struct Load {
    number: u64,
    /// The position of its first block.
    first: u32,
    /// Blocks to be read from flash, and where each is in the load.
    todo: VecDeque<(BlockKey, u32)>,
    /// Reads under way.
    reads: u32,
    /// The first block that could not be read. The owner still waits for the blocks before it, and drops those after
    /// it.
    failed: Option<u32>,
}

impl Load {
    fn fail(&mut self, at: u32) {
        let first = self.failed.map_or(at, |known| known.min(at));
        self.failed = Some(first);
        self.todo.retain(|&(_, at)| at < first);
    }
}

/// How a load ended.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    Complete,
    /// Its first blocks are there.
    CutShort {
        good_blocks: u32,
        next_is_lost: bool,
    },
}

impl KvCache {
    /// Takes in what the I/O thread has done.
    pub(super) fn take_transfers(&mut self, pool: &mut dyn Pool) {
        while let Some(done) = self.file.as_mut().and_then(FileTier::next_done) {
            let IoCompletion { number, outcome, buffer } = done;
            match self.purposes.remove(&number) {
                Some(Purpose::Write { ticket, key, place }) => self.written(ticket, (key, place), outcome),
                Some(Purpose::Read { owner, load, key, at }) => {
                    let bytes = outcome.map(|_| &buffer[..self.config.block_bytes]);
                    self.arrived((owner, load, at), (key, bytes), pool);
                }
                // Everything was cleared meanwhile.
                None => {}
            }
            if let Some(file) = &mut self.file {
                file.recycle(buffer);
            }
        }
        if self.file.as_ref().is_some_and(FileTier::is_gone) {
            self.fail_transfers(pool);
        }
    }

    /// The store wants a load. One that was inherited may come before the active one, which then begins again after
    /// it; reads of it that are still to come are of no use.
    pub(super) fn order_load(&mut self, owner: Owner) {
        let is_active = self.loads.get(&owner).is_some_and(|loads| loads.active.is_some());
        let first = if is_active { self.first_of(owner, &self.store.onboard_keys(owner)) } else { 0 };
        let loads = self.loads.entry(owner).or_default();
        loads.orders += 1;
        loads.active = loads.active.take().filter(|load| load.first <= first);
    }

    /// Starts what loads wait to be started and answers what is complete.
    pub(super) fn run_loads(&mut self, pool: &mut dyn Pool) {
        // An answer may be what another load waits for.
        while self.advance_loads(pool) {}
    }

    /// Advances every load once; whether any was answered.
    fn advance_loads(&mut self, pool: &mut dyn Pool) -> bool {
        let mut answered = false;
        // The oldest request first.
        for owner in self.loads.keys().copied().collect::<Vec<_>>() {
            let Some(mut loads) = self.loads.remove(&owner) else { continue };
            let mut load = match loads.active.take() {
                Some(load) => load,
                None => self.begin_load(owner, pool),
            };
            self.start_reads(owner, &mut load);
            match self.verdict(owner, &load) {
                Some(verdict) => {
                    loads.orders -= 1;
                    answered = true;
                    self.step(match verdict {
                        Verdict::Complete => Input::OnboardDone { owner, ok: true },
                        Verdict::CutShort { good_blocks, next_is_lost } => {
                            Input::OnboardCutShort { owner, good_blocks, next_is_lost }
                        }
                    });
                }
                None => loads.active = Some(load),
            }
            if loads.orders > 0 {
                self.loads.insert(owner, loads);
            }
        }
        answered
    }

    /// The outcome of a load, if it has ended. The blocks before it in its chain must be readable first. Otherwise an
    /// owner that has to compute could meet readable blocks further on and overwrite them: an owner that computes the
    /// earlier blocks computes these too.
    fn verdict(&self, owner: Owner, load: &Load) -> Option<Verdict> {
        if load.reads > 0 || !load.todo.is_empty() {
            return None;
        }
        if load.failed == Some(0) {
            return Some(Verdict::CutShort { good_blocks: 0, next_is_lost: true });
        }
        if self.store.readable_blocks(owner) >= load.first {
            let cut = |good_blocks| Verdict::CutShort { good_blocks, next_is_lost: true };
            return Some(load.failed.map_or(Verdict::Complete, cut));
        }
        let awaits_others = self.store.next_awaited(owner, 0).is_some_and(|position| position < load.first);
        let unused = Verdict::CutShort { good_blocks: 0, next_is_lost: false };
        if awaits_others { None } else { Some(unused) }
    }

    /// Brings up from host memory what rests there, and lists the rest.
    fn begin_load(&mut self, owner: Owner, pool: &mut dyn Pool) -> Load {
        let number = self.next_load;
        self.next_load += 1;
        let wanted = self.store.onboard_keys(owner);
        let first = self.first_of(owner, &wanted);
        let mut load = Load { number, first, todo: VecDeque::new(), reads: 0, failed: None };
        for (at, (key, tier)) in (0u32..).zip(wanted) {
            let from_flash = match tier {
                Some(Tier::Dram) => match self.load_from_dram(key, pool) {
                    Ok(()) => continue,
                    Err(error) => {
                        self.count_error(&error);
                        self.rests_on_flash(key)
                    }
                },
                _ => self.rests_on_flash(key),
            };
            if !from_flash {
                load.fail(at);
                break;
            }
            load.todo.push_back((key, at));
        }
        load
    }

    /// The position at which a load of these blocks begins.
    fn first_of(&self, owner: Owner, wanted: &[(BlockKey, Option<Tier>)]) -> u32 {
        let chain = self.held.get(&owner).map_or(&[][..], |held| &held.chain);
        wanted.first().and_then(|(first, _)| chain.iter().position(|key| key == first)).unwrap_or(0) as u32
    }

    fn load_from_dram(&self, key: BlockKey, pool: &mut dyn Pool) -> Result<(), TierError> {
        let slot = self.address(key).ok_or(TierError::Absent)?;
        let (bytes, _) = self.dram.view(key)?;
        pool.write(slot, bytes);
        Ok(())
    }

    fn rests_on_flash(&self, key: BlockKey) -> bool {
        self.store.copy_state(key, Tier::Ssd) == CopyState::Ready
            && self.file.as_ref().is_some_and(|file| file.place(key).is_some())
    }

    fn start_reads(&mut self, owner: Owner, load: &mut Load) {
        let Some(file) = &mut self.file else { return };
        while file.takes_read() {
            let Some((key, at)) = load.todo.pop_front() else { return };
            let number = file.read(key);
            match number {
                Some(number) => {
                    load.reads += 1;
                    self.purposes.insert(number, Purpose::Read { owner, load: load.number, key, at });
                }
                None => load.fail(at),
            }
        }
    }

    /// A block came from flash, or did not.
    fn arrived(
        &mut self,
        (owner, load, at): (Owner, u64, u32),
        (key, bytes): (BlockKey, Result<&[u8], TierError>),
        pool: &mut dyn Pool,
    ) {
        if let Err(error) = &bytes {
            self.count_error(error);
        }
        let address = self.address(key);
        let is_awaited = self.store.copy_state(key, Tier::Hbm) == CopyState::Filling;
        let active = self.loads.get_mut(&owner).and_then(|loads| loads.active.as_mut());
        // The owner may be gone, and its slots with it.
        let Some(active) = active.filter(|active| active.number == load) else { return };
        active.reads -= 1;
        match (bytes, address) {
            (Ok(bytes), Some(slot)) if is_awaited => pool.write(slot, bytes),
            _ => active.fail(at),
        }
    }

    /// The I/O thread is gone, and with it all that was under way.
    fn fail_transfers(&mut self, pool: &mut dyn Pool) {
        let gone = || TierError::Io(std::io::ErrorKind::BrokenPipe.into());
        for (_, purpose) in std::mem::take(&mut self.purposes) {
            match purpose {
                Purpose::Write { ticket, key, place } => self.written(ticket, (key, place), Err(gone())),
                Purpose::Read { owner, load, key, at } => {
                    self.arrived((owner, load, at), (key, Err(gone())), pool);
                }
            }
        }
    }
}
