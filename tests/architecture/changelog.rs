//! The changelog can be read by a person in a hurry: newest first, dated, grouped, breaking changes first.

use crate::finding::Finding;

/// The groups under a version.
const GROUPS: &[&str] = &["Breaking", "Added", "Changed", "Fixed", "Deprecated", "Removed", "Security"];

/// Shape of the changelog; `version` is the workspace's, which it must mention unless something is unreleased.
pub fn check_changelog(text: &str, version: &str) -> Vec<Finding> {
    let mut reader = Reader::default();
    for (at, line) in text.lines().enumerate() {
        reader.line(at + 1, line);
    }
    reader.end_of_group();
    if !text.starts_with("# Changelog\n") {
        reader.say(1, "the first line is not '# Changelog'", "start with that title");
    }
    if !reader.versions.iter().any(|v| v == version || v == UNRELEASED) {
        let rule = format!("neither {version} nor {UNRELEASED} has a section");
        reader.say(0, rule, "write what this version changes for its users");
    }
    reader.found
}

const UNRELEASED: &str = "Unreleased";

#[derive(Default)]
struct Reader {
    versions: Vec<String>,
    groups: Vec<String>,
    /// Line of a heading that no entry has followed yet.
    empty_since: Option<usize>,
    found: Vec<Finding>,
}

impl Reader {
    fn say(&mut self, line: usize, rule: impl Into<String>, remedy: &'static str) {
        self.found.push(Finding::new("CHANGELOG.md", line, rule, remedy));
    }

    fn line(&mut self, at: usize, line: &str) {
        if let Some(title) = line.strip_prefix("## ") {
            self.end_of_group();
            self.version(at, title);
        } else if let Some(group) = line.strip_prefix("### ") {
            if !self.groups.is_empty() {
                self.end_of_group();
            }
            self.group(at, group);
        } else if line.starts_with("- ") {
            self.empty_since = None;
            if self.groups.is_empty() {
                self.say(at, "an entry outside a group", "put it under '### Added' or one of its sisters");
            }
        }
    }

    fn version(&mut self, at: usize, title: &str) {
        let (name, date) = title.split_once(" - ").unwrap_or((title, ""));
        let name = name.trim_matches(['[', ']']).to_owned();
        let dated = date.len() == 10
            && date.split('-').map(str::len).eq([4, 2, 2])
            && date.replace('-', "").parse::<u32>().is_ok();
        if name != UNRELEASED && (number(&name).is_none() || !dated) {
            self.say(
                at,
                format!("'{title}' is not a version with its date"),
                "write '## [1.2.3] - 2026-01-31'",
            );
        }
        let older = match self.versions.last() {
            None => true,
            Some(before) => name != UNRELEASED && (before == UNRELEASED || number(&name) < number(before)),
        };
        if !older {
            self.say(
                at,
                format!("{name} does not come before what stands above it"),
                "sort newest first, each once",
            );
        }
        self.versions.push(name);
        self.groups.clear();
        self.empty_since = Some(at);
    }

    fn group(&mut self, at: usize, group: &str) {
        if !GROUPS.contains(&group) {
            self.say(
                at,
                format!("'{group}' is not a group"),
                "use Breaking, Added, Changed, Fixed, Deprecated, Removed or Security",
            );
        }
        if group == GROUPS[0] && !self.groups.is_empty() {
            self.say(at, "breaking changes come late", "move them to the top of their version");
        }
        if self.groups.iter().any(|known| known == group) {
            self.say(at, format!("'{group}' twice in one version"), "join the two");
        }
        self.groups.push(group.to_owned());
        self.empty_since = Some(at);
    }

    fn end_of_group(&mut self) {
        if let Some(at) = self.empty_since.take() {
            // Right after a release there is nothing unreleased to tell.
            let nothing_unreleased =
                self.groups.is_empty() && self.versions.last().is_some_and(|v| v == UNRELEASED);
            if !nothing_unreleased {
                self.say(at, "a heading without entries", "write an entry or drop the heading");
            }
        }
    }
}

fn number(version: &str) -> Option<[u32; 3]> {
    let parts: Vec<u32> = version.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    parts.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::house;

    const GOOD: &str = "# Changelog\n\nAbout.\n\n## [Unreleased]\n\n## [0.2.0] - 2026-02-01\n\n### Breaking\n- A.\n\n\
        ### Added\n- B\n  goes on.\n\n## [0.1.0] - 2026-01-01\n\n### Fixed\n- C.\n";

    #[test]
    fn our_changelog_is_well_formed() {
        let text = house::read("CHANGELOG.md").unwrap_or_default();
        assert_clean(check_changelog(&text, env!("CARGO_PKG_VERSION")));
    }

    #[test]
    fn planted_disorder_is_caught() {
        assert_eq!(check_changelog(GOOD, "0.2.0"), []);
        let broken = |from: &str, to: &str| check_changelog(&GOOD.replacen(from, to, 1), "0.2.0");
        assert_caught(&broken("# Changelog", "# News"), 1, "# Changelog");
        assert_caught(&broken("0.1.0", "0.3.0"), 16, "does not come before");
        assert_caught(&broken("0.1.0", "0.2.0"), 16, "does not come before");
        assert_caught(&broken("2026-02-01", "soon"), 7, "with its date");
        assert_caught(&broken("### Added", "### New"), 12, "not a group");
        assert_caught(&broken("### Added", "### Breaking"), 12, "twice");
        assert_caught(&broken("- B\n", "B\n"), 12, "without entries");
        assert_caught(&broken("### Fixed\n", ""), 18, "outside a group");
        let late = GOOD.replacen("Breaking", "Fixed", 1).replacen("Added", "Breaking", 1);
        assert_caught(&check_changelog(&late, "0.2.0"), 12, "come late");
    }

    #[test]
    fn planted_missing_version_or_file_is_caught() {
        let released = GOOD.replace("## [Unreleased]\n", "");
        assert_caught(&check_changelog(&released, "9.0.0"), 0, "neither 9.0.0");
        assert_caught(&check_changelog("", "0.1.0"), 1, "first line");
    }
}
