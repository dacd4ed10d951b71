//! Ends of requests of two classes, as the counters and the status tell them.

use std::collections::BTreeMap;

use baton_router::{Backend as _, Event, Submission};
use baton_scheduler::PredictionPath;
use baton_types::{RequestObjectives, Sampling, SloClass};

use super::bench::{Bench, failure};
use crate::conductor::slo::SloStatus;

/// Two nodes, and beside the default class (2 s, 100 ms) one of 500 ms and 50 ms.
async fn bench() -> Bench {
    Bench::tuned(&["p0", "d0"], |config| {
        let gold = SloClass { name: "gold".into(), ttft_us: 500_000, tbt_us: 50_000, ..SloClass::default() };
        config.scheduler.classes.push(gold);
    })
    .await
}

fn submission(name: &str, class: &str, max_tokens: u32) -> Submission {
    let sampling = Sampling { max_tokens, ..Sampling::default() };
    Submission { class: Some(class.into()), ..Bench::submission(name, sampling) }
}

/// Counts other than zero, by class and outcome.
fn counts(bench: &Bench) -> BTreeMap<(String, String), u64> {
    let page = bench.driver.metrics.page();
    let series = page.lines().filter_map(|line| line.strip_prefix("baton_slo_requests_total{class=\""));
    let series = series.map(|line| {
        let (class, rest) = line.split_once("\",outcome=\"").unwrap();
        let (outcome, count) = rest.split_once("\"} ").unwrap();
        ((class.to_owned(), outcome.to_owned()), count.parse().unwrap())
    });
    series.filter(|(_, count)| *count > 0).collect()
}

