//! Which sources are compiled: every Rust file hangs on a module declaration under some target.

use crate::finding::Finding;
use crate::house::{self, Crate};
use crate::outline::{Module, Outline};
use std::collections::BTreeMap;

/// The purpose of a compiled source. The outline of a production source marks its test code, not this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// Library, binary or build script.
    Production,
    /// Integration test, or a module that only tests compile.
    Test,
    /// A benchmark.
    Bench,
    /// An example.
    Example,
}

/// A source to visit: its path, what it is for, and whether its submodules stand beside it.
type Visit = (String, Purpose, bool);

/// Every source that the targets of `crates` reach, with its purpose; production wins where there are several.
pub fn reached(crates: &[Crate], sources: &BTreeMap<String, String>) -> BTreeMap<String, Purpose> {
    let targets = crates.iter().flat_map(|c| &c.targets);
    let mut open: Vec<Visit> = targets.map(|(path, kind)| (path.clone(), purpose_of(kind), true)).collect();
    let mut found: BTreeMap<String, Purpose> = BTreeMap::new();
    while let Some((path, purpose, beside)) = open.pop() {
        let Some(source) = sources.get(&path) else { continue };
        if found.get(&path).is_some_and(|known| *known <= purpose) {
            continue;
        }
        found.insert(path.clone(), purpose);
        for module in Outline::of(source).modules() {
            let purpose = if module.test { purpose.max(Purpose::Test) } else { purpose };
            open.extend(places(&path, beside, &module).map(|(place, beside)| (place, purpose, beside)));
        }
    }
    found
}

fn purpose_of(kind: &str) -> Purpose {
    match kind {
        "test" => Purpose::Test,
        "bench" => Purpose::Bench,
        "example" => Purpose::Example,
        _ => Purpose::Production,
    }
}

/// Where the file of `module`, declared in `path`, may be, and whether its own submodules stand beside it.
fn places(path: &str, beside: bool, module: &Module) -> impl Iterator<Item = (String, bool)> + use<> {
    let (dir, file) = path.rsplit_once('/').unwrap_or(("", path));
    let mut base: Vec<&str> = dir.split('/').filter(|part| !part.is_empty()).collect();
    if !beside && (module.path.is_none() || !module.inside.is_empty()) {
        base.push(file.trim_end_matches(".rs"));
    }
    base.extend(module.inside.iter().map(String::as_str));
    let at = |tail: &str| base.iter().copied().chain([tail]).collect::<Vec<_>>().join("/");
    match &module.path {
        Some(given) => vec![(at(given), true)],
        None => {
            vec![(at(&format!("{}.rs", module.name)), false), (at(&format!("{}/mod.rs", module.name)), true)]
        }
    }
    .into_iter()
}

/// Sources that no target reaches.
pub fn check_reached(crates: &[Crate], sources: &BTreeMap<String, String>) -> Vec<Finding> {
    let live = reached(crates, sources);
    let dead = sources.keys().filter(|path| !live.contains_key(*path));
    let remedy = "declare it as a module of its crate, or delete it";
    dead.map(|path| Finding::new(path, 0, "no target compiles this file", remedy)).collect()
}

/// The sources of the house by path.
pub fn house_sources() -> BTreeMap<String, String> {
    house::sources().iter().cloned().collect()
}

/// The sources of the house that end up in a library or binary.
pub fn production_sources() -> Vec<(String, String)> {
    let sources = house_sources();
    let purposes = reached(house::crates(), &sources);
    sources.into_iter().filter(|(path, _)| purposes.get(path) == Some(&Purpose::Production)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};

    fn planted(files: &[(&str, &str)]) -> (Vec<Crate>, BTreeMap<String, String>) {
        let targets = [("a/src/lib.rs", "lib"), ("a/tests/it/main.rs", "test"), ("a/benches/b.rs", "bench")];
        let targets = targets.map(|(path, kind)| (path.to_owned(), kind.to_owned())).to_vec();
        let one = Crate { name: "a".into(), dir: "a".into(), normal: Vec::new(), targets };
        let sources = files.iter().map(|&(path, text)| (path.to_owned(), text.to_owned()));
        (vec![one], sources.collect())
    }

    #[test]
    fn the_house_has_no_dead_file() {
        assert_clean(check_reached(house::crates(), &house_sources()));
    }

    #[test]
    fn modules_are_found_where_the_language_puts_them() {
        let (crates, sources) = planted(&[
            (
                "a/src/lib.rs",
                "mod b; mod d; #[cfg(test)] mod probe; #[path = \"odd/x.rs\"] mod x; mod in_ { mod e; }",
            ),
            ("a/src/b.rs", "mod c;"),
            ("a/src/b/c.rs", ""),
            ("a/src/d/mod.rs", "mod f;"),
            ("a/src/d/f.rs", ""),
            ("a/src/in_/e.rs", ""),
            ("a/src/odd/x.rs", "mod y;"),
            ("a/src/odd/y.rs", ""),
            ("a/src/probe.rs", "mod deep;"),
            ("a/src/probe/deep.rs", ""),
            ("a/tests/it/main.rs", "mod cli;"),
            ("a/tests/it/cli.rs", ""),
        ]);
        assert_eq!(check_reached(&crates, &sources), []);
        let purposes = reached(&crates, &sources);
        assert_eq!(purposes["a/src/b/c.rs"], Purpose::Production);
        assert_eq!(purposes["a/src/probe/deep.rs"], Purpose::Test);
        assert_eq!(purposes["a/tests/it/cli.rs"], Purpose::Test);
    }

    #[test]
    fn planted_dead_file_is_caught() {
        let (crates, sources) =
            planted(&[("a/src/lib.rs", "// mod b;\nmod c;"), ("a/src/b.rs", ""), ("a/src/c.rs", "")]);
        let found = check_reached(&crates, &sources);
        assert_eq!(found.len(), 1);
        assert_caught(&found, 0, "a/src/b.rs");
    }

    #[test]
    fn a_file_that_production_and_a_test_share_is_production() {
        let shared = "#[path = \"../../src/c.rs\"] mod c;";
        let (crates, sources) =
            planted(&[("a/src/lib.rs", "mod c;"), ("a/src/c.rs", ""), ("a/tests/it/main.rs", shared)]);
        assert_eq!(reached(&crates, &sources)["a/src/c.rs"], Purpose::Production);
    }
}
