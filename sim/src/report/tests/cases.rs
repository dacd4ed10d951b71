//! Pages of runs of every kind.

use super::super::{MAX_DRAWN, curves, heat, html, names, parts, table};
use super::*;
use crate::bound::{BoundResult, UpperBound};

#[test]
fn a_real_run_has_every_section() {
    let runs = [real(PolicyName::Baton), real(PolicyName::Random)];
    assert_eq!(runs[0].completed + runs[0].rejected + runs[0].failed, 300);
    assert!(runs[0].ttft_quantiles_s.len() == 103 && !runs[0].objectives.is_empty());
    assert!(runs[0].series.decode_step_us.iter().any(|r| !r.is_empty()), "decode steps were sampled");
    let page = page(&runs);
    for section in
        ["Summary", "Latency", "Over time", "Load of each instance", "Caches", "Refusals", "Predictions"]
    {
        assert!(page.contains(&format!("<h2>{section}</h2>")), "{section} is missing");
    }
    for figure in [
        "TTFT",
        "TBT",
        "Goodput",
        "Refusals per second",
        "Hit ratio",
        "Oscillation",
        "Retry-After",
        "Wasted prefill",
        "by tier",
        "decode start",
        "answer length",
    ] {
        assert!(page.contains(figure), "{figure} is missing");
    }
    assert!(page.contains("SLO 30 s") && page.contains("SLO 100 ms"));
    assert!(page.contains("class=\"cells prefill\"") && page.contains("class=\"cells decode\""));
    assert!(!page.contains("NaN") && !page.contains("inf"), "no figure that is none");
}

#[test]
fn the_same_runs_give_the_same_page() {
    let once = page(&[real(PolicyName::Baton)]);
    assert_eq!(once, page(&[real(PolicyName::Baton)]));
}

#[test]
fn no_run_and_runs_of_nothing_have_pages() {
    assert!(page(&[]).contains("No run was measured"));
    let nothing = page(&[empty("baton")]);
    assert!(nothing.contains("nothing measured") && nothing.contains("No request was refused"));
    assert!(!nothing.contains("<h2>Predictions</h2>"), "nothing was predicted");
    assert!(!nothing.contains("Replicas of popular blocks"), "what was not counted is not shown");
}

#[test]
fn odd_shapes_do_not_panic() {
    let one_bin = page(&[rough(1, 3, 1)]);
    assert!(one_bin.contains("class=\"cells prefill\""));
    assert!(page(&[rough(1, 1000, 20)]).contains("up to 256 instances"));
    page(&[rough(1, 0, 20)]);
    page(&[rough(1, 256, 480), rough(2, 1, 1), empty("x")]);
    let mut ragged = rough(1, 4, 30);
    ragged.series.prefill_us[2].clear();
    ragged.series.decode_step_us.truncate(1);
    ragged.objectives.clear();
    page(&[ragged]);
}

#[test]
fn figures_that_are_no_numbers_are_dashes() {
    let mut run = rough(1, 2, 10);
    (run.goodput, run.itl_ms_mean, run.oscillation_index) = (f64::NAN, f64::INFINITY, f64::NAN);
    run.ttft_quantiles_s = vec![(0.0, f32::NAN), (0.5, 0.0), (1.0, f32::INFINITY)];
    run.speed = f64::NAN;
    let page = page(&[run, rough(2, 2, 10)]);
    assert!(page.contains("<td class=\"n\">–</td>"));
    assert!(!page.contains("d=\"MNaN") && !page.contains(",NaN") && !page.contains("inf,"));
}

#[test]
fn hostile_names_stay_text() {
    let hostile = "</title><script>alert(1)</script>\"><img src=x onerror='alert(1)'>\u{202E}";
    let mut run = rough(1, 2, 5);
    (run.policy, run.admission) = (hostile.into(), hostile.into());
    let page = html(hostile, &[(hostile.into(), hostile.into())], &[run, empty("b")]);
    assert_well_formed(&page);
    assert_eq!(page.matches("<script").count(), 1);
    assert!(!page.contains("<img") && !page.contains('\u{202E}'));
    assert!(page.contains("<title>&lt;/title&gt;&lt;script&gt;alert(1)"));
}

#[test]
fn ten_runs_stay_below_300_kilobytes() {
    for instances in [16, 60, 256] {
        let runs: Vec<RunResult> = (0..10).map(|seed| rough(seed, instances, 480)).collect();
        let bytes = page(&runs).len();
        assert!(bytes <= 300_000, "{bytes} bytes for ten rough runs of {instances} instances");
    }
    assert!(page(&[rough(1, 256, 480)]).len() <= 300_000);
}

