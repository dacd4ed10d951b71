//! The workspace as data: its files, its crates, its dependency graph.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The root of the workspace.
pub fn root() -> PathBuf {
    // Read when the test runs, so that a binary built elsewhere judges the tree it is started for.
    let at_run_time = std::env::var_os("CARGO_MANIFEST_DIR");
    at_run_time.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from)
}

/// Paths from the root of every file that git tracks or would track; without git, of every file.
pub fn files() -> &'static [String] {
    static FILES: OnceLock<Vec<String>> = OnceLock::new();
    FILES.get_or_init(|| {
        let mut found = git_files(&root()).unwrap_or_else(|| walk(&root(), ""));
        found.retain(|path| root().join(path).is_file());
        found.sort();
        assert!(
            found.iter().any(|path| path == "Cargo.toml"),
            "no Cargo.toml among the files of {}",
            root().display()
        );
        found
    })
}

fn git_files(root: &Path) -> Option<Vec<String>> {
    let listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let out = Command::new("git").arg("-C").arg(root).args(listing).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    out.status.success().then(|| text.split_terminator('\0').map(str::to_owned).collect())
}

fn walk(root: &Path, under: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root.join(under)).expect("a directory of the workspace can be listed");
    let mut found = Vec::new();
    for entry in entries.map(|e| e.expect("an entry of the workspace can be read")) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if under.is_empty() { name.clone() } else { format!("{under}/{name}") };
        if path == ".git" || path.starts_with("target") {
            continue;
        }
        if entry.path().is_dir() { found.extend(walk(root, &path)) } else { found.push(path) }
    }
    found
}

/// The text of a file of the workspace, if it is there.
pub fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(root().join(path)).ok()
}

/// Paths and texts of every Rust source.
pub fn sources() -> &'static [(String, String)] {
    static SOURCES: OnceLock<Vec<(String, String)>> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let rust = files().iter().filter(|path| path.ends_with(".rs"));
        rust.filter_map(|path| Some((path.clone(), read(path)?))).collect()
    })
}

/// One package of the workspace.
#[derive(Debug)]
pub struct Crate {
    /// Package name.
    pub name: String,
    /// Directory from the root, `""` for the root package.
    pub dir: String,
    /// Names of its normal dependencies (neither dev nor build), under their own names if renamed.
    pub normal: Vec<String>,
    /// Root source of each of its targets, from the workspace root, with the target's kind.
    pub targets: Vec<(String, String)>,
}

/// The packages of the workspace, as their manifests declare them.
pub fn crates() -> &'static [Crate] {
    static CRATES: OnceLock<Vec<Crate>> = OnceLock::new();
    CRATES.get_or_init(|| crates_of(&metadata(&["--no-deps"])))
}

/// The packages that a `cargo metadata --no-deps` document lists.
fn crates_of(document: &Value) -> Vec<Crate> {
    let top = format!("{}/", text(&document["workspace_root"]));
    let inside = |path: &Value| text(path).trim_start_matches(&top).to_owned();
    let packages = list(&document["packages"]).iter().map(|package| {
        let normal = list(&package["dependencies"]).iter().filter(|d| d["kind"].is_null());
        let targets = list(&package["targets"]).iter();
        Crate {
            name: text(&package["name"]),
            dir: inside(&package["manifest_path"])
                .trim_end_matches("Cargo.toml")
                .trim_end_matches('/')
                .to_owned(),
            normal: normal.map(|d| text(&d["name"])).collect(),
            targets: targets.map(|t| (inside(&t["src_path"]), text(&t["kind"][0]))).collect(),
        }
    });
    packages.collect()
}

/// The resolved graph of everything that this platform builds.
pub fn resolved() -> &'static Value {
    static RESOLVED: OnceLock<Value> = OnceLock::new();
    RESOLVED.get_or_init(|| metadata(&["--filter-platform", &host()]))
}

/// `cargo metadata`, off line; only if a package has never been fetched, with the network.
fn metadata(extra: &[&str]) -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let run = |mode: &[&str]| {
        let mut command = Command::new(&cargo);
        command
            .current_dir(root())
            .args(["metadata", "--format-version", "1", "--locked"])
            .args(mode)
            .args(extra);
        command.output().expect("cargo, which started this test, can be started")
    };
    let mut out = run(&["--offline"]);
    if !out.status.success() {
        out = run(&[]);
    }
    assert!(out.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("cargo metadata prints JSON")
}

/// The triple of this machine, as rustc names it.
fn host() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(rustc).arg("-vV").output().expect("rustc, which built this test, can be started");
    let version = String::from_utf8_lossy(&out.stdout).into_owned();
    let triple = version.lines().find_map(|line| line.strip_prefix("host: "));
    triple.expect("rustc -vV prints its host").to_owned()
}

/// The items of a JSON list; empty where it is anything else.
pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A JSON string; empty where it is anything else.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outline::Outline;

    #[test]
    fn the_workspace_is_seen_whole() {
        assert!(crates().iter().any(|c| c.name == "baton" && c.dir.is_empty()));
        assert!(crates().iter().any(|c| c.name == "baton-types" && c.dir == "scheduler/types"));
        assert!(sources().len() > 20, "only {} sources were found", sources().len());
        assert!(
            walk(&root(), "").contains(&"Cargo.toml".to_owned()),
            "the way without git sees the files too"
        );
    }

    #[test]
    fn the_scanner_reads_every_source_to_balanced_brackets() {
        for (path, source) in sources() {
            let outline = Outline::of(source);
            for (open, close) in [("(", ")"), ("[", "]"), ("{", "}")] {
                let count = |mark: &str| outline.tokens.iter().filter(|t| t.is(mark)).count();
                assert_eq!(
                    count(open),
                    count(close),
                    "{path}: the scanner lost its way between {open} and {close}"
                );
            }
        }
    }

    #[test]
    fn only_normal_dependencies_count_and_under_their_own_names() {
        let document = serde_json::json!({"workspace_root": "/w", "packages": [{
            "name": "a", "manifest_path": "/w/x/a/Cargo.toml",
            "dependencies": [
                {"name": "serde", "kind": null, "rename": "words"},
                {"name": "proptest", "kind": "dev"}, {"name": "cc", "kind": "build"}],
            "targets": [{"kind": ["lib"], "src_path": "/w/x/a/src/lib.rs"}]}]});
        let crates = crates_of(&document);
        assert_eq!(
            (crates[0].dir.as_str(), crates[0].normal.as_slice()),
            ("x/a", ["serde".to_owned()].as_slice())
        );
        assert_eq!(crates[0].targets, [("x/a/src/lib.rs".to_owned(), "lib".to_owned())]);
    }
}
