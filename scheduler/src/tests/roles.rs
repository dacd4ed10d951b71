//! Roles by forecast: instances that may do both parts take the part that is short.

use alloc::vec::Vec;
use baton_types::{Epoch, InstanceId, RequestId, Role};
use proptest::prelude::*;

use crate::testing::{
    conductor_of, decoding, foretold, naive_prefill_us, plain, profile, request, spec, step,
};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, Request, RoleAdvice, SchedulerConfig,
};

const SECOND_US: u64 = 1_000_000;

/// Instances of each role, with engines that never mix.
fn cluster(prefills: u32, decodes: u32, may_change_role: bool) -> Conductor {
    let role = |id| if id < prefills { Role::Prefill } else { Role::Decode };
    let of = |id| InstanceSpec { mixed_chunk_tokens: Some(0), may_change_role, ..spec(id, role(id)) };
    let specs: Vec<InstanceSpec> = (0..prefills + decodes).map(of).collect();
    conductor_of(SchedulerConfig::default(), &specs)
}

/// Two instances of each role.
fn pairs(may_change_role: bool) -> Conductor {
    cluster(2, 2, may_change_role)
}

/// One request a second that leaves again at once; returns the changes of roles.
fn offer(
    conductor: &mut Conductor,
    seconds: core::ops::Range<u64>,
    of: impl Fn(u64) -> Request,
) -> Vec<(u64, u32, Role)> {
    let mut changes = Vec::new();
    for second in seconds {
        let mut effects = step(conductor, second * SECOND_US, Input::RequestArrived(of(second)));
        let leaves = Input::RequestCancelled { request: RequestId(second) };
        effects.extend(step(conductor, second * SECOND_US, leaves));
        changes.extend(effects.iter().filter_map(|effect| match effect {
            Effect::ChangeRole { instance, role } => Some((second, instance.0, *role)),
            _ => None,
        }));
    }
    changes
}

/// 1.9 s of prefill: two instances of that part are nearly used up by one a second.
fn long_prompt(id: u64) -> Request {
    foretold(id, 19_000, 4)
}

/// 400 answers under way at once, as long as the step takes 10 ms or more.
fn long_answer(id: u64) -> Request {
    foretold(id, 100, 12_000)
}

fn roles(conductor: &Conductor) -> Vec<Role> {
    conductor.fleet.iter().map(|i| i.spec.role).collect()
}

#[test]
fn the_short_part_gets_an_instance_and_each_part_keeps_one() {
    let mut conductor = pairs(true);
    let changes = offer(&mut conductor, 0..300, long_prompt);
    assert_eq!(
        changes,
        [(30, 2, Role::Prefill)],
        "after three stretches, and the last decode instance stays"
    );
    assert_eq!(roles(&conductor), [Role::Prefill, Role::Prefill, Role::Prefill, Role::Decode]);
    assert_eq!(conductor.stats().role_changes, 1);
    let back = offer(&mut conductor, 300..600, long_answer);
    assert_eq!(back.len(), 2, "{back:?}");
    assert!(back.iter().all(|(_, _, role)| *role == Role::Decode) && back[0].0 < back[1].0, "{back:?}");
    assert!(back[1].0 - back[0].0 >= 10, "one in each stretch: {back:?}");
    assert_eq!(roles(&conductor).iter().filter(|role| **role == Role::Prefill).count(), 1);
}

#[test]
fn advice_is_given_where_roles_are_fixed() {
    let mut conductor = pairs(false);
    assert_eq!(conductor.role_advice(), None, "nothing was seen");
    assert!(offer(&mut conductor, 0..120, long_prompt).is_empty());
    let RoleAdvice { prefill_pressure, decode_pressure, prefills, decodes } =
        conductor.role_advice().expect("two minutes were seen");
    assert!((0.9..1.05).contains(&prefill_pressure), "1.9 s each second on two: {prefill_pressure}");
    assert!(decode_pressure < 0.5 && (prefills, decodes) == (3, 1), "{decode_pressure} {prefills}+{decodes}");
}

#[test]
fn where_both_parts_have_what_they_need_no_role_changes() {
    let mut conductor = pairs(true);
    assert!(offer(&mut conductor, 0..300, |id| foretold(id, 12_000, 4)).is_empty(), "1.2 of 2 s are used");
    let advice = conductor.role_advice().expect("five minutes were seen");
    assert!(advice.prefill_pressure < 0.8, "{advice:?}");
}

