//! Instances of two kinds side by side: KV goes between equals, and a cluster passes from one kind to the other pair by
//! pair without losing a request.

use alloc::vec::Vec;
use baton_types::{Epoch, InstanceId, RequestId, Role, Tier};

use crate::testing::{
    conductor_of, finished, hold, offer, plain, releases, request, shared_chain, spec, started, starts, step,
};
use crate::{AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, SchedulerConfig};

fn config() -> SchedulerConfig {
    SchedulerConfig { local_prefill: false, ..plain(PolicyName::Baton, AdmissionMode::Slo) }
}

fn of_kind(id: u32, role: Role, kind: u32) -> InstanceSpec {
    InstanceSpec { kind, ..spec(id, role) }
}

/// Two pairs: 0 and 2 of the first kind, 1 and 3 of the second.
fn two_pairs() -> Conductor {
    let specs = [(0, Role::Prefill, 0), (1, Role::Prefill, 1), (2, Role::Decode, 0), (3, Role::Decode, 1)];
    conductor_of(config(), &specs.map(|(id, role, kind)| of_kind(id, role, kind)))
}

#[test]
fn a_prefill_goes_with_a_decode_of_its_kind() {
    let mut conductor = two_pairs();
    let mut seen = [0, 0];
    for id in 0..12 {
        let start = started(&offer(&mut conductor, id * 100_000, request(id, 1_500, 0)));
        assert_eq!(start.prefill % 2, start.decode % 2, "{start:?}");
        seen[start.prefill as usize % 2] += 1;
    }
    assert!(seen.iter().all(|starts| *starts >= 4), "both kinds work: {seen:?}");
}

#[test]
fn a_prefix_is_not_fetched_from_another_kind() {
    for (kind, fetched) in [(0, true), (1, false)] {
        let holder = of_kind(0, Role::Prefill, kind);
        let specs = [holder, of_kind(1, Role::Prefill, 0), of_kind(2, Role::Decode, 0)];
        let mut conductor = conductor_of(config(), &specs);
        hold(&mut conductor, 0, &shared_chain(40), Tier::Hbm);
        // The holder takes no new work, so its blocks can only be fetched.
        step(&mut conductor, 0, Input::InstanceDrained { instance: InstanceId(0) });
        let start = started(&offer(&mut conductor, 0, request(1, 20_000, 39)));
        assert_eq!((start.prefill, start.fetch.is_some()), (1, fetched), "{start:?}");
    }
}

#[test]
fn a_handoff_that_fails_is_not_made_to_another_kind() {
    let mut conductor = two_pairs();
    let start = started(&offer(&mut conductor, 0, request(1, 1_000, 0)));
    step(&mut conductor, 100_000, finished(1));
    let effects = step(&mut conductor, 110_000, Input::HandoffFailed { request: RequestId(1) });
    let to = effects.iter().find_map(|effect| match effect {
        Effect::Handoff { to, .. } => Some(to.0),
        _ => None,
    });
    // There is one decode instance of its kind: it is tried again, or the request ends. The other kind never gets it.
    assert!(to.is_none_or(|to| to == start.decode), "{effects:?}");
    assert!(releases(&effects).contains(&(1, start.decode)), "{effects:?}");
}

#[test]
fn a_prefill_without_a_decode_of_its_kind_gets_nothing() {
    let specs = [of_kind(0, Role::Prefill, 0), of_kind(1, Role::Prefill, 1), of_kind(2, Role::Decode, 1)];
    let mut conductor = conductor_of(config(), &specs);
    for id in 0..5 {
        let start = started(&offer(&mut conductor, id * 2_000_000, request(id, 2_000, 0)));
        assert_eq!(start.prefill, 1);
    }
    // The only pair loses its decode instance: no instance fits until one of its kind joins.
    let now_us = 20_000_000;
    step(&mut conductor, now_us, Input::InstanceDrained { instance: InstanceId(2) });
    let refused = offer(&mut conductor, now_us, request(9, 2_000, 0));
    assert!(starts(&refused).is_empty() && !conductor.knows(RequestId(9)), "{refused:?}");
    step(&mut conductor, now_us, Input::InstanceJoined(of_kind(3, Role::Decode, 0)));
    let start = started(&offer(&mut conductor, now_us, request(10, 2_000, 0)));
    assert_eq!((start.prefill, start.decode), (0, 3));
}

