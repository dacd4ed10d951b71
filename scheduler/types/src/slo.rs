//! Service classes: what a request was promised and what it is worth.

use alloc::string::String;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A service class: its objectives and its standing against others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SloClass {
    /// Name that requests carry.
    pub name: String,
    /// Time to first token promised, µs.
    pub ttft_us: u64,
    /// Time between tokens promised, µs: bounds the mean of a request's longest tenth of gaps.
    pub tbt_us: u64,
    /// By how much a tenant's service in this class is divided when the turns of tenants are settled, ≥ 1. It shares
    /// nothing between classes of one tenant, and admission does not look at it.
    pub weight: u32,
    /// Strict band of what waits on an instance: a higher number is sent first. Admission does not look at it: what was
    /// let in before keeps its place, so that under overload a higher class needs `headroom_permille` in those below.
    pub priority: i32,
    /// Whether a request that was let in and waits in the conductor may be refused after all
    /// (`costly`) when one of an unsheddable class would otherwise be refused: one arrival looks at the two instances with
    /// most that waits, and displaces 16 at most. A stream's client may have its status by then, and finds the refusal
    /// in the stream.
    pub sheddable: bool,
    /// Share of each pool's SLO budget kept free for higher bands, per mille of `ttft_us`.
    pub headroom_permille: u32,
}

impl Default for SloClass {
    fn default() -> Self {
        Self {
            name: String::from("default"),
            ttft_us: 30_000_000,
            tbt_us: 100_000,
            weight: 1,
            priority: 0,
            sheddable: true,
            headroom_permille: 0,
        }
    }
}
