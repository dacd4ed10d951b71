//! Reuse: the order of eviction by the time that a block's slot is expected to save.
//!
//! A block's *class* is what its requests tell of its future: how often it was asked for, how much
//! of the last chain through it was new, whether it ended that chain (a partial block, which a
//! longer prompt does not contain), and how long that chain was. For each class and age the store
//! counts returns, also of blocks that it gave up, by their names. A slot's rank is the chance of
//! return for each tick that it is kept. A block whose turn comes before its children's is *parked* until one of them
//! left.

use super::ages::{Ages, CELLS, tick_of, width};
use super::chance::{CLASSES, Chances};
use super::ghosts::{Ghost, Ghosts};
use super::list::Lists;
use super::ranks::Ranks;
use super::trait_factors::{VALUES, class_of, values_of};
use super::{Facts, Order, SeparateList};
use alloc::string::String;
use alloc::vec::Vec;

/// Distinct numbers of uses: once, twice, three times, more.
const USES: usize = VALUES[0];
/// How much of a chain was new: nothing, 1–2 blocks, 3–6, 7–14, more. Before these: it ended the chain.
const NEWS: usize = VALUES[1] - 1;
/// How long a chain was: below 4 blocks, 16, 64, 256, more.
const LENGTHS: usize = VALUES[2];
/// Lists that are ranked: one for each class and cell of age.
const REUSE_LISTS: usize = CLASSES * CELLS;
/// The store recomputes one class's values after this many blocks were asked for, one class after the other.
const ASKED_BETWEEN_VALUES: usize = 24;

/// The reuse state of one block.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// When it last came to rest.
    tick: u32,
    class: u8,
    /// Whether it is counted as waiting to be asked for again.
    waits: bool,
}

/// A change in the order of a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// All lists of one cell join those of another.
    Moved { from: usize, to: usize },
    /// The lists of a class have new ranks at each age.
    Valued { class: usize, slot_value: [u32; CELLS] },
}

/// Reuse statistics of the store's requests; shared by its tiers.
#[derive(Debug)]
pub(crate) struct Reuse {
    ages: Ages,
    chances: Chances,
    marks: Vec<Mark>,
    ghosts: Ghosts,
    asked: usize,
    next_class: usize,
    /// Reused between requests: earlier uses of a chain's blocks.
    uses: Vec<u8>,
}

/// The list of blocks of one class and cell: the oldest first where ranks tie.
const fn list(class: usize, cell: usize) -> usize {
    (CELLS - 1 - cell) * CLASSES + class
}

/// The class of a block that was asked for `uses` times, last in a chain of `length` blocks of which `news` were new.
fn class_in(uses: usize, news: usize, length: usize, is_tail: bool) -> usize {
    let news = (news.saturating_add(1).ilog2() as usize).min(NEWS - 1);
    let length = (length.max(1).ilog2() as usize / 2).min(LENGTHS - 1);
    class_of([uses.min(USES) - 1, if is_tail { 0 } else { 1 + news }, length])
}

const fn uses_of(class: usize) -> usize {
    values_of(class)[0] + 1
}

/// The lists of `class` and their ranks, given what it is worth at each age.
fn ranks(class: usize, slot_value: &[u32; CELLS]) -> impl Iterator<Item = (usize, u32)> + '_ {
    slot_value.iter().enumerate().map(move |(cell, &slot_value)| (list(class, cell), slot_value))
}

/// The pairs of lists to pour one into the other when cell `from` joins cell `to`.
fn moves(from: usize, to: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..CLASSES).map(move |class| (list(class, from), list(class, to)))
}

/// The order of one tier.
#[derive(Debug)]
pub(super) struct ReuseOrder {
    ranks: Ranks,
    /// Those that wait for their children to go, in the list after those that are ranked.
    parked: SeparateList,
}

impl Order for ReuseOrder {
    fn new(capacity: u64) -> Self {
        let ranked = if capacity > 0 { REUSE_LISTS } else { 0 };
        Self { ranks: Ranks::new(ranked), parked: SeparateList::new(ranked) }
    }

    fn lists(&self) -> usize {
        self.parked.list + 1
    }