fn value(bench: &Bench, series: &str) -> Option<f64> {
    let page = bench.driver.metrics.page();
    page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

/// Serves a request. Its first token comes after `ttft_us`, and each later one `gap_us` after the one before.
async fn serve(bench: &mut Bench, name: &str, (ttft_us, gap_us): (u64, u64)) {
    bench.wait_alive_us(ttft_us, &[]).await;
    bench.do_prefill(name).await;
    bench.do_handoff(name).await;
    for upto in 2..=bench.client(name).max_tokens {
        bench.wait_alive_us(gap_us, &[]).await;
        bench.do_decode(name, upto).await;
    }
    bench.ended_well(name);
}

#[tokio::test]
async fn each_stage_that_ended_well_is_in_the_histogram_of_its_role_and_nodes_have_gauges() {
    let mut bench = bench().await;
    bench.send(submission("a", "gold", 4)).await;
    bench.send(submission("left", "gold", 4)).await;
    bench.leave("left").await;
    bench.wait_alive_us(300_000, &[]).await;
    bench.do_prefill("a").await;
    bench.wait_alive_us(40_000, &[]).await;
    bench.do_handoff("a").await;
    for upto in 2..=4 {
        bench.wait_alive_us(15_000, &[]).await;
        bench.do_decode("a", upto).await;
    }
    // The request that left was not prefilled, and the canary does not count.
    let stages = [
        ("queue", "prefill", 2, 0.0),
        ("prefill", "prefill", 1, 0.3),
        ("handoff", "decode", 1, 0.04),
        ("decode_step", "decode", 1, 0.015),
    ];
    for (stage, role, count, sum) in stages {
        let of =
            |what| value(&bench, &format!("baton_stage_seconds_{what}{{stage=\"{stage}\",role=\"{role}\"}}"));
        assert_eq!(of("count"), Some(f64::from(count)), "{stage}: {}", bench.driver.metrics.page());
        assert!((of("sum").unwrap() - sum).abs() < 1e-3, "{stage}: {:?}", of("sum"));
    }
    for (role, node) in [("prefill", "p0"), ("decode", "d0")] {
        assert_eq!(value(&bench, &format!("baton_nodes{{role=\"{role}\",state=\"serving\"}}")), Some(1.0));
        let backlog = format!("baton_node_backlog_seconds{{node=\"{node}\",role=\"{role}\"}}");
        assert!(value(&bench, &backlog).is_some());
    }
}

/// A request of class gold with objectives of its own, ms.
fn named(name: &str, ttft_ms: Option<u64>, tbt_ms: Option<u64>) -> Submission {
    let us = |ms: Option<u64>| ms.map(|ms| ms * 1_000);
    let objectives = RequestObjectives { ttft_us: us(ttft_ms), tbt_us: us(tbt_ms) };
    Submission { objectives, ..submission(name, "gold", 4) }
}

#[tokio::test]
async fn a_request_is_judged_by_the_objectives_that_it_named() {
    let mut bench = bench().await;
    for (name, ttft_ms, tbt_ms, times) in [
        ("tight", Some(300), None, (400_000, 40_000)),
        ("loose", Some(700), Some(95), (600_000, 90_000)),
        ("patient", Some(700), None, (600_000, 90_000)),
        ("steady", None, Some(95), (400_000, 90_000)),
    ] {
        bench.send(named(name, ttft_ms, tbt_ms)).await;
        serve(&mut bench, name, times).await;
    }
    let gold = |outcome: &str, count| (("gold".to_owned(), outcome.to_owned()), count);
    let expected = BTreeMap::from([gold("in_slo", 2), gold("late_ttft", 1), gold("late_tbt", 1)]);
    assert_eq!(counts(&bench), expected);
}

#[tokio::test]
async fn an_objective_that_cannot_be_kept_is_refused_with_its_header() {
    let mut bench = bench().await;
    bench.send(named("short", None, Some(49))).await;
    let long = Submission { tokens: vec![5; 60_000].into(), ..named("soon", Some(1), None) };
    bench.send(long).await;
    bench.send(Submission { class_param: Some("x-slo-class"), ..submission("odd", "silver", 4) }).await;
    for (name, reason, param, part) in [
        ("short", "objective_unreachable", "x-slo-tbt-ms", "ask for 50 ms or more"),
        ("soon", "objective_unreachable", "x-slo-ttft-ms", "a first token within 1 ms and 50 ms between"),
        ("odd", "unknown_class", "x-slo-class", "default, gold"),
    ] {
        let Some(Event::Refused(refused)) = &bench.client(name).last else { panic!("{name} is refused") };
        assert_eq!((refused.status, &*refused.reason, refused.param), (400, reason, Some(param)));
        assert!(refused.message.contains(part) && refused.retry_after_us.is_none(), "{refused:?}");
    }
}

#[tokio::test]
async fn each_request_ends_in_one_outcome_of_its_class() {
    let mut bench = bench().await;
    let served = [
        ("a", "gold", (400_000, 40_000)),
        // A late first token counts before late gaps.
        ("b", "gold", (600_000, 90_000)),
        ("c", "gold", (400_000, 90_000)),
        ("d", "default", (600_000, 90_000)),
        ("e", "default", (600_000, 40_000)),
    ];
    for (name, class, times) in served {
        bench.send(submission(name, class, 4)).await;
        serve(&mut bench, name, times).await;
    }
    for class in ["gold", "default"] {
        bench.send(Submission { tokens: vec![5; 70_000].into(), ..submission(class, class, 4) }).await;
        assert_eq!(bench.client(class).trouble().1, "too_long");
    }
    bench.send(Submission { tokens: Default::default(), ..submission("empty", "gold", 4) }).await;
    bench.send(submission("unknown", "silver", 4)).await;
    bench.send(submission("left", "gold", 4)).await;
    bench.leave("left").await;

    let of = |class: &str, outcome: &str, count: u64| ((class.to_owned(), outcome.to_owned()), count);
    let expected = BTreeMap::from([
        of("gold", "in_slo", 1),
        of("gold", "late_ttft", 1),
        of("gold", "late_tbt", 1),
        of("gold", "refused", 2),
        of("gold", "cancelled", 1),
        of("default", "in_slo", 2),
        of("default", "refused", 1),
        of("unknown", "refused", 1),
    ]);
    assert_eq!(counts(&bench), expected, "the canary is not counted");
    // Its gaps are 40, 40 and 40 ms, or 90 ms.
    assert_eq!(value(&bench, "baton_request_tbt_seconds_bucket{class=\"gold\",le=\"0.05\"}"), Some(1.0));
    assert_eq!(value(&bench, "baton_request_tbt_seconds_count{class=\"gold\"}"), Some(3.0));
    assert_eq!(value(&bench, "baton_ttft_seconds_count{class=\"gold\"}"), Some(3.0));
    assert_eq!(value(&bench, "baton_ttft_seconds_count{class=\"default\"}"), Some(2.0), "without the canary");

    let gold = SloStatus {
        class: "gold".into(),
        target: 0.995,
        ttft_attained: Some(2.0 / 3.0),
        requests: 6,
        in_slo: 1,
        in_slo_prompt_tokens: submission("a", "gold", 4).tokens.len() as u64,
        in_slo_output_tokens: 4,
        late_ttft: 1,
        late_tbt: 1,
        late_e2e: 0,
        refused: 2,
        failed: 0,
        cancelled: 1,
        attained_5m: Some(0.2),
        attained_1h: Some(0.2),
        last_15m: Vec::new(),
        predictions: Vec::new(),
    };
    let status = bench.status();
    let predictions = status.slo[1].predictions.clone();
    let by_minute = &status.slo[1].last_15m;
    let sums = by_minute.iter().fold((0, 0), |sums, minute| (sums.0 + minute.0, sums.1 + minute.1));
    assert_eq!((by_minute.len(), sums), (15, (1, 5)));
    assert_eq!(SloStatus { predictions: Vec::new(), last_15m: Vec::new(), ..status.slo[1].clone() }, gold);
    let [path] = predictions[..] else { panic!("one path: {predictions:?}") };
    assert_eq!((path.path, path.ttft.requests), (PredictionPath::Prefill, 3));
    // A prefill takes about a millisecond by the profile.
    assert!(path.ttft.bias.is_some_and(|bias| bias > 30.0), "{path:?}");
    assert_eq!((path.ttft.covered, path.ttft.target), (Some(0.0), 0.9), "{path:?}");
    assert_eq!((path.tbt.requests, path.decode_start.requests, path.output_tokens.requests), (3, 3, 3));
    assert!(
        path.tbt.bias.is_some_and(|bias| bias > 1.0),
        "a step takes two milliseconds by the profile: {path:?}"
    );
    let ratios = "baton_prediction_error_ratio_count{class=\"gold\",path=\"prefill\",target=\"ttft\"}";
    assert_eq!(value(&bench, ratios), Some(3.0));
    let covered =
        "baton_prediction_covered_total{class=\"gold\",path=\"prefill\",target=\"ttft\",covered=\"false\"}";
    assert_eq!(value(&bench, covered), Some(3.0));
    assert_eq!((status.slo[0].class.as_str(), status.slo[0].requests), ("default", 3));
    bench.quiet();
}

#[tokio::test]
async fn an_answer_that_ends_late_is_told_from_one_with_late_tokens() {
    let mut bench = Bench::tuned(&["p0", "d0"], |config| {
        config.scheduler.classes[0].e2e_us = 1_000_000;
    })
    .await;
    for (name, max_tokens, times) in [
        ("in time", 4, (400_000, 90_000)),
        ("late end", 9, (400_000, 90_000)),
        // Late gaps count before a late end.
        ("late gaps", 9, (400_000, 200_000)),
    ] {
        bench.send(submission(name, "default", max_tokens)).await;
        serve(&mut bench, name, times).await;
    }
    // A client that waits beyond the objective does not make the service look better.
    for (name, wait_us) in [("patient", 1_100_000), ("left", 900_000)] {
        bench.send(submission(name, "default", 9)).await;
        bench.do_prefill(name).await;
        bench.do_handoff(name).await;
        bench.wait_alive_us(wait_us, &[]).await;
        bench.leave(name).await;
    }
    let of = |outcome: &str, count: u64| (("default".to_owned(), outcome.to_owned()), count);
    let expected =
        BTreeMap::from([of("in_slo", 1), of("late_e2e", 2), of("late_tbt", 1), of("cancelled", 1)]);
    assert_eq!(counts(&bench), expected);
    let status = bench.status().slo.remove(0);
    assert_eq!((status.late_e2e, status.ttft_attained, status.in_slo_output_tokens), (2, Some(1.0), 4));
    let tokens = |kind: &str| format!("baton_slo_tokens_total{{class=\"default\",kind=\"{kind}\"}}");
    assert_eq!(value(&bench, &tokens("output")), Some(4.0));
    assert_eq!(value(&bench, &tokens("prompt")), Some(status.in_slo_prompt_tokens as f64));
    bench.quiet();
}

#[tokio::test]
async fn who_ended_a_request_decides_whether_it_was_served_failed_or_cancelled() {
    let mut bench = bench().await;
    // The front door has seen a stop string: it drops the guard and reads on.
    bench.send(submission("stopped", "gold", 9)).await;
    bench.do_prefill("stopped").await;
    bench.do_handoff("stopped").await;
    bench.do_decode("stopped", 2).await;
    let mut ticket = bench.clients.get_mut("stopped").unwrap().ticket.take().unwrap();
    ticket.guard = Box::new(());
    bench.pump().await;
    assert!(matches!(ticket.events.recv().await, Some(Event::Finished { .. })));
    assert_eq!(counts(&bench).into_values().sum::<u64>(), 1, "{:?}", counts(&bench));

    // The engine calls its input invalid.
    bench.send(submission("invalid", "gold", 9)).await;
    let leg = bench.prefill("invalid");
    bench.send_facts(&leg, vec![failure(true)]).await;
    // Its client waits for less than the objective.
    bench.send(Submission { timeout_us: Some(300_000), ..submission("hurried", "gold", 9) }).await;
    bench.wait_alive_us(400_000, &[]).await;
    assert_eq!(bench.client("hurried").trouble().0, 504);
    // Its client gives up after the objective.
    bench.send(submission("patient", "gold", 9)).await;
    bench.wait_alive_us(600_000, &[]).await;
    bench.leave("patient").await;
    // Each attempt fails.
    bench.send(submission("broken", "gold", 9)).await;
    while bench.client("broken").last.is_none() {
        let leg = bench.prefill("broken");
        bench.send_facts(&leg, vec![failure(false)]).await;
    }
    let of = |outcome: &str, count: u64| (("gold".to_owned(), outcome.to_owned()), count);
    let expected = BTreeMap::from([of("in_slo", 1), of("cancelled", 2), of("late_ttft", 1), of("failed", 1)]);
    assert_eq!(counts(&bench), expected);
    assert!(bench.door.readiness().ready);
}
