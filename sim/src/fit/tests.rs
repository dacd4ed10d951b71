use super::measured::{MixedPoint, read_csv};
use super::*;
use crate::profiles;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Shipped profile, its system and backend in the table, its formula.
const SHIPPED: [(&str, (&str, &str), PrefillShape); 7] = [
    ("llama3-70b-8xa100", ("a100_sxm", "vllm"), PrefillShape::NewAndPrefix),
    ("llama3-70b-8xh100", ("h100_sxm", "vllm"), PrefillShape::NewAndPrefix),
    ("llama3-70b-8xh200", ("h200_sxm", "vllm"), PrefillShape::NewAndPrefix),
    ("llama3-70b-sglang-8xa100", ("a100_sxm", "sglang"), PrefillShape::NewAndPrefix),
    ("llama3-70b-sglang-8xh100", ("h100_sxm", "sglang"), PrefillShape::NewAndPrefix),
    ("llama3-70b-sglang-8xh200", ("h200_sxm", "sglang"), PrefillShape::NewAndPrefix),
    ("llama3-70b-8xa100-newtokens", ("a100_sxm", "vllm"), PrefillShape::NewOnly),
];

/// The table that the shipped profiles were fitted to, which is not part of the repository:
/// `$BATON_PERF_CSV`, or `shared/perf/` in some directory above this crate.
fn table() -> Option<String> {
    let path = std::env::var_os("BATON_PERF_CSV").map(PathBuf::from).or_else(|| {
        let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let tables = here.ancestors().map(|d| d.join("shared/perf/llama-70b-tp8.csv"));
        tables.into_iter().find(|p| p.is_file())
    });
    if path.is_none() {
        eprintln!("skipped: no measured table; set BATON_PERF_CSV to its path");
    }
    path.map(|p| std::fs::read_to_string(p).unwrap())
}

fn spec(shape: PrefillShape) -> FitSpec {
    FitSpec { name: String::from("fitted"), source: String::from("test"), layers: 80, shape }
}

fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() <= tolerance * w.abs(), "{what}: {got:?}, expected {want:?}");
    }
}

fn assert_same_costs(got: &CostProfile, want: &CostProfile, tolerance: f64) {
    assert_eq!(got.prefill.knots_tokens, want.prefill.knots_tokens);
    assert_eq!(got.decode.batches, want.decode.batches);
    assert_eq!(got.valid, want.valid);
    assert_eq!(got.kv_capacity_tokens, want.kv_capacity_tokens);
    assert_eq!(got.kv_bytes_per_token, want.kv_bytes_per_token);
    assert_close("knots", &got.prefill.knots_us, &want.prefill.knots_us, tolerance);
    let attention = |p: &CostProfile| [p.prefill.attention_ps_per_pair, p.shared_us];
    assert_close("attention, shared", &attention(got), &attention(want), tolerance);
    assert_close("base", &got.decode.base_us, &want.decode.base_us, tolerance);
    let slopes = |p: &CostProfile| p.decode.context_ps_per_token.clone();
    assert_close("slope", &slopes(got), &slopes(want), tolerance);
}

/// A profile whose zero knot lies on its first segment, as fitted ones do.
fn known() -> CostProfile {
    CostProfile {
        name: String::from("known"),
        source: String::from("made up"),
        kv_bytes_per_token: 131_072,
        kv_capacity_tokens: 500_000,
        layers: 32,
        shared_us: 9_000.0,
        fit: FitReport::default(),
        valid: ValidRange { max_prompt_tokens: 65_536, max_batch: 64, max_context_tokens: 32_768 },
        prefill: PrefillCost {
            knots_tokens: vec![0, 100, 500, 2_000, 8_000, 32_768],
            knots_us: vec![9_000.0, 12_000.0, 24_000.0, 90_000.0, 330_000.0, 1_500_000.0],
            attention_ps_per_pair: 777.0,
        },
        decode: DecodeCost {
            batches: vec![1, 8, 64],
            base_us: vec![11_000.0, 12_500.0, 20_000.0],
            context_ps_per_token: vec![40_000.0, 30_000.0, 25_000.0],
        },
    }
}

const HEADER: &str = "backend,system,backend_version,phase,batch,input_or_context_tokens,prefix_tokens,\
    new_tokens_per_request,latency_ms,kv_bytes_per_token,kv_capacity_tokens,remark\n";

