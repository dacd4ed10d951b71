//! Calls of every format: found, given back, bounded, and the same however the text comes.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::output_parsing::{Message, OutputParser, OutputPlan, Part};

const FORMATS: [ToolFormat; 5] = [
    ToolFormat::Hermes,
    ToolFormat::Llama3Json,
    ToolFormat::Mistral,
    ToolFormat::Pythonic,
    ToolFormat::DeepSeek,
];

fn output(format: ToolFormat, one_only: bool) -> OutputParser {
    let names = ["weather", "now", "a.b-c"].map(str::to_owned).to_vec();
    let offer = Some(Arc::new(Offer { format: Some(format), forced: None, names, one_only }));
    OutputParser::new(&OutputPlan { offer, ..OutputPlan::default() })
}

fn parts(pieces: &[&str], mut output: OutputParser) -> Vec<Part> {
    let mut parts = Vec::new();
    for piece in pieces {
        output.push(piece);
        parts.append(&mut output.take());
    }
    output.finish();
    parts.append(&mut output.take());
    parts
}

/// Content, and names and arguments of the calls.
fn summary(message: Message) -> (Option<String>, Vec<(String, String)>) {
    let calls = message.calls.into_iter().map(|(_, name, arguments)| (name, arguments)).collect();
    (message.content, calls)
}

fn read(format: ToolFormat, text: &str) -> (Option<String>, Vec<(String, String)>) {
    summary(Message::of(parts(&[text], output(format, false))))
}

#[track_caller]
fn assert_reads(format: ToolFormat, text: &str, content: Option<&str>, calls: &[(&str, &str)]) {
    let calls: Vec<(String, String)> =
        calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect();
    assert_eq!(read(format, text), (content.map(str::to_owned), calls), "{text}");
}

/// That no call is found, and all of the text is given back.
#[track_caller]
fn assert_text(format: ToolFormat, text: &str) {
    assert_reads(format, text, Some(text), &[]);
}

const ULM: &str = r#"{"city": "Ulm", "days": [1, {"x": null}]}"#;

