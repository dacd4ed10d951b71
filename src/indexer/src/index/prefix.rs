//! How far a rank holds a prompt: a cursor that goes from device to host to disk, and never back.

use std::collections::BTreeMap;

use baton_types::Tier;

/// Media that an instance owns: device, host, disk.
pub(crate) const MEDIA: usize = Tier::LOCAL.len();

/// The part of a prompt that one instance holds, in tokens from its beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// The longest prefix that one of its ranks holds, over all media.
    pub longest: u64,
    /// Where the prefix ends that device, host and disk give, in this order: each goes on where the one before
    /// ends, and is 0 where it adds nothing.
    pub media: [u64; MEDIA],
    /// The prefix that each rank holds.
    pub ranks: BTreeMap<u32, u64>,
}

/// One rank on its way through a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    medium: usize,
    stopped: bool,
    /// Blocks passed.
    pub(super) blocks: u32,
    /// Blocks passed when each medium was left.
    pub(super) reached: [u32; MEDIA],
}

impl Cursor {
    pub(super) const fn stopped(&self) -> bool {
        self.stopped
    }

    /// The next block, and the media that hold it; whether the cursor passed it.
    ///
    /// It is loaded from the first medium that is not behind the cursor: what is loaded from host memory already
    /// would not be followed by device memory, since a prefix is loaded in one sweep.
    pub(super) fn step(&mut self, held: Option<[bool; MEDIA]>) -> bool {
        let from = held.and_then(|held| (self.medium..MEDIA).find(|medium| held[*medium]));
        let Some(medium) = from.filter(|_| !self.stopped) else {
            self.stopped = true;
            return false;
        };
        self.medium = medium;
        self.blocks += 1;
        self.reached[medium] = self.blocks;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(blocks: &[&str]) -> (u32, [u32; MEDIA]) {
        let mut cursor = Cursor::default();
        for block in blocks {
            let held = [block.contains('g'), block.contains('c'), block.contains('d')];
            cursor.step(held.contains(&true).then_some(held));
        }
        (cursor.blocks, cursor.reached)
    }

    #[test]
    fn the_cursor_goes_one_way_and_stops_at_the_first_hole() {
        assert_eq!(walk(&["g", "gc", "c", "cd", "d"]), (5, [2, 4, 5]));
        assert_eq!(walk(&["g", "", "g", "g"]), (1, [1, 0, 0]), "behind a hole nothing counts");
        assert_eq!(walk(&["c", "g", "c"]), (1, [0, 1, 0]), "there is no way back to the device");
        assert_eq!(walk(&["d", "gd"]), (2, [0, 0, 2]));
        assert_eq!(walk(&[]), (0, [0; MEDIA]));
    }
}