#[test]
fn of_many_runs_the_first_are_drawn_and_all_are_listed() {
    let runs: Vec<RunResult> = (0..40).map(|seed| rough(seed, 4, 50)).collect();
    let page = page(&runs);
    assert!(page.contains(&format!("Charts show the first {MAX_DRAWN} of 40 runs")));
    assert_eq!(page.matches("class=\"cells prefill\"").count(), MAX_DRAWN);
    assert!(page.contains("seed 39"));
    assert!(page.len() <= 500_000, "{} bytes", page.len());
}

#[test]
fn names_say_what_differs() {
    let run = |policy: &str, admission: &str, speed, seed| {
        let mut run = empty(policy);
        (run.admission, run.speed, run.seed) = (admission.into(), speed, seed);
        run
    };
    let of = |runs: &[RunResult]| names::labels(runs);
    assert_eq!(of(&[run("baton", "slo", 1.0, 1), run("random", "none", 1.0, 1)]), ["baton", "random"]);
    assert_eq!(
        of(&[run("baton", "slo", 1.0, 1), run("baton", "slo", 2.5, 1)]),
        ["baton · ×1", "baton · ×2.5"]
    );
    let same = [run("baton", "slo", 1.0, 1), run("baton", "none", 1.0, 1), run("random", "none", 1.0, 1)];
    assert_eq!(of(&same), ["baton · slo", "baton · none", "random"]);
    assert_eq!(
        of(&[run("baton", "slo", 1.0, 1), run("baton", "slo", 1.0, 2)]),
        ["baton · seed 1", "baton · seed 2"]
    );
    assert_eq!(of(&[run("baton", "slo", 1.0, 1), run("baton", "slo", 1.0, 1)]), ["baton · #1", "baton · #2"]);
}

#[test]
fn the_best_of_a_column_is_marked_and_equals_are_not() {
    let (mut a, mut b) = (empty("a"), empty("b"));
    (a.goodput, b.goodput) = (0.4, 0.9521);
    (a.ttft_s.p99, b.ttft_s.p99) = (Some(12.345), Some(1000.0));
    let html = table::summary(&[a, b], &["a".into(), "b".into()]);
    let rows: Vec<&str> = html.split("<tr class=").skip(1).collect();
    assert!(
        rows[1].contains("★</abbr> 95.2 %") && !rows[0].contains("★</abbr> 40.0 %"),
        "more is better for goodput"
    );
    assert!(rows[0].contains("★</abbr> 12.35") && rows[1].contains(">1,000.00<"), "less is better for TTFT");
    assert_eq!(html.matches('★').count(), 2, "equal figures have no best");
    let alone = table::summary(&[empty("a")], &["a".into()]);
    assert!(!alone.contains('★'), "one run has no rival");
}

#[test]
fn a_distribution_ends_at_the_share_that_completed() {
    let mut run = empty("a");
    (run.requests, run.completed, run.rejected) = (100, 50, 50);
    run.ttft_quantiles_s = (0..=100).map(|q| (q as f32 / 100.0, 1.0 + q as f32 / 100.0)).collect();
    let html = curves::latencies(&[run], &["a".into()]);
    let d = html.split("data-name=\"a\" d=\"").nth(1).unwrap().split('"').next().unwrap();
    let last: Vec<f64> = d.rsplit(' ').next().unwrap().split(',').map(|n| n.parse().unwrap()).collect();
    let frame: Vec<f64> = html
        .split("data-frame=\"")
        .nth(1)
        .unwrap()
        .split('"')
        .next()
        .unwrap()
        .split(',')
        .map(|n| n.parse().unwrap())
        .collect();
    assert!(
        (last[1] - (frame[1] + frame[3] / 2.0)).abs() < 0.2,
        "half of the requests completed: {last:?} in {frame:?}"
    );
}

#[test]
fn bars_divide_their_length_by_amounts() {
    let mut run = empty("a");
    (run.requests, run.completed, run.in_slo, run.rejected) = (100, 75, 50, 25);
    let html = parts::outcomes(&[run], &["a".into()]);
    assert!(html.contains("class=\"good\" d=\"M0,0H500V10H0Z\""), "{html}");
    assert!(
        html.contains("class=\"late\" d=\"M500,0H750V10H500Z\"")
            && html.contains("class=\"refused\" d=\"M750,0H1000V10H750Z\"")
    );
    assert!(html.contains("50 <small>50.0 %</small>"));
}

