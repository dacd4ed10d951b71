//! Whole requests on one engine.

use std::time::Duration;

use baton_remote::testing::{
    Fabric, FakeConnector, FakeRole, FakeSglang, FakeVllm, SglangSpec, VllmSpec, toy_logprob,
};
use baton_remote::{Dialect, Kind, Piece, RemoteSettings, Stage};
use baton_types::{Finish, Sampling};
use serde_json::json;

use crate::scene::{engine, engine_with, greedy, ids, prompt, request, truth, with_body};

async fn vllm() -> FakeVllm {
    FakeVllm::start(VllmSpec::new(FakeRole::Whole, FakeConnector::None), &Fabric::new()).await.unwrap()
}

async fn sglang(repeats: bool) -> FakeSglang {
    let spec = SglangSpec { repeats, ..SglangSpec::new(FakeRole::Whole) };
    FakeSglang::start(spec, &Fabric::new()).await.unwrap()
}

#[tokio::test]
async fn every_kind_of_engine_gives_the_models_answer() {
    let (vllm, repeating, adding) = (vllm().await, sglang(true).await, sglang(false).await);
    let plain = RemoteSettings::new(Dialect::Plain, vllm.url());
    for settings in [vllm.settings(), plain, repeating.settings(), adding.settings()] {
        let engine = engine(settings);
        for (seed, length) in [(1, 1), (2, 32), (3, 33), (4, 700)] {
            let asked = request(&prompt(seed, length), greedy(24));
            assert_eq!(ids(engine.generate(asked.clone()).await).await, Ok(truth(&asked)));
        }
        let (answer, _) = truth(&request(&prompt(9, 50), greedy(8)));
        let stops = Sampling { stop_token_ids: vec![answer[4]], ..greedy(8) };
        let asked = request(&prompt(9, 50), stops);
        let (tokens, finish) = ids(engine.generate(asked.clone()).await).await.unwrap();
        assert_eq!((tokens.clone(), finish), truth(&asked));
        assert_eq!(finish, Finish::Stop);
    }
    assert_eq!((vllm.held_blocks(), repeating.held_tokens(), adding.held_tokens()), (0, 0, 0));
    assert_eq!((vllm.violations().len(), repeating.violations().len()), (0, 0));
}

#[tokio::test]
async fn pieces_come_one_by_one_and_end_once() {
    let vllm = vllm().await;
    let asked = request(&prompt(1, 10), greedy(5));
    let mut generation = engine(vllm.settings()).generate(asked.clone()).await.unwrap();
    for token in truth(&asked).0 {
        let Some(Ok(Piece::Tokens(tokens))) = generation.next().await else { panic!("no token") };
        assert_eq!(tokens[0].id, token);
    }
    let Some(Ok(Piece::Finished { finish, counts })) = generation.next().await else { panic!("no end") };
    assert_eq!((finish, counts.prompt_tokens, counts.answer_tokens), (Finish::Length, Some(10), Some(5)));
    assert!(generation.next().await.is_none() && generation.next().await.is_none());
}

#[tokio::test]
async fn logprobs_are_those_of_their_tokens() {
    let (vllm, sglang) = (vllm().await, sglang(true).await);
    let plain = RemoteSettings::new(Dialect::Plain, vllm.url());
    for settings in [vllm.settings(), plain, sglang.settings()] {
        let asked = request(&prompt(3, 20), Sampling { logprobs: Some(1), ..greedy(6) });
        let all = engine(settings).generate(asked).await.unwrap().all().await.unwrap();
        for (at, token) in all.tokens.iter().enumerate() {
            let logprob = token.logprob.as_ref().unwrap();
            assert_eq!((logprob.logprob, logprob.top.len()), (toy_logprob(token.id, at), 1));
        }
    }
}

#[tokio::test]
async fn prompt_logprobs_come_before_the_tokens() {
    let (vllm, sglang) = (vllm().await, sglang(true).await);
    for settings in [vllm.settings(), sglang.settings()] {
        let tokens = prompt(3, 20);
        let asked = request(&tokens, Sampling { prompt_logprobs: Some(0), logprobs: Some(0), ..greedy(3) });
        let mut generation = engine(settings).generate(asked.clone()).await.unwrap();
        let Some(Ok(Piece::PromptLogprobs(logs))) = generation.next().await else {
            panic!("no prompt logprobs")
        };
        let expected: Vec<f32> =
            tokens.iter().enumerate().skip(1).map(|(at, token)| toy_logprob(*token, at)).collect();
        assert_eq!(logs.iter().map(|log| log.logprob).collect::<Vec<_>>(), expected);
        assert_eq!(ids(Ok(generation)).await, Ok(truth(&asked)));
    }
}

