//! Documents point at things that exist: their relative links, and the make targets that they tell to run.

use crate::finding::Finding;

/// Relative links of a document that lead nowhere; `exists` takes a path from the root.
pub fn check_links(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in prose(text) {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ', '#']).next()) {
            let elsewhere = target.is_empty() || target.contains("://") || target.starts_with("mailto:");
            if !elsewhere && !exists(&resolve(path, target)) {
                let rule = format!("the link to '{target}' leads nowhere");
                found.push(Finding::new(path, at, rule, "mend the path or write the file"));
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
                found.push(Finding::new(path, at + 1, rule, "mend the document or add the target"));
            }
        }
    }
    found
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
    fn planted_unknown_make_target_is_caught() {
        let known = targets("N ?= 3\nX := a:b\n.PHONY: x\n# no: y\nrun test: z\n\tcmd: w\n");
        assert_eq!(known, ["run", "test"]);
        let text = "Do `make run` and make sure.\n    make test N=1\nThen `make coffee`.\n";
        let found = check_targets("README.md", text, &known);
        assert_eq!(found.len(), 1);
        assert_caught(&found, 3, "make coffee");
    }
}
