//! Code that stands in two production files: what two files say in the same words has one owner too few.

use std::collections::{BTreeMap, BTreeSet};

use crate::finding::Finding;
use crate::outline::Outline;

/// Lines of code in a row that are the same in two files.
const REPEAT_LINES: usize = 6;
/// Pairs of files that may share such lines. The review that asked for fewer counted 34.
const PAIRS_MAX: usize = 19;

/// A line of code: its number and its text, without indentation.
type CodeLine<'a> = (usize, &'a str);

/// The lines with production code, without imports and lines of brackets alone: they repeat for the compiler.
fn code_lines(text: &str) -> Vec<CodeLine<'_>> {
    let outline = Outline::of(text);
    let lines: BTreeSet<usize> =
        outline.production().flat_map(|(_, token)| token.line..=token.last_line).collect();
    let import =
        |line: &str| ["use ", "pub use ", "mod ", "pub mod "].iter().any(|head| line.starts_with(head));
    let says = |line: &str| line.chars().any(char::is_alphanumeric) && !import(line);
    let all = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    all.filter(|(at, line)| lines.contains(at) && says(line)).collect()
}

/// Pairs of files that share [`REPEAT_LINES`] lines of code in a row: the first such lines of each pair.
pub fn check_repeats(sources: &[(String, String)]) -> Vec<Finding> {
    let mut places: BTreeMap<Vec<&str>, Vec<(&str, usize)>> = BTreeMap::new();
    let files: Vec<(&str, Vec<CodeLine<'_>>)> =
        sources.iter().map(|(path, text)| (path.as_str(), code_lines(text))).collect();
    for (path, lines) in &files {
        for run in lines.windows(REPEAT_LINES) {
            let words = run.iter().map(|(_, line)| *line).collect();
            places.entry(words).or_default().push((path, run[0].0));
        }
    }
    let mut pairs: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for same in places.values() {
        for (at, (one, line)) in same.iter().enumerate() {
            for (other, _) in same[at + 1..].iter().filter(|(other, _)| other != one) {
                pairs.entry((one.min(other), one.max(other))).or_insert(*line);
            }
        }
    }
    let rule = |other: &str| format!("{REPEAT_LINES} lines in a row are those of {other}");
    let remedy = "give them one owner that both use";
    pairs.iter().map(|((one, other), line)| Finding::new(one, *line, rule(other), remedy)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::assert_caught;
    use crate::reach;

    #[test]
    fn the_house_repeats_little() {
        let found = check_repeats(&reach::production_sources());
        assert!(found.len() <= PAIRS_MAX, "{} pairs of files, at most {PAIRS_MAX}: {found:#?}", found.len());
    }

    #[test]
    fn planted_repeat_is_caught() {
        let body = (0..6).map(|at| format!("    step({at});\n")).collect::<String>();
        let file = |name: &str, head: &str| (name.to_owned(), format!("{head}fn f() {{\n{body}}}\n"));
        let both = [file("a.rs", "use a::b;\n\n"), file("b.rs", "// Another.\n")];
        assert_caught(&check_repeats(&both), 3, "those of b.rs");
        let tests = ("b.rs".to_owned(), format!("#[cfg(test)]\nmod tests {{\n    fn f() {{\n{body}}}\n}}\n"));
        assert_eq!(check_repeats(&[file("a.rs", ""), tests]), [], "tests may repeat");
        let short = ("b.rs".to_owned(), body.lines().take(5).collect::<Vec<_>>().join("\n"));
        assert_eq!(check_repeats(&[file("a.rs", ""), short]), []);
    }
}
