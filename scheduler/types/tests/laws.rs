//! Laws of the shared types, from the outside: what the cores and the files rely on.
#![expect(clippy::float_cmp, reason = "exact values are the point of these laws")]

use baton_types::{
    BlockKey, ChainHasher, ClassId, CostProfile, DecodeCost, FitReport, InstanceId, PrefillCost, RequestId,
    Rng, Role, SloClass, StepCost, Tier, ValidRange, blocks_for, nearest,
};
use proptest::prelude::*;

/// A profile with uneven knots, so that no interpolation is exact by luck.
fn profile() -> CostProfile {
    CostProfile {
        name: "laws".into(),
        source: "made up for tests".into(),
        kv_bytes_per_token: 327_680,
        kv_capacity_tokens: 1_000_000,
        layers: 80,
        shared_us: 13_000.0,
        fit: FitReport::default(),
        valid: ValidRange { max_prompt_tokens: 4096, max_batch: 8, max_context_tokens: 4096 },
        prefill: PrefillCost {
            knots_tokens: vec![0, 64, 300, 4096],
            knots_us: vec![12_000.0, 19_000.0, 41_000.0, 402_000.0],
            attention_ps_per_pair: 1829.0,
        },
        decode: DecodeCost {
            batches: vec![1, 2, 8],
            base_us: vec![17_000.0, 17_400.0, 18_800.0],
            context_ps_per_token: vec![45_000.0, 36_000.0, 27_000.0],
        },
    }
}

/// The dense cost, written the slow way.
fn dense_by_hand(p: &CostProfile, new: f64) -> f64 {
    let knots: Vec<(f64, f64)> = p
        .prefill
        .knots_tokens
        .iter()
        .map(|t| f64::from(*t))
        .zip(p.prefill.knots_us.iter().copied())
        .collect();
    for pair in knots.windows(2) {
        let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
        if new <= x1 {
            return y0 + (y1 - y0) * (new - x0) / (x1 - x0);
        }
    }
    let ((x0, y0), (x1, y1)) = (knots[knots.len() - 2], knots[knots.len() - 1]);
    y1 + (y1 - y0) / (x1 - x0) * (new - x1)
}

#[test]
fn knots_cost_what_was_measured() {
    let p = profile();
    for (tokens, us) in p.prefill.knots_tokens.iter().zip(&p.prefill.knots_us) {
        assert!((p.dense_us(f64::from(*tokens)) - us).abs() < 1e-6, "at {tokens} tokens");
    }
    for (at, batch) in p.decode.batches.iter().enumerate() {
        let cost = p.step_cost(*batch);
        assert_eq!(cost.base_ps, (p.decode.base_us[at] * 1e6) as u64, "base of batch {batch}");
        assert_eq!(cost.slope_ps, p.decode.context_ps_per_token[at] as u64, "slope of batch {batch}");
    }
}

#[test]
fn beyond_the_last_batch_the_base_goes_on_and_the_slope_stays() {
    let p = profile();
    let (at_8, at_14) = (p.step_cost(8), p.step_cost(14));
    assert_eq!(at_14.base_ps - at_8.base_ps, 1_400_000_000);
    assert_eq!(at_14.slope_ps, at_8.slope_ps);
    assert_eq!(p.decode_us(0, 1000), 0.0, "an empty batch takes no step");
}

#[test]
fn a_full_hit_still_costs_its_last_token() {
    let p = profile();
    assert_eq!(p.prefill_us(0, 4096), 0.0);
    let one = p.prefill_us(1, 4095);
    assert!(one > 12_000.0 && one < p.prefill_us(4096, 0) / 10.0, "{one}");
}

#[test]
fn every_broken_table_is_refused_by_name() {
    type Break = fn(&mut CostProfile);
    let breaks: [(Break, &str); 9] = [
        (|p| p.prefill.knots_tokens[1] = 0, "ascend"),
        (|p| p.prefill.knots_us[3] = 1.0, "ascend"),
        (|p| p.prefill.knots_us[0] = -1.0, "not negative"),
        (|p| p.prefill.attention_ps_per_pair = f64::INFINITY, "attention_ps_per_pair"),
        (|p| p.shared_us = -0.5, "shared_us"),
        (|p| p.decode.batches = vec![2, 1, 8], "ascend"),
        (|p| p.decode.context_ps_per_token.truncate(1), "same length"),
        (|p| p.kv_capacity_tokens = 0, "kv_capacity_tokens"),
        (|p| p.kv_bytes_per_token = 0, "kv_bytes_per_token"),
    ];
    assert_eq!(profile().validate(), Ok(()));
    for (spoil, named) in breaks {
        let mut p = profile();
        spoil(&mut p);
        let error = p.validate().expect_err(named);
        assert!(error.to_string().contains(named), "{error} does not say {named}");
        assert!(error.to_string().starts_with("cost profile: "), "{error}");
    }
}

