use std::sync::Arc;
use std::time::Duration;

use baton_remote::testing::{Cost, Fabric, FakeConnector, FakeRole, FakeVllm, VllmSpec};
use baton_remote::{Dialect, HandoffWay, Probe, RemoteEngine, RemoteSettings};
use baton_types::{BlockKey, Role, Sampling};
use baton_wire::v1;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::prompts::Prompts;
use super::remote_legs::RemoteLegs;
use super::split::PromptSplitter;
use crate::node::attach::NodeRuntime as _;

type Facts = mpsc::Receiver<v1::FromNode>;

/// Facts of the next message; the limit is long, for machines are slow.
async fn next(facts: &mut Facts) -> Vec<v1::fact::Fact> {
    let told = tokio::time::timeout(Duration::from_secs(20), facts.recv()).await.expect("a message comes");
    match told.expect("the node_legs is there").message {
        Some(v1::from_node::Message::Facts(told)) => {
            told.facts.into_iter().filter_map(|one| one.fact).collect()
        }
        other => panic!("no facts but {other:?}"),
    }
}

fn attach(node_legs: &RemoteLegs) -> Facts {
    let (facts, told) = mpsc::channel(16);
    node_legs.attached(&v1::Welcome::default(), facts).expect("the node_legs is there");
    told
}

fn prefill(prompt: &[u32], max_tokens: u32, decode: Option<v1::Peer>) -> v1::Orders {
    let order = v1::Prefill { work: Some(work(prompt, max_tokens)), decode, ..v1::Prefill::default() };
    one(v1::order::Order::Prefill(order))
}

fn work(prompt: &[u32], max_tokens: u32) -> v1::Work {
    let sampling = Sampling { temperature: 0.0, max_tokens, ignore_eos: true, ..Sampling::default() };
    let tokens = baton_wire::pack_tokens(&prompt.into());
    let count = u32::try_from(prompt.len()).expect("a short prompt");
    v1::Work {
        tokens,
        token_count: count,
        prompt_tokens: count,
        sampling: Some((&sampling).into()),
        request_id: "r".into(),
        root: baton_wire::pack_keys(&[BlockKey(5)]),
        ..v1::Work::default()
    }
}

fn one(order: v1::order::Order) -> v1::Orders {
    let order = Some(order);
    v1::Orders { orders: vec![v1::Order { request: 1, attempt: 1, order }], ..v1::Orders::default() }
}

/// A node that lost its conductor, for example after a pause, reports its orphaned KV to the next conductor.
#[tokio::test]
async fn kv_that_was_lent_before_the_line_broke_is_told_to_the_next_conductor() {
    let spec = VllmSpec::new(FakeRole::Prefill, FakeConnector::Nixl);
    let fake = FakeVllm::start(spec, &Fabric::new()).await.expect("a port is free");
    let engine = RemoteEngine::new(fake.settings()).expect("settings are right");
    let node_legs = RemoteLegs::new(engine, (32, 341), None, Prompts::default(), None);
    let prompt: Vec<u32> = (1..100).collect();
    let mut facts = attach(&node_legs);
    node_legs.ordered(prefill(&prompt, 9, Some(v1::Peer::default()))).expect("the node_legs is there");
    while !next(&mut facts).await.iter().any(|fact| matches!(fact, v1::fact::Fact::Offer(_))) {}
    drop(facts);
    node_legs.detached().expect("the node_legs is there");
    let mut facts = attach(&node_legs);
    let told = next(&mut facts).await;
    let [v1::fact::Fact::Abandoned(loan)] = &told[..] else { panic!("no loan but {told:?}") };
    assert_eq!(baton_wire::unpack_tokens(&loan.tokens).expect("tokens"), prompt);
    assert!(fake.held_blocks() > 0 && !loan.transfer.is_empty());
}

/// Legs before an engine where nothing listens: none of these orders may call it.
fn without_engine() -> RemoteLegs {
    let settings = RemoteSettings::new(Dialect::Vllm, "http://127.0.0.1:1").with_handoff(HandoffWay::Nixl);
    let engine = RemoteEngine::new(settings).expect("settings are right");
    RemoteLegs::new(engine, (32, 341), None, Prompts::default(), None)
}

fn failure(told: &[v1::fact::Fact]) -> &v1::Failure {
    let [v1::fact::Fact::Failure(failure)] = told else { panic!("no failure but {told:?}") };
    failure
}

