//! Damaged messages of engines and unknown peers: neither a message nor a frame may cost more than its bytes.

use baton_fuzz::{Fuzz, Verdict};
use baton_types::{BlockKey, ChainHasher};
use bytes::BytesMut;

use crate::zmtp::{Role, WireLimits, take_all};
use crate::{Form, Limits, Mirror, MirrorConfig, Speaker, decode, encode};

#[global_allocator]
static COUNTING: baton_fuzz::AllocationCounter<std::alloc::System> =
    baton_fuzz::AllocationCounter(std::alloc::System);

const WORDS: &[&[u8]] = &[
    b"\xabBlockStored",
    b"\xacBlockRemoved",
    b"\xb0AllBlocksCleared",
    b"\xacblock_hashes",
    b"\xa9token_ids",
    b"\xaablock_size",
    b"\xb1parent_block_hash",
    b"\xa6medium",
    b"\xc0",
    b"\xc4\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xcb\x7f\xf0\0\0\0\0\0\0",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\0\0\0\0\0\0\0",
    b"\xdb\x7f\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\x91\x91\x91\x91\x91\x91",
];

/// A mirror of small bounds, so that they are reached.
fn mirror() -> Mirror {
    let config = MirrorConfig { max_blocks: 64, max_parked_blocks: 32, ..MirrorConfig::default() };
    let root: BlockKey = ChainHasher::new(0, b"root").parent();
    Mirror::plain(config, root)
}

#[test]
fn fuzz_kv_events() {
    let (limits, speaker) = (Limits::default(), Speaker::default());
    let mut mirror = mirror();
    let mut changes = Vec::with_capacity(1 << 16);
    Fuzz::new("kv_events").cases(6_000).words(WORDS).memory(256 << 10, 400).run(|input| {
        let batch = decode(3, input, &limits);
        if let Ok(batch) = &batch {
            changes.clear();
            mirror.apply(batch, &mut changes);
            assert_eq!(mirror.check(), Ok(()));
            // The output of our own writer must be readable, and must be equal when it is written again. After the year
            // 2041 it may differ: seconds as a fraction are too coarse then.
            for form in [Form::Vllm, Form::Standard].into_iter().filter(|_| batch.time_us < 1 << 51) {
                let written = encode(batch, form, &speaker);
                let read = decode(3, &written, &limits).expect("what we write can be read");
                assert_eq!(encode(&read, form, &speaker), written, "{form:?}");
            }
        }
        Verdict::of(&batch)
    });
}

#[test]
fn fuzz_zmtp() {
    let words: &[&[u8]] = &[
        b"\x04\x19\x05READY",
        b"\x0bSocket-Type\0\0\0\x03PUB",
        b"\x04\x06\x04PING\0\x01",
        b"\x04\x0a\x09SUBSCRIBE",
        b"\x02\0\0\0\0\0\0\0\x05",
        b"\x03\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"\x01\0",
    ];
    // All that was received is kept here, and is compared: more than the service ever has at once.
    Fuzz::new("zmtp").cases(4_000).words(words).memory(64 << 10, 600).run(|input| {
        let limits = WireLimits { message_bytes: 4096, frames: 8 };
        let whole = take_all(Role::Sub, limits, [BytesMut::from(input)]);
        // However the bytes arrive, the same is made of them.
        for at in [1, 63, 64, 66, input.len() / 2] {
            let (one, other) = input.split_at(at.min(input.len()));
            assert_eq!(take_all(Role::Sub, limits, [one.into(), other.into()]), whole, "cut at {at}");
        }
        Verdict::of(&whole)
    });
}
