//! Lists of token ids as JSON: most of what a long prompt is to an engine.

/// Four digits of every number below ten thousand.
static QUADS: [[u8; 4]; 10_000] = quads();

const fn quads() -> [[u8; 4]; 10_000] {
    let mut all = [*b"0000"; 10_000];
    let mut at = 1;
    while at < all.len() {
        // One more than the number before, as on paper.
        let mut quad = all[at - 1];
        let mut place = 3;
        while quad[place] == b'9' {
            quad[place] = b'0';
            place -= 1;
        }
        quad[place] += 1;
        all[at] = quad;
        at += 1;
    }
    all
}

/// Ids that are written between two copies.
const TURN: usize = 64;
/// The longest number and its comma, and the four bytes that are written where fewer count.
const LONGEST: usize = 11;

/// Writes `[1,2,3]`.
pub(crate) fn list(out: &mut Vec<u8>, ids: &[u32]) {
    out.push(b'[');
    let mut room = [0; TURN * LONGEST + 4];
    for turn in ids.chunks(TURN) {
        let mut end = 0;
        for id in turn {
            end = number(&mut room, end, *id);
            room[end] = b',';
            end += 1;
        }
        out.extend_from_slice(&room[..end]);
    }
    if !ids.is_empty() {
        // The comma after the last.
        out.pop();
    }
    out.push(b']');
}

/// About as many bytes as [`list`] writes, seldom fewer.
pub(crate) const fn room_bytes(ids: &[u32]) -> usize {
    ids.len() * 7 + 2
}

/// Whether a JSON text is a list of just these ids. A text of another form than [`list`] writes is read by serde.
pub(crate) fn is_list(text: &str, ids: &[u32]) -> bool {
    let mut ours = Vec::with_capacity(room_bytes(ids));
    list(&mut ours, ids);
    text.as_bytes() == ours || serde_json::from_str::<Vec<u32>>(text).is_ok_and(|theirs| theirs == ids)
}

/// Writes a number at `at`, and says where it ends.
fn number(out: &mut [u8], at: usize, id: u32) -> usize {
    if id >= 10_000 {
        let at = number(out, at, id / 10_000);
        out[at..at + 4].copy_from_slice(&QUADS[(id % 10_000) as usize]);
        return at + 4;
    }
    let zeros = usize::from(id < 1_000) + usize::from(id < 100) + usize::from(id < 10);
    // Four bytes always; what is too much is written over.
    let digits = u32::from_le_bytes(QUADS[id as usize]) >> (8 * zeros);
    out[at..at + 4].copy_from_slice(&digits.to_le_bytes());
    at + 4 - zeros
}

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

    #[test]
    fn a_list_is_known_however_it_is_written() {
        assert!(is_list("[1,20,300]", &[1, 20, 300]) && is_list("[ 1, 20,\n300 ]", &[1, 20, 300]));
        for other in
            ["[1,20,30]", "[1,20,300,4]", "[1,20]", "[1,20,300", "{}", "[1,20,\"300\"]", "[1,20,-300]"]
        {
            assert!(!is_list(other, &[1, 20, 300]), "{other}");
        }
    }

    proptest! {
        #[test]
        fn any_ids_are_written_as_serde_writes_them(ids in prop::collection::vec(any::<u32>(), 0..300)) {
            prop_assert_eq!(written(&ids), serde_json::to_string(&ids).unwrap());
        }
    }
}