/// A table of the latencies that `known` predicts. It also has rows of a second system, to be left out.
fn synthetic() -> String {
    let p = known();
    let mut text = String::from(HEADER);
    let mut row = |system: &str, cells: String| {
        writeln!(text, "fast,{system},1.0,{cells},131072,500000,x").unwrap();
    };
    for &new in p.prefill.knots_tokens.iter().filter(|&&k| k > 0) {
        for prefix in [0, u64::from(new)] {
            let ms = p.prefill_us(u64::from(new), prefix) / 1e3;
            let input = u64::from(new) + prefix;
            row("box", format!("prefill,1,{input},{prefix},{new},{ms}"));
        }
        row("other", format!("prefill,1,{new},0,{new},1"));
    }
    // Between two knots, too close to the upper one to become a knot.
    for (new, prefix) in [(1_700, 300), (7_000, 20_000)] {
        let ms = p.prefill_us(new, prefix) / 1e3;
        row("box", format!("prefill,1,{},{prefix},{new},{ms}", new + prefix));
    }
    for &batch in &p.decode.batches {
        for context in [1_024_u64, 4_096, 32_768] {
            let ms = p.decode_us(batch, u64::from(batch) * context) / 1e3;
            row("box", format!("decode,{batch},{context},0,1,{ms}"));
        }
    }
    text
}

#[test]
fn a_known_profile_is_recovered_from_what_it_would_have_measured() {
    let measured = read_csv(synthetic().as_bytes(), "box", "fast").unwrap();
    let fitted = fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap();
    assert_same_costs(&fitted, &known(), 1e-3);
    assert!(fitted.fit.prefill_worst_pct < 0.1 && fitted.fit.decode_worst_pct < 0.1);
    assert_eq!((fitted.fit.prefill_points, fitted.fit.decode_points), (12, 9));
}

#[test]
fn a_cost_of_new_tokens_alone_is_right_without_a_prefix_and_too_low_behind_one() {
    let measured = read_csv(synthetic().as_bytes(), "box", "fast").unwrap();
    let fitted = fit(&measured, spec(PrefillShape::NewOnly)).unwrap();
    assert_eq!(fitted.prefill.attention_ps_per_pair, 0.0);
    for new in [100, 500, 2_000, 8_000, 32_768] {
        assert_close("new", &[fitted.prefill_us(new, 0)], &[known().prefill_us(new, 0)], 1e-3);
    }
    assert_eq!(fitted.prefill_us(8_000, 0), fitted.prefill_us(8_000, 50_000));
    let behind = known().prefill_us(32_768, 32_768);
    let missed_pct = 100.0 * (behind - fitted.prefill_us(32_768, 32_768)) / behind;
    assert_close("worst", &[fitted.fit.prefill_worst_pct], &[missed_pct], 1e-2);
}

#[test]
fn the_attention_column_decides_where_prefixes_do_not_vary() {
    let mut measured = read_csv(synthetic().as_bytes(), "box", "fast").unwrap();
    measured.prefill.retain(|p| p.prefix_tokens == 0);
    let error = fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap_err();
    assert!(error.0.contains("attention_ms"), "{error}");
    for p in &mut measured.prefill {
        p.attention_us = Some(777.0 * p.pairs() / 1e6);
    }
    let fitted = fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap();
    assert_close("knots", &fitted.prefill.knots_us, &known().prefill.knots_us, 1e-3);
    assert_close("pair", &[fitted.prefill.attention_ps_per_pair], &[777.0], 1e-3);
}

#[test]
fn noise_on_the_latencies_shows_in_the_reported_errors() {
    let mut measured = read_csv(synthetic().as_bytes(), "box", "fast").unwrap();
    for (i, p) in measured.decode.iter_mut().enumerate() {
        p.latency_us *= if i % 2 == 0 { 1.1 } else { 0.9 };
    }
    let report = fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap().fit;
    assert!(report.decode_mape_pct > 1.0 && report.decode_worst_pct >= report.decode_mape_pct);
    assert!(report.prefill_mape_pct < 0.1);
}

#[test]
fn disordered_measurements_still_give_an_ascending_profile() {
    let mut measured = read_csv(synthetic().as_bytes(), "box", "fast").unwrap();
    for p in measured.prefill.iter_mut().filter(|p| p.new_tokens == 500) {
        p.latency_us /= 4.0;
    }
    let fitted = fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap();
    assert!(fitted.prefill.knots_us.is_sorted());
    assert!(fitted.fit.prefill_worst_pct > 10.0);
}

#[test]
fn a_line_stays_above_zero_and_needs_two_contexts() {
    assert_eq!(fit_line(&[(5.0, 1.0), (5.0, 2.0)]), None);
    let (base, slope) = fit_line(&[(1.0, 10.0), (2.0, 8.0)]).unwrap();
    assert!(slope == 0.0 && (8.0..10.0).contains(&base));
    let (base, slope) = fit_line(&[(1.0, 1.0), (2.0, 4.0)]).unwrap();
    assert!(base == 0.0 && (1.0..2.0).contains(&slope));
    let (base, slope) = fit_line(&[(0.0, 3.0), (10.0, 23.0)]).unwrap();
    assert!((base - 3.0).abs() < 1e-9 && (slope - 2.0).abs() < 1e-9);
}

