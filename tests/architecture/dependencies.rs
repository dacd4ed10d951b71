//! Every dependency is used where it is declared: by production code, by a build script, or by tests.

use crate::finding::Finding;
use crate::house::{list, text};
use crate::lex::Kind;
use crate::outline::Outline;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Crates that generated code names: a crate that includes such code may depend on them without naming them itself.
const GENERATED: &[&str] = &["prost", "tonic_prost"];

/// The words of a crate's sources.
#[derive(Default)]
struct Words<'a> {
    production: BTreeSet<&'a str>,
    build: BTreeSet<&'a str>,
    all: BTreeSet<&'a str>,
}

/// A dependency as a manifest declares it.
struct Dependency {
    /// Its name in sources.
    name: String,
    kind: Option<String>,
    optional: bool,
}

/// Dependencies of the packages in a `cargo metadata` document that their sources do not name. `production` says which
/// sources end up in a library or binary.
pub fn check_used(
    document: &Value,
    sources: &[(String, String)],
    production: &dyn Fn(&str) -> bool,
) -> Vec<Finding> {
    let names = names(document);
    let ours: Vec<(String, &Value)> = packages(document);
    let mut words: BTreeMap<&str, Words<'_>> = BTreeMap::new();
    for (path, source) in sources {
        let holds = |dir: &str| dir.is_empty() || path.starts_with(&format!("{dir}/"));
        let owner = ours.iter().map(|(dir, _)| dir).filter(|dir| holds(dir)).max_by_key(|dir| dir.len());
        if let Some(owner) = owner {
            count(words.entry(owner).or_default(), path, source, production(path));
        }
    }
    let none = Words::default();
    ours.iter()
        .flat_map(|(dir, package)| {
            let words = words.get(dir.as_str()).unwrap_or(&none);
            list(&package["dependencies"])
                .iter()
                .filter_map(|one| judge(dir, &dependency(one, &names), words))
        })
        .collect()
}

/// Directory and description of every package of the workspace.
fn packages(document: &Value) -> Vec<(String, &Value)> {
    let top = format!("{}/", text(&document["workspace_root"]));
    let ours = list(&document["packages"]).iter().filter(|package| package["source"].is_null());
    let dir = |package: &Value| {
        let manifest = text(&package["manifest_path"]);
        manifest.trim_start_matches(&top).trim_end_matches("Cargo.toml").trim_end_matches('/').to_owned()
    };
    ours.map(|package| (dir(package), package)).collect()
}

/// The names by which sources call the packages: those of the library targets.
fn names(document: &Value) -> BTreeMap<String, String> {
    let library = |package: &Value| {
        let is_library = |target: &&Value| {
            list(&target["kind"]).iter().any(|kind| text(kind).ends_with("lib") || text(kind) == "proc-macro")
        };
        let found = list(&package["targets"]).iter().find(is_library).map(|target| text(&target["name"]));
        Some((text(&package["name"]), found?.replace('-', "_")))
    };
    list(&document["packages"]).iter().filter_map(library).collect()
}

fn dependency(one: &Value, names: &BTreeMap<String, String>) -> Dependency {
    let package = text(&one["name"]);
    let renamed = one["rename"].as_str().map(str::to_owned);
    let name = renamed.or_else(|| names.get(&package).cloned()).unwrap_or(package);
    let kind = one["kind"].as_str().map(str::to_owned);
    Dependency { name: name.replace('-', "_"), kind, optional: one["optional"] == true }
}

fn count<'a>(words: &mut Words<'a>, path: &str, source: &'a str, production: bool) {
    let outline = Outline::of(source);
    for (at, token) in outline.tokens.iter().enumerate().filter(|(_, token)| token.kind == Kind::Word) {
        words.all.insert(token.text);
        if path.ends_with("build.rs") {
            words.build.insert(token.text);
        } else if production && !outline.is_test(at) {
            words.production.insert(token.text);
        }
    }
}

fn judge(dir: &str, one: &Dependency, words: &Words<'_>) -> Option<Finding> {
    let name = one.name.as_str();
    let generated = GENERATED.contains(&name) && words.production.contains("include_proto");
    let (used, place) = match one.kind.as_deref() {
        // A feature may turn on a dependency for tests of other crates.
        None if one.optional => (words.all.contains(name), "source"),
        None => (generated || words.production.contains(name), "production code"),
        Some("build") => (words.build.contains(name), "build script"),
        _ => (words.all.contains(name), "source"),
    };
    let remedy = if words.all.contains(name) {
        "move it to the dependencies of what names it"
    } else {
        "take it out of the manifest"
    };
    let manifest = format!("{dir}/Cargo.toml");
    let rule = format!("no {place} of this crate names {name}");
    (!used).then(|| Finding::new(manifest.trim_start_matches('/'), 0, rule, remedy))
}