/// A request that waits where no instance of the kind decodes is moved to the other kind as soon as that has a pair.
#[test]
fn who_waits_in_vain_goes_to_the_other_kind() {
    let mut conductor = conductor_of(config(), &[of_kind(0, Role::Prefill, 0), of_kind(1, Role::Decode, 0)]);
    for id in 0..20 {
        offer(&mut conductor, 0, request(id, 20_000, 0));
    }
    let waiting = |conductor: &Conductor| conductor.snapshot().instances[0].waiting;
    let before = waiting(&conductor);
    assert!(before > 0, "some are held back");
    step(&mut conductor, 10, Input::RoleChanged { instance: InstanceId(1), role: Role::Prefill });
    step(&mut conductor, 20, Input::InstanceJoined(of_kind(2, Role::Prefill, 1)));
    let effects = step(&mut conductor, 30, Input::InstanceJoined(of_kind(3, Role::Decode, 1)));
    let mut all: Vec<_> = starts(&effects);
    for at in 1..40 {
        all.extend(starts(&step(&mut conductor, 30 + at * 50_000, Input::TimerFired)));
    }
    assert!(all.iter().all(|start| (start.prefill, start.decode) != (0, 3)), "{all:?}");
    assert!(!all.is_empty() && conductor.check().is_ok());
}

/// Two pairs are upgraded one after the other, as an operator does it, under load: every request ends well.
#[test]
fn two_pairs_pass_to_another_kind_under_load() {
    let specs = [(0, Role::Prefill), (1, Role::Prefill), (2, Role::Decode), (3, Role::Decode)];
    let mut conductor = conductor_of(config(), &specs.map(|(id, role)| of_kind(id, role, 0)));
    let mut kinds = [0, 0, 0, 0];
    let (mut now_us, mut next, mut running) = (0, 0, Vec::new());
    let mut drive = |conductor: &mut Conductor, kinds: &[u32; 4], requests: u64| {
        for _ in 0..requests {
            now_us += 400_000;
            let start = started(&offer(conductor, now_us, request(next, 1_500, 0)));
            assert_eq!(kinds[start.prefill as usize], kinds[start.decode as usize], "{start:?}");
            running.push(next);
            next += 1;
            if running.len() > 3 {
                let id = running.remove(0);
                for input in [
                    finished(id),
                    Input::HandoffFinished { request: RequestId(id) },
                    Input::DecodeFinished {
                        request: RequestId(id),
                        output_tokens: 3,
                        first_us: 0,
                        tbt_us: 0,
                    },
                ] {
                    step(conductor, now_us, input);
                }
            }
        }
    };
    drive(&mut conductor, &kinds, 10);
    for (prefill, decode) in [(0, 2), (1, 3)] {
        for instance in [prefill, decode] {
            step(&mut conductor, 0, Input::InstanceDrained { instance: InstanceId(instance) });
        }
        // All their work has ended by then.
        drive(&mut conductor, &kinds, 10);
        for (id, role) in [(prefill, Role::Prefill), (decode, Role::Decode)] {
            let instance = InstanceId(id);
            step(&mut conductor, 0, Input::InstanceLost { instance, epoch: Epoch(1) });
            let next = InstanceSpec { epoch: Epoch(2), ..of_kind(id, role, 1) };
            step(&mut conductor, 0, Input::InstanceJoined(next));
            kinds[id as usize] = 1;
            drive(&mut conductor, &kinds, 5);
        }
    }
    let stats = conductor.stats();
    assert_eq!((stats.failed, stats.retried, stats.rejected_total()), (0, 0, 0), "{stats:?}");
}

#[test]
fn a_conductor_serves_with_a_pair_of_one_kind_or_with_decode_instances_that_may_prefill() {
    let instance = InstanceId(1);
    let local = SchedulerConfig { local_prefill: true, ..config() };
    let unordered = SchedulerConfig { policy: PolicyName::Mooncake, ..local.clone() };
    let never_mixes = |spec: InstanceSpec| InstanceSpec { mixed_chunk_tokens: Some(0), ..spec };
    let decode = of_kind(1, Role::Decode, 0);
    let (fits, other) = (of_kind(0, Role::Prefill, 0), of_kind(0, Role::Prefill, 1));
    for (config, specs, pair, serves) in [
        (config(), &[fits, decode.clone()][..], true, true),
        (config(), &[other, decode.clone()], false, false),
        (config(), &[of_kind(1, Role::Both, 0)], true, true),
        (config(), core::slice::from_ref(&decode), false, false),
        (local.clone(), core::slice::from_ref(&decode), false, true),
        (local, &[never_mixes(decode.clone())], false, false),
        // An engine of this policy orders its queue itself, and gets no prefills where it decodes.
        (unordered, core::slice::from_ref(&decode), false, false),
    ] {
        let mut conductor = conductor_of(config, specs);
        assert_eq!((conductor.has_pair(), conductor.can_serve()), (pair, serves), "{specs:?}");
        step(&mut conductor, 0, Input::InstanceDrained { instance });
        assert!(!conductor.has_pair() && !conductor.can_serve(), "{specs:?}");
        step(&mut conductor, 0, Input::InstanceResumed { instance });
        assert_eq!((conductor.has_pair(), conductor.can_serve()), (pair, serves), "{specs:?}");
    }
}
