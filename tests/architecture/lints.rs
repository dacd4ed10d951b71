//! The lints bite everywhere: every crate takes the workspace's, one clippy file rules all, and nothing silences
//! the rules that keep functions small.

use crate::finding::Finding;
use crate::outline::Outline;

/// Lints that may not be silenced, for there is always another way.
const NEVER_SILENCED: &[&str] =
    &["too_many_arguments", "too_many_lines", "iter_over_hash_type", "missing_docs"];

/// Sources that include generated code, which documents itself elsewhere: what they may silence.
const GENERATED: &[(&str, &str)] = &[("src/wire/src/lib.rs", "missing_docs")];

/// A crate's manifest takes the lints of the workspace.
pub fn check_manifest(path: &str, text: &str) -> Vec<Finding> {
    let mut lines = text.lines().map(str::trim).skip_while(|line| *line != "[lints]").skip(1);
    let taken =
        lines.by_ref().take_while(|line| !line.starts_with('[')).any(|line| line == "workspace = true");
    let rule = "the crate does not take the lints of the workspace";
    if taken { Vec::new() } else { vec![Finding::new(path, 0, rule, "add [lints] with workspace = true")] }
}

/// A clippy file below the root, which would replace the root's instead of adding to it.
pub fn check_clippy_files(files: &[String]) -> Vec<Finding> {
    let below = files.iter().filter(|path| path.ends_with("/clippy.toml") || path.ends_with("/.clippy.toml"));
    let rule = "this clippy file replaces the one at the root, limits included";
    below.map(|path| Finding::new(path, 0, rule, "put the setting into the file at the root")).collect()
}

/// Attributes of a source that silence what must not be silenced.
pub fn check_silenced(path: &str, source: &str) -> Vec<Finding> {
    let outline = Outline::of(source);
    let generated = |t: &str| GENERATED.iter().any(|(file, lint)| *file == path && *lint == t);
    let named = outline.tokens.iter().filter(|t| NEVER_SILENCED.iter().any(|lint| t.is(lint)));
    let named = named.filter(|t| !generated(t.text));
    let remedy = "fix what it complains about";
    named.map(|t| Finding::new(path, t.line, format!("{} is silenced", t.text), remedy)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::house;

    #[test]
    fn every_crate_takes_the_lints_of_the_workspace() {
        let manifest = |dir: &str| format!("{dir}/Cargo.toml").trim_start_matches('/').to_owned();
        let paths = house::crates().iter().map(|one| manifest(&one.dir));
        let checked = paths.flat_map(|path| check_manifest(&path, &house::read(&path).unwrap_or_default()));
        assert_clean(checked.chain(check_clippy_files(house::files())).collect());
    }

    #[test]
    fn nothing_silences_the_rules_on_size() {
        let sources = house::sources().iter();
        assert_clean(sources.flat_map(|(path, text)| check_silenced(path, text)).collect());
    }

    #[test]
    fn planted_manifest_without_lints_is_caught() {
        assert_caught(
            &check_manifest("a/Cargo.toml", "[package]\nworkspace = true\n"),
            0,
            "does not take the lints",
        );
        assert_caught(
            &check_manifest("a/Cargo.toml", "[lints]\n[x]\nworkspace = true\n"),
            0,
            "does not take",
        );
        assert_eq!(
            check_manifest("a/Cargo.toml", "[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n"),
            []
        );
    }

    #[test]
    fn planted_clippy_file_is_caught() {
        let files = ["clippy.toml", "store/clippy.toml"].map(str::to_owned);
        let found = check_clippy_files(&files);
        assert_eq!(found.len(), 1);
        assert_caught(&found, 0, "store/clippy.toml");
    }

    #[test]
    fn planted_silencing_is_caught() {
        let source = "// too_many_arguments\n#[expect(clippy::too_many_arguments)]\nfn a() {}\n";
        let found = check_silenced("a.rs", source);
        assert_eq!(found.len(), 1);
        assert_caught(&found, 2, "too_many_arguments");
    }
}
