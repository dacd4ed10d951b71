//! Names of types end in a noun of a list, and words that say nothing are not used in the names of files and types.

use crate::finding::Finding;
use crate::outline::Outline;

/// Words that fit anything; the plural of each is meant too.
const BANNED: &[&str] = &["manager", "handler", "util", "common", "helper", "info", "wrapper", "impl", "v2"];

/// Nouns that a type's name may end in. A new one comes with the type that needs it, and means what it means in
/// docs/glossary.md or in the field.
const NOUNS: &str = include_str!("nouns.txt");

/// Associated types whose names another crate's trait has given.
const GIVEN: &[&str] = &["ConnectInfo"];

/// Name of every directory and file on the way to a source.
pub fn check_path(path: &str) -> Vec<Finding> {
    let parts = path.trim_end_matches(".rs").split('/');
    let bad = parts.flat_map(words).filter_map(|word| banned(&word));
    bad.map(|word| {
        Finding::new(path, 0, format!("the path says '{word}'"), "name the file after what it holds")
    })
    .collect()
}

/// Names of the types that a source declares.
pub fn check_types(path: &str, source: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for one in Outline::of(source).types().into_iter().filter(|one| !GIVEN.contains(&one.name.as_str())) {
        for word in words(&one.name).filter_map(|word| banned(&word)) {
            let rule = format!("type {} says '{word}'", one.name);
            found.push(Finding::new(path, one.line, rule, "name it after what it is or does"));
        }
    }
    found
}

/// Types whose names end in a word that is not on the list.
pub fn check_nouns(path: &str, source: &str) -> Vec<Finding> {
    let types = Outline::of(source).types().into_iter().filter(|one| !GIVEN.contains(&one.name.as_str()));
    let ending = types.filter_map(|one| words(&one.name).last().map(|word| (one, word)));
    let other = ending.filter(|(_, word)| NOUNS.lines().all(|noun| noun != word));
    other
        .map(|(one, word)| {
            let rule = format!("type {} ends in '{word}'", one.name);
            Finding::new(
                path,
                one.line,
                rule,
                "end it in a noun of tests/architecture/nouns.txt, or add one there",
            )
        })
        .collect()
}

fn banned(word: &str) -> Option<&'static str> {
    BANNED.iter().copied().find(|ban| word == *ban || word.strip_suffix('s') == Some(ban))
}

/// The words of a snake, kebab or camel case name, in lower case.
fn words(name: &str) -> impl Iterator<Item = String> {
    let chars: Vec<char> = name.chars().collect();
    let mut split = String::new();
    for (at, &c) in chars.iter().enumerate() {
        let after_lower = at > 0 && !chars[at - 1].is_uppercase();
        let before_lower = chars.get(at + 1).is_some_and(|next| next.is_lowercase());
        if c.is_uppercase() && (after_lower || before_lower) {
            split.push('_');
        }
        split.extend(c.to_lowercase());
    }
    let parts: Vec<String> = split.split(['_', '-', '.']).map(str::to_owned).collect();
    parts.into_iter()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::house;

    #[test]
    fn the_house_uses_names_that_say_something() {
        let sources = house::sources().iter();
        assert_clean(
            sources
                .flat_map(|(path, text)| check_path(path).into_iter().chain(check_types(path, text)))
                .collect(),
        );
    }

    #[test]
    fn types_of_the_house_end_in_nouns() {
        let sources = house::sources().iter();
        assert_clean(sources.flat_map(|(path, text)| check_nouns(path, text)).collect());
    }

    #[test]
    fn every_noun_of_the_list_ends_a_type() {
        let types = house::sources().iter().flat_map(|(_, text)| Outline::of(text).types());
        let used: BTreeSet<String> = types.filter_map(|one| words(&one.name).last()).collect();
        let unused: Vec<&str> = NOUNS.lines().filter(|noun| !used.contains(*noun)).collect();
        assert_eq!(unused, [""; 0], "take them off tests/architecture/nouns.txt");
    }

    #[test]
    fn the_list_is_in_order() {
        assert!(NOUNS.lines().is_sorted_by(|one, other| one < other));
    }

    #[test]
    fn planted_ending_is_caught() {
        let source = "struct KvBlock;\nenum BlockTold { A }\ntrait Whom {}\n";
        let found = check_nouns("a.rs", source);
        assert_caught(&found, 2, "ends in 'told'");
        assert_caught(&found, 3, "ends in 'whom'");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn planted_file_name_is_caught() {
        for path in [
            "src/utils.rs",
            "src/block_manager.rs",
            "src/common/a.rs",
            "src/codec-v2.rs",
            "tests/it/helpers.rs",
        ] {
            assert_eq!(check_path(path).len(), 1, "{path}");
        }
        assert_eq!(check_path("src/information.rs"), []);
        assert_eq!(check_path("src/simple.rs"), []);
    }

    #[test]
    fn planted_type_name_is_caught() {
        let source = "struct Good;\npub enum BlockInfo { A }\ntrait HTTPHandler {}\ntype PlanV2 = u8;\n";
        let found = check_types("a.rs", source);
        assert_caught(&found, 2, "'info'");
        assert_caught(&found, 3, "'handler'");
        assert_caught(&found, 4, "'v2'");
        assert_eq!(found.len(), 3);
        assert_eq!(check_types("a.rs", "struct Simplex; struct Informed; struct Implied;"), []);
    }
}
