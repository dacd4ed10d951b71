//! `/v1/chat/completions`: whole and streamed.

use baton_router::{Event, Fault, RouterConfig, Submission, Usage};
use baton_types::{Finish, TokenLogprob};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::scripted::{Door, Step, admitted, finished, likely, open, open_with_text, text_script, token};

const PATH: &str = "/v1/chat/completions";

fn ask(more: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The text, the roles and the ends of a stream's first answer.
fn read(events: &[Value]) -> (String, usize, Vec<String>) {
    let choices: Vec<&Value> = events.iter().filter_map(|event| event["choices"].get(0)).collect();
    let text = choices.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    let roles = choices.iter().filter(|choice| choice["delta"]["role"] == "assistant").count();
    let ends =
        choices.iter().filter_map(|choice| choice["finish_reason"].as_str()).map(str::to_owned).collect();
    (text, roles, ends)
}

#[tokio::test]
async fn a_whole_answer_has_the_apis_shape() {
    let door = open_with_text("hé\"llo").await;
    let response = door.post(PATH, &ask(json!({}))).await;
    assert_eq!(response.status, 200);
    let value = response.json();
    assert!(
        value["id"].as_str().unwrap().starts_with("chatcmpl-")
            && value["created"].as_u64().unwrap() > 1_700_000_000
    );
    assert_eq!((&value["object"], &value["model"]), (&json!("chat.completion"), &json!("tiny")));
    let expected = json!([{"index": 0, "message": {"role": "assistant", "content": "hé\"llo", "refusal": null},
        "logprobs": null, "finish_reason": "stop", "stop_reason": null}]);
    assert_eq!(value["choices"], expected);
    let prompt = "<|begin|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let prompt_tokens = prompt.len() - "<|begin|><|im_start|><|im_end|><|im_start|>".len() + 4;
    let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": 7, "total_tokens": prompt_tokens + 7,
        "prompt_tokens_details": {"cached_tokens": 16}});
    assert_eq!(value["usage"], usage);
    let submission = &door.backend.submissions.lock()[0];
    assert_eq!((submission.tokens.len(), submission.chain.len()), (prompt_tokens, prompt_tokens / 16));
    assert_eq!(submission.sampling.max_tokens as usize, 2_000 - prompt_tokens, "the rest of the context");
}

#[tokio::test]
async fn a_stream_says_role_and_end_once() {
    let door = open_with_text("hé😀!").await;
    let response = door.post(PATH, &ask(json!({"stream": true}))).await;
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert_eq!(
        (response.header("cache-control"), response.header("x-accel-buffering")),
        (Some("no-cache"), Some("no"))
    );
    let (events, done) = response.events();
    assert!(done);
    assert_eq!(read(&events), ("hé😀!".to_owned(), 1, vec!["stop".to_owned()]));
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let id = &events[0]["id"];
    for event in &events {
        assert_eq!((&event["object"], &event["id"]), (&json!("chat.completion.chunk"), id));
        assert!(event.get("usage").is_none(), "usage is never given unasked");
    }
    // A regression: a token that ends within a character had no event, so its successor seemed to take two steps.
    let contents: Vec<&str> = events[1..events.len() - 1]
        .iter()
        .map(|e| e["choices"][0]["delta"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(
        contents,
        ["h", "", "é", "", "", "", "😀", "!"],
        "an event a token, and no character is split"
    );
}

#[tokio::test]
async fn usage_in_streams_comes_last_or_in_each_event() {
    let door = open_with_text("ab").await;
    let body = ask(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let (events, done) = door.post(PATH, &body).await.events();
    let (last, before) = events.split_last().unwrap();
    assert!(done && before.iter().all(|event| event["usage"].is_null() && event.get("usage").is_some()));
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(2)));
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 16);

    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let (events, _) =
        door.post(PATH, &ask(json!({"stream": true, "stream_options": options}))).await.events();
    let counts: Vec<u64> =
        events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert_eq!(counts, [0, 1, 2, 2, 2]);
}

