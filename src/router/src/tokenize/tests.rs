//! Tokenisation as a whole: the built-in vocabulary, and a small one from a folder.

use std::sync::Arc;

use baton_types::{BlockKey, ChainHasher};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::chat::Message;

const LINEAGE: Lineage = Lineage { seed: 7, root: BlockKey(99), block_tokens: 4 };

/// A folder with a byte-level vocabulary, a few merges and the given template.
fn folder(template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut vocab = serde_json::Map::new();
    // The characters that stand for bytes in byte-level vocabularies, in the order of their code points.
    let own = |c: &u32| matches!(c, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let chars = (0u32..256).filter(own).chain(0x100..0x144).filter_map(char::from_u32);
    for (id, c) in chars.enumerate() {
        vocab.insert(c.to_string(), json!(id));
    }
    for piece in ["th", "the", "Ġthe"] {
        let id = vocab.len();
        vocab.insert(piece.to_owned(), json!(id));
    }
    let special = |id: u32, text: &str| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(259, "<s>"), special(260, "</s>"), special(261, "<|turn|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [["t", "h"], ["th", "e"], ["Ġ", "the"]]}
    });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    dir
}

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}\n    {%- if m.role == 'bad' %}{{ raise_exception('no ' + m.role) }}{% endif %}\n<|turn|>{{ m['role'] }}\n{{ m['content'].strip() }}</s>\n{% endfor %}\n{% if tools %}{{ tools | tojson }}{% endif %}\n{%- if add_generation_prompt %}<|turn|>assistant\n{% endif %}";

fn small() -> Tokenization {
    Tokenization::folder(folder(TEMPLATE).path()).unwrap()
}

fn chat_text(with: &Tokenization, json: &str, tools: Option<&str>) -> Result<String, ChatError> {
    let messages: Vec<Message<'_>> = serde_json::from_str(json).unwrap();
    let tools = tools.map(|tools| serde_json::from_str(tools).unwrap());
    with.render(&Chat { tools, ..Chat::plain(&messages) })
}

/// Tokens and keys worked out from the beginning, without parts and without a cache.
fn naive(with: &Tokenization, text: &str, add_special_tokens: bool) -> Prompt {
    let affixes = with.affixes(add_special_tokens);
    let tokens = [affixes.0, &with.encode_part(text).unwrap(), affixes.1].concat();
    let mut hasher = ChainHasher::resume(LINEAGE.seed, LINEAGE.root);
    let chain = tokens.chunks_exact(4).map(|block| hasher.push_tokens(block)).collect();
    Prompt { tokens: tokens.into(), chain }
}

#[test]
fn the_built_in_vocabulary_is_bytes_and_marks() {
    let with = Tokenization::bytes();
    assert_eq!(with.encode_bytes("a<|im_start|>é<|end|>"), [97, 258, 0xc3, 0xa9, 257]);
    assert_eq!(with.decode(&[97, 258, 0xc3, 0xa9, 257, 400, 9_999], true), "aé");
    assert_eq!(with.decode(&[256, 97, 259, 400], false), "<|begin|>a<|im_end|>");
    assert_eq!(with.decode(&[0xc3], true), "\u{fffd}");
    assert_eq!((with.vocab_tokens(), with.end_tokens()), (512, vec![257, 259]));
}

#[test]
fn a_folder_tokenises_as_its_tokenizer_does() {
    let with = small();
    let Vocabulary::Folder(inner) = &with.vocabulary else { panic!("a folder was given") };
    let text = "<s>the  theme é 😀\n<|turn|>the end</s> of the tests and more text that is long enough to be cut<|turn|>x";
    for add_special_tokens in [false, true] {
        let expected = inner.encoder.reference().encode(text, add_special_tokens).unwrap().get_ids().to_vec();
        let prompt = with.prompt_now(text, add_special_tokens, &LINEAGE).unwrap();
        assert_eq!(prompt.tokens.to_vec(), expected);
        assert_eq!(with.decode(&expected, true), inner.encoder.reference().decode(&expected, true).unwrap());
        assert_eq!(
            with.decode(&expected, false),
            inner.encoder.reference().decode(&expected, false).unwrap()
        );
    }
    assert!(with.splitter.parts(text).len() > 1, "the text is cut at all");
    assert_eq!((with.vocab_tokens(), with.end_tokens()), (262, vec![260]));
}

