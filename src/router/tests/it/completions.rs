//! `/v1/completions`, and tokens without an answer.

use std::sync::atomic::Ordering;

use baton_router::{Event, RouterConfig, Tokenization};
use baton_types::{Finish, TokenLogprob};
use serde_json::{Value, json};

use crate::scripted::{
    Step, admitted, finished, likely, open, open_reading, open_with_text, text_script, token,
};

const PATH: &str = "/v1/completions";

fn texts(value: &Value) -> Vec<&str> {
    value["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn prompts_come_as_text_and_tokens_alone_and_in_batches() {
    let door = open(RouterConfig::default(), |submission| {
        let last = submission
            .tokens
            .after(submission.tokens.len().saturating_sub(2))
            .into_iter()
            .map(|token| token as u8);
        text_script(&String::from_utf8(last.collect()).unwrap())
    })
    .await;
    let cases = [
        (json!("xab"), vec!["ab"]),
        (json!(["xab", "xcd"]), vec!["ab", "cd"]),
        (json!([120, 97, 98]), vec!["ab"]),
        (json!([[120, 97, 98], [120, 99, 100]]), vec!["ab", "cd"]),
    ];
    for (prompt, expected) in cases {
        let response = door.post(PATH, &json!({"model": "tiny", "prompt": prompt})).await;
        let value = response.json();
        assert_eq!(texts(&value), expected, "{prompt}");
        assert_eq!(
            (&value["object"], &value["choices"][0]["logprobs"]),
            (&json!("text_completion"), &Value::Null)
        );
        assert!(value["id"].as_str().unwrap().starts_with("cmpl-"));
    }
    let value =
        door.post(PATH, &json!({"prompt": [[120, 97, 98], [99, 100]], "n": 2, "best_of": 2})).await.json();
    assert_eq!(texts(&value), ["ab", "ab", "cd", "cd"]);
    assert_eq!(value["usage"]["prompt_tokens"], 5, "each prompt counts once");
    assert_eq!(door.backend.submissions.lock().last().unwrap().sampling.max_tokens, 16);
}

#[tokio::test]
async fn batches_stream_each_under_its_index() {
    let door =
        open(RouterConfig::default(), |submission| text_script(&submission.tokens.len().to_string())).await;
    let (events, done) =
        door.post(PATH, &json!({"prompt": [[1, 2], [1, 2, 3]], "stream": true})).await.events();
    assert!(done);
    for (index, expected) in ["2", "3"].iter().enumerate() {
        let own = events.iter().filter(|event| event["choices"][0]["index"] == index);
        let text: String = own.clone().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, *expected);
        assert_eq!(own.filter(|event| event["choices"][0]["finish_reason"] == "stop").count(), 1);
    }
}

/// Prompt `ab`, answer `cd`, with logprobs of both when asked for.
fn scored(submission: &baton_router::Submission) -> Vec<Step> {
    let mut steps = vec![admitted()];
    if submission.sampling.prompt_logprobs.is_some() {
        let of = |token: u32| TokenLogprob { logprob: -2.0, top: vec![(token + 1, -1.0)] };
        steps.push(Step::Say(Event::PromptLogprobs(submission.tokens.iter().skip(1).map(of).collect())));
    }
    steps.extend(
        [likely(99, -0.5), likely(100, -0.25)].into_iter().take(submission.sampling.max_tokens as usize),
    );
    steps.push(finished(Finish::Length, 0));
    steps
}

#[tokio::test]
async fn echo_and_logprobs_cover_prompt_and_answer() {
    let door = open(RouterConfig::default(), scored).await;
    let body = json!({"prompt": [97, 98], "echo": true, "logprobs": 1, "max_tokens": 2});
    let value = door.post(PATH, &body).await.json();
    let choice = &value["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("abcd"), &json!("length")));
    let logs = &choice["logprobs"];
    assert_eq!(logs["tokens"], json!(["a", "b", "c", "d"]));
    assert_eq!(logs["token_logprobs"], json!([null, -2.0, -0.5, -0.25]));
    assert_eq!(logs["text_offset"], json!([0, 1, 2, 3]));
    assert_eq!(logs["top_logprobs"][1], json!({"c": -1.0, "b": -2.0}));

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let (events, _) = door.post(PATH, &streamed).await.events();
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    let tokens: Vec<&str> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array())
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!((text.as_str(), tokens), ("abcd", vec!["a", "b", "c", "d"]));

    let mut only_scored = body;
    only_scored["max_tokens"] = 0.into();
    let value = door.post(PATH, &only_scored).await.json();
    assert_eq!(
        (&value["choices"][0]["text"], &value["usage"]["completion_tokens"]),
        (&json!("ab"), &json!(0))
    );
    assert_eq!(value["choices"][0]["logprobs"]["tokens"], json!(["a", "b"]));
    let value = door.post(PATH, &json!({"prompt": "ab", "echo": true, "max_tokens": 2})).await.json();
    assert_eq!(value["choices"][0]["text"], "abcd");
}

