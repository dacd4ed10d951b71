//! The pages on which engines report their properties.

use baton_remote::testing::{
    Fabric, FakeConnector, FakeRole, FakeSglang, FakeVllm, Fault, SglangSpec, VllmSpec,
};
use baton_remote::{Dialect, EngineRole, HandoffWay, Kind, RemoteSettings, Stage};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::scene::{engine, engine_with, greedy, prompt, request};

async fn vllm(connector: FakeConnector) -> FakeVllm {
    FakeVllm::start(VllmSpec::new(FakeRole::Whole, connector), &Fabric::new()).await.unwrap()
}

#[tokio::test]
async fn vllm_says_what_it_is() {
    let vllm = vllm(FakeConnector::Nixl).await;
    let engine = engine(vllm.settings());
    assert!(engine.probed().is_none());
    let probe = engine.probe().await.unwrap();
    assert_eq!(
        (probe.model.as_str(), probe.max_model_tokens, probe.block_tokens),
        ("tiny", Some(4_096), Some(32))
    );
    assert_eq!((probe.version.as_deref(), probe.connector.as_deref()), (Some("0.32.0"), Some("nixl")));
    assert_eq!((probe.capacity_tokens, probe.dp_ranks, probe.role), (Some(10_912), Some(1), None));
    assert_eq!(engine.probed(), Some(probe));
    assert_eq!(engine.health().await, Ok(()));
    let running = engine.generate(request(&prompt(1, 64), greedy(9))).await.unwrap();
    let load = engine.load().await.unwrap();
    assert!(load.running <= 1 && load.waiting == 0 && load.kv_used_share.is_some());
    drop(running);
}

#[tokio::test]
async fn sglang_says_what_it_is() {
    for (role, expected) in [
        (FakeRole::Whole, EngineRole::Whole),
        (FakeRole::Prefill, EngineRole::Prefill),
        (FakeRole::Decode, EngineRole::Decode),
    ] {
        let sglang = FakeSglang::start(SglangSpec::new(role), &Fabric::new()).await.unwrap();
        // Without knowing beforehand that it is one of a pair.
        let engine = engine(RemoteSettings::new(Dialect::Sglang, sglang.url()));
        let probe = engine.probe().await.unwrap();
        assert_eq!((probe.model.as_str(), probe.role, probe.block_tokens), ("tiny", Some(expected), Some(1)));
        assert_eq!((probe.version.as_deref(), probe.capacity_tokens), (Some("0.5.23"), Some(8_192)));
        assert_eq!((probe.dp_ranks, probe.repeats_answer), (Some(1), Some(true)));
        assert_eq!(probe.keeps_prefixes, Some(false), "it has no cache");
        assert_eq!((probe.pass_tokens, probe.max_running), (Some(4_096), Some(2_048)));
        let port = (role != FakeRole::Whole).then_some(8_998);
        assert_eq!(probe.bootstrap_port, port);
        assert_eq!((engine.load().await.unwrap().running, sglang.violations().len()), (0, 0));
    }
}

#[tokio::test]
async fn an_engine_that_cuts_no_prompt_says_how_much_it_computes_at_once() {
    let spec = SglangSpec { chunk_tokens: -1, ..SglangSpec::new(FakeRole::Whole) };
    let sglang = FakeSglang::start(spec, &Fabric::new()).await.unwrap();
    let probe = engine(RemoteSettings::new(Dialect::Sglang, sglang.url())).probe().await.unwrap();
    assert_eq!(probe.pass_tokens, Some(16_384));
}

#[tokio::test]
async fn an_engine_of_another_kind_or_model_is_refused() {
    let vllm = vllm(FakeConnector::None).await;
    let error = engine(RemoteSettings::new(Dialect::Sglang, vllm.url())).probe().await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Probe));
    let other = engine_with(vllm.settings(), |settings| settings.model = Some("large".into()));
    let error = other.probe().await.unwrap_err();
    assert!(error.text.contains("large") && error.text.contains("tiny"), "{error}");
}

#[tokio::test]
async fn an_engine_that_tells_no_ids_does_not_pass_the_probe() {
    let vllm = vllm(FakeConnector::None).await;
    for settings in [vllm.settings(), RemoteSettings::new(Dialect::Plain, vllm.url())] {
        vllm.fault(Fault::NoTokenIds, 1);
        let error = engine(settings.clone()).probe().await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Bug, Stage::Canary));
        assert!(error.remedy.contains("return_token_ids"), "{error}");
        assert!(engine(settings).probe().await.is_ok());
    }
}

#[tokio::test]
async fn the_key_goes_to_the_engine() {
    let vllm = vllm(FakeConnector::None).await;
    let engine = engine_with(vllm.settings(), |settings| settings.api_key = Some("sesame".into()));
    engine.canary().await.unwrap();
    assert_eq!(vllm.received()[0].authorization.as_deref(), Some("Bearer sesame"));
}

#[tokio::test]
async fn the_key_stays_away_from_other_servers() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let bootstrap_url = format!("http://{}", listener.local_addr().unwrap());
    let heard = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut heard = Vec::new();
        while !heard.ends_with(b"\r\n\r\n") {
            heard.push(stream.read_u8().await.unwrap());
        }
        stream.write_all(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        String::from_utf8(heard).unwrap()
    });
    let vllm = vllm(FakeConnector::Mooncake).await;
    let engine = engine_with(vllm.settings(), |settings| {
        settings.api_key = Some("sesame".into());
        settings.handoff = HandoffWay::Mooncake { bootstrap_url };
    });
    let error = engine.prefill(request(&prompt(1, 9), greedy(3))).await.unwrap_err();
    assert_eq!((error.kind, error.status), (Kind::Unavailable, Some(503)));
    let heard = heard.await.unwrap();
    assert!(heard.starts_with("GET /query ") && !heard.contains("sesame"), "{heard}");
}

/// An engine may close idle connections without a word: a node took the first health check over one for its engine's end,
/// and threw out all its answers.
#[tokio::test]
async fn health_is_asked_over_a_connection_of_its_own() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut heard = Vec::new();
                while !heard.ends_with(b"\r\n\r\n") {
                    heard.push(stream.read_u8().await.unwrap());
                }
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                // It closes at the next request that comes here.
                _ = stream.read_u8().await;
            });
        }
    });
    let engine = engine(RemoteSettings::new(Dialect::Vllm, url));
    for _ in 0..3 {
        assert_eq!(engine.health().await, Ok(()));
    }
}
