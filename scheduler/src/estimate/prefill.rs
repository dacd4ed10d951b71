//! How long an instance needs to prefill a prompt.

use super::{as_f64, whole_us};
use crate::fleet::{Instance, InstanceSpec};
use baton_types::{CostProfile, Role};

/// The predicted prefill on one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefillWork {
    /// Engine time, µs.
    pub us: u64,
    /// Engine time if no other prompt shared its passes, µs.
    pub alone_us: u64,
    /// Whether it does not fit into the decode steps of the instance, or stretches them beyond the target.
    pub breaks_decodes: bool,
}

/// The work of a prefill of `new` tokens behind `prefix` cached ones on an instance.
///
/// On a prefill instance, and on one without decodes, the prompt goes in passes, spread over the nodes of a pipeline.
/// Beside decodes it goes in chunks, one in each decode step. The engine chooses their length: a fixed one, or as much
/// as fits within `target_us`. `others` are the tokens of other prompts with which it shares a pass, as far as they fit in.
pub(crate) fn prefill_work(
    instance: &Instance,
    (new, prefix): (u64, u64),
    others: u64,
    target_us: u64,
) -> PrefillWork {
    let (spec, beside) = (&instance.spec, instance.decode.all());
    let prior = |others| prior_us(spec, beside, (new, prefix), (others, target_us));
    let prior_alone_us = prior(0);
    // An instance of both roles has nowhere else to prefill, unless there are others for that.
    let minds = spec.role != Role::Both;
    let breaks_decodes =
        prior_alone_us.is_none() || minds && stretches_steps(instance, new, prefix, target_us);
    let corrected_us = |prior_us: f64| whole_us(prior_us * instance.prefill_residual.ratio() + 1.0);
    let alone_us = corrected_us(prior_alone_us.unwrap_or_else(|| pass_us(spec, (new, prefix), 0)));
    let us = if others == 0 { alone_us } else { prior(others).map_or(alone_us, corrected_us) };
    PrefillWork { us, alone_us, breaks_decodes }
}

/// A lower bound of [`prefill_work`] that is cheap to compute, µs.
pub(crate) fn least_work_us(instance: &Instance, work: (u64, u64), others: u64) -> u64 {
    let spec = &instance.spec;
    let least_us = in_passes_us(&spec.profile, spec.pass_tokens.into(), work, others);
    whole_us(least_us / f64::from(spec.pipeline_nodes.max(1)) * instance.prefill_residual.ratio())
}

/// The prediction before any correction, µs, `beside` a number of decodes and the sum of their contexts. Measured
/// prefills are compared to it. `None` where the decode steps leave no room for a chunk.
///
/// The prediction must never rise when fewer tokens are new. So the last step counts with its actual content, and the
/// length of a chunk is the one at the middle of the whole prompt, however much of it is cached.
pub(crate) fn prior_us(
    spec: &InstanceSpec,
    beside: (u32, u64),
    (new, prefix): (u64, u64),
    (others, target_us): (u64, u64),
) -> Option<f64> {
    // A prefill instance has decodes only from before it took this role.
    let stays = spec.role == Role::Prefill;
    if beside.0 == 0 || !(mixes(spec) || stays) {
        return Some(pass_us(spec, (new, prefix), others));
    }
    if spec.mixed_chunk_tokens == Some(0) {
        return None;
    }
    let profile = &spec.profile;
    // The time of each step without the prompt's tokens.
    let step_us = (profile.decode_us(beside.0, beside.1) - profile.shared_us).max(0.0);
    let (own_us, steps) = if let Some(fixed) = spec.mixed_chunk_tokens {
        let fixed = u64::from(fixed);
        (profile.chunked_prefill_us(new, prefix, fixed), as_f64(new.div_ceil(fixed)))
    } else {
        let room_us = as_f64(target_us) - step_us;
        let tokens =
            profile.chunk_within(room_us, u64::midpoint(prefix, prefix + new), spec.pass_tokens.into());
        if tokens == 0 {
            return None;
        }
        let own_us = profile.chunked_prefill_us(new, prefix, tokens);
        (own_us, libm::ceil(own_us / room_us))
    };
    Some(own_us + steps * step_us)
}

