//! Passes: packing, chunks, pipelines, mixed steps, stalls, removals.

use proptest::prelude::*;

use super::*;

fn engine(mix: Mix, pass_tokens: u32, nodes: u32) -> Engine {
    Engine::new(profile(0.0), mix, pass_tokens, nodes)
}

fn play(engine: Engine, acts: &[(u64, Act)]) -> Driver {
    let acts: Vec<_> = acts.iter().map(|(at_us, act)| (*at_us, false, act.clone())).collect();
    Driver::new(engine).play(&acts)
}

fn prefilled(driver: &Driver, slot: u32) -> (u64, u64) {
    driver.stories[&slot].prefilled.unwrap_or_else(|| panic!("{slot} was not prefilled"))
}

#[test]
fn a_pass_packs_prompts_and_shares_its_time_among_them() {
    let d = play(
        engine(Mix::PrefillFirst, 1000, 1),
        &[(0, prefill(1, 300)), (0, prefill(2, 500)), (0, prefill(3, 400))],
    );
    // The first pass holds 300 + 500 + 200 tokens, the second the 200 that are left.
    assert_eq!(prefilled(&d, 1), (1100, 330));
    assert_eq!(prefilled(&d, 2), (1100, 550));
    assert_eq!(prefilled(&d, 3), (1100 + 300, 220 + 300));
    assert_eq!(d.engine.prefill_busy_ps, 1400 * PS_PER_US);
}

#[test]
fn no_more_requests_run_than_the_engine_takes_at_a_time() {
    let limited = |most| {
        let mut engine = engine(Mix::PrefillFirst, 1000, 1);
        engine.limit_requests(most);
        engine
    };
    let prompts = [(0, prefill(1, 300)), (0, prefill(2, 500)), (0, prefill(3, 400))];
    // Two share a pass though it has room for a part of the third.
    let d = play(limited(2), &prompts);
    assert_eq!([1, 2, 3].map(|slot| prefilled(&d, slot).0), [900, 900, 1400]);
    // The third decodes when one of the others has ended, and prompts wait, too.
    let d = play(
        limited(2),
        &[(0, decode(1, 3, 0)), (0, decode(2, 9, 0)), (0, decode(3, 1, 0)), (1, prefill(4, 300))],
    );
    let ends = [1, 3, 2].map(|slot| d.stories[&slot].decoded.expect("it ended").0);
    assert!(ends.is_sorted() && ends[0] < ends[1] && ends[1] < ends[2], "{ends:?}");
    assert!(prefilled(&d, 4).0 > ends[1], "it begins once the third has ended");
}

/// An engine sizes its chunks before it knows how long they take, so noise makes it no faster.
#[test]
fn noise_evens_out_over_many_mixed_steps() {
    let end_us = |noise_permille: u32| {
        let mut engine = engine(Mix::Target(600), 1000, 1);
        engine.add_noise(noise_permille, baton_types::Rng::new(5));
        let d = play(engine, &[(0, decode(1, 4_000, 0)), (1, prefill(2, 400_000))]);
        prefilled(&d, 2).0
    };
    let (quiet, noisy) = (end_us(0), end_us(900));
    assert!(noisy.abs_diff(quiet) < quiet / 20, "{noisy} µs with noise, {quiet} µs without");
}

#[test]
fn a_long_prompt_runs_in_chunks_and_its_later_ones_see_the_earlier() {
    let long = Engine::new(profile(1_000_000.0), Mix::PrefillFirst, 500, 1);
    let d = play(long, &[(0, Act::Prefill { slot: 1, order: 1, new: 1200, prefix: 100 })]);
    let expected: f64 = [(500, 100), (500, 600), (200, 1100)]
        .iter()
        .map(|(n, p)| profile(1_000_000.0).prefill_us(*n, *p))
        .sum();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let expected_us = expected.round() as u64;
    assert_eq!(prefilled(&d, 1).0, expected_us);
}

#[test]
fn jobs_run_in_their_order_but_what_has_begun_goes_on() {
    let act = |slot, order, new| Act::Prefill { slot, order, new, prefix: 0 };
    let acts = [(0, act(1, 50, 3000)), (10, act(2, 40, 100)), (10, act(3, 30, 1000)), (10, act(4, 60, 100))];
    let d = play(engine(Mix::PrefillFirst, 1000, 1), &acts);
    let ends = [1, 3, 2, 4].map(|slot| prefilled(&d, slot).0);
    assert!(ends.is_sorted(), "{ends:?}");
    assert_eq!(ends[0], 3300, "the long one was not interrupted");
}

