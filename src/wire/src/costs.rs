//! Cost profiles on the wire.

use baton_types::{CostProfile, DecodeCost, FitReport, PrefillCost, ValidRange};

use crate::v1;

impl From<&CostProfile> for v1::CostProfile {
    fn from(profile: &CostProfile) -> Self {
        let CostProfile { fit, valid, prefill, decode, .. } = profile;
        Self {
            name: profile.name.clone(),
            source: profile.source.clone(),
            kv_bytes_per_token: profile.kv_bytes_per_token,
            kv_capacity_tokens: profile.kv_capacity_tokens,
            layers: profile.layers,
            shared_us: profile.shared_us,
            fit: Some(v1::FitReport {
                prefill_points: fit.prefill_points,
                prefill_mape_pct: fit.prefill_mape_pct,
                prefill_worst_pct: fit.prefill_worst_pct,
                decode_points: fit.decode_points,
                decode_mape_pct: fit.decode_mape_pct,
                decode_worst_pct: fit.decode_worst_pct,
            }),
            valid: Some(v1::ValidRange {
                max_prompt_tokens: valid.max_prompt_tokens,
                max_batch: valid.max_batch,
                max_context_tokens: valid.max_context_tokens,
            }),
            prefill: Some(v1::PrefillCost {
                knots_tokens: prefill.knots_tokens.clone(),
                knots_us: prefill.knots_us.clone(),
                attention_ps_per_pair: prefill.attention_ps_per_pair,
            }),
            decode: Some(v1::DecodeCost {
                batches: decode.batches.clone(),
                base_us: decode.base_us.clone(),
                context_ps_per_token: decode.context_ps_per_token.clone(),
            }),
        }
    }
}

impl v1::CostProfile {
    /// The profile, yet to be validated; `None` where a part of it is missing.
    #[must_use]
    pub fn read(&self) -> Option<CostProfile> {
        let (fit, valid) = (self.fit.as_ref()?, self.valid.as_ref()?);
        let (prefill, decode) = (self.prefill.as_ref()?, self.decode.as_ref()?);
        Some(CostProfile {
            name: self.name.clone(),
            source: self.source.clone(),
            kv_bytes_per_token: self.kv_bytes_per_token,
            kv_capacity_tokens: self.kv_capacity_tokens,
            layers: self.layers,
            shared_us: self.shared_us,
            fit: FitReport {
                prefill_points: fit.prefill_points,
                prefill_mape_pct: fit.prefill_mape_pct,
                prefill_worst_pct: fit.prefill_worst_pct,
                decode_points: fit.decode_points,
                decode_mape_pct: fit.decode_mape_pct,
                decode_worst_pct: fit.decode_worst_pct,
            },
            valid: ValidRange {
                max_prompt_tokens: valid.max_prompt_tokens,
                max_batch: valid.max_batch,
                max_context_tokens: valid.max_context_tokens,
            },
            prefill: PrefillCost {
                knots_tokens: prefill.knots_tokens.clone(),
                knots_us: prefill.knots_us.clone(),
                attention_ps_per_pair: prefill.attention_ps_per_pair,
            },
            decode: DecodeCost {
                batches: decode.batches.clone(),
                base_us: decode.base_us.clone(),
                context_ps_per_token: decode.context_ps_per_token.clone(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_survives_the_wire_whole() {
        let profile = CostProfile {
            name: "small".into(),
            source: "measured".into(),
            kv_bytes_per_token: 327_680,
            kv_capacity_tokens: 1_500_000,
            layers: 80,
            shared_us: 12.5,
            fit: FitReport {
                prefill_points: 15,
                prefill_mape_pct: 1.25,
                prefill_worst_pct: 3.5,
                decode_points: 40,
                decode_mape_pct: 0.75,
                decode_worst_pct: 2.0,
            },
            valid: ValidRange { max_prompt_tokens: 131_072, max_batch: 256, max_context_tokens: 65_536 },
            prefill: PrefillCost {
                knots_tokens: vec![1, 512],
                knots_us: vec![30.0, 0.1 + 0.2],
                attention_ps_per_pair: 1e-9,
            },
            decode: DecodeCost {
                batches: vec![1, 64],
                base_us: vec![20.0, 31.0],
                context_ps_per_token: vec![0.5, 0.25],
            },
        };
        let sent = v1::CostProfile::from(&profile);
        assert_eq!(sent.read(), Some(profile));
        assert_eq!(v1::CostProfile { decode: None, ..sent.clone() }.read(), None);
        assert_eq!(v1::CostProfile { fit: None, ..sent }.read(), None);
    }
}
