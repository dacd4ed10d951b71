//! Where a block's bytes rest.

use serde::{Deserialize, Serialize};

/// A storage tier, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// GPU memory, where the engine computes.
    Hbm,
    /// Host memory.
    Dram,
    /// Local flash.
    Ssd,
}

impl Tier {
    /// The tiers that an instance owns itself, fastest first.
    pub const LOCAL: [Self; 3] = [Self::Hbm, Self::Dram, Self::Ssd];

    /// Position in [`Tier::LOCAL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The word used in configs, metrics and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hbm => "hbm",
            Self::Dram => "dram",
            Self::Ssd => "ssd",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_tiers_are_indexed_in_order() {
        for (position, tier) in Tier::LOCAL.iter().enumerate() {
            assert_eq!(tier.index(), position);
        }
    }

    #[test]
    fn tiers_are_ordered_by_speed_and_have_words_of_their_own() {
        assert!(Tier::Hbm < Tier::Dram && Tier::Dram < Tier::Ssd);
        let words: alloc::collections::BTreeSet<_> = Tier::LOCAL.iter().map(|t| t.name()).collect();
        assert_eq!(words.len(), 3);
    }
}
