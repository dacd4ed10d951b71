//! Traces of requests that pass through a cluster, as a collector gets them.

use std::time::{Duration, Instant};

use baton_engine::PoolSpec;
use baton_router::TraceParent;
use baton_types::{Role, Sampling};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;

use super::cluster::{Cluster, SECRET, listen, small_model};
use crate::config::Config;
use crate::node::EngineChoice;
use crate::spans::collector::{Collector, Log, number, text};

const PARENT: TraceParent = TraceParent { trace_id: 0xabcd << 64 | 0x1234, span_id: 0x77, sampled: true };

fn engine() -> EngineChoice {
    small_model(PoolSpec { block_tokens: 16, blocks: 256, pass_tokens: 48, max_running: 16, threads: None })
}

fn tracing_to(endpoint: String, permille: u32) -> impl FnOnce(&mut Config) {
    move |config| {
        config.service.otlp_endpoint = endpoint;
        config.service.trace_permille = permille;
    }
}

fn sampling(max_tokens: u32) -> Sampling {
    Sampling { max_tokens, ignore_eos: true, ..Sampling::default() }
}

fn prompt() -> Vec<u32> {
    (0..70).map(|at| 100 + at % 90).collect()
}

/// All that must hold of any trace: one id, children of the root, in order, within its time.
fn check_shape(root: &Span, below: &[Span]) {
    let inside = root.start_time_unix_nano..=root.end_time_unix_nano;
    for span in below {
        assert_eq!(span.trace_id, root.trace_id);
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        assert!(inside.contains(&span.start_time_unix_nano) && inside.contains(&span.end_time_unix_nano));
    }
    for pair in below.windows(2) {
        assert!(pair[0].end_time_unix_nano <= pair[1].start_time_unix_nano, "{pair:?}");
    }
    assert!(root.events.iter().all(|event| inside.contains(&event.time_unix_nano)), "{root:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_told_stage_by_stage_over_grpc() {
    told_without_a_word_of_it(Collector::start().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_told_stage_by_stage_over_http() {
    told_without_a_word_of_it(Collector::start_http().await).await;
}

async fn told_without_a_word_of_it(collector: Collector) {
    let trace = tracing_to(collector.endpoint(), 0);
    let tune = |config: &mut Config| {
        trace(config);
        // Else a busy machine makes the decode instance the quicker one, and there is no hand-off.
        config.scheduler.local_prefill = false;
    };
    let cluster = Cluster::start("1p1d", &engine(), tune).await;
    let before = std::time::SystemTime::now();
    let answer = listen(cluster.submit_as("traced", &prompt(), sampling(9), Some(PARENT))).await;
    assert_eq!((answer.trouble, answer.tokens.len()), (None, 9));
    let took = before.elapsed().unwrap();

    let (root, below) = collector.trace_of("traced").await;
    check_shape(&root, &below);
    assert_eq!(root.trace_id, PARENT.trace_id.to_be_bytes());
    assert_eq!(
        (root.name.as_str(), root.parent_span_id.as_slice()),
        ("request", &[0, 0, 0, 0, 0, 0, 0, 0x77][..])
    );
    let since = u128::from(root.start_time_unix_nano)
        .checked_sub(before.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos());
    let lasted_ns = u128::from(root.end_time_unix_nano - root.start_time_unix_nano);
    assert!(since.is_some_and(|ns| ns < took.as_nanos()) && lasted_ns <= took.as_nanos() + 100_000_000);

    let names: Vec<&str> = below.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["queue", "prefill", "handoff", "decode"]);
    let of = |at: usize, key: &str| text(&below[at], key);
    assert_eq!(
        (of(1, "baton.instance").as_deref(), of(3, "baton.instance").as_deref()),
        (Some("p0"), Some("d0"))
    );
    assert_eq!((of(2, "baton.from").as_deref(), of(2, "baton.to").as_deref()), (Some("p0"), Some("d0")));
    let numbers = ["prompt_tokens", "output_tokens", "cached_tokens", "moves", "attempts"];
    let told: Vec<_> = numbers.iter().map(|key| number(&root, &format!("baton.{key}"))).collect();
    assert_eq!(told, [70, 9, 0, 0, 1].map(Some));
    let words = ["outcome", "class", "prefill", "decode", "tenant"];
    let told: Vec<_> = words.iter().map(|key| text(&root, &format!("baton.{key}"))).collect();
    let class = cluster.config.scheduler.classes[0].name.as_str();
    assert_eq!(told, ["completed", class, "p0", "d0", "acme"].map(|word| Some(word.to_owned())));
    let first = root.events.iter().find(|event| event.name == "first_token").unwrap();
    assert!(first.time_unix_nano > below[1].start_time_unix_nano, "{root:?}");

    // The canary was not drawn, nor is anybody whose caller does not ask for it.
    let unasked = TraceParent { trace_id: 99, sampled: false, ..PARENT };
    for (name, parent) in [("unasked", Some(unasked)), ("alone", None)] {
        assert_eq!(listen(cluster.submit_as(name, &prompt(), sampling(3), parent)).await.trouble, None);
    }
    cluster.quiet().await;
    cluster.stop().await;
    assert_eq!(collector.spans().len(), 5, "{}", collector.received_text());
    let instance = collector.resource("service.instance.id");
    assert_eq!(instance, Some(Value::StringValue("cluster".into())));
    let received_text = collector.received_text();
    assert!(!received_text.contains(SECRET) && !received_text.contains("[100, 101"), "{received_text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retried_request_has_two_attempts() {
    let collector = Collector::start().await;
    let mut cluster = Cluster::start("1p1d", &engine(), tracing_to(collector.endpoint(), 1_000)).await;
    let mut ticket = cluster.submit_as("retried", &prompt(), sampling(400), None);
    let mut seen = 0;
    while seen < 3 {
        seen += u32::from(matches!(ticket.events.recv().await, Some(baton_router::Event::Token { .. })));
    }
    cluster.kill("d0").await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    cluster.add("d0", Role::Decode, &engine());
    let answer = listen(ticket).await;
    assert_eq!((answer.trouble, answer.tokens.len()), (None, 397));

    let (root, below) = collector.trace_of("retried").await;
    check_shape(&root, &below);
    assert!(root.parent_span_id.is_empty(), "nobody called: {root:?}");
    let attempts = |name: &str| -> Vec<i64> {
        below
            .iter()
            .filter(|span| span.name == name)
            .filter_map(|span| number(span, "baton.attempt"))
            .collect()
    };
    assert_eq!((attempts("prefill"), attempts("decode")), (vec![1, 2], vec![1, 2]), "{below:?}");
    assert_eq!(attempts("queue"), [1, 2], "it waited for the instance to come back");
    let broken: Vec<&Span> =
        below.iter().filter(|span| span.status.as_ref().is_some_and(|status| status.code == 2)).collect();
    assert_eq!(broken.len(), 1, "{below:?}");
    let failure = &broken[0].events[0];
    assert_eq!((broken[0].name.as_str(), failure.name.as_str()), ("decode", "failure"));
    assert_eq!(failure.time_unix_nano, broken[0].end_time_unix_nano);
    assert_eq!(root.events.iter().filter(|event| event.name == "retry").count(), 1);
    assert_eq!((number(&root, "baton.attempts"), number(&root, "baton.moves")), (Some(2), Some(1)));
    cluster.quiet().await;
    cluster.stop().await;
}

/// One thread runs everything, so that one thread's log contains everything.
#[tokio::test]
async fn a_failure_is_found_in_the_log_by_its_trace() {
    let (log, _guard) = Log::keep();
    let collector = Collector::start().await;
    let tune = |config: &mut Config| {
        tracing_to(collector.endpoint(), 0)(config);
        config.scheduler.max_retries = 0;
    };
    let mut cluster = Cluster::start("1p1d", &engine(), tune).await;
    let mut ticket = cluster.submit_as("lost", &prompt(), sampling(400), Some(PARENT));
    while !matches!(ticket.events.recv().await, Some(baton_router::Event::Token { .. })) {}
    while !matches!(ticket.events.recv().await, Some(baton_router::Event::Token { .. })) {}
    cluster.kill("d0").await;
    let trouble = listen(ticket).await.trouble.unwrap();
    assert!(trouble.contains("decode_lost"), "{trouble}");

    let (root, below) = collector.trace_of("lost").await;
    check_shape(&root, &below);
    let told = [text(&root, "baton.outcome"), text(&root, "baton.reason")];
    assert_eq!(told, ["failed", "decode_lost"].map(|word| Some(word.to_owned())));
    let codes: Vec<i32> = below.iter().map(|span| span.status.as_ref().map_or(0, |s| s.code)).collect();
    assert_eq!((root.status.unwrap().code, codes), (2, vec![0, 0, 0, 2]), "{below:?}");
    let logged = log.text();
    let line = logged.lines().find(|line| line.contains("request failed")).unwrap();
    assert!(line.contains(&format!("{:032x}", PARENT.trace_id)) && line.contains("lost"), "{line}");
    cluster.stop().await;
}

/// Nobody listens at the endpoint: answers come as they do without tracing, and the end is not held up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_absent_collector_holds_nothing_up() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut took = Vec::new();
    for endpoint in [String::new(), format!("http://{free}"), format!("http://{free}/v1/traces")] {
        let cluster = Cluster::start("1p1d", &engine(), tracing_to(endpoint, 1_000)).await;
        let started = Instant::now();
        for _ in 0..5 {
            let tickets: Vec<_> = (0..8).map(|_| cluster.submit(&prompt(), sampling(5))).collect();
            for ticket in tickets {
                assert_eq!(listen(ticket).await.trouble, None);
            }
        }
        took.push(started.elapsed());
        cluster.quiet().await;
        let stopping = Instant::now();
        cluster.stop().await;
        assert!(stopping.elapsed() < Duration::from_secs(4), "{:?}", stopping.elapsed());
    }
    // A send with its retries takes 0.7 s or more: 40 requests that waited for theirs would take far longer.
    let most = took[0] * 3 + Duration::from_millis(500);
    assert!(took[1..].iter().all(|took| *took < most), "without, over gRPC, over HTTP: {took:?}");
}
