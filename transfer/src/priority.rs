//! Priorities of transfers, by purpose.

/// The purpose of a transfer; an earlier one is more urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// KV from a prefill to its decode: a client waits for it.
    Handoff,
    /// Cached blocks to a prefill that will use them.
    Fetch,
    /// A copy of a hot block for later requests.
    Replicate,
    /// A block on its way to a lower tier.
    Offload,
}

impl Priority {
    /// All of them, most urgent first.
    pub const ALL: [Self; 4] = [Self::Handoff, Self::Fetch, Self::Replicate, Self::Offload];

    /// Position in [`Priority::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_are_ordered_and_indexed_most_urgent_first() {
        assert!(Priority::ALL.is_sorted());
        for (position, priority) in Priority::ALL.iter().enumerate() {
            assert_eq!(priority.index(), position);
        }
    }
}
