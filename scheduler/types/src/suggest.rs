//! "Did you mean": the known word nearest to one that is not known.

use alloc::vec::Vec;

/// The word of `known` nearest to `word`, if it is near enough to be what was meant: at most
/// half its letters (three, for short words) differ.
#[must_use]
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let best = known.into_iter().map(|k| (edit_distance(word, k), k)).min()?;
    (best.0 <= word.chars().count().max(6) / 2).then_some(best.1)
}

/// Letters to insert, delete or replace to turn `a` into `b` (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    let mut above: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut row = Vec::with_capacity(above.len());
        row.push(i + 1);
        for (j, y) in b.chars().enumerate() {
            let replaced = above[j] + usize::from(x != y);
            row.push(replaced.min(above[j + 1] + 1).min(row[j] + 1));
        }
        above = row;
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
        assert_eq!(nearest("zzzzzzzzzzzzzz", known), None);
        assert_eq!(nearest("x", []), None);
    }

    #[test]
    fn distance_counts_letters() {
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("same", "same"), 0);
    }
}
