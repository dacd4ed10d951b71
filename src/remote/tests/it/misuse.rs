//! The stand-ins themselves: used wrongly, they do what the real engines did (faults_*.json), and write it down.

use std::time::Duration;

use baton_remote::testing::{
    Fabric, FakeConnector, FakeRole, FakeSglang, FakeVllm, SglangSpec, VllmSpec, toy_answer,
};
use baton_remote::{Kind, Side};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use crate::scene::{becomes, greedy, prompt};

/// Posts without any care; `None` when no answer comes.
async fn post(url: &str, body: &Value) -> Option<(u16, Value)> {
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let request = http::Request::post(url).header("content-type", "application/json");
    let answer = client.request(request.body(Full::new(body.to_string().into())).unwrap()).await.ok()?;
    let status = answer.status().as_u16();
    let bytes = answer.into_body().collect().await.ok()?.to_bytes();
    Some((status, serde_json::from_slice(&bytes).unwrap_or_default()))
}

async fn vllm(fabric: &Fabric, role: FakeRole, connector: FakeConnector) -> FakeVllm {
    let spec = VllmSpec {
        lease: Duration::from_millis(400),
        wait: Duration::from_millis(50),
        ..VllmSpec::new(role, connector)
    };
    FakeVllm::start(spec, fabric).await.unwrap()
}

fn completion(tokens: &[u32], max_tokens: u32, params: Value) -> Value {
    json!({"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
        "kv_transfer_params": params})
}

struct Nixl {
    p: FakeVllm,
    d: FakeVllm,
}

impl Nixl {
    async fn new() -> Self {
        let fabric = Fabric::new();
        let p = vllm(&fabric, FakeRole::Prefill, FakeConnector::Nixl).await;
        Self { p, d: vllm(&fabric, FakeRole::Decode, FakeConnector::Nixl).await }
    }

    async fn prefill(&self, tokens: &[u32]) -> Value {
        let asked = completion(tokens, 1, json!({"do_remote_decode": true, "do_remote_prefill": false}));
        let (status, answer) = post(&format!("{}/v1/completions", self.p.url()), &asked).await.unwrap();
        assert_eq!(status, 200);
        answer["kv_transfer_params"].clone()
    }

    async fn decode(&self, tokens: &[u32], params: Value) -> Option<(u16, Vec<u32>)> {
        let asked = completion(tokens, 8, params);
        let (status, answer) = post(&format!("{}/v1/completions", self.d.url()), &asked).await?;
        Some((status, serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap_or_default()))
    }
}

fn truth(tokens: &[u32]) -> Vec<u32> {
    toy_answer(tokens, &greedy(8)).0
}

#[tokio::test]
async fn nixl_used_rightly_is_right() {
    let pair = Nixl::new().await;
    let tokens = prompt(1, 100);
    let params = pair.prefill(&tokens).await;
    assert_eq!(pair.p.held_blocks(), 4);
    assert_eq!(pair.decode(&tokens, params).await, Some((200, truth(&tokens))));
    assert_eq!((pair.p.held_blocks(), pair.p.violations().len(), pair.d.violations().len()), (0, 0, 0));
}

#[tokio::test]
async fn params_used_after_the_lease_give_wrong_tokens_with_200_and_stay_wrong() {
    let pair = Nixl::new().await;
    let tokens = prompt(1, 100);
    let stale = pair.prefill(&tokens).await;
    becomes("the lease is over", || pair.p.expired_leases() == 1).await;
    pair.prefill(&prompt(2, 300)).await;
    let (status, got) = pair.decode(&tokens, stale).await.unwrap();
    assert_eq!(status, 200);
    assert_ne!(got, truth(&tokens));
    assert!(pair.d.violations().iter().any(|what| what.contains("not lent")));
    // The cache of the decode engine is spoilt, for a leg with good parameters too.
    assert_eq!(pair.decode(&tokens, Value::Null).await, Some((200, got.clone())));
    let good = pair.prefill(&tokens).await;
    assert_eq!(pair.decode(&tokens, good).await, Some((200, got)));
    // Under another salt it is not.
    let mut asked = completion(&tokens, 8, pair.prefill(&tokens).await);
    asked["cache_salt"] = json!("another");
    let (_, answer) = post(&format!("{}/v1/completions", pair.d.url()), &asked).await.unwrap();
    assert_eq!(answer["choices"][0]["token_ids"], json!(truth(&tokens)));
}

