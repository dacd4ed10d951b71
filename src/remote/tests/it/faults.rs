//! Engines that fail: every fault is an error with the right kind, side and stage, within its time.

use std::time::Duration;

use baton_remote::testing::{
    Fabric, FakeConnector, FakeRole, FakeSglang, FakeVllm, Fault, SglangSpec, VllmSpec,
};
use baton_remote::{CollectedAnswer, Dialect, Kind, RemoteEngine, RemoteError, RemoteSettings, Side, Stage};

use crate::scene::{SglangPair, VllmPair, becomes, engine, engine_with, greedy, prompt, request, truth};

/// Short enough to wait for, and long enough for a busy machine to send what it sends at once.
const SHORT_US: u64 = 700_000;

fn impatient(settings: RemoteSettings) -> RemoteEngine {
    engine_with(settings, |settings| {
        settings.timeouts.answer_us = SHORT_US;
        settings.timeouts.first_token_us = SHORT_US;
        settings.timeouts.silence_us = SHORT_US;
        settings.bounds.event_bytes = 1 << 20;
    })
}

async fn outcome(engine: &RemoteEngine) -> Result<CollectedAnswer, RemoteError> {
    engine.generate(request(&prompt(2, 40), greedy(8))).await?.all().await
}

/// Each fault with what it must look like.
const ROWS: &[(Fault, Kind, Side, Stage)] = &[
    (Fault::Status(500), Kind::Retry, Side::Engine, Stage::Start),
    (Fault::Status(503), Kind::Unavailable, Side::Engine, Stage::Start),
    (Fault::Status(429), Kind::Retry, Side::Engine, Stage::Start),
    (Fault::Status(422), Kind::Invalid, Side::Client, Stage::Start),
    (Fault::Status(401), Kind::Invalid, Side::Us, Stage::Start),
    (Fault::NeverAnswer, Kind::Retry, Side::Engine, Stage::Start),
    (Fault::Hangup, Kind::Retry, Side::Engine, Stage::Start),
    (Fault::DieAfter(0), Kind::Retry, Side::Engine, Stage::Start),
    (Fault::DieAfter(3), Kind::Retry, Side::Engine, Stage::Stream),
    (Fault::FallSilentAfter(0), Kind::Retry, Side::Engine, Stage::Start),
    (Fault::FallSilentAfter(3), Kind::Retry, Side::Engine, Stage::Stream),
    (Fault::ErrorAfter(0), Kind::Retry, Side::Engine, Stage::Start),
    (Fault::ErrorAfter(3), Kind::Retry, Side::Engine, Stage::Stream),
    (Fault::DoneAfter(0), Kind::Retry, Side::Engine, Stage::Start),
    (Fault::DoneAfter(3), Kind::Retry, Side::Engine, Stage::Stream),
    (Fault::Garbage, Kind::Bug, Side::Engine, Stage::Start),
    (Fault::Endless, Kind::Bug, Side::Engine, Stage::Start),
    (Fault::NoTokenIds, Kind::Bug, Side::Engine, Stage::Start),
    (Fault::OtherPrompt, Kind::Bug, Side::Engine, Stage::Start),
];

#[tokio::test]
async fn a_busy_engine_says_for_how_long() {
    let spec = VllmSpec::new(FakeRole::Whole, FakeConnector::None);
    let vllm = FakeVllm::start(spec, &Fabric::new()).await.unwrap();
    let engine = impatient(vllm.settings());
    for (fault, busy_s) in [
        (Fault::Busy(503, 7), Some(7)),
        (Fault::Busy(429, 0), Some(1)),
        (Fault::Busy(500, 7), None),
        (Fault::Status(503), Some(1)),
    ] {
        vllm.fault(fault.clone(), 1);
        let error = outcome(&engine).await.unwrap_err();
        assert_eq!(error.busy_us, busy_s.map(|s: u64| s * 1_000_000), "{fault:?}: {error}");
    }
}