#[test]
fn a_pipeline_of_nodes_multiplies_the_throughput_of_long_prompts() {
    let alone = play(engine(Mix::PrefillFirst, 1000, 1), &[(0, prefill(1, 100_000))]);
    let four = play(engine(Mix::PrefillFirst, 1000, 4), &[(0, prefill(1, 100_000))]);
    let (one_us, four_us) = (prefilled(&alone, 1).0, prefilled(&four, 1).0);
    // 100 passes of 1100 µs; the last leaves three stages after it has entered.
    assert_eq!(one_us, 110_000);
    assert_eq!(four_us, 110_000 / 4 + 1100 * 3 / 4);
    assert_eq!(prefilled(&four, 1).1, 110_000 / 4, "it occupied each node for a quarter");
    assert_eq!(four.engine.prefill_busy_ps * 4, alone.engine.prefill_busy_ps);
}

#[test]
fn a_pipeline_does_not_make_a_short_prompt_faster() {
    for nodes in [1, 4] {
        let d = play(engine(Mix::PrefillFirst, 1000, nodes), &[(0, prefill(1, 1000)), (0, prefill(2, 1000))]);
        assert_eq!(prefilled(&d, 1).0, 1100, "{nodes} nodes");
        assert_eq!(prefilled(&d, 2).0, if nodes == 1 { 2200 } else { 1100 + 275 });
    }
}

#[test]
fn a_pass_overtakes_none_and_a_prompt_waits_for_its_last_chunk() {
    // A short chunk of the third prompt shares the first pass; its other, long one follows.
    let acts = [(0, prefill(1, 990)), (0, prefill(2, 10)), (0, prefill(3, 20))];
    let d = play(engine(Mix::PrefillFirst, 1000, 4), &acts);
    assert_eq!(prefilled(&d, 1).0, 1100);
    assert_eq!(prefilled(&d, 3).0, 1100 + 30, "one stage behind, although it alone takes 120 µs");
    // A first pass of 2 + 98 tokens, then one that takes so long that it is still at the entrance
    // when the first leaves.
    let slow = Engine::new(profile(1e9), Mix::PrefillFirst, 100, 2);
    let two_passes = Act::Prefill { slot: 2, order: 2, new: 198, prefix: 100_000 };
    let d = play(slow, &[(0, prefill(1, 2)), (0, two_passes)]);
    let p = profile(1e9);
    let first = p.dense_us(100.0) + p.attention_us(2, 0) + p.attention_us(98, 100_000);
    let second = p.prefill_us(100, 100_098);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let expected_us = (first / 2.0 + second).round() as u64;
    let end_us = prefilled(&d, 2).0;
    assert!(end_us.abs_diff(expected_us) <= 2, "{end_us} instead of {expected_us}");
}

#[test]
fn no_token_overlaps_with_the_pipeline() {
    let mixed = engine(Mix::Target(10_000), 1000, 4);
    let d = play(mixed, &[(0, prefill(1, 1000)), (300, decode(2, 3, 0))]);
    // The pass leaves at 1100; the first step follows, 100 µs each and a little more.
    assert_eq!(prefilled(&d, 1).0, 1100);
    assert_eq!(d.stories[&2].first_token_us, Some(1200));
}

#[test]
fn a_prefill_that_goes_first_stalls_the_decodes_and_the_gaps_show_it() {
    let d = play(engine(Mix::PrefillFirst, 1000, 1), &[(0, decode(1, 5, 0)), (250, prefill(2, 400))]);
    // Steps end at 100, 200, 300; the pass takes until 800; two more steps.
    assert_eq!(prefilled(&d, 2).0, 801);
    assert_eq!(d.stories[&1].gaps_us, [100, 100, 600, 100]);
    let late = play(
        engine(Mix::PrefillFirst, 1000, 1),
        &[(0, decode(1, 5, 0)), (250, prefill(2, 400)), (500, decode(3, 2, 0))],
    );
    assert_eq!(late.stories[&3].gaps_us.len(), 1, "the stall came before its first token");
    assert!(late.stories[&3].gaps_us[0] < 110);
}

#[test]
fn a_sequence_prefilled_here_counts_its_wait_as_a_gap() {
    let here = |slot| Act::Decode { slot, tokens: 2, context: 0, first_due: false };
    let d = play(engine(Mix::PrefillFirst, 1000, 1), &[(0, here(1)), (0, prefill(2, 400))]);
    assert_eq!(d.stories[&1].gaps_us, [600, 100], "500 µs of prefill between its first token and the next");
    assert_eq!(d.stories[&1].first_token_us, None, "it had its first token before");
}

#[test]
fn removing_a_decode_leaves_the_others_what_they_had() {
    let acts = [(0, decode(1, 10, 1000)), (0, decode(2, 10, 0)), (450, Act::Remove(1))];
    let d = play(engine(Mix::PrefillFirst, 1000, 1), &acts);
    let both = play(engine(Mix::PrefillFirst, 1000, 1), &acts[..2]);
    assert_eq!(d.stories[&1], Story { first_token_us: Some(110), ..Story::default() });
    assert_eq!(d.stories[&2].decoded.unwrap().1, 10);
    assert_eq!(d.stories[&2].gaps_us.len(), 9);
    assert!(d.stories[&2].decoded < both.stories[&2].decoded, "less context to look at");
}