#[test]
fn tables_that_cannot_be_used_are_named() {
    let read = |text: &str| read_csv(text.as_bytes(), "box", "fast").unwrap_err().0;
    let text = synthetic();
    let error = read_csv(text.as_bytes(), "box", "slow").unwrap_err().0;
    assert!(error.contains("box with fast, other with fast"), "{error}");
    assert!(read(&text.replace("latency_ms", "latency")).contains("latency_ms"));
    assert!(read(&text.replacen("prefill,1,200", "prefill,2,200", 1)).contains("line 3"));
    assert!(read(&text.replacen("fast,box,1.0,decode", "fast,box,1.1,decode", 1)).contains("version"));
    let zero = text.replacen("decode,1,1024,0,1,", "decode,1,1024,0,1,-", 1);
    let measured = read_csv(zero.as_bytes(), "box", "fast").unwrap();
    assert!(fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap_err().0.contains("above zero"));
    let mut measured = read_csv(text.as_bytes(), "box", "fast").unwrap();
    measured.decode.retain(|p| p.batch != 8 || p.context_tokens == 1_024);
    let error = fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap_err().0;
    assert!(error.contains("batch 8"), "{error}");
}

#[test]
fn shipped_profiles_are_what_the_table_gives() {
    let Some(text) = table() else { return };
    for (name, (system, backend), shape) in SHIPPED {
        let shipped = profiles::named(name).unwrap();
        let measured = read_csv(text.as_bytes(), system, backend).unwrap();
        let engine = if backend == "vllm" { "vLLM" } else { "SGLang" };
        assert!(shipped.source.contains(&format!("{engine} {}", measured.backend_version)));
        let fitted = fit(&measured, spec(shape)).unwrap();
        assert_same_costs(&fitted, &shipped, 1e-6);
        assert_eq!(errors_over(&shipped, &measured), shipped.fit, "{name}");
    }
}

/// In-sample errors flatter a fit with many knots; these are of rows that the fit has not seen.
#[test]
fn rows_left_out_of_the_fit_are_predicted() {
    let Some(text) = table() else { return };
    for (name, (system, backend), shape) in SHIPPED.into_iter().take(6) {
        let measured = read_csv(text.as_bytes(), system, backend).unwrap();
        let (mut sum, mut worst) = (0.0, 0.0_f64);
        for (i, left_out) in measured.prefill.iter().enumerate() {
            let mut rest = measured.clone();
            rest.prefill.remove(i);
            let fitted = fit(&rest, spec(shape)).unwrap();
            let at = fitted.prefill_us(u64::from(left_out.new_tokens), left_out.prefix_tokens);
            let error_pct = 100.0 * (at - left_out.latency_us).abs() / left_out.latency_us;
            sum += error_pct;
            worst = worst.max(error_pct);
        }
        let mape_pct = sum / 24.0;
        eprintln!("{name}: prefill rows left out: mean {mape_pct:.2} %, worst {worst:.2} %");
        assert!(mape_pct < 5.0 && worst < 20.0, "{name}: mean {mape_pct} %, worst {worst} %");
    }
}

#[test]
fn the_longest_prompt_costs_28_s_on_eight_a100_in_one_pass_or_many() {
    for name in ["llama3-70b-8xa100", "llama3-70b-8xa100-newtokens"] {
        let at_once_s = profiles::named(name).unwrap().prefill_us(131_072, 0) / 1e6;
        assert!((at_once_s / 28.0 - 1.0).abs() < 0.03, "{name}: {at_once_s} s");
    }
    let p = profiles::named("llama3-70b-8xa100").unwrap();
    let passes = p.chunked_prefill_us(131_072, 0, 8_192);
    assert!((passes / p.prefill_us(131_072, 0) - 1.0).abs() < 0.05, "{passes} us");
    // Attention is what passes cannot avoid: a cost of new tokens alone loses it.
    let blind = profiles::named("llama3-70b-8xa100-newtokens").unwrap();
    assert!(blind.chunked_prefill_us(131_072, 0, 8_192) < 0.6 * passes);
}

#[test]
fn faster_nodes_have_faster_profiles() {
    let [a100, h100, h200] =
        ["8xa100", "8xh100", "8xh200"].map(|node| profiles::named(&format!("llama3-70b-{node}")).unwrap());
    for new in [64, 1_024, 16_384, 131_072] {
        assert!(a100.prefill_us(new, 0) > 1.5 * h100.prefill_us(new, 0), "{new}");
    }
    for batch in [1, 16, 128] {
        let context = u64::from(batch) * 8_192;
        assert!(a100.decode_us(batch, context) > 1.5 * h100.decode_us(batch, context));
        assert!(h100.decode_us(batch, context) > 1.2 * h200.decode_us(batch, context));
    }
    assert!(h200.kv_capacity_tokens > 2 * h100.kv_capacity_tokens);
}

