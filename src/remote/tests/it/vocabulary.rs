//! Engines whose tokens are ours, and engines whose tokens are not.

use baton_remote::testing::{
    Fabric, FakeConnector, FakeRole, FakeSglang, FakeTokenizer, FakeVllm, Fault, SglangSpec, VllmSpec,
};
use baton_remote::{ComparisonExtent, Kind, RemoteSettings, Sample, Stage};

use crate::scene::engine;

const CHAT: &str = r#"[{"role":"user","content":"hi"}]"#;

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// A text and a chat, as a byte-level vocabulary with marks has them.
fn sample() -> Sample {
    let tokens = [vec![256], bytes("Ulm, "), vec![259], bytes(" é")].concat();
    let turn = [vec![258], bytes("user\nhi"), vec![259], bytes("\n")].concat();
    let chat = [vec![256], turn, vec![258], bytes("assistant\n")].concat();
    Sample { text: "Ulm, <|im_end|> é".into(), tokens, messages: CHAT.into(), chat_tokens: Some(chat) }
}

/// The sample as a smaller vocabulary encodes it: two bytes of one token.
fn shorter() -> Sample {
    let mut sample = sample();
    sample.tokens.pop();
    sample
}

fn tokenizer(turned: u8, unasked: bool) -> FakeTokenizer {
    FakeTokenizer { turned, unasked, trained: None }
}

async fn vllm(tokenizer: FakeTokenizer) -> (FakeVllm, RemoteSettings) {
    let spec = VllmSpec { tokenizer, ..VllmSpec::new(FakeRole::Whole, FakeConnector::None) };
    let fake = FakeVllm::start(spec, &Fabric::new()).await.unwrap();
    let settings = fake.settings();
    (fake, settings)
}

async fn sglang(role: FakeRole, tokenizer: FakeTokenizer) -> (FakeSglang, RemoteSettings) {
    let fake = FakeSglang::start(SglangSpec { tokenizer, ..SglangSpec::new(role) }, &Fabric::new()).await;
    let fake = fake.unwrap();
    let settings = fake.settings();
    (fake, settings)
}

async fn compared(settings: RemoteSettings, sample: &Sample) -> Result<ComparisonExtent, String> {
    let engine = engine(settings);
    engine.probe().await.unwrap();
    engine.compare(sample).await.map_err(|error| {
        assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Vocabulary), "{error}");
        assert!(error.remedy.contains("--model"), "{error}");
        error.text
    })
}

#[tokio::test]
async fn the_right_tokenizer_is_compared_as_far_as_the_engine_tells() {
    let (right, mute) = (tokenizer(0, false), tokenizer(0, true));
    assert_eq!(compared(vllm(right).await.1, &sample()).await, Ok(ComparisonExtent::All));
    let (_vllm, settings) = vllm(right).await;
    assert_eq!(
        compared(settings, &Sample { chat_tokens: None, ..sample() }).await,
        Ok(ComparisonExtent::Text)
    );
    let (_vllm, settings) = vllm(mute).await;
    assert_eq!(
        compared(settings, &sample()).await,
        Ok(ComparisonExtent::Text),
        "its answers name the prompt's tokens"
    );
    let (sglang_, settings) = sglang(FakeRole::Whole, right).await;
    assert_eq!(compared(settings, &sample()).await, Ok(ComparisonExtent::Text));
    assert!(sglang_.violations().is_empty(), "{:?}", sglang_.violations());
    let (_sglang, settings) = sglang(FakeRole::Whole, mute).await;
    assert_eq!(compared(settings, &sample()).await, Ok(ComparisonExtent::Count));
    for role in [FakeRole::Prefill, FakeRole::Decode] {
        let (pair, settings) = sglang(role, mute).await;
        let mut settings = settings;
        settings.role = Some(if role == FakeRole::Prefill {
            baton_remote::EngineRole::Prefill
        } else {
            baton_remote::EngineRole::Decode
        });
        assert_eq!(compared(settings, &sample()).await, Ok(ComparisonExtent::Nothing));
        assert!(pair.violations().is_empty(), "{:?}", pair.violations());
    }
}

#[tokio::test]
async fn another_tokenizer_of_the_same_size_is_noticed() {
    for unasked in [false, true] {
        let (_vllm, settings) = vllm(tokenizer(1, unasked)).await;
        let why = compared(settings, &sample()).await.unwrap_err();
        assert!(why.contains("differs from place 1 on: token 86 there, token 85 here"), "{why}");
    }
    let (_sglang, settings) = sglang(FakeRole::Whole, tokenizer(1, false)).await;
    assert!(compared(settings, &sample()).await.unwrap_err().contains("a text has 10 tokens there, 10 here"));
}

#[tokio::test]
async fn a_vocabulary_that_makes_fewer_tokens_is_noticed() {
    for (unasked, word) in [(false, "at its end here"), (true, "at its end here")] {
        let (_vllm, settings) = vllm(tokenizer(0, unasked)).await;
        let why = compared(settings, &shorter()).await.unwrap_err();
        assert!(why.contains("10 tokens there, 9 here") && why.contains(word), "{why}");
    }
    let (_sglang, settings) = sglang(FakeRole::Whole, tokenizer(0, true)).await;
    assert!(compared(settings, &shorter()).await.unwrap_err().contains("a text has 10 tokens there, 9 here"));
}

#[tokio::test]
async fn another_chat_template_is_noticed() {
    let (_vllm, settings) = vllm(tokenizer(0, false)).await;
    let chat_tokens = sample().chat_tokens.map(|tokens| tokens[1..].to_vec());
    let why = compared(settings, &Sample { chat_tokens, ..sample() }).await.unwrap_err();
    assert!(why.contains("a chat has"), "{why}");
}

#[tokio::test]
async fn an_engine_that_fails_is_not_taken_for_one_that_lacks_the_path() {
    let (vllm, settings) = vllm(tokenizer(0, true)).await;
    let engine = engine(settings);
    engine.probe().await.unwrap();
    vllm.fault(Fault::Status(500), 1);
    let error = engine.compare(&sample()).await.unwrap_err();
    assert_ne!(error.kind, Kind::Invalid, "{error}");
    assert_eq!(engine.compare(&sample()).await, Ok(ComparisonExtent::Text));
}
