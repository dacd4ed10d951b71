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
    /// Time from the arrival to the last token promised, µs; 0 promises none. Answers are judged by it (`late_e2e`) and not
    /// admitted by it: how long an answer will be is known too roughly when it arrives.
    pub e2e_us: u64,
    /// Share of the admitted requests that should have their first token within `ttft_us`, per mille, 500–999. The margin
    /// that admission keeps free is learnt from it: the conductor measures by how much first tokens come later than it
    /// promised, for each class and path, and keeps that quantile of it free. Refused requests and `tbt_us` do not count
    /// here. They do in the attained share of `/admin/status` (`attained_5m`, `attained_1h`), which can therefore be lower.
    /// The figure to compare is `ttft_attained`.
    pub target_permille: u32,
    /// By how much a tenant's work in this class is divided when it is compared with that of other tenants, ≥ 1: in the
    /// order of service inside a band, and when a request displaces another tenant's (see `sheddable`).
    pub weight: u32,
    /// Strict band: a higher number is sent first, and displaces sheddable requests of lower ones that only wait where it
    /// would otherwise be refused. A lower band is sent first only where the higher one is in time all the same.
    pub priority: i32,
    /// Whether a request that was admitted and waits in the conductor may be refused after all (`costly`) when another
    /// would otherwise be refused: one of a higher band, one of an unsheddable class of the same band, or one of a tenant
    /// that is far behind this one's tenant in its share. The fewest and largest leave, at most 16, of one instance; of
    /// the same band at most one for one. A stream's client may have its status by then, and finds the refusal in the
    /// stream.
    pub sheddable: bool,
    /// Share of each pool's SLO budget kept free for higher bands, per mille of `ttft_us`.
    pub headroom_permille: u32,
}

impl SloClass {
    /// Which objectives an answer that completed kept: TTFT, TBT and E2E. The TBT of an answer of one token is 0.
    #[must_use]
    pub const fn keeps(&self, ttft_us: u64, tbt_us: u64, e2e_us: u64) -> [bool; 3] {
        [ttft_us <= self.ttft_us, tbt_us <= self.tbt_us, !self.is_late_e2e(e2e_us)]
    }

    /// Whether a request of this age, µs, is beyond the objective for its last token.
    #[must_use]
    pub const fn is_late_e2e(&self, age_us: u64) -> bool {
        self.e2e_us > 0 && age_us > self.e2e_us
    }
}

impl Default for SloClass {
    fn default() -> Self {
        Self {
            name: String::from("default"),
            ttft_us: 30_000_000,
            tbt_us: 100_000,
            e2e_us: 0,
            target_permille: 995,
            weight: 1,
            priority: 0,
            sheddable: true,
            headroom_permille: 0,
        }
    }
}
