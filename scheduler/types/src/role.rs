//! What an instance does.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The part that an instance plays in the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Runs prefills and hands their KV to a decode instance.
    Prefill,
    /// Runs decodes; may prefill locally in chunks when the policy says so.
    Decode,
    /// Runs both phases of its own requests (an engine without disaggregation).
    Both,
    /// Lends its DRAM and SSD tiers and computes nothing.
    Store,
}

impl Role {
    /// The word used in configs and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
            Self::Store => "store",
        }
    }

    /// Whether a request's prefill may be placed here as the first leg of a pair.
    #[must_use]
    pub const fn prefills(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    /// Whether decodes run here.
    #[must_use]
    pub const fn decodes(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_say_what_runs_where() {
        assert!(Role::Prefill.prefills() && !Role::Prefill.decodes());
        assert!(!Role::Decode.prefills() && Role::Decode.decodes());
        assert!(Role::Both.prefills() && Role::Both.decodes());
        assert!(!Role::Store.prefills() && !Role::Store.decodes());
    }
}
