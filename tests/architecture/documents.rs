//! Documents point at things that exist: their relative links, the files and folders that they name in code,
//! and the make targets that they tell to run.

use crate::finding::Finding;

/// Endings of the file names that [`check_paths`] looks for.
const ENDINGS: &[&str] = &[".rs", ".toml", ".md", ".proto", ".py", ".sh"];

/// Relative links of a document that lead nowhere; `exists` takes a path from the root.
pub fn check_links(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in prose(text) {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ', '#']).next()) {
            let elsewhere = target.is_empty() || target.contains("://") || target.starts_with("mailto:");
            if !elsewhere && !exists(&resolve(path, target)) {
                let rule = format!("the link to '{target}' leads nowhere");
                found.push(Finding::new(path, at, rule, "correct the path, or write the file"));
            }
        }
    }
    found
}

/// `make` targets that a document names in code and the Makefile does not have.
pub fn check_targets(path: &str, text: &str, targets: &[String]) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let commands =
            line.split('`').chain([line]).map(str::trim).filter_map(|code| code.strip_prefix("make "));
        let names = commands.filter_map(|rest| rest.split_whitespace().next());
        for name in names.filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '-')) {
            if !targets.iter().any(|known| known == name) {
                let rule = format!("'make {name}' is not a target of the Makefile");
                found.push(Finding::new(path, at + 1, rule, "correct the document, or add the target"));
            }
        }
    }
    found
}

/// Paths in a document's code that the tree does not have; `files` are paths from the root.
///
/// A path that starts with a top-level folder has to be a file or folder from the root. Other paths, and the
/// bare names of Rust sources, often continue a path beside them (`placement/pick.rs`): for these it is enough
/// that some file's path ends in them.
pub fn check_paths(path: &str, text: &str, files: &[String]) -> Vec<Finding> {
    let is = |name: &str| {
        files
            .iter()
            .any(|file| file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    };
    let ends = |name: &str| files.iter().any(|file| file.ends_with(&format!("/{name}")));
    let mut found = Vec::new();
    for (at, code) in code(text) {
        let words = code
            .split_whitespace()
            .map(|word| word.trim_matches(['"', '\'', ',', ':', ';', '(', ')', '[', ']']));
        for word in words.filter(|word| !is_placeholder(word)) {
            let from_root = word.split_once('/').is_some_and(|(top, _)| is_top_level(top, files));
            let named = word.contains('/') && ENDINGS.iter().any(|ending| word.ends_with(ending));
            if !from_root && !named && !word.ends_with(".rs") {
                continue;
            }
            let name = word.trim_end_matches('/');
            if !is(name) && !is(&resolve(path, name)) && (from_root || !ends(name)) {
                let rule = format!("the path '{word}' is not in the tree");
                found.push(Finding::new(path, at, rule, "correct the path, from the root of the repository"));
            }
        }
    }
    found
}

fn is_top_level(name: &str, files: &[String]) -> bool {
    files.iter().any(|file| file.split_once('/').is_some_and(|(top, _)| top == name))
}

/// Whether `word` stands for several paths, for one that the reader chooses, or for an address elsewhere.
fn is_placeholder(word: &str) -> bool {
    let is_capitals = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_uppercase());
    word.contains(['*', '{', '<', '$', '…']) || word.contains("://") || word.split('/').any(is_capitals)
}

/// The code of a document with line numbers: lines of fenced code, and spans in backticks.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().flat_map(move |(at, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        let spans: Vec<&str> = match (fence, fenced) {
            (true, _) => Vec::new(),
            (false, true) => vec![line],
            (false, false) => line.split('`').skip(1).step_by(2).collect(),
        };
        spans.into_iter().map(move |span| (at + 1, span))
    })
}

/// The lines of a document outside fenced code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((at + 1, line))
    })
}