#[tokio::test]
async fn every_fault_of_vllm_has_its_error() {
    let vllm =
        FakeVllm::start(VllmSpec::new(FakeRole::Whole, FakeConnector::None), &Fabric::new()).await.unwrap();
    let engine = impatient(vllm.settings());
    for (fault, kind, side, stage) in ROWS {
        vllm.fault(fault.clone(), 1);
        let error = outcome(&engine).await.unwrap_err();
        assert_eq!((error.kind, error.side, error.stage), (*kind, *side, *stage), "{fault:?}: {error}");
        // A request that failed is tried again by itself, and the engine says what is wrong with one that is wrong.
        let speaks = matches!(kind, Kind::Retry | Kind::Invalid);
        assert!(!error.remedy.is_empty() || speaks, "{fault:?}: {error}");
        becomes("nothing is left", || vllm.running() == 0 && vllm.held_blocks() == 0).await;
        assert!(outcome(&engine).await.is_ok(), "after {fault:?} it serves again");
    }
}

#[tokio::test]
async fn every_fault_of_sglang_has_its_error() {
    let sglang = FakeSglang::start(SglangSpec::new(FakeRole::Whole), &Fabric::new()).await.unwrap();
    let engine = impatient(sglang.settings());
    for (fault, kind, side, stage) in ROWS {
        sglang.fault(fault.clone(), 1);
        let error = outcome(&engine).await.unwrap_err();
        assert_eq!((error.kind, error.side, error.stage), (*kind, *side, *stage), "{fault:?}: {error}");
        becomes("nothing is left", || sglang.running() == 0 && sglang.held_tokens() == 0).await;
        assert!(outcome(&engine).await.is_ok(), "after {fault:?} it serves again");
    }
}

#[tokio::test]
async fn what_breaks_after_the_finish_takes_nothing_away() {
    let vllm =
        FakeVllm::start(VllmSpec::new(FakeRole::Whole, FakeConnector::None), &Fabric::new()).await.unwrap();
    let engine = impatient(vllm.settings());
    for fault in [Fault::DieAfter(8), Fault::FallSilentAfter(8), Fault::ErrorAfter(8)] {
        vllm.fault(fault.clone(), 1);
        let outcome = outcome(&engine).await;
        // An error within the engine's stream is still an error.
        assert_eq!(outcome.is_ok(), !matches!(fault, Fault::ErrorAfter(_)), "{fault:?}: {outcome:?}");
    }
}

#[tokio::test]
async fn a_delay_within_the_time_limit_is_no_fault() {
    let vllm =
        FakeVllm::start(VllmSpec::new(FakeRole::Whole, FakeConnector::None), &Fabric::new()).await.unwrap();
    vllm.fault(Fault::Delay(Duration::from_millis(50)), 1);
    assert!(outcome(&engine(vllm.settings())).await.is_ok());
}

#[tokio::test]
async fn plain_engines_may_name_tokens_in_their_logprobs_only() {
    let vllm =
        FakeVllm::start(VllmSpec::new(FakeRole::Whole, FakeConnector::None), &Fabric::new()).await.unwrap();
    let plain = engine(RemoteSettings::new(Dialect::Plain, vllm.url()));
    vllm.fault(Fault::NoTokenIds, 1);
    let error = outcome(&plain).await.unwrap_err();
    assert!(error.remedy.contains("return_token_ids"), "{error}");
}

#[tokio::test]
async fn an_engine_that_is_gone_is_unavailable() {
    let vllm =
        FakeVllm::start(VllmSpec::new(FakeRole::Whole, FakeConnector::None), &Fabric::new()).await.unwrap();
    let engine = engine(vllm.settings());
    vllm.fault(Fault::Exit, 1);
    assert_eq!(outcome(&engine).await.unwrap_err().kind, Kind::Retry);
    becomes("it is gone", || vllm.exited()).await;
    let error = outcome(&engine).await.unwrap_err();
    assert_eq!((error.kind, error.side, error.stage), (Kind::Unavailable, Side::Engine, Stage::Connect));
    assert_eq!(engine.health().await.unwrap_err().kind, Kind::Unavailable);
    assert_eq!(engine.probe().await.unwrap_err().kind, Kind::Unavailable);
}

