//! Engines that run a limited number of requests at a time.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId, RequestObjectives, Role, SloClass};

use crate::testing::{
    burden, conductor_of, finished, foretold, offer, plain, rejection, spec, started, step,
};
use crate::{
    AdmissionMode, Conductor, Input, InstanceSpec, PolicyName, RejectReason, Request, SchedulerConfig,
};

/// Prefill instance 0, and decode instances that run so many at a time and prefill nothing.
fn limited(max_running: &[Option<u32>]) -> Conductor {
    let of = |(id, max_running)| InstanceSpec {
        max_running,
        mixed_chunk_tokens: Some(0),
        ..spec(id, Role::Decode)
    };
    let decodes = (1..).zip(max_running.iter().copied()).map(of);
    let specs: Vec<InstanceSpec> = [spec(0, Role::Prefill)].into_iter().chain(decodes).collect();
    let classes = alloc::vec![SloClass { ttft_us: 30_000_000, ..SloClass::default() }];
    conductor_of(SchedulerConfig { classes, ..plain(PolicyName::Baton, AdmissionMode::Slo) }, &specs)
}

/// Its prefill is over, and its KV is at the decode instance.
fn land(conductor: &mut Conductor, now_us: u64, id: u64) {
    step(conductor, now_us, finished(id));
    step(conductor, now_us, Input::HandoffFinished { request: RequestId(id) });
}

fn end(conductor: &mut Conductor, now_us: u64, id: u64) {
    let request = RequestId(id);
    step(conductor, now_us, Input::DecodeFinished { request, output_tokens: 10, first_us: 0, tbt_us: 0 });
}

fn running(conductor: &Conductor) -> (u32, u32) {
    let load = conductor.snapshot().instances[1];
    (load.running, load.decodes)
}

#[test]
fn who_came_first_begins_when_another_ends() {
    let mut conductor = limited(&[Some(1)]);
    for id in [1, 2, 3] {
        started(&offer(&mut conductor, 0, foretold(id, 500, 10)));
        land(&mut conductor, 0, id);
    }
    assert_eq!(running(&conductor), (1, 3));
    end(&mut conductor, 2_000_000, 1);
    assert_eq!(running(&conductor), (1, 2));
    let began = |conductor: &Conductor, id| conductor.decodes_at_us(RequestId(id));
    assert_eq!(began(&conductor, 2), Some(2_000_000));
    // One that waits and leaves makes way for nobody.
    step(&mut conductor, 3_000_000, Input::RequestCancelled { request: RequestId(3) });
    assert_eq!(running(&conductor), (1, 1));
    end(&mut conductor, 4_000_000, 2);
    assert_eq!(running(&conductor), (0, 0));
    assert_eq!(conductor.check(), Ok(()));
}

#[test]
fn who_would_wait_too_long_for_its_turn_is_refused() {
    // Steps take 10 ms, and a request may wait for a third of 30 s.
    for (max_running, output_tokens, refused) in
        [(Some(1), 500, false), (Some(1), 6_000, true), (Some(2), 6_000, false), (None, 6_000, false)]
    {
        let mut conductor = limited(&[max_running]);
        started(&offer(&mut conductor, 0, foretold(1, 500, output_tokens)));
        land(&mut conductor, 0, 1);
        let effects = offer(&mut conductor, 0, foretold(2, 500, 10));
        let reason = rejection(&effects).map(|refusal| refusal.reason);
        assert_eq!(reason, refused.then_some(RejectReason::Room), "{max_running:?} {output_tokens}");
    }
}

#[test]
fn a_tighter_objective_of_its_own_leaves_less_time_to_wait_for_a_turn() {
    for (ttft_us, refused) in [(None, false), (Some(6_000_000), true)] {
        let mut conductor = limited(&[Some(1)]);
        started(&offer(&mut conductor, 0, foretold(1, 500, 500)));
        land(&mut conductor, 0, 1);
        let objectives = RequestObjectives { ttft_us, tbt_us: None };
        let effects = offer(&mut conductor, 0, Request { objectives, ..foretold(2, 500, 10) });
        let reason = rejection(&effects).map(|refusal| refusal.reason);
        assert_eq!(reason, refused.then_some(RejectReason::Room), "{ttft_us:?}");
    }
}

#[test]
fn an_instance_with_many_short_requests_is_fuller_than_one_with_a_long_one() {
    let mut conductor = limited(&[Some(4), Some(4)]);
    for (id, tokens, decode) in [(1, 500, 1), (2, 50_000, 2), (3, 500, 1), (4, 500, 1)] {
        burden(&mut conductor, foretold(id, tokens, 10), (0, decode), 0);
    }
    let taken = |id| conductor.fleet.known(InstanceId(id)).taken_tokens();
    assert_eq!(taken(1), 75_000, "three of four places of 100,000 tokens");
    assert!((50_000..51_000).contains(&taken(2)));
    let roomiest = conductor.roomiest_decode(&foretold(5, 500, 10), InstanceId(0), None);
    assert_eq!(roomiest, Some(InstanceId(2)));
}

/// A regression: a prompt that was sent to a decode instance waited there for a place among those that run.
#[test]
fn a_decode_instance_prefills_only_while_it_has_a_place_for_all() {
    for (max_running, prefills_on) in [(None, 1), (Some(2), 1), (Some(1), 0)] {
        let config = SchedulerConfig { local_prefill: true, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
        let decode = InstanceSpec { max_running, ..spec(1, Role::Decode) };
        let mut conductor = conductor_of(config, &[spec(0, Role::Prefill), decode]);
        burden(&mut conductor, foretold(900, 9_000, 10), (0, 1), 1_000_000);
        offer(&mut conductor, 0, foretold(1, 500, 10));
        let at = conductor.requests.get(RequestId(1)).map(|entry| entry.prefill);
        assert_eq!(at, Some(InstanceId(prefills_on)), "{max_running:?}");
    }
}
