//! Decodes of a higher band find their place beside those of lower bands.

use alloc::vec::Vec;
use baton_types::{ClassId, InstanceId, RequestId, Role, SloClass};

use crate::estimate::{ChainPosition, DecodeSlot};
use crate::testing::{conductor_of, decoding, foretold, offer, plain, rejection, spec, step};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, RejectReason, Request, SchedulerConfig,
};

const SECOND_US: u64 = 1_000_000;
/// Decodes of which one instance keeps the objective less the least margin: steps take 10 ms alone and 15 ms with 32 more.
const BATCH: usize = 32;

/// A decode instance of `BATCH` decodes, for two bands; the second class is the higher one.
fn pair(priorities: [i32; 2]) -> Conductor {
    let class =
        |priority| SloClass { priority, tbt_us: 15_440, ttft_us: 60 * SECOND_US, ..SloClass::default() };
    let classes = Vec::from(priorities.map(class));
    let roomy = |id, role| InstanceSpec { capacity_tokens: 1 << 30, ..spec(id, role) };
    let specs = [roomy(0, Role::Prefill), roomy(1, Role::Decode)];
    conductor_of(SchedulerConfig { classes, ..plain(PolicyName::Baton, AdmissionMode::Slo) }, &specs)
}

/// An answer of 20 s.
fn of_class(class: u16, id: u64) -> Request {
    Request { class: ClassId(class), ..foretold(id, 100, 1_350) }
}

/// A request a second that leaves again at once: 20 would be under way.
fn demand(conductor: &mut Conductor, class: u16, seconds: core::ops::Range<u64>) {
    for id in seconds {
        step(conductor, id * SECOND_US, Input::RequestArrived(of_class(class, id)));
        step(conductor, id * SECOND_US, Input::RequestCancelled { request: RequestId(id) });
    }
}

/// How many of 100 requests are admitted at this moment.
fn admitted(conductor: &mut Conductor, class: u16, ids: u64, at_us: u64) -> usize {
    let mut refused = Vec::new();
    for id in ids..ids + 100 {
        refused.extend(rejection(&offer(conductor, at_us, of_class(class, id))));
    }
    assert!(refused.iter().all(|r| r.reason == RejectReason::Tbt), "{refused:?}");
    100 - refused.len()
}

#[test]
fn a_lower_band_leaves_the_place_that_higher_decodes_are_expected_to_take() {
    let mut idle = pair([0, 1]);
    let all = admitted(&mut idle, 0, 1_000, 60 * SECOND_US);
    assert!((BATCH - 1..=BATCH + 1).contains(&all), "without demand nothing is kept: {all}");

    let mut conductor = pair([0, 1]);
    demand(&mut conductor, 1, 0..60);
    let lower = admitted(&mut conductor, 0, 1_000, 60 * SECOND_US);
    // 20 in the mean, and two standard deviations.
    assert!((2..=5).contains(&lower), "{lower} beside 29 of {BATCH}");
    let higher = admitted(&mut conductor, 1, 2_000, 60 * SECOND_US);
    assert!(higher + lower >= all - 1, "the higher band takes all of the rest: {higher}");
    assert_eq!(admitted(&mut conductor, 0, 3_000, 61 * SECOND_US), 0);
}

/// Lower decodes that begin later, for a prompt that waits elsewhere, are beside those that begin now.
#[test]
fn a_lower_decode_leaves_the_place_for_as_long_as_it_lasts() {
    let (now_us, one) = (60 * SECOND_US, InstanceId(1));
    let fits = |begin_s: u64, class: u16| {
        let mut conductor = pair([0, 1]);
        demand(&mut conductor, 1, 0..60);
        conductor.lengths.observe(ClassId(0), 100, 1_350, 20 * SECOND_US);
        conductor.expect_higher(&of_class(class, 5_001));
        for id in 0..6 {
            let start_us = now_us + begin_s * SECOND_US;
            let slot = DecodeSlot {
                request: RequestId(9_000 + id),
                priority: 0,
                start_us,
                finish_us: start_us + 20 * SECOND_US,
                due_us: start_us,
                context_tokens: 775,
                output_tokens: 1_350,
                reserved_tokens: 1_450,
                common_tokens: 0,
                running: false,
                waits: false,
                held: false,
            };
            conductor.fleet.known_mut(one).decode.reserve(slot, ChainPosition::default());
        }
        let request = of_class(class, 5_001);
        conductor.decode_fits(conductor.fleet.known(one), &conductor.decode_need(&request, now_us)).map(drop)
    };
    // No more than five fit beside those that are expected.
    assert_eq!(fits(0, 0), Err(RejectReason::Tbt));
    assert_eq!(fits(5, 0), Err(RejectReason::Tbt), "they come while it lasts");
    assert_eq!(fits(30, 0), Ok(()), "it is over by then");
    assert_eq!(fits(5, 1), Ok(()), "nothing is expected of bands above this one");
}

