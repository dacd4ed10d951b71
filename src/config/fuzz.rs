//! Damaged configurations: refused in words, or such that every core takes them.

use baton_fuzz::{Fuzz, Verdict};

use super::parse;

#[test]
fn fuzz_config() {
    let words: &[&[u8]] = &[
        b"[scheduler]\n",
        b"[[scheduler.classes]]\n",
        b"[service]\n",
        b"[store]\n",
        b"[network]\n",
        b"[cluster]\n",
        b"block_tokens = 0\n",
        b"true",
        b"inf",
        b"[[[[",
        b"a.a.a.a.a.a",
        b"\"\"\"",
    ];
    Fuzz::new("config").cases(1_500).max_bytes(8 << 10).words(words).memory(8 << 20, 1_000).run(|input| {
        let text = std::str::from_utf8(input).map_err(|e| e.to_string());
        let read = text.and_then(|text| parse(text).map_err(|e| e.to_string()));
        match &read {
            Ok(config) => {
                assert_eq!(config.validate(), Ok(()));
                baton_scheduler::Conductor::new(config.scheduler.clone()).expect("it was checked");
            }
            Err(why) => assert!(
                !why.is_empty() && why.len() < 4_000 + 2 * input.len(),
                "{} bytes of error",
                why.len()
            ),
        }
        Verdict::of(&read)
    });
}