/// One that composes letters first, as many do: a text has fewer bytes then.
fn composing() -> Tokenization {
    let dir = folder(TEMPLATE);
    let file = dir.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    tokenizer["normalizer"] = json!({"type": "NFC"});
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    Tokenization::folder(dir.path()).unwrap()
}

#[test]
fn a_long_text_has_at_least_so_many_tokens() {
    assert_eq!(Tokenization::bytes().least_tokens(1_200), 100, "a mark of 12 bytes is the longest");
    assert_eq!(small().least_tokens(800), 100);
    assert_eq!(composing().least_tokens(3_200), 100);
}

static ALL: std::sync::LazyLock<[Tokenization; 3]> =
    std::sync::LazyLock::new(|| [Tokenization::bytes(), small(), composing()]);

proptest! {
    #[test]
    fn no_text_has_fewer_tokens_than_it_must(
        text in "(the| the|<\\|turn\\|>|<\\|im_start\\|>|[a-z]|\u{1fbe}\u{308}\u{301}|\u{1100}\u{1161}\u{11a8}|e\u{301}|\u{212a}|\\PC){0,60}",
    ) {
        for with in &*ALL {
            let tokens = with.prompt_now(&text, false, &LINEAGE).unwrap().tokens.len();
            prop_assert!(with.least_tokens(text.len()) <= tokens, "{} > {tokens}", with.least_tokens(text.len()));
        }
    }
}

#[test]
fn special_tokens_are_seen_where_they_are_asked_for() {
    let with = small();
    let seen = with.special_tokens(&["<|turn|>", "no token", "a"]);
    assert_eq!(seen, [261], "what is not special is seen anyway");
    let mut detokenizer = Detokenizer::seeing(true, seen.into());
    let mut out = String::new();
    for token in [256, 259, 261, 260, 257] {
        detokenizer.push(&with, token, &mut out);
    }
    assert_eq!(out, "th<|turn|>the");
}

#[test]
fn templates_are_rendered_as_hugging_face_does() {
    let with = small();
    let json = r#"[{"role":"user","content":" hi "},{"role":"assistant","content":"yo"}]"#;
    let text = chat_text(&with, json, None).unwrap();
    assert_eq!(text, "<s><|turn|>user\nhi</s>\n<|turn|>assistant\nyo</s>\n<|turn|>assistant\n");
    let tools = r#"[{"z":1,"a":"é<\n","f":1.0,"e":[],"n":null,"t":true}]"#;
    let text = chat_text(&with, json, Some(tools)).unwrap();
    assert!(text.contains(r#"[{"z": 1, "a": "é<\n", "f": 1.0, "e": [], "n": null, "t": true}]"#), "{text}");
    let error = chat_text(&with, r#"[{"role":"bad","content":""}]"#, None).unwrap_err();
    assert!(error.message.ends_with("no bad"), "{}", error.message);
}

#[test]
fn templates_cannot_run_for_ever() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}";
    let with = Tokenization::folder(folder(endless).path()).unwrap();
    let error = chat_text(&with, r#"[{"role":"user","content":""}]"#, None).unwrap_err();
    assert!(error.message.contains("fuel"), "{}", error.message);
}

#[test]
fn templates_may_break_format_dates_and_indent() {
    let template = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}\n\
        {{ m.content.split(',')[0].upper() }}{% endgeneration %}{{ strftime_now('%Y') | length }}{% endfor %}\
        {{ {'b': [1, {}], 'a': 'x'} | tojson(indent=2) }}";
    let with = Tokenization::folder(folder(template).path()).unwrap();
    let text =
        chat_text(&with, r#"[{"role":"user","content":"a,b"},{"role":"user","content":"c"}]"#, None).unwrap();
    assert_eq!(text, "A4{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": \"x\"\n}");
}

/// Each `tojson` doubles the backslashes of the one before: it took all memory. Found by fuzzing.
#[test]
fn json_of_json_of_json_is_bounded() {
    let template = format!("{{{{ '\"' {} }}}}", "| tojson ".repeat(100));
    let with = Tokenization::folder(folder(&template).path()).unwrap();
    let error = chat_text(&with, r#"[{"role":"user","content":"a"}]"#, None).unwrap_err();
    assert!(format!("{error:?}").contains("16 MiB"), "{error:?}");
}

#[test]
fn arguments_of_tool_calls_are_objects_to_templates() {
    let template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}";
    let with = Tokenization::folder(folder(template).path()).unwrap();
    let json = r#"[{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function",
        "function":{"name":"f","arguments":"{\"city\": \"Ulm\"}"}}]}]"#;
    assert_eq!(chat_text(&with, json, None).unwrap(), "Ulm");
}

