//! Nothing unreached: what production code declares `pub` is named by code that a binary or a shipped library comes to.
//!
//! The search starts at `main`, at functions called by Python and C, and at macros between items. From there every
//! mentioned name reaches all items of that name in its own crate and in those that it depends on. Names are not
//! resolved: two functions of one name are reached together. So the search never reports a used item, and it misses
//! some unused ones. The compiler finds unused items that are not `pub`.

use crate::declared::{ItemList, Names};
use crate::finding::Finding;
use crate::house::Crate;
use crate::outline::Outline;
use std::collections::{BTreeMap, BTreeSet};

/// A place of the workspace, a name there, and why it may stay although nothing comes to it.
type AllowedItem = (&'static str, &'static str, &'static str);

/// Items that only tests, benchmarks and examples reach, and that cannot be declared for them alone, because those
/// are crates of their own.
const ALLOWED: &[AllowedItem] = &[
    ("sim/src/world.rs", "inject", "tests put single faults at chosen times"),
    ("sim/src/world.rs", "orders_digest", "tests compare whole runs by it (I10)"),
    ("sim/src/oracle.rs", "orders_digest", "what the world's digest is read from"),
    ("src/membership/src/directory.rs", "read_once", "tests wait for a source's first answer"),
    ("src/membership/src/etcd/keys.rs", "compact", "tests of what follows when an operator compacts etcd"),
    ("store/objects/src/clock.rs", "manual", "tests move the time"),
    ("store/objects/src/store.rs", "tenant_used_bytes", "tests look at quotas while other threads write"),
    ("store/objects/src/store.rs", "unpin", "tests take back the pins that `baton bench` only sets"),
    ("store/tiers/src/cache.rs", "is_busy", "tests and the benchmark wait until a cache has come to rest"),
    (
        "transfer/transports/src/mover/rdma/mod.rs",
        "open_to_peers",
        "tests look whether windows and paths are gone",
    ),
];

/// The crates, which of them each can name, and the sources of each.
struct House<'a> {
    /// By crate, itself and all that it depends on, however far down.
    sees: Vec<BTreeSet<usize>>,
    /// By crate, path and declarations.
    declared: Vec<(usize, &'a str, ItemList<'a>)>,
}

impl<'a> House<'a> {
    fn of(crates: &[Crate], sources: &'a [(String, String)]) -> Self {
        let declared = sources.iter().filter_map(|(path, text)| {
            let inside =
                |one: &&(usize, &Crate)| one.1.dir.is_empty() || path.starts_with(&format!("{}/", one.1.dir));
            let all: Vec<_> = crates.iter().enumerate().collect();
            let (owner, _) = *all.iter().filter(inside).max_by_key(|(_, one)| one.dir.len())?;
            Some((owner, path.as_str(), ItemList::of(&Outline::of(text))))
        });
        Self { sees: (0..crates.len()).map(|one| reach(crates, one)).collect(), declared: declared.collect() }
    }
}

/// A crate and all that it depends on.
fn reach(crates: &[Crate], from: usize) -> BTreeSet<usize> {
    let (mut seen, mut open) = (BTreeSet::from([from]), vec![from]);
    while let Some(one) = open.pop() {
        let deps = crates[one].normal.iter().filter_map(|name| crates.iter().position(|c| c.name == *name));
        open.extend(deps.filter(|dep| seen.insert(*dep)));
    }
    seen
}

/// The target of a name: the crate that declares it, its place in the crate's source, the names that it mentions.
struct Lead<'h, 'a> {
    owner: usize,
    item: Option<(&'a str, usize)>,
    mentions: &'h Names<'a>,
}

/// Path and line of every item that is reached.
fn reached<'a>(house: &House<'a>) -> BTreeSet<(&'a str, usize)> {
    let types: BTreeSet<&str> = house
        .declared
        .iter()
        .flat_map(|(_, _, one)| &one.items)
        .filter(|i| i.is_type)
        .map(|i| i.name)
        .collect();
    let mut leads: BTreeMap<&str, Vec<Lead<'_, 'a>>> = BTreeMap::new();
    let mut open: Vec<(usize, &str)> = Vec::new();
    for (owner, path, one) in &house.declared {
        let owner = *owner;
        open.extend(one.roots.iter().map(|name| (owner, *name)));
        for item in &one.items {
            let lead = Lead { owner, item: Some((path, item.line)), mentions: &item.mentions };
            leads.entry(item.name).or_default().push(lead);
        }
        for of_trait in &one.of_traits {
            // It comes with its type; of a type from outside, with its trait; of both from outside, always.
            match of_trait.of.iter().find(|word| types.contains(**word)) {
                Some(name) => leads.entry(name).or_default().push(Lead {
                    owner,
                    item: None,
                    mentions: &of_trait.mentions,
                }),
                None => open.extend(of_trait.mentions.iter().map(|name| (owner, *name))),
            }
        }
    }
    let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
    while let Some((by, name)) = open.pop() {
        if !seen.insert((by, name)) {
            continue;
        }
        for lead in leads.get(name).into_iter().flatten() {
            let known = house.sees[by].contains(&lead.owner);
            // A crate above may implement a trait of one below for a type of its own.
            if known || lead.item.is_none() && house.sees[lead.owner].contains(&by) {
                found.extend(lead.item);
                open.extend(lead.mentions.iter().map(|name| (lead.owner, *name)));
            }
        }
    }
    found
}

