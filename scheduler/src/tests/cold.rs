//! Prefixes that nobody holds: requests that could be in time with them are not refused for ever.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId, Role, SloClass, Tier};

use crate::testing::{
    burden, conductor_of, finished, foretold, hold, offer, plain, rejection, request, shared_chain, spec,
    started, step,
};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, RejectReason, Request, SchedulerConfig,
};

/// Prompts of 20,000 tokens take two seconds. Nineteen in twenty of their tokens are of one document.
const DOCUMENT: u64 = 38;

fn cluster(prefills: u32) -> Conductor {
    let classes = Vec::from([SloClass { ttft_us: 1_000_000, ..SloClass::default() }]);
    let config = SchedulerConfig { classes, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let roomy = |id, role| InstanceSpec { capacity_tokens: 1 << 30, ..spec(id, role) };
    let mut specs: Vec<InstanceSpec> = (0..prefills).map(|id| roomy(id, Role::Prefill)).collect();
    specs.push(roomy(prefills, Role::Decode));
    conductor_of(config, &specs)
}

fn asked(id: u64) -> Request {
    request(id, 20_000, DOCUMENT)
}

fn reason(effects: &[Effect]) -> Option<RejectReason> {
    rejection(effects).map(|refused| refused.reason)
}

/// The prefill of a request ends, and the blocks of its document are cached where it ran.
fn prefilled(conductor: &mut Conductor, now_us: u64, id: u64, at: u32) {
    step(conductor, now_us, finished(id));
    hold(conductor, at, &shared_chain(DOCUMENT), Tier::Hbm);
}

/// A regression: all of them were refused, whatever their number, on a cluster that had nothing else to do.
#[test]
fn the_second_request_for_a_document_is_late_and_those_after_it_are_in_time() {
    let mut conductor = cluster(1);
    assert_eq!(reason(&offer(&mut conductor, 0, asked(1))), Some(RejectReason::Unreachable));
    let start = started(&offer(&mut conductor, 10, asked(2)));
    assert_eq!(start.prefill, 0);
    assert_eq!(conductor.stats().admitted_cold, 1);
    let effects = offer(&mut conductor, 20, asked(3));
    assert!(
        rejection(&effects).is_some(),
        "one brings it, and the others would be late as well: {effects:?}"
    );
    prefilled(&mut conductor, 2_100_000, 2, 0);
    let effects = offer(&mut conductor, 2_200_000, asked(4));
    assert_eq!(rejection(&effects), None, "it is there");
    assert_eq!((conductor.stats().admitted_cold, conductor.check()), (1, Ok(())));
}

#[test]
fn a_prompt_that_no_prefix_brings_within_its_objective_is_refused_each_time() {
    let mut conductor = cluster(1);
    for id in 1..6 {
        // Two seconds of its own tokens.
        let effects = offer(&mut conductor, id, request(id, 40_000, DOCUMENT));
        assert_eq!(reason(&effects), Some(RejectReason::Unreachable), "{id}");
    }
    // The same prompt again, in full: only its last tokens would be new, were it cached.
    let again = |id| Request { id: RequestId(id), ..request(1, 40_000, DOCUMENT) };
    assert_eq!(reason(&offer(&mut conductor, 10, again(10))), None);
}

#[test]
fn where_others_need_the_time_as_many_are_refused_first_as_it_would_serve() {
    let refused_before = |busy: bool| {
        let mut conductor = cluster(2);
        for id in 100..120 {
            // Prompts of a tenth of a second.
            let at_us = (id - 100) * 1_000_000;
            let start = started(&offer(&mut conductor, at_us, foretold(id, 1_000, 1)));
            step(&mut conductor, at_us + 200_000, finished(id));
            step(&mut conductor, at_us + 200_000, Input::HandoffFinished { request: RequestId(id) });
            let over =
                Input::DecodeFinished { request: RequestId(id), output_tokens: 1, first_us: 0, tbt_us: 0 };
            step(&mut conductor, at_us + 300_000, over);
            assert!(start.prefill < 2);
        }
        if busy {
            burden(&mut conductor, request(900, 1, 0), (0, 2), 1_200_000);
            burden(&mut conductor, request(901, 1, 0), (1, 2), 1_200_000);
        }
        (1..100)
            .take_while(|id| rejection(&offer(&mut conductor, 20_000_000 + id, asked(*id))).is_some())
            .count()
    };
    assert_eq!(refused_before(false), 1);
    let busy = refused_before(true);
    assert!((15..25).contains(&busy), "two seconds beside a tenth: {busy}");
}

#[test]
fn one_that_is_late_for_its_document_keeps_the_promises_to_others() {
    let mut conductor = cluster(1);
    assert!(rejection(&offer(&mut conductor, 0, asked(1))).is_some());
    // In time, and only just.
    let promised = started(&offer(&mut conductor, 1, request(2, 8_000, 0)));
    assert_eq!(promised.prefill, 0);
    offer(&mut conductor, 2, asked(3));
    let waiting = conductor.fleet.known(InstanceId(0)).prefill.waiting().len();
    assert!(waiting <= 1, "it waits behind the other, if at all");
    assert_eq!(conductor.check(), Ok(()));
}

#[test]
fn what_is_remembered_is_saved() {
    let mut conductor = cluster(1);
    offer(&mut conductor, 0, asked(1));
    let text = serde_json::to_string(&conductor.save()).expect("JSON");
    let mut restored = Conductor::restore(serde_json::from_str(&text).expect("its own text")).expect("sound");
    assert_eq!(rejection(&offer(&mut restored, 10, asked(2))), None);
}