#[tokio::test]
async fn a_decode_that_is_ordered_before_its_kv_fails_and_is_over() {
    let node_legs = without_engine();
    let mut facts = attach(&node_legs);
    let expect = v1::Expect { work: Some(work(&[1, 2, 3], 9)), room_tokens: 9 };
    node_legs.ordered(one(v1::order::Order::Expect(expect))).expect("the node_legs is there");
    assert_eq!(node_legs.load().holds, 1);
    let start = || one(v1::order::Order::StartDecode(v1::StartDecode::default()));
    node_legs.ordered(start()).expect("the node_legs is there");
    assert!(failure(&next(&mut facts).await).message.contains("before its KV"));
    assert_eq!(node_legs.load().holds, 0);
    // The leg is gone: neither order finds it.
    node_legs.ordered(start()).expect("the node_legs is there");
    let take = v1::Take { transfer: vec![1].into() };
    node_legs.ordered(one(v1::order::Order::Take(take))).expect("the node_legs is there");
    assert!(facts.try_recv().is_err());
}

#[tokio::test]
async fn a_request_that_its_engine_refuses_is_reported_with_the_status() {
    let spec = VllmSpec { max_model_tokens: 8, ..VllmSpec::new(FakeRole::Whole, FakeConnector::None) };
    let fake = FakeVllm::start(spec, &Fabric::new()).await.expect("a port is free");
    let engine = RemoteEngine::new(fake.settings()).expect("settings are right");
    let node_legs = RemoteLegs::new(engine, (32, 341), None, Prompts::default(), None);
    let mut facts = attach(&node_legs);
    node_legs.ordered(prefill(&[1; 9], 9, None)).expect("the node_legs is there");
    let reported = next(&mut facts).await;
    assert_eq!((failure(&reported).of_request, failure(&reported).status), (true, 400));
}

/// A node that left without a word made its requests look as if the engine cannot have died of them.
#[tokio::test]
async fn what_was_in_an_engine_that_is_gone_is_reported_before_the_node_leaves() {
    let spec = VllmSpec {
        token_time: Duration::from_secs(60),
        ..VllmSpec::new(FakeRole::Whole, FakeConnector::None)
    };
    let fake = FakeVllm::start(spec, &Fabric::new()).await.expect("a port is free");
    let engine = RemoteEngine::new(fake.settings()).expect("settings are right");
    let node_legs = RemoteLegs::new(engine, (32, 341), None, Prompts::default(), None);
    let mut facts = attach(&node_legs);
    node_legs.report_engine_gone("it was idle").await;
    node_legs.ordered(prefill(&[1, 2, 3], 9, None)).expect("the node_legs is there");
    let reporter = node_legs.clone();
    let report = tokio::spawn(async move { reporter.report_engine_gone("it died").await });
    let told = next(&mut facts).await;
    let failure = failure(&told);
    assert_eq!((failure.message.as_str(), failure.cut_off, failure.engine_gone), ("it died", true, true));
    assert!(!report.is_finished(), "it waits until the conductor lets it go");
    drop(facts);
    report.await.expect("it ends");
}

#[tokio::test]
async fn an_answer_with_penalties_that_went_on_elsewhere_cannot_go_on_anywhere() {
    let node_legs = without_engine();
    let mut facts = attach(&node_legs);
    let mut order = prefill(&[1, 2, 3], 9, None);
    if let Some(v1::order::Order::Prefill(prefill)) = &mut order.orders[0].order {
        let work = prefill.work.as_mut().expect("it has some");
        work.prompt_tokens = 2;
        work.sampling.as_mut().expect("it has some").presence_penalty = 0.5;
    }
    node_legs.ordered(order).expect("the node_legs is there");
    let told = next(&mut facts).await;
    assert!(failure(&told).cannot_go_on && !failure(&told).of_request);
}

#[tokio::test]
async fn kv_that_was_offered_is_not_handed_off_again() {
    let node_legs = without_engine();
    let mut facts = attach(&node_legs);
    let handoff = v1::Handoff { to: Some(v1::Peer::default()) };
    node_legs.ordered(one(v1::order::Order::Handoff(handoff))).expect("the node_legs is there");
    let told = next(&mut facts).await;
    assert_eq!((failure(&told).stage(), failure(&told).of_request), (v1::failure::Stage::Handoff, false));
}