#[tokio::test]
async fn the_clients_unknown_fields_go_along_and_its_own_words_do_not() {
    let body = r#"{"model":"gpt","messages":[],"max_tokens":999,"stream":false,"stream_options":{"x":1},"n":3,"priority":-2,
        "kv_transfer_params":{"do_remote_prefill":true},"bootstrap_room":7,"guided_decoding":"x","vllm_xargs":{"a":[1.50]},"seed":5}"#;
    let vllm = vllm().await;
    let asked = with_body(request(&prompt(1, 8), Sampling { seed: 5, ..greedy(4) }), body);
    ids(engine(vllm.settings()).generate(asked).await).await.unwrap();
    let sent = &vllm.received()[0];
    assert_eq!(sent.body["priority"], json!(-2));
    assert_eq!(sent.body["vllm_xargs"], json!({"a": [1.5]}));
    assert_eq!((&sent.body["max_tokens"], &sent.body["seed"]), (&json!(4), &json!(5)));
    for name in ["messages", "kv_transfer_params", "bootstrap_room", "n"] {
        assert!(sent.body.get(name).is_none(), "{name}");
    }
    assert!(sent.request_id.as_ref().unwrap().starts_with("test-"));
}

#[tokio::test]
async fn a_call_waits_for_a_place_as_long_as_for_its_first_token() {
    let vllm = vllm().await;
    let engine = engine_with(vllm.settings(), |settings| {
        settings.bounds.calls = 1;
        settings.timeouts.first_token_us = 100_000;
    });
    let first = engine.generate(request(&prompt(1, 8), greedy(4))).await.unwrap();
    let refused = engine.generate(request(&prompt(1, 8), greedy(4))).await.unwrap_err();
    assert_eq!((refused.kind, refused.stage), (Kind::Retry, Stage::Start));
    drop(first);
    assert!(ids(engine.generate(request(&prompt(1, 8), greedy(4))).await).await.is_ok());
}

/// One call too many failed at once, and so did its next tries at the same engine.
#[tokio::test]
async fn more_calls_than_allowed_wait_for_each_other() {
    let spec = VllmSpec {
        token_time: Duration::from_millis(10),
        ..VllmSpec::new(FakeRole::Whole, FakeConnector::None)
    };
    let vllm = FakeVllm::start(spec, &Fabric::new()).await.unwrap();
    let engine = engine_with(vllm.settings(), |settings| settings.bounds.calls = 2);
    let asked = request(&prompt(1, 8), greedy(4));
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..5 {
        let (engine, asked) = (engine.clone(), asked.clone());
        calls.spawn(async move { ids(engine.generate(asked).await).await });
    }
    for answer in calls.join_all().await {
        assert_eq!(answer, Ok(truth(&asked)));
    }
}

#[tokio::test]
async fn a_long_prompt_has_room_in_the_first_event() {
    let vllm = vllm().await;
    let engine = engine_with(vllm.settings(), |settings| {
        settings.bounds.event_bytes = 1_024;
        settings.dp_rank = Some(3);
    });
    let asked = request(&prompt(1, 3_000), greedy(4));
    assert_eq!(ids(engine.generate(asked.clone()).await).await, Ok(truth(&asked)));
    assert_eq!(vllm.received()[0].dp_rank.as_deref(), Some("3"));
}

#[tokio::test]
async fn a_request_that_cannot_be_served_is_the_clients() {
    let vllm = vllm().await;
    let engine = engine(vllm.settings());
    let long = engine.generate(request(&prompt(1, 4_096), greedy(1))).await.unwrap_err();
    assert_eq!((long.kind, long.status), (Kind::Invalid, Some(400)));
    assert!(long.text.contains("maximum context length"), "{long}");
    let refused = with_body(request(&prompt(1, 8), greedy(4)), r#"{"use_beam_search": true}"#);
    assert_eq!(engine.generate(refused).await.unwrap_err().stage, Stage::Prepare);
    assert_eq!(vllm.received().len(), 1, "what cannot be served is not sent");
}

#[tokio::test]
async fn engines_without_a_handoff_have_no_legs() {
    let vllm = vllm().await;
    let error = engine(vllm.settings()).prefill(request(&prompt(1, 8), greedy(4))).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Prefill));
}