#[tokio::test]
async fn params_used_twice_or_of_another_prompt_are_noticed() {
    let pair = Nixl::new().await;
    let tokens = prompt(1, 100);
    let params = pair.prefill(&tokens).await;
    pair.decode(&tokens, params.clone()).await.unwrap();
    assert_eq!(
        pair.decode(&tokens, params).await,
        Some((200, truth(&tokens))),
        "nothing has reused the blocks yet"
    );
    assert_eq!(pair.d.violations().len(), 1);
    let (a, b) = (prompt(3, 64), prompt(4, 64));
    let params = pair.prefill(&a).await;
    assert_eq!(pair.decode(&b, params).await, Some((200, truth(&a))));
    assert!(pair.d.violations().iter().any(|what| what.contains("another prompt")));
}

#[tokio::test]
async fn a_longer_prompt_fails_and_a_missing_field_ends_the_server() {
    let pair = Nixl::new().await;
    let tokens = prompt(1, 60);
    let params = pair.prefill(&tokens).await;
    let longer = [tokens.clone(), vec![3]].concat();
    assert_eq!(pair.decode(&longer, params).await, Some((500, vec![])));
    assert!(!pair.d.exited());
    for (name, value) in
        [("remote_block_ids", Value::Null), ("remote_host", Value::Null), ("remote_block_ids", json!([[1]]))]
    {
        let pair = Nixl::new().await;
        let mut params = pair.prefill(&tokens).await;
        params[name] = value;
        assert_eq!(pair.decode(&tokens, params).await, None);
        assert!(pair.d.exited() && pair.d.violations().len() == 1, "{name}");
    }
}

#[tokio::test]
async fn parameters_in_another_field_are_taken_for_parameters() {
    let pair = Nixl::new().await;
    let mut asked = completion(&prompt(1, 60), 1, Value::Null);
    asked["vllm_xargs"] = json!({"kv_transfer_params": {"do_remote_prefill": true}});
    assert_eq!(post(&format!("{}/v1/completions", pair.p.url()), &asked).await.unwrap().0, 400);
    asked["vllm_xargs"] = json!({"kv_transfer_params": "x"});
    assert_eq!(post(&format!("{}/v1/completions", pair.p.url()), &asked).await.unwrap().0, 500);
    assert!(!pair.p.exited() && pair.p.violations().len() == 1);
}

#[tokio::test]
async fn an_unknown_engine_fails_and_a_streamed_prefill_says_nothing() {
    let pair = Nixl::new().await;
    let tokens = prompt(1, 60);
    let mut params = pair.prefill(&tokens).await;
    params["remote_engine_id"] = json!("00000000-0000-4000-8000-000000000000");
    assert_eq!(pair.decode(&tokens, params).await, Some((500, vec![])));
    assert!(!pair.d.exited());
    let mut streamed = completion(&tokens, 1, json!({"do_remote_decode": true, "do_remote_prefill": false}));
    streamed["stream"] = json!(true);
    assert_eq!(post(&format!("{}/v1/completions", pair.p.url()), &streamed).await, Some((200, Value::Null)));
    assert!(pair.p.violations()[0].contains("streams"));
}

#[tokio::test]
async fn mooncake_misused_fails_and_a_producer_that_is_asked_to_decode_exits() {
    let fabric = Fabric::new();
    let p = vllm(&fabric, FakeRole::Prefill, FakeConnector::Mooncake).await;
    let d = vllm(&fabric, FakeRole::Decode, FakeConnector::Mooncake).await;
    let url = |one: &FakeVllm| format!("{}/v1/completions", one.url());
    let tokens = prompt(1, 60);
    let engine = {
        let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
        let page = client.get(format!("{}/query", p.url()).parse().unwrap()).await.unwrap();
        let read: Value =
            serde_json::from_slice(&page.into_body().collect().await.unwrap().to_bytes()).unwrap();
        read["0"]["engine_id"].clone()
    };
    let ask = |transfer: &str| {
        completion(
            &tokens,
            1,
            json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer}),
        )
    };
    let take = |transfer: &str| {
        completion(
            &tokens,
            8,
            json!({"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": engine,
            "remote_bootstrap_addr": p.url(), "transfer_id": transfer}),
        )
    };
    // Nobody has it.
    assert_eq!(post(&url(&d), &take("none")).await.unwrap().0, 500);
    // In order, then a second time.
    post(&url(&p), &ask("a")).await.unwrap();
    assert_eq!(p.held_blocks(), 2);
    let (status, answer) = post(&url(&d), &take("a")).await.unwrap();
    assert_eq!((status, &answer["choices"][0]["token_ids"]), (200, &json!(truth(&tokens))));
    assert_eq!((p.held_blocks(), d.violations().len()), (0, 1));
    assert_eq!(post(&url(&d), &take("a")).await.unwrap().0, 500);
    // One name for two transfers.
    post(&url(&p), &ask("a")).await.unwrap();
    assert_eq!(p.violations().len(), 1);
    assert_eq!(post(&url(&p), &take("b")).await, None);
    assert!(p.exited());
}