#[tokio::test]
async fn several_answers_have_their_own_index_and_draws() {
    let door = open(RouterConfig::default(), |submission| {
        let seed = submission.sampling.seed;
        text_script(&format!("answer {seed}"))
    })
    .await;
    let value = door.post(PATH, &ask(json!({"n": 3, "seed": 5}))).await.json();
    let texts: Vec<&Value> =
        value["choices"].as_array().unwrap().iter().map(|c| &c["message"]["content"]).collect();
    assert_eq!(texts, ["answer 5", "answer 6", "answer 7"]);
    assert_eq!(value["usage"]["completion_tokens"], 24);
    let prompt_tokens = value["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        prompt_tokens,
        door.backend.submissions.lock()[0].tokens.len() as u64,
        "the prompt counts once"
    );

    let (events, done) = door.post(PATH, &ask(json!({"n": 3, "seed": 5, "stream": true}))).await.events();
    assert!(done);
    for index in 0..3 {
        let own = |event: &&Value| event["choices"][0]["index"] == index;
        let events: Vec<Value> = events.iter().filter(own).cloned().collect();
        assert_eq!(read(&events), (format!("answer {}", index + 5), 1, vec!["stop".to_owned()]));
    }
    let ids: Vec<String> =
        door.backend.submissions.lock().iter().map(|one| one.request_id.to_string()).collect();
    assert!(ids[0].ends_with("-0") && ids[2].ends_with("-2"), "{ids:?}");
}

#[tokio::test]
async fn stop_strings_end_the_answer_and_the_work() {
    let endless = |_: &_| {
        let mut steps = text_script("one, two, three");
        steps.pop();
        steps.push(Step::Hang);
        steps
    };
    let door = open(RouterConfig::default(), endless).await;
    let body = ask(json!({"stop": [", th", "xyz"]}));
    let value = door.post(PATH, &body).await.json();
    assert_eq!(value["choices"][0]["message"]["content"], "one, two");
    assert_eq!(value["choices"][0]["finish_reason"], "stop");
    assert_eq!(value["usage"]["prompt_tokens_details"], Value::Null, "unknown is not zero");
    door.wait_cancelled(1).await;

    let body = ask(json!({"stop": ", th", "stream": true, "include_stop_str_in_output": true}));
    let (events, done) = door.post(PATH, &body).await.events();
    assert_eq!((read(&events).0.as_str(), done), ("one, two, th", true));
    door.wait_cancelled(2).await;
    let body = ask(json!({"stop": "one", "min_tokens": 4, "max_tokens": 15}));
    door.backend.submissions.lock().clear();
    drop(door);

    // The response still contains the usage until then, where the backend reports it.
    let door = open(RouterConfig::default(), |_| {
        let mut steps = text_script("one, two, three, four");
        steps.pop();
        let usage = Usage { cached_tokens: 32, moves: 0 };
        steps.extend([Step::LastWord(Event::Finished { finish: Finish::Stop, usage }), Step::Hang]);
        steps
    })
    .await;
    let whole = ask(json!({"stop": ", th"}));
    let cached = |value: &Value| value["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(cached(&door.post(PATH, &whole).await.json()), 32);
    let streamed = ask(json!({"stop": ", th", "stream": true, "stream_options": {"include_usage": true}}));
    let (events, done) = door.post(PATH, &streamed).await.events();
    assert_eq!((read(&events), done), (("one, two".to_owned(), 1, vec!["stop".to_owned()]), true));
    assert_eq!(cached(events.last().unwrap()), 32);
    door.wait_cancelled(2).await;

    let door = open_with_text("one, two, one").await;
    assert_eq!(door.post(PATH, &body).await.json()["choices"][0]["message"]["content"], "one, two, ");
}

#[tokio::test]
async fn end_tokens_have_no_text() {
    let door =
        open(RouterConfig::default(), |_| vec![admitted(), token(97), token(98), finished(Finish::Stop, 0)])
            .await;
    let value = door.post(PATH, &ask(json!({"stop_token_ids": [98]}))).await.json();
    assert_eq!(
        (&value["choices"][0]["message"]["content"], &value["usage"]["completion_tokens"]),
        (&json!("a"), &json!(2))
    );
    let value = door
        .post(PATH, &ask(json!({"stop_token_ids": [98], "include_stop_str_in_output": true})))
        .await
        .json();
    assert_eq!(value["choices"][0]["message"]["content"], "ab");
}

#[tokio::test]
async fn logprobs_name_tokens_and_bytes() {
    let script = |_: &_| {
        vec![
            admitted(),
            likely(97, -0.5),
            likely(0xc3, -1.0),
            likely(0xa9, f32::NEG_INFINITY),
            finished(Finish::Length, 0),
        ]
    };
    let door = open(RouterConfig::default(), script).await;
    let body = ask(json!({"logprobs": true, "top_logprobs": 2}));
    let value = door.post(PATH, &body).await.json();
    let content = value["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let first = json!({"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
        {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "z", "logprob": -3.5, "bytes": [122]}]});
    assert_eq!(content[0], first);
    assert_eq!((&content[1]["token"], &content[1]["bytes"]), (&json!("bytes:\\xc3"), &json!([195])));
    assert_eq!((content.len(), &content[2]["logprob"]), (3, &json!(-9999.0)));
    assert_eq!(value["choices"][0]["finish_reason"], "length");

    let mut body = body;
    body["stream"] = true.into();
    let (events, _) = door.post(PATH, &body).await.events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed, content);
}