/// The time of a step with prompt tokens in it, µs. The step carries everything that the instance has been sent and
/// `new` more tokens behind `prefix`, as far as its engine puts that into one step. The time is taken halfway through
/// the new tokens.
pub(crate) fn mixed_step_us(instance: &Instance, fixed: u32, new: u64, prefix: u64) -> f64 {
    let (batch, context) = instance.decode.all();
    let profile = &instance.spec.profile;
    let tokens = (instance.prefill.active_tokens() + new).min(fixed.into());
    let before = prefix + new.saturating_sub(tokens) / 2;
    // What was learnt of prefills here is less than the engine's speed where they share the steps of large batches.
    let speed = instance.prefill_residual.ratio().max(instance.step_residual.ratio());
    let prompt_us = profile.prefill_us(tokens, before) * speed;
    let shared_us = if batch == 0 { 0.0 } else { profile.shared_us };
    instance.step_us(batch, context) + (prompt_us - shared_us).max(0.0)
}

/// Whether chunks of this prefill would stretch steps beyond the target on a decode instance whose engine ignores the
/// target.
pub(crate) fn stretches_steps(instance: &Instance, new: u64, prefix: u64, target_us: u64) -> bool {
    let spec = &instance.spec;
    let decodes = instance.decode.all().0 > 0;
    let fixed = spec.mixed_chunk_tokens.filter(|fixed| decodes && *fixed > 0);
    fixed.is_some_and(|fixed| mixed_step_us(instance, fixed, new, prefix) > as_f64(target_us) + 1.0)
}

/// Whether the engine computes prompts in chunks beside its decodes.
fn mixes(spec: &InstanceSpec) -> bool {
    spec.role != Role::Prefill && spec.mixed_chunk_tokens != Some(0)
}

/// Time of a prefill on an instance without decodes, µs.
fn pass_us(spec: &InstanceSpec, work: (u64, u64), others: u64) -> f64 {
    let others = if mixes(spec) { 0 } else { others };
    let pass = match spec.mixed_chunk_tokens {
        // An engine with fixed chunks uses them without decodes too.
        Some(fixed) if mixes(spec) && spec.pipeline_nodes <= 1 => fixed.min(spec.pass_tokens),
        _ => spec.pass_tokens,
    };
    in_passes_us(&spec.profile, pass.into(), work, others) / f64::from(spec.pipeline_nodes.max(1))
}