    fn rest(&mut self, lists: &mut Lists, block: u32, facts: Facts) {
        lists.push_newest(facts.list, block);
        self.ranks.mark_filled(facts.list);
    }

    /// The leaf of the lowest rank; blocks found before it that are none are parked, each once
    /// for each child that leaves it. Parked ones have children in line, so some leaf is found.
    fn next(&mut self, lists: &mut Lists, is_leaf: &dyn Fn(u32) -> bool) -> Option<u32> {
        while let Some(list) = self.ranks.lowest(lists) {
            let block = lists.oldest(list).expect("the lowest list has blocks");
            if is_leaf(block) {
                return Some(block);
            }
            lists.unlink(block);
            self.parked.push(lists, block);
        }
        lists.oldest(self.parked.list)
    }

    fn lifted(&mut self, block: u32) {
        self.parked.lifted(block);
    }

    fn keeps_its_place(&self) -> bool {
        true
    }

    fn is_parked(&self, block: u32) -> bool {
        self.parked.contains(block)
    }

    fn learns(&self) -> bool {
        true
    }

    fn change(&mut self, lists: &mut Lists, change: &Change) {
        match change {
            _ if self.ranks.is_empty() => {}
            Change::Moved { .. } if lists.len() == 0 => {}
            Change::Moved { from, to } => {
                for (from, to) in moves(*from, *to) {
                    if lists.oldest(from).is_some() {
                        lists.append(to, from);
                        self.ranks.mark_filled(to);
                    }
                }
            }
            Change::Valued { class, slot_value } => {
                ranks(*class, slot_value).for_each(|(list, rank)| self.ranks.rerank(list, rank));
            }
        }
    }

    fn check(&self, lists: &Lists) -> Result<(), String> {
        self.parked.check(lists, "parked")?;
        self.ranks.check(lists)
    }
}

impl Reuse {
    /// Nothing was seen yet by a store of `slots` slots.
    pub(crate) fn new(slots: u64) -> Self {
        Self {
            ages: Ages::new(0),
            chances: Chances::new(),
            marks: Vec::new(),
            ghosts: Ghosts::new(slots),
            asked: 0,
            next_class: 0,
            uses: Vec::new(),
        }
    }

    /// Time goes on to `now_us`.
    pub(crate) fn advance(&mut self, now_us: u64, mut change: impl FnMut(&Change)) {
        let tick = tick_of(now_us);
        if tick <= self.ages.tick() {
            return;
        }
        let chances = &mut self.chances;
        self.ages.stays_until(tick, |group, cell, ticks| chances.waited(group, cell, ticks));
        self.ages.advance(tick, |from, to| {
            chances.moved(from, to);
            change(&Change::Moved { from, to });
        });
    }

    /// The list in which `block` belongs.
    pub(crate) fn list_of(&self, block: u32) -> usize {
        let mark = self.marks[block as usize];
        list(usize::from(mark.class), self.ages.cell_of(mark.tick))
    }

    /// A request asked for a chain of which `blocks` are the leading blocks; those from `found` on
    /// are new here. `names` are theirs, and `asked` is how long the chain is. Positions are
    /// those of the chain.
    pub(crate) fn asked(&mut self, blocks: &[u32], found: usize, asked: usize, names: impl Fn(usize) -> u64) {
        let mut uses_before = core::mem::take(&mut self.uses);
        let mut seen = found;
        for (position, &block) in blocks.iter().enumerate() {
            let uses = if position < found {
                self.meet_again(block)
            } else {
                let ghost = self.ghosts.take(names(position));
                ghost.map_or(0, |ghost| self.ghost_returned(ghost))
            };
            seen += usize::from(uses > 0 && position == seen);
            uses_before.push(uses);
        }
        let news = asked - seen.min(asked);
        for (position, (&block, &uses)) in blocks.iter().zip(&uses_before).enumerate() {
            if self.marks.len() <= block as usize {
                self.marks.resize(block as usize + 1, Mark::default());
            }
            let class = class_in(usize::from(uses) + 1, news, asked, position + 1 == asked) as u8;
            self.marks[block as usize] = Mark { tick: self.ages.tick(), class, waits: false };
        }
        self.asked += asked;
        uses_before.clear();
        self.uses = uses_before;
    }

