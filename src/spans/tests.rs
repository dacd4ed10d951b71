//! Stories without a cluster: when stages end, what is sampled, what a full queue does, what it costs.

use std::time::{Duration, Instant, UNIX_EPOCH};

use baton_http::Identity;
use http::StatusCode;
use opentelemetry::trace::Status;
use opentelemetry_sdk::trace::SpanData;

use super::collector::{Collector, Log};
use super::*;

fn place(stage: &'static str, attempt: u32) -> Place {
    let (prefill, decode) = (Some("p0".into()), Some("d0".into()));
    Place { stage, attempt, prefill, decode }
}

fn story() -> Story {
    Story::new((7, 8, Some(9)), 1_000, UNIX_EPOCH + Duration::from_secs(1))
}

fn ended(mut story: Story, outcome: &'static str) -> Vec<SpanData> {
    story.end(9_000, Summary { outcome, ..Summary::default() });
    shape::spans(&story)
}

/// Name, attempt, start and end in µs since the arrival, and whether it failed.
fn told(spans: &[SpanData]) -> Vec<(String, i64, u128, u128, bool)> {
    let arrived = spans[0].start_time;
    let since = |at: SystemTime| at.duration_since(arrived).unwrap().as_micros();
    let attempt = |span: &SpanData| {
        let found = span.attributes.iter().find(|a| a.key.as_str() == "baton.attempt").unwrap();
        if let opentelemetry::Value::I64(number) = found.value { number } else { panic!("{found:?}") }
    };
    let one = |span: &SpanData| {
        let failed = matches!(span.status, Status::Error { .. });
        (span.name.to_string(), attempt(span), since(span.start_time), since(span.end_time), failed)
    };
    spans[1..].iter().map(one).collect()
}

fn line(name: &str, attempt: i64, span: (u128, u128), failed: bool) -> (String, i64, u128, u128, bool) {
    (name.to_owned(), attempt, span.0, span.1, failed)
}

#[test]
fn stages_follow_each_other() {
    let mut story = story();
    for (at_us, stage) in [(1_500, "prefill"), (3_000, "handoff"), (3_400, "decode")] {
        story.enter(place(stage, 1), at_us);
    }
    story.first_token(2_800);
    story.first_token(3_500);
    let spans = ended(story, "completed");
    let expected = [
        line("queue", 1, (0, 500), false),
        line("prefill", 1, (500, 2_000), false),
        line("handoff", 1, (2_000, 2_400), false),
        line("decode", 1, (2_400, 8_000), false),
    ];
    assert_eq!(told(&spans), expected);
    assert_eq!(spans[0].end_time, UNIX_EPOCH + Duration::from_micros(1_008_000));
    let first = &spans[0].events.events[0];
    let at = UNIX_EPOCH + Duration::from_micros(1_001_800);
    assert_eq!((first.name.as_ref(), first.timestamp, spans[0].events.len()), ("first_token", at, 1));
}

#[test]
fn a_failure_ends_a_stage_only_when_another_attempt_follows() {
    let mut story = story();
    story.enter(place("prefill", 1), 1_000);
    story.failed("node_lost", 2_000);
    story.enter(place("handoff", 1), 3_000);
    story.failed("handoff", 4_000);
    story.enter(place("prefill", 2), 5_000);
    story.failed("engine", 6_000);
    story.enter(Place { prefill: None, decode: None, ..place("queue", 3) }, 6_500);
    story.enter(place("prefill", 3), 7_000);
    let spans = ended(story, "completed");
    let expected = [
        line("queue", 1, (0, 0), false),
        line("prefill", 1, (0, 2_000), false),
        line("handoff", 1, (2_000, 3_000), true),
        line("queue", 2, (3_000, 4_000), false),
        line("prefill", 2, (4_000, 5_000), true),
        line("queue", 3, (5_000, 6_000), false),
        line("prefill", 3, (6_000, 8_000), false),
    ];
    assert_eq!(told(&spans), expected);
    let retries = spans[0].events.iter().filter(|event| event.name == "retry").count();
    assert_eq!((retries, spans[0].status.clone()), (2, Status::Unset));
    assert_eq!(spans[2].events[0].name, "failure", "told even where it did no harm");
}

#[test]
fn a_request_that_failed_says_at_which_stage() {
    let mut story = story();
    story.enter(place("prefill", 1), 1_000);
    story.failed("prefill_timeout", 4_000);
    story.reason("prefill_failed");
    let spans = ended(story, "failed");
    assert_eq!(told(&spans)[1], line("prefill", 1, (0, 3_000), true));
    assert_eq!(spans[0].status, Status::error("prefill_failed"));
}

