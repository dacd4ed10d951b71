//! A conductor written down at any moment and brought back goes on as if nothing had happened.

use alloc::string::String;
use proptest::prelude::*;

use super::scripts::{PAIR, configs, play};
use crate::testing::{Play, scripts};
use crate::{Conductor, SavedConductor};

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

#[test]
fn a_state_that_contradicts_itself_is_refused_by_name() {
    let mut conductor = crate::testing::conductor(crate::SchedulerConfig::default(), 2, 2);
    crate::testing::started(&crate::testing::offer(&mut conductor, 0, crate::testing::request(1, 1000, 0)));
    let good = text(&conductor);
    let spoilt = [
        ("\"free\":[]", "\"free\":[7]", "live requests"),
        ("\"stage\":\"Prefilling\"", "\"stage\":\"Waiting\"", "I5"),
        ("\"block_tokens\":512", "\"block_tokens\":0", "block_tokens"),
    ];
    for (from, to, named) in spoilt {
        assert!(good.contains(from), "{from} in {good}");
        let saved: SavedConductor = serde_json::from_str(&good.replacen(from, to, 1)).expect("still JSON");
        let error = Conductor::restore(saved).expect_err("a contradiction");
        assert!(error.0.contains(named), "{error}");
    }
}
