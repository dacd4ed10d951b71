//! Ages of what was asked for and has not come back: groups that grow coarser as they grow older.
//!
//! Time runs in ticks of about a second. A block that comes to rest joins the group of the present
//! tick. A group is in the cell of the age of its oldest member, two cells to each doubling; one
//! that reaches a cell that is taken joins the group there. So there are never more groups than
//! cells, and a group never spans more than its cell did when it formed.

/// Cells of age; the last one has no end.
pub(crate) const CELLS: usize = 24;
/// A tick is 2 to this power of microseconds: 1.05 s.
const TICK_SHIFT: u32 = 20;

/// The tick at a time.
pub(super) const fn tick_of(now_us: u64) -> u32 {
    let tick = now_us >> TICK_SHIFT;
    if tick > u32::MAX as u64 { u32::MAX } else { tick as u32 }
}

/// The cell of an age in ticks.
pub(super) const fn cell_of_age(age: u32) -> usize {
    let ordinal = age as u64 + 1;
    let octave = ordinal.ilog2();
    let half = if octave == 0 { 0 } else { (ordinal >> (octave - 1)) & 1 };
    let cell = octave as usize * 2 + half as usize;
    if cell < CELLS { cell } else { CELLS - 1 }
}

/// The youngest age of a cell. Cell 1 is empty: ages 0 and 1 are too close to have a middle.
pub(super) const fn youngest(cell: usize) -> u32 {
    match cell {
        0 => 0,
        1 => 1,
        _ => (1 << (cell / 2)) + ((cell as u32 % 2) << (cell / 2 - 1)) - 1,
    }
}

/// How many ticks of age a cell spans; the last counts as long as it would be if another followed.
pub(super) const fn width(cell: usize) -> u32 {
    youngest(cell + 1) - youngest(cell)
}

/// The groups, by cell.
#[derive(Debug)]
pub(super) struct Ages {
    tick: u32,
    /// When the oldest member of each cell's group came to rest.
    oldest: [Option<u32>; CELLS],
}

impl Ages {
    /// No groups, at the given tick.
    pub(super) const fn new(tick: u32) -> Self {
        Self { tick, oldest: [None; CELLS] }
    }

    /// The present tick.
    pub(super) const fn tick(&self) -> u32 {
        self.tick
    }

    /// The present tick's group has a member now.
    pub(super) fn join(&mut self) {
        self.oldest[0].get_or_insert(self.tick);
    }

    /// The cell of what came to rest at `tick`, which is not in the future.
    pub(super) fn cell_of(&self, tick: u32) -> usize {
        let within = |oldest: &Option<u32>| oldest.is_some_and(|oldest| oldest <= tick);
        self.oldest.iter().position(within).unwrap_or(CELLS - 1)
    }

    /// How long each group will have been in which cell by the time `tick`: `(group, cell, ticks)`.
    pub(super) fn stays_until(&self, tick: u32, mut stay: impl FnMut(usize, usize, u32)) {
        for (group, oldest) in self.oldest.iter().enumerate() {
            let Some(oldest) = oldest else { continue };
            let (mut age, end) = (self.tick - oldest, tick.max(self.tick) - oldest);
            while age < end {
                let cell = cell_of_age(age);
                let until = if cell + 1 < CELLS { end.min(youngest(cell + 1)) } else { end };
                stay(group, cell, until - age);
                age = until;
            }
        }
    }

    /// Advances to `tick`, never back. `moved` gets `(from, to)` of every group that changes cells, oldest groups
    /// first.
    pub(super) fn advance(&mut self, tick: u32, mut moved: impl FnMut(usize, usize)) {
        self.tick = tick.max(self.tick);
        for from in (0..CELLS).rev() {
            let Some(oldest) = self.oldest[from] else { continue };
            let to = cell_of_age(self.tick - oldest);
            if to != from {
                self.oldest[from] = None;
                self.oldest[to].get_or_insert(oldest);
                moved(from, to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    #[test]
    fn cells_cover_all_ages_without_gaps() {
        let mut last = 0;
        for age in 0..10_000 {
            let cell = cell_of_age(age);
            assert!(cell >= last && youngest(cell) <= age);
            assert!(cell == CELLS - 1 || age < youngest(cell + 1));
            last = cell;
        }
        assert_eq!((width(0), width(1), width(2), width(23)), (1, 0, 1, 1024));
        assert_eq!((cell_of_age(u32::MAX), tick_of(u64::MAX)), (CELLS - 1, u32::MAX));
    }

    proptest! {
        #[test]
        fn a_member_is_found_in_the_cell_that_its_group_moved_to(
            steps in proptest::collection::vec((0u32..40, any::<bool>()), 1..80),
        ) {
            let mut ages = Ages::new(7);
            let mut members: Vec<(u32, usize)> = Vec::new();
            for (wait, joins) in steps {
                let to = ages.tick() + wait;
                let mut stays = 0;
                ages.stays_until(to, |_, _, ticks| stays += u64::from(ticks));
                let groups = ages.oldest.iter().flatten().count() as u64;
                prop_assert_eq!(stays, groups * u64::from(wait), "every group stays somewhere all the time");
                ages.advance(to, |from, to| {
                    members.iter_mut().filter(|m| m.1 == from).for_each(|m| m.1 = to);
                });
                if joins {
                    ages.join();
                    members.push((ages.tick(), 0));
                }
                for &(tick, cell) in &members {
                    prop_assert_eq!(ages.cell_of(tick), cell);
                    prop_assert!(cell >= cell_of_age(ages.tick() - tick), "never counted as younger");
                }
            }
        }
    }
}
