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
    /// would otherwise be refused: one of a higher band, one of an unsheddable class of the same band, one of a tenant
    /// that is far behind this one's tenant in its share, or a smaller one of the same band, whose tenant is this one's
    /// or has had no more of its share. The fewest and largest leave, at most 16, of one instance; of the same band at
    /// most one for one. It may also be refused when its turn comes, if its decode would take a place that higher bands
    /// are expected to need, find no room in time, or make the steps of all beside it too long. A stream has its status
    /// with its first token, or after 10 s without one. Refused before, its client gets 429 with a Retry-After; later it
    /// finds the refusal in the stream.
    pub sheddable: bool,
    /// Share of each pool's SLO budget kept free for higher bands, per mille of `ttft_us`.
    pub headroom_permille: u32,
}

/// The longest objective that a request may have of its own, µs: a day.
pub const MAX_OWN_OBJECTIVE_US: u64 = 86_400_000_000;

/// The objectives that a request names itself. Each of them holds in place of its class's; where it names none, its class's
/// holds. Band, weight and target share are the class's in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RequestObjectives {
    /// Its own TTFT, µs. More than [`MAX_OWN_OBJECTIVE_US`] counts as that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_us: Option<u64>,
    /// Its own TBT, µs. More than [`MAX_OWN_OBJECTIVE_US`] counts as that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tbt_us: Option<u64>,
}

impl RequestObjectives {
    /// Whether its class's objectives hold.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ttft_us.is_none() && self.tbt_us.is_none()
    }

    /// The TTFT and the TBT that hold for a request of this class, µs.
    #[must_use]
    pub fn in_force(&self, class: &SloClass) -> (u64, u64) {
        let own = |own_us: Option<u64>, class_us| own_us.map_or(class_us, |us| us.min(MAX_OWN_OBJECTIVE_US));
        (own(self.ttft_us, class.ttft_us), own(self.tbt_us, class.tbt_us))
    }

    /// Which objectives an answer that completed kept: TTFT, TBT and its class's E2E. The TBT of an answer of one token is 0.
    #[must_use]
    pub fn kept(&self, class: &SloClass, (ttft_us, tbt_us, e2e_us): (u64, u64, u64)) -> [bool; 3] {
        let (most_ttft_us, most_tbt_us) = self.in_force(class);
        [ttft_us <= most_ttft_us, tbt_us <= most_tbt_us, !class.is_late_e2e(e2e_us)]
    }
}

impl SloClass {
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

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: RequestObjectives = RequestObjectives { ttft_us: None, tbt_us: None };

    fn class() -> SloClass {
        SloClass { ttft_us: 2_000, tbt_us: 50, e2e_us: 9_000, ..SloClass::default() }
    }

    #[test]
    fn each_own_objective_replaces_its_classs_and_no_other() {
        let class = class();
        assert_eq!(NONE.in_force(&class), (2_000, 50));
        for own_us in [1, 1_999, 2_001, MAX_OWN_OBJECTIVE_US] {
            let ttft = RequestObjectives { ttft_us: Some(own_us), ..NONE };
            assert_eq!(ttft.in_force(&class), (own_us, 50));
            let tbt = RequestObjectives { tbt_us: Some(own_us), ..NONE };
            assert_eq!(tbt.in_force(&class), (2_000, own_us));
            assert!(!ttft.is_empty() && !tbt.is_empty() && NONE.is_empty());
        }
        let most = RequestObjectives { ttft_us: Some(u64::MAX), tbt_us: Some(u64::MAX) };
        assert_eq!(most.in_force(&class), (MAX_OWN_OBJECTIVE_US, MAX_OWN_OBJECTIVE_US));
    }

    #[test]
    fn an_answer_is_judged_by_what_its_request_named() {
        let class = class();
        assert_eq!(NONE.kept(&class, (2_000, 50, 9_000)), [true; 3]);
        assert_eq!(NONE.kept(&class, (2_001, 51, 9_001)), [false; 3]);
        let tight = RequestObjectives { ttft_us: Some(1_000), tbt_us: Some(40) };
        assert_eq!(tight.kept(&class, (1_000, 40, 9_000)), [true; 3]);
        assert_eq!(tight.kept(&class, (2_000, 50, 9_000)), [false, false, true]);
        let loose = RequestObjectives { ttft_us: Some(5_000), tbt_us: Some(200) };
        assert_eq!(loose.kept(&class, (5_000, 200, 9_001)), [true, true, false], "its class's E2E holds");
    }
}
