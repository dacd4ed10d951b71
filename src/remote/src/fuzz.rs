//! Answers of engines that have gone wrong, and hand-offs that others made up.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use baton_fuzz::{Fuzz, Verdict};
use bytes::Bytes;
use futures_util::FutureExt as _;
use http_body::{Body, Frame};
use serde_json::value::RawValue;

use crate::error::{RemoteError, Stage};
use crate::fields::ClientBody;
use crate::handoff::{Handoff, Way};
use crate::sse::Events;
use crate::{completions, load, sglang};

#[global_allocator]
static COUNTING: baton_fuzz::AllocationCounter<std::alloc::System> =
    baton_fuzz::AllocationCounter(std::alloc::System);

const WORDS: &[&[u8]] = &[
    b"data: ",
    b"\n\n",
    b"\r\n\r\n",
    b"[DONE]",
    b"null",
    b"\"token_ids\":[",
    b"\"output_ids\":[",
    b"\"completion_tokens\":",
    b"\"finish_reason\":\"stop\"",
    b"\"prompt_token_ids\":[90,308]",
    b"\"logprobs\":null",
    b"\"error\":{}",
    b"token_id:",
    b"-0.5",
];

/// A body that comes in pieces.
pub(crate) struct Pieces(pub(crate) VecDeque<Bytes>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }
}

/// The events of a stream that comes in pieces of so many bytes, up to its end or the first error.
fn events(input: &[u8], piece: usize) -> (Vec<Vec<u8>>, Option<RemoteError>) {
    let pieces = input.chunks(piece).map(Bytes::copy_from_slice).collect();
    let (mut events, mut found) = (Events::new(Pieces(pieces), 4_000), Vec::new());
    loop {
        match events.next().now_or_never().expect("all of the body is there") {
            Ok(Some(event)) => found.push(event.to_vec()),
            Ok(None) => return (found, None),
            Err(error) => return (found, Some(error)),
        }
    }
}

#[test]
fn fuzz_engine_streams() {
    let prompt = || vec![90, 308].into();
    let (stage, logs) = (Stage::Stream, Some(2));
    Fuzz::new("engine_streams").cases(2_000).max_bytes(8 << 10).words(WORDS).memory(256 << 10, 200).run(
        |input| {
            let (found, error) = events(input, usize::MAX);
            assert_eq!(events(input, 7), (found.clone(), error.clone()));
            let vllm = completions::Reader {
                stage,
                prompt: prompt(),
                logprobs: logs,
                prompt_logprobs: logs,
                counts_cached: Default::default(),
            };
            let mut other = sglang::Reader {
                stage,
                prompt: prompt(),
                logprobs: logs,
                prompt_logprobs: logs,
                seen: Vec::new(),
            };
            let mut read = 0;
            for event in &found {
                if let Ok(progress) = vllm.event(event) {
                    read += progress.tokens.len() + usize::from(progress.counts.prompt_tokens.is_some());
                    assert!(
                        progress.tokens.iter().flat_map(|token| &token.logprob).all(|log| log.top.len() <= 2)
                    );
                }
                let before = other.seen.len();
                if let Ok(progress) = other.event(event) {
                    read += progress.tokens.len();
                    assert_eq!(other.seen.len(), before + progress.tokens.len());
                }
            }
            if read > 0 && error.is_none() { Verdict::Read } else { Verdict::Refused }
        },
    );
}

#[test]
fn fuzz_engine_loads() {
    let words: &[&[u8]] =
        &[b"NaN", b"+Inf", b"-Inf", b"{", b"}", b"=\"", b"\\\"", b"\n", b"vllm:num_requests_running 1\n"];
    Fuzz::new("engine_loads").cases(3_000).words(words).memory(64 << 10, 200).run(|input| {
        let page = String::from_utf8_lossy(input);
        let found = load::of(&load::parse(&page));
        if let Some(found) = &found {
            assert!(found.kv_used_share.is_none_or(|share| (0.0..=1.0).contains(&share)));
        }
        if found.is_some() { Verdict::Read } else { Verdict::Refused }
    });
}

/// Makes the seal right that vouches for a hand-off.
fn seal(input: &mut Vec<u8>) {
    let text = String::from_utf8_lossy(input);
    let Some((_, rest)) = text.split_once("\"handoff\":") else { return };
    let handoff = rest.strip_suffix('}').unwrap_or(rest);
    let seal = crate::handoff::seal_of(handoff);
    *input = format!("{{\"seal\":{seal},\"handoff\":{handoff}}}").into_bytes();
}

#[test]
fn fuzz_handoffs() {
    let words: &[&[u8]] =
        &[b"null", b"\"Nixl\"", b"\"Room\"", b"\"Mooncake\"", b"[[", b"]]", b"\"remote_port\":0"];
    Fuzz::new("handoffs").cases(15_000).words(words).sealed(seal).memory(64 << 10, 100).run(|input| {
        let read = Handoff::from_bytes(input);
        let verdict = Verdict::of(&read);
        if let Ok(handoff) = read {
            let name = handoff.name();
            assert!(handoff.left_us(0) > 0);
            let again = Handoff::from_bytes(&handoff.into_bytes()).expect("what we write can be read");
            assert_eq!(again.name(), name);
        }
        verdict
    });
}

/// Writes inputs of the corpus that this program makes; run by hand when the format changes.
#[test]
#[ignore = "writes into the corpus"]
fn write_corpus() {
    let params = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":3,"remote_blocks_expiry_time":1700000000.5,"transfer_mode":"pull"}"#;
    let request = crate::Request {
        id: "r".into(),
        tokens: vec![1, 2, 3].into(),
        sampling: Arc::default(),
        body: ClientBody::default(),
        salt: None,
    };
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus/handoffs");
    std::fs::create_dir_all(&dir).unwrap();
    for (name, way) in [
        ("ok-nixl", Way::Nixl { params: RawValue::from_string(params.into()).unwrap() }),
        (
            "ok-mooncake",
            Way::Mooncake {
                engine_id: "e".into(),
                bootstrap: "http://127.0.0.1:8998".into(),
                transfer_id: "t".into(),
            },
        ),
        ("ok-room", Way::Room { host: "127.0.0.1".into(), port: 8998, room: 77, rank: Some(1) }),
    ] {
        std::fs::write(dir.join(name), Handoff::new(&request, way, (5, 30_000_000)).into_bytes()).unwrap();
    }
}
