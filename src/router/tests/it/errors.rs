//! Whatever goes wrong, the answer is OpenAI's error object.

use std::sync::atomic::Ordering;

use baton_router::{Event, Fault, Refusal, RouterConfig};
use http::Request;
use http_body_util::Full;
use proptest::prelude::*;
use serde_json::json;

use crate::scripted::{Step, admitted, open, open_with_text, request, text_script};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn unknown_paths_methods_and_types_are_answered_in_json() {
    let door = open_with_text("x").await;
    let response = door.get("/v1/nothing").await;
    assert_eq!((response.status, response.error().1.as_deref()), (404, Some("unknown_path")));
    let response = door.get(CHAT).await;
    assert_eq!((response.status, response.header("allow")), (405, Some("POST")));
    assert_eq!(response.error().1.as_deref(), Some("method_not_allowed"));
    let response = door.post("/v1/models", &json!({})).await;
    assert_eq!((response.status, response.header("allow")), (405, Some("GET, HEAD")));
    let form = Request::post(CHAT).header("content-type", "text/plain").body(Full::from("{}")).unwrap();
    let response = door.send(form).await;
    assert_eq!((response.status, response.error().1.as_deref()), (415, Some("unsupported_media_type")));
    for (encoding, status) in [("gzip", 415), ("identity, br", 415), ("identity", 200), ("", 200)] {
        let headers = [("content-encoding", encoding)];
        let response = door.post_with("/v1/completions", r#"{"prompt":"a"}"#, &headers).await;
        assert_eq!(response.status, status, "{encoding:?}");
        if status == 415 {
            assert_eq!(response.error().1.as_deref(), Some("unsupported_encoding"));
        }
    }
    for path in ["/v1/embeddings", "/v1/rerank", "/score", "/v1/responses"] {
        let response = door.post(path, &json!({})).await;
        assert_eq!((response.status, response.header("x-should-retry")), (501, Some("false")), "{path}");
        response.error();
    }
}

#[tokio::test]
async fn bodies_that_cannot_be_read_are_refused_with_the_place() {
    let config = RouterConfig { body_limit_bytes: 4_000, ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    let response = door.post_with(CHAT, "{\"messages\": [,]}", &[]).await;
    assert_eq!((response.status, response.error().1.as_deref()), (400, Some("invalid_json")));
    assert!(response.json()["error"]["message"].as_str().unwrap().contains("line 1 column 15"));
    for (body, code) in [
        ("{\"a\":1", Some("invalid_json")),
        ("", Some("invalid_json")),
        ("{\"messages\":5}", Some("invalid_value")),
        ("{\"messages\":[{\"role\":\"user\",\"content\":\"\u{1}\"}]}", Some("invalid_json")),
        ("{\"messages\":[{\"role\":\"a\\nb\",\"content\":\"\"}]}", None),
    ] {
        let response = door.post_with(CHAT, body, &[]).await;
        assert_eq!((response.status, response.error().1.as_deref()), (400, code), "{body:?}");
    }
    let invalid_utf8 = &b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}"[..];
    assert_eq!(door.post_with(CHAT, invalid_utf8, &[]).await.status, 400);
    let deep = format!("{{\"x\":{}{}}}", "[".repeat(900), "]".repeat(900));
    assert_eq!(door.post_with(CHAT, deep, &[]).await.error().1.as_deref(), Some("too_deep"));
    let response = door.post_with(CHAT, "x".repeat(4_001), &[]).await;
    assert_eq!((response.status, response.error().1.as_deref()), (413, Some("body_too_large")));
    assert!(String::from_utf8_lossy(&response.body).contains("service.max_body_bytes"), "{response:?}");
    let response = door.post_with(CHAT, "x".repeat(3_000_000), &[]).await;
    assert_eq!(response.status, 413);
}

/// Errors are answered whether there is room for them or not.
#[tokio::test]
async fn no_error_is_as_long_as_what_it_repeats() {
    let door = open_with_text("x").await;
    let response = door.post(CHAT, &json!({"model": "é".repeat(500_000), "messages": []})).await;
    assert_eq!((response.status, response.error().1.as_deref()), (404, Some("model_not_found")));
    assert!(response.body.len() < 16 << 10, "{}", response.body.len());
}

#[tokio::test]
async fn too_long_prompts_are_refused_before_anything_is_done() {
    let door = open_with_text("x").await;
    let long = json!({"messages": [{"role": "user", "content": "a".repeat(2_000)}], "stream": true});
    let response = door.post(CHAT, &long).await;
    assert_eq!((response.status, response.error().1.as_deref()), (400, Some("context_length_exceeded")));
    // The router does not even tokenise a text that is too long by its bytes: 2,000 tokens of 12 bytes.
    let before = door.router.stats().fresh_parts;
    for (path, body) in [
        (CHAT, json!({"messages": [{"role": "user", "content": "a".repeat(24_001)}]})),
        ("/v1/completions", json!({"prompt": ["a".repeat(24_001)]})),
        ("/v1/completions", json!({"prompt": "a".repeat(24_001), "stream": true})),
        ("/tokenize", json!({"prompt": "a".repeat(24_001)})),
        ("/tokenize", json!({"messages": [{"role": "user", "content": "a".repeat(24_001)}]})),
    ] {
        let response = door.post(path, &body).await;
        assert_eq!(
            (response.status, response.error().1.as_deref()),
            (400, Some("context_length_exceeded")),
            "{path}"
        );
        assert!(String::from_utf8_lossy(&response.body).contains("at least 200"), "{response:?}");
    }
    assert_eq!(door.router.stats().fresh_parts, before);
    let asks = json!({"prompt": vec![97; 2_001]});
    let response = door.post("/v1/completions", &asks).await;
    assert_eq!(response.error().1.as_deref(), Some("context_length_exceeded"));
    let asks = json!({"prompt": "a", "max_tokens": 2_000});
    let response = door.post("/v1/completions", &asks).await;
    let expected = (Some("max_tokens".to_owned()), Some("context_length_exceeded".to_owned()));
    assert_eq!(response.error(), expected);
    assert!(door.backend.submissions.lock().is_empty());
}

#[tokio::test]
async fn refusals_say_when_to_come_again() {
    let script = |_: &_| {
        vec![Step::Say(Event::Refused(Refusal {
            status: 429,
            reason: "predicted_ttft".into(),
            message: "too late".into(),
            param: None,
            retry_after_us: Some(1_500_000),
            predicted_ttft_us: Some(31_000_000),
        }))]
    };
    let door = open(RouterConfig::default(), script).await;
    for stream in [false, true] {
        let body = json!({"messages": [{"role": "user", "content": "a"}], "stream": stream, "n": 2});
        let response = door.post(CHAT, &body).await;
        assert_eq!((response.status, response.error().1.as_deref()), (429, Some("predicted_ttft")));
        assert_eq!(
            (response.header("retry-after"), response.header("retry-after-ms")),
            (Some("2"), Some("1500"))
        );
        assert_eq!(response.header("x-should-retry"), Some("true"));
        assert_eq!(response.header("x-baton-predicted-ttft-ms"), Some("31000"));
        assert_eq!(response.json()["error"]["type"], "rate_limit_error");
    }
    assert_eq!(door.router.stats().refused, 2);
}

#[tokio::test]
async fn what_befalls_a_stream_before_its_first_token_is_its_status() {
    let refusal = Refusal {
        status: 429,
        reason: "costly".into(),
        message: "others go first".into(),
        param: None,
        retry_after_us: Some(2_000_000),
        predicted_ttft_us: None,
    };
    let fault = Fault { status: 502, stage: "prefill_failed".into(), message: "why".into() };
    for (event, status, code) in
        [(Event::Refused(refusal), 429, "costly"), (Event::Failed(fault), 502, "prefill_failed")]
    {
        for (keep_alive_ms, said_at) in [(10_000, status), (20, 200)] {
            let event = event.clone();
            let config = RouterConfig { keep_alive_ms, ..RouterConfig::default() };
            let door =
                open(config, move |_| vec![admitted(), Step::Pause(300), Step::Say(event.clone())]).await;
            let response = door.post("/v1/completions", &json!({"prompt": "a", "stream": true})).await;
            assert_eq!(response.status, said_at, "a client hears something within {keep_alive_ms} ms");
            if said_at == status {
                assert_eq!(response.error().1.as_deref(), Some(code));
                assert_eq!(response.header("retry-after"), (status == 429).then_some("2"));
            } else {
                let text = String::from_utf8_lossy(&response.body);
                assert!(text.contains(code), "{text}");
            }
        }
    }
}

#[tokio::test]
async fn faults_name_their_stage_and_an_engines_own_status_is_kept() {
    for (status, kind) in [
        (502, "server_error"),
        (503, "service_unavailable_error"),
        (504, "timeout_error"),
        (400, "invalid_request_error"),
    ] {
        let fault = Fault { status, stage: "prefill_failed".into(), message: "why".into() };
        let door =
            open(RouterConfig::default(), move |_| vec![Step::Say(Event::Failed(fault.clone()))]).await;
        let response = door.post("/v1/completions", &json!({"prompt": "a", "stream": true})).await;
        assert_eq!((response.status, response.error().1.as_deref()), (status, Some("prefill_failed")));
        assert_eq!(response.json()["error"]["type"], kind);
        assert_eq!(response.header("retry-after").is_some(), status == 503);
    }
    let door = open(RouterConfig::default(), |_| Vec::new()).await;
    let response = door.post("/v1/completions", &json!({"prompt": "a"})).await;
    assert_eq!((response.status, response.error().1.as_deref()), (502, Some("engine_lost")));
}

/// Agents shorten the conversation at this code.
#[tokio::test]
async fn a_context_that_is_too_long_for_the_engine_has_the_usual_code() {
    let vllm =
        "start: the engine answered 400: This model's maximum context length is 4096 tokens. However, your";
    let sglang = "start: the engine answered 400: The input (9 tokens) is longer than the model's context length (8 tokens).";
    for (status, message, code) in [
        (400, vllm, "context_length_exceeded"),
        (400, sglang, "context_length_exceeded"),
        (422, "no such field", "engine"),
        (502, vllm, "engine"),
    ] {
        let fault = Fault { status, stage: "engine".into(), message: message.into() };
        let door =
            open(RouterConfig::default(), move |_| vec![Step::Say(Event::Failed(fault.clone()))]).await;
        let response = door.post("/v1/completions", &json!({"prompt": "a"})).await;
        assert_eq!((response.status, response.error().1.as_deref()), (status, Some(code)), "{message}");
    }
}

#[tokio::test]
async fn health_is_the_process_and_ready_is_the_pair() {
    let door = open_with_text("x").await;
    assert_eq!(door.get("/ready").await.json()["ready"], true);
    door.backend.ready.store(false, Ordering::SeqCst);
    assert_eq!(door.get("/health").await.status, 200);
    let response = door.get("/ready").await;
    assert_eq!(response.status, 503);
    assert_eq!(response.json(), json!({"ready": false, "detail": "no decode instance yet"}));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_bytes_get_a_json_error_or_an_answer(
        bodies in proptest::collection::vec(prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..80),
            r#"\{"(messages|prompt)": ?(\[|\]|\{|\}|"[a-z\\]{0,4}"|,|:|null|1|"role":"user"|"content"){0,8}\}"#.prop_map(String::into_bytes),
        ], 1..20),
    ) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let door = open_with_text("x").await;
            let mut sender = door.connect().await;
            for body in bodies {
                for path in [CHAT, "/v1/completions", "/tokenize", "/detokenize"] {
                    sender.ready().await.unwrap();
                    let (parts, answer) = sender.send_request(request(path, body.clone(), &[])).await.unwrap().into_parts();
                    let answer = http_body_util::BodyExt::collect(answer).await.unwrap().to_bytes();
                    let value: serde_json::Value = serde_json::from_slice(&answer).unwrap();
                    assert!(parts.status == 200 || (parts.status == 400 && value["error"]["message"].is_string()), "{value}");
                }
            }
        });
    }
}