/// Public items that nothing reaches, and permissions that are not needed.
pub fn check_reached(
    crates: &[Crate],
    sources: &[(String, String)],
    allowed: &[AllowedItem],
) -> Vec<Finding> {
    let house = House::of(crates, sources);
    let reached = reached(&house);
    let (mut found, mut used) = (Vec::new(), BTreeSet::new());
    for (_, path, one) in &house.declared {
        let dead = one.items.iter().filter(|item| item.public && !reached.contains(&(*path, item.line)));
        for item in dead {
            if !used.contains(&(*path, item.name)) && allowed.iter().any(|a| (a.0, a.1) == (*path, item.name))
            {
                used.insert((*path, item.name));
                continue;
            }
            let rule = format!("no production code comes to {}", item.name);
            let remedy =
                "delete it, give it to the tests that use it, or allow it in unreached.rs with a reason";
            found.push(Finding::new(path, item.line, rule, remedy));
        }
    }
    let idle = allowed.iter().filter(|(path, name, _)| !used.contains(&(*path, *name)));
    found.extend(idle.map(|(path, name, _)| {
        Finding::new(
            path,
            0,
            format!("{name} is reached, or not there"),
            "take it off ALLOWED in unreached.rs",
        )
    }));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::{house, reach};

    /// Two crates: a library, and a binary above it.
    fn judge(library: &str, binary: &str, allowed: &[AllowedItem]) -> Vec<Finding> {
        let krate = |name: &str, normal: &[&str]| Crate {
            name: name.into(),
            dir: name.into(),
            normal: normal.iter().map(|&n| n.to_owned()).collect(),
            targets: Vec::new(),
        };
        let sources = [("low/src/lib.rs", library), ("top/src/main.rs", binary)];
        let sources = sources.map(|(path, text)| (path.to_owned(), text.to_owned()));
        check_reached(&[krate("low", &[]), krate("top", &["low"])], &sources, allowed)
    }

    #[test]
    fn the_house_declares_nothing_that_nothing_comes_to() {
        let sources: Vec<_> = reach::production_sources();
        let shipped: Vec<_> = sources.into_iter().filter(|(path, _)| !path.starts_with("tests/")).collect();
        assert!(shipped.len() > 500, "only {} sources were found", shipped.len());
        assert_clean(check_reached(house::crates(), &shipped, ALLOWED));
    }

    #[test]
    fn planted_function_that_nothing_calls_is_caught() {
        let library = "pub fn used() {}\npub fn idle() { used() }\n#[cfg(test)]\nmod tests { fn a() { super::idle(); } }";
        let found = judge(library, "use low::idle;\npub use low::idle as _;\nfn main() { low::used() }", &[]);
        assert_caught(&found, 2, "idle");
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn what_only_the_unreached_name_is_unreached_too() {
        let library = "pub struct Idle;\nimpl Idle {\n pub fn begin() -> Self { helper(); Idle }\n}\n\
                       impl Drop for Idle {\n fn drop(&mut self) { last() }\n}\npub fn helper() {}\npub fn last() {}\n";
        let lines: Vec<usize> = judge(library, "fn main() {}", &[]).iter().map(|found| found.line).collect();
        assert_eq!(lines, [1, 3, 8, 9]);
        assert_eq!(judge(library, "fn main() { low::Idle::begin(); }", &[]), []);
    }

    #[test]
    fn a_name_counts_only_in_crates_that_can_mean_it() {
        let binary = "fn main() { low::a(); }\npub fn idle() {}";
        assert_caught(&judge("pub fn a() { idle() }\nfn idle() {}", binary, &[]), 2, "idle");
    }

    #[test]
    fn what_attributes_formats_and_other_names_mean_is_reached() {
        let library = "pub const WIDE: u8 = 1;\npub fn full() -> u8 { 2 }\npub fn other() {}\n\
                       #[derive(Deserialize)]\npub struct Read {\n #[serde(default = \"low::full\")]\n field: u8,\n}\n\
                       #[cfg(feature = \"testing\")]\npub fn of_tests() {}\nmacro_rules! make { () => { third() } }\n\
                       pub fn third() {}\nmake!();\n#[unsafe(no_mangle)]\npub extern \"C\" fn called() {}\n";
        let binary = "use low::other as another;\nfn main() { another(); format!(\"{WIDE}\"); low::Read { field: 1 }; }";
        assert_eq!(judge(library, binary, &[]), []);
    }

    #[test]
    fn planted_permission_that_nobody_needs_is_caught() {
        let (library, binary) = ("pub fn idle() {}", "fn main() {}");
        assert_eq!(judge(library, binary, &[("low/src/lib.rs", "idle", "a test's")]), []);
        let gone = [("low/src/lib.rs", "idle", "a test's"), ("low/src/lib.rs", "gone", "a test's")];
        assert_caught(&judge(library, binary, &gone), 0, "gone");
    }
}
