//! Fast-forwarding is stepping: the same acts give the same stories, to the last gap.

use proptest::prelude::*;

use super::*;

fn act() -> impl Strategy<Value = Act> {
    let slot = 0u32..1;
    prop_oneof![
        3 => (slot.clone(), 1u64..2500, 0u64..300).prop_map(|(slot, new, prefix)| Act::Prefill { slot, order: 0, new, prefix }),
        5 => (slot, 1u32..40, 0u64..900, any::<bool>())
            .prop_map(|(slot, tokens, context, first_due)| Act::Decode { slot, tokens, context, first_due }),
        3 => (0u32..40).prop_map(Act::Remove),
        1 => prop_oneof![Just(500u64), Just(1000), Just(730)].prop_map(Act::Speed),
        1 => Just(Act::Die),
        2 => Just(Act::Look),
    ]
}

/// Acts with slots of their own, at times that often fall on the end of a step.
fn scripts() -> impl Strategy<Value = Vec<(u64, bool, Act)>> {
    let time = prop_oneof![(0u64..40).prop_map(|t| t * 100), (0u64..80).prop_map(|t| t * 50 + 1), 0u64..4000];
    proptest::collection::vec((time, any::<bool>(), act()), 1..40).prop_map(|mut acts| {
        for (slot, (_, _, act)) in (0u32..).zip(acts.iter_mut()) {
            match act {
                Act::Prefill { slot: s, order, .. } => (*s, *order) = (slot, u64::from(slot * 7 % 5)),
                Act::Decode { slot: s, .. } => *s = slot,
                _ => {}
            }
        }
        acts
    })
}

fn mixes() -> impl Strategy<Value = Mix> {
    prop_oneof![Just(Mix::PrefillFirst), (1u32..600).prop_map(Mix::Fixed), (50u64..800).prop_map(Mix::Target),]
}

/// A profile with or without dependence on context: without it, ends fall on round times.
fn profiles() -> impl Strategy<Value = Arc<CostProfile>> {
    prop_oneof![Just(0.0), Just(10_000.0), Just(333.0)].prop_map(|slope| {
        let mut p = (*profile(if slope > 0.0 { 500.0 } else { 0.0 })).clone();
        p.decode.context_ps_per_token = vec![slope];
        Arc::new(p)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn fast_forwarding_is_stepping(
        profile in profiles(), mix in mixes(), (pass, nodes) in (100u32..1500, 1u32..4), acts in scripts(),
        most in proptest::option::of(1u32..5),
    ) {
        let mut fast = Engine::new(profile, mix, pass, nodes);
        most.into_iter().for_each(|most| fast.limit_requests(most));
        let mut slow = fast.clone();
        slow.step_once();
        let (fast, slow) = (Driver::new(fast).play(&acts), Driver::new(slow).play(&acts));
        prop_assert_eq!(&fast.stories, &slow.stories);
        prop_assert_eq!(&fast.looks, &slow.looks);
        let totals = |d: &Driver| (d.engine.prefill_busy_ps, d.engine.decode_busy_ps, d.engine.outside_steps);
        prop_assert_eq!(totals(&fast), totals(&slow));
        for (slot, story) in &fast.stories {
            if let Some((_, emitted)) = story.decoded {
                let due = story.first_token_us.is_some();
                prop_assert_eq!(story.gaps_us.len() as u32 + u32::from(due), emitted, "slot {}", slot);
            }
        }
    }
}

/// The range is counted by steps, so that it does not matter how many make a stride.
#[test]
fn steps_outside_the_profile_are_counted_one_by_one() {
    // Two sequences of 690 tokens are inside up to 700 each: eleven steps of twenty.
    let acts = [(0, false, decode(1, 20, 690)), (0, false, decode(2, 20, 690))];
    let d = Driver::new(Engine::new(profile(0.0), Mix::PrefillFirst, 1000, 1)).play(&acts);
    assert_eq!(d.engine.outside_steps, 9);
    let four: Vec<_> = (0..4).map(|slot| (0, false, decode(slot, 5, 1))).collect();
    let d = Driver::new(Engine::new(profile(0.0), Mix::PrefillFirst, 1000, 1)).play(&four);
    assert_eq!(d.engine.outside_steps, 5, "a batch of four was not measured");
}
