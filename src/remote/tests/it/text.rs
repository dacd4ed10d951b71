//! Stand-ins asked for text, as routers of text ask them: the same model, and the same account of what is cached.

use std::time::Duration;

use baton_remote::testing::{
    Cost, Fabric, FakeConnector, FakeRole, FakeSglang, FakeTokenizer, FakeVllm, SglangSpec, TrainedTokenizer,
    VllmSpec,
};
use baton_remote::{ComparisonExtent, Sample};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use crate::scene::{engine, greedy, request};

async fn post(url: &str, body: &Value) -> (u16, String) {
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let request = http::Request::post(url).body(Full::new(body.to_string().into())).unwrap();
    let answer = client.request(request).await.unwrap();
    let status = answer.status().as_u16();
    let page = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(page.to_vec()).unwrap())
}

async fn answer(url: &str, body: &Value) -> Value {
    let (status, page) = post(url, body).await;
    assert_eq!(status, 200, "{page}");
    serde_json::from_str(&page).unwrap()
}

fn cost(cache_blocks: u32) -> Cost {
    Cost { cache_blocks, ..Cost::NONE }
}

async fn vllm(role: FakeRole, connector: FakeConnector, fabric: &Fabric) -> FakeVllm {
    let spec = VllmSpec { letters: true, cost: cost(8), block_tokens: 4, ..VllmSpec::new(role, connector) };
    FakeVllm::start(spec, fabric).await.unwrap()
}

async fn sglang(role: FakeRole, fabric: &Fabric) -> FakeSglang {
    let spec = SglangSpec {
        letters: true,
        cost: cost(8),
        page_tokens: 4,
        wait: Duration::from_secs(10),
        ..SglangSpec::new(role)
    };
    FakeSglang::start(spec, fabric).await.unwrap()
}

fn text(choice: &Value) -> &str {
    choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap()
}

