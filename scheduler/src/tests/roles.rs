//! Roles by forecast: instances that may do both parts take the part that is short.

use alloc::vec::Vec;
use baton_types::{Epoch, InstanceId, RequestId, Role};

use crate::testing::{conductor_of, decoding, foretold, plain, request, spec, step};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, Request, RoleAdvice, SchedulerConfig,
};

const SECOND_US: u64 = 1_000_000;

/// Two instances of each role, with engines that never mix.
fn pairs(may_change_role: bool) -> Conductor {
    let role = |id| if id < 2 { Role::Prefill } else { Role::Decode };
    let of = |id| InstanceSpec { mixed_chunk_tokens: Some(0), may_change_role, ..spec(id, role(id)) };
    let specs: Vec<InstanceSpec> = (0..4).map(of).collect();
    conductor_of(SchedulerConfig::default(), &specs)
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
        step(&mut conductor, 1, Input::DecodeFinished { request: RequestId(900), output_tokens: 9 });
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