    /// `block` came back from flash, at a position of its chain, and is about to rest: of its past it is only
    /// known that it was used, and that its chain was no shorter.
    pub(crate) fn recovered(&mut self, block: u32, position: usize) {
        if self.marks.len() <= block as usize {
            self.marks.resize(block as usize + 1, Mark::default());
        }
        let class = class_in(1, 0, position + 1, false) as u8;
        self.marks[block as usize] = Mark { tick: self.ages.tick(), class, waits: false };
    }

    /// `block` came to rest.
    pub(crate) fn rested(&mut self, block: u32) {
        self.ages.join();
        let mark = &mut self.marks[block as usize];
        mark.tick = self.ages.tick();
        if !core::mem::replace(&mut mark.waits, true) {
            self.chances.rested(usize::from(mark.class));
        }
    }

    /// `block` leaves the store; its name is kept for a while.
    pub(crate) fn removed(&mut self, block: u32, name: u64) {
        let mark = self.marks.get_mut(block as usize).expect("a block in the store has a mark");
        if core::mem::take(&mut mark.waits) {
            let ghost = Ghost { class: mark.class, tick: mark.tick };
            if let Some(lost) = self.ghosts.put(name, ghost) {
                self.chances.given_up(usize::from(lost.class), self.ages.cell_of(lost.tick));
            }
        }
    }

    /// The next class whose worth is due to be counted again, if one is.
    pub(crate) fn value(&mut self, mut change: impl FnMut(&Change)) {
        let due = (self.asked / ASKED_BETWEEN_VALUES).min(CLASSES);
        self.asked %= ASKED_BETWEEN_VALUES;
        for _ in 0..due {
            let Some(class) = (self.next_class..CLASSES).find(|&class| self.chances.is_seen(class)) else {
                self.next_class = 0;
                self.chances.weigh();
                continue;
            };
            self.next_class = class + 1;
            change(&Change::Valued { class, slot_value: self.chances.slot_value(class) });
        }
    }

    /// Times that `block` was asked for before, at most [`USES`]; it waits no longer.
    fn meet_again(&mut self, block: u32) -> u8 {
        let mark = self.marks.get_mut(block as usize).expect("a block in the store has a mark");
        let class = usize::from(mark.class);
        if core::mem::take(&mut mark.waits) {
            self.chances.returned(class, self.ages.cell_of(mark.tick));
        }
        uses_of(class) as u8
    }

    fn ghost_returned(&mut self, ghost: Ghost) -> u8 {
        let class = usize::from(ghost.class);
        self.chances.returned(class, self.ages.cell_of(ghost.tick));
        uses_of(class) as u8
    }
}