/// The path from the root that `target` means in the document at `path`.
fn resolve(path: &str, target: &str) -> String {
    let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
    let base = if target.starts_with('/') { "" } else { dir };
    let mut parts: Vec<&str> = Vec::new();
    for part in base.split('/').chain(target.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// The targets of a Makefile.
fn targets(makefile: &str) -> Vec<String> {
    let rules =
        makefile.lines().filter(|line| !line.starts_with(['\t', '#', '.', ' ']) && !line.contains(":="));
    let names = rules.filter_map(|line| line.split_once(':')).flat_map(|(names, _)| names.split_whitespace());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::house;

    fn documents() -> impl Iterator<Item = (String, String)> {
        let markdown = house::files().iter().filter(|path| path.ends_with(".md"));
        markdown.filter_map(|path| Some((path.clone(), house::read(path)?)))
    }

    #[test]
    fn links_between_our_documents_lead_somewhere() {
        let exists = |path: &str| house::root().join(path).exists();
        assert!(documents().count() >= 5, "the documents were not found");
        assert_clean(documents().flat_map(|(path, text)| check_links(&path, &text, &exists)).collect());
    }

    #[test]
    fn paths_in_our_documents_are_in_the_tree() {
        let found = documents().flat_map(|(path, text)| check_paths(&path, &text, house::files()));
        assert_clean(found.collect());
    }

    #[test]
    fn make_targets_in_our_documents_exist() {
        let targets = targets(&house::read("Makefile").expect("the Makefile is at the root"));
        for wanted in ["run", "test", "check", "bench", "paper", "seeds", "help"] {
            assert!(
                targets.iter().any(|name| name == wanted),
                "the Makefile has no target {wanted}: {targets:?}"
            );
        }
        assert_clean(documents().flat_map(|(path, text)| check_targets(&path, &text, &targets)).collect());
    }

    #[test]
    fn planted_dead_link_is_caught() {
        let text =
            "[a](b.md) [c](../d.md#part) [e](https://x/y) [f](#here)\n```\n[g](h.md)\n```\n[i](j/k.md)\n";
        let found =
            check_links("docs/adr/x.md", text, &|path| ["docs/adr/b.md", "docs/d.md"].contains(&path));
        assert_eq!(found.len(), 1);
        assert_caught(&found, 5, "j/k.md");
    }

    #[test]
    fn planted_path_that_is_not_in_the_tree_is_caught() {
        let files = ["src/a/b.rs", "src/a/c.rs", "tests/it/b.rs", "docs/x/run.sh"].map(str::to_owned);
        let good = "`src/a/`, `src/a/b.rs`, `c.rs`; `a/c.rs`, `x/run.sh`, `src/{a,b}.rs`, `src/*/x.rs`\n\
                    `src/NAME`, src/none.rs, `Struct::of`, `text/html`, `https://x/y.py`\n```sh\nrun src/a/b.rs\n```\n";
        assert_eq!(check_paths("docs/d.md", good, &files), []);
        // The end of a path does not do for one that starts at the root.
        let bad = "`src/gone.rs`\n`src/a`, `it/gone.rs`, `src/a/gone/`\n```\nrun src/b.rs\n```\n\
                   `gone.rs --x tests/b.rs`\n";
        let found = check_paths("docs/d.md", bad, &files);
        assert_eq!(found.len(), 6, "{found:#?}");
        for (line, word) in [
            (1, "src/gone.rs"),
            (2, "it/gone.rs"),
            (2, "src/a/gone/"),
            (4, "src/b.rs"),
            (6, "'gone.rs'"),
            (6, "tests/b.rs"),
        ] {
            assert_caught(&found, line, word);
        }
    }

    #[test]
    fn planted_unknown_make_target_is_caught() {
        let known = targets("N ?= 3\nX := a:b\n.PHONY: x\n# no: y\nrun test: z\n\tcmd: w\n");
        assert_eq!(known, ["run", "test"]);
        let text = "Do `make run` and make sure.\n    make test N=1\nThen `make coffee`.\n";
        let found = check_targets("README.md", text, &known);
        assert_eq!(found.len(), 1);
        assert_caught(&found, 3, "make coffee");
    }
}