#[test]
fn a_batch_between_two_measured_ones_is_costed_between_them() {
    let p = profile();
    assert_eq!(p.step_cost(5).base_ps, 18_100_000_000);
    assert_eq!(p.step_cost(5).slope_ps, 31_500);
    assert_eq!(p.step_cost(1).step_ps(0), 17_000_000_000);
}

#[test]
fn no_steps_take_no_time() {
    assert_eq!(StepCost { base_ps: 5, slope_ps: 7 }.run_ps(100, 3, 0), 0);
    assert_eq!(StepCost { base_ps: 5, slope_ps: 7 }.run_ps(100, 3, 1), 705);
}

#[test]
fn names_in_files_are_the_words_of_the_field() {
    let words = |roles: &[Role]| roles.iter().map(|r| format!("{r:?}").to_lowercase()).collect::<Vec<_>>();
    assert_eq!(
        words(&[Role::Prefill, Role::Decode, Role::Both, Role::Store]),
        ["prefill", "decode", "both", "store"]
    );
    assert_eq!(Tier::LOCAL.map(Tier::name), ["hbm", "dram", "ssd"]);
    assert!(Tier::Hbm < Tier::Dram && Tier::Dram < Tier::Ssd);
}

#[test]
fn the_default_class_is_the_papers_objective() {
    let class = SloClass::default();
    assert_eq!((class.ttft_us, class.tbt_us), (30_000_000, 100_000));
    assert!(class.sheddable && class.weight == 1 && class.priority == 0 && class.headroom_permille == 0);
}

#[test]
fn ids_of_different_kinds_are_told_apart_and_ordered_by_number() {
    assert_eq!(RequestId(1 << 40).index(), 1 << 40);
    assert!(InstanceId(2) < InstanceId(10) && ClassId(0) == ClassId::default());
    assert_eq!(format!("{}/{}", RequestId(7), InstanceId(8)), "7/8");
}

#[test]
fn numbers_below_a_bound_are_spread_evenly() {
    // Chi-square over 16 cells with 15 degrees of freedom: 99.99 % of honest runs stay below 44.3.
    for seed in [0, 1, u64::MAX] {
        let mut rng = Rng::new(seed);
        let mut cells = [0u32; 16];
        for _ in 0..16_000 {
            cells[usize::try_from(rng.below(16)).expect("below 16")] += 1;
        }
        let chi: f64 = cells.iter().map(|c| (f64::from(*c) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi < 44.3, "seed {seed}: {cells:?}");
    }
}

#[test]
fn units_and_chances_have_their_means() {
    let mut rng = Rng::fork(7, 3);
    let mean = (0..20_000).map(|_| rng.unit()).sum::<f64>() / 20_000.0;
    assert!((mean - 0.5).abs() < 0.01, "{mean}");
    let hits = (0..20_000).filter(|_| rng.chance_permille(250)).count();
    assert!((4700..5300).contains(&hits), "{hits}");
}

#[test]
fn one_flipped_bit_changes_half_of_a_key() {
    let key = |id| ChainHasher::new(9, b"model").push_id(id).0;
    for bit in 0..64 {
        let flipped = (key(0x1234_5678) ^ key(0x1234_5678 ^ (1 << bit))).count_ones();
        assert!((36..=92).contains(&flipped), "bit {bit} flips {flipped} of 128");
    }
}

#[test]
fn short_names_rarely_collide() {
    let mut hasher = ChainHasher::new(1, b"");
    let mut names: Vec<u64> = (0..50_000).map(|id| hasher.push_id(id % 7).short().0).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 50_000, "a chain of equal contents still has a name for each position");
}

