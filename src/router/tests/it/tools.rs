//! Tool calls and reasoning: found again in answers, whole and streamed.

use std::path::Path;

use baton_router::{ReasoningParser, RouterConfig, Submission, Tokenization, ToolFormat, ToolParser};
use baton_types::Finish;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::scripted::{
    Door, Step, admitted, finished, likely, open, open_reading, open_with_text, text_script, token,
};

const PATH: &str = "/v1/chat/completions";
const CALL: &str =
    "Let me look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm é\"}}\n</tool_call>";

fn tools() -> Value {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {}}});
    json!([tool("weather"), tool("now")])
}

fn ask(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": tools()});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The message that a client assembles from a stream's deltas: texts joined, calls by index.
fn joined(events: &[Value]) -> Value {
    let mut message = json!({"role": null, "content": null, "refusal": null});
    let mut finish = Value::Null;
    for choice in events.iter().filter_map(|event| event["choices"].get(0)) {
        join(message.as_object_mut().unwrap(), choice["delta"].as_object().unwrap());
        assert!(finish.is_null(), "nothing comes after the end");
        finish = choice["finish_reason"].clone();
    }
    json!({"message": message, "finish_reason": finish})
}

fn join(into: &mut Map<String, Value>, delta: &Map<String, Value>) {
    for (name, value) in delta {
        let at = into.entry(name.clone()).or_insert(Value::Null);
        match (&mut *at, value) {
            (Value::String(before), Value::String(more)) if name != "id" && name != "type" => {
                before.push_str(more)
            }
            (Value::Object(before), Value::Object(more)) => join(before, more),
            (_, Value::Array(calls)) => {
                for call in calls {
                    let mut call = call.as_object().unwrap().clone();
                    let index = call.remove("index").unwrap().as_u64().unwrap() as usize;
                    let list = at.as_array_mut().map(std::mem::take).unwrap_or_default();
                    *at = Value::Array(list);
                    let list = at.as_array_mut().unwrap();
                    assert!(index <= list.len(), "calls come in order");
                    if index == list.len() {
                        assert_eq!(
                            (&call["type"], &call["function"]["arguments"]),
                            (&json!("function"), &json!(""))
                        );
                        assert!(call["function"]["name"].is_string() && call["id"].is_string());
                        list.push(Value::Object(call));
                    } else {
                        assert_eq!(call.keys().collect::<Vec<_>>(), ["function"]);
                        join(list[index].as_object_mut().unwrap(), &call);
                    }
                }
            }
            (_, value) => *at = value.clone(),
        }
    }
}

/// Ids are drawn, and so compared by their shape only.
fn without_ids(mut choice: Value) -> Value {
    for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
        assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
        call["id"] = Value::Null;
    }
    json!({"message": choice["message"], "finish_reason": choice["finish_reason"]})
}

/// Asks both ways, sees that the answer is the same, and gives it without ids.
async fn both_ways(door: &Door, body: &Value) -> Value {
    let response = door.post(PATH, body).await;
    assert_eq!(response.status, 200, "{:?}", response.body);
    let whole = without_ids(response.json()["choices"][0].clone());
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let (events, done) = door.post(PATH, &streamed).await.events();
    assert!(done);
    let mut told = without_ids(joined(&events));
    if whole["message"].get("reasoning_content") == Some(&Value::Null) {
        told["message"]["reasoning_content"] = Value::Null;
    }
    assert_eq!(told, whole);
    whole
}

#[tokio::test]
async fn a_call_has_the_apis_shape() {
    let door = open_with_text(CALL).await;
    let choice = both_ways(&door, &ask(json!({}))).await;
    let call = json!({"id": null, "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Ulm é\"}"}});
    let message =
        json!({"role": "assistant", "content": "Let me look.", "refusal": null, "tool_calls": [call]});
    assert_eq!(choice, json!({"message": message, "finish_reason": "tool_calls"}));

    let (events, _) = door.post(PATH, &ask(json!({"stream": true}))).await.events();
    let delta = |at: usize| events[at]["choices"][0]["delta"].clone();
    assert_eq!(delta(0), json!({"role": "assistant", "content": null}));
    assert_eq!(delta(1), json!({"content": "L"}), "text is not held up");
    let calls: Vec<Value> =
        (0..events.len()).map(delta).filter(|delta| delta.get("tool_calls").is_some()).collect();
    assert_eq!(calls[1], json!({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}));
    assert!(calls.len() > 10, "arguments come in pieces");
}