#[tokio::test]
async fn faults_of_a_prefill_are_the_prefills() {
    for connector in [FakeConnector::Nixl, FakeConnector::Mooncake] {
        let pair = VllmPair::with(connector, |_| {}, |settings| settings.timeouts.answer_us = SHORT_US).await;
        let asked = request(&prompt(2, 40), greedy(8));
        for (fault, kind) in [
            (Fault::Status(500), Kind::Retry),
            (Fault::Status(503), Kind::Unavailable),
            (Fault::NeverAnswer, Kind::Retry),
            (Fault::Hangup, Kind::Retry),
            (Fault::Garbage, Kind::Bug),
            (Fault::OtherPrompt, Kind::Bug),
        ] {
            pair.p.fault(fault.clone(), 1);
            let error = pair.serve(&asked).await.unwrap_err();
            assert_eq!((error.kind, error.stage), (kind, Stage::Prefill), "{fault:?}: {error}");
        }
        assert_eq!(pair.d.received(), vec![]);
        assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
        pair.assert_no_violation();
    }
}

#[tokio::test]
async fn a_prefill_that_dies_after_its_leg_is_the_decodes_error() {
    for connector in [FakeConnector::Nixl, FakeConnector::Mooncake] {
        let pair = VllmPair::new(connector).await;
        let asked = request(&prompt(2, 40), greedy(8));
        let handoff = pair.handoff(&asked).await;
        pair.p.kill();
        let error = crate::scene::ids(pair.decode.decode(asked, handoff).await).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Retry, Stage::Start), "{error}");
        assert!(pair.d.violations().is_empty() && !pair.d.exited());
        becomes("nothing is held", || pair.d.held_blocks() == 0).await;
    }
}

#[tokio::test]
async fn a_dead_bootstrap_server_costs_no_prefill() {
    let pair = VllmPair::new(FakeConnector::Mooncake).await;
    let elsewhere = engine_with(pair.p.settings(), |settings| {
        settings.handoff = baton_remote::HandoffWay::Mooncake { bootstrap_url: "http://127.0.0.1:9".into() };
    });
    let error = elsewhere.prefill(request(&prompt(2, 40), greedy(8))).await.unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    assert_eq!(pair.p.received(), vec![]);
}

#[tokio::test]
async fn a_leg_of_sglang_that_fails_takes_the_other_with_it() {
    let asked = request(&prompt(2, 40), greedy(8));
    for fault in [Fault::Status(500), Fault::Hangup, Fault::Status(400)] {
        for at_prefill in [true, false] {
            let pair = SglangPair::with(|spec| spec.wait = Duration::from_secs(20), |_| {}).await;
            let one = if at_prefill { &pair.p } else { &pair.d };
            one.fault(fault.clone(), 1);
            assert!(pair.serve(&asked).await.is_err(), "{fault:?}");
            // Long before the engines' own time-outs.
            becomes("nothing is held", || pair.held() == 0).await;
            pair.assert_no_violation();
        }
    }
}

#[tokio::test]
async fn a_dead_sglang_prefill_is_a_retry() {
    let pair = SglangPair::new().await;
    let asked = request(&prompt(2, 40), greedy(8));
    let mut leg = pair.prefill.prefill(asked.clone()).await.unwrap();
    let handoff = leg.offer().unwrap();
    pair.p.kill();
    assert_eq!(leg.run().await.unwrap_err().kind, Kind::Unavailable);
    let error = crate::scene::ids(pair.decode.decode(asked, handoff).await).await.unwrap_err();
    assert_eq!((error.kind, error.status), (Kind::Retry, Some(500)), "{error}");
}
