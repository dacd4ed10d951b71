//! Reuse: the order of eviction by the time that a block's slot is expected to save.
//!
//! A block's *class* is what its requests tell of its future: how often it was asked for, how much
//! of the last chain through it was new, and whether it ended that chain (a partial block, which a
//! longer prompt does not contain). For each class and age the store counts returns, also of
//! blocks that it gave up, by their names. A slot's rank is the chance of return for each tick that
//! it is kept, times what the block costs to compute again, which grows with its position.

use super::ages::{Ages, CELLS, tick_of, width};
use super::chance::{CLASSES, Chances};
use super::ghosts::{Ghost, Ghosts};
use alloc::vec::Vec;

/// Uses that are told apart: once, twice, three times, more.
const USES: usize = 4;
/// How much of a chain was new: nothing, 1–2 blocks, 3–6, 7–14, more.
const NEWS: usize = 5;
/// What a block costs to compute by the depth of its position, in units of 1/256 of a root's.
/// Attention makes the cost grow with the position; how fast depends on the model, which the
/// store does not know, so this is the cautious end: a 256th per block.
const COST: [u64; 4] = [260, 274, 326, 456];
/// Kinds of blocks: class and cost.
const KINDS: usize = CLASSES * COST.len();
/// Lists that the order uses: one for each kind and cell of age.
pub(crate) const REUSE_LISTS: usize = KINDS * CELLS;
/// A class is valued anew after this many blocks were asked for, one class after the other.
const ASKED_BETWEEN_VALUES: usize = 24;

const _: () = assert!(CLASSES == USES * (NEWS + 1), "every class has its number");

/// What is known of one block's use.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// When it last came to rest.
    tick: u32,
    class: u8,
    cost: u8,
    /// Whether it is counted as waiting to be asked for again.
    waits: bool,
}

/// What changes in the order of a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// All lists of one cell join those of another.
    Moved { from: usize, to: usize },
    /// The lists of a class have new ranks at each age.
    Valued { class: usize, worth: [u32; CELLS] },
}

/// What the store saw of its requests; shared by its tiers.
#[derive(Debug)]
pub(crate) struct Reuse {
    ages: Ages,
    chances: Chances,
    marks: Vec<Mark>,
    ghosts: Ghosts,
    asked: usize,
    next_class: usize,
}

/// The list of blocks of one class, cost and cell: the oldest first where ranks tie.
const fn list(class: usize, cost: usize, cell: usize) -> usize {
    ((CELLS - 1 - cell) * CLASSES + class) * COST.len() + cost
}

const fn class_of(uses: usize, news: usize, is_tail: bool) -> usize {
    let uses = if uses > USES { USES } else { uses };
    let news = if news == 0 { 0 } else { (news + 1).ilog2() as usize };
    let news = if news < NEWS { news } else { NEWS - 1 };
    (if is_tail { 0 } else { 1 + news }) * USES + uses - 1
}

const fn uses_of(class: usize) -> usize {
    class % USES + 1
}

/// The lists of `class` and their ranks, given what it is worth at each age.
pub(super) fn ranks(class: usize, worth: &[u32; CELLS]) -> impl Iterator<Item = (usize, u32)> + '_ {
    worth.iter().enumerate().flat_map(move |(cell, &worth)| {
        COST.iter().enumerate().map(move |(cost, factor)| {
            let rank = (u64::from(worth) * factor) >> 8;
            (list(class, cost, cell), u32::try_from(rank).unwrap_or(u32::MAX))
        })
    })
}

/// The pairs of lists to pour one into the other when cell `from` joins cell `to`.
pub(super) fn moves(from: usize, to: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..KINDS).map(move |kind| (list(0, 0, from) + kind, list(0, 0, to) + kind))
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
        list(usize::from(mark.class), usize::from(mark.cost), self.ages.cell_of(mark.tick))
    }

    /// A request asked for a chain of which `blocks` are the leading blocks; those from `found` on
    /// are new here. `names` are theirs, and `asked` is how long the chain is. Positions are
    /// those of the chain.
    pub(crate) fn asked(&mut self, blocks: &[u32], found: usize, asked: usize, names: impl Fn(usize) -> u64) {
        let mut uses_before: Vec<u8> = Vec::with_capacity(blocks.len());
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
            let class = class_of(usize::from(uses) + 1, news, position + 1 == asked) as u8;
            let cost = cost_of(position) as u8;
            self.marks[block as usize] = Mark { tick: self.ages.tick(), class, cost, waits: false };
        }
        self.asked += asked;
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
        let Some(mark) = self.marks.get_mut(block as usize) else { return };
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
            let class = self.next_class;
            self.next_class = (class + 1) % CLASSES;
            change(&Change::Valued { class, worth: self.chances.worth(class) });
        }
    }

    /// Times that `block` was asked for before, at most [`USES`]; it waits no longer.
    fn meet_again(&mut self, block: u32) -> u8 {
        let Some(mark) = self.marks.get_mut(block as usize) else { return 0 };
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

/// The cost group of a position in a chain: below 7, 31, 127 and beyond.
const fn cost_of(position: usize) -> usize {
    let octave = (position + 1).ilog2() as usize;
    let group = octave.saturating_sub(1) / 2;
    if group < COST.len() { group } else { COST.len() - 1 }
}

const _: () = assert!(width(CELLS - 1) > 0, "the last cell counts");