/// Those that are there are not expected any more.
#[test]
fn higher_decodes_that_are_there_are_counted_once() {
    let mut conductor = pair([0, 1]);
    demand(&mut conductor, 1, 0..41);
    for id in 41..60 {
        assert_eq!(rejection(&offer(&mut conductor, id * SECOND_US, of_class(1, id))), None);
    }
    let lower = admitted(&mut conductor, 0, 1_000, 60 * SECOND_US);
    assert!((2..=5).contains(&lower), "{lower} beside 19, and 10 that may come");
}

#[test]
fn nothing_is_kept_from_an_equal_or_a_higher_band() {
    for (priorities, class) in [([0, 0], 0), ([0, 1], 1)] {
        let mut conductor = pair(priorities);
        demand(&mut conductor, 1 - class, 0..60);
        let all = admitted(&mut conductor, class, 1_000, 60 * SECOND_US);
        assert!((BATCH - 1..=BATCH + 1).contains(&all), "{all} of {BATCH}");
    }
}

#[test]
fn refusals_of_the_higher_band_make_the_lower_one_leave_more() {
    let mut conductor = pair([0, 1]);
    admitted(&mut conductor, 0, 1_000, 0);
    let before = conductor.reserve;
    assert_eq!(admitted(&mut conductor, 1, 2_000, SECOND_US), 0, "the lower band was first");
    let after = conductor.reserve;
    assert_ne!(before, after);
    demand(&mut conductor, 1, 2..60);
    let lowered = conductor.reserve;
    assert_ne!(after, lowered);
    let restored = Conductor::restore(conductor.save()).expect("what was saved can be restored");
    assert_eq!(restored.reserve, lowered);
}

/// A class that has gone is not expected any more, and the others keep what is known of them.
#[test]
fn demand_follows_a_change_of_classes() {
    let mut conductor = pair([0, 1]);
    demand(&mut conductor, 1, 0..60);
    let mut swapped = conductor.config().clone();
    let names = ["low", "high"].map(alloc::string::String::from);
    swapped.classes.iter_mut().zip(names).for_each(|(class, name)| class.name = name);
    step(&mut conductor, 60 * SECOND_US, Input::PolicyChanged(swapped.into()));
    let all = admitted(&mut conductor, 0, 1_000, 60 * SECOND_US);
    assert!((BATCH - 1..=BATCH + 1).contains(&all), "they are other classes: {all}");
}

/// It was admitted when no higher band was about. When its turn comes, its decode would take one of their places for
/// twenty seconds.
#[test]
fn a_lower_band_whose_turn_comes_too_late_gives_way() {
    let ends_under =
        |admission: AdmissionMode, priorities: [i32; 2], sheddable: bool, foreign_demand: bool| {
            let mut conductor = pair(priorities);
            conductor.config.admission = admission;
            conductor.config.classes[0].sheddable = sheddable;
            let waits = of_class(0, 5_001);
            // The engine is busy for 40 s.
            assert_eq!(
                rejection(&offer(
                    &mut conductor,
                    0,
                    Request { class: ClassId(1), ..foretold(5_000, 400_000, 1) }
                )),
                None
            );
            assert_eq!(rejection(&offer(&mut conductor, 0, waits)), None);
            if foreign_demand {
                demand(&mut conductor, 1, 1..39);
            }
            // They last longer than predicted, and are there still.
            (0..6).for_each(|id| decoding(&mut conductor, of_class(0, 9_000 + id), 1));
            let over = Input::PrefillFinished {
                request: RequestId(5_000),
                compute_us: 40 * SECOND_US,
                cached_tokens: 0,
            };
            let mut effects = step(&mut conductor, 40 * SECOND_US, over);
            effects.extend(step(&mut conductor, 41 * SECOND_US, Input::TimerFired));
            let sent = effects
                .iter()
                .any(|e| matches!(e, Effect::StartPrefill { request, .. } if request.0 == 5_001));
            (sent, rejection(&effects))
        };
    let ends = |priorities, sheddable, demand| ends_under(AdmissionMode::Slo, priorities, sheddable, demand);
    let (sent, refused) = ends([0, 1], true, true);
    let refused = refused.expect("it gives way");
    assert!(!sent && refused.reason == RejectReason::Costly && refused.retry_after_us > 0, "{refused:?}");
    assert_eq!((refused.request, refused.wasted_tokens), (RequestId(5_001), 0));
    assert_eq!(ends([0, 1], false, true), (true, None), "its class keeps what it was promised");
    assert_eq!(ends([0, 1], true, false), (true, None), "nobody is expected");
    assert_eq!(ends([0, 0], true, true), (true, None), "they are of its own band");
    assert_eq!(ends_under(AdmissionMode::None, [0, 1], true, true), (true, None), "nothing is refused");
}