/// Time of a prefill in passes, µs. Where the last one has room for others it takes its share of a pass that they are in, too:
/// what a pass takes whatever is in it is paid once for all.
fn in_passes_us(profile: &CostProfile, pass: u64, (new, prefix): (u64, u64), others: u64) -> f64 {
    let alone_us = profile.chunked_prefill_us(new, prefix, pass);
    let last = if new > pass { new % pass.max(1) } else { new };
    let others = others.min(pass.saturating_sub(last));
    if others == 0 || last == 0 {
        return alone_us;
    }
    let (own, all) = (as_f64(last), as_f64(last + others));
    let (own_us, shared_us) = (profile.dense_us(own), profile.dense_us(all) * own / all);
    alone_us - own_us + own_us.min(shared_us)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Fleet;
    use crate::testing::spec;
    use baton_types::{InstanceId, RequestId};
    use proptest::prelude::*;

    fn instance(role: Role) -> Instance {
        let mut fleet = Fleet::default();
        fleet.join(spec(0, role));
        fleet.get(InstanceId(0)).expect("joined").clone()
    }

    /// An instance with `count` decodes that hold `context_tokens` together.
    fn busy(role: Role, count: u64, context_tokens: u64) -> Instance {
        let mut busy = instance(role);
        busy.decode.add_for_test(count, context_tokens);
        busy
    }

    #[test]
    fn a_prefill_instance_costs_its_profile_and_a_pipeline_divides_it() {
        let mut single = instance(Role::Prefill);
        let work = prefill_work(&single, (4096, 0), 0, 0).us;
        let profile = single.spec.profile.clone();
        assert_eq!(work, profile.chunked_prefill_us(4096, 0, 8192) as u64 + 1);
        single.spec.pipeline_nodes = 2;
        assert!(prefill_work(&single, (4096, 0), 0, 0).us.abs_diff(work / 2) <= 1);
    }

    /// A regression: each prompt counted as if it were alone in its pass. A flood of prompts of 212 tokens was predicted to
    /// take five times as long as it does, and a third of it was refused.
    #[test]
    fn short_prompts_share_what_a_pass_takes_whatever_is_in_it() {
        let single = instance(Role::Prefill);
        let profile = &single.spec.profile;
        let alone_us = prefill_work(&single, (200, 0), 0, 0).us;
        let shared_us = prefill_work(&single, (200, 0), 3_800, 0).us;
        let attention_us = profile.attention_us(200, 0);
        assert!(shared_us < alone_us, "{shared_us} {alone_us}");
        let own_part_us = profile.dense_us(4_000.0) / 20.0 + attention_us;
        assert_eq!(shared_us, own_part_us as u64 + 1, "twenty of them are one pass");
        // No more than a pass holds is shared with, and a whole pass is not.
        let most = prefill_work(&single, (200, 0), 8192 - 200, 0);
        assert_eq!(prefill_work(&single, (200, 0), 1_000_000, 0), most);
        let whole = prefill_work(&single, (8192, 0), 0, 0);
        assert_eq!(prefill_work(&single, (8192, 0), 1_000_000, 0), whole);
        let coupled = instance(Role::Both);
        assert_eq!(prefill_work(&coupled, (200, 0), 3_800, 0), prefill_work(&coupled, (200, 0), 0, 0));
    }

    #[test]
    fn a_busy_decode_instance_prefills_slower_and_a_full_one_has_no_room() {
        let idle = prefill_work(&instance(Role::Decode), (4096, 0), 0, 90_000);
        let decode = busy(Role::Decode, 8, 8 * 4096);
        let slower = prefill_work(&decode, (4096, 0), 0, 90_000);
        assert!(
            slower.us > idle.us && !slower.breaks_decodes && !idle.breaks_decodes,
            "{slower:?} vs {idle:?}"
        );
        let full = prefill_work(&decode, (4096, 0), 0, 1000);
        assert!(full.breaks_decodes && full.us < 1_000_000_000, "{full:?}: a time that can be added up");
    }

    /// A regression: a prefill used to cost whole steps, as many as the objective allowed, whatever was cached.
    #[test]
    fn where_nobody_decodes_a_prefill_costs_what_it_costs_alone() {
        for chunk in [None, Some(0), Some(8192), Some(512)] {
            for target_us in [5_000, 90_000, 54_000_000] {
                let mut both = instance(Role::Both);
                both.spec.mixed_chunk_tokens = chunk;
                let pass = chunk.filter(|tokens| *tokens > 0).unwrap_or(8192);
                let alone_us = both.spec.profile.chunked_prefill_us(600, 448, pass.into());
                assert_eq!(
                    prefill_work(&both, (600, 448), 0, target_us).us,
                    alone_us as u64 + 1,
                    "{chunk:?}"
                );
            }
        }
    }

    #[test]
    fn the_last_step_counts_what_is_in_it() {
        // Steps of 10 ms; 100 µs a token and 1 ms a pass, which a step shares with it.
        let mut both = busy(Role::Both, 1, 0);
        assert_eq!(prefill_work(&both, (100, 0), 0, 90_000).us, 20_001);
        assert_eq!(prefill_work(&both, (1_000, 0), 0, 90_000).us, 2 * 10_000 + 100_001);
        both.spec.mixed_chunk_tokens = Some(300);
        assert_eq!(prefill_work(&both, (700, 0), 0, 90_000).us, 3 * 10_000 + 70_001);
    }

    #[test]
    fn chunks_of_a_fixed_length_harm_where_their_steps_are_too_long() {
        let mut decode = busy(Role::Decode, 1, 0);
        decode.spec.mixed_chunk_tokens = Some(8192);
        let breaks_decodes = |at: &Instance, new| prefill_work(at, (new, 0), 0, 90_000).breaks_decodes;
        assert!(!breaks_decodes(&decode, 800), "10 ms and 80 ms");
        assert!(breaks_decodes(&decode, 801) && breaks_decodes(&decode, 20_000));
        // Work that was sent before shares the step.
        let sent = crate::queue::DispatchedPrefill {
            request: RequestId(1),
            work_us: 1,
            new_tokens: 500,
            deadline_us: u64::MAX,
            sent_us: 0,
            beside_tokens: 0,
        };
        decode.prefill.dispatch(sent);
        assert!(!breaks_decodes(&decode, 300) && breaks_decodes(&decode, 301));
        decode.spec.mixed_chunk_tokens = Some(800);
        assert!(!breaks_decodes(&decode, 20_000), "no step has more than its chunk");
        decode.spec.role = Role::Both;
        decode.spec.mixed_chunk_tokens = Some(8192);
        assert!(!breaks_decodes(&decode, 20_000), "it has no other place for them");
        assert!(stretches_steps(&decode, 20_000, 0, 90_000), "it has, where others prefill");
        let mut idle = instance(Role::Decode);
        idle.spec.mixed_chunk_tokens = Some(8192);
        assert!(!breaks_decodes(&idle, 20_000), "nobody decodes");
    }

    /// A regression: prompts that share a step of a large batch are computed in a fraction of it each, so steps with prompt
    /// tokens were predicted to be half as long as they are.
    #[test]
    fn what_is_learnt_of_shared_steps_does_not_shorten_them() {
        let mut decode = busy(Role::Decode, 1, 0);
        decode.spec.mixed_chunk_tokens = Some(8192);
        let before_us = mixed_step_us(&decode, 8192, 800, 0);
        (0..100).for_each(|_| decode.prefill_residual.observe(100_000.0, 50_000.0));
        assert!(decode.prefill_residual.ratio() < 0.6);
        assert!((mixed_step_us(&decode, 8192, 800, 0) - before_us).abs() < 1e-6);
        (0..100).for_each(|_| decode.prefill_residual.observe(50_000.0, 100_000.0));
        assert!(
            mixed_step_us(&decode, 8192, 800, 0) > 1.5 * before_us,
            "a slow engine is slow in these, too"
        );
        let mut fast = busy(Role::Decode, 1, 0);
        (0..100).for_each(|_| fast.prefill_residual.observe(100_000.0, 50_000.0));
        (0..100).for_each(|_| fast.step_residual.observe(150_000.0, 100_000.0));
        assert!(mixed_step_us(&fast, 8192, 800, 0) < 0.7 * before_us, "a fast one is fast in all of them");
    }

    proptest! {
        /// A larger cached part never makes the prefill dearer, whatever else runs there.
        #[test]
        fn what_is_cached_makes_a_prefill_cheaper(
            prompt in 2u64..60_000, cached in 0u64..60_000, more in 1u64..60_000,
            decodes in 0u64..20, target_us in 5_000u64..60_000_000, chunk in 0u32..3,
            pair_ps in 0u32..100_000, apart in any::<bool>(), (wait, gathered) in (0u64..20_000, 0u64..8192),
        ) {
            let (more, cached) = ((cached + more).min(prompt - 1), cached.min(prompt - 1));
            let mut both = if apart { instance(Role::Prefill) } else { busy_or_idle(decodes) };
            let others = |new| wait.min(gathered.saturating_sub(new));
            both.spec.mixed_chunk_tokens = [None, Some(512), Some(8192)][chunk as usize];
            let mut profile = (*both.spec.profile).clone();
            profile.prefill.attention_ps_per_pair = f64::from(pair_ps);
            both.spec.profile = profile.into();
            let (less, most) = (
                prefill_work(&both, (prompt - more, more), others(prompt - more), target_us),
                prefill_work(&both, (prompt - cached, cached), others(prompt - cached), target_us),
            );
            prop_assert!(less.us <= most.us, "{less:?} {most:?}");
            let least_us = least_work_us(&both, (prompt - more, more), others(prompt - more));
            prop_assert!(least_us <= less.us, "{least_us} {less:?}");
        }
    }

    fn busy_or_idle(decodes: u64) -> Instance {
        if decodes == 0 { instance(Role::Both) } else { busy(Role::Both, decodes, decodes * 3_000) }
    }
}
