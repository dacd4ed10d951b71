//! Settings of the conductor: one struct, unit in each name, bounds checked in one place.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use baton_types::{ClassId, SloClass};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::PolicyName;
use crate::policies::Policy;

/// Most that `max_retries` may be.
pub(crate) const MOST_RETRIES: u32 = 16;

/// When a request that cannot meet its objective is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionMode {
    /// As the policy has it: `slo` for Baton's own, `none` for those it is compared with.
    Auto,
    /// Never, except when a bound is full.
    None,
    /// TTFT at arrival, decode load only after the prefill: the paper's baseline.
    AtDecode,
    /// TTFT and the decode load of this moment, both at arrival.
    Early,
    /// TTFT, and the decode load predicted for the moment when this prefill ends.
    EarlyPredict,
    /// Baton's: every placement is checked for the request and for those already promised.
    Slo,
}

impl AdmissionMode {
    /// The word used in configs and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::None => "none",
            Self::AtDecode => "at_decode",
            Self::Early => "early",
            Self::EarlyPredict => "early_predict",
            Self::Slo => "slo",
        }
    }
}

/// A setting outside its bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for ConfigError {}

/// Everything that an operator may set about scheduling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SchedulerConfig {
    /// How requests are placed.
    pub policy: PolicyName,
    /// When a request that cannot meet its objective is refused.
    pub admission: AdmissionMode,
    /// Admission modes that are asked beside the real one and only counted: `baton_shadow_refused_total`, and `counters`
    /// of `/admin/status`.
    pub shadow: Vec<AdmissionMode>,
    /// Tokens in a KV block, 1–65,536.
    pub block_tokens: u32,
    /// `kvcache_balancing_threshold` of Algorithm 1, in thousandths, ≥ 1000: fetch when the best
    /// prefix is longer than the local one by more than this factor.
    pub balancing_threshold_permille: u32,
    /// Whether prefixes are fetched from other instances (policies that know how).
    pub fetch: bool,
    /// Whether a decode instance may prefill a request itself: while it decodes nothing, or as long as the steps that
    /// its engine would make of it keep the objective. While decodes are what the cluster is short of, it does so
    /// only where no other instance can.
    pub local_prefill: bool,
    /// Share of the tightest TBT objective that a step with prompt tokens in it may take, per mille, 100–1000: the step
    /// target. The conductor sends it to the nodes: Baton's own engine cuts prompts by it, and servers that keep prefixes
    /// get prompts in parts. A decode instance whose engine has a fixed budget gets no prefill whose steps are predicted
    /// to take longer.
    pub mixed_step_permille: u32,
    /// Requests under way in the conductor at most, waiting or not; more are refused (I9).
    pub max_waiting_requests: u32,
    /// Assumed decode duration of `early_predict`, µs; 0 learns the mean.
    pub decode_duration_us: u64,
    /// Assumed output length before any was seen, tokens.
    pub prior_output_tokens: u32,
    /// Busy threshold of `dynamo_wspt`: active prefill tokens per instance over tokens a pass, per mille.
    pub queue_threshold_permille: u32,
    /// Whether popular prefixes are copied to idle instances ahead of demand.
    pub replicate: bool,
    /// Most instances that are compared in detail for one request, all of a fleet that has no more, and twice as many as
    /// are compared for its decode. Not a setting: only measurements change it.
    #[serde(skip)]
    #[schemars(skip)]
    pub candidates: usize,
    /// Times that a request may be placed again after losing an instance.
    pub max_retries: u32,
    /// One decision in this many is recorded with every candidate's terms; 0 records none. A service records all with 0.
    pub explain_every: u32,
    /// Seed of every tie-break.
    pub seed: u64,
    /// Service classes; the first is the default.
    pub classes: Vec<SloClass>,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            policy: PolicyName::default(),
            admission: AdmissionMode::Auto,
            shadow: Vec::new(),
            block_tokens: 512,
            balancing_threshold_permille: 1300,
            fetch: true,
            local_prefill: true,
            mixed_step_permille: 900,
            max_waiting_requests: 100_000,
            decode_duration_us: 0,
            prior_output_tokens: 256,
            queue_threshold_permille: 1000,
            replicate: true,
            candidates: 48,
            max_retries: 2,
            explain_every: 0,
            seed: 1,
            classes: vec![SloClass::default()],
        }
    }
}

