//! Words that production code, and the pure crates above all, must not contain.

use crate::finding::Finding;
use crate::outline::Outline;

/// A path that pure code must not name, and what to do instead.
const IMPURE: &[(&[&str], &str, &str)] = &[
    (&["Instant", ":", ":", "now"], "Instant::now", "take the time as an argument, in microseconds"),
    (&["SystemTime"], "SystemTime", "take the time as an argument, in microseconds"),
    (&["thread", ":", ":"], "thread::", "a core is single-threaded; the driver owns the threads"),
    (&["extern", "crate", "std"], "extern crate std", "a pure crate is no_std in production"),
];

/// `unwrap` outside test code.
pub fn check_unwrap(path: &str, source: &str) -> Vec<Finding> {
    let outline = Outline::of(source);
    let called = |at: usize| at > 0 && (outline.tokens[at - 1].is(".") || outline.tokens[at - 1].is(":"));
    let found = outline.production().filter(|(at, t)| called(*at) && (t.is("unwrap") || t.is("unwrap_err")));
    let remedy = "return an error, or expect(\"why it cannot happen\")";
    found.map(|(_, t)| Finding::new(path, t.line, format!("{} outside tests", t.text), remedy)).collect()
}

/// Clocks, threads and std in the production code of a pure crate.
pub fn check_pure(path: &str, source: &str) -> Vec<Finding> {
    let outline = Outline::of(source);
    let mut found = Vec::new();
    for (at, token) in outline.production() {
        for (words, name, remedy) in IMPURE.iter().filter(|(words, ..)| outline.reads(at, words)) {
            debug_assert!(!words.is_empty(), "a rule without words would fire everywhere");
            found.push(Finding::new(path, token.line, format!("{name} in a pure crate"), remedy));
        }
    }
    found
}

/// `#![no_std]`, without conditions, at the root of a pure crate.
pub fn check_no_std(path: &str, source: &str) -> Vec<Finding> {
    let outline = Outline::of(source);
    let there = (0..outline.tokens.len()).any(|at| outline.reads(at, &["#", "!", "[", "no_std", "]"]));
    let remedy = "put #![no_std] and extern crate alloc at the top";
    if there {
        Vec::new()
    } else {
        vec![Finding::new(path, 1, "the root of a pure crate is not no_std", remedy)]
    }
}

/// The simulator named in the serving binary outside the commands that simulate.
pub fn check_simulator(path: &str, source: &str) -> Vec<Finding> {
    if !path.starts_with("src/") || path.starts_with("src/cli/") {
        return Vec::new();
    }
    let outline = Outline::of(source);
    let named = outline.tokens.iter().filter(|t| t.is("baton_sim"));
    let remedy = "only src/cli/ simulates; what serving needs belongs in a core";
    named.map(|t| Finding::new(path, t.line, "baton_sim on the serving path", remedy)).collect()
}

