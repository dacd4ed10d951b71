//! Which crate may import what: the crate table of the design, over `cargo metadata`.

use crate::finding::Finding;
use crate::house::{Crate, list, text};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Crates from outside the workspace that a crate may use.
pub enum OutsideRule {
    /// These and no others, at most [`PURE_OUTSIDE_MAX`] of them: a pure crate.
    Only(&'static [&'static str]),
    /// Anything but these, however far down the graph.
    Without(&'static [&'static str]),
    /// Any crate.
    Any,
}

/// One row of the table.
pub struct Row {
    /// Package name.
    pub name: &'static str,
    /// Its directory.
    pub dir: &'static str,
    /// The packages of ours that it may import.
    pub ours: &'static [&'static str],
    /// Crates from outside that it may import.
    pub outside: OutsideRule,
}

/// How many outside crates a pure crate may have.
pub const PURE_OUTSIDE_MAX: usize = 4;

const CORE: OutsideRule = OutsideRule::Only(&["serde", "schemars", "hashbrown", "libm", "thiserror"]);

/// The table. `baton-tiers` and `baton-transports` are rows that need not have a crate yet.
pub const TABLE: &[Row] = &[
    Row {
        name: "baton-types",
        dir: "scheduler/types",
        ours: &[],
        outside: OutsideRule::Only(&["serde", "schemars", "thiserror", "xxhash-rust"]),
    },
    Row { name: "baton-scheduler", dir: "scheduler", ours: &["baton-types"], outside: CORE },
    Row {
        name: "baton-legs",
        dir: "scheduler/legs",
        ours: &["baton-types", "baton-scheduler"],
        outside: CORE,
    },
    Row { name: "baton-store", dir: "store", ours: &["baton-types"], outside: CORE },
    Row { name: "baton-transfer", dir: "transfer", ours: &["baton-types"], outside: CORE },
    Row {
        name: "baton-tiers",
        dir: "store/tiers",
        ours: &["baton-types", "baton-store"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-objects",
        dir: "store/objects",
        ours: &["baton-types", "baton-tiers", "baton-http"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-transports",
        dir: "transfer/transports",
        ours: &["baton-types", "baton-transfer"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-traces",
        dir: "traces",
        ours: &["baton-types"],
        outside: OutsideRule::Without(&["tokio"]),
    },
    Row {
        name: "baton-sim",
        dir: "sim",
        ours: &[
            "baton-types",
            "baton-scheduler",
            "baton-legs",
            "baton-store",
            "baton-transfer",
            "baton-traces",
        ],
        outside: OutsideRule::Without(&["tokio"]),
    },
    Row {
        name: "baton-engine",
        dir: "src/engine",
        ours: &["baton-types"],
        outside: OutsideRule::Without(&["tokio"]),
    },
    Row { name: "baton-http", dir: "src/http", ours: &[], outside: OutsideRule::Any },
    Row {
        name: "baton-remote",
        dir: "src/remote",
        ours: &["baton-types", "baton-http"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-events",
        dir: "src/events",
        ours: &["baton-types", "baton-http"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-indexer",
        dir: "src/indexer",
        ours: &["baton-types", "baton-events", "baton-http"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-router",
        dir: "src/router",
        ours: &["baton-types", "baton-http"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-membership",
        dir: "src/membership",
        ours: &["baton-types", "baton-http"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-mooncake",
        dir: "src/mooncake",
        ours: &["baton-types", "baton-http"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton-fuzz",
        dir: "tests/fuzz",
        ours: &["baton-types"],
        outside: OutsideRule::Without(&["tokio"]),
    },
    Row { name: "baton-wire", dir: "src/wire", ours: &["baton-types"], outside: OutsideRule::Any },
    Row {
        name: "baton-python",
        dir: "src/python",
        ours: &["baton-transfer", "baton-objects", "baton-transports"],
        outside: OutsideRule::Any,
    },
    Row {
        name: "baton",
        dir: "",
        ours: &[
            "baton-types",
            "baton-scheduler",
            "baton-legs",
            "baton-store",
            "baton-transfer",
            "baton-tiers",
            "baton-objects",
            "baton-transports",
            "baton-traces",
            "baton-sim",
            "baton-engine",
            "baton-remote",
            "baton-events",
            "baton-http",
            "baton-indexer",
            "baton-router",
            "baton-membership",
            "baton-mooncake",
            "baton-wire",
        ],
        outside: OutsideRule::Any,
    },
];

/// The directories of the pure crates.
pub fn pure_dirs() -> impl Iterator<Item = &'static str> {
    TABLE.iter().filter(|row| matches!(row.outside, OutsideRule::Only(_))).map(|row| row.dir)
}

/// Every crate against its row.
pub fn check_crates(crates: &[Crate]) -> Vec<Finding> {
    let ours: BTreeSet<&str> = crates.iter().map(|c| c.name.as_str()).collect();
    let mut found = Vec::new();
    for one in crates {
        let manifest = format!("{}/Cargo.toml", one.dir);
        let at = |rule: String, remedy| Finding::new(manifest.trim_start_matches('/'), 0, rule, remedy);
        match TABLE.iter().find(|row| row.name == one.name) {
            Some(row) => {
                found.extend(check_row(one, row, &ours).into_iter().map(|(rule, remedy)| at(rule, remedy)))
            }
            None => found.push(at(
                format!("crate {} has no row in the crate table", one.name),
                "decide what it may import and add it to TABLE and to ARCHITECTURE.md",
            )),
        }
    }
    found
}

fn check_row(one: &Crate, row: &Row, ours: &BTreeSet<&str>) -> Vec<(String, &'static str)> {
    let mut found = Vec::new();
    if one.dir != row.dir {
        found.push((format!("{} lives in '{}', not in '{}'", one.name, one.dir, row.dir), "move it back"));
    }
    let (inside, outside): (Vec<&String>, Vec<&String>) =
        one.normal.iter().partition(|d| ours.contains(d.as_str()));
    for name in inside.into_iter().filter(|d| !row.ours.contains(&d.as_str())) {
        let rule = format!("{} imports {name}", one.name);
        found.push((rule, "let the two meet in src/ or sim/, or share a word through baton-types"));
    }
    let OutsideRule::Only(allowed) = &row.outside else { return found };
    for name in outside.iter().filter(|d| !allowed.contains(&d.as_str())) {
        let rule = format!("pure crate {} imports {name} (allowed: {})", one.name, allowed.join(", "));
        found.push((rule, "do it in the driver around the core, or in a few lines of our own"));
    }
    if outside.len() > PURE_OUTSIDE_MAX {
        let rule = format!(
            "pure crate {} has {} outside crates, at most {PURE_OUTSIDE_MAX}",
            one.name,
            outside.len()
        );
        found.push((rule, "drop one"));
    }
    found
}

/// Checks the crates that those with [`OutsideRule::Without`] reach through normal dependencies at any depth.
pub fn check_reach(resolved: &Value) -> Vec<Finding> {
    let graph = Graph::of(resolved);
    let mut found = Vec::new();
    for row in TABLE {
        let OutsideRule::Without(banned) = &row.outside else { continue };
        for (name, through) in graph.reachable(row.name) {
            if banned.contains(&name) {
                let rule = format!("{} reaches {name} through {through}", row.name);
                let remedy = "keep the runtime in the root package; simulated time has no use for it";
                found.push(Finding::new(&format!("{}/Cargo.toml", row.dir), 0, rule, remedy));
            }
        }
    }
    found
}

/// Normal edges between package ids.
struct Graph {
    names: BTreeMap<String, String>,
    edges: BTreeMap<String, Vec<String>>,
}

impl Graph {
    fn of(resolved: &Value) -> Self {
        let names = list(&resolved["packages"]).iter().map(|p| (text(&p["id"]), text(&p["name"]))).collect();
        let normal = |dep: &&Value| list(&dep["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
        let edges = list(&resolved["resolve"]["nodes"]).iter().map(|node| {
            let deps = list(&node["deps"]).iter().filter(normal).map(|dep| text(&dep["pkg"]));
            (text(&node["id"]), deps.collect())
        });
        Self { names, edges: edges.collect() }
    }

    /// Every package that `from` reaches, each with the package that names it.
    fn reachable(&self, from: &str) -> BTreeMap<&str, &str> {
        let mut open: Vec<&str> =
            self.names.iter().filter(|(_, name)| *name == from).map(|(id, _)| id.as_str()).collect();
        let mut seen: BTreeSet<&str> = open.iter().copied().collect();
        let mut found = BTreeMap::new();
        while let Some(id) = open.pop() {
            for to in self.edges.get(id).into_iter().flatten() {
                found.entry(self.names[to].as_str()).or_insert(self.names[id].as_str());
                if seen.insert(to) {
                    open.push(to);
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::house;
    use serde_json::json;

    fn planted(name: &str, dir: &str, normal: &[&str]) -> Vec<Finding> {
        let normal = normal.iter().map(|&d| d.to_owned()).collect();
        let one = Crate { name: name.into(), dir: dir.into(), normal, targets: Vec::new() };
        let other = Crate {
            name: "baton-store".into(),
            dir: "store".into(),
            normal: Vec::new(),
            targets: Vec::new(),
        };
        check_crates(&[one, other])
    }

    #[test]
    fn the_house_keeps_to_its_table() {
        assert_clean(check_crates(house::crates()));
    }

    #[test]
    fn simulator_and_traces_never_reach_a_runtime() {
        assert_clean(check_reach(house::resolved()));
    }

    #[test]
    fn the_graph_is_not_empty() {
        let reached = Graph::of(house::resolved());
        let names = reached.reachable("baton-sim");
        assert!(names.contains_key("baton-types") && names.contains_key("serde"), "{names:?}");
        assert!(!names.contains_key("proptest"), "dev-dependencies do not count");
    }

    #[test]
    fn planted_forbidden_edge_is_caught() {
        assert_eq!(planted("baton-scheduler", "scheduler", &["serde", "libm"]), []);
        assert_caught(&planted("baton-scheduler", "scheduler", &["baton-store"]), 0, "imports baton-store");
    }

    #[test]
    fn planted_outside_crate_in_a_pure_crate_is_caught() {
        assert_caught(&planted("baton-transfer", "transfer", &["rand"]), 0, "imports rand");
        assert_caught(&planted("baton-types", "scheduler/types", &["hashbrown"]), 0, "imports hashbrown");
        let five =
            planted("baton-scheduler", "scheduler", &["serde", "schemars", "hashbrown", "libm", "log"]);
        assert_caught(&five, 0, "5 outside crates");
    }

    #[test]
    fn planted_crate_without_a_row_or_in_another_place_is_caught() {
        assert_caught(&planted("baton-extra", "extra", &[]), 0, "no row");
        assert_caught(&planted("baton-transfer", "src/transfer", &[]), 0, "lives in");
    }

    #[test]
    fn planted_runtime_under_the_simulator_is_caught_however_deep() {
        let graph = |kind: Value| {
            json!({
                "packages": [{"id": "s", "name": "baton-sim"}, {"id": "m", "name": "middle"}, {"id": "t", "name": "tokio"}],
                "resolve": {"nodes": [
                    {"id": "s", "deps": [{"pkg": "m", "dep_kinds": [{"kind": null}]}]},
                    {"id": "m", "deps": [{"pkg": "t", "dep_kinds": [{"kind": kind}]}]},
                    {"id": "t", "deps": []}]}
            })
        };
        assert_caught(&check_reach(&graph(Value::Null)), 0, "reaches tokio through middle");
        assert_eq!(check_reach(&graph(json!("dev"))), []);
    }
}