#[test]
fn demand_that_has_passed_is_forgotten() {
    let mut conductor = pairs(false);
    offer(&mut conductor, 0..120, long_prompt);
    let later = offer(&mut conductor, 500..520, |id| request(id, 100, 0));
    assert!(later.is_empty() && conductor.role_advice().is_none(), "nothing came for minutes");
    offer(&mut conductor, 520..640, |id| request(id, 100, 0));
    assert!(conductor.role_advice().expect("seen").prefill_pressure < 0.1);
}

#[test]
fn an_instance_that_changed_its_role_keeps_it_for_two_minutes() {
    let mut conductor = pairs(true);
    let mut changes = offer(&mut conductor, 0..40, long_prompt);
    changes.extend(offer(&mut conductor, 40..200, long_answer));
    let of_two: Vec<u64> = changes.iter().filter(|(_, id, _)| *id == 2).map(|(at, ..)| *at).collect();
    assert!(of_two.windows(2).all(|pair| pair[1] - pair[0] >= 120), "{changes:?}");
}

/// Decodes that run where prefills go from now on are not stalled by them.
#[test]
fn prefills_wait_until_the_decodes_of_the_former_role_have_ended() {
    for chunk in [Some(0), Some(8192)] {
        let role = |id| if id < 1 { Role::Prefill } else { Role::Decode };
        let of = |id| InstanceSpec { mixed_chunk_tokens: chunk, ..spec(id, role(id)) };
        let specs: Vec<InstanceSpec> = (0..3).map(of).collect();
        let mut conductor = conductor_of(plain(PolicyName::Baton, AdmissionMode::Slo), &specs);
        decoding(&mut conductor, request(900, 100, 0), 1);
        step(&mut conductor, 0, Input::RoleChanged { instance: InstanceId(1), role: Role::Prefill });
        let chosen = |conductor: &mut Conductor, id| {
            let effects = step(conductor, 0, Input::RequestArrived(request(id, 8_000, 0)));
            crate::testing::starts(&effects).first().map(|start| start.prefill)
        };
        assert_eq!(chosen(&mut conductor, 1), Some(0), "{chunk:?}");
        assert_eq!(chosen(&mut conductor, 2), None, "it waits for the first: {chunk:?}");
        step(
            &mut conductor,
            1,
            Input::DecodeFinished { request: RequestId(900), output_tokens: 9, first_us: 0, tbt_us: 0 },
        );
        assert_eq!(chosen(&mut conductor, 3), Some(1), "nobody decodes there now: {chunk:?}");
    }
}

#[test]
fn a_lost_or_drained_instance_takes_no_role() {
    let mut conductor = pairs(true);
    step(&mut conductor, 0, Input::InstanceDrained { instance: InstanceId(2) });
    assert!(offer(&mut conductor, 0..100, long_prompt).is_empty(), "the other is the last that decodes");
    step(&mut conductor, 100 * SECOND_US, Input::InstanceResumed { instance: InstanceId(2) });
    step(&mut conductor, 100 * SECOND_US, Input::InstanceLost { instance: InstanceId(3), epoch: Epoch(1) });
    assert!(offer(&mut conductor, 101..200, long_prompt).is_empty(), "now this one is");
}

/// Each instance that prefills was a decode instance before and decodes for longer: there is no better place to move to,
/// so a request is prefilled where it is and does not move for ever.
#[test]
fn prefills_go_ahead_where_every_instance_still_has_decodes_of_its_former_role() {
    for chunk in [Some(0), Some(8192)] {
        let role = |id| if id < 2 { Role::Prefill } else { Role::Decode };
        let of = |id| InstanceSpec { mixed_chunk_tokens: chunk, ..spec(id, role(id)) };
        let specs: Vec<InstanceSpec> = (0..4).map(of).collect();
        let mut conductor = conductor_of(plain(PolicyName::Baton, AdmissionMode::None), &specs);
        for (id, decode) in [(900, 2), (901, 3)] {
            decoding(&mut conductor, request(id, 100, 0), decode);
        }
        for (instance, role) in [(2, Role::Prefill), (3, Role::Prefill), (0, Role::Decode), (1, Role::Decode)]
        {
            step(&mut conductor, 0, Input::RoleChanged { instance: InstanceId(instance), role });
        }
        let effects = step(&mut conductor, 0, Input::RequestArrived(request(1, 20_000, 0)));
        let starts = crate::testing::starts(&effects);
        assert_eq!(starts.len(), 1, "{chunk:?}: {effects:?}");
        assert!(starts[0].prefill >= 2, "{chunk:?}");
        assert_eq!(conductor.stats().retried, 0, "{chunk:?}: it moves nowhere");
    }
}

