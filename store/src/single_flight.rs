//! Each block is filled or brought up once, by one owner, however many wait for it; when that
//! owner leaves early, the one that has waited longest takes over.

use crate::config::Offload;
use crate::effect::Effect;
use crate::input::Owner;
use crate::lifecycle::{DRAM, HBM, SSD, Slot, TIERS};
use crate::pin::{Hold, HoldTable};
use crate::stats::Hits;
use crate::store::Store;
use crate::tiering::send_stored;
use alloc::vec::Vec;

/// A run of an owner's chain that no other owner fills or brings up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Duty {
    /// First position in the chain.
    pub from: u32,
    /// One past the last.
    pub to: u32,
    /// Whether the blocks are being copied up (an `Onboard` is unanswered), not computed.
    pub is_load: bool,
}

impl Hold {
    /// Which of the duties is the load to answer next: the one that comes first in the chain, whenever it was taken
    /// over, since a load is complete only behind blocks that are readable.
    pub(crate) fn first_load(&self) -> Option<usize> {
        let loads = self.duties.iter().enumerate().filter(|(_, duty)| duty.is_load);
        loads.min_by_key(|(_, duty)| duty.from).map(|(at, _)| at)
    }
}

impl HoldTable {
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
            let claimed =
                known.slots[HBM] == Slot::Ready || (known.slots[HBM] == Slot::Filling && !known.unclaimed);
            if !claimed {
                assert!(known.below_hbm() < TIERS, "a block that is brought up can be read from below");
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
            self.fail_load(number, duty, (run, run.len()), effects);
        }
        self.holds.get_mut(number).blocks = blocks;
    }

    /// A load ended after its first `good` unfilled blocks; whether the next one is lost.
    pub(crate) fn onboard_cut_short(
        &mut self,
        owner: Owner,
        (good, next_is_lost): (u32, bool),
        effects: &mut Vec<Effect>,
    ) {
        let number = self.holds.find(owner);
        let Some((number, duty)) = number.and_then(|n| Some((n, self.take_load(n)?))) else {
            self.counts.stale_inputs += 1;
            return;
        };
        let blocks = core::mem::take(&mut self.holds.get_mut(number).blocks);
        let run = &blocks[duty.from as usize..duty.to as usize];
        let unfilled = |&at: &usize| self.table[run[at]].slots[HBM] == Slot::Filling;
        let cut = (0..run.len()).filter(unfilled).nth(good as usize).unwrap_or(run.len());
        let (arrived, rest) = run.split_at(cut);
        self.count_onboarded(arrived);
        self.settle_hbm(arrived, effects);
        let lost = usize::from(next_is_lost).min(rest.len());
        if !rest.is_empty() {
            let rest_duty = Duty { from: duty.from + cut as u32, ..duty };
            self.fail_load(number, rest_duty, (rest, lost), effects);
        }
        self.holds.get_mut(number).blocks = blocks;
    }

    /// Makes the unfilled blocks of `run`, pinned and from the root, readable in HBM.
    pub(crate) fn settle_hbm(&mut self, run: &[u32], effects: &mut Vec<Effect>) {
        let mut settled = core::mem::take(&mut self.scratch);
        assert!(settled.is_empty(), "no other rule is using the scratch");
        for &block in run {
            assert!(self.table[block].pins > 0, "I3: a block that is filled is pinned");
            if self.table[block].slots[HBM] == Slot::Filling {
                self.table[block].slots[HBM] = Slot::Ready;
                self.tiers[HBM].space.fill();
                settled.push(block);
            }
        }
        send_stored(&self.table, HBM, &settled, effects);
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
        let hold = self.holds.get_mut(number);
        let at = hold.first_load()?;
        Some(hold.duties.remove(at))
    }

    fn count_onboarded(&mut self, run: &[u32]) {
        for &block in run {
            let known = &self.table[block];
            if known.slots[HBM] == Slot::Filling && known.below_hbm() < TIERS {
                self.counts.tiers[known.below_hbm()].onboarded_blocks += 1;
            }
        }
    }

    /// The load becomes a fill. The copies of its first `lost` blocks, which could not be read,
    /// are not offered again, unless another owner is reading them (I3).
    fn fail_load(
        &mut self,
        number: usize,
        duty: Duty,
        (run, lost): (&[u32], usize),
        effects: &mut Vec<Effect>,
    ) {
        let mut blocks = 0;
        for (at, &block) in run.iter().enumerate() {
            if self.table[block].slots[HBM] != Slot::Filling {
                continue;
            }
            blocks += 1;
            if at < lost && self.table[block].pins == 1 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rig, owner};
    use crate::{CopyState, Input};
    use baton_types::Tier;

    /// DRAM holds 1–2–3, HBM has been taken by others and is free again.
    fn rig_with_chain_in_dram() -> Rig {
        let mut rig = Rig::new([8, 16, 0], Offload::WriteThrough);
        rig.serve(1, &[1, 2, 3]);
        rig.offloaded(0, true);
        rig.open(2, &[], 8);
        rig.close(2);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 3, 0));
        rig
    }

    fn opened(of: u64, dram: u32, pending: u32, reserved: u32) -> Effect {
        Effect::Opened { owner: owner(of), hbm: 0, dram, ssd: 0, pending, reserved }
    }

    fn onboard(of: u64, dram_blocks: u32) -> Effect {
        Effect::Onboard { owner: owner(of), dram_blocks, ssd_blocks: 0 }
    }

    fn inherited(of: u64, blocks: u32) -> Effect {
        Effect::Inherited { owner: owner(of), blocks }
    }

    #[test]
    fn two_owners_of_a_chain_share_its_slots() {
        let mut rig = Rig::new([6, 0, 0], Offload::Off);
        assert_eq!(rig.open(1, &[1, 2, 3], 0), [opened(1, 0, 0, 3)]);
        assert_eq!(rig.open(2, &[1, 2, 4], 1), [opened(2, 0, 2, 2)]);
        rig.seal(1, 3);
        assert_eq!(rig.hits(&[1, 2, 4]), (2, 0, 0));
        rig.close(1);
        rig.seal(2, 3);
        assert_eq!(rig.close(2), []);
        assert_eq!(rig.store.stats().shared_fill_blocks, 2);
        assert_eq!(rig.hits(&[1, 2, 4]), (3, 0, 0));
    }

    #[test]
    fn a_load_that_is_cut_short_keeps_what_came_and_what_was_not_asked_for() {
        let mut rig = rig_with_chain_in_dram();
        rig.open(3, &[1, 2, 3], 0);
        let cut = Input::OnboardCutShort { owner: owner(3), good_blocks: 1, next_is_lost: true };
        let told = rig.step(cut);
        assert!(told.contains(&Effect::OnboardFailed { owner: owner(3), blocks: 2 }), "{told:?}");
        assert_eq!(rig.hits(&[1, 2, 3]), (1, 0, 0));
        let state = |rig: &Rig, key| rig.store.copy_state(baton_types::BlockKey(key), Tier::Dram);
        assert_eq!((state(&rig, 2), state(&rig, 3)), (CopyState::Absent, CopyState::Ready));
        rig.seal(3, 3);
        assert_eq!(rig.hits(&[1, 2, 3]), (3, 0, 0));
        rig.close(3);
        rig.open(4, &[1, 2, 3], 0);
        assert_eq!(
            rig.step(Input::OnboardCutShort { owner: owner(4), good_blocks: 0, next_is_lost: true }),
            []
        );
        assert_eq!(rig.store.stats().stale_inputs, 1, "there is no load");
    }

    #[test]
    fn a_load_that_is_cut_short_before_its_start_loses_one_block_or_none() {
        for (next_is_lost, left) in [(false, 3), (true, 0)] {
            let mut rig = rig_with_chain_in_dram();
            rig.open(3, &[1, 2, 3], 0);
            rig.step(Input::OnboardCutShort { owner: owner(3), good_blocks: 0, next_is_lost });
            rig.close(3);
            assert_eq!(
                rig.hits(&[1, 2, 3]),
                (0, left, 0),
                "who is gone without sealing takes the lost one along"
            );
        }
    }

    #[test]
    fn the_longest_waiting_owner_takes_over_what_it_shares() {
        let mut rig = Rig::new([16, 0, 0], Offload::Off);
        rig.open(1, &[1, 2, 3, 4], 0);
        rig.open(2, &[1, 2, 9], 0);
        rig.open(3, &[1, 2, 3], 0);
        rig.seal(1, 1);
        assert_eq!(rig.close(1), [inherited(2, 1), inherited(3, 1)]);
        assert_eq!(rig.close(2), [inherited(3, 1)], "a duty that was inherited is inherited again");
        rig.seal(3, 3);
        assert_eq!(rig.hits(&[1, 2, 3, 4]), (3, 0, 0));
        assert_eq!(rig.close(3), []);
    }

    #[test]
    fn who_only_waited_leaves_no_duty_behind() {
        let mut rig = Rig::new([16, 0, 0], Offload::Off);
        rig.open(1, &[1, 2], 0);
        rig.open(2, &[1, 2], 0);
        assert_eq!(rig.close(2), []);
        assert_eq!(rig.seal(1, 2).len(), 1);
    }

    #[test]
    fn blocks_are_brought_up_once() {
        let mut rig = rig_with_chain_in_dram();
        assert_eq!(rig.open(3, &[1, 2], 0), [opened(3, 2, 0, 0), onboard(3, 2)]);
        assert_eq!(rig.open(4, &[1, 2, 3, 5], 0), [opened(4, 1, 2, 1), onboard(4, 1)]);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 3, 0), "still readable from below");
        assert_eq!(rig.onboarded(4, true).len(), 1);
        assert_eq!(rig.onboarded(3, true).len(), 1);
        assert_eq!(rig.hits(&[1, 2, 3]), (3, 0, 0));
        assert_eq!(rig.store.stats().tiers[DRAM].onboarded_blocks, 3);
        assert_eq!(rig.onboarded(3, true), [], "one answer for each order");
        assert_eq!(rig.store.stats().stale_inputs, 1);
    }

    #[test]
    fn a_load_is_taken_over_as_a_load() {
        let mut rig = rig_with_chain_in_dram();
        rig.open(3, &[1, 2, 3], 0);
        rig.open(4, &[1, 2], 0);
        assert_eq!(rig.close(3), [onboard(4, 2)]);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 3, 0));
        rig.onboarded(4, true);
        assert_eq!(rig.hits(&[1, 2, 3]), (2, 1, 0));
    }

    #[test]
    fn a_load_that_was_taken_over_is_answered_before_what_follows_it() {
        let mut rig = rig_with_chain_in_dram();
        rig.open(3, &[1], 0);
        rig.open(4, &[1, 2, 3], 0);
        assert_eq!(rig.close(3), [onboard(4, 1)]);
        let next =
            |rig: &Rig| rig.store.onboard_keys(owner(4)).iter().map(|(key, _)| key.0).collect::<Vec<_>>();
        assert_eq!(next(&rig), [1]);
        rig.onboarded(4, true);
        assert_eq!(rig.hits(&[1, 2, 3]), (1, 2, 0));
        assert_eq!(next(&rig), [2, 3]);
        rig.onboarded(4, true);
        assert_eq!(rig.hits(&[1, 2, 3]), (3, 0, 0));
    }

    #[test]
    fn a_failed_load_must_be_computed_and_is_not_offered_again() {
        let mut rig = rig_with_chain_in_dram();
        rig.open(3, &[1, 2, 3, 4], 0);
        let effects = rig.onboarded(3, false);
        assert_eq!(effects[0], Effect::OnboardFailed { owner: owner(3), blocks: 3 });
        assert!(matches!(&effects[1], Effect::Removed { hashes, .. } if hashes.len() == 3));
        assert_eq!(rig.hits(&[1]), (0, 0, 0));
        assert_eq!(rig.open(4, &[1, 2], 0), [opened(4, 0, 2, 0)]);
        assert_eq!(rig.close(3), [inherited(4, 2)]);
        rig.seal(4, 2);
        assert_eq!(rig.hits(&[1, 2]), (2, 0, 0));
    }

    #[test]
    fn a_failed_load_leaves_copies_that_a_reader_pins() {
        let mut rig = rig_with_chain_in_dram();
        rig.read(9, &[1, 2]);
        rig.open(3, &[1, 2, 3], 0);
        rig.onboarded(3, false);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 2, 0));
    }

    #[test]
    fn a_slot_that_only_readers_are_left_with_goes_to_the_next_owner() {
        let mut rig = rig_with_chain_in_dram();
        rig.read(9, &[1, 2, 3]);
        rig.open(3, &[1, 2], 0);
        assert_eq!(rig.close(3), []);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 3, 0));
        let reserved = rig.store.stats().tiers[HBM].reserved_blocks;
        assert_eq!(rig.open(4, &[1, 2, 3], 6 - 1), [opened(4, 3, 0, 5), onboard(4, 3)]);
        assert_eq!(rig.store.stats().tiers[HBM].reserved_blocks, reserved + 1 + 5, "two slots were there");
        rig.onboarded(4, true);
        assert_eq!(rig.hits(&[1, 2, 3]), (3, 0, 0));
        rig.close(4);
        rig.close(9);
        assert_eq!(rig.store.pinned_total(), 0);
    }

    #[test]
    fn a_slot_that_nobody_takes_over_goes_with_the_last_reader() {
        let mut rig = rig_with_chain_in_dram();
        rig.read(9, &[1, 2, 3]);
        rig.open(3, &[1, 2], 0);
        rig.close(3);
        rig.close(9);
        assert_eq!(rig.store.stats().tiers[HBM].reserved_blocks, 0);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 3, 0));
        rig.step(Input::Clear);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 0, 0));
    }
}
