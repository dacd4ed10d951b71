//! Answers to clients: chats, completions, streams, usage, and errors that can be read.

use serde_json::{Value, json};

use super::http::{self, OpenAnswer};
use super::service::{Service, chat, completion};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The content of a stream.
#[derive(Debug, Default, PartialEq)]
struct StreamedAnswer {
    text: String,
    tokens: Vec<String>,
    finish: Vec<String>,
    usage: Value,
    done: bool,
}

/// Reads a stream of completions or chats to its end.
fn read(mut open: OpenAnswer) -> StreamedAnswer {
    let mut told = StreamedAnswer::default();
    while let Some(data) = open.event().unwrap() {
        assert!(!told.done, "something came after the end: {data}");
        if data == "[DONE]" {
            told.done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(&data).unwrap();
        assert!(chunk["error"].is_null(), "{chunk}");
        for choice in chunk["choices"].as_array().unwrap() {
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
            told.text.push_str(text.unwrap_or_default());
            told.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
            for token in choice["logprobs"]["tokens"].as_array().into_iter().flatten() {
                told.tokens.push(token.as_str().unwrap().to_owned());
            }
        }
        if chunk["usage"].is_object() {
            told.usage = chunk["usage"].clone();
        }
    }
    told
}

/// The request as a stream that reports its usage.
fn streaming(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// A stop string cancels the request in the engine, and the client still learns how much was reused.
#[test]
fn a_stop_string_leaves_the_usage_whole() {
    let service = Service::up(&["--nodes", "1p1d"]);
    let mut body = completion(&"Four seasons: spring, summer, autumn and so on. ".repeat(4), 200);
    let whole = service.ask(COMPLETIONS, &body).ok().json();
    let text: String = whole["choices"][0]["text"].as_str().unwrap().chars().skip(3).take(2).collect();
    body["stop"] = json!(text);
    let stopped = service.ask(COMPLETIONS, &body).ok().json();
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let reused = |usage: &Value| number(&usage["prompt_tokens_details"]["cached_tokens"]);
    let expected = number(&stopped["usage"]["prompt_tokens"]) / 16 * 16;
    assert!(expected > 100 && reused(&stopped["usage"]) + 16 >= expected, "{stopped}");
    let streamed = read(service.open(COMPLETIONS, &streaming(&body)));
    assert_eq!((streamed.finish, reused(&streamed.usage)), (vec!["stop".into()], reused(&stopped["usage"])));
    service.quiet(std::time::Duration::from_secs(10));
}

/// Text, tokens and end are equal whether the request streams or not, alone or beside others.
#[test]
fn a_stream_is_the_whole_answer_alone_and_beside_others() {
    let service = Service::up(&["--nodes", "1p1d"]);
    let mut greedy = completion("Four seasons: spring,", 24);
    greedy["logprobs"] = json!(1);
    let mut drawn = greedy.clone();
    (drawn["temperature"], drawn["seed"], drawn["top_p"]) = (json!(1.1), json!(42), json!(0.9));
    for body in [greedy, drawn] {
        let whole = service.ask(COMPLETIONS, &body).ok().json();
        let streamed = read(service.open(COMPLETIONS, &streaming(&body)));
        let choice = &whole["choices"][0];
        assert_eq!(Some(streamed.text.as_str()), choice["text"].as_str());
        assert_eq!(json!(streamed.tokens), choice["logprobs"]["tokens"]);
        assert_eq!((streamed.tokens.len(), streamed.done), (24, true));
        assert_eq!((streamed.finish, &choice["finish_reason"]), (vec!["length".into()], &json!("length")));
        assert_eq!(number(&streamed.usage["completion_tokens"]), 24);
    }
    let bodies: Vec<Value> = (0..12).map(|at| chat(&format!("Question {at}: why?"), 10 + at)).collect();
    let ask = |body: &Value| service.ask(CHAT, body).ok().json()["choices"][0]["message"]["content"].clone();
    let alone: Vec<Value> = bodies.iter().map(ask).collect();
    std::thread::scope(|scope| {
        let streams = bodies.iter().map(|body| scope.spawn(|| read(service.open(CHAT, &streaming(body)))));
        let streams: Vec<_> = streams.collect();
        for (at, (stream, alone)) in streams.into_iter().zip(&alone).enumerate() {
            let stream = stream.join().unwrap();
            assert_eq!((stream.done, json!(stream.text)), (true, alone.clone()), "question {at}");
            assert_eq!(number(&stream.usage["completion_tokens"]), 10 + at as u64);
        }
    });
    service.quiet(std::time::Duration::from_secs(10));
}

/// The second turn is not computed again for the blocks that the first one left in the cache.
#[test]
fn the_second_turn_of_a_talk_finds_the_first_one_cached() {
    let service = Service::up(&["--nodes", "1p1d"]);
    let long = "Baton hands the cache over from one runner to the next. ".repeat(5);
    let first = service.ask(CHAT, &chat(&long, 40)).ok().json();
    let cached = |answer: &Value| number(&answer["usage"]["prompt_tokens_details"]["cached_tokens"]);
    let prompt = number(&first["usage"]["prompt_tokens"]);
    assert_eq!((cached(&first), number(&first["usage"]["completion_tokens"])), (0, 40));
    assert_eq!(number(&first["usage"]["total_tokens"]), prompt + 40);
    let mut turn = chat(&long, 8);
    let messages = turn["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": first["choices"][0]["message"]["content"]}));
    messages.push(json!({"role": "user", "content": "And then?"}));
    let second = service.ask(CHAT, &turn).ok().json();
    let found = cached(&second);
    // Whole blocks of 16 tokens are found; the end of the first prompt opens the answer.
    assert!(found + 32 >= prompt && found % 16 == 0, "{found} of {prompt} tokens were found: {second}");
    // A conversation with another salt shares no cached block.
    let mut other = turn.clone();
    other["cache_salt"] = json!("somebody else");
    assert_eq!(cached(&service.ask(CHAT, &other).ok().json()), 0);
}

