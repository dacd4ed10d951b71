//! Whatever clients send, no engine is sent a malformed hand-off, and both legs serve the same prompt.

use std::cell::Cell;

use baton_remote::testing::{FakeConnector, ReceivedRequest};
use baton_remote::{FIELDS, Kind, RemoteError, Side};
use baton_types::Sampling;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Map, Value, json};

use crate::scene::{SglangPair, VllmPair, prompt, request, truth, with_body};

/// Values that a field may be given, sound and not.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2.0..2.0f64).prop_map(Value::from),
        "[a-z]{0,6}".prop_map(Value::from),
        Just(
            json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[7]], "remote_engine_id": "x"})
        ),
        Just(json!({"type": "json_object"})),
        Just(json!({"kv_transfer_params": "x", "mine": [1, "y"]})),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| prop::collection::vec(inner, 0..3).prop_map(Value::from))
}

/// Bodies of known, nearly known and unknown fields.
fn body() -> impl Strategy<Value = String> {
    let known = prop::sample::select(FIELDS.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>());
    let more = prop::sample::select(vec![
        "response_format",
        "cache_salt",
        "priority",
        "guided_json",
        "json_schema",
        "extra_key",
        "vllm_xargs",
        "kv_hints",
        "http_worker_ipc",
        "positional_embed_overrides",
    ]);
    let name = prop_oneof![3 => known, 1 => more.prop_map(str::to_owned), 1 => "[a-z_]{1,12}"];
    prop::collection::vec((name, value()), 0..10)
        .prop_map(|fields| Value::Object(fields.into_iter().collect::<Map<_, _>>()).to_string())
}

fn sampling() -> impl Strategy<Value = Sampling> {
    let parts = (
        0.0..2.0f32,
        1..6u32,
        0..6u32,
        any::<bool>(),
        prop::collection::vec(0..2_048u32, 0..3),
        prop::option::of(0..3u8),
    );
    parts.prop_map(|(temperature, max_tokens, min_tokens, ignore_eos, stop_token_ids, logprobs)| Sampling {
        temperature,
        max_tokens,
        min_tokens: min_tokens.min(max_tokens),
        ignore_eos,
        stop_token_ids,
        logprobs,
        ..Sampling::default()
    })
}

/// Whether every request that was sent has this prompt.
fn all_have(received: &[ReceivedRequest], name: &str, tokens: &[u32]) -> bool {
    received.iter().filter(|one| one.path != "/abort_request").all(|one| one.body[name] == json!(tokens))
}

/// A request that cannot be served is the client's, and is known before or by the engine's 400.
fn is_the_clients<T>(answer: &Result<T, RemoteError>) -> bool {
    matches!(answer, Err(error) if error.kind == Kind::Invalid && error.side == Side::Client)
}

#[test]
fn no_body_makes_a_malformed_handoff() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let nixl = runtime.block_on(VllmPair::new(FakeConnector::Nixl));
    let mooncake = runtime.block_on(VllmPair::new(FakeConnector::Mooncake));
    let rooms = runtime.block_on(SglangPair::new());
    let served = Cell::new(0);
    let mut runner = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    let outcome =
        runner.run(&(body(), sampling(), 0..1_000_000u32, 1..120usize), |(body, sampling, seed, length)| {
            let tokens = prompt(seed, length);
            let asked = with_body(request(&tokens, sampling), &body);
            let expected = Ok(truth(&asked));
            let check = |answer: Result<_, RemoteError>| {
                served.set(served.get() + u32::from(answer.is_ok()));
                prop_assert!(answer == expected || is_the_clients(&answer), "{answer:?} for {expected:?}");
                Ok(())
            };
            for pair in [&nixl, &mooncake] {
                let (p, d) = (pair.p.received().len(), pair.d.received().len());
                check(runtime.block_on(pair.serve(&asked)))?;
                pair.assert_no_violation();
                prop_assert!(all_have(&pair.p.received()[p..], "prompt", &tokens));
                prop_assert!(all_have(&pair.d.received()[d..], "prompt", &tokens));
            }
            let (p, d) = (rooms.p.received().len(), rooms.d.received().len());
            check(runtime.block_on(rooms.serve(&asked)))?;
            rooms.assert_no_violation();
            prop_assert!(all_have(&rooms.p.received()[p..], "input_ids", &tokens));
            prop_assert!(all_have(&rooms.d.received()[d..], "input_ids", &tokens));
            Ok(())
        });
    outcome.unwrap();
    assert!(nixl.d.received().len() > 20 && served.get() > 100, "the test has to hand something over");
}
