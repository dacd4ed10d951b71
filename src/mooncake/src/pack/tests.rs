//! The encoding, against itself and against any bytes.

use proptest::prelude::*;

use super::{Reader, Shape, first_word, pack};

const ROW: Shape = Shape::Struct(&[
    Shape::Text,
    Shape::List(&Shape::Text),
    Shape::Optional(&Shape::U64),
    Shape::Bool,
    Shape::I32,
]);

type Row = (String, Vec<String>, Option<u64>, bool, i32);

fn packed(row: &Row) -> Vec<u8> {
    pack(&ROW, |to| {
        to.text(&row.0);
        to.length(row.1.len());
        row.1.iter().for_each(|text| to.text(text));
        to.optional(row.2.as_ref(), |to, number| to.u64(*number));
        to.bool(row.3);
        to.i32(row.4);
    })
}

fn read(bytes: &[u8]) -> crate::error::Result<Row> {
    let mut from = Reader::open(&ROW, bytes, "test")?;
    let row =
        (from.text()?, from.list(1, Reader::text)?, from.optional(Reader::u64)?, from.bool()?, from.i32()?);
    from.end()?;
    Ok(row)
}

#[test]
fn literals_are_spelt_as_the_other_side_spells_them() {
    let uuid = Shape::Plain(&[Shape::U64, Shape::U64], 8);
    assert_eq!(uuid.literal(), [0xfd, 4, 4, 0x89, 0x89, 0xff]);
    assert_eq!(uuid.hash(), 0x3c6d_83e0);
    assert_eq!(Shape::Expected(&Shape::Nothing).literal(), [0x87, 0xfa, 1]);
    let all = Shape::Variant(&[Shape::U8, Shape::I64]);
    assert_eq!(all.literal(), [0x86, 6, 3, 0xff]);
    assert_eq!(ROW.literal(), [0xfd, 0x80, 12, 0x84, 0x80, 12, 0x85, 4, 11, 1, 0xff]);
}

#[test]
fn calls_have_the_numbers_that_the_other_side_gives_them() {
    assert_eq!(first_word(b"mooncake::WrappedMasterService::Ping"), 0xd6c2_dae5);
    assert_eq!(crate::rpc::function_id("ExistKey"), 0x8938_5f09);
    assert_eq!(crate::rpc::function_id("PutStart"), 0x65ea_9ac1);
}

#[test]
fn a_message_with_its_literal_is_read() {
    let row: Row = ("a".into(), vec![], None, true, -7);
    let plain = packed(&row);
    let mut told = plain.clone();
    told[0] |= 1;
    let literal = [&[4][..], &ROW.literal(), &[0]].concat();
    told.splice(4..4, literal);
    assert_eq!(read(&told).unwrap(), row);
    told.truncate(10);
    assert!(read(&told).is_err(), "a literal without end");
}

#[test]
fn long_containers_take_wider_lengths() {
    for (length, head) in [(255, 4), (256, 5), (65_535, 5), (65_536, 5)] {
        let row: Row = ("x".repeat(length), vec![String::new(); 3], Some(1), false, 1);
        let bytes = packed(&row);
        assert_eq!(bytes[0] & 1 == 1, head == 5, "{length}");
        assert_eq!(read(&bytes).unwrap(), row);
    }
}

#[test]
fn claims_of_much_to_come_are_refused_at_once() {
    let mut bytes = (ROW.hash() | 1).to_le_bytes().to_vec();
    bytes.push(3 << 3);
    bytes.extend(u64::MAX.to_le_bytes());
    assert!(read(&bytes).is_err());
    // Before a single value is read, which need not take any bytes.
    let many = pack(&ROW, |to| to.length(200));
    assert!(Reader::open(&ROW, &many, "test").unwrap().list(1, |_| Ok(())).is_err());
}

#[test]
fn another_type_is_another_release() {
    let mut bytes = packed(&("a".into(), vec![], None, true, 1));
    bytes[3] ^= 0x40;
    let refused = read(&bytes).unwrap_err();
    assert_eq!(refused.kind, crate::error::Kind::Release);
}

proptest! {
    #[test]
    fn what_is_packed_is_read(
        text in "\\PC{0,300}",
        list in prop::collection::vec("[a-z]{0,4}", 0..300),
        number: Option<u64>,
        yes: bool,
        code: i32,
    ) {
        let row = (text, list, number, yes, code);
        prop_assert_eq!(read(&packed(&row)).unwrap(), row);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), known: bool) {
        let mut bytes = bytes;
        if known && bytes.len() >= 4 {
            let head = ROW.hash() | u32::from(bytes[0] & 1);
            bytes[..4].copy_from_slice(&head.to_le_bytes());
        }
        let _ = read(&bytes);
    }

    #[test]
    fn a_message_that_was_cut_is_refused(row: (String, Vec<String>, Option<u64>, bool, i32), cut: prop::sample::Index) {
        let bytes = packed(&row);
        prop_assert!(read(&bytes[..cut.index(bytes.len())]).is_err());
    }
}