/// Nodes are attached with and without leave to change: only those with leave are taken, whatever the load of the others.
#[test]
fn an_instance_without_leave_keeps_its_role() {
    let role = |id| if id < 2 { Role::Prefill } else { Role::Decode };
    let of =
        |id| InstanceSpec { mixed_chunk_tokens: Some(0), may_change_role: id == 3, ..spec(id, role(id)) };
    let specs: Vec<InstanceSpec> = (0..4).map(of).collect();
    let mut conductor = conductor_of(SchedulerConfig::default(), &specs);
    let changes = offer(&mut conductor, 0..300, long_prompt);
    assert_eq!(changes, [(30, 3, Role::Prefill)]);
}

/// Each router sees the same demand. Were all to decide, one change would be made several times.
#[test]
fn the_first_of_several_routers_decides() {
    for (router, expected) in [(0, 1), (1, 0)] {
        let mut conductor = pairs(true);
        conductor.share_as(router);
        let effects = offer(&mut conductor, 0..60, long_prompt);
        assert_eq!(effects.len(), expected, "router {router}");
    }
}

/// A conductor that is restored in the middle of a stretch decides as the one that was saved.
#[test]
fn demand_survives_a_restart() {
    let mut conductor = pairs(true);
    assert!(offer(&mut conductor, 0..25, long_prompt).is_empty());
    let mut restored = Conductor::restore(conductor.save()).expect("what was saved can be restored");
    let expected = offer(&mut conductor, 25..100, long_prompt);
    assert_eq!(expected.len(), 1);
    assert_eq!(offer(&mut restored, 25..100, long_prompt), expected);
}

/// Ends the present stretch without any demand: a request without a prompt is passed over.
fn end_stretch(conductor: &mut Conductor, at_us: u64) -> Vec<Effect> {
    step(conductor, at_us, Input::RequestArrived(Request { prompt_tokens: 0, ..request(0, 1, 0) }))
}

/// What is said of a cluster of fixed roles after half a minute of such requests.
fn advice_of(prefills: u32, decodes: u32, of: impl Fn(u64) -> Request) -> RoleAdvice {
    let mut conductor = cluster(prefills, decodes, false);
    assert!(offer(&mut conductor, 0..30, of).is_empty());
    assert!(end_stretch(&mut conductor, 30 * SECOND_US).is_empty());
    conductor.role_advice().expect("three stretches were seen")
}

/// Means of one decode instance that gets such a request each second, played step by step: step time, µs, and tokens
/// of reserved room.
#[expect(clippy::cast_precision_loss, reason = "small numbers of steps and tokens")]
fn played(prompt_tokens: u64, output_tokens: u32) -> (f64, f64) {
    const SECONDS: f64 = 400.0;
    let room = (prompt_tokens.div_ceil(512) + u64::from(output_tokens).div_ceil(512)) * 512;
    let (mut now_us, mut due_us) = (0.0, 0.0);
    let mut under_way: Vec<u32> = Vec::new();
    let (mut steps, mut took_us, mut reserved) = (0.0, 0.0, 0.0);
    while now_us < SECONDS * 1e6 {
        while due_us <= now_us {
            under_way.push(0);
            due_us += 1e6;
        }
        if under_way.is_empty() {
            now_us = due_us;
            continue;
        }
        let context = under_way.iter().map(|emitted| prompt_tokens + u64::from(*emitted)).sum();
        let batch = u32::try_from(under_way.len()).expect("a small batch");
        let step_us = profile().decode_us(batch, context);
        // The second half is taken to be settled.
        if now_us > SECONDS * 0.5e6 {
            steps += 1.0;
            took_us += step_us;
            reserved += step_us * under_way.len() as f64 * room as f64;
        }
        now_us += step_us;
        under_way.iter_mut().for_each(|emitted| *emitted += 1);
        under_way.retain(|emitted| *emitted < output_tokens);
    }
    (took_us / steps, reserved / took_us)
}

/// One arrival as the reference of the window keeps it: when, µs, and its prefill, µs.
type Arrival = (u64, u64);

