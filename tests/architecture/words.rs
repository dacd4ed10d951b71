//! Words that a text may not hold: reminders of work, and references to a list that is not in the repository.

use crate::finding::Finding;

/// The words, spelled in halves so that this file does not contain them.
const REMINDERS: &[&str] =
    &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];

/// Reminder words of a text, standing alone and in capitals.
pub fn check_reminders(path: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let mut words = line.split(|c: char| c != '_' && !c.is_alphanumeric());
        if let Some(word) = words.find(|word| REMINDERS.contains(word)) {
            found.push(Finding::new(
                path,
                at + 1,
                format!("reminder word {word}"),
                "do it now, or open an issue",
            ));
        }
    }
    found
}

/// Words of this project's own that the field does not use, or that readers took for something else; in halves, too.
const PRIVATE: &[&str] = &[
    concat!("who", "ever"),
    concat!("me", "nd"),
    concat!("me", "nds"),
    concat!("men", "ded"),
    concat!("de", "sk"),
    concat!("she", "lf"),
    concat!("ber", "th"),
];

/// Private words of a text, in names, comments and messages.
pub fn check_private_words(path: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let mut words = line.split(|c: char| !c.is_alphanumeric());
        if let Some(word) =
            words.find(|word| PRIVATE.iter().any(|private| private.eq_ignore_ascii_case(word)))
        {
            let rule = format!("{word:?} is a word of this project's own");
            found.push(Finding::new(path, at + 1, rule, "use the field's word: docs/glossary.md"));
        }
    }
    found
}

/// References by a letter and a number to demands, which are listed nowhere here. Invariants (I1, I2 ...) are, in
/// ARCHITECTURE.md.
pub fn check_references(path: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//")) {
        let mut words = line.split(|c: char| !c.is_alphanumeric());
        if let Some(word) = words.find(|word| is_demand(word)) {
            let rule = format!("{word} refers to a list that is not here");
            found.push(Finding::new(path, at + 1, rule, "say what is meant"));
        }
    }
    found
}

/// Texts of errors that hold the cause, which also goes before them in a chain: a chain is printed whole.
pub fn check_causes(path: &str, text: &str) -> Vec<Finding> {
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let repeats = |pair: &[&str]| {
        let (shown, variant) = (pair[0], pair[1]);
        let caused = ["#[from]", "#[source]"].iter().any(|mark| variant.contains(mark));
        caused && shown.starts_with("#[error(\"") && shown.contains("{0")
    };
    let repeating = lines.windows(2).enumerate().filter(|(_, pair)| repeats(pair));
    let remedy = "write #[error(transparent)], or make it no source";
    repeating.map(|(at, _)| Finding::new(path, at + 1, "a chain prints this cause twice", remedy)).collect()
}

fn is_demand(word: &str) -> bool {
    let digits = word.strip_prefix('D').unwrap_or("");
    matches!(digits.len(), 1 | 2) && digits.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::house;

    #[test]
    fn the_house_leaves_no_reminders() {
        let text = |path: &String| Some((path.clone(), house::read(path)?));
        // The lock file is cargo's, and a checksum is not a word.
        let texts = house::files().iter().filter(|path| *path != "Cargo.lock").filter_map(text);
        assert_clean(texts.flat_map(|(path, text)| check_reminders(&path, &text)).collect());
    }

    #[test]
    fn the_house_refers_to_what_is_in_it() {
        let sources = house::sources().iter();
        assert_clean(sources.flat_map(|(path, text)| check_references(path, text)).collect());
    }

    #[test]
    fn the_house_prints_each_cause_once() {
        let sources = house::sources().iter();
        assert_clean(sources.flat_map(|(path, text)| check_causes(path, text)).collect());
    }

    #[test]
    fn planted_cause_is_caught() {
        let planted = "enum E {\n    #[error(\"no URL: {0}\")]\n    Url(#[from] Inner),\n}\n";
        assert_caught(&check_causes("a.rs", planted), 2, "prints this cause twice");
        assert_eq!(check_causes("a.rs", &planted.replace("\"no URL: {0}\"", "transparent")), []);
        assert_eq!(check_causes("a.rs", &planted.replace("#[from] ", "")), []);
    }

    #[test]
    fn the_house_speaks_as_the_field_does() {
        // A change keeps the words of its day.
        let spoken = |path: &&String| {
            *path != "CHANGELOG.md"
                && [".rs", ".md", ".toml", ".sh", ".py", ".js", ".service"]
                    .iter()
                    .any(|end| path.ends_with(end))
        };
        let texts = house::files().iter().filter(spoken).filter_map(|path| Some((path, house::read(path)?)));
        assert_clean(texts.flat_map(|(path, text)| check_private_words(path, &text)).collect());
    }

    #[test]
    fn planted_private_word_is_caught() {
        for word in PRIVATE {
            assert_caught(
                &check_private_words("a.rs", &format!("fn a() {{}}\nfn the_{word}_of() {{}}\n")),
                2,
                word,
            );
        }
        assert_eq!(check_private_words("a.rs", "recommend, desktop, shelfful"), []);
    }

    #[test]
    fn planted_reference_is_caught() {
        let planted = concat!("fn a() {}\n/// A class (", "D", "18).\n");
        assert_caught(&check_references("a.rs", planted), 2, "refers to a list that is not here");
        assert_eq!(check_references("a.rs", "/// 3D, D, D123 and I6\nlet d = D4;\n"), []);
    }

    #[test]
    fn planted_reminder_is_caught() {
        for word in REMINDERS {
            let found = check_reminders("a.rs", &format!("fn a() {{}}\n// {word}: later\n"));
            assert_caught(&found, 2, word);
        }
        assert_eq!(check_reminders("a.rs", "const METHODOLOGY: u8 = 1; // hack, todo, XXXL\n"), []);
    }
}
