//! The policies: each is a value in a file of its own, and a line in the table at the end of this one.

mod baton;
mod informed;
#[cfg(test)]
mod last;

/// Baselines to compare with: the Mooncake paper's policies and those of other projects.
mod baselines {
    pub(super) mod dynamo;
    pub(super) mod dynamo_wspt;
    pub(super) mod global_cache;
    pub(super) mod least_loaded;
    pub(super) mod lmetric;
    pub(super) mod local_cache;
    pub(super) mod mooncake;
    pub(super) mod random;
    pub(super) mod round_robin;
}

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::placement::Candidate;

/// The parts of a policy.
#[derive(Debug)]
pub(crate) struct Policy {
    /// How one of the candidates is taken.
    pub choice: Choice,
    /// When a longer prefix is fetched from another instance.
    pub fetch: FetchRule,
    /// Where a request waits for its prefill.
    pub queueing: QueueLocation,
    /// What the admission mode `auto` stands for.
    pub admission: AdmissionMode,
    /// Whether it knows how long answers will be, and what arrives next. Only a simulator can know that.
    pub foresees: bool,
}

impl Policy {
    /// The policy of that name.
    pub(crate) const fn named(name: PolicyName) -> &'static Self {
        name.policy()
    }
}

/// How one of the candidates is taken.
#[derive(Debug)]
pub(crate) enum Choice {
    /// Without their terms: the function picks an index below the number of candidates.
    Unseen(fn(&mut Conductor, u64) -> u64),
    /// The least score.
    Least {
        /// Every score is finite.
        score: fn(&Conductor, &Candidate, &Instance) -> f64,
        /// The order of equals.
        ties: Ties,
    },
}

/// The order of candidates of equal score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ties {
    /// The one with the lowest number.
    First,
    /// The one with the most cached tokens of the prompt. Of idle ones that are as good as far as predictions are, the one
    /// that was idle longest. Then as in `First`.
    Warmest,
    /// A random one.
    ByLot,
}

/// When a longer prefix elsewhere is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FetchRule {
    /// Never.
    Never,
    /// Whenever there is one.
    Longer,
    /// When it is longer by the balancing threshold, and then always (Algorithm 1).
    Threshold,
    /// When fetching is predicted to be sooner than recomputing.
    Sooner,
}

/// Where requests wait. It cannot change while requests wait: those of one queue would be stranded under another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueLocation {
    /// No request waits in the conductor: prefills are sent to engines at once.
    AtEngines,
    /// In the conductor, in a queue for each instance: the conductor orders the prefills.
    ByInstance,
    /// In the conductor, in one queue before they are placed.
    BeforePlacement,
}

/// Defines [`PolicyName`] from the table: a description, a variant, a name and a value for each policy.
macro_rules! policies {
    ($($(#[doc = $about:literal])+ $(#[cfg($when:meta)])? $name:ident = $word:literal, $policy:path;)+) => {
        /// How a request finds its instances.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum PolicyName {
            $($(#[doc = $about])+ $(#[cfg($when)])? #[serde(rename = $word)] $name,)+
        }

        impl PolicyName {
            /// Every policy, in the order of reports.
            pub const ALL: [Self; [$($(#[cfg($when)])? $word,)+].len()] =
                [$($(#[cfg($when)])? Self::$name,)+];

            /// The word used in configs and reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $($(#[cfg($when)])? Self::$name => $word,)+
                }
            }

            const fn policy(self) -> &'static Policy {
                match self {
                    $($(#[cfg($when)])? Self::$name => &$policy,)+
                }
            }
        }
    };
}

impl Conductor {
    /// The policy in force.
    pub(crate) const fn policy(&self) -> &'static Policy {
        Policy::named(self.config.policy)
    }
}

impl PolicyName {
    /// Whether the conductor holds prefills back and orders them itself.
    #[must_use]
    pub const fn orders_queues(self) -> bool {
        matches!(self.policy().queueing, QueueLocation::ByInstance)
    }

    /// Whether it knows how long answers will be, and what arrives next.
    #[must_use]
    pub const fn foresees(self) -> bool {
        self.policy().foresees
    }
}

policies! {
    /// Uniformly at random.
    Random = "random", baselines::random::POLICY;
    /// In turn.
    RoundRobin = "round_robin", baselines::round_robin::POLICY;
    /// Least predicted backlog, whatever the caches hold.
    LeastLoaded = "least_loaded", baselines::least_loaded::POLICY;
    /// Least predicted TTFT counting each instance's own cache; nothing is fetched.
    LocalCache = "local_cache", baselines::local_cache::POLICY;
    /// As `mooncake`, fetching whenever any other instance holds more (no balancing threshold).
    GlobalCache = "global_cache", baselines::global_cache::POLICY;
    /// Algorithm 1 of the Mooncake paper as published.
    Mooncake = "mooncake", baselines::mooncake::POLICY;
    /// Block-count cost after NVIDIA Dynamo's KV router, first come first served.
    Dynamo = "dynamo", baselines::dynamo::POLICY;
    /// The same cost behind a router queue that serves the shortest work first.
    DynamoWspt = "dynamo_wspt", baselines::dynamo_wspt::POLICY;
    /// LMetric: outstanding new prefill tokens times batch size.
    Lmetric = "lmetric", baselines::lmetric::POLICY;
    /// Baton's own: the soonest first token of those that keep every promise, prefills in an order of its own.
    Baton = "baton", baton::POLICY;
    /// As `baton`, with known output lengths and known arrivals of the next 60 s: a heuristic, for the simulator only.
    BatonInformed = "baton_informed", informed::POLICY;
    /// The last candidate; for tests alone, which it shows what a policy takes.
    #[cfg(test)]
    Last = "last", last::POLICY;
}

#[expect(clippy::derivable_impls, reason = "the table has no place for it")]
impl Default for PolicyName {
    fn default() -> Self {
        Self::Baton
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn words_are_unique_and_are_what_a_file_says() {
        let mut words: Vec<_> = PolicyName::ALL.iter().map(|p| p.name()).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), PolicyName::ALL.len());
        for policy in PolicyName::ALL {
            let word = serde_json::Value::from(policy.name());
            assert_eq!(serde_json::from_value::<PolicyName>(word).ok(), Some(policy));
        }
    }
}