#[tokio::test]
async fn text_and_token_ids_of_the_same_bytes_get_the_same_answer() {
    let fabric = Fabric::new();
    let (v, s) =
        (vllm(FakeRole::Whole, FakeConnector::None, &fabric).await, sglang(FakeRole::Whole, &fabric).await);
    let prompt = "once upon a time";
    let ids: Vec<u32> = std::iter::once(256).chain(prompt.bytes().map(u32::from)).collect();
    for (url, settings) in [(v.url(), v.settings()), (s.url(), s.settings())] {
        let body = json!({"prompt": prompt, "max_tokens": 6});
        let whole = answer(&format!("{url}/v1/completions"), &body).await;
        let drawn = engine(settings).generate(request(&ids, greedy(6))).await.unwrap().all().await.unwrap();
        let spelt: String =
            drawn.tokens.iter().map(|token| char::from(u8::try_from(token.id).unwrap())).collect();
        assert_eq!(text(&whole["choices"][0]), spelt);
        assert_eq!(whole["usage"]["prompt_tokens"], json!(17));
        let chat = json!({"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": 6, "stream": true,
            "stream_options": {"include_usage": true}, "logprobs": false});
        let (status, events) = post(&format!("{url}/v1/chat/completions"), &chat).await;
        // Six tokens, the counts and the end.
        assert_eq!((status, events.matches("data: ").count()), (200, 8), "{events}");
        assert!(events.contains(r#""completion_tokens":6"#) && events.ends_with("data: [DONE]\n\n"));
        for wrong in [json!({"prompt": ""}), json!({"prompt": 7}), json!({"max_tokens": 3})] {
            assert_eq!(post(&format!("{url}/v1/completions"), &wrong).await.0, 400, "{wrong}");
        }
    }
    assert_eq!((v.held_blocks(), s.held_tokens()), (0, 0));
}

/// The prompts of two conversations in turn, in a cache that holds one and a half of them.
#[tokio::test]
async fn cached_tokens_are_those_of_a_cache_of_that_size() {
    let fabric = Fabric::new();
    let (v, s) =
        (vllm(FakeRole::Whole, FakeConnector::None, &fabric).await, sglang(FakeRole::Whole, &fabric).await);
    let (one, other) = ("a".repeat(20), "b".repeat(20));
    for url in [v.url(), s.url()] {
        let mut cached = Vec::new();
        for prompt in [&one, &one, &other, &one, &one[..8].into()] {
            let body = json!({"prompt": prompt, "max_tokens": 1});
            let whole = answer(&format!("{url}/v1/completions"), &body).await;
            cached.push(whole["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
        }
        // Five whole blocks each; of eight, the second conversation leaves the first three.
        assert_eq!(cached, [0, 20, 0, 12, 8]);
    }
    for load in [engine(v.settings()).load().await.unwrap(), engine(s.settings()).load().await.unwrap()] {
        assert_eq!((load.prefix_asked_tokens, load.prefix_hit_tokens), (Some(4 * 21 + 9), Some(40)));
    }
    let salted = json!({"prompt": one, "max_tokens": 1, "cache_salt": "x"});
    let whole = answer(&format!("{}/v1/completions", v.url()), &salted).await;
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], json!(0));
}

#[tokio::test]
async fn pairs_serve_text_as_routers_of_text_drive_them() {
    let fabric = Fabric::new();
    let p = vllm(FakeRole::Prefill, FakeConnector::Nixl, &fabric).await;
    let d = vllm(FakeRole::Decode, FakeConnector::Nixl, &fabric).await;
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}});
    let prefilled = answer(&format!("{}/v1/chat/completions", p.url()), &body).await;
    body["kv_transfer_params"] = prefilled["kv_transfer_params"].clone();
    body["max_tokens"] = json!(5);
    let decoded = answer(&format!("{}/v1/chat/completions", d.url()), &body).await;
    let (first, all) = (text(&prefilled["choices"][0]), text(&decoded["choices"][0]));
    assert!(all.len() == 5 && all.starts_with(first), "{first} {all}");
    assert_eq!((p.violations(), d.violations()), (vec![], vec![]));

    let (p, d) = (sglang(FakeRole::Prefill, &fabric).await, sglang(FakeRole::Decode, &fabric).await);
    let body = json!({"prompt": "hello there", "max_tokens": 5, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998,
        "bootstrap_room": 7});
    let (one, other) = (format!("{}/v1/completions", p.url()), format!("{}/v1/completions", d.url()));
    let (prefilled, decoded) = tokio::join!(answer(&one, &body), answer(&other, &body));
    assert!(text(&decoded["choices"][0]).starts_with(text(&prefilled["choices"][0])));
    assert_eq!((p.violations(), d.violations(), p.held_tokens(), d.held_tokens()), (vec![], vec![], 0, 0));
}

#[tokio::test]
async fn a_render_tells_the_tokens_of_the_prompt() {
    let v = vllm(FakeRole::Whole, FakeConnector::None, &Fabric::new()).await;
    let rendered = answer(&format!("{}/v1/completions/render", v.url()), &json!({"prompt": "ab"})).await;
    assert_eq!(rendered[0]["token_ids"], json!([256, 97, 98]));
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let rendered = answer(&format!("{}/v1/chat/completions/render", v.url()), &chat).await;
    assert_eq!(rendered["token_ids"].as_array().unwrap().len(), "!!user\nhi!\n!assistant\n".len());
}

const WORDS: [&str; 5] = [" red", " green", " blue", " ink", " sea"];

/// One token a byte, except for the words. Their ids are above the vocabulary of the toy model.
fn spelt(text: &str) -> Vec<u32> {
    let (mut tokens, mut rest) = (Vec::new(), text.as_bytes());
    while let Some(first) = rest.first() {
        let word = WORDS.iter().position(|word| rest.starts_with(word.as_bytes()));
        tokens.push(word.map_or(u32::from(*first), |at| 3_000 + u32::try_from(at).unwrap()));
        rest = &rest[word.map_or(1, |at| WORDS[at].len())..];
    }
    tokens
}