proptest! {
    #[test]
    fn dense_cost_is_the_piecewise_line(new in 1u32..20_000) {
        let (p, new) = (profile(), f64::from(new));
        prop_assert!((p.dense_us(new) - dense_by_hand(&p, new)).abs() < 1e-6 * p.dense_us(new).max(1.0));
    }

    #[test]
    fn more_work_never_costs_less(new in 1u64..9000, prefix in 0u64..9000, more in 1u64..500) {
        let p = profile();
        prop_assert!(p.prefill_us(new + more, prefix) > p.prefill_us(new, prefix));
        prop_assert!(p.prefill_us(new, prefix + more) > p.prefill_us(new, prefix));
        prop_assert!(p.decode_us(3, new + more) > p.decode_us(3, new));
    }

    #[test]
    fn a_cached_prefix_saves(prompt in 2u64..9000, share in 1u64..100) {
        let p = profile();
        let prefix = (prompt * share / 100).min(prompt - 1);
        prop_assert!(p.prefill_us(prompt - prefix, prefix) <= p.prefill_us(prompt, 0) + 1e-6);
    }

    #[test]
    fn attention_adds_up_over_chunks(a in 1u64..5000, b in 1u64..5000, prefix in 0u64..5000) {
        let p = profile();
        let whole = p.attention_us(a + b, prefix);
        let parts = p.attention_us(a, prefix) + p.attention_us(b, prefix + a);
        prop_assert!((whole - parts).abs() < 1e-6 * whole.max(1.0), "{} vs {}", whole, parts);
    }

    #[test]
    fn passes_without_a_bound_are_one_pass(new in 1u64..9000, prefix in 0u64..9000) {
        let p = profile();
        prop_assert_eq!(p.chunked_prefill_us(new, prefix, 0), p.prefill_us(new, prefix));
        prop_assert!(p.chunked_prefill_us(new, prefix, 512) >= p.prefill_us(new, prefix) - 1e-6);
    }

    #[test]
    fn step_costs_between_batches_lie_between_them(batch in 2u32..8) {
        let p = profile();
        let (low, here, high) = (p.step_cost(2), p.step_cost(batch), p.step_cost(8));
        prop_assert!(low.base_ps <= here.base_ps && here.base_ps <= high.base_ps);
        prop_assert!(low.slope_ps >= here.slope_ps && here.slope_ps >= high.slope_ps);
    }

    #[test]
    fn blocks_cover_the_tokens_and_not_one_more(tokens in 0u64..1_000_000, size in 1u32..5000) {
        let blocks = blocks_for(tokens, size);
        prop_assert!(blocks * u64::from(size) >= tokens);
        prop_assert!(blocks == 0 || (blocks - 1) * u64::from(size) < tokens);
    }

    #[test]
    fn a_chain_is_a_function_of_its_contents(ids in proptest::collection::vec(any::<u64>(), 0..20), cut in 0usize..20) {
        let chain = |ids: &[u64]| -> Vec<BlockKey> {
            let mut hasher = ChainHasher::new(3, b"namespace");
            ids.iter().map(|id| hasher.push_id(*id)).collect()
        };
        let whole = chain(&ids);
        let cut = cut.min(ids.len());
        prop_assert_eq!(&chain(&ids[..cut])[..], &whole[..cut], "a prefix names the same blocks");
        let mut resumed = ChainHasher::new(3, b"namespace");
        let mut last = None;
        for id in &ids {
            last = Some(resumed.clone().push_id(*id));
            resumed.push_id(*id);
        }
        prop_assert_eq!(last, whole.last().copied());
    }

    #[test]
    fn a_known_word_is_its_own_nearest(at in 0usize..4) {
        let known = ["policy", "admission", "block_tokens", "seed"];
        prop_assert_eq!(nearest(known[at], known), Some(known[at]));
    }

    #[test]
    fn one_slip_is_forgiven(at in 0usize..9, letter in proptest::char::range('a', 'z')) {
        let mut word: Vec<char> = "admission".chars().collect();
        word[at] = letter;
        let word: String = word.into_iter().collect();
        prop_assert_eq!(nearest(&word, ["admission", "clients", "faults"]), Some("admission"));
    }

    #[test]
    fn streams_repeat_and_forks_are_their_own(seed in any::<u64>(), a in 0u64..1000, b in 1000u64..2000) {
        let draw = |mut rng: Rng| [rng.next_u64(), rng.next_u64(), rng.next_u64()];
        prop_assert_eq!(draw(Rng::new(seed)), draw(Rng::new(seed)));
        prop_assert_ne!(draw(Rng::fork(seed, a)), draw(Rng::fork(seed, b)));
    }
}