#[test]
fn folders_that_are_none_are_refused_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenization::folder(dir.path()).err().unwrap().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("give the folder"), "{error}");
    let bad = folder("{% if %}");
    let error = Tokenization::folder(bad.path()).err().unwrap().to_string();
    assert!(error.contains("chat template"), "{error}");
}

#[test]
fn a_next_turn_tokenises_only_what_is_new() {
    let with = Tokenization::bytes();
    let turn = |n: usize| format!("<|im_start|>user\n{}<|im_end|>\n", format!("{n} ").repeat(100));
    let first: String = (0..20).map(turn).collect();
    with.prompt_now(&first, false, &LINEAGE).unwrap();
    let (hits, misses) = with.cache_counts();
    let second = format!("{first}{}", turn(20));
    let prompt = with.prompt_now(&second, false, &LINEAGE).unwrap();
    let (hits, misses) = (with.cache_counts().0 - hits, with.cache_counts().1 - misses);
    assert!(hits >= 19 && misses <= 3, "{hits} {misses}");
    assert_eq!(prompt, naive(&with, &second, false));
    let other = Lineage { root: BlockKey(1), ..LINEAGE };
    assert_ne!(
        with.prompt_now(&second, false, &other).unwrap().chain,
        prompt.chain,
        "namespaces share nothing"
    );
}

#[tokio::test]
async fn long_prompts_are_tokenised_aside_and_alike() {
    let with = Arc::new(small());
    let text = format!("<s>{}<|turn|>", "the theme ".repeat(4_000));
    let aside = with.prompt(text.clone(), true, LINEAGE).await.unwrap();
    assert_eq!(aside, naive(&with, &text, true));
    assert_eq!(with.prompt(text.clone(), true, LINEAGE).await.unwrap(), aside);
}

/// A folder whose tokens are pieces after SentencePiece: `▁` for spaces, bytes for what has no piece.
fn pieces() -> Tokenization {
    let dir = tempfile::tempdir().unwrap();
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let words = ["\u{2581}", "a", "b", "\u{2581}a", "\u{2581}b", "ab"].map(str::to_owned);
    let names = ["<unk>".to_owned(), "</s>".to_owned()].into_iter().chain(bytes).chain(words);
    let vocab: serde_json::Map<_, _> = names.enumerate().map(|(id, name)| (name, json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": [["\u{2581}", "a"], ["\u{2581}", "b"], ["a", "b"]]}
    });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    Tokenization::folder(dir.path()).unwrap()
}