fn trained() -> FakeTokenizer {
    let words = (3_000..).zip(WORDS.map(str::to_owned)).collect();
    let trained = TrainedTokenizer::new(|text| Ok(spelt(text)), 3_005, words).unwrap();
    FakeTokenizer { trained: Some(Box::leak(Box::new(trained))), ..FakeTokenizer::BYTES }
}

#[tokio::test]
async fn prompts_answers_and_caches_are_in_tokens_of_a_trained_tokenizer() {
    let (fabric, tokenizer) = (Fabric::new(), trained());
    let spec = VllmSpec {
        tokenizer,
        letters: true,
        cost: cost(8),
        block_tokens: 4,
        ..VllmSpec::new(FakeRole::Whole, FakeConnector::None)
    };
    let v = FakeVllm::start(spec, &fabric).await.unwrap();
    let spec = SglangSpec {
        tokenizer,
        letters: true,
        cost: cost(8),
        page_tokens: 4,
        ..SglangSpec::new(FakeRole::Whole)
    };
    let s = FakeSglang::start(spec, &fabric).await.unwrap();
    let prompt = " red green blue ink sea".repeat(2);
    let ids = spelt(&prompt);
    assert_eq!(ids.len(), 10);
    let messages = r#"[{"role":"user","content":"the sea"}]"#;
    let chat = spelt("<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n");
    let sample = Sample {
        text: prompt.clone(),
        tokens: ids.clone(),
        messages: messages.into(),
        chat_tokens: Some(chat),
    };
    for (url, settings, compared) in
        [(v.url(), v.settings(), ComparisonExtent::All), (s.url(), s.settings(), ComparisonExtent::Text)]
    {
        let engine = engine(settings);
        engine.probe().await.unwrap();
        assert_eq!(engine.compare(&sample).await, Ok(compared));
        let before = engine.load().await.unwrap();
        let body = json!({"prompt": prompt, "max_tokens": 6});
        let whole = answer(&format!("{url}/v1/completions"), &body).await;
        assert_eq!(whole["usage"]["prompt_tokens"], json!(10));
        let drawn = engine.generate(request(&ids, greedy(6))).await.unwrap().all().await.unwrap();
        let drawn: Vec<u32> = drawn.tokens.iter().map(|token| token.id).collect();
        assert_eq!(spelt(text(&whole["choices"][0])), drawn);
        // The second request finds the two whole blocks of the first.
        let after = engine.load().await.unwrap();
        let asked = after.prefix_asked_tokens.unwrap() - before.prefix_asked_tokens.unwrap();
        let found = after.prefix_hit_tokens.unwrap() - before.prefix_hit_tokens.unwrap();
        assert_eq!((asked, found), (20, 8));
    }
    assert!(TrainedTokenizer::new(|_| Ok(Vec::new()), 1, [].into()).is_err(), "no word to answer with");
}

/// Prompts that are computed at once wait for each other; what the first has computed, the second does not.
#[tokio::test]
async fn prompts_are_computed_one_after_the_other() {
    let prompt_token_time = Duration::from_millis(2);
    let spec = VllmSpec {
        cost: Cost { prompt_token_time, ..cost(100) },
        block_tokens: 4,
        ..VllmSpec::new(FakeRole::Whole, FakeConnector::None)
    };
    let v = FakeVllm::start(spec, &Fabric::new()).await.unwrap();
    let url = format!("{}/v1/completions", v.url());
    let body = json!({"prompt": "x".repeat(40), "max_tokens": 1});
    let started = std::time::Instant::now();
    tokio::join!(answer(&url, &body), answer(&url, &body), answer(&url, &body));
    // 41 tokens, then one and one: never less, whatever the machine does.
    assert!(started.elapsed() >= prompt_token_time * 43, "{:?}", started.elapsed());
    assert_eq!(engine(v.settings()).load().await.unwrap().prefix_hit_tokens, Some(80));
}
