//! Damaged journals: refused with the line, or stepped again; a checksum that fits excuses nothing.

use baton_fuzz::{Fuzz, Verdict};

use super::{Chain, SUM_BYTES, replay};

/// Makes the checksums of all whole lines right.
fn seal(input: &mut Vec<u8>) {
    let text = String::from_utf8_lossy(input);
    let mut chain = Chain::default();
    let lines = text.split_inclusive('\n').map(|line| match line.strip_suffix('\n') {
        Some(line) if line.len() > SUM_BYTES && line.is_char_boundary(line.len() - SUM_BYTES) => {
            chain.seal(format!("{}}}", &line[..line.len() - SUM_BYTES]))
        }
        _ => line.to_owned(),
    });
    *input = lines.collect::<String>().into_bytes();
}

#[test]
fn fuzz_journals() {
    let words: &[&[u8]] = &[b"null", b"[]", b"{}", b"\"TimerFired\"", b"\"lost\":", b"\"end\":\"closed\""];
    Fuzz::new("journals")
        .cases(1_000)
        .words(words)
        .made(super::tests::recorded())
        .sealed(seal)
        .memory(32 << 20, 2_000)
        .run(|input| Verdict::of(&replay(input)));
}