#[tokio::test]
async fn an_order_of_another_attempt_changes_nothing() {
    let node_legs = without_engine();
    let mut facts = attach(&node_legs);
    let expect = v1::Expect { work: Some(work(&[1, 2, 3], 9)), room_tokens: 9 };
    node_legs.ordered(one(v1::order::Order::Expect(expect))).expect("the node_legs is there");
    let mut late = one(v1::order::Order::StartDecode(v1::StartDecode::default()));
    late.orders[0].attempt = 0;
    node_legs.ordered(late).expect("the node_legs is there");
    tokio::task::yield_now().await;
    assert!(facts.try_recv().is_err() && node_legs.load().holds == 1);
    node_legs.ordered(one(v1::order::Order::Release(v1::Release {}))).expect("the node_legs is there");
    assert_eq!(node_legs.load().holds, 0);
}

/// A node in front of a vLLM that it says nothing of.
fn node_of(role: Role, handoff: HandoffWay) -> super::RemoteNode {
    super::RemoteNode {
        name: "v0".into(),
        role,
        may_change_role: false,
        control: String::new(),
        engine: RemoteSettings::new(Dialect::Vllm, "http://127.0.0.1:1").with_handoff(handoff),
        block_tokens: 16,
        capacity_tokens: Some(1_000),
        pass_tokens: None,
        max_running: None,
        whole_prompts: false,
        net_bytes_per_s: 1,
        max_model_tokens: Some(100),
        vocab_tokens: 10,
        end_tokens: Vec::new(),
        sample: None,
        events: None,
        revision: None,
        profile: baton_engine::TimedSpec::zero_work().profile,
        guard: crate::guard::ClusterGuard::default(),
    }
}

/// A server has a fixed budget of tokens, not one that follows an objective; one of whole requests was taken for that.
#[test]
fn a_server_is_said_to_fill_what_its_passes_hold() {
    let chunk = |role, told, found| {
        let node = super::RemoteNode { pass_tokens: told, ..node_of(role, HandoffWay::None) };
        let found = Probe { model: "m".into(), pass_tokens: found, ..Probe::default() };
        let hello = super::hello(&node, &found).expect("all is told");
        (hello.pass_tokens, hello.mixed_chunk_tokens)
    };
    assert_eq!(chunk(Role::Both, None, None), (super::PASS_TOKENS, Some(super::PASS_TOKENS)));
    assert_eq!(chunk(Role::Both, None, Some(2_048)), (2_048, Some(2_048)));
    assert_eq!(chunk(Role::Both, Some(512), Some(2_048)), (512, Some(512)));
    assert_eq!(chunk(Role::Decode, Some(512), None), (512, Some(0)), "it is given decode legs only");
}

#[test]
fn a_server_runs_as_many_requests_as_its_operator_says_or_it_says_itself() {
    let said = |stated, found| {
        let node = super::RemoteNode { max_running: stated, ..node_of(Role::Both, HandoffWay::None) };
        let found = Probe { model: "m".into(), max_running: found, ..Probe::default() };
        super::hello(&node, &found).expect("all is known").max_running
    };
    assert_eq!(
        (said(None, None), said(None, Some(48)), said(Some(256), Some(48))),
        (None, Some(48), Some(256))
    );
}

/// A decode server was said to run no prefills, so that its idle steps stayed empty beside a queue.
#[test]
fn a_server_that_keeps_prefixes_is_said_to_keep_the_step_target() {
    let said = |node: super::RemoteNode, keeps_prefixes, dp_ranks| {
        let node = super::RemoteNode { pass_tokens: Some(512), ..node };
        let found = Probe { model: "m".into(), keeps_prefixes, dp_ranks, ..Probe::default() };
        super::hello(&node, &found).expect("all is told").mixed_chunk_tokens
    };
    let chunk = |role, handoff, keeps_prefixes| said(node_of(role, handoff), keeps_prefixes, Some(1));
    let whole = || node_of(Role::Both, HandoffWay::None);
    assert_eq!(said(super::RemoteNode { whole_prompts: true, ..whole() }, Some(true), None), Some(512));
    assert_eq!(said(whole(), Some(true), Some(4)), Some(512), "each rank keeps its own");
    let mut rank = whole();
    rank.engine.dp_rank = Some(2);
    assert_eq!(said(rank, Some(true), Some(4)), None);
    assert_eq!(chunk(Role::Both, HandoffWay::None, Some(true)), None);
    assert_eq!(chunk(Role::Decode, HandoffWay::Nixl, Some(true)), None);
    for keeps_prefixes in [Some(false), None] {
        assert_eq!(chunk(Role::Both, HandoffWay::None, keeps_prefixes), Some(512));
        assert_eq!(chunk(Role::Decode, HandoffWay::Nixl, keeps_prefixes), Some(0));
    }
    let rooms = HandoffWay::Rooms { host: Some("h".into()), port: 1 };
    assert_eq!(
        chunk(Role::Decode, rooms, Some(true)),
        Some(0),
        "an SGLang of a pair serves no whole requests"
    );
}