#[tokio::test]
async fn without_tools_or_parser_the_text_stays() {
    let door = open_with_text(CALL).await;
    let text = |value: Value| value["choices"][0].clone();
    for body in [ask(json!({"tool_choice": "none"})), ask(json!({"tools": []})), ask(json!({"tools": null}))]
    {
        let choice = text(door.post(PATH, &body).await.json());
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(CALL), &json!("stop")));
    }
    let config = RouterConfig { tool_parser: ToolParser::None, ..RouterConfig::default() };
    let door = open(config, |_| text_script(CALL)).await;
    assert_eq!(text(door.post(PATH, &ask(json!({}))).await.json())["message"]["content"], CALL);
    let response = door.post(PATH, &ask(json!({"tool_choice": "required"}))).await;
    assert_eq!((response.status, response.error().0.as_deref()), (400, Some("tool_choice")));
}

#[tokio::test]
async fn choices_of_tools_are_checked() {
    let door = open_with_text("No call.").await;
    let named = |name: &str| json!({"tool_choice": {"type": "function", "function": {"name": name}}});
    // An engine that cannot be held to a call might make none.
    for body in [json!({"tool_choice": "required"}), named("weather")] {
        let response = door.post(PATH, &ask(body)).await;
        assert_eq!((response.status, response.error().0.as_deref()), (400, Some("tool_choice")));
    }
    door.backend.constrains.store(true, std::sync::atomic::Ordering::SeqCst);
    let mut without = ask(json!({"tool_choice": "required"}));
    without.as_object_mut().unwrap().remove("tools");
    for bad in
        [ask(named("absent")), ask(json!({"tool_choice": "must"})), ask(json!({"tool_choice": 5})), without]
    {
        let response = door.post(PATH, &bad).await;
        assert_eq!((response.status, response.error().0.as_deref()), (400, Some("tool_choice")), "{bad}");
    }
}

#[tokio::test]
async fn tools_that_are_no_functions_are_refused() {
    let door = open_with_text("No call.").await;
    let good = tools()[0].clone();
    for bad in [
        json!(5),
        json!(null),
        json!("weather"),
        json!({}),
        json!({"type": "x"}),
        json!({"type": "x", "function": {"name": "weather"}}),
        json!({"type": "function"}),
        json!({"type": "function", "function": {}}),
        json!({"type": "function", "function": {"name": null}}),
        json!({"type": "function", "function": {"name": ""}}),
    ] {
        for choice in ["auto", "none"] {
            let response = door.post(PATH, &ask(json!({"tools": [good, bad], "tool_choice": choice}))).await;
            let expected = (Some("tools".to_owned()), Some("invalid_value".to_owned()));
            assert_eq!((response.status, response.error()), (400, expected), "{bad}");
            assert!(String::from_utf8_lossy(&response.body).contains("tools[1]"), "{response:?}");
        }
    }
    // As vLLM: a tool without a type is a function.
    let untyped = json!({"tools": [{"function": {"name": "weather", "strict": true}}]});
    assert_eq!(door.post(PATH, &ask(untyped)).await.status, 200);
}

#[tokio::test]
async fn a_demanded_call_is_a_grammar_for_the_engine_and_is_read_by_it() {
    let list = "[{\"name\": \"weather\", \"parameters\": {\"city\": \"Ulm\"}}, {\"name\": \"now\", \"parameters\": {}}]";
    let named = json!({"tool_choice": {"type": "function", "function": {"name": "weather"}}});
    let cases = [(json!({"tool_choice": "required"}), list, 2), (named, "{\"city\": \"Ulm\"}", 1)];
    for (choice, text, calls) in cases {
        // No parser is needed: the grammar says what a call looks like.
        let config = RouterConfig { tool_parser: ToolParser::None, ..RouterConfig::default() };
        let door = open(config, move |_| text_script(text)).await;
        door.backend.constrains.store(true, std::sync::atomic::Ordering::SeqCst);
        let told = both_ways(&door, &ask(choice.clone())).await;
        let made = told["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{told}"));
        assert_eq!((made.len(), &made[0]["function"]["name"]), (calls, &json!("weather")));
        let arguments: Value =
            serde_json::from_str(made[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": "Ulm"}));
        assert_eq!(told["message"]["content"], Value::Null);
        let body: Value = serde_json::from_slice(&door.backend.submissions.lock()[0].body).unwrap();
        let schema = &body["response_format"]["json_schema"]["schema"];
        assert_eq!(schema["type"], if calls == 2 { "array" } else { "object" }, "{schema}");
        if calls == 2 {
            assert_eq!(schema["items"]["anyOf"][0]["properties"]["name"]["enum"], json!(["weather"]));
            assert_eq!((&schema["minItems"], &schema["maxItems"]), (&json!(1), &Value::Null));
        }
    }
}

#[tokio::test]
async fn several_calls_or_only_one_and_a_cut_one() {
    let text: &'static str = "<tool_call>{\"name\": \"now\"}</tool_call>\n<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>";
    let door = open_with_text(text).await;
    let count = |choice: &Value| choice["message"]["tool_calls"].as_array().unwrap().len();
    assert_eq!(count(&both_ways(&door, &ask(json!({}))).await), 2);
    let first = both_ways(&door, &ask(json!({"parallel_tool_calls": false}))).await;
    assert_eq!((count(&first), &first["message"]["content"]), (1, &Value::Null));

    let door = open(RouterConfig::default(), |_| {
        let mut steps = text_script(&CALL[..CALL.len() - 20]);
        steps.pop();
        steps.push(finished(Finish::Length, 0));
        steps
    })
    .await;
    let cut = both_ways(&door, &ask(json!({}))).await;
    assert_eq!((count(&cut), &cut["finish_reason"]), (1, &json!("length")));
}

#[tokio::test]
async fn reasoning_is_a_field_of_its_own() {
    let config = RouterConfig { reasoning_parser: ReasoningParser::Think, ..RouterConfig::default() };
    let text = format!("<think>\nUlm, then.\n</think>\n\n{CALL}");
    let door = open(config.clone(), move |_| text_script(&text)).await;
    let choice = both_ways(&door, &ask(json!({}))).await;
    let message = &choice["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Ulm, then."), &json!("Let me look."))
    );
    assert_eq!(choice["finish_reason"], "tool_calls");

    let door = open(config, |_| text_script("No reasons.")).await;
    let choice = both_ways(&door, &ask(json!({"tools": null}))).await;
    let message = &choice["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&Value::Null, &json!("No reasons.")));
}

