//! Hostile clients, templates and models: their input costs at most its limit, and every response is well-formed.

use std::sync::Arc;

use baton_fuzz::{Fuzz, Verdict};
use baton_types::Finish;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::chat::{Chat, Message};
use crate::config::RouterConfig;
use crate::output_parsing::{Message as Spoken, OutputParser, OutputPlan, Part};
use crate::router::Router;
use crate::tokenize::Tokenization;
use crate::tokenize::template::{SpecialTexts, Template};
use crate::tools::{Offer, ToolFormat};
use crate::{Backend, Event, Model, Readiness, ReasoningParser, Submission, SubmissionStream, Usage};

#[global_allocator]
static COUNTING: baton_fuzz::AllocationCounter<std::alloc::System> =
    baton_fuzz::AllocationCounter(std::alloc::System);

/// Says a few words to everything.
struct ShortBackend;

impl Backend for ShortBackend {
    fn submit(&self, submission: Submission) -> SubmissionStream {
        let said = b"<think>a</think><tool_call>{\"name\": \"f\"}</tool_call>";
        let most = usize::try_from(submission.sampling.max_tokens).unwrap_or(usize::MAX).min(said.len());
        let (sender, events) = mpsc::channel(said.len() + 2);
        let say = |event| assert!(sender.try_send(event).is_ok());
        say(Event::Admitted { decision: None });
        for byte in &said[..most] {
            say(Event::Token { token: u32::from(*byte), logprob: None });
        }
        let finish = if most < said.len() { Finish::Length } else { Finish::Stop };
        say(Event::Finished { finish, usage: Usage { cached_tokens: 0, moves: 0 } });
        SubmissionStream { events, guard: Box::new(()) }
    }

    fn model(&self) -> Option<Arc<Model>> {
        Some(Arc::new(Model {
            name: "tiny".into(),
            aliases: vec!["org/tiny".into()],
            revision: "7".into(),
            vocab_tokens: 512,
            end_tokens: vec![257, 259],
            max_model_tokens: 100_000,
            block_tokens: 16,
            constrains: true,
        }))
    }

    fn readiness(&self) -> Readiness {
        Readiness { ready: true, detail: String::new() }
    }
}

const FIELDS: &[&[u8]] = &[
    b"null",
    b"\"stream\":true,",
    b"\"n\":128,",
    b"\"max_tokens\":0,",
    b"\"logprobs\":true,",
    b"\"top_logprobs\":20,",
    b"\"stop\":[\"\"],",
    b"\"echo\":true,",
    b"\"prompt\":[[1,2],[3]],",
    b"\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}],",
    b"\"tool_choice\":\"required\",",
    b"\"response_format\":{\"type\":\"json_schema\"},",
    b"\"logit_bias\":{\"1\":-100},",
    b"\"content\":[{\"type\":\"text\",\"text\":\"a\"}],",
    b"\"continue_final_message\":true,\"add_generation_prompt\":false,",
    b"\"chat_template_kwargs\":{\"messages\":[]},",
    b"\\ud800",
    b"\\u0000",
    b"<|im_start|>",
    b"[[[[[[[[[[[[[[[[",
];

/// Status and body of the answer to a call: a line with its path, then its body.
async fn call(router: &Router, input: &[u8]) -> (u16, Bytes) {
    let at = input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len());
    let path = std::str::from_utf8(&input[..at]).ok().filter(|path| path.starts_with('/'));
    let body = Bytes::copy_from_slice(input.get(at + 1..).unwrap_or_default());
    let request =
        Request::post(path.unwrap_or("/v1/chat/completions")).header("content-type", "application/json");
    let Ok(request) = request.body(Full::new(body)) else { return (400, Bytes::from_static(b"{}")) };
    let (head, body) = router.call(request).await.into_parts();
    let body = body.collect().await.map_or_else(|_| panic!("it broke off"), |body| body.to_bytes());
    (head.status.as_u16(), body)
}