#[test]
fn a_newer_server_of_whole_requests_goes_with_an_older_one_and_a_pair_has_one_version() {
    let print = |handoff: HandoffWay, version: &str, revision: Option<&str>| {
        let revision = revision.map(str::to_owned);
        let node = super::RemoteNode { revision, ..node_of(Role::Both, handoff) };
        let found = Probe { model: "m".into(), version: Some(version.into()), ..Probe::default() };
        super::hello(&node, &found).expect("all is told").fingerprint.expect("one is told")
    };
    let fingerprint = |handoff, version| print(handoff, version, None);
    assert_ne!(fingerprint(HandoffWay::Nixl, "1"), print(HandoffWay::Nixl, "1", Some("b")));
    assert_ne!(print(HandoffWay::Nixl, "1", Some("a")), print(HandoffWay::Nixl, "1", Some("b")));
    assert_eq!(print(HandoffWay::Nixl, "1", Some("b")), print(HandoffWay::Nixl, "1", Some("b")));
    assert_eq!(fingerprint(HandoffWay::None, "0.31.0"), fingerprint(HandoffWay::None, "0.32.0"));
    assert_ne!(fingerprint(HandoffWay::Nixl, "0.31.0"), fingerprint(HandoffWay::Nixl, "0.32.0"));
    assert_ne!(fingerprint(HandoffWay::Nixl, "0.32.0"), fingerprint(HandoffWay::None, "0.32.0"));
}

/// An engine whose one answer is written at once: an event for each of `tokens`, each a chunk of its own.
async fn all_at_once(tokens: u32) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("http://{}", listener.local_addr().expect("it is bound"));
    let mut answer =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    for token in 1..=tokens {
        let reason = if token == tokens { "\"length\"" } else { "null" };
        let choice = format!(r#"{{"index":0,"text":"a","finish_reason":{reason},"token_ids":[{token}]}}"#);
        let event = format!("data: {{\"choices\":[{choice}]}}\n\n");
        answer.push_str(&format!("{:x}\r\n{event}\r\n", event.len()));
    }
    answer.push_str("e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    tokio::spawn(async move {
        let (mut line, _) = listener.accept().await.expect("it is called");
        let mut asked = Vec::new();
        while !asked.ends_with(b"}") {
            line.read_buf(&mut asked).await.expect("it is asked");
        }
        line.write_all(answer.as_bytes()).await.expect("it is heard");
        std::future::pending::<()>().await;
    });
    url
}

/// An engine that answers every path with the page that it has now.
async fn scripted(page: impl Fn(&str) -> (u16, String) + Send + 'static) -> RemoteEngine {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("http://{}", listener.local_addr().expect("it is bound"));
    tokio::spawn(async move {
        while let Ok((mut line, _)) = listener.accept().await {
            let mut asked = Vec::new();
            while !(asked.ends_with(b"}") || asked.starts_with(b"GET") && asked.ends_with(b"\r\n\r\n")) {
                line.read_buf(&mut asked).await.expect("it is asked");
            }
            let asked = String::from_utf8(asked).expect("it is text");
            let (status, page) = page(asked.split(' ').nth(1).expect("it has a path"));
            let head =
                format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", page.len());
            line.write_all((head + &page).as_bytes()).await.expect("it is heard");
        }
    });
    RemoteEngine::new(RemoteSettings::new(Dialect::Vllm, url)).expect("settings are right")
}

/// The reason with which a node leaves its engine, and whether that is gone.
async fn left(engine: &RemoteEngine, node_legs: &RemoteLegs, started_s: Option<f64>) -> (String, bool) {
    let failing = super::failing_check(engine, node_legs, started_s);
    tokio::time::timeout(Duration::from_secs(20), failing).await.expect("it is left in time")
}

