//! Service classes: what a request was promised and what it is worth.

use alloc::string::String;
use serde::{Deserialize, Serialize};

/// A service class (D18): its objectives and its standing against others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SloClass {
    /// Name that requests carry.
    pub name: String,
    /// Time to first token promised, µs.
    pub ttft_us: u64,
    /// Time between tokens promised, µs: bounds the mean of a request's longest tenth of gaps.
    pub tbt_us: u64,
    /// Share of service among classes of equal priority, ≥ 1.
    pub weight: u32,
    /// Strict band: a higher number is served first.
    pub priority: i32,
    /// Whether a request that was let in and waits in the conductor may be refused after all
    /// (`costly`) when one of an unsheddable class would otherwise be refused.
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