#[tokio::test]
async fn silence_is_filled_once_admitted() {
    let config = RouterConfig { keep_alive_ms: 50, ..RouterConfig::default() };
    let door = open(config, |_| {
        let mut steps = text_script("x");
        steps.insert(1, Step::Pause(280));
        steps
    })
    .await;
    let response = door.post(PATH, &ask(json!({"stream": true}))).await;
    let comments = String::from_utf8(response.body.to_vec()).unwrap().matches(": keep-alive\n\n").count();
    assert!((3..=6).contains(&comments), "{comments}");
    assert_eq!(read(&response.events().0).0, "x");
}

#[tokio::test]
async fn errors_in_a_stream_end_it_without_the_last_word() {
    let fault = Fault { status: 502, stage: "decode_lost".into(), message: "gone".into() };
    let script = move |_: &_| vec![admitted(), token(97), Step::Say(Event::Failed(fault.clone()))];
    let door = open(RouterConfig::default(), script).await;
    let response = door.post(PATH, &ask(json!({"stream": true, "n": 2}))).await;
    assert_eq!(response.status, 200);
    let (events, done) = response.events();
    let error = &events.last().unwrap()["error"];
    assert!(!done);
    assert_eq!(
        *error,
        json!({"message": "gone", "type": "server_error", "param": null, "code": "decode_lost"})
    );
    let response = door.post(PATH, &ask(json!({}))).await;
    assert_eq!((response.status, response.error().1.as_deref()), (502, Some("decode_lost")));
    assert_eq!(door.router.stats().failed_in_stream, 1);
}

#[tokio::test]
async fn tools_go_into_the_prompt_and_the_body_goes_along() {
    let door = open_with_text("ok").await;
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {}}}]);
    let body = format!(
        "{{ \"x-own\" :1e2,\"tools\":{tools},\"tool_choice\":\"auto\",\"messages\":[{{\"role\":\"user\",\"content\":[{{\"type\":\"text\",\"text\":\"hi\"}}]}}]}}"
    );
    assert_eq!(door.post_with(PATH, body, &[]).await.status, 200);
    let submission = door.backend.submissions.lock()[0].clone();
    assert_eq!(submission.body, r#"{"tool_choice":"auto","x-own" :1e2}"#, "without what became tokens");
    let text: Vec<u8> = submission.tokens.iter().filter_map(|token| u8::try_from(token).ok()).collect();
    assert!(String::from_utf8(text).unwrap().contains(&tools.to_string()));
    for field in [
        json!({"logprob_token_ids": [5]}),
        json!({"chat_template": "{{ messages }}"}),
        json!({"echo": true}),
        json!({"priority": -3}),
        json!({"continue_final_message": true, "add_generation_prompt": true}),
        json!({"tool_choice": "required"}),
        json!({"tool_choice": "must"}),
        json!({"response_format": {"type": "json_object"}}),
    ] {
        let response = door.post(PATH, &ask(field.clone())).await;
        let name = field.as_object().unwrap().keys().find(|name| *name != "add_generation_prompt");
        assert_eq!((response.status, response.error().0.as_ref()), (400, name));
    }
    let nothing =
        json!({"logprob_token_ids": [], "chat_template": null, "priority": 0, "length_penalty": 1.0});
    assert_eq!(door.post(PATH, &ask(nothing)).await.status, 200);
    let text = json!({"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"});
    assert_eq!(door.post(PATH, &ask(text)).await.status, 200);
    let door = open(RouterConfig::default(), |_| text_script("{}")).await;
    door.backend.constrains.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(door.post(PATH, &ask(json!({"response_format": {"type": "json_object"}}))).await.status, 200);
}