#[test]
fn a_run_with_a_bound_has_a_row_beside_the_best_run() {
    let (run, mut best) = (rough(1, 2, 5), rough(2, 2, 5));
    (best.policy, best.admission, best.in_slo) = ("<best>".into(), "none".into(), 9_500);
    let most = UpperBound { in_slo: 11_000, input_tokens_in_slo: 0 };
    let bound = BoundResult::new(most, &best, &run);
    assert_eq!((bound.gap_to_bound, bound.gap_to_witness), (3_000, 1_500));
    assert!(!page(std::slice::from_ref(&run)).contains("Upper bound"), "only where it was asked for");
    let page = page(&[RunResult { bound: Some(bound), ..run }, empty("other")]);
    let table = page.split("Upper bound and best run").nth(2).unwrap();
    let row = table.split("</tr>").nth(1).unwrap();
    assert!(row.contains("<td>&lt;best&gt;, none</td>"), "{row}");
    for cell in ["8,000", "11,000", "3,000", "9,500", "1,500"] {
        assert!(row.contains(&format!("<td class=\"n\">{cell}</td>")), "{cell} is missing: {row}");
    }
}

#[test]
fn drawings_are_named_or_hidden_from_readers() {
    let page = page(&[rough(1, 4, 20), rough(2, 4, 20)]);
    for svg in page.split("<svg ").skip(1).map(|s| s.split('>').next().unwrap()) {
        let inside = svg.contains("class=\"cells");
        assert!(inside || svg.contains("aria-label=\"") || svg.contains("aria-hidden"), "<svg {svg}>");
    }
    assert!(heat::scale().contains("100%"));
}

/// Every colour of a scheme by its name.
fn scheme(dark: bool) -> Vec<(String, [f64; 3])> {
    let css = include_str!("../page.css");
    let part = if dark { css.split("prefers-color-scheme:dark").nth(1).unwrap() } else { css };
    let block = part.split(":root{").nth(1).unwrap().split('}').next().unwrap();
    let colour = |entry: &str| {
        let (name, hex) = entry.trim().strip_prefix("--")?.split_once(":#")?;
        let wide: String =
            if hex.len() == 3 { hex.chars().flat_map(|c| [c, c]).collect() } else { hex.into() };
        let channel = |at: usize| f64::from(u8::from_str_radix(&wide[at..at + 2], 16).unwrap()) / 255.0;
        Some((name.to_owned(), [channel(0), channel(2), channel(4)]))
    };
    block.split(';').filter_map(colour).collect()
}

fn contrast(a: [f64; 3], b: [f64; 3]) -> f64 {
    let linear = |c: f64| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) };
    let light = |c: [f64; 3]| 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
    let (a, b) = (light(a), light(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

#[test]
fn text_and_lines_stand_out_in_both_schemes() {
    for dark in [false, true] {
        let colours = scheme(dark);
        let of =
            |name: &str| colours.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no --{name}")).1;
        for ground in ["card", "page"] {
            for ink in ["ink", "soft", "best", "bound"] {
                let seen = contrast(of(ink), of(ground));
                assert!(seen >= 4.5, "--{ink} on --{ground} has a contrast of {seen:.2}, dark: {dark}");
            }
        }
        for line in (0..10).map(|k| format!("k{k}")) {
            let seen = contrast(of(&line), of("card"));
            assert!(seen >= 3.0, "--{line} has a contrast of {seen:.2}, dark: {dark}");
        }
        assert!(colours.len() >= 25, "{} colours were read", colours.len());
    }
}

#[test]
fn the_script_reads_the_classes_that_are_drawn() {
    let script = include_str!("../page.js");
    let page = page(&[rough(1, 4, 20)]);
    for (selector, drawn) in [
        ("svg.chart", "class=\"chart\""),
        ("svg.cells", "class=\"cells "),
        ("path.axis", "class=\"axis\""),
        (".bed", "class=\"bed\""),
    ] {
        assert!(script.contains(selector) && page.contains(drawn), "{selector}");
    }
}

#[test]
fn a_page_has_the_largest_tenants_and_the_sum_of_the_others() {
    let mut run = rough(1, 4, 20);
    assert!(!page(std::slice::from_ref(&run)).contains("<h3>Tenants"), "no request names one");
    let tenant = |at: u64| TenantResult {
        name: format!("<{at}>"),
        requests: 100 - at,
        in_slo: 50,
        attained: Some(0.5),
        ..TenantResult::default()
    };
    run.tenants = (0..23).map(tenant).collect();
    let page = page(&[run]);
    let row = |title: &str| page.contains(&format!("<td>{title}</td>"));
    assert!(row("&lt;0&gt;") && row("&lt;19&gt;") && row("3 others") && !row("&lt;20&gt;"));
}