#[test]
fn decode_steps_cost_what_was_measured() {
    let p = profiles::named("llama3-70b-8xa100").unwrap();
    for (batch, context, measured_ms) in [(1, 1_024, 17.2), (16, 8_192, 22.6), (64, 4_096, 27.7)] {
        let ms = p.decode_us(batch, u64::from(batch) * context) / 1e3;
        assert_close("step", &[ms], &[measured_ms], 0.045);
    }
    // Between measured batches: between their costs at the same context.
    let (low, mid, high) = (p.decode_us(16, 200_000), p.decode_us(24, 200_000), p.decode_us(32, 200_000));
    assert!(low < mid && mid < high);
}

/// What `known` would take for decodes and a chunk in one step.
fn mixed(batch: u32, new_tokens: u32) -> MixedPoint {
    let p = known();
    let mut point =
        MixedPoint { batch, context_tokens: 2_000, new_tokens, prefix_tokens: 0, latency_us: 0.0 };
    point.latency_us = mixed::apart_us(&p, &point) - 5_000.0;
    point
}

#[test]
fn what_mixed_steps_share_is_fitted_where_it_was_measured() {
    let mut measured = read_csv(synthetic().as_bytes(), "box", "fast").unwrap();
    measured.mixed = vec![mixed(8, 100), mixed(8, 500), mixed(64, 2_000)];
    let fitted = fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap();
    assert_close("shared", &[fitted.shared_us], &[5_000.0], 0.02);
    let errors = sections(&fitted, &measured);
    assert_eq!(
        errors.iter().map(|(name, e)| (*name, e.points())).collect::<Vec<_>>(),
        [("prefill", 12), ("decode", 9), ("mixed", 3)]
    );
    assert!(errors[2].1.quantile_pct(1.0) < 0.5);
    // It is neither negative nor more than a step without work costs.
    for (change_us, shared_us) in [(20_000.0, 0.0), (-8_000.0, 9_000.0)] {
        let mut measured = measured.clone();
        measured.mixed.iter_mut().for_each(|p| p.latency_us += change_us);
        let fitted = fit(&measured, spec(PrefillShape::NewAndPrefix)).unwrap();
        assert_close("shared", &[fitted.shared_us], &[shared_us], 0.01);
    }
}

#[test]
fn a_table_may_hold_mixed_steps() {
    let text = synthetic() + "fast,box,1.0,mixed,8,2000,64,500,40.5,131072,500000,x\n";
    let measured = read_csv(text.as_bytes(), "box", "fast").unwrap();
    let point = MixedPoint {
        batch: 8,
        context_tokens: 2_000,
        new_tokens: 500,
        prefix_tokens: 64,
        latency_us: 40_500.0,
    };
    assert_eq!(measured.mixed, [point]);
}

#[test]
fn errors_are_told_by_their_rank() {
    let errors = SectionErrors::over(&[1.0, 2.0, 3.0, 4.0, 10.0], |pct| (100.0 - pct, 100.0));
    let at = |share| errors.quantile_pct(share);
    assert_close(
        "rank",
        &[at(0.0), at(0.5), at(0.9), at(1.0), errors.mean_pct()],
        &[1.0, 3.0, 10.0, 10.0, 4.0],
        1e-9,
    );
    assert_eq!(SectionErrors(Vec::new()).quantile_pct(0.5), 0.0);
}

#[test]
fn attention_shows_in_the_lengths_of_prompts() {
    let point = |new_tokens: u32| {
        let mut point = PrefillPoint { new_tokens, prefix_tokens: 0, latency_us: 0.0, attention_us: None };
        point.latency_us = 3_000.0 + 40.0 * f64::from(new_tokens) + 600.0 * point.pairs() / 1e6;
        point
    };
    let mut points: Vec<PrefillPoint> = [64, 256, 512, 1_024, 4_096, 16_384].map(point).into();
    curvature::set_attention(&mut points);
    for p in &points {
        assert_close("attention", &[p.attention_us.unwrap()], &[600.0 * p.pairs() / 1e6], 1e-6);
    }
    // Three lengths could be a line with an error.
    let mut few: Vec<PrefillPoint> = [64, 256, 512, 1_024].map(point).into();
    curvature::set_attention(&mut few);
    assert!(few.iter().all(|p| p.attention_us.is_none()));
}