/// Every client mistake is answered with an error object that names it.
#[test]
fn mistakes_are_answered_in_words() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1p1d"]);
    let json_type = ("content-type", "application/json");
    let refused = |status: u16, code: &str, reply: http::Reply| {
        assert_eq!((reply.status, reply.error_code().as_str()), (status, code), "{reply:?}");
        reply
    };
    let unknown = service.get("/v1/nowhere");
    assert_eq!(unknown.status, 404, "{unknown:?}");
    unknown.error_code();
    let method = service.get(COMPLETIONS);
    assert_eq!((method.status, method.header("allow")), (405, Some("POST")), "{method:?}");
    method.error_code();
    refused(400, "invalid_json", service.post(CHAT, &[json_type], "{\"messages\": [}"));
    refused(400, "too_deep", service.post(CHAT, &[json_type], &format!("{{\"x\":{}", "[".repeat(100_000))));
    service.post(CHAT, &[("content-type", "text/csv")], "a,b").error_code();
    let wrong = refused(400, "invalid_value", service.ask(CHAT, &json!({"messages": "hello"})));
    assert_eq!(wrong.json()["error"]["param"], "messages");
    let mut other = chat("hi", 1);
    other["model"] = json!("another");
    refused(404, "model_not_found", service.ask(CHAT, &other));
    let class = service.post(CHAT, &[json_type, ("x-baton-class", "gold")], &chat("hi", 1).to_string());
    let class = refused(400, "unknown_class", class);
    assert!(class.text.contains("default"), "it names those that there are: {}", class.text);
    let long = service.ask(COMPLETIONS, &completion(&"x".repeat(200_000), 1));
    assert_eq!(long.status, 400, "{long:?}");
    long.error_code();
    // And the service is none the worse for it.
    service.ask(CHAT, &chat("hi", 3)).ok();
    assert_eq!(service.get("/health").status, 200);
    assert_eq!(service.get("/ready").status, 200);
    assert!(service.get("/metrics").ok().text.contains("baton_"), "metrics are there");
}

/// A stream that has nothing to say yet says that it lives; a client's time limit ends its request.
#[test]
fn a_silent_stream_is_kept_alive_and_time_limit_ends_it() {
    let config = "[scheduler]\nblock_tokens = 16\n[service]\nkeep_alive_us = 50_000\n";
    let service = Service::configured(config, &["--engine", "timed", "--nodes", "1p1d"]);
    let long = completion(&"word ".repeat(1_500), 3);
    let silent = service.ask(COMPLETIONS, &streaming(&long)).ok().text;
    let (before, _) = silent.split_once("data: ").unwrap();
    assert!(before.matches(": keep-alive\n\n").count() >= 3, "{silent}");
    assert!(silent.ends_with("data: [DONE]\n\n"), "{silent}");
    let impatient = |body: &Value| {
        let mut body = body.clone();
        body["cache_salt"] = json!("nothing is cached");
        let headers = [("content-type", "application/json"), ("x-request-timeout-ms", "200")];
        service.post(COMPLETIONS, &headers, &body.to_string())
    };
    let whole = impatient(&long);
    assert_eq!((whole.status, whole.error_code().as_str()), (504, "prefill_timeout"), "{whole:?}");
    assert!(whole.text.contains("the client's time ran out"), "{whole:?}");
    // The 200 is out already: the error comes as an event, and no [DONE] after it.
    let streamed = impatient(&streaming(&long));
    let last = streamed.text.trim_end().rsplit("data: ").next().unwrap().to_owned();
    assert!(last.contains("prefill_timeout") && !streamed.text.contains("[DONE]"), "{streamed:?}");
    service.quiet(std::time::Duration::from_secs(5));
}