/// The engine may know of reasoning and hold only the answer to the grammar, or hold all of it.
#[tokio::test]
async fn an_answer_of_json_after_an_open_thought_is_found_with_and_without_the_thought() {
    let named = json!({"type": "function", "function": {"name": "now"}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}});
    for (more, text) in [
        (json!({"tool_choice": named}), "{\"a\": 1}"),
        (json!({"tool_choice": "required"}), "[{\"name\": \"now\", \"parameters\": {\"a\": 1}}]"),
        (json!({"tools": null, "response_format": format}), "{\"a\": 1}"),
    ] {
        for thought in ["", "Why.\n</think>\n"] {
            let config = RouterConfig { reasoning_parser: ReasoningParser::Think, ..RouterConfig::default() };
            let door = open(config, move |_| text_script(&format!("{thought}{text}"))).await;
            door.backend.constrains.store(true, std::sync::atomic::Ordering::SeqCst);
            let mut body = ask(more.clone());
            body["messages"] =
                json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\n"}]);
            body["continue_final_message"] = true.into();
            let message = both_ways(&door, &body).await["message"].clone();
            let shown = if body["tools"].is_null() {
                &message["content"]
            } else {
                &message["tool_calls"][0]["function"]["arguments"]
            };
            assert_eq!(shown, "{\"a\": 1}", "{message}");
            let reason = if thought.is_empty() { Value::Null } else { json!("Why.") };
            assert_eq!(message["reasoning_content"], reason);
            let sent: Value = serde_json::from_slice(&door.backend.submissions.lock()[0].body).unwrap();
            assert_eq!(sent["require_reasoning"], true);
        }
    }
    // A client may ask for the other, and elsewhere there is no thought or no grammar.
    let config = RouterConfig { reasoning_parser: ReasoningParser::Think, ..RouterConfig::default() };
    let door = open(config, |_| text_script("Yes.")).await;
    let open_thought = json!({"messages": [{"role": "assistant", "content": "<think>"}],
        "continue_final_message": true});
    let with = |more: Value| {
        let mut body = open_thought.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for (body, sent) in [
        (with(json!({"regex": "Yes."})), json!(true)),
        (with(json!({"regex": "Yes.", "require_reasoning": false})), json!(false)),
        (with(json!({})), Value::Null),
        (ask(json!({"regex": "Yes."})), Value::Null),
    ] {
        assert_eq!(door.post(PATH, &body).await.status, 200);
        let submission = door.backend.submissions.lock().pop().unwrap();
        let body: Value = serde_json::from_slice(&submission.body).unwrap();
        assert_eq!(body["require_reasoning"], sent);
    }
}