/// The pressure on one prefill instance, from a list of all arrivals.
#[expect(clippy::cast_precision_loss, reason = "sums of some minutes")]
fn pressure_of(arrivals: &[Arrival], now_us: u64) -> Option<f64> {
    let stretch = |at_us: u64| at_us / (10 * SECOND_US);
    // Where nothing came for the length of the window, counting begins anew.
    let gap = arrivals.windows(2).rposition(|pair| stretch(pair[1].0) - stretch(pair[0].0) >= 12);
    // Time began with an empty stretch.
    let fresh = gap.is_none() && stretch(arrivals.first()?.0) < 12;
    let since = if fresh { 0 } else { stretch(arrivals[gap.map_or(0, |at| at + 1)].0) };
    let seen = stretch(now_us) - since;
    if seen < 3 {
        return None;
    }
    let first = since.max((stretch(now_us) + 1).saturating_sub(12));
    let counted = arrivals.iter().filter(|(at_us, _)| stretch(*at_us) >= first);
    let sum: u64 = counted.map(|(_, work_us)| work_us).sum();
    Some((sum as f64 / (now_us - first * 10 * SECOND_US) as f64).min(100.0))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// The role that changes is the one that trying out every change would choose.
    #[test]
    fn the_change_is_the_best_of_all_that_are_possible(
        prefills in 1_u32..5, decodes in 1_u32..5, prompt in 500_u64..40_000, output in 1_u32..12_000,
    ) {
        let of = |id| foretold(id, prompt, output);
        let greater = |p, d| {
            let advice = advice_of(p, d, of);
            advice.prefill_pressure.max(advice.decode_pressure)
        };
        let now = greater(prefills, decodes);
        let to_decode = if prefills > 1 { greater(prefills - 1, decodes + 1) } else { f64::INFINITY };
        let to_prefill = if decodes > 1 { greater(prefills + 1, decodes - 1) } else { f64::INFINITY };
        let best = to_decode.min(to_prefill);
        // A tie of rounding may go either way.
        prop_assume!((now - 0.8).abs() > 1e-6 && (best - now * 0.85).abs() > 1e-6);
        let mut conductor = cluster(prefills, decodes, true);
        prop_assert!(offer(&mut conductor, 0..30, of).is_empty(), "too little was seen");
        let effects = end_stretch(&mut conductor, 30 * SECOND_US);
        let role = effects.iter().find_map(|effect| match effect {
            Effect::ChangeRole { role, .. } => Some(*role),
            _ => None,
        });
        let expected = (now > 0.8 && best < now * 0.85)
            .then_some(if to_decode <= to_prefill { Role::Decode } else { Role::Prefill });
        prop_assert_eq!(role, expected, "{} now, {} and {}", now, to_decode, to_prefill);
        let given = advice_of(prefills, decodes, of);
        prop_assert_eq!(given.prefills + given.decodes, prefills + decodes);
        prop_assert!(given.prefills > 0 && given.decodes > 0);
    }

    /// The fluid model says of decodes what playing them step by step says.
    #[test]
    fn the_pressure_on_decodes_is_that_of_decodes_played_step_by_step(
        prompt in 500_u64..20_000, output in 100_u32..3_000,
    ) {
        let (step_us, reserved) = played(prompt, output);
        let mut conductor = cluster(1, 1, false);
        offer(&mut conductor, 0..120, |id| foretold(id, prompt, output));
        let decode = conductor.role_advice().expect("two minutes were seen").decode_pressure;
        let capacity = spec(0, Role::Decode).capacity_tokens;
        let target_us = conductor.config.step_target_us();
        #[expect(clippy::cast_precision_loss, reason = "times and tokens of one instance")]
        let expected = (step_us / target_us as f64).max(reserved / capacity as f64);
        // A batch below one is taken for one step each time, so the shortest answers may differ by a step.
        prop_assert!((decode / expected - 1.0).abs() < 0.1, "{decode} by the model, {expected} played");
    }

    /// The window says what a list of all arrivals says.
    #[test]
    fn the_window_is_that_of_a_list_of_all_arrivals(
        gaps in prop::collection::vec((0_u64..15_000_000, 0_u32..40, 1_u64..30_000), 1..80),
    ) {
        let mut conductor = cluster(1, 1, false);
        let (mut now_us, mut arrivals) = (0, Vec::new());
        for (id, (gap_us, pause, prompt)) in (0..).zip(gaps) {
            now_us += if pause == 0 { 150 * SECOND_US } else { gap_us };
            step(&mut conductor, now_us, Input::RequestArrived(foretold(id, prompt, 1)));
            step(&mut conductor, now_us, Input::RequestCancelled { request: RequestId(id) });
            arrivals.push((now_us, naive_prefill_us(prompt)));
            let given = conductor.role_advice().map(|advice| advice.prefill_pressure);
            match (given, pressure_of(&arrivals, now_us)) {
                (Some(given), Some(expected)) => {
                    prop_assert!((given - expected).abs() <= 1e-3 * expected.max(0.1), "{given} for {expected}");
                }
                (given, expected) => prop_assert_eq!(given, expected),
            }
        }
    }
}
