//! Each block is filled or brought up once, by one owner, however many wait for it; when that
//! owner leaves early, the one that has waited longest takes over.

use crate::config::Offload;
use crate::effect::Effect;
use crate::input::Owner;
use crate::lifecycle::{DRAM, HBM, SSD, Slot, TIERS};
use crate::pin::{Hold, Holds};
use crate::stats::Hits;
use crate::store::Store;
use crate::tiering::send_stored;
use alloc::vec::Vec;

/// A run of an owner's chain that nobody else fills or brings up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Duty {
    /// First position in the chain.
    pub from: u32,
    /// One past the last.
    pub to: u32,
    /// Whether the blocks are being copied up (an `Onboard` is unanswered), not computed.
    pub is_load: bool,
}

impl Holds {
    /// The longest waiting hold, other than readers, whose chain has `block` at `position`.
    fn heir(&self, position: usize, block: u32) -> Option<&Hold> {
        self.iter()
            .filter(|hold| !hold.reads_only && hold.blocks.get(position) == Some(&block))
            .min_by_key(|hold| hold.sequence)
    }
}

impl Store {
    /// Makes the blocks found `below` HBM, from position `first` on, a load by this hold; their
    /// slots are reserved.
    pub(crate) fn start_onboard(&mut self, hold: &mut Hold, below: Hits, first: u32) {
        if below.dram + below.ssd == 0 {
            return;
        }
        for &block in &hold.blocks[first as usize..] {
            let known = &mut self.table[block];
            let claimed = known.slots[HBM] == Slot::Ready || (known.slots[HBM] == Slot::Filling && !known.unclaimed);
            if !claimed {
                let tier = known.below_hbm();
                known.read[tier] = true;
                known.unclaimed = false;
                self.table.set_slot(block, HBM, Slot::Filling);
            }
        }
        hold.duties.push(Duty { from: first, to: hold.blocks.len() as u32, is_load: true });
    }

    pub(crate) fn onboard_done(&mut self, owner: Owner, ok: bool, effects: &mut Vec<Effect>) {
        let number = self.holds.find(owner);
        let Some((number, duty)) = number.and_then(|n| Some((n, self.take_load(n)?))) else {
            self.counts.stale_inputs += 1;
            return;
        };
        let hold = self.holds.get_mut(number);
        let blocks = core::mem::take(&mut hold.blocks);
        let run = &blocks[duty.from as usize..duty.to as usize];
        if ok {
            self.count_onboarded(run);
            self.settle_hbm(run, effects);
        } else {
            self.fail_load(number, duty, run, effects);
        }
        self.holds.get_mut(number).blocks = blocks;
    }

    /// Makes the unfilled blocks of `run`, pinned and from the root, readable in HBM.
    pub(crate) fn settle_hbm(&mut self, run: &[u32], effects: &mut Vec<Effect>) {
        let mut settled = core::mem::take(&mut self.scratch);
        for &block in run {
            if self.table[block].slots[HBM] == Slot::Filling {
                self.table[block].slots[HBM] = Slot::Ready;
                self.tiers[HBM].space.fill();
                settled.push(block);
            }
        }
        send_stored(&self.table, HBM, settled.iter().copied(), effects);
        if self.config.offload == Offload::WriteThrough {
            self.copy_down(HBM, &settled);
        }
        settled.clear();
        self.scratch = settled;
    }

    /// After a close: what the owner was filling and others wait for goes to one of them.
    pub(crate) fn hand_over(&mut self, hold: &Hold, effects: &mut Vec<Effect>) {
        for duty in &hold.duties {
            let mut at = duty.from as usize;
            let to = duty.to as usize;
            while at < to && self.table[hold.blocks[at]].pins > 0 {
                let block = hold.blocks[at];
                if self.table[block].slots[HBM] != Slot::Filling {
                    at += 1;
                } else if let Some(heir) = self.holds.heir(at, block) {
                    let same = |&p: &usize| p < to && heir.blocks.get(p) == hold.blocks.get(p);
                    let end = (at..to).take_while(same).last().map_or(at + 1, |last| last + 1);
                    let owner = heir.owner;
                    self.inherit(owner, Duty { from: at as u32, to: end as u32, ..*duty }, effects);
                    at = end;
                } else {
                    self.disclaim(&hold.blocks[at..to]);
                    break;
                }
            }
        }
    }

    fn inherit(&mut self, owner: Owner, duty: Duty, effects: &mut Vec<Effect>) {
        let number = self.holds.find(owner).expect("the heir was found among the holds");
        let hold = self.holds.get_mut(number);
        hold.duties.push(duty);
        let run = &self.holds.get_mut(number).blocks[duty.from as usize..duty.to as usize];
        let (mut unfilled, mut by_tier) = (0, [0u32; TIERS + 1]);
        for &block in run {
            if self.table[block].slots[HBM] == Slot::Filling {
                unfilled += 1;
                by_tier[self.table[block].below_hbm()] += 1;
            }
        }
        effects.push(if duty.is_load {
            Effect::Onboard { owner, dram_blocks: by_tier[DRAM], ssd_blocks: by_tier[SSD] }
        } else {
            Effect::Inherited { owner, blocks: unfilled }
        });
    }

    /// Only readers hold these blocks, and they read them from below: the HBM slots wait for the
    /// next owner that opens the blocks, or for the last reader to go.
    fn disclaim(&mut self, run: &[u32]) {
        for &block in run {
            let known = &mut self.table[block];
            known.unclaimed = known.pins > 0 && known.slots[HBM] == Slot::Filling;
        }
    }

    fn take_load(&mut self, number: usize) -> Option<Duty> {
        let duties = &mut self.holds.get_mut(number).duties;
        let position = duties.iter().position(|duty| duty.is_load)?;
        Some(duties.remove(position))
    }

    fn count_onboarded(&mut self, run: &[u32]) {
        for &block in run {
            let known = &self.table[block];
            if known.slots[HBM] == Slot::Filling && known.below_hbm() < TIERS {
                self.counts.tiers[known.below_hbm()].onboarded_blocks += 1;
            }
        }
    }

    /// The load becomes a fill. A copy that could not be read is not offered again, unless
    /// another owner is reading it (I3).
    fn fail_load(&mut self, number: usize, duty: Duty, run: &[u32], effects: &mut Vec<Effect>) {
        let mut blocks = 0;
        for &block in run {
            if self.table[block].slots[HBM] != Slot::Filling {
                continue;
            }
            blocks += 1;
            if self.table[block].pins == 1 {
                for tier in [DRAM, SSD] {
                    if self.table[block].slots[tier] == Slot::Ready {
                        self.drop_copy(tier, block);
                    }
                }
            }
        }
        self.counts.onboard_failed_blocks += u64::from(blocks);
        let hold = self.holds.get_mut(number);
        hold.duties.push(Duty { is_load: false, ..duty });
        effects.push(Effect::OnboardFailed { owner: hold.owner, blocks });
    }
}