#[test]
fn a_folder_without_template_serves_no_chats() {
    let error = chat_text(&pieces(), r#"[{"role":"user","content":"a"}]"#, None).unwrap_err();
    assert!(error.message.contains("/v1/completions"), "{}", error.message);
}

#[test]
fn the_wait_for_a_character_has_an_end() {
    let with = pieces();
    let mut detokenizer = Detokenizer::new(true);
    let mut out = String::new();
    // A byte that begins a character, over and over, is never one.
    for _ in 0..1_000 {
        detokenizer.push(&with, 2 + 0xe2, &mut out);
        assert!(detokenizer.window.len() <= 2 * 12);
    }
    assert!(out.chars().all(|c| c == char::REPLACEMENT_CHARACTER) && !out.is_empty());
    // Tokens without text do not pile up either.
    for _ in 0..1_000 {
        detokenizer.push(&with, 1, &mut out);
        assert!(detokenizer.window.len() <= 2 * 12);
    }
}

/// Tokens without text stood in the line for the rest of a character, whose first bytes then showed as U+FFFD.
/// Found by the property below.
#[test]
fn tokens_without_text_leave_a_character_whole() {
    let with = pieces();
    let Vocabulary::Folder(inner) = &with.vocabulary else { panic!("a folder was given") };
    for without_text in [1, 9_999] {
        let mut tokens = vec![without_text; 20];
        tokens.extend([258, 2 + 0xe2, without_text, 2 + 0x82, 2 + 0xac]);
        assert_eq!(with.decode(&tokens, true), "€");
        assert_eq!(inner.encoder.reference().decode(&tokens, true).unwrap(), "€");
    }
}

/// An answer's text is decoded after its prompt, as vLLM decodes it: the first space of a text is left out, not that of
/// an answer. Where the prompt ends within a character, the answer that completes it has all of it.
#[test]
fn an_answer_is_read_after_its_prompt() {
    let with = pieces();
    let answer = |prompt: &[u32], tokens: &[u32]| {
        let mut detokenizer = Detokenizer::new(true).after(&with, prompt);
        let mut out = String::new();
        tokens.iter().for_each(|&token| detokenizer.push(&with, token, &mut out));
        detokenizer.finish(&with, &mut out);
        out
    };
    let euro = [2 + 0xe2, 2 + 0x82, 2 + 0xac];
    let replacement = [2 + 0xef, 2 + 0xbf, 2 + 0xbd];
    for (prompt, tokens, text) in [
        (&[261, 262][..], &[261, 262][..], " a b"),
        (&[261, 1, 1, 9_999], &[261], " a"),
        (&[258], &[261], " a"),
        (&[1], &[261], "a"),
        (&[], &[261], "a"),
        (&[261, euro[0]], &[euro[1], euro[2], 261], "€ a"),
        (&[261, euro[0], 1, euro[1]], &[euro[2], 261], "€ a"),
        (&[261, euro[0]], &[261], "\u{fffd} a"),
        // The prompt's last tokens begin within a character.
        (&[euro[2], euro[0], euro[1], euro[2]], &[261], " a"),
        (&replacement, &[261], " a"),
    ] {
        assert_eq!(answer(prompt, tokens), text, "{prompt:?} {tokens:?}");
    }
    let mut detokenizer = Detokenizer::new(true).after(&Tokenization::bytes(), &[97, 0xe2, 0x82]);
    let mut out = String::new();
    detokenizer.push(&Tokenization::bytes(), 0xac, &mut out);
    assert_eq!(out, "€");
}

fn texts() -> impl Strategy<Value = Vec<String>> {
    let piece =
        "(<s>|</s>|<\\|turn\\|>|<\\|im_end\\|>|<\\|im_start\\|>|the | {1,3}|[a-zé😀\n<|]{1,30}){0,30}";
    proptest::collection::vec(piece, 1..5)
}

proptest! {
    #[test]
    fn cached_is_uncached(texts in texts(), capacity in 2_000usize..200_000, add_special_tokens in any::<bool>()) {
        for with in [Tokenization::bytes(), small()] {
            let with = with.with_cache_bytes(capacity);
            let mut whole = String::new();
            for text in &texts {
                whole.push_str(text);
                for _ in 0..2 {
                    prop_assert_eq!(with.prompt_now(&whole, add_special_tokens, &LINEAGE).unwrap(), naive(&with, &whole, add_special_tokens));
                }
            }
        }
    }

    #[test]
    fn text_token_by_token_is_the_text_of_all(tokens in proptest::collection::vec(0u32..270, 0..60), skip in any::<bool>()) {
        for with in [Tokenization::bytes(), small()] {
            let mut detokenizer = Detokenizer::new(skip);
            let mut out = String::new();
            for &token in &tokens {
                detokenizer.push(&with, token, &mut out);
            }
            detokenizer.finish(&with, &mut out);
            prop_assert_eq!(&out, &with.decode(&tokens, skip));
            if let Vocabulary::Folder(inner) = &with.vocabulary {
                prop_assert_eq!(&out, &inner.encoder.reference().decode(&tokens, skip).unwrap());
            }
        }
    }

    #[test]
    fn pieces_one_by_one_read_as_all_of_them(
        parts in proptest::collection::vec(prop_oneof![
            (258u32..264).prop_map(|piece| vec![piece]),
            Just(vec![1]),
            prop_oneof![Just("é"), Just("€"), Just("😀")]
                .prop_map(|c: &str| c.bytes().map(|byte| 2 + u32::from(byte)).collect()),
        ], 0..30),
    ) {
        let with = pieces();
        let Vocabulary::Folder(inner) = &with.vocabulary else { panic!("a folder was given") };
        let tokens = parts.concat();
        prop_assert_eq!(with.decode(&tokens, true), inner.encoder.reference().decode(&tokens, true).unwrap());
        let text = with.decode(&tokens, true);
        let encoded = inner.encoder.reference().encode(text.as_str(), false).unwrap().get_ids().to_vec();
        prop_assert_eq!(with.prompt_now(&text, false, &LINEAGE).unwrap().tokens, encoded.into());
    }

    #[test]
    fn prompt_and_answer_read_as_both_in_one(
        parts in proptest::collection::vec(prop_oneof![
            (258u32..264).prop_map(|piece| vec![piece]),
            Just(vec![1]),
            prop_oneof![Just("é"), Just("€"), Just("😀")]
                .prop_map(|c: &str| c.bytes().map(|byte| 2 + u32::from(byte)).collect()),
        ], 0..40),
        cut in any::<prop::sample::Index>(),
    ) {
        let with = pieces();
        let tokens = parts.concat();
        let (prompt, answer) = tokens.split_at(cut.index(tokens.len() + 1));
        let mut text = String::new();
        let mut whole = Detokenizer::new(true);
        prompt.iter().for_each(|&token| whole.push(&with, token, &mut text));
        let tail = &prompt[prompt.len().saturating_sub(PROMPT_TAIL)..];
        let mut detokenizer = Detokenizer::new(true).after(&with, tail);
        answer.iter().for_each(|&token| detokenizer.push(&with, token, &mut text));
        detokenizer.finish(&with, &mut text);
        // Where all of the prompt's last tokens are hidden, the answer begins a text.
        if prompt.is_empty() || tail.iter().any(|token| *token != 1) {
            prop_assert_eq!(text, with.decode(&tokens, true));
        }
    }

    #[test]
    fn text_comes_back_from_its_tokens(text in "[a-zé😀 \n]{0,60}") {
        for with in [Tokenization::bytes(), small()] {
            let prompt = with.prompt_now(&text, false, &LINEAGE).unwrap();
            prop_assert_eq!(with.decode(&prompt.tokens.to_vec(), true), text.as_str());
        }
    }
}

/// Chats recorded with the renderer of transformers, after what vLLM does to messages; see scripts/chats/record.py.
#[test]
fn a_chat_is_the_prompt_that_vllm_makes_of_it() {
    #[derive(serde::Deserialize)]
    struct RecordedCase<'a> {
        template: String,
        #[serde(borrow)]
        body: &'a serde_json::value::RawValue,
        prompt: Option<String>,
    }
    let sources = [
        ("marks", include_str!("../../tests/chats/marks.jinja")),
        ("headers", include_str!("../../tests/chats/headers.jinja")),
        ("parts", include_str!("../../tests/chats/parts.jinja")),
    ];
    let with = sources.map(|(name, source)| (name, Tokenization::folder(folder(source).path()).unwrap()));
    let mut count = 0;
    for line in include_str!("../../tests/chats/chats.jsonl").lines() {
        let recorded: RecordedCase<'_> = serde_json::from_str(line).unwrap();
        let (_, with) = with.iter().find(|(name, _)| *name == recorded.template).unwrap();
        let fields = crate::fields::read(recorded.body.get().as_bytes()).unwrap();
        let told = crate::call::render_chat(with, &fields);
        match recorded.prompt {
            Some(prompt) => assert_eq!(told.as_ref().map(String::as_str), Ok(prompt.as_str()), "{line}"),
            None => assert!(told.is_err(), "{line}"),
        }
        count += 1;
    }
    assert_eq!(count, 500);
}

#[test]
fn a_template_that_takes_spaces_away_has_another_sample() {
    let of =
        |template: &str| Tokenization::folder(folder(template).path()).unwrap().sample().unwrap().chat_tokens;
    let plain = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}";
    let (plain, trims) = (of(plain), of(&plain.replace("m.content", "m.content | trim")));
    assert!(plain.is_some() && plain != trims);
}