struct Rooms {
    p: FakeSglang,
    d: FakeSglang,
}

impl Rooms {
    async fn new() -> Self {
        let fabric = Fabric::new();
        let start = async |role| {
            FakeSglang::start(
                SglangSpec { wait: Duration::from_millis(100), ..SglangSpec::new(role) },
                &fabric,
            )
            .await
            .unwrap()
        };
        Self { p: start(FakeRole::Prefill).await, d: start(FakeRole::Decode).await }
    }

    async fn both(&self, p: &Value, d: &Value) -> (Option<(u16, Value)>, Option<(u16, Value)>) {
        let (p_url, d_url) = (format!("{}/generate", self.p.url()), format!("{}/generate", self.d.url()));
        tokio::join!(post(&p_url, p), post(&d_url, d))
    }
}

fn generate(tokens: &[u32], room: u64) -> Value {
    json!({"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": true},
        "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": room})
}

#[tokio::test]
async fn rooms_used_rightly_are_right_and_a_used_room_is_noticed() {
    let pair = Rooms::new().await;
    let tokens = prompt(1, 60);
    for round in 0..2 {
        let (p, d) = pair.both(&generate(&tokens, 5), &generate(&tokens, 5)).await;
        assert_eq!(p.unwrap().1["output_ids"], json!(truth(&tokens)[..1]));
        assert_eq!(d.unwrap().1["output_ids"], json!(truth(&tokens)));
        assert_eq!(pair.p.violations().len(), round, "a second use still answers");
    }
}

#[tokio::test]
async fn different_prompts_in_one_room_are_wrong_with_200() {
    let pair = Rooms::new().await;
    let (a, b) = (prompt(1, 60), prompt(2, 60));
    let (p, d) = pair.both(&generate(&a, 5), &generate(&b, 5)).await;
    let d = d.unwrap();
    assert_eq!((p.unwrap().0, d.0, &d.1["output_ids"]), (200, 200, &json!(truth(&a))));
    assert_eq!(pair.d.violations().len(), 1);
}

#[tokio::test]
async fn one_leg_alone_fails_and_bootstrap_fields_are_asked_for() {
    let pair = Rooms::new().await;
    let tokens = prompt(1, 60);
    let url = |one: &FakeSglang| format!("{}/generate", one.url());
    for one in [&pair.p, &pair.d] {
        assert_eq!(post(&url(one), &generate(&tokens, 6)).await.unwrap().0, 500);
        assert_eq!(one.violations().len(), 1);
        let mut bare = generate(&tokens, 0);
        bare.as_object_mut().unwrap().retain(|name, _| !name.starts_with("bootstrap"));
        assert_eq!(post(&url(one), &bare).await.unwrap().0, 400);
        assert_eq!(one.violations().len(), 2);
    }
}

#[tokio::test]
async fn a_grammar_that_cannot_be_compiled_is_the_clients_whichever_leg_tells_it() {
    let pair = crate::scene::SglangPair::new().await;
    let client = r#"{"regex": "("}"#;
    let asked = crate::scene::with_body(crate::scene::request(&prompt(1, 60), greedy(8)), client);
    let clients = |error: baton_remote::RemoteError| {
        assert_eq!(
            (error.kind, error.side, error.status),
            (Kind::Invalid, Side::Client, Some(400)),
            "{error}"
        );
        assert!(error.text.contains("parenthesis"), "{error}");
    };
    let mut leg = pair.prefill.prefill(asked.clone()).await.unwrap();
    let handoff = leg.offer().unwrap();
    // The real engine's stream begins with 200, and reports a prompt of one token.
    clients(pair.decode.decode(asked, handoff).await.unwrap().all().await.unwrap_err());
    clients(leg.run().await.unwrap_err());
}

#[tokio::test]
async fn two_requests_in_one_room_at_once_end_the_prefill_server() {
    let pair = Rooms::new().await;
    let url = format!("{}/generate", pair.p.url());
    let (a, b) = (generate(&prompt(1, 60), 5), generate(&prompt(2, 60), 5));
    let answers = tokio::join!(post(&url, &a), post(&url, &b));
    assert_eq!(answers, (None, None));
    assert!(pair.p.exited());
}
