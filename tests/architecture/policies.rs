//! A policy is a file of its own and a line in a table: nothing else knows it by name, so nothing else is touched when
//! one comes or goes, and nothing can forget it.

use crate::finding::Finding;
use crate::lex::{Kind, Token};
use crate::outline::Outline;
use std::collections::BTreeMap;

/// The tables: the source, and the names that it makes.
const TABLES: &[(&str, &str)] =
    &[("scheduler/src/policies.rs", "PolicyName"), ("store/src/evict.rs", "Eviction")];

/// Experiments name what they compare.
const EXPERIMENTS: &[&str] = &["sim/src/paper/", "sim/src/setup.rs"];

/// A line of a table.
#[derive(Debug, PartialEq, Eq)]
pub struct ListedPolicy {
    /// The policy's name.
    pub name: String,
    /// Where its file has to be.
    pub file: String,
    /// Its line.
    pub line: usize,
}

/// The lines of the table in `source`: each reads `Name = "word", module::Value;`.
pub fn listed(path: &str, source: &str) -> Vec<ListedPolicy> {
    let outline = Outline::of(source);
    let tokens = &outline.tokens;
    let starts = |at: usize| {
        let [name, is, word, comma] = &tokens[at..at + 4] else { return false };
        name.kind == Kind::Word && is.is("=") && word.text.starts_with('"') && comma.is(",")
    };
    let lines = (0..tokens.len().saturating_sub(4)).filter(|at| starts(*at)).map(|at| {
        let value = tokens[at + 4..].iter().take_while(|t| !t.is(";"));
        let words: Vec<&str> = value.filter(|t| t.kind == Kind::Word).map(|t| t.text).collect();
        let modules = words.split_last().map_or(&[][..], |(_, modules)| modules);
        let file = format!("{}/{}.rs", path.trim_end_matches(".rs"), modules.join("/"));
        ListedPolicy { name: tokens[at].text.to_owned(), file, line: tokens[at].line }
    });
    lines.collect()
}

/// Lines of a table whose policy has no file of its own.
pub fn check_files(path: &str, sources: &BTreeMap<String, String>) -> Vec<Finding> {
    let listed = sources.get(path).map(|source| listed(path, source)).unwrap_or_default();
    let own = |one: &ListedPolicy| {
        sources.contains_key(&one.file) && listed.iter().filter(|other| other.file == one.file).count() == 1
    };
    let without = listed.iter().filter(|one| !own(one));
    let remedy = "give it one, with all that makes it";
    without
        .map(|one| {
            Finding::new(path, one.line, format!("{} has no file {} to itself", one.name, one.file), remedy)
        })
        .collect()
}

/// Places in `source` that name one of the policies of `names`, tests left out.
pub fn check_named(path: &str, source: &str, names: &str) -> Vec<Finding> {
    let outline = Outline::of(source);
    let named = outline.production().filter(|(at, _)| names_one(&outline.tokens, *at, names));
    let remedy = "ask for what makes the difference, which its file says";
    named
        .map(|(at, t)| {
            let rule = format!("{names}::{} outside its table", outline.tokens[at + 3].text);
            Finding::new(path, t.line, rule, remedy)
        })
        .collect()
}

/// Whether `names::Name` or `names::{` stands at `at`; constants and functions are written otherwise.
fn names_one(tokens: &[Token<'_>], at: usize, names: &str) -> bool {
    let [name, a, b, of] = tokens.get(at..at + 4).unwrap_or_default() else { return false };
    let variant = of.text.starts_with(char::is_uppercase) && of.text.contains(char::is_lowercase);
    name.is(names) && a.is(":") && b.is(":") && (of.is("{") || variant)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::reach;

    fn is_experiment(path: &str) -> bool {
        EXPERIMENTS.iter().any(|of| path.starts_with(of))
    }

    #[test]
    fn every_policy_is_a_file_and_a_line() {
        let (all, production) = (reach::house_sources(), reach::production_sources());
        for (table, names) in TABLES {
            assert!(listed(table, &all[*table]).len() > 4, "the table of {names} is not read");
            assert_clean(check_files(table, &all));
            let others = production.iter().filter(|(path, _)| path != table && !is_experiment(path));
            assert_clean(others.flat_map(|(path, text)| check_named(path, text, names)).collect());
        }
    }

    /// Each table has a policy that tests alone compile. It takes part in all that is tried with every policy, and these
    /// two files are all that it took.
    #[test]
    fn the_policies_of_the_tests_took_two_files_each() {
        let all = reach::house_sources();
        for ((table, names), (dummy, own)) in TABLES
            .iter()
            .zip([("Last", "scheduler/src/policies/last.rs"), ("Deepest", "store/src/evict/deepest.rs")])
        {
            let line = listed(table, &all[*table]).into_iter().find(|one| one.name == dummy);
            assert_eq!(line.map(|one| one.file).as_deref(), Some(own));
            let names_it = |source: &str| {
                let tokens = crate::lex::tokens(source);
                let path =
                    (0..tokens.len()).any(|at| names_one(&tokens, at, names) && tokens[at + 3].is(dummy));
                path || tokens.windows(2).any(|pair| pair[0].is(dummy) && pair[1].is("="))
            };
            let files: Vec<&String> =
                all.iter().filter(|(_, text)| names_it(text)).map(|(path, _)| path).collect();
            assert_eq!(files, [table, own]);
        }
    }

    #[test]
    fn planted_policy_without_a_file_is_caught() {
        let table = "policies! {\n    /// One.\n    One = \"one\", one::POLICY;\n    Two = \"two\", old::two::POLICY;\n    Three = \"three\", old::two::OTHER;\n}\n";
        let files = [("a/p.rs", table), ("a/p/one.rs", ""), ("a/p/old/two.rs", "")];
        let sources = files.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
        assert_eq!(
            listed("a/p.rs", table)[1],
            ListedPolicy { name: "Two".into(), file: "a/p/old/two.rs".into(), line: 4 }
        );
        let found = check_files("a/p.rs", &sources);
        assert_caught(&found, 4, "Two");
        assert_caught(&found, 5, "Three");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn planted_decision_by_name_is_caught() {
        let source = "fn a(p: Names) -> bool {\n    p == Names::One\n}\nuse Names::{One, Two};\nlet all = Names::ALL.map(Names::word);\n#[cfg(test)]\nmod tests { fn b() { Names::Two; } }\n";
        let found = check_named("a.rs", source, "Names");
        assert_caught(&found, 2, "Names::One");
        assert_caught(&found, 4, "Names::{");
        assert_eq!(found.len(), 2);
    }
}