#[tokio::test]
async fn each_prompt_has_its_tokens_and_each_answer_its_own() {
    let door = open_with_text("ab").await;
    let body = json!({"prompt": [[120, 97], [99]], "return_token_ids": true, "stop": "b"});
    let value = door.post(PATH, &body).await.json();
    for (at, prompt) in [json!([120, 97]), json!([99])].iter().enumerate() {
        let choice = &value["choices"][at];
        assert_eq!((&choice["prompt_token_ids"], &choice["text"]), (prompt, &json!("a")));
        assert_eq!((&choice["token_ids"], &choice["stop_reason"]), (&json!([97, 98]), &json!("b")));
    }
    let mut streamed = body;
    streamed["stream"] = true.into();
    let (events, _) = door.post(PATH, &streamed).await.events();
    for (index, prompt) in [json!([120, 97]), json!([99])].iter().enumerate() {
        let own: Vec<&Value> =
            events.iter().filter_map(|e| e["choices"].get(0)).filter(|c| c["index"] == index).collect();
        let prompts: Vec<&Value> = own.iter().filter_map(|choice| choice.get("prompt_token_ids")).collect();
        let ids: Vec<&Value> =
            own.iter().filter_map(|choice| choice["token_ids"].as_array()).flatten().collect();
        assert_eq!((prompts, ids), (vec![prompt], vec![&json!(97), &json!(98)]));
    }
}

#[tokio::test]
async fn prompt_logprobs_have_ranks() {
    let door = open(RouterConfig::default(), scored).await;
    let value =
        door.post(PATH, &json!({"prompt": [97, 98], "prompt_logprobs": 1, "max_tokens": 1})).await.json();
    let logs = &value["choices"][0]["prompt_logprobs"];
    assert_eq!(logs[0], Value::Null);
    assert_eq!(logs[1]["99"], json!({"logprob": -1.0, "rank": 1, "decoded_token": "c"}));
    assert_eq!(logs[1]["98"], json!({"logprob": -2.0, "rank": null, "decoded_token": "b"}));
}

#[tokio::test]
async fn logprobs_follow_the_text_that_a_stop_leaves() {
    let script = |_: &_| {
        let said = b"aXYb".iter().map(|&byte| likely(u32::from(byte), -1.0));
        std::iter::once(admitted()).chain(said).chain([finished(Finish::Stop, 0)]).collect()
    };
    let door = open(RouterConfig::default(), script).await;
    for stream in [false, true] {
        let response =
            door.post(PATH, &json!({"prompt": "p", "logprobs": 0, "stop": "XY", "stream": stream})).await;
        let events = if stream { response.events().0 } else { vec![response.json()] };
        let tokens: Vec<&str> = events
            .iter()
            .filter_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array())
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        assert_eq!(tokens, ["a"]);
    }
}

#[tokio::test]
async fn what_is_not_served_is_refused_by_name() {
    let door = open_with_text("x").await;
    let cases = [
        (json!({"prompt": "a", "n": 1, "best_of": 2}), "best_of"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": [512]}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({}), "prompt"),
        (json!({"prompt": [[97], []]}), "prompt"),
        (json!({"prompt": "a", "n": 129}), "n"),
        (json!({"prompt": "a", "n": 0}), "n"),
        (json!({"prompt": vec!["a"; 129]}), "prompt"),
        (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "a", "stream": true, "prompt_logprobs": 1}), "prompt_logprobs"),
        (json!({"prompt": "a", "stream_options": {}}), "stream_options"),
    ];
    for (body, param) in cases {
        let response = door.post(PATH, &body).await;
        assert_eq!((response.status, response.error().0.as_deref()), (400, Some(param)), "{body}");
    }
    assert!(door.backend.submissions.lock().is_empty(), "nothing was submitted");
}