impl SchedulerConfig {
    /// The admission mode in force once `auto` is resolved.
    #[must_use]
    pub fn effective_admission(&self) -> AdmissionMode {
        if self.admission == AdmissionMode::Auto {
            Policy::named(self.policy).admission
        } else {
            self.admission
        }
    }

    /// The class whose TBT bounds the steps of a decode of this one: the tightest of those that share them, which are all
    /// of its band and of higher ones. A decode of a lower band never makes steps too long for a higher one. An unknown
    /// class counts as the first.
    #[must_use]
    pub fn steps_for(&self, class: ClassId) -> ClassId {
        let own = if class.index() < self.classes.len() { class } else { ClassId::default() };
        let priority = self.classes[own.index()].priority;
        let sharing = (0..).map(ClassId).zip(&self.classes).filter(|(_, c)| c.priority >= priority);
        sharing.min_by_key(|(id, class)| (class.tbt_us, *id != own)).map_or(own, |(id, _)| id)
    }

    /// The TBT that bounds the steps of a decode of this class, µs. It is the least that a request of the class can be
    /// promised: requests do not choose whose steps they share.
    #[must_use]
    pub fn least_tbt_us(&self, class: ClassId) -> u64 {
        self.classes[self.steps_for(class).index()].tbt_us
    }

    /// What a decode step with prompt tokens in it may take, µs: requests of every class decode in it.
    #[must_use]
    pub fn step_target_us(&self) -> u64 {
        let tightest = self.classes.iter().map(|c| c.tbt_us).min().unwrap_or(u64::MAX);
        tightest / 1000 * u64::from(self.mixed_step_permille)
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// Names the setting, its value and the bound.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let within = |name: &str, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError(format!("scheduler.{name} = {value} is outside {low}..={high}")))
            }
        };
        within("block_tokens", self.block_tokens.into(), 1, 65_536)?;
        within("balancing_threshold_permille", self.balancing_threshold_permille.into(), 1000, 1_000_000)?;
        within("mixed_step_permille", self.mixed_step_permille.into(), 100, 1000)?;
        within("max_waiting_requests", self.max_waiting_requests.into(), 1, 10_000_000)?;
        within("decode_duration_us", self.decode_duration_us, 0, 86_400_000_000)?;
        within("prior_output_tokens", self.prior_output_tokens.into(), 1, 1_000_000)?;
        within("queue_threshold_permille", self.queue_threshold_permille.into(), 1, 1_000_000)?;
        within("max_retries", self.max_retries.into(), 0, MOST_RETRIES.into())?;
        within("classes (count)", self.classes.len() as u64, 1, 1024)?;
        for class in &self.classes {
            let named = |setting: &str| format!("classes[{}].{setting}", class.name);
            within(&named("ttft_us"), class.ttft_us, 1000, 86_400_000_000)?;
            within(&named("tbt_us"), class.tbt_us, 100, 3_600_000_000)?;
            within(&named("e2e_us"), class.e2e_us, 0, 604_800_000_000)?;
            within(&named("target_permille"), class.target_permille.into(), 500, 999)?;
            within(&named("weight"), class.weight.into(), 1, 1_000_000)?;
            within(&named("headroom_permille"), class.headroom_permille.into(), 0, 999)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_auto_follows_the_policy() {
        let mut config = SchedulerConfig::default();
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.effective_admission(), AdmissionMode::Slo);
        config.policy = PolicyName::Mooncake;
        assert_eq!(config.effective_admission(), AdmissionMode::None);
        config.admission = AdmissionMode::Early;
        assert_eq!(config.effective_admission(), AdmissionMode::Early);
    }

    #[test]
    fn an_impossible_value_is_named_with_its_bound() {
        let config = SchedulerConfig { block_tokens: 0, ..SchedulerConfig::default() };
        let error = config.validate().expect_err("zero is out of bounds");
        assert!(error.0.contains("block_tokens = 0") && error.0.contains("1..=65536"), "{error}");
        let mut config = SchedulerConfig::default();
        config.classes[0].ttft_us = 1;
        assert!(config.validate().is_err_and(|e| e.0.contains("classes[default].ttft_us")));
    }
}