/// Asserts that an answer is JSON, or a stream of it that comes to its end.
fn assert_answer(status: u16, body: &[u8]) {
    // 501 names a feature that no engine behind Baton supports.
    assert!(status < 500 || status == 501, "{status}: {}", body.escape_ascii());
    if status >= 400 {
        let value: Value = serde_json::from_slice(body).expect("an error is JSON");
        assert!(
            value["error"]["message"].is_string() || value == Value::Object(Default::default()),
            "{value}"
        );
        return;
    }
    let text = std::str::from_utf8(body).expect("an answer is text");
    if !text.starts_with("data: ") {
        serde_json::from_str::<Value>(text).expect("an answer is JSON");
        return;
    }
    let mut events: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    for event in events {
        let value: Value = serde_json::from_str(&event["data: ".len()..]).expect("an event is JSON");
        assert!(value["error"].is_null(), "{value}");
    }
}

#[test]
fn fuzz_front_door() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = RouterConfig { reasoning_parser: ReasoningParser::Think, ..RouterConfig::default() };
    let router = Router::new(config, Tokenization::bytes(), Arc::new(ShortBackend));
    // 128 answers of 50 tokens each, as events: some 2 MB.
    Fuzz::new("front_door").cases(5_000).words(FIELDS).max_bytes(16 << 10).memory(8 << 20, 400).run(
        |input| {
            let (status, body) = runtime.block_on(call(&router, input));
            assert_answer(status, &body);
            if status == 200 { Verdict::Read } else { Verdict::Refused }
        },
    );
}

#[test]
fn fuzz_templates() {
    let words: &[&[u8]] = &[
        b"{% for m in messages %}",
        b"{% endfor %}",
        b"{% if true %}",
        b"{% else %}",
        b"{% endif %}",
        b"{{ ",
        b" }}",
        b"{% set ns = namespace(a='') %}",
        b"{% set ns.a = ns.a ~ m.content %}",
        b"{% macro f(x) %}{{ f(x) }}{% endmacro %}",
        b"{% generation %}",
        b"| tojson(indent=16)",
        b"| trim",
        b".split('a')",
        b"range(100000)",
        b"raise_exception('no')",
        b"strftime_now('%Y')",
        b"messages[::-1]",
        b"tools",
        b"\"role\":\"tool\"",
        b"\"content\":null",
        b"((((((((",
        b"[[[[[[[[",
        b"not not not not ",
    ];
    let texts = SpecialTexts { bos: Some("<s>".into()), ..SpecialTexts::default() };
    Fuzz::new("templates").cases(5_000).words(words).max_bytes(8 << 10).memory(64 << 20, 10_000).run(
        |input| {
            let text = String::from_utf8_lossy(input);
            let (template, messages) = text.split_once("\n---\n").unwrap_or((&text[..], "[]"));
            if may_double(template) {
                return Verdict::Refused;
            }
            let Ok(template) = Template::new(template.to_owned(), None, texts.clone()) else {
                return Verdict::Refused;
            };
            let messages: Vec<Message<'_>> = serde_json::from_str(messages).unwrap_or_default();
            let plain = template.render(&Chat::plain(&messages));
            if let Ok(text) = &plain {
                let told_time = template.uses_time;
                assert!(told_time || template.render(&Chat::plain(&messages)).as_ref() == Ok(text));
            }
            let open = Chat { add_generation_prompt: false, continues: true, ..Chat::plain(&messages) };
            Verdict::of(&plain.and(template.render(&open).or(Ok(String::new()))))
        },
    );
}