#[test]
fn an_instance_hands_nothing_over_to_itself_and_endless_retries_are_cut_short() {
    let mut alone = story();
    for (at_us, stage) in [(1_500, "prefill"), (3_000, "handoff"), (3_000, "decode")] {
        alone.enter(Place { decode: Some("p0".into()), ..place(stage, 1) }, at_us);
    }
    let names: Vec<String> = told(&ended(alone, "completed")).into_iter().map(|span| span.0).collect();
    assert_eq!(names, ["queue", "prefill", "decode"]);

    let mut restless = story();
    for attempt in 1..=1_000 {
        restless.enter(place("prefill", attempt), 1_000 + u64::from(attempt));
    }
    let spans = ended(restless, "cancelled");
    assert!(spans.len() <= 65 && spans[0].events.len() <= 65, "{} spans", spans.len());
    assert!(spans[0].attributes.iter().any(|a| a.key.as_str() == "baton.untold_stages"));
}

fn tracing_to(endpoint: &str, trace_permille: u32) -> (Spans, Option<ExportTask>) {
    let otlp_endpoint = endpoint.to_owned();
    let config = ServiceConfig { otlp_endpoint, trace_permille, ..ServiceConfig::default() };
    Spans::start(&config, "test").unwrap()
}

#[tokio::test]
async fn the_callers_word_goes_before_the_configured_share() {
    let (mut spans, exporting) = tracing_to("http://127.0.0.1:1", 100);
    let drawn = (0..20_000).filter(|_| spans.open(None, 0).is_kept()).count();
    assert!((1_800..2_200).contains(&drawn), "{drawn} of 20000 at 100 per mille");
    for sampled in [true, false] {
        let parent = TraceParent { trace_id: 5, span_id: 6, sampled };
        for permille in [0, 1_000] {
            spans.permille = permille;
            let trace = spans.open(Some(parent), 0);
            assert_eq!((trace.is_kept(), trace.id()), (sampled, Some(format!("{:032x}", 5))));
        }
    }
    drop(spans);
    exporting.unwrap().stop().await;

    let (mut off, none) = tracing_to("", 1_000);
    assert!(none.is_none());
    let (trace, named) = (off.open(None, 0), TraceParent { trace_id: 5, span_id: 6, sampled: true });
    assert!(!trace.is_kept() && trace.id().is_none());
    assert_eq!(off.open(Some(named), 0).id(), Some(format!("{:032x}", 5)));
}

/// Records one request from its arrival to its end, as the conductor does.
fn pass(spans: &mut Spans, parent: Option<TraceParent>) {
    let mut trace = spans.open(parent, 0);
    for (at_us, stage) in [(10, "prefill"), (20, "handoff"), (30, "decode")] {
        if trace.is_kept() {
            trace.enter(place(stage, 1), at_us);
        }
    }
    trace.first_token(25);
    if trace.is_kept() {
        let summary = Summary { class: "interactive".into(), outcome: "completed", ..Summary::default() };
        spans.close(&mut trace, 40, summary);
    }
}

/// It takes connections and never says a word.
#[tokio::test]
async fn a_collector_that_hangs_costs_spans_and_nothing_else() {
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for path in ["", "/v1/traces"] {
        let endpoint = format!("http://{}{path}", deaf.local_addr().unwrap());
        let (mut spans, exporting) = tracing_to(&endpoint, 1_000);
        let started = Instant::now();
        for _ in 0..QUEUED_STORIES * 2 {
            pass(&mut spans, None);
            if spans.counts.read().1 > 0 {
                break;
            }
        }
        // Nothing but the queue's bound is waited for, and the bound is not waited for either.
        assert!(started.elapsed() < Duration::from_secs(5), "{endpoint}: {:?}", started.elapsed());
        assert_eq!(spans.counts.read(), (0, 5), "{endpoint}: the first that found the queue full, in spans");
        let stopping = Instant::now();
        exporting.unwrap().stop().await;
        assert!(stopping.elapsed() < Duration::from_secs(2), "{endpoint}: {:?}", stopping.elapsed());
    }
}

#[tokio::test]
async fn what_is_queued_leaves_before_the_end() {
    for collector in [Collector::start().await, Collector::start_http().await] {
        let (mut spans, exporting) = tracing_to(&collector.endpoint(), 1_000);
        (0..300).for_each(|_| pass(&mut spans, None));
        exporting.unwrap().stop().await;
        assert_eq!(spans.counts.read(), (1_500, 0));
        let ids: std::collections::BTreeSet<Vec<u8>> =
            collector.spans().into_iter().map(|span| [span.trace_id, span.span_id].concat()).collect();
        assert_eq!(ids.len(), 1_500, "every span has a name of its own");
    }
}

/// A way to `collector` by TLS, and the file of the certificate that it shows.
async fn secured(collector: &Collector, folder: &std::path::Path) -> (String, std::path::PathBuf) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.join("ca.pem"), folder.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let acceptor = Identity::of_files(&certificate, &key).unwrap().acceptor();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = collector.endpoint();
    let (host, path) = endpoint.trim_start_matches("http://").split_once('/').unwrap();
    let (host, port) = (host.to_owned(), listener.local_addr().unwrap().port());
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(mut secured) = acceptor.accept(stream).await else { continue };
            let mut plain = tokio::net::TcpStream::connect(&host).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut secured, &mut plain).await });
        }
    });
    (format!("https://localhost:{port}/{path}"), certificate)
}

