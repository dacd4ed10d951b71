//! A conductor that is saved at any time and restored continues as if nothing had happened.

use alloc::string::String;
use baton_types::RequestId;
use proptest::prelude::*;

use super::scripts::{PAIR, configs, play};
use crate::testing::{
    Play, conductor, decoding, finished, offer, plain, request, scripts, started, starts, step,
};
use crate::{AdmissionMode, Conductor, Input, PolicyName, SavedConductor, SchedulerConfig};

fn text(conductor: &Conductor) -> String {
    serde_json::to_string(&conductor.save()).expect("a saved conductor is JSON")
}

fn brought_back(text: &str) -> Conductor {
    let saved: SavedConductor = serde_json::from_str(text).expect("its own text");
    Conductor::restore(saved).expect("it was saved by this version")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_brought_back_goes_on_the_same(
        config in configs(), before in scripts(80), after in scripts(60),
    ) {
        let mut one = play(&config, &PAIR, &before);
        let mut two = play(&config, &PAIR, &before);
        two.conductor = brought_back(&text(&two.conductor));
        prop_assert_eq!(one.conductor.snapshot(), two.conductor.snapshot());
        let both = [&mut one, &mut two];
        both.into_iter().for_each(|p: &mut Play| after.iter().for_each(|act| p.act(*act)));
        prop_assert_eq!(&one.effects, &two.effects);
        prop_assert_eq!(one.conductor.stats(), two.conductor.stats());
        prop_assert_eq!(one.conductor.next_deadline(), two.conductor.next_deadline());
        one.finish();
        two.finish();
        prop_assert_eq!(&one.effects, &two.effects);
    }
}

/// Room for ten comes free at once, and eight are checked in that step; the others follow in the next one. A
/// regression: they did not if a restart came between.
#[test]
fn who_has_not_been_looked_at_is_looked_at_after_a_restart() {
    let mut one = conductor(plain(PolicyName::Baton, AdmissionMode::Slo), 1, 1);
    for id in 0..10 {
        started(&offer(&mut one, 0, request(id, 1000, 0)));
        step(&mut one, 0, finished(id));
        step(&mut one, 0, Input::HandoffFinished { request: RequestId(id) });
    }
    decoding(&mut one, request(99, 99_000, 0), 1);
    for id in 0..10 {
        let started =
            starts(&step(&mut one, 0, Input::Preempted { request: RequestId(id), emitted_tokens: 1 }));
        assert!(started.is_empty(), "there is no room: {started:?}");
    }
    step(
        &mut one,
        0,
        Input::DecodeFinished { request: RequestId(99), output_tokens: 9, first_us: 0, tbt_us: 0 },
    );
    let waiting = one.fleet.iter().flat_map(|i| i.prefill.held()).count();
    assert_eq!(waiting, 2, "eight were looked at");
    let mut two = brought_back(&text(&one));
    for now_us in [0, 1000, 2_000_000] {
        let effects = [&mut one, &mut two].map(|c| step(c, now_us, Input::TimerFired));
        assert_eq!(effects[0], effects[1]);
        assert_eq!(text(&one), text(&two));
    }
}

#[test]
fn a_state_that_contradicts_itself_is_refused_by_name() {
    let mut conductor = conductor(SchedulerConfig::default(), 2, 2);
    started(&offer(&mut conductor, 0, request(1, 1000, 0)));
    let good = text(&conductor);
    let spoilt = [
        ("\"free\":[]", "\"free\":[7]", "live requests"),
        ("\"stage\":\"Prefilling\"", "\"stage\":\"Waiting\"", "I5"),
        ("\"block_tokens\":512", "\"block_tokens\":0", "block_tokens"),
        // Ledgers with wrong sums fell below zero when their requests ended.
        ("\"waiting_us\":0", "\"waiting_us\":7", "I5"),
        ("\"dispatched_us\":101001", "\"dispatched_us\":0", "I5"),
        ("\"active_tokens\":1000", "\"active_tokens\":0", "I5"),
        ("\"running\":false", "\"running\":true", "I8"),
        ("\"running\":0", "\"running\":1", "I8"),
        ("\"flights\":[{\"request\":1,", "\"flights\":[{\"request\":2,", "I5"),
        ("\"unplaced\":[]", "\"unplaced\":[1]", "I5"),
        ("\"prompt_tokens\":1000", "\"prompt_tokens\":0", "no prompt"),
        ("\"prefills\":[0,1]", "\"prefills\":[0,1,9]", "pools"),
        ("\"state\":\"serving\"", "\"state\":\"lost\"", "pools"),
        ("\"arrived\":1", "\"arrived\":18446744073709551615", "counters"),
        ("\"now_us\":0", "\"now_us\":18446744073709551615", "time"),
        ("\"floor\":0", "\"floor\":18446744073709551615", "shares"),
        // The next request moved time on, and subtracted what is to come.
        ("\"demand\":{\"stretch\":0", "\"demand\":{\"stretch\":7", "time to come"),
    ];
    for (from, to, named) in spoilt {
        assert!(good.contains(from), "{from} in {good}");
        let saved: SavedConductor = serde_json::from_str(&good.replacen(from, to, 1)).expect("still JSON");
        let error = Conductor::restore(saved).expect_err("a contradiction");
        assert!(error.0.contains(named), "{error}");
    }
}
