//! Damaged frames, handshakes and messages of the transfer engine: what is read is what would be written.

use baton_fuzz::{Fuzz, Verdict};

use crate::error::{Stage, TransportError};
use crate::frame::{CONTROL_BYTES_MAX, FrameKind, HEADER_BYTES, Header, checksum};
use crate::message::{
    Hello, PREFACE_BYTES, check_preface, decode_failure, decode_held, decode_keys, decode_moved,
    decode_offer, decode_window, encode_held, encode_keys, encode_moved, encode_offer, encode_window,
    preface,
};

#[global_allocator]
static COUNTING: baton_fuzz::AllocationCounter<std::alloc::System> =
    baton_fuzz::AllocationCounter(std::alloc::System);

/// Makes length and checksums of the frame behind the preface right.
#[allow(clippy::ptr_arg, reason = "other formats change their length when they are sealed")]
fn seal(input: &mut Vec<u8>) {
    let Some((header, body)) =
        input.get_mut(PREFACE_BYTES..).and_then(|frame| frame.split_at_mut_checked(HEADER_BYTES))
    else {
        return;
    };
    header[4..8].copy_from_slice(&u32::try_from(body.len()).expect("inputs are small").to_le_bytes());
    let sum = checksum(&[&header[..24], body].concat());
    header[24..32].copy_from_slice(&sum.to_le_bytes());
    let sum = checksum(&header[..32]);
    header[32..36].copy_from_slice(&sum.to_le_bytes()[..4]);
    header[36..].fill(0);
}

/// Reads a preface, a frame and its body, and asserts that they would be written like this.
fn read(input: &[u8]) -> Result<(), TransportError> {
    let short = || TransportError::new(crate::Kind::Closed, Stage::Handshake, "cut off");
    let (opening, frame) = input.split_first_chunk::<PREFACE_BYTES>().ok_or_else(short)?;
    check_preface(opening)?;
    let (header, body) = frame.split_first_chunk::<HEADER_BYTES>().ok_or_else(short)?;
    let header = Header::decode(header, Stage::Handshake)?;
    assert_eq!(header.encode(), frame[..HEADER_BYTES]);
    if header.body_bytes > CONTROL_BYTES_MAX || header.body_bytes as usize != body.len() {
        return Err(short());
    }
    if header.checksum != header.checksum_with(body) {
        return Err(short());
    }
    match header.kind {
        FrameKind::Hello => assert_eq!(Hello::decode(body)?.encode(), body),
        FrameKind::Refused | FrameKind::Failed => {
            assert!(!decode_failure(body, Stage::Offer).text.is_empty())
        }
        FrameKind::Offer => {
            let (ticket, plan) = decode_offer(body)?;
            assert_eq!(encode_offer(ticket, &plan), body);
        }
        FrameKind::Accepted | FrameKind::Lent => {
            assert_eq!(encode_window(decode_window(body)?.as_ref()), body);
        }
        FrameKind::Moved if !body.is_empty() => {
            let (sum, slices) = decode_moved(body)?;
            assert_eq!(encode_moved(sum, &slices), body);
        }
        FrameKind::Want => assert_eq!(encode_keys(&decode_keys(body)?), body),
        FrameKind::Held => assert_eq!(encode_held(decode_held(body)?.into_iter()), body),
        _ => {}
    }
    Ok(())
}

#[test]
fn fuzz_kv_frames() {
    let words: &[&[u8]] = &[b"BATON-KV", b"tcp", b"rdma", b"\x04host", b"\xff\xff\xff\xff", b"\0\0\0\0"];
    Fuzz::new("kv_frames")
        .cases(20_000)
        .words(words)
        .sealed(seal)
        .memory(64 << 10, 40)
        .run(|input| Verdict::of(&read(input)));
}

/// Writes inputs of the corpus that this program makes; run by hand when the format changes.
#[test]
#[ignore = "writes into the corpus"]
fn write_corpus() {
    use crate::data_plane::LentWindow;
    use crate::message::{HeldBlock, encode_failure};
    use crate::mover::{PeerId, RemoteSegment, WindowId};
    use crate::{HandoffTicket, Kind, Plan, SlicePosition};
    let hello = Hello { fingerprint: 9, host: "here".into() };
    let peer = PeerId { address: "127.0.0.1:7".into(), epoch: 3 };
    let access = vec![("tcp".into(), Vec::new()), ("rdma".into(), vec![1, 2, 3])];
    let window = LentWindow { peer, segment: RemoteSegment { window: WindowId(5), bytes: 100, access } };
    let failure = TransportError::new(Kind::Retry, Stage::Offer, "full");
    let plan = Plan { blocks: 3, layers: 2, layer_bytes: 4096 };
    let ticket = HandoffTicket { request: 1, attempt: 2, epoch: 3 };
    let held = HeldBlock { key: u128::MAX - 1, bytes: 4096, checksum: 77 };
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus/kv_frames");
    std::fs::create_dir_all(&dir).expect("the corpus can be made");
    for (name, kind, body) in [
        ("ok-hello", FrameKind::Hello, hello.encode()),
        ("ok-welcome", FrameKind::Welcome, Vec::new()),
        ("ok-refused", FrameKind::Refused, encode_failure(&failure)),
        ("ok-offer", FrameKind::Offer, encode_offer(ticket, &plan)),
        ("ok-accepted", FrameKind::Accepted, encode_window(Some(&window))),
        ("ok-want", FrameKind::Want, encode_keys(&[1, u128::MAX])),
        ("ok-held", FrameKind::Held, encode_held([held, held].into_iter())),
        ("ok-moved", FrameKind::Moved, encode_moved(5, &[SlicePosition { block: 1, layer: 0 }])),
    ] {
        let header = Header::new(kind, 1, 2, 3).seal(&body).encode();
        let input = [&preface()[..], &header, &body].concat();
        std::fs::write(dir.join(name), input).expect("the corpus can be written");
    }
}