/// vLLM's word for leaving it out, and SGLang's for leaving it where it is.
#[tokio::test]
async fn reasoning_is_left_out_or_left_where_it_is_where_that_is_wanted() {
    let config = RouterConfig { reasoning_parser: ReasoningParser::Think, ..RouterConfig::default() };
    let door = open(config, |_| text_script("<think>\nUlm, then.\n</think>\n\nYes.")).await;
    for (wish, told) in [
        (json!({"tools": null, "include_reasoning": false}), "Yes."),
        (json!({"tools": null, "separate_reasoning": false}), "<think>\nUlm, then.\n</think>\n\nYes."),
    ] {
        let message = both_ways(&door, &ask(wish)).await["message"].clone();
        assert!(message.get("reasoning_content").is_none_or(Value::is_null), "{message}");
        assert_eq!(message["content"], told);
    }
}

/// A vocabulary whose marks are special tokens, and whose template opens the reasoning.
fn folder(path: &Path) {
    let words = [
        "?",
        "[TOOL_CALLS]",
        "</think>",
        "<pad>",
        "Well.",
        "[{\"name\":",
        "\"now\"}]",
        "hm",
        "user:",
        "hi",
        "<think>",
    ];
    let vocab: Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let special = |id: usize| {
        json!({"id": id, "content": words[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(1), special(2), special(3)], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}});
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{# [TOOL_CALLS] #}{% for m in messages %}user: {{ m.content }} {% endfor %}<think>\n";
    std::fs::write(path.join("chat_template.jinja"), template).unwrap();
}

#[tokio::test]
async fn marks_that_are_special_tokens_are_seen_and_not_shown() {
    let place = tempfile::tempdir().unwrap();
    folder(place.path());
    let script = |_: &Submission| {
        let said = [7, 3, 2, 4, 3, 1, 5, 6].map(token);
        std::iter::once(admitted()).chain(said).chain([finished(Finish::Stop, 0)]).collect()
    };
    let reading = || Tokenization::folder(place.path()).unwrap();
    let think = RouterConfig { reasoning_parser: ReasoningParser::Think, ..RouterConfig::default() };
    let door = open_reading(reading(), think, script).await;
    let choice = door.post(PATH, &ask(json!({}))).await.json()["choices"][0].clone();
    let message = &choice["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("hm"), &json!("Well.")));
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "now", "arguments": "{}"}));
    assert_eq!(message["tool_calls"][0]["id"].as_str().unwrap().len(), 9, "Mistral's ids");

    // Where nothing looks for them they are left out, as ever.
    let plain = RouterConfig { tool_parser: ToolParser::None, ..RouterConfig::default() };
    let door = open_reading(reading(), plain, script).await;
    let value = door.post(PATH, &ask(json!({}))).await.json();
    assert_eq!(value["choices"][0]["message"]["content"], " hm Well. [{\"name\": \"now\"}]");
}

#[tokio::test]
async fn logprobs_and_stop_strings_go_with_calls() {
    let door = open(RouterConfig::default(), |_| {
        let said = CALL.bytes().map(|byte| likely(u32::from(byte), -0.5));
        std::iter::once(admitted()).chain(said).chain([finished(Finish::Stop, 0)]).collect()
    })
    .await;
    let body = ask(json!({"logprobs": true, "stop": "</tool"}));
    let choice = both_ways(&door, &body).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
    let logs = |value: &Value| value["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    let whole = logs(&door.post(PATH, &body).await.json()["choices"][0]);
    let mut streamed = body;
    streamed["stream"] = true.into();
    let (events, _) = door.post(PATH, &streamed).await.events();
    let told: Vec<Value> = events.iter().flat_map(|event| logs(&event["choices"][0])).collect();
    assert_eq!((whole.len(), &told), (CALL.len() - "</tool_call>".len(), &whole));
}

const WORDS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "{\"name\": \"now\"",
    ", \"arguments\": ",
    "{\"a\": \"é\"}",
    "{}",
    "}",
    " ",
    "\n",
    "<think>",
    "</think>",
    "[now(a=1)]",
    "[",
    "x",
    "é",
    "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}</tool_call>",
    "{\"name\": \"weather\", \"parameters\": {}}",
    ";",
    "[TOOL_CALLS]",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn deltas_joined_are_the_whole_answer(
        words in proptest::collection::vec(proptest::sample::select(WORDS), 0..10),
        format in proptest::sample::select(&[ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Pythonic][..]),
        thinks in any::<bool>(),
        one_only in any::<bool>(),
        stops in proptest::collection::vec("[}<é]{1,2}", 0..2),
    ) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let text = words.concat();
            let reasoning_parser = if thinks { ReasoningParser::Think } else { ReasoningParser::None };
            let tool_parser = ToolParser::Format(format);
            let config = RouterConfig { tool_parser, reasoning_parser, ..RouterConfig::default() };
            let door = open(config, move |_: &Submission| -> Vec<Step> { text_script(&text) }).await;
            both_ways(&door, &ask(json!({"parallel_tool_calls": !one_only, "stop": stops}))).await;
        });
    }
}