#[tokio::test]
async fn spans_leave_by_tls_for_a_collector_that_is_trusted() {
    let (collector, folder) = (Collector::start_http().await, tempfile::tempdir().unwrap());
    let (otlp_endpoint, file) = secured(&collector, folder.path()).await;
    let config = ServiceConfig { otlp_endpoint, trace_permille: 1_000, ..ServiceConfig::default() };
    for (trust, expected) in [(Trust::of_file(&file).unwrap(), (5, 0)), (Trust::nobody(), (0, 5))] {
        let (log, _guard) = Log::keep();
        let (mut spans, exporting) = Spans::start_trusting(|| trust, &config, "test").unwrap();
        assert_eq!(pass_alone(&mut spans).await, expected, "{}", log.text());
        exporting.unwrap().stop().await;
        assert_eq!(log.text().contains("no certificates to trust"), expected.1 > 0, "{}", log.text());
    }
    assert_eq!(collector.spans().len(), 5);
}

/// Sends one request's spans and waits until the collector has them or they are lost.
async fn pass_alone(spans: &mut Spans) -> (u64, u64) {
    let before = spans.counts.read();
    pass(spans, None);
    for _ in 0..1_000 {
        if spans.counts.read() != before {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    spans.counts.read()
}

/// One thread runs everything, so that one thread's log contains everything.
#[tokio::test]
async fn a_collector_that_refuses_is_asked_again_where_that_helps_and_the_log_says_why() {
    let (log, _guard) = Log::keep();
    let answers = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::NOT_FOUND, StatusCode::BAD_REQUEST];
    let collector = Collector::start_refusing(&answers).await;
    let (mut spans, exporting) = tracing_to(&collector.endpoint(), 1_000);
    // The first batch meets two answers: one that may be different the next time, and one that will not.
    assert_eq!(pass_alone(&mut spans).await, (0, 5));
    assert_eq!(pass_alone(&mut spans).await, (0, 10), "a batch that is refused for good is not sent again");
    assert_eq!(pass_alone(&mut spans).await, (5, 10));
    assert_eq!(collector.spans().len(), 5);
    exporting.unwrap().stop().await;
    let logged = log.text();
    let lines: Vec<&str> =
        logged.lines().filter(|line| line.contains("spans cannot be sent by HTTP")).collect();
    assert!(lines.len() == 1 && lines[0].contains("404"), "one word until it is back: {logged}");
    assert!(lines[0].contains(&collector.endpoint()), "{logged}");
    assert!(logged.contains("the collector takes spans again"), "{logged}");
}

/// The commonest mistake: the port of one protocol, the form of the other.
#[tokio::test]
async fn a_collector_of_the_other_protocol_is_reported_with_both_forms() {
    let (grpc, http) = (Collector::start().await, Collector::start_http().await);
    let bare = http.endpoint().replace("/v1/traces", "");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (endpoint, protocol, why) in [
        (bare, "by gRPC", "gRPC code: "),
        (format!("{}/v1/traces", grpc.endpoint()), "by HTTP", "network error: "),
        (format!("http://{free}/v1/traces"), "by HTTP", "Connection refused"),
    ] {
        let (log, _guard) = Log::keep();
        let (mut spans, exporting) = tracing_to(&endpoint, 1_000);
        assert_eq!(pass_alone(&mut spans).await, (0, 5), "{endpoint}");
        exporting.unwrap().stop().await;
        let logged = log.text();
        let line = logged.lines().find(|line| line.contains("spans cannot be sent")).unwrap();
        assert!(
            [protocol, why, &endpoint, "(without a path)"].iter().all(|word| line.contains(word)),
            "{line}"
        );
    }
}

#[tokio::test]
#[ignore = "a measurement; run it alone: cargo test -p baton --bin baton -- --ignored --nocapture cost_of"]
async fn cost_of_the_hook() {
    const REQUESTS: u32 = 100_000;
    let collector = Collector::start().await;
    for (name, endpoint, permille) in [
        ("off", String::new(), 0),
        ("0 %", collector.endpoint(), 0),
        ("10 %", collector.endpoint(), 100),
        ("100 %", collector.endpoint(), 1_000),
    ] {
        let (mut spans, exporting) = tracing_to(&endpoint, permille);
        let (mut busy, begun) = (Duration::ZERO, Instant::now());
        for _ in 0..REQUESTS / 100 {
            let started = Instant::now();
            (0..100).for_each(|_| pass(&mut spans, None));
            busy += started.elapsed();
            // All is sent, so that sending is part of the second figure and dropping of none.
            while spans.stories.as_ref().is_some_and(|queue| queue.capacity() < QUEUED_STORIES / 2) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        if let Some(exporting) = exporting {
            exporting.stop().await;
        }
        let (each_ns, all_ns) =
            (busy.as_nanos() / u128::from(REQUESTS), begun.elapsed().as_nanos() / u128::from(REQUESTS));
        let counts = spans.counts.read();
        println!("{name}: {each_ns} ns a request, {all_ns} ns with sending and the collector; {counts:?}");
        assert!(each_ns < 50_000 && counts.1 == 0, "{name}: {each_ns} ns a request, {counts:?}");
    }
}