#[tokio::test]
async fn tokens_can_be_had_without_an_answer() {
    let door = open_with_text("x").await;
    for prefix in ["", "/v1"] {
        let value = door.post(&format!("{prefix}/tokenize"), &json!({"prompt": "hé"})).await.json();
        assert_eq!(value, json!({"count": 4, "max_model_len": 2000, "tokens": [256, 104, 195, 169]}));
        let value =
            door.post(&format!("{prefix}/detokenize"), &json!({"tokens": [104, 195, 169, 300]})).await.json();
        assert_eq!(value, json!({"prompt": "hé"}));
    }
    let messages = json!({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": false});
    let value = door.post("/tokenize", &messages).await.json();
    assert_eq!(value["tokens"], json!([256, 258, 117, 115, 101, 114, 10, 97, 259, 10]));
    assert_eq!(door.post("/tokenize", &json!({})).await.error().0.as_deref(), Some("prompt"));
    assert_eq!(door.post("/detokenize", &json!({})).await.error().0.as_deref(), Some("tokens"));
}

#[tokio::test]
async fn models_are_listed_and_found() {
    let door = open_with_text("x").await;
    let value = door.get("/v1/models").await.json();
    let ids: Vec<&str> =
        value["data"].as_array().unwrap().iter().filter_map(|model| model["id"].as_str()).collect();
    assert_eq!((ids, &value["data"][0]["max_model_len"]), (vec!["tiny", "org/tiny"], &json!(2000)));
    for path in ["/v1/models/tiny", "/v1/models/org/tiny", "/v1/models/org%2Ftiny"] {
        assert_eq!(door.get(path).await.json()["object"], "model", "{path}");
    }
    let response = door.get("/v1/models/other").await;
    assert_eq!((response.status, response.error().1.as_deref()), (404, Some("model_not_found")));
    let response = door.post(PATH, &json!({"model": "other", "prompt": "a"})).await;
    assert_eq!((response.status, response.error().0.as_deref()), (404, Some("model")));

    door.backend.ready.store(false, Ordering::SeqCst);
    assert_eq!(door.get("/v1/models").await.json()["data"], json!([]));
    let response = door.post(PATH, &json!({"prompt": "a"})).await;
    assert_eq!((response.status, response.header("retry-after")), (503, Some("2")));
}

#[tokio::test]
async fn the_length_of_an_answer_is_passed_on_only_where_the_client_names_one() {
    let door = open_with_text("ab").await;
    for (fields, asked) in [
        (json!({}), None),
        (json!({"max_tokens": 7}), Some(7)),
        (json!({"max_tokens": 7, "max_completion_tokens": 9}), Some(9)),
    ] {
        let mut body = json!({"prompt": "ab"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        assert_eq!(door.post(PATH, &body).await.status, 200);
        assert_eq!(door.backend.submissions.lock().last().unwrap().asked_tokens, asked, "{body}");
    }
}

/// A vocabulary after SentencePiece, whose decoder takes the space of a text's first word away.
fn words(path: &std::path::Path) {
    let words = ["?", "\u{2581}The", "\u{2581}capital", "\u{2581}is", "\u{2581}Paris"];
    let vocab: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}});
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    std::fs::write(path.join("chat_template.jinja"), template).unwrap();
}

/// The space was lost, and with `echo` two words were one.
#[tokio::test]
async fn an_answer_keeps_the_space_that_it_begins_with() {
    let place = tempfile::tempdir().unwrap();
    words(place.path());
    let script = |_: &baton_router::Submission| {
        let said = [4, 3, 1].map(token);
        std::iter::once(admitted()).chain(said).chain([finished(Finish::Stop, 0)]).collect()
    };
    let reading = Tokenization::folder(place.path()).unwrap();
    let door = open_reading(reading, RouterConfig::default(), script).await;
    let answer = " Paris is The";
    for (more, text) in [
        (json!({"n": 2}), answer.to_owned()),
        (json!({"echo": true}), format!("The capital is{answer}")),
        (json!({"prompt": [1, 2, 3]}), answer.to_owned()),
    ] {
        let mut body = json!({"prompt": "The capital is"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let value = door.post(PATH, &body).await.json();
        assert!(texts(&value).iter().all(|shown| *shown == text), "{body}: {value}");
    }
    let message = json!({"role": "user", "content": "The capital is"});
    for more in ["add_generation_prompt", "continue_final_message"] {
        let value =
            door.post("/v1/chat/completions", &json!({"messages": [message], more: true})).await.json();
        assert_eq!(value["choices"][0]["message"]["content"], answer, "{more}");
    }
}