/// Calls got 404 from the new one as their clients' fault, and the node stayed.
#[tokio::test]
async fn an_engine_that_came_back_with_another_model_is_left_at_its_404() {
    let model = Arc::new(Mutex::new("tiny"));
    let served = Arc::clone(&model);
    let engine = scripted(move |path| match path {
        "/v1/models" => (200, format!(r#"{{"data":[{{"id":"{}"}}]}}"#, served.lock())),
        "/health" => (200, String::new()),
        "/v1/completions" => (404, r#"{"error":{"message":"The model `tiny` does not exist."}}"#.into()),
        _ => (404, String::new()),
    })
    .await;
    // It draws no token, and is known all the same.
    assert!(engine.probe().await.is_err() && engine.probed().is_some());
    let node_legs = RemoteLegs::new(engine.clone(), (32, 341), None, Prompts::default(), None);
    *model.lock() = "large";
    let mut facts = attach(&node_legs);
    node_legs.ordered(prefill(&[1, 2, 3], 9, None)).expect("the node_legs is there");
    assert!(!failure(&next(&mut facts).await).of_request);
    let (why, gone) = left(&engine, &node_legs, None).await;
    assert!(why.contains("another model by now: large") && !gone, "{why}");
}

/// What was known of the cache of the one before stayed.
#[tokio::test]
async fn an_engine_that_was_started_anew_between_two_checks_is_left() {
    let engine = scripted(|path| match path {
        "/metrics" => {
            let load = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n";
            (200, format!("process_start_time_seconds 1.7959e+09\n{load}"))
        }
        _ => (200, String::new()),
    })
    .await;
    let node_legs = RemoteLegs::new(engine.clone(), (32, 341), None, Prompts::default(), None);
    let _facts = attach(&node_legs);
    let (why, gone) = left(&engine, &node_legs, Some(1.7958e9)).await;
    assert!(why.contains("started anew") && !gone, "{why}");
}

#[tokio::test]
async fn tokens_that_came_together_are_told_together_and_in_order() {
    let url = all_at_once(200).await;
    let engine = RemoteEngine::new(RemoteSettings::new(Dialect::Vllm, url)).expect("settings are right");
    let node_legs = RemoteLegs::new(engine, (32, 341), None, Prompts::default(), None);
    let mut facts = attach(&node_legs);
    node_legs.ordered(prefill(&[5, 6, 7], 200, None)).expect("the node_legs is there");
    let mut told = next(&mut facts).await;
    let go = v1::StartDecode { answer: vec![1] };
    node_legs.ordered(one(v1::order::Order::StartDecode(go))).expect("the node_legs is there");
    let mut messages = 0;
    while !told.iter().any(|fact| matches!(fact, v1::fact::Fact::Ended(_))) {
        told.extend(next(&mut facts).await);
        messages += 1;
    }
    let tokens = told.iter().filter_map(|fact| match fact {
        v1::fact::Fact::Token(token) => Some((token.index, token.token)),
        _ => None,
    });
    assert_eq!(tokens.collect::<Vec<_>>(), (0..200).map(|at| (at, at + 1)).collect::<Vec<_>>());
    // The answer is longer than what is read of a connection at once, and than what goes on together.
    assert!((4..=12).contains(&messages), "{messages} messages for 199 tokens");
}

/// Prompt lengths of all calls so far.
fn called(fake: &FakeVllm) -> Vec<usize> {
    let calls = fake.received().into_iter().filter(|call| call.path == "/v1/completions");
    calls.map(|call| call.body["prompt"].as_array().map_or(0, Vec::len)).collect()
}

/// A node before an engine whose cache holds prompts, with a step target of 50 ms.
async fn splitting(spec: VllmSpec, splits: bool) -> (FakeVllm, RemoteLegs, Facts) {
    let fake = FakeVllm::start(spec, &Fabric::new()).await.expect("a port is free");
    let engine = RemoteEngine::new(fake.settings()).expect("settings are right");
    let profile = baton_sim::profiles::named("llama3-70b-8xh100").expect("it is shipped");
    let splitter = splits.then(|| PromptSplitter::new(&profile, 32));
    let node_legs = RemoteLegs::new(engine, (32, 341), None, Prompts::default(), splitter);
    let facts = attach(&node_legs);
    (fake, node_legs, facts)
}

fn keeping(token_time: Duration, cost: Cost) -> VllmSpec {
    let cost = Cost { cache_blocks: 1_000, ..cost };
    VllmSpec { cost, token_time, blocks: 4_096, ..VllmSpec::new(FakeRole::Whole, FakeConnector::None) }
}

fn numbered(request: u64, orders: v1::Orders) -> v1::Orders {
    let of = |order| v1::Order { request, ..order };
    let orders = v1::Orders { step_target_us: Some(50_000), ..orders };
    v1::Orders { orders: orders.orders.into_iter().map(of).collect(), ..orders }
}

/// Facts of the next message, each with its request.
async fn of_all(facts: &mut Facts) -> Vec<v1::Fact> {
    let next = tokio::time::timeout(Duration::from_secs(20), facts.recv()).await.expect("in time");
    match next.expect("it is there").message {
        Some(v1::from_node::Message::Facts(all)) => all.facts,
        _ => Vec::new(),
    }
}

/// The tokens and the end of one answer.
async fn answer(facts: &mut Facts, wanted: u64) -> (usize, Option<u64>) {
    let mut tokens = 0;
    loop {
        for fact in of_all(facts).await.into_iter().filter(|fact| fact.request == wanted) {
            match fact.fact {
                Some(v1::fact::Fact::Token(_)) => tokens += 1,
                Some(v1::fact::Fact::Ended(ended)) => return (tokens, ended.cached_tokens),
                Some(v1::fact::Fact::Failure(failure)) => panic!("{failure:?}"),
                _ => {}
            }
        }
    }
}

/// vLLM puts a whole prompt into one step, and 62 of 100 answers beside it were late by their TBT.
#[tokio::test]
async fn a_prompt_beside_answers_comes_in_parts_that_the_engine_finds_again() {
    let (fake, node_legs, mut facts) = splitting(keeping(Duration::from_millis(20), Cost::NONE), true).await;
    let long: Vec<u32> = (0..3_000).map(|at| at % 2_000).collect();
    node_legs.ordered(numbered(7, prefill(&long, 400, None))).expect("it is there");
    while !next(&mut facts).await.iter().any(|fact| matches!(fact, v1::fact::Fact::Token(_))) {}
    assert_eq!(called(&fake), [3_000], "nobody waits for the steps of a prompt that is alone");
    let other: Vec<u32> = (0..64).chain((0..3_000).map(|at| 7 + at % 1_900)).collect();
    node_legs.ordered(numbered(8, prefill(&other, 3, None))).expect("it is there");
    let (tokens, cached_tokens) = answer(&mut facts, 8).await;
    assert_eq!((tokens, cached_tokens), (3, Some(64)), "its own parts are no cached tokens");
    let calls = called(&fake);
    let parts = &calls[1..];
    assert!(parts.len() > 2 && parts.last() == Some(&3_064), "{calls:?}");
    assert!(parts.iter().rev().skip(1).all(|tokens| tokens % 32 == 0), "{calls:?}");
    assert!(parts.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] <= 1_152), "{calls:?}");
    node_legs.detached().expect("it is there");
}

/// What the conductor knows to be cached is not asked for again.
#[tokio::test]
async fn parts_begin_behind_what_is_cached_and_an_answer_without_company_has_none() {
    let (fake, node_legs, mut facts) = splitting(keeping(Duration::from_millis(20), Cost::NONE), true).await;
    let long: Vec<u32> = (0..3_000).map(|at| at % 2_000).collect();
    node_legs.ordered(numbered(7, prefill(&long, 2, None))).expect("it is there");
    assert_eq!(answer(&mut facts, 7).await, (2, None), "nothing found is not counted");
    node_legs.ordered(numbered(8, prefill(&[1, 2, 3], 400, None))).expect("it is there");
    while !next(&mut facts).await.iter().any(|fact| matches!(fact, v1::fact::Fact::Token(_))) {}
    let mut order = numbered(9, prefill(&long, 2, None));
    if let Some(v1::order::Order::Prefill(prefill)) = &mut order.orders[0].order {
        prefill.expected_tokens = Some(2_976);
    }
    node_legs.ordered(order).expect("it is there");
    assert_eq!(answer(&mut facts, 9).await, (2, Some(2_976)));
    assert_eq!(called(&fake), [3_000, 3, 3_000]);
    node_legs.detached().expect("it is there");
}

/// vLLM streams no answer with them: its whole time was taken for the prompt's, and long answers came too late.
#[tokio::test]
async fn logprobs_of_a_prompt_come_with_a_call_of_their_own_and_the_answer_is_streamed() {
    let (fake, node_legs, mut facts) = splitting(keeping(Duration::ZERO, Cost::NONE), false).await;
    let sampling = |max_tokens| Sampling {
        temperature: 0.0,
        max_tokens,
        ignore_eos: true,
        prompt_logprobs: Some(1),
        ..Sampling::default()
    };
    let prompt: Vec<u32> = (1..100).collect();
    for (request, max_tokens) in [(7, 5), (8, 1)] {
        let mut order = numbered(request, prefill(&prompt, max_tokens, None));
        if let Some(v1::order::Order::Prefill(prefill)) = &mut order.orders[0].order {
            prefill.work.as_mut().expect("it has some").sampling = Some((&sampling(max_tokens)).into());
        }
        node_legs.ordered(order).expect("it is there");
        let mut first = next(&mut facts).await;
        while matches!(first[..], [v1::fact::Fact::Cache(_)]) {
            first = next(&mut facts).await;
        }
        let [v1::fact::Fact::PromptLogprobs(logprobs), v1::fact::Fact::Token(token), ..] = &first[..] else {
            panic!("{first:?}")
        };
        let truth = baton_remote::testing::toy_answer(&prompt, &sampling(max_tokens)).0;
        assert_eq!((logprobs.logprobs.len(), token.index, token.token), (98, 0, truth[0]));
        let mut rest = first;
        while !rest.iter().any(|fact| matches!(fact, v1::fact::Fact::Ended(_))) {
            rest.extend(next(&mut facts).await);
        }
        let tokens = rest.iter().filter_map(|fact| match fact {
            v1::fact::Fact::Token(token) => Some(token.token),
            _ => None,
        });
        assert_eq!(tokens.collect::<Vec<_>>(), truth);
    }
    let calls =
        fake.received().into_iter().filter(|call| call.path == "/v1/completions").map(|call| call.body);
    let asked = calls.map(|body| {
        (body["max_tokens"].as_u64(), body["stream"].as_bool(), body["prompt_logprobs"].as_u64())
    });
    let once = (Some(1), Some(false), Some(1));
    assert_eq!(asked.collect::<Vec<_>>(), [once, (Some(5), Some(true), None), once]);
    node_legs.detached().expect("it is there");
}

/// vLLM counts nothing where it finds nothing: what it had evicted stayed known for ever.
#[tokio::test]
async fn a_prompt_of_which_nothing_is_found_corrects_what_is_known() {
    let cost = Cost { cache_blocks: 4, ..Cost::NONE };
    let spec = VllmSpec { cost, ..VllmSpec::new(FakeRole::Whole, FakeConnector::None) };
    let fake = FakeVllm::start(spec, &Fabric::new()).await.expect("a port is free");
    let engine = RemoteEngine::new(fake.settings()).expect("settings are right");
    let node_legs = RemoteLegs::new(engine, (32, 341), None, Prompts::default(), None);
    let mut facts = attach(&node_legs);
    let [old, one, other] = [500..540, 1..100, 200..340].map(|tokens: std::ops::Range<u32>| tokens.collect());
    let asked: [(u64, &Vec<u32>, Option<u64>); 5] =
        [(1, &old, None), (2, &one, None), (3, &one, Some(96)), (4, &other, Some(0)), (5, &one, Some(0))];
    for (request, prompt, cached_tokens) in asked {
        assert_eq!(node_legs.load().resyncs, 0);
        node_legs.ordered(numbered(request, prefill(prompt, 2, None))).expect("it is there");
        assert_eq!(answer(&mut facts, request).await, (2, cached_tokens), "request {request}");
    }
    assert_eq!(node_legs.load().resyncs, 1, "what is older than what was not found is gone");
    node_legs.detached().expect("it is there");
}

/// The mean of the slowest tenth of an answer's gaps while eight prompts of 3,000 tokens come, ms. A step takes 10 ms, and
/// 0.1 ms more for each prompt token.
async fn tbt_beside_prompts(splits: bool) -> u64 {
    let cost = Cost { prompt_token_time: Duration::from_micros(100), step_tokens: 8_192, ..Cost::NONE };
    let (_fake, node_legs, mut facts) = splitting(keeping(Duration::from_millis(10), cost), splits).await;
    node_legs.ordered(numbered(7, prefill(&[1, 2, 3], 4_000, None))).expect("it is there");
    while !next(&mut facts).await.iter().any(|fact| matches!(fact, v1::fact::Fact::Token(_))) {}
    for request in 8..16u32 {
        let prompt: Vec<u32> = (0..3_000).map(|at| (at * request + request) % 2_000).collect();
        node_legs.ordered(numbered(request.into(), prefill(&prompt, 2, None))).expect("it is there");
    }
    let (mut gaps, mut latest, mut ended) =
        (crate::conductor::GapTally::new(4_000), tokio::time::Instant::now(), 0);
    let begun = latest;
    while ended < 8 {
        for fact in of_all(&mut facts).await {
            match fact.fact {
                Some(v1::fact::Fact::Token(_)) if fact.request == 7 => {
                    latest = tokio::time::Instant::now();
                    gaps.token(u64::try_from((latest - begun).as_micros()).expect("short"));
                }
                Some(v1::fact::Fact::Ended(_)) => ended += 1,
                _ => {}
            }
        }
    }
    node_legs.detached().expect("it is there");
    gaps.tbt_us().expect("it came on") / 1000
}

/// An engine with a fixed budget makes one step of all prompts that it has: here one of 2.4 s.
#[tokio::test]
async fn answers_go_on_beside_long_prompts() {
    let (whole_ms, parts_ms) = (tbt_beside_prompts(false).await, tbt_beside_prompts(true).await);
    assert!(whole_ms > 300, "{whole_ms} ms: wholes stretch steps");
    assert!(parts_ms < 200, "{parts_ms} ms, and {whole_ms} ms beside wholes");
}

/// A part that an engine dies of is what its request died of: the next engine is not given it beside others.
#[tokio::test]
async fn an_engine_that_breaks_over_a_part_broke_over_its_request() {
    let spec = VllmSpec { poison: Some(5), ..keeping(Duration::from_millis(20), Cost::NONE) };
    let (fake, node_legs, mut facts) = splitting(spec, true).await;
    node_legs.ordered(numbered(7, prefill(&[1, 2, 3], 400, None))).expect("it is there");
    while !next(&mut facts).await.iter().any(|fact| matches!(fact, v1::fact::Fact::Token(_))) {}
    let poisonous: Vec<u32> = (0..3_000).map(|at| 5 + at % 1_900).collect();
    node_legs.ordered(numbered(8, prefill(&poisonous, 2, None))).expect("it is there");
    let failure = loop {
        let of_it = of_all(&mut facts)
            .await
            .into_iter()
            .filter(|fact| fact.request == 8)
            .filter_map(|fact| fact.fact);
        let failed = of_it.filter_map(|fact| match fact {
            v1::fact::Fact::Failure(failure) => Some(failure),
            _ => None,
        });
        if let Some(failure) = failed.last() {
            break failure;
        }
    };
    assert!(failure.cut_off && failure.engine_gone, "{failure:?}");
    assert_eq!(called(&fake).len(), 2, "it was asked once");
    node_legs.detached().expect("it is there");
}

/// Short prompts share steps, as far as these have room: with one prompt a step, 200 would take 200 steps of 10 ms.
#[tokio::test]
async fn short_prompts_share_a_step() {
    let cost = Cost { prompt_token_time: Duration::from_micros(10), step_tokens: 8_192, ..Cost::NONE };
    let (_fake, node_legs, mut facts) = splitting(keeping(Duration::from_millis(10), cost), true).await;
    node_legs.ordered(numbered(7, prefill(&[1, 2, 3], 4_000, None))).expect("it is there");
    while !next(&mut facts).await.iter().any(|fact| matches!(fact, v1::fact::Fact::Token(_))) {}
    let begun = tokio::time::Instant::now();
    for request in 0..200u32 {
        let prompt: Vec<u32> = (0..40).map(|at| (at * 31 + request) % 2_000).collect();
        let order = numbered(u64::from(request) + 100, prefill(&prompt, 1, None));
        node_legs.ordered(order).expect("it is there");
    }
    let mut ended = 0;
    while ended < 200 {
        ended += of_all(&mut facts)
            .await
            .iter()
            .filter(|fact| matches!(fact.fact, Some(v1::fact::Fact::Ended(_))))
            .count();
    }
    assert!(begun.elapsed() < Duration::from_millis(1_500), "{:?}", begun.elapsed());
    node_legs.detached().expect("it is there");
}
