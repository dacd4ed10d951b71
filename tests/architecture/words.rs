//! Reminder words: what they remind of is done, or is an issue.

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
    fn planted_reminder_is_caught() {
        for word in REMINDERS {
            let found = check_reminders("a.rs", &format!("fn a() {{}}\n// {word}: later\n"));
            assert_caught(&found, 2, word);
        }
        assert_eq!(check_reminders("a.rs", "const METHODOLOGY: u8 = 1; // hack, todo, XXXL\n"), []);
    }
}