#[tokio::test]
async fn an_answer_says_which_end_of_the_client_ended_it() {
    let cases = [
        ("a<x", json!({"stop": ["x", "<x"]}), json!("<x")),
        ("a<x", json!({"stop": "x", "include_stop_str_in_output": true}), json!("x")),
        ("a<x", json!({"stop": "y"}), Value::Null),
        ("abc", json!({"stop_token_ids": [u32::from(b'c')]}), json!(99)),
        // It was drawn before, and the answer went on: that was within `min_tokens`.
        ("cab", json!({"stop_token_ids": [u32::from(b'c')], "min_tokens": 2}), Value::Null),
    ];
    for (said, more, reason) in cases {
        let door = open_with_text(said).await;
        assert_eq!(door.post(PATH, &ask(more.clone())).await.json()["choices"][0]["stop_reason"], reason);
        let mut streamed = ask(more);
        streamed["stream"] = true.into();
        let (events, _) = door.post(PATH, &streamed).await.events();
        let ends: Vec<&Value> =
            events.iter().filter_map(|event| event["choices"][0].get("stop_reason")).collect();
        assert_eq!(ends, [&reason], "once, with the end: {said}");
    }
    // Ends of the model's own are nobody's wish, unless they are no ends.
    let script = |finish| move |_: &_| vec![admitted(), token(97), token(257), finished(finish, 0)];
    let own = json!({"stop_token_ids": [257]});
    let door = open(RouterConfig::default(), script(Finish::Stop)).await;
    let reason =
        async |more: Value| door.post(PATH, &ask(more)).await.json()["choices"][0]["stop_reason"].clone();
    assert_eq!(reason(own.clone()).await, Value::Null);
    assert_eq!(reason(json!({"stop_token_ids": [257], "ignore_eos": true})).await, json!(257));
    let door = open(RouterConfig::default(), script(Finish::Length)).await;
    let value = door.post(PATH, &ask(json!({"stop_token_ids": [97, 257], "ignore_eos": true}))).await.json();
    assert_eq!(value["choices"][0]["stop_reason"], Value::Null, "its length ended it");
}

