//! Recorded conversations, played back byte for byte by a server that does nothing else.

use std::net::SocketAddr;

use baton_remote::{Dialect, Handoff, HandoffWay, Kind, NextStep, RemoteSettings, Stage};
use baton_types::Finish;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::scene::{engine, engine_with, greedy, ids, request};

/// Answers every request with these bytes, and closes.
async fn player(head: &str, body: &str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer =
        format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = answer.clone();
            tokio::spawn(async move {
                let mut asked = Vec::new();
                let mut part = [0; 4_096];
                // The request's body is JSON, which ends with a brace.
                while !(asked.ends_with(b"}") || asked.starts_with(b"GET") && asked.ends_with(b"\r\n\r\n")) {
                    match stream.read(&mut part).await {
                        Ok(count) if count > 0 => asked.extend_from_slice(&part[..count]),
                        _ => return,
                    }
                }
                stream.write_all(answer.as_bytes()).await.unwrap();
            });
        }
    });
    address
}

const SSE: &str = "200 OK\r\ncontent-type: text/event-stream; charset=utf-8";
const JSON: &str = "200 OK\r\ncontent-type: application/json";

/// vllm_completions_stream.sse, vLLM 0.32, as it is.
const STREAM: &str = r#"data: {"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[{"index":0,"text":" lat","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[90,308,369,359,363,353],"token_ids":[1489]}]}

data: {"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[{"index":0,"text":" moust","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[1548]}]}

data: {"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[{"index":0,"text":"X","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[62]}]}

data: {"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[{"index":0,"text":"east","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[389]}]}

data: {"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[{"index":0,"text":"gai","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[1606]}]}

data: {"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[{"index":0,"text":" bu","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":[770]}]}

data: {"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[],"usage":{"prompt_tokens":6,"total_tokens":12,"completion_tokens":6},"system_fingerprint":"vllm-0.32.0-537e498c"}

data: [DONE]

"#;

#[tokio::test]
async fn a_stream_of_vllm() {
    let address = player(SSE, STREAM).await;
    let engine = engine(RemoteSettings::new(Dialect::Vllm, format!("http://{address}")));
    let answer = ids(engine.generate(request(&[90, 308, 369, 359, 363, 353], greedy(6))).await).await;
    assert_eq!(answer, Ok((vec![1489, 1548, 62, 389, 1606, 770], Finish::Length)));
}

#[tokio::test]
async fn a_stream_of_vllm_cut_anywhere_is_an_error() {
    // At and after the last event's finish the answer is whole, [DONE] or not.
    let whole = STREAM.find("\"finish_reason\":\"length\"").unwrap();
    let last = whole + STREAM[whole..].find("\n\n").unwrap() + 2;
    for end in (0..last).step_by(97) {
        let address = player(SSE, &STREAM[..end]).await;
        let engine = engine(RemoteSettings::new(Dialect::Vllm, format!("http://{address}")));
        let error =
            ids(engine.generate(request(&[90, 308, 369, 359, 363, 353], greedy(6))).await).await.unwrap_err();
        assert_eq!(error.kind, Kind::Retry, "cut at {end}: {error}");
    }
}

/// faults_nixl.json, stream_failure.
#[tokio::test]
async fn a_kv_load_that_fails_within_a_stream() {
    let body = "data: {\"error\": {\"message\": \"Internal server error\", \"type\": \"InternalServerError\", \"param\": null, \"code\": 500}}\n\ndata: [DONE]\n\n";
    let address = player(SSE, body).await;
    let engine = engine(RemoteSettings::new(Dialect::Vllm, format!("http://{address}")));
    let error = ids(engine.generate(request(&[1], greedy(6))).await).await.unwrap_err();
    assert_eq!((error.kind, error.stage, error.status), (Kind::Retry, Stage::Start, Some(500)));
}

/// The prefill's answer in pd_nixl.json, first case, and what is made of it.
#[tokio::test]
async fn a_prefill_of_nixl() {
    let body = r#"{"id":"cmpl-nixl-20-101","object":"text_completion","created":1795230029,"model":"tiny","choices":[{"index":0,"text":" router","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[354],"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-b72aabc1","usage":{"prompt_tokens":20,"total_tokens":21,"completion_tokens":1,"prompt_tokens_details":null,"completion_tokens_details":null},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"c0536093-7758-4262-b6b0-745c515b8881","remote_request_id":"cmpl-nixl-20-101-0-b21cfe72","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":20,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0},"ec_transfer_params":null,"metrics":null}"#;
    let address = player(JSON, body).await;
    let settings =
        RemoteSettings::new(Dialect::Vllm, format!("http://{address}")).with_handoff(HandoffWay::Nixl);
    let tokens: Vec<u32> = (1..=20).collect();
    let done = engine(settings).prefill(request(&tokens, greedy(24))).await.unwrap().run().await.unwrap();
    assert_eq!(done.tokens[0].id, 354);
    let NextStep::Decode(handoff) = done.next else { panic!("no hand-off") };
    assert_eq!(handoff.name(), "c0536093-7758-4262-b6b0-745c515b8881/cmpl-nixl-20-101-0-b21cfe72");
    let bytes = String::from_utf8(handoff.into_bytes()).unwrap();
    let params = &body[body.find("{\"do_remote").unwrap()..body.find(",\"ec_transfer").unwrap()];
    assert!(bytes.contains(params), "what the engine said goes along byte for byte");
    assert!(Handoff::from_bytes(bytes.as_bytes()).is_ok());
}

/// faults_sglang.json, p_only and no_bootstrap.
#[tokio::test]
async fn failures_of_sglang() {
    let timed_out = r#"{"object":"error","message":"Prefill bootstrap failed for request rank=0 with exception KVTransferError: timed out after 10.0s in KVPoll.Bootstrapping","type":"500","param":null,"code":500}"#;
    let no_room = r#"{"error":{"message":"Invalid request: Disaggregated request received without bootstrap room id. req.rid='f23b68ec86374f449ab18f0afac91376'"}}"#;
    for (head, body, kind, words) in [
        (
            "500 Internal Server Error\r\ncontent-type: application/json",
            timed_out,
            Kind::Retry,
            "KVPoll.Bootstrapping",
        ),
        (
            "400 Bad Request\r\ncontent-type: application/json",
            no_room,
            Kind::Invalid,
            "without bootstrap room id",
        ),
    ] {
        let address = player(head, body).await;
        let engine = engine(RemoteSettings::new(Dialect::Sglang, format!("http://{address}")));
        let error = ids(engine.generate(request(&[1], greedy(6))).await).await.unwrap_err();
        assert_eq!(error.kind, kind);
        assert!(error.text.contains(words), "{error}");
    }
}

/// It was passed on, and had no text: the client had a part of its answer.
#[tokio::test]
async fn an_id_that_is_no_token_is_garbage() {
    for (id, is_token) in [(99, true), (500, true), (4_000_000_000_u32, false)] {
        let choice = format!(r#"{{"index":0,"text":"a","finish_reason":"length","token_ids":[{id}]}}"#);
        let address = player(SSE, &format!("data: {{\"choices\":[{choice}]}}\n\ndata: [DONE]\n\n")).await;
        let settings = RemoteSettings::new(Dialect::Vllm, format!("http://{address}"));
        let engine = engine_with(settings, |settings| settings.vocab_tokens = Some(100));
        let answer = ids(engine.generate(request(&[1, 2], greedy(1))).await).await;
        match answer {
            Ok((tokens, _)) => assert!(is_token && tokens == [id], "{id}"),
            Err(error) => assert!(!is_token && error.kind == Kind::Bug, "{id}: {error}"),
        }
    }
}