const _: () = assert!(width(CELLS - 1) > 0, "the last cell counts");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::{Eviction, RestingBlocks};
    use alloc::collections::BTreeMap;
    use alloc::vec;
    use proptest::prelude::*;

    #[test]
    fn classes_tell_uses_news_tails_and_lengths_apart() {
        assert_eq!((class_in(1, 0, 1, true), class_in(9, 1000, 1, true)), (0, 3));
        assert_eq!((class_in(1, 0, 3, false), class_in(4, usize::MAX, 1 << 40, false)), (4, CLASSES - 1));
        assert_eq!((class_in(2, 2, 1, false), class_in(2, 3, 1, false)), (9, 13));
        assert!((1..=USES).all(|uses| uses_of(class_in(uses, 5, 99, false)) == uses));
        let lengths =
            [1, 3, 4, 15, 16, 63, 64, 255, 256].map(|length| values_of(class_in(1, 0, length, false))[2]);
        assert_eq!(lengths, [0, 0, 1, 1, 2, 2, 3, 3, 4]);
    }

    #[test]
    fn every_list_belongs_to_one_class_and_cell() {
        let mut lists: Vec<usize> = (0..CLASSES)
            .flat_map(|class| ranks(class, &[7; CELLS]).map(|(list, _)| list).collect::<Vec<_>>())
            .collect();
        lists.sort_unstable();
        assert_eq!(lists, (0..REUSE_LISTS).collect::<Vec<_>>());
        let poured: Vec<_> = moves(2, 5).collect();
        assert_eq!(poured.len(), CLASSES);
        assert!(poured.contains(&(list(3, 2), list(3, 5))));
    }

    /// A stream in which every second chain returns after 50 ticks teaches which half does: those
    /// that added two blocks. The others added eight.
    #[test]
    fn it_learns_which_blocks_return_and_keeps_those() {
        let mut reuse = Reuse::new(64);
        let (ours, others) = ([0u32, 1], [2u32, 3, 4, 5, 6, 7, 8, 9]);
        for round in 0..600u64 {
            reuse.advance((round * 50) << 20, |_| ());
            reuse.value(|_| ());
            let back = usize::from(round > 0) * 2;
            reuse.asked(&ours, back, 2, |position| position as u64);
            reuse.asked(&others, 0, 8, |position| 1_000 * (round + 1) + position as u64);
            for block in ours.into_iter().chain(others) {
                reuse.rested(block);
            }
            others.iter().for_each(|&block| reuse.removed(block, 1_000 * (round + 1) + u64::from(block) - 2));
        }
        let slot_value = |block: u32| {
            let class = usize::from(reuse.marks[block as usize].class);
            reuse.chances.slot_value(class)[0]
        };
        assert!(slot_value(0) > 20 * slot_value(3), "{} {}", slot_value(0), slot_value(3));
    }

    #[test]
    fn a_name_that_left_is_known_when_it_returns() {
        let mut reuse = Reuse::new(8);
        reuse.asked(&[0, 1], 0, 2, |position| 70 + position as u64);
        [1, 0].into_iter().for_each(|block| reuse.rested(block));
        [1, 0].into_iter().for_each(|block| reuse.removed(block, 70 + u64::from(block)));
        reuse.asked(&[5, 6, 7], 0, 3, |position| 70 + position as u64);
        let classes = [5, 6, 7].map(|block: usize| usize::from(reuse.marks[block].class));
        assert_eq!(classes, [class_in(2, 1, 3, false), class_in(2, 1, 3, false), class_in(1, 1, 3, true)]);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Rest(u32, usize),
        Lift(u32),
        Move(usize, usize),
        Value(usize, u64),
        Condemn,
        Evict,
    }

    fn op() -> impl Strategy<Value = Op> {
        let lists = prop_oneof![0usize..3, CLASSES..CLASSES + 3, REUSE_LISTS - 40..REUSE_LISTS];
        prop_oneof![
            4 => (0u32..16, lists).prop_map(|(block, list)| Op::Rest(block, list)),
            1 => (0u32..16).prop_map(Op::Lift),
            1 => (1usize..CELLS, 0usize..CELLS).prop_map(|(to, from)| Op::Move(from % to, to)),
            1 => Just(Op::Move(CELLS - 2, CELLS - 1)),
            3 => (0usize..CLASSES, 0u64..4).prop_map(|(class, seed)| Op::Value(class, seed)),
            1 => Just(Op::Condemn),
            2 => Just(Op::Evict),
        ]
    }

    /// Blocks in the order of their score, by sorting: rank, list, time of joining the list.
    #[derive(Default)]
    struct Naive {
        ranks: BTreeMap<usize, u32>,
        resting: Vec<(u32, usize)>,
        condemned: Vec<u32>,
    }

    impl Naive {
        /// Block `b` continues `b / 2`, and no block goes before what continues it.
        fn is_leaf(&self, block: u32) -> bool {
            !self.resting.iter().any(|&(other, _)| other != block && other / 2 == block)
        }

        fn next(&self) -> Option<u32> {
            let mut sorted: Vec<_> = self.resting.iter().filter(|(block, _)| self.is_leaf(*block)).collect();
            sorted.sort_by_key(|(_, list)| (self.ranks.get(list).copied().unwrap_or(0), *list));
            sorted.first().map(|(block, _)| *block)
        }

        fn forget(&mut self, block: u32) {
            self.resting.retain(|&(other, _)| other != block);
            self.condemned.retain(|&other| other != block);
        }
    }

    fn worth_of(seed: u64) -> [u32; CELLS] {
        core::array::from_fn(|cell| ((cell as u64 * 7 + seed * 5) % 11 * 1000) as u32)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Within a list the order is by joining, which a block that waited for its children does
        /// anew; so the place of the victim is compared, its list and rank, not its number.
        #[test]
        fn victims_are_those_of_a_sort_by_the_same_score(ops in proptest::collection::vec(op(), 0..120)) {
            let mut resting = RestingBlocks::new(Eviction::Reuse, 16);
            let mut naive = Naive::default();
            let mut lists: BTreeMap<u32, usize> = BTreeMap::new();
            for op in ops {
                match op {
                    Op::Rest(block, list) if !resting.contains(block) => {
                        lists.insert(block, list);
                        resting.rest(block, Facts { list, ..Facts::default() });
                        naive.resting.push((block, list));
                    }
                    Op::Lift(block) => {
                        resting.lift(block);
                        naive.forget(block);
                        unpark(&mut resting, block / 2, &lists);
                    }
                    Op::Move(from, to) => {
                        resting.change(&Change::Moved { from, to });
                        pour(&mut naive, &mut lists, from, to);
                    }
                    Op::Value(class, seed) => {
                        let slot_value = worth_of(seed);
                        resting.change(&Change::Valued { class, slot_value });
                        naive.ranks.extend(ranks(class, &slot_value));
                    }
                    Op::Condemn => {
                        let block = resting.condemn(|_, block| naive.is_leaf(block));
                        let expected = naive.next();
                        prop_assert_eq!(block.map(|b| score(&naive, b)), expected.map(|b| score(&naive, b)));
                        if let Some(block) = block {
                            prop_assert!(naive.is_leaf(block));
                            naive.forget(block);
                            naive.condemned.push(block);
                            unpark(&mut resting, block / 2, &lists);
                        }
                    }
                    Op::Evict => {
                        let block = resting.victim(|block| naive.is_leaf(block));
                        if let Some(&condemned) = naive.condemned.first() {
                            prop_assert_eq!(block, Some(condemned));
                        } else {
                            let expected = naive.next();
                            prop_assert_eq!(block.map(|b| score(&naive, b)), expected.map(|b| score(&naive, b)));
                            prop_assert!(block.is_none_or(|block| naive.is_leaf(block)));
                        }
                        if let Some(block) = block {
                            resting.lift(block);
                            naive.forget(block);
                            unpark(&mut resting, block / 2, &lists);
                        }
                    }
                    Op::Rest(..) => {}
                }
                prop_assert_eq!(resting.check(), Ok(()));
                prop_assert_eq!(resting.len(), naive.resting.len() + naive.condemned.len());
            }
        }
    }

    fn unpark(resting: &mut RestingBlocks, parent: u32, lists: &BTreeMap<u32, usize>) {
        let list = lists.get(&parent).copied().unwrap_or(0);
        resting.unpark(parent, Facts { list, ..Facts::default() });
    }

    /// Where a block stands: its list and the list's rank. Within a list the order is by joining.
    fn score(naive: &Naive, block: u32) -> (u32, usize) {
        let list =
            naive.resting.iter().find(|(other, _)| *other == block).map_or(usize::MAX, |(_, list)| *list);
        (naive.ranks.get(&list).copied().unwrap_or(0), list)
    }

    fn pour(naive: &mut Naive, lists: &mut BTreeMap<u32, usize>, from: usize, to: usize) {
        let to_of: BTreeMap<usize, usize> = moves(from, to).collect();
        for list in naive.resting.iter_mut().map(|(_, list)| list).chain(lists.values_mut()) {
            *list = to_of.get(list).copied().unwrap_or(*list);
        }
    }

    #[test]
    fn moving_whole_lists_keeps_the_order_of_age() {
        let mut lists = Lists::new(3);
        (0..4).for_each(|block| lists.push_newest(usize::from(block < 2), block));
        lists.append(1, 0);
        assert_eq!(lists.iter(1).collect::<Vec<_>>(), vec![0, 1, 2, 3]);
        lists.append(2, 1);
        assert_eq!(
            (lists.oldest_of_lowest(3), lists.check()),
            (Some(0), Ok(())),
            "the list is known to have blocks"
        );
    }
}