/// Whether an assignment uses its own target twice, or inside a list, whose text quotes it. Some rounds of such a loop
/// fill any memory, and the renderer has no bound for that. Templates are the operator's: no request can bring one.
fn may_double(template: &str) -> bool {
    template.split("{%").filter_map(|tag| tag.split("%}").next()?.split_once('=')).any(|(target, made)| {
        let words = |text| str::split(text, |c: char| !c.is_alphanumeric() && c != '_');
        let Some(name) = words(target).rfind(|word| !word.is_empty()) else { return false };
        let uses = words(made).filter(|word| *word == name).count();
        uses > 1 || uses == 1 && made.contains([',', '[', '(', '{', '*'])
    })
}

#[test]
fn templates_that_double_their_own_text_are_known() {
    assert!(may_double("{% set ns.a = ns.a ~ ns.a %}") && may_double("{%- set a = a ~ m.content, 8 %}"));
    assert!(!may_double(
        "{% set ns.a = ns.a ~ m.content %}{% if m.role == 'user' %}{% set i = loop.index + [ns] %}"
    ));
}

const MARKS: &[&[u8]] = &[
    b"<tool_call>",
    b"</tool_call>",
    b"<think>",
    b"</think>",
    b"[TOOL_CALLS]",
    b"[ARGS]",
    b"<|python_tag|>",
    b"<|python_start|>",
    b"<|python_end|>",
    "<｜tool▁calls▁begin｜>".as_bytes(),
    "<｜tool▁call▁begin｜>".as_bytes(),
    "<｜tool▁sep｜>".as_bytes(),
    "<｜tool▁call▁end｜>".as_bytes(),
    b"{\"name\": \"weather\", \"arguments\": {",
    b"\"parameters\": ",
    b"weather(city=\"",
    b"\\u00e9",
    b"\\ud83d",
    b"null",
    b"```json\n",
];

const FORMATS: [Option<ToolFormat>; 6] = [
    None,
    Some(ToolFormat::Hermes),
    Some(ToolFormat::Llama3Json),
    Some(ToolFormat::Mistral),
    Some(ToolFormat::Pythonic),
    Some(ToolFormat::DeepSeek),
];

/// Reasoning, content, and the calls' names and arguments.
type AnswerParts = (Option<String>, Option<String>, Vec<(String, String)>);

/// The parsed parts of an answer that arrives in pieces of so many bytes, each rounded to whole characters.
fn spoken(plan: &OutputPlan, text: &str, piece: usize) -> AnswerParts {
    let (mut output, mut parts, mut rest) = (OutputParser::new(plan), Vec::<Part>::new(), text);
    while !rest.is_empty() {
        let at = rest.ceil_char_boundary(piece.min(rest.len()));
        output.push(&rest[..at]);
        parts.append(&mut output.take());
        rest = &rest[at..];
    }
    output.finish();
    parts.append(&mut output.take());
    let message = Spoken::of(parts);
    let calls = message.calls.into_iter().map(|(_, name, arguments)| (name, arguments)).collect();
    (message.reasoning, message.content, calls)
}

#[test]
fn fuzz_answers() {
    // The first byte says how the answer is read; the rest is the answer.
    Fuzz::new("answers").cases(1_500).words(MARKS).max_bytes(8 << 10).memory(512 << 10, 200).run(|input| {
        let (&how, text) = input.split_first().unwrap_or((&0, b""));
        let text = String::from_utf8_lossy(text);
        let format = FORMATS[usize::from(how) % FORMATS.len()];
        let names = ["weather", "now", "a.b-c"].map(str::to_owned).to_vec();
        let offer = Offer { format, forced: None, names, one_only: how & 64 > 0 };
        let offer = format.map(|_| Arc::new(offer));
        let reasoning = (how & 128 > 0).then_some(how & 32 > 0);
        let plan = OutputPlan { offer, reasoning, ..OutputPlan::default() };
        let whole = spoken(&plan, &text, usize::MAX);
        for piece in [1, 7] {
            assert_eq!(spoken(&plan, &text, piece), whole, "in pieces of {piece}");
        }
        if whole.2.is_empty() && whole.0.is_none() { Verdict::Refused } else { Verdict::Read }
    });
}
