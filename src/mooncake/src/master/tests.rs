//! Our calls beside those of a real client, and a real master's answers read by us.

use super::bodies::{KEY, MOUNT, PUT_END, PUT_START, REMOUNT, REMOVE, UNMOUNT};
use super::model::UUID;
use super::*;
use crate::pack::{Writer, pack};
use proptest::prelude::*;

/// Bodies of one kind of one call, in the order in which they were recorded.
fn recorded(kind: &str, call: &str) -> Vec<Vec<u8>> {
    let lines = include_str!("../../testdata/recorded.txt").lines().filter(|line| !line.starts_with('#'));
    let fields = lines.map(|line| line.split(' ').collect::<Vec<_>>());
    let wanted = fields.filter(|fields| fields[0] == kind && fields[1] == call);
    let bodies: Vec<Vec<u8>> = wanted.map(|fields| bytes(fields[2].trim_matches('-'))).collect();
    assert!(!bodies.is_empty(), "no {kind} of {call} was recorded");
    bodies
}

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(digit).collect()
}

/// A message without the literal that a real client adds: what ours is to be, and the literal.
fn plain(message: &[u8]) -> (Vec<u8>, Vec<u8>) {
    assert_eq!(message[0] & 1, 1);
    let meta = message[4];
    let end = 5 + message[5..].iter().position(|byte| *byte == 0).unwrap();
    let mut hash = u32::from_le_bytes(message[..4].try_into().unwrap()) & !1;
    let width = meta & !4;
    hash |= u32::from(width != 0);
    let mut plain = hash.to_le_bytes().to_vec();
    plain.extend((width != 0).then_some(width));
    plain.extend(&message[end + 1..]);
    (plain, message[5..end].to_vec())
}

/// The client that was recorded.
fn client() -> Uuid {
    let (ping, _) = plain(&recorded("REQ", "Ping")[0]);
    let word = |at: usize| u64::from_le_bytes(ping[at..at + 8].try_into().unwrap());
    Uuid(word(4), word(12))
}

fn same(call: &str, at: usize, shape: &Shape, ours: &[u8]) {
    let (theirs, literal) = plain(&recorded("REQ", call)[at]);
    assert_eq!(shape.literal(), literal, "{call}");
    assert_eq!(ours, theirs, "{call}");
}

#[test]
fn our_calls_are_those_of_a_real_client() {
    let client = client();
    same("Ping", 0, &UUID, &bodies::ping(client));
    same("ExistKey", 0, &KEY, &bodies::key("key-one"));
    same("GetReplicaList", 1, &KEY, &bodies::key("absent"));
    same("Remove", 0, &REMOVE, &bodies::remove("key-one", false));
    same("PutStart", 0, &PUT_START, &bodies::put_start(client, "key-one", 11, &PlacementOptions::default()));
    same("PutEnd", 0, &PUT_END, &bodies::put_end(client, "key-one", None));
    let long = "k".repeat(300);
    let preferred =
        PlacementOptions { preferred_segment: "127.0.0.1:17811".into(), ..PlacementOptions::default() };
    same("PutStart", 2, &PUT_START, &bodies::put_start(client, &long, 5000, &preferred));
    same("PutEnd", 1, &PUT_END, &bodies::put_end(client, &long, None));
}

#[test]
fn a_segment_is_mounted_and_taken_back_as_a_real_client_does() {
    let client = client();
    let (theirs, _) = plain(&recorded("REQ", "MountSegment")[0]);
    let word = |at: usize| u64::from_le_bytes(theirs[at..at + 8].try_into().unwrap());
    let segment = MountedSegment {
        id: Uuid(word(4), word(12)),
        name: "127.0.0.1:17811".into(),
        base: word(36),
        bytes: 64 << 20,
        endpoint: "127.0.0.1:16601".into(),
    };
    same("MountSegment", 0, &MOUNT, &bodies::mount(client, &segment));
    same("ReMountSegment", 0, &REMOUNT, &bodies::remount(client, &segment));
    same("UnmountSegment", 0, &UNMOUNT, &bodies::unmount(client, segment.id));
}

