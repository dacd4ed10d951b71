//! How long an instance needs to prefill a prompt.

use super::NEVER_US;
use crate::fleet::Instance;
use baton_types::Role;

/// Work that a prefill means for an instance, µs of its time: `new` tokens behind `prefix`.
///
/// On a prefill instance: passes of at most `pass_tokens`, spread over the nodes of a pipeline.
/// On one that decodes too: chunks between decode steps, each step filled up to `target_us`.
/// [`NEVER_US`] when the decode steps alone fill the target, or a fixed chunk beside them breaks it.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are positive and far below 2^52"
)]
pub(crate) fn prefill_work_us(instance: &Instance, new: u64, prefix: u64, target_us: u64) -> u64 {
    let spec = &instance.spec;
    let alone = spec.profile.chunked_prefill_us(new, prefix, spec.pass_tokens.into());
    let prior = if spec.role == Role::Prefill || spec.mixed_chunk_tokens == Some(0) {
        alone / f64::from(spec.pipeline_nodes.max(1))
    } else {
        let (tokens, step_us) = mixed_rate(instance, prefix + new / 2, target_us);
        // An engine that always mixes the same chunk must not do so where that breaks a promise.
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let harms =
            spec.role == Role::Decode && instance.decode.all().0 > 0 && step_us > target_us as f64 + 1.0;
        if tokens == 0 || harms {
            return NEVER_US;
        }
        let steps = new.div_ceil(tokens);
        #[expect(clippy::cast_precision_loss, reason = "step counts are small")]
        let mixed = steps as f64 * step_us;
        if mixed > alone { mixed } else { alone }
    };
    (prior * instance.prefill_residual.ratio()) as u64 + 1
}

/// A bound below [`prefill_work_us`] that is quickly worked out, µs.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are positive and far below 2^52"
)]
pub(crate) fn least_work_us(instance: &Instance, new: u64, prefix: u64) -> u64 {
    let spec = &instance.spec;
    let alone = spec.profile.chunked_prefill_us(new, prefix, spec.pass_tokens.into());
    (alone / f64::from(spec.pipeline_nodes.max(1)) * instance.prefill_residual.ratio()) as u64
}

/// Prompt tokens that fit beside the present decodes in one step, and that step's time, µs.
#[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
fn mixed_rate(instance: &Instance, prefix: u64, target_us: u64) -> (u64, f64) {
    let profile = &instance.spec.profile;
    let (batch, context) = instance.decode.all();
    let decode_us = profile.decode_us(batch, context);
    let shared = if batch == 0 { 0.0 } else { profile.shared_us };
    let tokens = match instance.spec.mixed_chunk_tokens {
        Some(fixed) => u64::from(fixed),
        None => profile.chunk_within(
            target_us as f64 - decode_us + shared,
            prefix,
            instance.spec.pass_tokens.into(),
        ),
    };
    (tokens, decode_us + profile.prefill_us(tokens, prefix) - shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Fleet;
    use crate::testing::spec;
    use baton_types::InstanceId;

    fn instance(role: Role) -> Instance {
        let mut fleet = Fleet::default();
        fleet.join(spec(0, role));
        fleet.get(InstanceId(0)).expect("joined").clone()
    }

    #[test]
    fn a_prefill_instance_costs_its_profile_and_a_pipeline_divides_it() {
        let mut single = instance(Role::Prefill);
        let work = prefill_work_us(&single, 4096, 0, 0);
        let profile = single.spec.profile.clone();
        assert_eq!(work, profile.chunked_prefill_us(4096, 0, 8192) as u64 + 1);
        single.spec.pipeline_nodes = 2;
        assert!(prefill_work_us(&single, 4096, 0, 0).abs_diff(work / 2) <= 1);
    }

    #[test]
    fn a_busy_decode_instance_prefills_slower_and_a_full_one_never() {
        let mut decode = instance(Role::Decode);
        let idle = prefill_work_us(&decode, 4096, 0, 90_000);
        decode.decode.add_for_test(8, 8 * 4096);
        let busy = prefill_work_us(&decode, 4096, 0, 90_000);
        assert!(busy > idle, "{busy} vs {idle}");
        assert_eq!(prefill_work_us(&decode, 4096, 0, 1000), NEVER_US);
        let (tokens, step) = mixed_rate(&decode, 0, 90_000);
        assert!(tokens > 0 && step <= 90_000.0 + 1.0);
    }
}