/// The command line named by what its commands run.
pub fn check_command_line(path: &str, source: &str) -> Vec<Finding> {
    if !path.starts_with("src/") || path.starts_with("src/cli/") {
        return Vec::new();
    }
    let outline = Outline::of(source);
    let named = outline.tokens.iter().enumerate();
    let named = named.filter(|(at, _)| outline.reads(*at, &["crate", ":", ":", "cli"]));
    let remedy = "src/cli/ reads the arguments and passes on what follows from them";
    named.map(|(_, t)| Finding::new(path, t.line, "the service names its command line", remedy)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::{graph, house, reach};

    fn in_pure_crate(path: &str) -> bool {
        graph::pure_dirs().any(|dir| path.starts_with(&format!("{dir}/src/")))
    }

    #[test]
    fn the_house_never_unwraps_outside_tests() {
        let sources = reach::production_sources();
        assert_clean(sources.iter().flat_map(|(path, text)| check_unwrap(path, text)).collect());
    }

    #[test]
    fn pure_crates_have_neither_clocks_nor_threads() {
        let sources = reach::production_sources();
        let pure: Vec<_> = sources.iter().filter(|(path, _)| in_pure_crate(path)).collect();
        assert!(pure.len() >= 4, "only {} pure sources were found", pure.len());
        assert_clean(pure.iter().flat_map(|(path, text)| check_pure(path, text)).collect());
    }

    #[test]
    fn pure_crates_are_no_std() {
        let roots = graph::pure_dirs().map(|dir| format!("{dir}/src/lib.rs"));
        assert_clean(
            roots.flat_map(|path| check_no_std(&path, &house::read(&path).unwrap_or_default())).collect(),
        );
    }

    #[test]
    fn only_the_command_line_names_the_simulator() {
        let sources = crate::reach::production_sources();
        assert_clean(sources.iter().flat_map(|(path, text)| check_simulator(path, text)).collect());
    }

    #[test]
    fn nothing_behind_the_command_line_names_it() {
        let sources = crate::reach::production_sources();
        assert_clean(sources.iter().flat_map(|(path, text)| check_command_line(path, text)).collect());
    }

    #[test]
    fn planted_command_line_behind_itself_is_caught() {
        let source = "use crate::cluster;\nuse crate::cli::engines::Engines;\n";
        assert_caught(&check_command_line("src/up.rs", source), 2, "its command line");
        assert_eq!(check_command_line("src/cli/up.rs", source), []);
        assert_eq!(check_command_line("src/main.rs", "mod cli;\nfn main() { cli::run() }"), []);
    }

    #[test]
    fn planted_unwrap_is_caught() {
        let source =
            "fn a() {\n    b().unwrap();\n    c.unwrap_or(1);\n    // d.unwrap()\n    \".unwrap()\";\n}\n";
        let found = check_unwrap("a.rs", source);
        assert_eq!(found.len(), 1);
        assert_caught(&found, 2, "unwrap");
        assert_caught(&check_unwrap("a.rs", "fn a() { x.map(Option::unwrap) }"), 1, "unwrap");
        assert_eq!(check_unwrap("a.rs", "#[cfg(test)]\nmod tests { fn a() { b().unwrap(); } }"), []);
    }

    #[test]
    fn planted_clock_thread_and_std_are_caught() {
        let source =
            "use x::Instant;\nfn a() {\n let t = Instant::now();\n std::time::SystemTime::UNIX_EPOCH;\n}\n";
        let found = check_pure("store/src/a.rs", source);
        assert_caught(&found, 3, "Instant::now");
        assert_caught(&found, 4, "SystemTime");
        assert_caught(&check_pure("a.rs", "fn a() { std::thread::spawn(b); }"), 1, "thread::");
        assert_caught(&check_pure("a.rs", "extern crate std;"), 1, "extern crate std");
        assert_eq!(
            check_pure("a.rs", "// Instant::now\n#[cfg(test)]\nextern crate std;\nfn thread(x: Thread) {}"),
            []
        );
    }

    #[test]
    fn planted_crate_with_std_is_caught() {
        assert_caught(
            &check_no_std("store/src/lib.rs", "//! #![no_std]\n// #![no_std]\nmod a;"),
            1,
            "no_std",
        );
        assert_caught(&check_no_std("a.rs", "#![cfg_attr(not(test), no_std)]"), 1, "no_std");
        assert_eq!(check_no_std("a.rs", "//! Doc.\n#![warn(x)]\n#![no_std]\n"), []);
    }

    #[test]
    fn planted_simulator_on_the_serving_path_is_caught() {
        let source = "//! baton_sim is fine in words.\nuse baton_sim::Run;\n";
        assert_caught(&check_simulator("src/conductor/driver.rs", source), 2, "baton_sim");
        assert_caught(&check_simulator("src/main.rs", source), 2, "serving path");
        assert_eq!(check_simulator("src/cli/replay.rs", source), []);
        assert_eq!(check_simulator("sim/src/lib.rs", source), []);
    }
}