#[test]
fn a_real_masters_answers_are_read() {
    let answers = |call| recorded("ANS", call);
    assert_eq!(
        decode("ServiceReady", &VERSION, &answers("ServiceReady")[0], |from| from.text()),
        Ok(Ok("2.0.0".into()))
    );
    let storage = |from: &mut Reader<'_>| Ok((from.text()?, from.bool()?, from.u64()?));
    let config = decode("GetStorageConfig", &STORAGE, &answers("GetStorageConfig")[0], storage);
    assert_eq!(config, Ok(Ok((String::new(), true, 0))));
    let standing = |from: &mut Reader<'_>| Ok((from.i64()?, Standing::of(from.i32()?)));
    assert_eq!(decode("Ping", &STANDING, &answers("Ping")[0], standing), Ok(Ok((0, Standing::Forgotten))));
    let exists: Vec<_> = answers("ExistKey")
        .iter()
        .map(|body| decode("ExistKey", &YES_OR_NO, body, |from| from.bool()))
        .collect();
    assert_eq!(exists, [Ok(Ok(true)), Ok(Ok(false))]);
    for (call, at, code) in
        [("Remove", 0, -706), ("Remove", 1, -704), ("GetReplicaList", 1, -704), ("PutStart", 1, -705)]
    {
        let shape = match call {
            "Remove" => NOTHING,
            "PutStart" => REPLICAS,
            _ => WHERE,
        };
        assert_eq!(decode(call, &shape, &answers(call)[at], |_| Ok(())), Ok(Err(code)), "{call}");
    }
    for call in ["MountSegment", "ReMountSegment", "UnmountSegment", "PutEnd"] {
        assert_eq!(decode(call, &NOTHING, &answers(call)[0], |_| Ok(())), Ok(Ok(())), "{call}");
    }
}

#[test]
fn a_real_masters_replicas_are_read() {
    let room = decode("PutStart", &REPLICAS, &recorded("ANS", "PutStart")[0], |from| {
        from.list(Replica::LEAST_BYTES, Replica::read)
    });
    let replica = |status, address| Replica {
        id: 1,
        place: Place::Memory {
            bytes: 11,
            address,
            protocol: "tcp".into(),
            endpoint: "127.0.0.1:16601".into(),
        },
        status,
    };
    let address = 0x7f61_ab00_0000;
    assert_eq!(room, Ok(Ok(vec![replica(2, address)])));
    let answers = recorded("ANS", "GetReplicaList");
    let located = decode("GetReplicaList", &WHERE, &answers[0], Located::read).unwrap().unwrap();
    assert!(located.replicas[0].complete());
    assert_eq!(located, Located { replicas: vec![replica(3, address)], lease_ms: 10_000, checksum: None });
    let sealed = decode("GetReplicaList", &WHERE, answers.last().unwrap(), Located::read).unwrap().unwrap();
    assert_eq!(sealed.checksum, Some(crate::checksum::checksum(b"123456789")));
}

#[test]
fn a_checksum_is_told_as_a_real_client_tells_it() {
    let sealed = recorded("REQ", "PutEnd").pop().unwrap();
    let (theirs, _) = plain(&sealed);
    let word = |at: usize| u64::from_le_bytes(theirs[at..at + 8].try_into().unwrap());
    let client = Uuid(word(4), word(12));
    assert_eq!(bodies::put_end(client, "key-one", Some(crate::checksum::checksum(b"123456789"))), theirs);
}

#[test]
fn replicas_of_every_kind_are_told_apart() {
    let kinds: [fn(&mut Writer); 4] = [
        |to| (to.u64(1), to.u64(2), to.text("a"), to.text("b")).0,
        |to| (to.text("path"), to.u64(5)).0,
        |to| (to.u64(1), to.u64(2), to.u64(3), to.text("b")).0,
        |to| (to.text("path"), to.u64(1), to.u64(2), to.u64(3), to.i32(4)).0,
    ];
    for (kind, write) in kinds.iter().enumerate() {
        let packed = |kind: usize| {
            pack(&REPLICAS, |to| {
                to.bool(true);
                to.length(1);
                to.u64(9);
                to.u8(kind as u8);
                write(to);
                to.i32(3);
            })
        };
        let read = |bytes: &[u8]| {
            decode("test", &REPLICAS, bytes, |from| from.list(Replica::LEAST_BYTES, Replica::read))
        };
        let replicas = read(&packed(kind + 1)).unwrap().unwrap();
        assert!(matches!(replicas[0].place, Place::Elsewhere(_)), "{kind}");
        assert!(read(&packed(5)).is_err(), "there is no such kind");
    }
}

proptest! {
    #[test]
    fn any_answer_is_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..300)) {
        for shape in [REPLICAS, WHERE] {
            let mut bytes = shape.hash().to_le_bytes().to_vec();
            bytes.extend(&body);
            let _ = decode("test", &shape, &bytes, |from| from.list(Replica::LEAST_BYTES, Replica::read));
            let _ = decode("test", &shape, &bytes, Located::read);
        }
    }

    #[test]
    fn a_recorded_answer_with_changed_bytes_is_read_or_refused(at: prop::sample::Index, byte: u8) {
        for answer in recorded("ANS", "GetReplicaList") {
            let mut bytes = answer.clone();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = decode("test", &WHERE, &bytes, Located::read);
            let _ = decode("test", &WHERE, &bytes[..at], Located::read);
        }
    }
}