#[test]
fn hermes() {
    let one = format!(r#"<tool_call>{{"name": "weather", "arguments": {ULM}}}</tool_call>"#);
    let with = |text: &str, content: Option<&str>, calls: &[(&str, &str)]| {
        assert_reads(ToolFormat::Hermes, text, content, calls);
    };
    with(&one, None, &[("weather", ULM)]);
    with(&format!("I look.\n\n{one}\n"), Some("I look."), &[("weather", ULM)]);
    let other = "<tool_call>\n{\"arguments\": {}, \"name\": \"anything\"}\n</tool_call>";
    with(&format!("{one}\n{other}"), None, &[("weather", ULM), ("anything", "{}")]);
    with(&format!("{one} and {other} so"), Some(" and so"), &[("weather", ULM), ("anything", "{}")]);
    with("<tool_call>{\"name\": \"now\"}</tool_call>", None, &[("now", "{}")]);
    with("<tool_call>{\"name\": \"now\", \"arguments\": null}", None, &[("now", "{}")]);
    with(
        r#"<tool_call>{"id": 7, "name": "now", "arguments": "{\"a\": \"é\"}"}"#,
        None,
        &[("now", r#"{"a": "é"}"#)],
    );
    // Cut short: what was said of it is said.
    with(r#"<tool_call>{"name": "now", "arguments": {"a": "b"#, None, &[("now", r#"{"a": "b"#)]);
    with(&one[..one.len() - 3], None, &[("weather", ULM)]);
}

#[test]
fn what_is_no_hermes_call_is_text() {
    for text in [
        "<tool_call>",
        "<tool_call>weather</tool_call>",
        "<tool_call>{\"name\": \"weather\"",
        "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"a\\n\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"a\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{'name': 'a', 'arguments': {}}</tool_call>",
        "<tool_call>{\"name\": \"a\", \"name\": \"b\"}</tool_call>",
        "a <tool_cal </tool_call> < b\n",
        "{\"name\": \"weather\", \"arguments\": {}}",
    ] {
        assert_text(ToolFormat::Hermes, text);
    }
    // A bad call takes nothing from the good one after it.
    let text = "<tool_call>{\"name\": bad}</tool_call>\n<tool_call>{\"name\": \"now\"}</tool_call>";
    assert_reads(ToolFormat::Hermes, text, Some("<tool_call>{\"name\": bad}</tool_call>"), &[("now", "{}")]);
    let text = "<tool_call><tool_call>{\"name\": \"now\"}</tool_call>";
    assert_reads(ToolFormat::Hermes, text, Some("<tool_call>"), &[("now", "{}")]);
    // Arguments that break off after they were begun stay as they are, and the rest is text.
    let text = "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": oops}}</tool_call>";
    assert_reads(ToolFormat::Hermes, text, Some("oops}}</tool_call>"), &[("now", "{\"a\": ")]);
}

#[test]
fn llama() {
    let with = |text: &str, content: Option<&str>, calls: &[(&str, &str)]| {
        assert_reads(ToolFormat::Llama3Json, text, content, calls);
    };
    let one = format!(r#"{{"name": "weather", "parameters": {ULM}}}"#);
    let typed = r#"{"type": "function", "name": "now", "parameters": {}}"#;
    with(&one, None, &[("weather", ULM)]);
    with(&format!("\n<|python_tag|>{one}"), None, &[("weather", ULM)]);
    with(&format!("{one}; {typed}"), None, &[("weather", ULM), ("now", "{}")]);
    with(&format!("{one}\n{typed} That is it."), Some(" That is it."), &[("weather", ULM), ("now", "{}")]);
    with(&format!("See: <|python_tag|>{one}"), Some("See:"), &[("weather", ULM)]);
    for text in [
        r#"{"name": "Bob", "parameters": {"age": 5}}"#,
        r#"{"name": "weather", "age": 5}"#,
        r#"{"answer": 42}"#,
        "So: {\"name\": \"weather\", \"parameters\": {}}",
        "<|python_tag|>print(1)",
        "{",
        "; {\"name\": \"now\"}",
    ] {
        assert_text(ToolFormat::Llama3Json, text);
    }
    // A mark says that it is a call, whatever its name.
    with("<|python_tag|>{\"name\": \"other\", \"parameters\": {}}", None, &[("other", "{}")]);
}

#[test]
fn mistral() {
    let with = |text: &str, content: Option<&str>, calls: &[(&str, &str)]| {
        assert_reads(ToolFormat::Mistral, text, content, calls);
    };
    let list = format!(
        r#"[TOOL_CALLS] [{{"name": "weather", "arguments": {ULM}, "id": "abc"}}, {{"name": "now", "arguments": {{}}}}]"#
    );
    with(&list, None, &[("weather", ULM), ("now", "{}")]);
    with(&format!("Well. {list} x"), Some("Well. x"), &[("weather", ULM), ("now", "{}")]);
    with(
        &format!("[TOOL_CALLS]weather[ARGS]{ULM}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS] {{}}"),
        None,
        &[("weather", ULM), ("now", "{}")],
    );
    with("[TOOL_CALLS]a.b-c{\"x\": 1}", None, &[("a.b-c", "{\"x\": 1}")]);
    for text in [
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]weather",
        "[TOOL_CALLS]weather[ARG]{}",
        "[TOOL] [CALLS]",
        "[TOOL_CALLS]now[ARGS]5",
    ] {
        assert_text(ToolFormat::Mistral, text);
    }
    with(r#"[TOOL_CALLS][{"name": "now"}, 5]"#, Some(", 5]"), &[("now", "{}")]);
    let parts = parts(&[&list], output(ToolFormat::Mistral, false));
    let ids: Vec<&String> = parts
        .iter()
        .filter_map(|part| match part {
            Part::Call { id, .. } => Some(id),
            _ => None,
        })
        .collect();
    assert!(
        ids.iter().all(|id| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())),
        "{ids:?}"
    );
}

#[test]
fn pythonic() {
    let with = |text: &str, content: Option<&str>, calls: &[(&str, &str)]| {
        assert_reads(ToolFormat::Pythonic, text, content, calls);
    };
    with(
        "[weather(city='Ulm \"x\"', days = [1, None], deep={'a': True}), now()]",
        None,
        &[("weather", r#"{"city": "Ulm \"x\"", "days": [1, null], "deep": {"a": true}}"#), ("now", "{}")],
    );
    with("<|python_start|>[now( ), a.b-c(n=-5)]\n", None, &[("now", "{}"), ("a.b-c", "{\"n\": -5}")]);
    for text in [
        "[1] and [2]",
        "[weather](http://x)",
        "[other(a=1)]",
        "[weather('Ulm')]",
        "so [now()]",
        "[",
        "[]",
        "[now",
        "[now(,)]",
    ] {
        assert_text(ToolFormat::Pythonic, text);
    }
    with("[now(a=1,)]", None, &[("now", "{\"a\": 1}")]);
    with("[now(a=1, 2)]", Some("2)]"), &[("now", "{\"a\": 1")]);
    with("[now(), other()]", Some(", other()]"), &[("now", "{}")]);
}

#[test]
fn deepseek() {
    let old = |name: &str, json: &str| {
        format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>")
    };
    let new = |name: &str, json: &str| {
        format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>")
    };
    let (begin, end) = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>");
    for form in [&old as &dyn Fn(&str, &str) -> String, &new] {
        let text = format!("Well.\n{begin}{}\n{}{end}", form("weather", ULM), form("now", "{}"));
        assert_reads(ToolFormat::DeepSeek, &text, Some("Well."), &[("weather", ULM), ("now", "{}")]);
        let cut = format!("{begin}{}", form("now", "{}"));
        assert_reads(ToolFormat::DeepSeek, &cut, None, &[("now", "{}")]);
        assert_text(ToolFormat::DeepSeek, &format!("{begin}{end}"));
        assert_text(ToolFormat::DeepSeek, &format!("{begin}{}", form("now", "[]")));
    }
}

#[test]
fn only_the_first_call_when_one_is_wanted() {
    let text = r#"<tool_call>{"name": "now"}</tool_call> <tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>"#;
    let message = Message::of(parts(&[text], output(ToolFormat::Hermes, true)));
    assert_eq!(summary(message), (None, vec![("now".to_owned(), "{}".to_owned())]));
}

#[test]
fn a_call_is_told_as_it_comes() {
    let mut output = output(ToolFormat::Hermes, false);
    let mut told = |piece: &str| {
        output.push(piece);
        output.take()
    };
    assert_eq!(told("Hi <"), [Part::Content("Hi".to_owned())]);
    assert_eq!(told("b> "), [Part::Content(" <b>".to_owned())]);
    assert_eq!(told("<tool_call>{\"name\": \"now\", \"arguments\": "), []);
    let begun = told("{\"a");
    let [Part::Call { index: 0, id, name }, Part::Arguments { index: 0, text }] = &begun[..] else {
        panic!("{begun:?}")
    };
    assert!(id.starts_with("call_") && id.len() > 20, "{id}");
    assert_eq!((name.as_str(), text.as_str()), ("now", "{\"a"));
    assert_eq!(told("\": 1"), [Part::Arguments { index: 0, text: "\": 1".to_owned() }]);
    assert_eq!(told("}}</tool_call>"), [Part::Arguments { index: 0, text: "}".to_owned() }]);
    assert!(output.has_calls());
}

#[test]
fn what_is_held_back_and_the_calls_are_bounded() {
    let long = "x".repeat(300 << 10);
    let text = format!("<tool_call>{{\"arguments\": {{\"a\": \"{long}\"}}, \"name\": \"now\"}}</tool_call>");
    assert_text(ToolFormat::Hermes, &text);
    let name_first =
        format!("<tool_call>{{\"name\": \"now\", \"arguments\": {{\"a\": \"{long}\"}}}}</tool_call>");
    assert_eq!(
        read(ToolFormat::Hermes, &name_first).1[0].1.len(),
        long.len() + 9,
        "what is told is not held"
    );
    let one = "<tool_call>{\"name\": \"now\"}</tool_call>";
    let (content, calls) = read(ToolFormat::Hermes, &one.repeat(130));
    assert_eq!((content.as_deref(), calls.len()), (Some(one.repeat(2).as_str()), 128));
}

#[test]
fn templates_tell_the_format() {
    let told = ToolFormat::detect;
    assert_eq!(told("… within <tool_call></tool_call> tags"), Some(ToolFormat::Hermes));
    assert_eq!(told("<tool_call>\n<function=x>"), None);
    assert_eq!(told("{{ '[TOOL_CALLS] [' }}"), Some(ToolFormat::Mistral));
    assert_eq!(
        told("{\"name\": function name, \"parameters\": dictionary of argument name"),
        Some(ToolFormat::Llama3Json)
    );
    assert_eq!(told("{{- '<|python_tag|>' }}"), Some(ToolFormat::Llama3Json));
    assert_eq!(told("[func_name1(params_name1=params_value1)]"), Some(ToolFormat::Pythonic));
    assert_eq!(told("'<｜tool▁calls▁begin｜>'"), Some(ToolFormat::DeepSeek));
    assert_eq!(told("{{ message.content }}"), None);
    assert_eq!(ToolParser::Auto.format(Some(ToolFormat::Mistral)), Some(ToolFormat::Mistral));
    assert_eq!(ToolParser::None.format(Some(ToolFormat::Mistral)), None);
    for (name, format) in ToolParser::NAMES[2..].iter().zip(FORMATS) {
        assert_eq!(ToolParser::from_name(name).unwrap().format(None), Some(format));
    }
    assert!(ToolParser::from_name("Hermes").unwrap_err().contains("llama3_json"));
}

/// Words that make calls, and some that spoil them.
const WORDS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|python_start|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "function",
    "```json\n",
    "\n```",
    "{\"name\": \"now\"",
    ", \"arguments\": ",
    "{\"a\": \"é\"}",
    "{}",
    "}",
    "{",
    "[",
    "]",
    "now",
    "weather",
    "(",
    ")",
    "a=",
    "'x'",
    "1",
    ",",
    ";",
    " ",
    "\n",
    "é",
    "<",
    "{\"name\": \"now\", \"parameters\": {\"b\": [1, 2]}}",
    "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}</tool_call>",
    "[now(a=1)]",
    "[now(), weather(a='b')]",
];

fn any_text() -> impl Strategy<Value = String> {
    proptest::collection::vec(proptest::sample::select(WORDS), 0..14).prop_map(|words| words.concat())
}

fn cut<'t>(text: &'t str, cuts: &[prop::sample::Index]) -> Vec<&'t str> {
    let mut ends: Vec<usize> =
        cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
    ends.extend([0, text.len()]);
    ends.sort_unstable();
    ends.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn any_split_reads_the_same(
        text in any_text(),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        format in proptest::sample::select(&FORMATS[..]),
        one_only in any::<bool>(),
    ) {
        let split = summary(Message::of(parts(&cut(&text, &cuts), output(format, one_only))));
        let letters: Vec<&str> = text.split_inclusive(|_: char| true).collect();
        let single = summary(Message::of(parts(&letters, output(format, one_only))));
        let whole = summary(Message::of(parts(&[&text], output(format, one_only))));
        prop_assert_eq!(&split, &whole);
        prop_assert_eq!(single, whole);
    }

    #[test]
    fn without_a_call_nothing_is_taken_away(text in any_text(), format in proptest::sample::select(&FORMATS[..])) {
        let (content, calls) = read(format, &text);
        if calls.is_empty() {
            prop_assert_eq!(content.as_deref(), Some(text.as_str()));
        } else {
            // The content consists of characters of the text, in their order.
            let mut rest = text.chars();
            prop_assert!(content.unwrap_or_default().chars().all(|c| rest.any(|other| other == c)));
        }
    }

    #[test]
    fn whole_calls_are_read_back(
        calls in proptest::collection::vec(("[a-z_]{1,12}", proptest::collection::btree_map("[a-z\"é]{1,6}", any::<String>(), 0..4)), 1..4),
        pretty in any::<bool>(),
    ) {
        let expected: Vec<(String, serde_json::Value)> =
            calls.iter().map(|(name, map)| (name.clone(), serde_json::to_value(map).unwrap())).collect();
        let object = |(name, arguments): &(String, serde_json::Value)| {
            let call = serde_json::json!({"name": name, "arguments": arguments});
            if pretty { serde_json::to_string_pretty(&call) } else { serde_json::to_string(&call) }.unwrap()
        };
        let objects: Vec<String> = expected.iter().map(object).collect();
        let hermes: String = objects.iter().map(|one| format!("<tool_call>\n{one}\n</tool_call>\n")).collect();
        let mistral = format!("[TOOL_CALLS][{}]", objects.join(", "));
        let llama = format!("<|python_tag|>{}", objects.join("<|python_tag|>"));
        let texts = [(ToolFormat::Hermes, hermes), (ToolFormat::Mistral, mistral), (ToolFormat::Llama3Json, llama)];
        for (format, text) in texts {
            let (content, found) = read(format, &text);
            let found: Vec<(String, serde_json::Value)> =
                found.into_iter().map(|(name, arguments)| (name, serde_json::from_str(&arguments).unwrap())).collect();
            prop_assert_eq!((content, &found), (None, &expected));
        }
    }
}
