//! A broken rule, and its report by a test.

use std::fmt;

/// One broken rule at one place.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Path from the workspace root.
    pub file: String,
    /// Counted from 1; 0 where the whole file is meant.
    pub line: usize,
    /// The rule that is broken.
    pub rule: String,
    /// The remedy.
    pub remedy: &'static str,
}

impl Finding {
    /// A finding at `file:line`.
    pub fn new(file: &str, line: usize, rule: impl Into<String>, remedy: &'static str) -> Self {
        Self { file: file.to_owned(), line, rule: rule.into(), remedy }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}: {}; {}", self.file, self.line, self.rule, self.remedy)
    }
}

/// Fails the test with every finding on a line of its own.
#[track_caller]
pub fn assert_clean(mut findings: Vec<Finding>) {
    findings.sort();
    let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert!(lines.is_empty(), "{} broken rule(s):\n{}", lines.len(), lines.join("\n"));
}

/// Fails the test unless some finding is at `line` and mentions `word`.
#[track_caller]
pub fn assert_caught(findings: &[Finding], line: usize, word: &str) {
    let caught = findings.iter().any(|f| f.line == line && f.to_string().contains(word));
    assert!(caught, "nothing about '{word}' at line {line} among {findings:#?}");
}

#[test]
#[should_panic(expected = "src/a.rs:3: too odd; make it even")]
fn a_finding_fails_the_test_and_names_place_rule_and_remedy() {
    assert_clean(vec![Finding::new("src/a.rs", 3, "too odd", "make it even")]);
}