/// Versions that the workspace's manifest gives for what no member has.
pub fn check_members(manifest: &str, document: &Value) -> Vec<Finding> {
    let manifest: toml::Table = manifest.parse().expect("cargo has read it");
    let ours = packages(document);
    let dependencies = ours.iter().flat_map(|(_, package)| list(&package["dependencies"]));
    let had: BTreeSet<String> = dependencies.map(|one| text(&one["name"])).collect();
    let given = manifest["workspace"]["dependencies"].as_table().into_iter().flatten();
    let package = |name: &str, one: &toml::Value| {
        one.get("package").and_then(toml::Value::as_str).unwrap_or(name).to_owned()
    };
    let idle = given.filter(|(name, one)| !had.contains(&package(name, one)));
    idle.map(|(name, _)| {
        let rule = format!("no member of the workspace depends on {name}");
        Finding::new("Cargo.toml", 0, rule, "take it out of the manifest")
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::reach::Purpose;
    use crate::{house, reach};
    use serde_json::json;

    #[test]
    fn the_house_names_every_dependency_that_it_has() {
        let sources = reach::house_sources();
        let purposes = reach::reached(house::crates(), &sources);
        let production = |path: &str| purposes.get(path) == Some(&Purpose::Production);
        let document = house::resolved();
        assert!(packages(document).len() > 10, "the workspace is suspiciously small");
        let mut found = check_used(document, house::sources(), &production);
        found.extend(check_members(&house::read("Cargo.toml").expect("it is there"), document));
        assert_clean(found);
    }

    fn planted(dependencies: &Value) -> Value {
        json!({"workspace_root": "/w", "packages": [
            {"name": "a", "source": null, "manifest_path": "/w/a/Cargo.toml", "dependencies": dependencies},
            {"name": "md-5", "source": "registry", "targets": [{"name": "md5", "kind": ["lib"]}]}]})
    }

    fn judged(dependencies: &Value, sources: &[(&str, &str)]) -> Vec<Finding> {
        let sources: Vec<_> =
            sources.iter().map(|&(path, text)| (path.to_owned(), text.to_owned())).collect();
        check_used(&planted(dependencies), &sources, &|path| path.starts_with("a/src/"))
    }

    #[test]
    fn planted_dependency_that_nobody_names_is_caught() {
        let found = judged(
            &json!([{"name": "idle-one", "kind": null}]),
            &[("a/src/lib.rs", "// idle_one\nfn a() {}")],
        );
        assert_caught(&found, 0, "idle_one; take it out");
        assert_caught(&judged(&json!([{"name": "idle", "kind": "dev"}]), &[]), 0, "no source");
        let build = json!([{"name": "maker", "kind": "build"}]);
        assert_caught(&judged(&build, &[("a/src/lib.rs", "use maker::a;")]), 0, "no build script");
        assert_eq!(judged(&build, &[("a/build.rs", "use maker::a;")]), []);
    }

    #[test]
    fn planted_dependency_of_tests_alone_is_caught() {
        let dependencies = json!([{"name": "serde", "kind": null}]);
        let source = "#[cfg(test)]\nmod tests { use serde::X; }";
        assert_caught(&judged(&dependencies, &[("a/src/lib.rs", source)]), 0, "serde; move it");
        assert_caught(&judged(&dependencies, &[("a/tests/it.rs", "use serde::X;")]), 0, "serde; move it");
        assert_eq!(judged(&dependencies, &[("a/src/lib.rs", "use serde::X;")]), []);
    }

    #[test]
    fn names_are_those_that_sources_use() {
        let dependencies =
            json!([{"name": "md-5", "kind": null}, {"name": "long", "rename": "short", "kind": null}]);
        assert_eq!(judged(&dependencies, &[("a/src/lib.rs", "use md5::A; use short::B;")]), []);
        let generated = json!([{"name": "prost", "kind": null}]);
        assert_eq!(judged(&generated, &[("a/src/lib.rs", "tonic::include_proto!(\"a\");")]), []);
        assert_caught(&judged(&generated, &[("a/src/lib.rs", "")]), 0, "prost");
    }

    #[test]
    fn planted_version_for_nobody_is_caught() {
        let document = planted(&json!([{"name": "serde", "kind": null}]));
        let manifest = "[workspace.dependencies]\nserde = \"1\"\nidle = \"2\"\n";
        let found = check_members(manifest, &document);
        assert_caught(&found, 0, "idle");
        assert_eq!(found.len(), 1);
    }
}