#[test]
fn a_slot_used_again_is_not_mistaken_for_what_was_there() {
    let acts = [(0, prefill(1, 1000)), (500, Act::Remove(1)), (600, prefill(1, 1000))];
    let d = play(engine(Mix::PrefillFirst, 1000, 1), &acts);
    assert_eq!(prefilled(&d, 1), (2200, 1100), "the pass under way goes on for nobody");
    let d = play(engine(Mix::PrefillFirst, 250, 4), &acts);
    assert_eq!(prefilled(&d, 1).1, 350, "chunks in the pipeline are the old one's");
}

#[test]
fn a_slow_node_is_slow_from_the_next_step_on() {
    let acts = [(0, decode(1, 4, 0)), (150, Act::Speed(500)), (420, Act::Speed(1000))];
    let d = play(engine(Mix::PrefillFirst, 1000, 1), &acts);
    assert_eq!(d.stories[&1].gaps_us, [100, 200, 200]);
}

#[test]
fn death_tells_how_far_each_decode_came() {
    let acts = [
        (0, decode(1, 10, 0)),
        (250, decode(2, 10, 0)),
        (510, prefill(3, 10)),
        (520, Act::Die),
        (600, prefill(4, 10)),
    ];
    let d = play(engine(Mix::Target(1), 1000, 1), &acts);
    let lost = |slot: u32| d.stories[&slot].lost.clone().unwrap();
    assert_eq!((lost(1).emitted_tokens, lost(1).last_token_us, lost(1).gaps_us.len()), (5, 501, 4));
    assert_eq!((lost(2).emitted_tokens, d.stories[&2].first_token_us), (2, Some(401)));
    assert!(!d.stories.contains_key(&3), "no prefill ends on a dead engine");
    assert_eq!(prefilled(&d, 4), (710, 110));
}

proptest! {
    #[test]
    fn mixed_steps_never_exceed_their_target(
        jobs in proptest::collection::vec((1u64..3000, 0u64..20_000), 1..6),
        batch in 1u32..6,
        context in 0u64..3000,
        target_us in 50u64..2000,
        permille in 300u64..1500,
    ) {
        let engine = Engine::new(profile(500.0), Mix::Target(target_us), 1000, 1);
        let mut acts = vec![(0, false, Act::Speed(permille))];
        for slot in 0..batch {
            acts.push((0, false, decode(slot, 60, context)));
        }
        for (at, (new, prefix)) in (100u32..).zip(&jobs) {
            acts.push((1, false, Act::Prefill { slot: at, order: at.into(), new: *new, prefix: *prefix }));
        }
        let d = Driver::new(engine).play(&acts);
        // Steps that are too long by themselves take the least chunk with them: 16 tokens behind 23,000 at most.
        let unmixed_us = (100_000 + u64::from(batch) * (context + 60) * 10) / permille;
        let least_us = (60_000 + 16_000 + 16 * 500 * 23) / permille;
        for slot in 0..batch {
            let worst = d.stories[&slot].gaps_us.iter().copied().max().unwrap_or(0);
            let most_us = target_us.max(unmixed_us + least_us) + 2;
            prop_assert!(u64::from(worst) <= most_us, "{worst} µs of {target_us}, alone {unmixed_us}");
        }
        prop_assert!((100u32..).zip(&jobs).all(|(slot, _)| d.stories[&slot].prefilled.is_some()));
    }

    #[test]
    fn every_prompt_is_computed_once_whatever_the_shape(
        jobs in proptest::collection::vec((1u64..5000, 0u64..5000), 1..12),
        pass in 1u32..3000,
        nodes in 1u32..6,
    ) {
        let acts: Vec<_> = (0u32..)
            .zip(&jobs)
            .map(|(slot, (new, at_us))| (*at_us, false, prefill(slot, *new)))
            .collect();
        let d = Driver::new(Engine::new(profile(0.0), Mix::PrefillFirst, pass, nodes)).play(&acts);
        let computed_us: u64 = (0u32..).zip(&jobs).map(|(slot, _)| prefilled(&d, slot).1).sum();
        let busy_us = d.engine.prefill_busy_ps / PS_PER_US;
        let slack = 2 * jobs.len() as u64 + jobs.iter().map(|j| j.0 / u64::from(pass) + 2).sum::<u64>();
        prop_assert!(computed_us.abs_diff(busy_us) <= slack, "{computed_us} µs told of {busy_us} µs");
    }
}
