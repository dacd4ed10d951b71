//! "Did you mean": the known word nearest to one that is not known.

use alloc::vec::Vec;

/// The word of `known` nearest to `word`, if it is near enough to be what was meant: at most
/// half its letters differ, three of a word of four or five, one of a shorter one.
#[must_use]
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let best = known.into_iter().map(|k| (edit_distance(word, k), k)).min()?;
    // Half of a word; of a short one that would be another word.
    let slips = match word.chars().count() {
        0..=3 => 1,
        letters => letters.max(6) / 2,
    };
    (best.0 <= slips).then_some(best.1)
}

/// Letters to insert, delete, replace or swap with the next one to turn `a` into `b` (optimal string alignment).
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let (mut before, mut above) = (Vec::new(), Vec::from_iter(0..=b.len()));
    for (i, x) in a.iter().enumerate() {
        let mut row = Vec::with_capacity(above.len());
        row.push(i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = above[j] + usize::from(x != y);
            let other = replaced.min(above[j + 1] + 1).min(row[j] + 1);
            let swapped = i > 0 && j > 0 && (x, y) == (&b[j - 1], &a[i - 1]);
            row.push(if swapped { other.min(before[j - 1] + 1) } else { other });
        }
        before = core::mem::replace(&mut above, row);
    }
    above[above.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_finds_its_word_and_nonsense_finds_none() {
        let known = ["admission", "policy", "seed"];
        assert_eq!(nearest("admision", known), Some("admission"));
        assert_eq!(nearest("polcy", known), Some("policy"));
        assert_eq!(
            nearest("tttf", ["tbt", "ttft"]),
            Some("ttft"),
            "two letters that are swapped are one slip"
        );
        assert_eq!(nearest("zzzzzzzzzzzzzz", known), None);
        assert_eq!(nearest("on", ["auto", "none", "early"]), None, "the opposite is no suggestion");
        assert_eq!(nearest("slp", ["none", "slo"]), Some("slo"));
        assert_eq!(nearest("x", []), None);
    }

    #[test]
    fn distance_counts_letters() {
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("same", "same"), 0);
        assert_eq!(edit_distance("smae", "same"), 1);
        // No letter is edited twice: by way of "cb" it would be a swap and one letter more.
        assert_eq!(edit_distance("bc", "cab"), 3);
    }

    /// The distance by trying everything, without a table.
    fn naive(a: &[char], b: &[char]) -> usize {
        match (a, b) {
            ([], rest) | (rest, []) => rest.len(),
            ([x, a_rest @ ..], [y, b_rest @ ..]) => {
                let replaced = naive(a_rest, b_rest) + usize::from(x != y);
                let other = replaced.min(naive(a_rest, b) + 1).min(naive(a, b_rest) + 1);
                match (a_rest, b_rest) {
                    ([x2, a_rest @ ..], [y2, b_rest @ ..]) if (x, x2) == (y2, y) => {
                        other.min(naive(a_rest, b_rest) + 1)
                    }
                    _ => other,
                }
            }
        }
    }

    fn letters(word: &str) -> Vec<char> {
        word.chars().collect()
    }

    #[test]
    fn letters_count_and_not_bytes() {
        assert_eq!(edit_distance("größe", "grösse"), 2);
        assert_eq!(edit_distance("\u{3a3}", "\u{3c3}"), 1);
    }

    #[test]
    fn of_several_the_nearest_is_meant_and_of_equals_the_first_in_the_alphabet() {
        assert_eq!(nearest("baton", ["button", "batons", "bacon"]), Some("bacon"));
        assert_eq!(nearest("early", ["early_predict", "early"]), Some("early"));
        assert_eq!(nearest("abcdef", ["uvwdef"]), Some("uvwdef"), "half the letters may differ");
        assert_eq!(nearest("abcdef", ["uvwxef"]), None, "more may not");
    }

    proptest::proptest! {
        #[test]
        fn the_distance_is_the_least_number_of_edits(a in "[abc]{0,6}", b in "[abc]{0,6}") {
            let distance = edit_distance(&a, &b);
            proptest::prop_assert_eq!(distance, naive(&letters(&a), &letters(&b)));
            proptest::prop_assert_eq!(distance, edit_distance(&b, &a));
        }
    }
}
