//! Lists of token ids as JSON: most of what a long prompt is to an engine.

/// Of every number below ten thousand: its four digits, and how many of them are zeros in front.
static QUADS: [([u8; 4], u8); 10_000] = quads();

const fn quads() -> [([u8; 4], u8); 10_000] {
    let mut all = [(*b"0000", 3); 10_000];
    let mut at = 1;
    while at < all.len() {
        // One more than the number before, as on paper.
        let (mut quad, mut place) = (all[at - 1].0, 3);
        while quad[place] == b'9' {
            quad[place] = b'0';
            place -= 1;
        }
        quad[place] += 1;
        all[at] = (
            quad,
            if at < 10 {
                3
            } else if at < 100 {
                2
            } else if at < 1_000 {
                1
            } else {
                0
            },
        );
        at += 1;
    }
    all
}

/// Ids that are written between two copies.
const TURN: usize = 64;
/// The longest number and its comma, and what is written at once beyond the last.
const ROOM: usize = TURN * 11 + 8;

/// Writes `[1,2,3]`.
pub(crate) fn list(out: &mut Vec<u8>, ids: &[u32]) {
    out.push(b'[');
    let mut room = [0; ROOM];
    for turn in ids.chunks(TURN) {
        let end = turn.iter().fold(0, |end, id| number(&mut room, end, *id));
        out.extend_from_slice(&room[..end]);
    }
    if !ids.is_empty() {
        // The comma after the last.
        out.pop();
    }
    out.push(b']');
}

/// An upper bound of the bytes that [`list`] writes. It is tight, because the memory is often new to the process.
pub(crate) fn room_bytes(ids: &[u32]) -> usize {
    let most = ids.iter().fold(0, |most, id| most | *id);
    // Of the highest that has these bits.
    let digits = most.checked_ilog10().unwrap_or(0) as usize + 1;
    ids.len() * (digits + 1) + 2
}

/// Writes a number and a comma at `at`, and says where they end.
#[inline]
fn number(room: &mut [u8; ROOM], at: usize, id: u32) -> usize {
    if id < 10_000 {
        return leading(room, at, id);
    }
    let (high, low) = (id / 10_000, id % 10_000);
    let at = if high < 10_000 {
        leading(room, at, high) - 1
    } else {
        let at = leading(room, at, high / 10_000) - 1;
        following(room, at, high % 10_000) - 1
    };
    following(room, at, low)
}

/// A number below ten thousand without zeros in front. Eight bytes always: what is too much is written over.
#[inline]
fn leading(room: &mut [u8; ROOM], at: usize, number: u32) -> usize {
    let (quad, zeros) = QUADS[number as usize];
    let word = (u64::from(u32::from_le_bytes(quad)) | COMMA) >> (8 * zeros);
    room[at..at + 8].copy_from_slice(&word.to_le_bytes());
    at + 5 - usize::from(zeros)
}

/// With them.
#[inline]
fn following(room: &mut [u8; ROOM], at: usize, number: u32) -> usize {
    let word = u64::from(u32::from_le_bytes(QUADS[number as usize].0)) | COMMA;
    room[at..at + 8].copy_from_slice(&word.to_le_bytes());
    at + 5
}

/// Behind four digits.
const COMMA: u64 = (b',' as u64) << 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(ids: &[u32]) -> String {
        let mut out = b"before ".to_vec();
        list(&mut out, ids);
        String::from_utf8(out).unwrap().strip_prefix("before ").unwrap().to_owned()
    }

    #[test]
    fn numbers_of_every_length_are_written_as_serde_writes_them() {
        let mut ids: Vec<u32> = (0..20_000).collect();
        ids.extend((0..32).flat_map(|bit| [1u32 << bit, (1 << bit) - 1, !(1 << bit)]));
        ids.extend((0..10).flat_map(|power| [10u32.pow(power) - 1, 10u32.pow(power)]));
        assert_eq!(written(&ids), serde_json::to_string(&ids).unwrap());
        assert_eq!(written(&[]), "[]");
    }

    proptest! {
        #[test]
        fn any_ids_are_written_as_serde_writes_them(ids in prop::collection::vec(any::<u32>(), 0..300)) {
            prop_assert_eq!(written(&ids), serde_json::to_string(&ids).unwrap());
        }
    }
}