#[tokio::test]
async fn tokens_go_along_with_the_text_where_they_are_wanted() {
    let door = open_with_text("hé!").await;
    let prompt: Vec<u32> = {
        let value = door.post("/tokenize", &json!({"messages": ask(json!({}))["messages"]})).await.json();
        value["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let wants = json!({"return_token_ids": true, "n": 2});
    let value = door.post(PATH, &ask(wants)).await.json();
    assert_eq!(value["prompt_token_ids"], json!(prompt));
    for choice in value["choices"].as_array().unwrap() {
        assert_eq!(choice["token_ids"], json!([104, 195, 169, 33]));
    }
    let (events, _) = door.post(PATH, &ask(json!({"return_token_ids": true, "stream": true}))).await.events();
    let with_prompt = events.iter().filter(|event| event.get("prompt_token_ids").is_some());
    assert_eq!((events[0]["prompt_token_ids"].clone(), with_prompt.count()), (json!(prompt), 1));
    let ids: Vec<&Value> =
        events.iter().filter_map(|event| event["choices"][0]["token_ids"].as_array()).flatten().collect();
    assert_eq!(ids, [104, 195, 169, 33], "each once, in order");
    let value = door.post(PATH, &ask(json!({"return_token_ids": false}))).await.json();
    assert!(value.get("prompt_token_ids").is_none() && value["choices"][0].get("token_ids").is_none());
}

#[tokio::test]
async fn logprobs_name_tokens_by_number_where_that_is_wanted() {
    let script = |_: &_| vec![admitted(), likely(97, -0.5), finished(Finish::Stop, 0)];
    let door = open(RouterConfig::default(), script).await;
    let wants = json!({"logprobs": true, "top_logprobs": 2, "return_tokens_as_token_ids": true});
    let value = door.post(PATH, &ask(wants)).await.json();
    let one = &value["choices"][0]["logprobs"]["content"][0];
    let top: Vec<&Value> = one["top_logprobs"].as_array().unwrap().iter().map(|top| &top["token"]).collect();
    assert_eq!((&one["token"], json!(top)), (&json!("token_id:97"), json!(["token_id:97", "token_id:122"])));
    assert_eq!(one["bytes"], json!([97]), "what it reads as");
}

#[tokio::test]
async fn a_chats_prompt_has_logprobs_too() {
    let script = |submission: &Submission| {
        assert_eq!(submission.sampling.prompt_logprobs, Some(1));
        let of = |token: u32| TokenLogprob { logprob: -2.0, top: vec![(token, -2.0)] };
        let logs = submission.tokens.iter().skip(1).map(of).collect();
        vec![admitted(), Step::Say(Event::PromptLogprobs(logs)), token(97), finished(Finish::Stop, 0)]
    };
    let door = open(RouterConfig::default(), script).await;
    let value = door.post(PATH, &ask(json!({"prompt_logprobs": 1, "n": 2}))).await.json();
    let logs = value["prompt_logprobs"].as_array().unwrap();
    assert_eq!(logs.len() as u64, value["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!(logs[0], Value::Null);
    assert_eq!(logs[1]["258"]["decoded_token"], "<|im_start|>");
    assert!(value["choices"][0].get("prompt_logprobs").is_none(), "it is the chat's, not an answer's");
    let response = door.post(PATH, &ask(json!({"prompt_logprobs": 1, "stream": true}))).await;
    assert_eq!((response.status, response.error().0.as_deref()), (400, Some("prompt_logprobs")));
}

async fn both_ways(door: &Door, more: &Value) -> (String, String) {
    let whole = door.post(PATH, &ask(more.clone())).await.json();
    let mut streamed = ask(more.clone());
    streamed["stream"] = true.into();
    let (events, done) = door.post(PATH, &streamed).await.events();
    assert!(done);
    (whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned(), read(&events).0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn streamed_text_is_whole_text_is_the_tokens_text(
        tokens in proptest::collection::vec(prop_oneof![97u32..100, 0u32..256, 0xc0u32..0xf8, 0x80u32..0xc0, 256u32..512], 0..40),
        stops in proptest::collection::vec("[abc]{1,3}", 0..4),
    ) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let said: Vec<u32> = tokens.iter().copied().filter(|token| !matches!(token, 257 | 259)).collect();
            let bytes: Vec<u8> = said.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
            let script = move |_: &_| {
                let said = said.iter().map(|&one| token(one));
                std::iter::once(admitted()).chain(said).chain([finished(Finish::Stop, 0)]).collect()
            };
            let door = open(RouterConfig::default(), script).await;
            let (whole, streamed) = both_ways(&door, &json!({"stop": stops})).await;
            assert_eq!(whole, streamed);
            let mut expected = String::from_utf8_lossy(&bytes).into_owned();
            let cut = (0..=expected.len()).find_map(|end| {
                let longest = stops.iter().filter(|s| expected.as_bytes()[..end].ends_with(s.as_bytes())).map(String::len).max();
                longest.map(|length| end - length)
            });
            expected.truncate(cut.unwrap_or(expected.len()));
            assert_eq!(whole, expected);
        });
    }
}
